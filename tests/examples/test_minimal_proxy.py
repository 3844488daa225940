"""The router in one file, run as its users run it, in front of fake servers."""

import asyncio
import json
import signal
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest

from examples import minimal_proxy
from pd_proxy import apis, parameters
from tests.support.examples.fake_servers import (
    TRANSFER,
    Received,
    Script,
    Wire,
    answers,
    decodes,
    drops,
    opened,
    prefills,
    stalls,
)
from tests.support.examples.harness import FakeServers, RawClient, ask_at_once, full_backlog, unused_url
from tests.support.examples.minimal import BODY, Bed, MinimalProxy, started_bed
from tests.support.waiting import until

FILE = Path(minimal_proxy.__file__)
PATHS = ("/v1/completions", "/v1/chat/completions")
ASKED_OF_P: dict[str, Any] = {
    "max_tokens": 1,
    "max_completion_tokens": 1,
    "n": 1,
    "ignore_eos": True,
    "stream": False,
    "kv_transfer_params": {"do_remote_decode": True},
}
REQUEST = b'{"model": "tiny", "prompt": "a", "stream": true}'


@pytest.fixture(scope="module")
def servers() -> Iterator[FakeServers]:
    with ExitStack() as stack:
        yield FakeServers(stack)


@pytest.fixture(scope="module")
def shared_bed() -> Iterator[Bed]:
    with started_bed() as bed:
        yield bed


@pytest.fixture
def bed(shared_bed: Bed) -> Iterator[Bed]:
    with shared_bed.used() as bed:
        yield bed


def message(response: httpx.Response) -> str:
    """The message of an error of the router's own; its shape is checked."""
    assert "127.0.0.1" not in response.text  # no address of a server
    error = response.json()["error"]
    assert error["code"] == response.status_code
    return str(error["message"])


def test_the_file_can_be_read_in_five_minutes() -> None:
    lines = FILE.read_text().splitlines()
    assert len(lines) <= 160
    assert max(map(len, lines)) <= 120
    assert "pd_proxy" not in FILE.read_text()


# What P and D are sent


@pytest.mark.parametrize("path", PATHS)
def test_a_request_is_prefilled_then_decoded_with_the_returned_transfer(bed: Bed, path: str) -> None:
    body: dict[str, Any] = {"model": "tiny", "max_tokens": 40, "unknown": [1.5, "ü\ud800", None]}
    body |= {"prompt": "Guten Tag"} if path == PATHS[0] else {"messages": [{"role": "user", "content": "Tag"}]}
    response = bed.proxy.http.post(path, content=json.dumps(body))
    assert (response.status_code, response.json()) == (200, {"choices": [{"text": " the answer"}]})
    assert [one.path for one in (*bed.p.received, *bed.d.received)] == [path, path]
    assert bed.p.bodies == [body | ASKED_OF_P]
    assert bed.d.bodies == [body | {"kv_transfer_params": TRANSFER}]


def test_a_body_that_comes_with_an_offer_of_http2_is_read(bed: Bed) -> None:
    """Java's HttpClient offers it."""
    offer = {"Connection": "Upgrade, HTTP2-Settings", "Upgrade": "h2c", "HTTP2-Settings": "AAEAAEAA"}
    assert bed.proxy.http.post(PATHS[0], json=BODY, headers=offer).status_code == 200
    assert bed.p.bodies == [BODY | ASKED_OF_P]


def test_what_could_break_one_token_reaches_d_only(bed: Bed) -> None:
    breaking = dict.fromkeys(minimal_proxy.NOT_FOR_P, 7) | {"stream": True, "max_completion_tokens": 50, "n": None}
    bed.proxy.complete(**breaking)
    assert bed.p.bodies == [BODY | ASKED_OF_P]
    assert bed.d.bodies == [BODY | breaking | {"kv_transfer_params": TRANSFER}]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # in what vLLM imports
@pytest.mark.parametrize("path", PATHS)
def test_vllm_samples_one_token_for_whatever_a_client_wants(bed: Bed, path: str) -> None:
    """vLLM's own classes judge what P is sent: nothing is refused, nothing can end the text before its one token."""
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest  # noqa: PLC0415  seconds
    from vllm.entrypoints.openai.completion.protocol import CompletionRequest  # noqa: PLC0415

    wishes: dict[str, Any] = {
        "stream": True,
        "stream_options": {"include_usage": True},
        "min_tokens": 20,
        "max_tokens": 40,
        "stop": ["a", "b"],
        "stop_token_ids": [1, 2],
        "include_stop_str_in_output": True,
        "ignore_eos": False,
        "repetition_detection": {"max_pattern_size": 4, "min_count": 2},
        "logprobs": 3 if path == PATHS[0] else True,
        "stream_interval": 8,
    }
    if path != PATHS[0]:
        wishes |= {"messages": [{"role": "user", "content": "Tag"}], "max_completion_tokens": 30, "top_logprobs": 3}
    assert bed.proxy.http.post(path, json=BODY | wishes).status_code == 200
    kind = CompletionRequest if path == PATHS[0] else ChatCompletionRequest
    request = kind.model_validate(bed.p.bodies[0])
    assert not request.stream
    limit = request.max_tokens if path == PATHS[0] else request.max_completion_tokens
    sampling = request.to_sampling_params(limit, {})
    assert (sampling.max_tokens, sampling.min_tokens, sampling.n, sampling.ignore_eos) == (1, 0, 1, True)
    assert [sampling.stop, sampling.stop_token_ids, sampling.repetition_detection] == [[], [], None]


