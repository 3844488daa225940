"""What the client is told when its request, P or D is at fault."""

import asyncio
from collections.abc import Callable

import httpx
import pytest

from tests.support.examples.fake_servers import FakeServer, Received, Script, Wire, answers, drops, prefills, stalls
from tests.support.examples.harness import ProxyProcess, RawClient, ask_at_once
from tests.support.examples.served_proxy import Proxy, ProxySetup
from tests.support.waiting import until


def message(response: httpx.Response) -> str:
    """The message of an error of the proxy's own; its shape is checked, and that it has no address of a server."""
    assert "127.0.0.1" not in response.text
    error = response.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert error["code"] == response.status_code
    assert "x-request-id" in response.headers
    return str(error["message"])


# The client's fault


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (b"", "not valid JSON"),
        (b'{"prompt": "a', "not valid JSON"),
        (b'{"prompt": "\xff"}', "not valid JSON"),
        (b'{"temperature": NaN}', "NaN is not a JSON number"),
        (b'{"temperature": 1e400}', "1e400 is not a JSON number"),
        (b'{"temperature": %b.5}' % (b"9" * 5000), f"JSON: {'9' * 40} is not a JSON number"),
        (b"[" * 100_000, "not valid JSON"),
        (b'["prompt"]', "must be a JSON object, not list"),
        (b'{"prompt": "' + b"x" * 1000 + b'"}', "larger than 1000 bytes"),
    ],
    ids=["empty", "cut", "not UTF-8", "NaN", "infinite", "long", "too deep", "array", "too large"],
)
def test_a_body_that_is_no_json_object_is_refused(
    setup: ProxySetup, p: FakeServer, d: FakeServer, content: bytes, told: str
) -> None:
    proxy = setup.proxy([p], [d], max_body_bytes=1000 if told.startswith("larger") else 1_000_000)
    response = proxy.http.post("/v1/completions", content=content)
    assert response.status_code == 400
    assert told in message(response)
    assert p.received == d.received == []
    assert proxy.complete().status_code == 200


def test_of_a_long_header_that_is_refused_the_log_has_the_beginning(
    proxy: Proxy, access_lines: Callable[[int], list[str]]
) -> None:
    kind = "multipart/form-data; charset=" + "u" * 5000
    response = proxy.http.post("/v1/audio/transcriptions", content=b"--x", headers={"Content-Type": kind})
    assert response.status_code == 400
    assert f"not as in {kind[:100]!r}" in message(response)
    assert len(access_lines(1)[0]) < 1000


@pytest.mark.parametrize(("method", "path", "status"), [("POST", "/v1/else", 404), ("GET", "/v1/completions", 405)])
def test_an_unknown_route_is_refused_in_the_same_shape(proxy: Proxy, method: str, path: str, status: int) -> None:
    response = proxy.http.request(method, path)
    assert response.status_code == status
    assert path in response.json()["error"]["message"]


# P's fault: the decode leg is never begun

#: How vLLM answers a request that comes while its engine is told to stop.
NOTHING_HANDED_OVER = (
    "returned no kv_transfer_params (finish reason {}, expected 'length')|: is it started with --kv-transfer-config"
)
REASON = b'{"choices": [{"finish_reason": {"see": "h"}}]}'
GIVEN_UP = b'{"choices": [{"text": "", "finish_reason": "abort"}], "kv_transfer_params": null}'


@pytest.mark.parametrize("status", [400, 401, 404, 429, 500, 503])
def test_an_error_of_the_prefill_server_is_the_clients_answer(
    proxy: Proxy, p: FakeServer, d: FakeServer, status: int
) -> None:
    told = b'{"error": {"message": "max_model_len is 4096",  "type": "BadRequestError", "code": 400}}'
    p.script = answers(status, told, Content_Type="application/json", Retry_After="7")
    response = proxy.complete(stream=True)
    assert (response.status_code, response.content) == (status, told)
    assert response.headers["retry-after"] == "7"
    assert d.received == []


