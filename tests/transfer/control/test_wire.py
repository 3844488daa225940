"""The server spoken to without this package: a raw DEALER socket and the msgpack package."""

import dataclasses
import inspect
import threading
from collections.abc import Iterator
from typing import Any, get_args, get_type_hints

import msgspec
import pytest
import zmq

from tests.support.control.samples import ENGINE, Handler, pack, unpack
from tests.support.waiting import until
from transfer.control.messages import MAX_REQUEST_BYTES, PROTOCOL_VERSION, Error, ErrorCode, Reply, Request
from transfer.control.server import ControlServer


class Stranger:
    """Sends frames as they are and reads what comes back."""

    def __init__(self, port: int) -> None:
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.socket = self.context.socket(zmq.DEALER)
        self.socket.setsockopt(zmq.RCVTIMEO, 3000)
        self.socket.connect(f"tcp://127.0.0.1:{port}")

    def ask(self, *frames: bytes) -> Any:
        self.socket.send_multipart(frames)
        return unpack(self.socket.recv())

    def close(self) -> None:
        self.context.destroy(linger=0)


@pytest.fixture
def stranger(server: ControlServer) -> Iterator[Stranger]:
    stranger = Stranger(server.port)
    yield stranger
    stranger.close()


#: Of each structure on the wire, its fields in this version of the protocol.
FIELDS = {
    "CacheGroup": "block_tokens window planes chunk seen_tokens states",
    "Cancel": "engine_id lease_ids transfer_ids",
    "Cancelled": "",
    "Checksummed": "sums reason",
    "Checksums": "engine_id lease_id worker group borders",
    "Error": "code message",
    "Find": "engine_id find_id hashing hash_tokens hashes least_tokens unit_tokens",
    "Follow": "engine_id transfer_id attempt tokens state wait_s host_tokens",
    "Followed": (
        "engine_id state lease_id lease_ttl_s attempt prompt_tokens prompt_digest block_sizes tokens "
        "block_ids first_blocks reason in_host layers first_tokens adapter_digest media_digest"
    ),
    "Found": "engine_id hashing hash_tokens reason lease_id lease_ttl_s tokens block_ids block_sizes layers",
    "Hello": "engine_id",
    "Identity": "address nonce",
    "LayerNumbers": "name layers numbers width",
    "Locate": "engine_id lease_id",
    "Located": "place slots reason",
    "ModelIdentity": (
        "architecture config_digest weights_digest layers kv_heads head_size model_dtype cache_dtype numbers "
        "draft_digest"
    ),
    "Plane": (
        "part layers head_start heads block_tokens content item_size blocks address layer_stride block_stride "
        "head_stride token_stride content_stride packing total_heads optional dtype tokens_per_row tokens"
    ),
    "Region": "address size",
    "Release": "engine_id lease_id reader readers pull_id contents place prefixes_at",
    "Released": "valid reason",
    "Renew": "engine_id lease_ids reading",
    "Renewed": "valid",
    "SlotRange": "first_token end_token first_blocks slots",
    "TokenSplit": "interleave ranks rank",
    "Welcome": "engine_id model workers verify host_workers locates max_model_len",
    "WorkerGeometry": (
        "tp_rank tp_size pp_rank pp_size engine_address groups regions transport identity pcp_rank pcp_size "
        "same_host_address"
    ),
}
HELLO = pack([PROTOCOL_VERSION, 11, {"type": "hello", "engine_id": ENGINE}])


def test_hello_is_answered_with_the_geometry_of_all_workers(stranger: Stranger) -> None:
    version, message_id, body = stranger.ask(HELLO)
    assert (version, message_id, body["type"]) == (PROTOCOL_VERSION, 11, "welcome")
    assert [worker["tp_rank"] for worker in body["workers"]] == [0, 1]
    assert body["workers"][1]["groups"][0]["planes"][0]["layers"] == ["layers.0", "layers.1"]
    assert body["model"]["architecture"] == "LlamaForCausalLM"


@pytest.mark.parametrize(
    ("body", "answer"),
    [
        (
            {"type": "renew", "engine_id": ENGINE, "lease_ids": ["a", "b"]},
            {"type": "renewed", "valid": ["a", "b"]},
        ),
        (
            {
                "type": "release",
                "engine_id": ENGINE,
                "lease_id": "a",
                "reader": 0,
                "readers": 1,
                "pull_id": "p",
                "contents": "c0ffee",
            },
            {"type": "released", "valid": True, "reason": ""},
        ),
        ({"type": "cancel", "engine_id": ENGINE, "lease_ids": ["a"]}, {"type": "cancelled"}),
        (
            {
                "type": "checksums",
                "engine_id": ENGINE,
                "lease_id": "a",
                "worker": 0,
                "group": 0,
                "borders": [0, 16, 32],
            },
            {"type": "checksummed", "sums": [1, 1], "reason": ""},
        ),
    ],
    ids=["renew", "release", "cancel", "checksums"],
)
def test_lease_messages_are_answered(stranger: Stranger, body: dict[str, Any], answer: dict[str, Any]) -> None:
    assert stranger.ask(pack([PROTOCOL_VERSION, 12, body])) == [PROTOCOL_VERSION, 12, answer]