def test_a_clients_own_transfer_reaches_no_server(bed: Bed) -> None:
    evil: dict[str, Any] = {"kv_transfer_params": {"do_remote_prefill": True, "remote_host": "evil"}}
    evil |= {"vllm_xargs": {"kv_transfer_params": "evil"}}
    assert bed.proxy.complete(**evil).status_code == 200
    assert bed.proxy.complete(prompt=["a", "b"], **evil).status_code == 200
    kept: dict[str, Any] = BODY | {"vllm_xargs": {}}
    assert bed.p.bodies == [kept | ASKED_OF_P]
    assert bed.d.bodies == [kept | {"kv_transfer_params": TRANSFER}, kept | {"prompt": ["a", "b"]}]


@pytest.mark.parametrize(
    "body",
    [
        {"prompt": "text"},
        {"prompt": ["one text"]},
        {"prompt": [1, 2, 3]},
        {"prompt": [[1, 2, 3]]},
        {"prompt": ["a", "b"]},
        {"prompt": [[1, 2], [3]]},
        {"prompt": "a", "prompt_embeds": ["AAAA"]},
        {"prompt": "a", "n": 1},
        {"prompt": "a", "n": 2},
        {"prompt": "a", "use_beam_search": True},
        {"prompt": "a", "prompt_logprobs": 0},
        {"prompt": "a", "prompt_logprobs": None},
        {"prompt": "a", "echo": True, "logprobs": 0},
        {"prompt": "a", "echo": False, "logprobs": 5},
        {"prompt": "a", "max_tokens": 0},
        {"prompt": "a", "truncate_prompt_tokens": -1},
        {"prompt": "a", "truncate_prompt_tokens": 9},
        {"messages": [], "max_completion_tokens": 0},
        {"messages": [], "logprobs": True, "top_logprobs": 3},
    ],
    ids=str,
)
def test_it_divides_what_the_full_proxy_divides(body: dict[str, Any]) -> None:
    api = apis.CHAT if "messages" in body else apis.COMPLETIONS
    assert minimal_proxy.is_one_prompt(body) is (parameters.undivided_reason(api, body) is None)


def test_headers_that_concern_the_servers_reach_both(bed: Bed) -> None:
    sent = {"Authorization": "Bearer key", "X-Request-Id": "my-id", "Accept-Encoding": "gzip", "X-Private": "no"}
    bed.proxy.http.post("/v1/completions", json=BODY, headers=sent)
    for one in (bed.p.wait(), bed.d.wait()):
        assert (one.headers["authorization"], one.headers["x-request-id"]) == ("Bearer key", "my-id")
        assert (one.headers["content-type"], one.headers["accept-encoding"]) == ("application/json", "identity")
        assert "x-private" not in one.headers


def test_both_servers_see_one_request_id_also_where_the_client_has_none(bed: Bed) -> None:
    bed.proxy.complete()
    bed.proxy.complete()
    seen = [one.headers["x-request-id"] for one in (*bed.p.received, *bed.d.received)]
    assert seen[:2] == seen[2:]
    assert len(set(seen)) == 2
    assert "authorization" not in bed.p.received[0].headers


# What the client gets

STREAM = [
    b'data: {"choices": [{"text": " gr',
    "ü".encode()[:1],
    "ü".encode()[1:],
    b"\xff\x00 no text",
    b"data: [DONE]\n\n",
]


def test_a_stream_reaches_the_client_byte_for_byte_and_no_piece_waits_for_the_next(bed: Bed) -> None:
    gates = [threading.Event() for _ in STREAM]

    async def stream(_: Received, wire: Wire) -> None:
        await wire.head(200, {"Content-Type": "text/event-stream; charset=utf-8"})
        for piece, gate in zip(STREAM, gates, strict=True):
            await wire.chunk(piece)
            await opened(gate)
        await wire.end()

    bed.d.script = stream
    with bed.proxy.http.stream("POST", "/v1/completions", json=BODY | {"stream": True}) as response:
        assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
        pieces = response.iter_raw()
        for piece, gate in zip(STREAM, gates, strict=True):
            assert next(pieces) == piece
            gate.set()
        assert next(pieces, None) is None