@pytest.mark.parametrize(
    ("script", "status", "told"),
    [
        (answers(500, b"at\n10.0.0.9", Content_Type="text/plain"), 500, "answered with status 500|: at 10.0.0.9"),
        (answers(599, b"odd"), 502, "answered with status 599|: odd"),
        (answers(307, b"", Location="http://elsewhere"), 502, "answered with status 307|"),
        (answers(200, b'{"kv_transfer_params": null}'), 502, NOTHING_HANDED_OVER.format("missing")),
        (answers(200, b'{"choices": [{"finish_reason": "stop"}]}'), 502, NOTHING_HANDED_OVER.format("'stop'")),
        (answers(200, b'{"choices": [{"finish_reason": null}]}'), 502, NOTHING_HANDED_OVER.format("missing")),
        (
            answers(200, b'{"choices": [{"finish_reason": "length"}]}'),
            502,
            "returned no kv_transfer_params|: is it started with --kv-transfer-config",
        ),
        (
            answers(200, REASON),
            502,
            NOTHING_HANDED_OVER.format("unknown").replace("|: ", "|: the reason is {'see': 'h'}; "),
        ),
        (answers(200, GIVEN_UP), 503, "gave the request up (finish reason 'abort')|: is it told to stop?"),
        (answers(200, b'{"kv_transfer_params": {}}'), 502, NOTHING_HANDED_OVER.format("missing")),
        (answers(200, b"[]"), 502, NOTHING_HANDED_OVER.format("missing")),
        (answers(200, b"<html>"), 502, "answered with invalid JSON|: Expecting value"),
        (drops, 502, "broke off|: "),
        (stalls, 504, "was silent for longer than the time limit|"),
    ],
    ids=[
        "text",
        "odd status",
        "redirect",
        "null",
        "stopped",
        "no reason",
        "length",
        "odd reason",
        "given up",
        "empty",
        "array",
        "html",
        "drops",
        "stalls",
    ],
)
def test_a_useless_answer_of_the_prefill_server_names_the_leg_to_the_client_and_all_else_in_the_log(
    setup: ProxySetup,
    p: FakeServer,
    d: FakeServer,
    access_lines: Callable[[int], list[str]],
    script: Script,
    status: int,
    told: str,
) -> None:
    p.script = script
    proxy = setup.proxy([p], [d], request_timeout_s=0.2 if script is stalls else 60)
    response = proxy.complete()
    assert response.status_code == status
    what, _, detail = told.partition("|")
    assert message(response) == f"a prefill server {what}"
    assert d.received == []
    assert len(access_lines(1)[0].splitlines()) == 1
    assert f"problem: prefill server {p.url} {what}{detail}" in access_lines(1)[0]
    until(lambda: proxy.in_flight() == 0)