def test_another_version_is_answered_with_both_versions(stranger: Stranger, server: ControlServer) -> None:
    _, message_id, body = stranger.ask(pack([PROTOCOL_VERSION + 1, 13, ["whatever"]]))
    assert (message_id, body["type"], body["code"]) == (13, "error", "version")
    assert body["message"].startswith(f"protocol version {PROTOCOL_VERSION + 1}; this side speaks {PROTOCOL_VERSION}: ")
    assert server.counters.wrong_version == 1


def test_a_bad_body_is_answered_where_the_message_id_is_readable(stranger: Stranger, server: ControlServer) -> None:
    _, message_id, body = stranger.ask(pack([PROTOCOL_VERSION, 14, {"type": "steal"}]))
    assert (message_id, body["code"]) == (14, "malformed")
    assert "steal" in body["message"]
    assert server.counters.malformed == 1


def test_unreadable_frames_are_dropped_and_counted(stranger: Stranger, server: ControlServer) -> None:
    for frame in (b"", b"\xc1", HELLO[:-2]):
        stranger.socket.send(frame)
    assert stranger.ask(HELLO)[1] == 11  # the first answer is to the first frame that could be answered
    assert server.counters.malformed == 3


def test_an_empty_delimiter_as_req_sockets_send_it_is_refused(stranger: Stranger, server: ControlServer) -> None:
    _, message_id, body = stranger.ask(b"", HELLO)
    assert (message_id, body["code"]) == (11, "malformed")
    assert "DEALER" in body["message"]
    assert server.counters.wrong_frames == 1


def test_too_large_a_request_is_answered(stranger: Stranger, server: ControlServer) -> None:
    body = {"type": "hello", "engine_id": "e" * MAX_REQUEST_BYTES}
    _, message_id, answer = stranger.ask(pack([PROTOCOL_VERSION, 15, body]))
    assert (message_id, answer["code"]) == (15, "malformed")
    assert str(MAX_REQUEST_BYTES) in answer["message"]
    assert server.counters.oversized == 1


def test_a_request_of_many_megabytes_is_not_even_read(stranger: Stranger, server: ControlServer) -> None:
    stranger.socket.send(b"\0" * (8 * MAX_REQUEST_BYTES))
    second = Stranger(server.port)
    assert second.ask(HELLO)[1] == 11
    second.close()
    assert (server.counters.oversized, server.counters.malformed) == (0, 0)


def test_a_repeated_request_reaches_the_handler_and_is_answered_each_time(stranger: Stranger, handler: Handler) -> None:
    answers = [stranger.ask(HELLO) for _ in range(3)]
    assert len(handler.asked) == 3
    assert answers[0] == answers[1] == answers[2]


def test_a_peer_that_never_reads_loses_replies_and_does_not_stop_the_server(handler: Handler) -> None:
    handler.answer = lambda request: Error(ErrorCode.UNKNOWN_ENGINE, "x" * 100_000)
    server = ControlServer(handler, "127.0.0.1", queued_replies=4)
    server.start()
    deaf, other = Stranger(server.port), Stranger(server.port)
    deaf.socket.setsockopt(zmq.RCVTIMEO, 0)
    for _ in range(1000):  # more than the socket buffers of both ends and the queues hold
        deaf.socket.send(HELLO)
    until(lambda: server.counters.replies_dropped > 0)
    assert other.ask(HELLO)[1] == 11
    deaf.close()
    other.close()
    server.close()


def test_a_peer_that_has_left_is_not_answered(server: ControlServer, handler: Handler) -> None:
    arrived, left = threading.Event(), threading.Event()

    def wait_for_it_to_leave(request: Request) -> Reply:
        arrived.set()
        left.wait(5)
        return handler.usual(request)

    handler.answer = wait_for_it_to_leave
    leaving = Stranger(server.port)
    leaving.socket.send(HELLO)
    assert arrived.wait(5)
    leaving.close()
    left.set()
    other = Stranger(server.port)
    assert other.ask(HELLO)[1] == 11
    other.close()


def fields_of(kind: Any, found: dict[str, str]) -> dict[str, str]:
    """The fields of every structure that a type has in it, by its name."""
    is_structure = isinstance(kind, type) and (dataclasses.is_dataclass(kind) or issubclass(kind, msgspec.Struct))
    if is_structure and kind.__name__ not in found:
        found[kind.__name__] = " ".join(inspect.signature(kind).parameters)
        for part in get_type_hints(kind).values():
            fields_of(part, found)
    for part in get_args(kind):
        fields_of(part, found)
    return found


def test_the_version_is_that_of_these_fields() -> None:
    """If a peer that does not know a field would go wrong, the protocol has a new version. Then write it down here."""
    assert (PROTOCOL_VERSION, fields_of(Request | Reply, {})) == (3, FIELDS)