@pytest.mark.parametrize("status", [400, 401, 404, 429, 500, 503])
@pytest.mark.parametrize("leg", ["p", "d"])
def test_an_error_of_a_server_is_the_clients_answer(bed: Bed, leg: str, status: int) -> None:
    told = b'{"error": {"message": "max_model_len is 4096",  "type": "BadRequestError"}}'
    (bed.p if leg == "p" else bed.d).script = answers(status, told, Content_Type="application/json")
    response = bed.proxy.complete(stream=True)
    assert (response.status_code, response.content) == (status, told)
    assert response.headers["content-type"] == "application/json"
    assert len(bed.d.received) == (leg == "d")


@pytest.mark.parametrize(
    "script",
    [
        answers(200, b'{"kv_transfer_params": null}'),
        answers(200, b'{"choices": []}'),
        answers(200, b"[]"),
        answers(200, b"<html>"),
        answers(200, b"\xff"),
    ],
    ids=["null", "missing", "array", "html", "bytes"],
)
def test_a_useless_answer_of_p_is_an_error_that_names_it(bed: Bed, script: Script) -> None:
    bed.p.script = script
    response = bed.proxy.complete()
    assert response.status_code == 502
    assert "no kv_transfer_params from P" in message(response)
    assert bed.d.received == []


@pytest.mark.parametrize(
    "content",
    [b"", b'{"prompt": "a', b"[" * 100_000, b'["prompt"]', b"7", b"null", b"\xff"],
    ids=lambda one: str(one[:9]),
)
def test_a_body_that_is_no_json_object_is_refused(bed: Bed, content: bytes) -> None:
    response = bed.proxy.http.post("/v1/completions", content=content)
    assert response.status_code == 400
    assert "must be a JSON object" in message(response)
    assert bed.p.received == bed.d.received == []


async def begins_and_drops(_: Received, wire: Wire) -> None:
    await wire.head()
    wire.drop()


@pytest.mark.parametrize("leg", ["p", "d"])
@pytest.mark.parametrize(
    ("script", "told"), [(drops, "RemoteProtocolError"), (begins_and_drops, "RemoteProtocolError")]
)
def test_a_server_that_breaks_off_before_its_first_byte_is_an_error(
    bed: Bed, leg: str, script: Script, told: str
) -> None:
    server = bed.p if leg == "p" else bed.d
    server.script = script
    response = bed.proxy.complete(stream=True)
    assert response.status_code == 502
    assert message(response) == f"a server failed: {told}"
    until(lambda: f"{server.url}/v1/completions failed: {told}" in bed.proxy.log)


async def breaks_a_stream(_: Received, wire: Wire) -> None:
    await wire.head()
    await wire.chunk(b"data: 1\n\n")
    wire.drop()