def test_what_a_server_writes_is_one_line_in_every_message_of_the_log(
    setup: ProxySetup, p: FakeServer, d: FakeServer, access_lines: Callable[[int], list[str]],
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    p.script = answers(502, b"<html>\r\nall is well\x1b[2J\xe2\x80\xa8again", Content_Type="text/html")
    assert setup.proxy([p, setup.server(prefills)], [d]).complete().status_code == 200
    access_lines(1)
    told = [record.getMessage() for record in caplog.records if "all is well" in record.getMessage()]
    assert told[0].startswith("prefill server"), "and the request went to another"
    assert all(message.isprintable() for message in told)


@pytest.mark.parametrize(
    "script",
    [drops, answers(500, b"no"), answers(503, b'{"error": {}}'), answers(200, GIVEN_UP)],
    ids=["drops", "500", "503", "given up"],
)
def test_a_prefill_server_that_fails_a_request_is_followed_by_another(
    setup: ProxySetup, p: FakeServer, d: FakeServer, access_lines: Callable[[int], list[str]], script: Script
) -> None:
    proxy = setup.proxy([setup.server(script), p], [d])
    assert proxy.complete().status_code == 200
    assert len(p.received) == len(d.received) == 1
    assert "prefill_retries=1" in access_lines(1)[0]
    assert "pd_proxy_prefill_retries_total 1" in proxy.http.get("/metrics").text


def test_a_request_that_kills_prefill_servers_does_not_kill_all(
    setup: ProxySetup, p: FakeServer, d: FakeServer, access_lines: Callable[[int], list[str]]
) -> None:
    deadly = [setup.server(drops), setup.server(drops)]
    response = setup.proxy([*deadly, p], [d]).complete()
    assert response.status_code == 502
    assert message(response) == "a prefill server broke off"
    assert f"problem: prefill server {deadly[1].url} broke off" in access_lines(1)[0]
    assert [len(one.received) for one in deadly] == [1, 1]
    assert p.received == d.received == []


@pytest.mark.parametrize("script", [answers(400, b"no"), answers(429, b"later"), answers(200, b"{}"), stalls])
def test_what_another_prefill_server_would_answer_as_well_is_not_asked_of_it(
    setup: ProxySetup, p: FakeServer, d: FakeServer, script: Script
) -> None:
    proxy = setup.proxy([setup.server(script), p], [d], request_timeout_s=0.5 if script is stalls else 60)
    assert proxy.complete().status_code in (400, 429, 502, 504)
    assert p.received == d.received == []


# D's fault


@pytest.mark.parametrize("stream", [True, False])
def test_an_error_of_the_decode_server_is_the_clients_answer(proxy: Proxy, d: FakeServer, stream: bool) -> None:
    told = b'{"error": {"message": "no",  "code": 503}}'
    d.script = answers(503, told, Content_Type="application/json", Retry_After="7")
    response = proxy.complete(stream=stream)
    assert (response.status_code, response.content) == (503, told)
    assert response.headers["content-type"] == "application/json"
    assert response.headers["retry-after"] == "7"


async def begins_and_drops(_: Received, wire: Wire) -> None:
    await wire.head()
    wire.drop()


async def begins_and_stalls(received: Received, wire: Wire) -> None:
    await wire.head()
    await stalls(received, wire)


@pytest.mark.parametrize(
    ("script", "status"), [(drops, 502), (begins_and_drops, 502), (stalls, 504), (begins_and_stalls, 504)]
)
def test_a_decode_server_that_fails_before_its_first_byte_is_an_error_and_not_asked_of_another(
    setup: ProxySetup,
    p: FakeServer,
    d: FakeServer,
    access_lines: Callable[[int], list[str]],
    script: Script,
    status: int,
) -> None:
    bad = setup.server(script)
    response = setup.proxy([p], [bad, d], request_timeout_s=1 if status == 504 else 60).complete(stream=True)
    assert response.status_code == status
    assert message(response).startswith("a decode server ")
    assert f"problem: decode server {bad.url} " in access_lines(1)[0]
    assert (len(p.received), len(d.received)) == (1, 0)


@pytest.mark.parametrize("code", ['"oops"', "null", "[1]", "1e999", "{}"])
def test_a_stream_that_begins_with_an_error_without_a_number_is_taken_for_the_servers_fault(
    setup: ProxySetup, p: FakeServer, access_lines: Callable[[int], list[str]], code: str
) -> None:
    event = b'data: {"error": {"message": "no", "code": %b}}\n\n' % code.encode()
    d = setup.server(answers(200, event, Content_Type="text/event-stream"))
    proxy = setup.proxy([p], [d])
    assert proxy.complete(stream=True).content == event
    assert "began its stream with an error of status 500" in access_lines(1)[0]
    assert "pd_proxy_broken_off_total 1" in proxy.http.get("/metrics").text


def test_a_comment_before_an_error_hides_nothing(
    setup: ProxySetup, p: FakeServer, access_lines: Callable[[int], list[str]]
) -> None:
    async def script(_: Received, wire: Wire) -> None:
        await wire.head()
        await wire.chunk(b": keep-alive\n\n")
        await asyncio.sleep(0.1)
        await wire.chunk(b'data: {"error": {"message": "no", "code": 503}}\n\n')
        await wire.end()

    stream = setup.proxy([p], [setup.server(script)]).complete(stream=True).content
    assert stream == b': keep-alive\n\ndata: {"error": {"message": "no", "code": 503}}\n\n'
    assert "began its stream with an error of status 503" in access_lines(1)[0]


async def breaks_a_stream(_: Received, wire: Wire) -> None:
    await wire.head()
    await wire.chunk(b"data: 1\n\n")
    wire.drop()


async def resets_a_stream_without_length(_: Received, wire: Wire) -> None:
    await wire.raw(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\ndata: 1\n\n")
    await asyncio.sleep(0.1)  # a reset takes what nobody has read
    wire.reset()


def goes_on_with(content: bytes) -> Script:
    """Begin a stream, and go on with what is not HTTP."""

    async def script(received: Received, wire: Wire) -> None:
        await wire.head()
        await wire.chunk(b"data: 1\n\n")
        await asyncio.sleep(0.1)  # the reader has the beginning, then
        await wire.raw(content)
        await stalls(received, wire)

    return script


NOT_HTTP = {
    "size": goes_on_with(b"no size\r\n"),
    "line end": goes_on_with(b"3\r\nabcXX"),
    "another head": goes_on_with(b"HTTP/1.1 500 Whatever\r\n\r\n"),
    "trailer": goes_on_with(b"0\r\nno trailer\r\n\r\n"),
}


async def stalls_a_stream(received: Received, wire: Wire) -> None:
    await wire.head()
    await wire.chunk(b"data: 1\n\n")
    await stalls(received, wire)


async def breaks_a_whole_answer(_: Received, wire: Wire) -> None:
    await wire.raw(b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\ndata: 1\n\n")
    wire.drop()


@pytest.mark.parametrize(
    "script",
    [breaks_a_stream, stalls_a_stream, resets_a_stream_without_length, *NOT_HTTP.values()],
    ids=["breaks", "stalls", "resets", *NOT_HTTP],
)
def test_an_answer_that_breaks_off_never_looks_complete(
    setup: ProxySetup, p: FakeServer, d: FakeServer, access_lines: Callable[[int], list[str]], script: Script
) -> None:
    d.script = script
    proxy = setup.proxy([p], [d], request_timeout_s=1 if script is stalls_a_stream else 60)
    with proxy.http.stream("POST", "/v1/completions", json={"prompt": "a"}) as response:
        assert response.status_code == 200
        pieces = response.iter_raw()
        assert next(pieces) == b"data: 1\n\n"
        with pytest.raises(httpx.RemoteProtocolError):
            list(pieces)
    assert f"problem: decode server {d.url}" in access_lines(1)[0]
    assert "pd_proxy_broken_off_total 1" in proxy.http.get("/metrics").text


TOLD = {
    "/v1/completions": b'data: {"error":{"message":"a decode server broke off","type":"BadGatewayError","param":null,'
    b'"code":502}}\n\n',
    "/v1/messages": b'event: error\ndata: {"type":"error","error":{"type":"api_error",'
    b'"message":"a decode server broke off"}}\n\n',
}


@pytest.mark.parametrize("version", [b"1.1", b"1.0"])
@pytest.mark.parametrize("path", TOLD)
@pytest.mark.parametrize(
    ("piece", "kind", "is_told"),
    [
        (b"data: 1\n\n", "text/event-stream; charset=utf-8", True),
        (b"data: 1\n\ndata", "text/event-stream", False),
        (b"data: 1\n\n", "application/json", False),
    ],
)
def test_a_stream_that_breaks_off_tells_why_where_an_event_may_stand(
    proxy: Proxy, d: FakeServer, piece: bytes, kind: str, is_told: bool, path: str, version: bytes
) -> None:
    """HTTP/1.0 has no other way to tell a stream that breaks off from one that is complete."""

    async def breaks(_: Received, wire: Wire) -> None:
        await wire.head(200, {"Content-Type": kind})
        await wire.chunk(piece[:-1])
        await wire.chunk(piece[-1:])
        await asyncio.sleep(0.1)  # the reader has the beginning, then
        wire.drop()

    d.script = breaks
    body = b'{"model": "tiny", "prompt": "a", "messages": [], "max_tokens": 5, "stream": true}'
    head = b"POST %s HTTP/%s\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % (path.encode(), version, len(body))
    answer = RawClient(proxy, head, body).receive_all()
    assert (TOLD[path] in answer) == is_told
    assert answer.count(b"error") == (TOLD[path].count(b"error") if is_told else 0)
    assert not answer.endswith(b"0\r\n\r\n")


@pytest.mark.parametrize("path", TOLD)
@pytest.mark.parametrize(
    "cut", [0, 1, 9, 10, 16], ids=["one piece", "cut", "before the event's end", "behind it", "in the next one's name"]
)
def test_a_stream_that_ends_with_an_error_of_d_has_failed(
    proxy: Proxy, d: FakeServer, access_lines: Callable[[int], list[str]], path: str, cut: int
) -> None:
    """So vLLM ends the streams of an engine that dies. The end is in good order, and the client gets what D sent."""
    event, error, done = b"data: {}\n\n", TOLD[path], b"data: [DONE]\n\n"

    async def dies(_: Received, wire: Wire) -> None:
        await wire.head()
        for piece in filter(None, (event, (event + error)[:cut], (event + error)[cut:] + done)):
            await wire.chunk(piece)
            await asyncio.sleep(0.05)  # a piece of its own
        await wire.end()

    d.script = dies
    answer = proxy.http.post(path, json={"prompt": "a", "messages": [], "max_tokens": 5, "stream": True})
    assert (answer.status_code, answer.content) == (200, 2 * event + error + done)
    assert f"problem: decode server {d.url} ended its stream with an error" in access_lines(1)[0]
    assert "pd_proxy_broken_off_total 1" in proxy.http.get("/metrics").text


@pytest.mark.parametrize("kind", ["text/event-stream", "text/plain"])
def test_what_only_looks_like_an_error_is_none(
    proxy: Proxy, d: FakeServer, access_lines: Callable[[int], list[str]], kind: str
) -> None:
    """It is no event of its own, or the answer is no stream."""
    content = b"data: 1\n%sdata: 2\n\n" % (
        b"\n" + TOLD["/v1/completions"] if kind == "text/plain" else b'data: {"error": 1}\n'
    )
    d.script = answers(200, 2 * content, Content_Type=kind)
    assert proxy.complete(stream=True).status_code == 200
    assert "problem" not in access_lines(1)[0]


@pytest.mark.parametrize(("leg", "without_extensions"), [("prefill", "1"), ("decode", "")])
def test_bytes_that_are_not_http_end_an_answer(p: FakeServer, d: FakeServer, leg: str, without_extensions: str) -> None:
    (p if leg == "prefill" else d).script = NOT_HTTP["size"]
    arguments = ["-m", "pd_proxy", "--prefill", p.url, "--decode", d.url]
    with ProxyProcess(arguments, AIOHTTP_NO_EXTENSIONS=without_extensions) as proxy:
        (answer,) = ask_at_once(proxy.address[1], ["a"])
        assert not answer.endswith(b"0\r\n\r\n")
        until(lambda: f"problem: {leg} server" in proxy.log)
        assert "broke off" in proxy.log
        assert "Traceback" not in proxy.log


def test_a_whole_answer_that_breaks_off_is_an_error(setup: ProxySetup, p: FakeServer, d: FakeServer) -> None:
    d.script = breaks_a_whole_answer
    response = setup.proxy([p], [d]).complete()
    assert response.status_code == 502
    assert message(response) == "a decode server broke off"


def test_a_whole_answer_of_d_alone_that_breaks_off_never_looks_complete(proxy: Proxy, d: FakeServer) -> None:
    d.script = breaks_a_whole_answer
    with proxy.http.stream("POST", "/v1/completions", json={"prompt": ["a", 7]}) as response:
        assert response.status_code == 200
        with pytest.raises(httpx.RemoteProtocolError):
            response.read()


# Servers that cannot be reached


@pytest.mark.parametrize("leg", ["prefill", "decode"])
def test_a_refused_connection_names_the_leg_to_the_client_and_the_server_in_the_log(
    setup: ProxySetup,
    p: FakeServer,
    d: FakeServer,
    closed_port: str,
    access_lines: Callable[[int], list[str]],
    leg: str,
) -> None:
    proxy = setup.proxy([closed_port if leg == "prefill" else p], [closed_port if leg == "decode" else d])
    response = proxy.complete()
    assert response.status_code == 502
    assert message(response) == f"a {leg} server cannot be reached"
    assert f"problem: {leg} server {closed_port} cannot be reached: " in access_lines(1)[0]


def test_a_connection_that_is_never_taken_is_a_timeout(setup: ProxySetup, d: FakeServer, full_backlog: str) -> None:
    response = setup.proxy([full_backlog], [d], connect_timeout_s=0.2).complete()
    assert response.status_code == 504
    assert message(response) == "a prefill server did not take the connection within the time limit"


def test_an_unfinished_request_head_does_not_disturb_others(proxy: Proxy, p: FakeServer) -> None:
    half = RawClient(proxy, b"POST /v1/completions HTTP/1.1\r\nContent-Le")
    assert proxy.complete().status_code == 200
    half.leave()
    assert p.script is prefills
    assert proxy.complete().status_code == 200
