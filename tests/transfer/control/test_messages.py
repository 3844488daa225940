"""The wire format, in both directions, and what is not one of its messages."""

from typing import Any, get_args

import msgspec
import pytest

from tests.support.control.samples import REPLIES, REQUESTS, pack, unpack
from transfer.control.messages import (
    MAX_FRAME_BYTES,
    MAX_REQUEST_BYTES,
    PROTOCOL_VERSION,
    REPLY_NAMES,
    Error,
    ErrorCode,
    Hello,
    MalformedMessage,
    Reply,
    Request,
    decode_reply,
    decode_request,
    encode,
    message_id_of,
)


@pytest.mark.parametrize("request_", REQUESTS, ids=lambda message: type(message).__name__)
def test_every_request_survives_the_wire(request_: Request) -> None:
    assert decode_request(encode(7, request_)) == (7, request_)


@pytest.mark.parametrize(
    "reply", [*REPLIES, Error(ErrorCode.NOT_READY, "starting")], ids=lambda message: type(message).__name__
)
def test_every_reply_survives_the_wire(reply: Reply) -> None:
    assert decode_reply(encode(2**63 - 1, reply)) == (2**63 - 1, reply)


def test_every_request_names_a_reply_of_its_own() -> None:
    assert set(REPLY_NAMES) == set(get_args(Request))
    assert sorted(REPLY_NAMES.values()) == sorted({each.__name__ for each in get_args(Reply)} - {"Error"})
    assert REPLY_NAMES[Hello] == "Welcome"


def test_a_frame_is_version_message_id_and_a_map_with_the_type() -> None:
    frame = encode(9, Hello("engine-1"))
    assert unpack(frame) == [PROTOCOL_VERSION, 9, {"type": "hello", "engine_id": "engine-1"}]


def test_unknown_keys_and_further_elements_are_ignored() -> None:
    body = {"type": "hello", "engine_id": "e", "since": "a later release"}
    assert decode_request(pack([PROTOCOL_VERSION, 9, body, "more"])) == (9, Hello("e"))


HELLO_BODY = {"type": "hello", "engine_id": "e"}


@pytest.mark.parametrize(
    ("frame", "message_id"),
    [
        pytest.param(b"", 0, id="empty"),
        pytest.param(b"\xc1", 0, id="no such opcode"),
        pytest.param(encode(5, Hello("e"))[:-1], 0, id="truncated"),
        pytest.param(encode(5, Hello("e")) + b"\0", 0, id="trailing byte"),
        pytest.param(pack({"type": "hello"}), 0, id="a map"),
        pytest.param(pack([PROTOCOL_VERSION, 5]), 0, id="no body"),
        pytest.param(pack([PROTOCOL_VERSION, 0, HELLO_BODY]), 0, id="message id 0"),
        pytest.param(pack([PROTOCOL_VERSION, -5, HELLO_BODY]), 0, id="negative message id"),
        pytest.param(pack([PROTOCOL_VERSION, 2**63, HELLO_BODY]), 0, id="message id above 63 bits"),
        pytest.param(pack([PROTOCOL_VERSION, "5", HELLO_BODY]), 0, id="message id is a string"),
        pytest.param(pack([PROTOCOL_VERSION, 5, None]), 5, id="body is nil"),
        pytest.param(pack([PROTOCOL_VERSION, 5, {"engine_id": "e"}]), 5, id="no type"),
        pytest.param(pack([PROTOCOL_VERSION, 5, {"type": "welcome"}]), 5, id="a reply"),
        pytest.param(pack([PROTOCOL_VERSION, 5, {"type": "hello", "engine_id": 1}]), 5, id="wrong type"),
        pytest.param(pack([PROTOCOL_VERSION, 5, {"type": "hello"}]), 5, id="field missing"),
        pytest.param(
            pack([PROTOCOL_VERSION, 5, {"type": "hello", "engine_id": "??"}]).replace(b"??", b"\xff\xff"),
            5,
            id="invalid UTF-8",
        ),
        pytest.param(b"\x93\x01\x05" + b"\x91" * 100_000, 0, id="nested without end"),
    ],
)
def test_what_is_not_a_request_is_malformed(frame: bytes, message_id: int) -> None:
    with pytest.raises(MalformedMessage) as caught:
        decode_request(frame)
    assert caught.value.message_id == message_id
    assert caught.value.code is ErrorCode.MALFORMED
    assert message_id_of(frame) == message_id


@pytest.mark.parametrize("version", [0, PROTOCOL_VERSION + 1, 2**40, -1])
def test_another_version_is_named_whatever_its_body_is(version: int) -> None:
    with pytest.raises(MalformedMessage, match=f"version {version}; this side speaks {PROTOCOL_VERSION}") as caught:
        decode_request(pack([version, 5, "unknown", "future"]))
    assert (caught.value.code, caught.value.message_id) == (ErrorCode.VERSION, 5)


def test_a_request_has_a_smaller_limit_than_a_reply() -> None:
    request = encode(5, Hello("e" * MAX_REQUEST_BYTES))
    with pytest.raises(MalformedMessage, match=f"at most {MAX_REQUEST_BYTES}") as caught:
        decode_request(request)
    assert caught.value.message_id == 5
    reply = encode(5, Error(ErrorCode.INTERNAL, "e" * MAX_REQUEST_BYTES))
    assert decode_reply(reply)[0] == 5
    with pytest.raises(MalformedMessage, match=f"at most {MAX_FRAME_BYTES}"):
        decode_reply(encode(5, Error(ErrorCode.INTERNAL, "e" * MAX_FRAME_BYTES)))


def test_an_error_does_not_repeat_a_long_frame() -> None:
    with pytest.raises(MalformedMessage) as caught:
        decode_request(pack([PROTOCOL_VERSION, 5, {"type": "x" * 100_000}]))
    assert len(str(caught.value)) < 500


@pytest.mark.parametrize("message", [*REQUESTS, *REPLIES], ids=lambda message: type(message).__name__)
def test_the_msgpack_package_reads_every_message_as_what_json_shows(message: Any) -> None:
    version, message_id, body = unpack(encode(3, message))
    assert (version, message_id) == (PROTOCOL_VERSION, 3)
    shown = msgspec.json.decode(msgspec.json.encode(body))  # which has text for the bytes of hashes
    assert shown == msgspec.json.decode(msgspec.json.encode(message))