async def resets_an_endless_stream(_: Received, wire: Wire) -> None:
    await wire.raw(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\ndata: 1\n\n")
    await asyncio.sleep(0.1)  # a reset takes what nobody has read
    wire.reset()


async def breaks_a_whole_answer(_: Received, wire: Wire) -> None:
    await wire.raw(b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\ndata: 1\n\n")
    wire.drop()


@pytest.mark.parametrize("script", [breaks_a_stream, breaks_a_whole_answer, resets_an_endless_stream])
def test_an_answer_that_breaks_off_never_looks_complete(bed: Bed, script: Script) -> None:
    bed.d.script = script
    with bed.proxy.http.stream("POST", "/v1/completions", json=BODY) as response:
        pieces = response.iter_raw()
        assert next(pieces) == b"data: 1\n\n"
        with pytest.raises(httpx.RemoteProtocolError):
            next(pieces)
    until(lambda: f"{bed.d.url}/v1/completions broke off" in bed.proxy.log)


async def goes_on_with_no_http(received: Received, wire: Wire) -> None:
    await wire.head()
    await wire.chunk(b"data: 1\n\n")
    await asyncio.sleep(0.1)  # the reader has the beginning, then
    await wire.raw(b"no size\r\n")
    await stalls(received, wire)


@pytest.mark.parametrize("without_extensions", ["", "1"])
def test_bytes_that_are_not_http_end_an_answer(servers: FakeServers, without_extensions: str) -> None:
    p, d = servers.start(prefills), servers.start(goes_on_with_no_http)
    with MinimalProxy(p.url, d.url, AIOHTTP_NO_EXTENSIONS=without_extensions) as proxy:
        with proxy.http.stream("POST", "/v1/completions", json=BODY) as response:
            pieces = response.iter_raw()
            assert next(pieces) == b"data: 1\n\n"
            with pytest.raises(httpx.RemoteProtocolError):
                next(pieces)
        p.script = goes_on_with_no_http
        assert proxy.complete().status_code == 502
        assert "Traceback" not in proxy.log


@pytest.fixture(scope="module")
def lenient(servers: FakeServers, tmp_path_factory: pytest.TempPathFactory) -> Iterator[MinimalProxy]:
    """A router whose HTTP server (uvicorn's own in Python) lets control bytes pass."""
    directory = tmp_path_factory.mktemp("no_httptools")
    (directory / "httptools.py").write_text("raise ImportError")
    with MinimalProxy(servers.start(prefills).url, servers.start(decodes).url, PYTHONPATH=str(directory)) as proxy:
        yield proxy


@pytest.mark.parametrize("value", [b"a\x01b", b"a\x7fb", "Gr\u00fc\u00dfe".encode(), b"Gr\xfc\xdfe"])
@pytest.mark.parametrize("name", ["Authorization", "X-Request-Id"])
def test_a_header_with_odd_bytes_does_no_harm(lenient: MinimalProxy, name: str, value: bytes) -> None:
    raw = [(b"Content-Type", b"application/json"), (name.encode(), value)]
    assert lenient.http.post("/v1/completions", json=BODY, headers=raw).status_code == 200


@pytest.mark.parametrize("leg", ["p", "d"])
def test_a_server_that_cannot_be_reached_is_an_error(servers: FakeServers, leg: str) -> None:
    nowhere = unused_url()
    p, d = (nowhere, servers.start(decodes).url) if leg == "p" else (servers.start(prefills).url, nowhere)
    with MinimalProxy(p, d) as proxy:
        response = proxy.complete()
    assert response.status_code == 502
    assert message(response) == "a server failed: ConnectError"


def test_a_server_that_takes_no_connection_is_a_timeout(bed: Bed) -> None:
    with full_backlog() as url, MinimalProxy(url, bed.d.url) as proxy:
        response = proxy.complete()
    assert response.status_code == 504
    assert message(response) == "a server failed: ConnectTimeout"


# A client that leaves


def test_a_client_that_leaves_while_it_sends_its_request(bed: Bed) -> None:
    client = RawClient(bed.proxy, b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n", b'{"pro')
    client.leave()
    assert bed.proxy.complete().status_code == 200
    assert len(bed.p.received) == 1


def test_a_client_that_leaves_during_prefill_takes_the_request_from_p(bed: Bed) -> None:
    bed.p.script = stalls
    client = RawClient.completing(bed.proxy, REQUEST)
    received = bed.p.wait()
    client.leave()
    assert received.left.wait(30)
    assert bed.d.received == []


async def answers_a_little(received: Received, wire: Wire) -> None:
    await wire.head()
    await wire.chunk(b"data: 1\n\n")
    await stalls(received, wire)


async def floods(_: Received, wire: Wire) -> None:
    await wire.head()
    while True:
        await wire.chunk(b"data: 1\n\n" * 8192)


@pytest.mark.parametrize("script", [stalls, answers_a_little, floods])
def test_a_client_that_leaves_during_decode_takes_the_request_from_d(bed: Bed, script: Script) -> None:
    bed.d.script = script
    client = RawClient.completing(bed.proxy, REQUEST)
    received = bed.d.wait()
    if script is not stalls:
        client.receive_until(b"data: 1\n\n")
    client.leave()
    assert received.left.wait(30)
    bed.d.script = decodes
    assert bed.proxy.complete().status_code == 200


# The process


@pytest.mark.parametrize("count", [150, pytest.param(1000, marks=pytest.mark.slow)])  # its client's default is 100
def test_all_requests_are_under_way_at_once(bed: Bed, count: int) -> None:
    present = 0
    everybody = asyncio.Event()

    async def meeting(received: Received, wire: Wire) -> None:
        nonlocal present
        present += 1
        if present == count:
            everybody.set()
        await everybody.wait()
        await wire.json(200, {"echo": received.body["prompt"]})

    bed.d.script = meeting
    questions = [f"question {number}" for number in range(count)]
    answers = ask_at_once(bed.proxy.address[1], questions)
    missing = [
        one for one, answer in zip(questions, answers, strict=True) if f'{{"echo": "{one}"}}'.encode() not in answer
    ]
    assert missing == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_it_though_a_stream_is_open(servers: FakeServers, number: signal.Signals) -> None:
    p, d = servers.start(prefills), servers.start(answers_a_little)
    with MinimalProxy(p.url, d.url) as proxy:
        with proxy.http.stream("POST", "/v1/completions", json=BODY) as response:
            pieces = response.iter_raw()
            assert next(pieces) == b"data: 1\n\n"
            proxy.end(number)
            with pytest.raises(httpx.RemoteProtocolError):
                next(pieces)
        assert d.wait().left.wait(30)
        assert "KeyboardInterrupt" not in proxy.log
