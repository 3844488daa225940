"""A request that goes well: what P and D are sent, and what the client gets back."""

import asyncio
import gzip
import json
import threading
from collections.abc import Callable
from typing import Any

import httpx
import pytest

import pd_proxy.servers
from tests.support.examples.fake_servers import NAMED_TRANSFER, TRANSFER, FakeServer, Received, Wire, answers, opened
from tests.support.examples.served_proxy import Proxy, ProxySetup
from tests.support.waiting import until


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_a_request_is_prefilled_then_decoded_with_the_returned_transfer(
    proxy: Proxy, p: FakeServer, d: FakeServer, path: str
) -> None:
    body: dict[str, Any] = {"model": "tiny", "max_tokens": 40, "temperature": 0.5, "unknown": [1.5, "ü\ud800", None]}
    body |= {"prompt": "Guten Tag"} if path == "/v1/completions" else {"messages": [{"role": "user", "content": "Tag"}]}

    response = proxy.http.post(path, content=json.dumps(body))

    assert response.status_code == 200
    assert response.json() == {"choices": [{"text": " the answer"}]}
    assert [one.path for one in (*p.received, *d.received)] == [path, path]
    assert p.bodies[0]["max_tokens"] == 1
    assert p.bodies[0]["kv_transfer_params"]["do_remote_decode"] is True
    assert d.bodies == [body | {"kv_transfer_params": TRANSFER}]


def test_text_is_sent_as_it_is_and_not_escaped(proxy: Proxy, p: FakeServer, d: FakeServer) -> None:
    assert proxy.complete(prompt="щ" * 1000, seed=10**30).status_code == 200  # an integer that only Python can hold
    assert d.bodies[0]["seed"] == 10**30
    assert proxy.complete(prompt="щ" * 1000).status_code == 200
    assert [body["prompt"] for body in (*p.bodies, *d.bodies)] == ["щ" * 1000] * 4
    assert all(len(server.received[1].content) < 2500 for server in (p, d))


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_choices_share_one_prompt(proxy: Proxy, p: FakeServer, d: FakeServer, path: str) -> None:
    assert proxy.http.post(path, json={"prompt": "a", "messages": [], "n": 4}).status_code == 200
    assert [body["n"] for body in (*p.bodies, *d.bodies)] == [1, 4]
    assert d.bodies[0]["kv_transfer_params"] == TRANSFER


def metrics_without_prefix_cache() -> bytes:
    from vllm.config import CacheConfig  # noqa: PLC0415  seconds

    config = CacheConfig(block_size=16, enable_prefix_caching=False).metrics_info()  # as vLLM tells it
    labels = ",".join(f'{name}="{value}"' for name, value in sorted(config.items()))
    return f"# TYPE vllm:cache_config_info gauge\nvllm:cache_config_info{{{labels}}} 1.0\n".encode()


def test_who_is_told_no_metrics_does_not_decide_for_others(
    proxy: Proxy, p: FakeServer, d: FakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pd_proxy.servers, "_ROOM_AGAIN_S", 0.0)
    for metrics in (None, metrics_without_prefix_cache()):
        d.metrics = metrics
        assert proxy.complete(n=4).status_code == 200
    assert len(p.received) == 1


def test_choices_that_vllm_cannot_share_are_ds_alone(proxy: Proxy, p: FakeServer, d: FakeServer) -> None:
    proxy.complete()
    d.metrics = metrics_without_prefix_cache()
    assert proxy.complete(n=4).status_code == 200
    assert proxy.complete(n=1).status_code == 200
    assert (len(p.received), len(d.received)) == (2, 3)
    assert "kv_transfer_params" not in d.bodies[1]
    counted = 'pd_proxy_not_disaggregated_total{reason="several samples, no prefix cache"} 1'
    assert counted in proxy.http.get("/metrics").text


def test_a_request_that_cannot_be_divided_goes_to_decode_alone_and_is_counted(
    proxy: Proxy, p: FakeServer, d: FakeServer, access_lines: Callable[[int], list[str]]
) -> None:
    response = proxy.complete(prompt=["a", [7]], kv_transfer_params={"remote_host": "evil"})
    assert response.json() == {"choices": [{"text": " the answer"}]}
    assert p.received == []
    assert d.bodies == [{"model": "tiny", "prompt": ["a", [7]]}]
    assert "not disaggregated: several prompts" in access_lines(1)[0]
    assert 'pd_proxy_not_disaggregated_total{reason="several prompts"} 1' in proxy.http.get("/metrics").text


def test_choices_of_a_model_with_states_are_d_s_alone_once_p_has_said_so(
    proxy: Proxy, p: FakeServer, d: FakeServer
) -> None:
    def asked(**params: bool) -> int:
        """How many prefill legs two requests have, of which the first is for P to tell by."""
        p.script = answers(200, json.dumps({"kv_transfer_params": NAMED_TRANSFER | params}).encode())
        before = len(p.received)
        for n in (1, 2):
            assert proxy.complete(n=n).status_code == 200
        return len(p.received) - before

    assert asked(prompt_is_cut=True) == 1
    assert d.bodies[-1] == {"model": "tiny", "prompt": "a question", "n": 2}
    counted = 'pd_proxy_not_disaggregated_total{reason="several samples, a model with states"} 1'
    until(lambda: counted in proxy.http.get("/metrics").text)
    assert asked() == 2


@pytest.mark.parametrize(
    ("value", "passed"),
    [
        ("Grüße".encode(), "Grüße"),
        (b"Gr\xfc\xdfe", "Gr\ufffd\ufffde"),
        *((b"a%cb" % byte, "a\ufffdb") for byte in (0x01, 0x08, 0x0E, 0x1F, 0x7F)),
    ],
)
def test_a_header_with_bytes_beyond_ascii_does_no_harm(
    proxy: Proxy, p: FakeServer, d: FakeServer, value: bytes, passed: str
) -> None:
    """UTF-8 reaches the servers as it is; what else it may be, which nobody can know, and control bytes need not."""
    for name in ("X-User", "Authorization", "X-Request-Id", "Accept-Encoding", "Connection"):
        raw = [(b"Content-Type", b"application/json"), (name.encode(), value)]
        assert proxy.http.post("/v1/completions", json={"prompt": "a"}, headers=raw).status_code == 200
    shown = [one.headers["x-user"].encode("latin-1").decode() for one in (*p.received[:1], *d.received[:1])]
    assert shown == [passed, passed]


def test_a_request_that_offers_another_protocol_is_served_as_it_is(proxy: Proxy, d: FakeServer) -> None:
    """As Java's HttpClient sends each."""
    offer = {"Connection": "Upgrade, HTTP2-Settings", "Upgrade": "h2c", "HTTP2-Settings": "AAEAAEAA"}
    assert proxy.http.post("/v1/completions", json={"prompt": "a"}, headers=offer).status_code == 200
    assert d.bodies[0]["prompt"] == "a"
    assert not {"upgrade", "http2-settings"} & d.received[0].headers.keys()


def test_headers_reach_both_legs_and_the_client(proxy: Proxy, p: FakeServer, d: FakeServer) -> None:
    d.script = answers(
        200, b"{}", Content_Type="application/json", X_From_D="yes", Connection="X-Private", X_Private="1"
    )
    sent = {
        "Authorization": "Bearer key",
        "X-Request-Id": "my-id",
        "traceparent": "00-1-2-3",
        "Connection": "keep-alive, X-Hop",
        "X-Hop": "for the proxy only",
        "X-data-parallel-rank": "1",
        "Accept-Encoding": "br",
    }
    response = proxy.http.post("/v1/completions", json={"prompt": "a"}, headers=sent)
    for one in (p.received[0], d.received[0]):
        assert one.headers["authorization"] == "Bearer key"
        assert one.headers["x-request-id"] == "my-id"
        assert one.headers["traceparent"] == "00-1-2-3"
        assert one.headers["content-type"] == "application/json"
        assert one.headers["host"] != proxy.url.removeprefix("http://")
        assert not {"x-hop", "x-data-parallel-rank"} & one.headers.keys()
    # The proxy reads P's answer itself; D's goes to the client as it is.
    assert p.received[0].headers["accept-encoding"] == "identity"
    assert d.received[0].headers["accept-encoding"] == "br"
    assert response.headers["x-from-d"] == "yes"
    assert response.headers["x-request-id"] == "my-id"
    assert "x-private" not in response.headers


@pytest.mark.parametrize(
    ("headers", "body", "kept"),
    [
        ({"X-Request-Id": "from-header"}, {"request_id": "from-body"}, "from-header"),
        ({}, {"request_id": "from-body"}, "from-body"),
        ({}, {}, None),
        ({}, {"request_id": "two\nlines"}, None),
        ({"X-Request-Id": "x" * 257}, {}, None),
    ],
    ids=["header", "body", "neither", "not a header value", "too long"],
)
def test_both_legs_and_the_client_see_one_request_id(
    proxy: Proxy, p: FakeServer, d: FakeServer, headers: dict[str, str], body: dict[str, str], kept: str | None
) -> None:
    response = proxy.http.post("/v1/completions", json={"prompt": "a"} | body, headers=headers)
    seen = {one.headers["x-request-id"] for one in (p.received[0], d.received[0])} | {response.headers["x-request-id"]}
    assert len(seen) == 1
    if kept is None:
        assert len(seen.pop()) == 32
    else:
        assert seen == {kept}


def test_one_access_line_tells_servers_timings_and_status(
    proxy: Proxy, p: FakeServer, d: FakeServer, access_lines: Callable[[int], list[str]]
) -> None:
    proxy.http.post("/v1/completions", json={"prompt": "a"}, headers={"X-Request-Id": "my-id"})
    (line,) = access_lines(1)
    assert line.startswith(f"/v1/completions id=my-id status=200 P={p.url} D={d.url} legs=in-turn prefill=")
    timings = dict(part.split("=", 1) for part in line.split() if part.endswith("ms"))
    assert timings.keys() == {"prefill", "first_byte", "total"}
    milliseconds = {name: float(value.removesuffix("ms")) for name, value in timings.items()}
    assert 0 < milliseconds["prefill"] + milliseconds["first_byte"] <= milliseconds["total"] + 0.2


STREAM = [
    b'data: {"choices": [{"text": " gr',  # an event in two pieces
    "üß".encode()[:1],  # a character in two pieces
    "üß".encode()[1:],
    b' dich"}]}\n\ndata: {"one": 1}\n\ndata: {"two"',  # one and a half events in a piece
    b": 2}\r\n\r\n: a comment\n\n",
    b"\xff\x00 no text at all",
    b"data: [DONE]\n\n",
]


def test_a_stream_reaches_the_client_byte_for_byte(setup: ProxySetup, p: FakeServer) -> None:
    async def stream(_: Received, wire: Wire) -> None:
        await wire.head(200, {"Content-Type": "text/event-stream; charset=utf-8"})
        for piece in STREAM:
            await wire.chunk(piece)
            await asyncio.sleep(0.002)
        await wire.end()

    proxy = setup.proxy([p], [setup.server(stream)])
    response = proxy.complete(stream=True)
    assert response.content == b"".join(STREAM)
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"


def test_no_piece_of_a_stream_waits_for_the_next(proxy: Proxy, d: FakeServer) -> None:
    gates = [threading.Event() for _ in STREAM]

    async def stream(_: Received, wire: Wire) -> None:
        await wire.head()
        for piece, gate in zip(STREAM, gates, strict=True):
            await wire.chunk(piece)
            await opened(gate)
        await wire.end()

    d.script = stream
    with proxy.http.stream("POST", "/v1/completions", json={"prompt": "a", "stream": True}) as response:
        pieces = response.iter_raw()
        for piece, gate in zip(STREAM, gates, strict=True):
            assert next(pieces) == piece
            gate.set()
        assert next(pieces, None) is None


def test_an_encoded_answer_is_passed_on_encoded(proxy: Proxy, d: FakeServer) -> None:
    packed = gzip.compress(b'{"choices": []}')
    d.script = answers(200, packed, Content_Type="application/json", Content_Encoding="gzip")
    with proxy.http.stream("POST", "/v1/completions", json={"prompt": "a"}) as response:
        assert response.headers["content-length"] == str(len(packed))
        assert response.headers["content-encoding"] == "gzip"
        assert b"".join(response.iter_raw()) == packed


def test_120_requests_are_under_way_at_once_on_each_leg(setup: ProxySetup) -> None:
    count = 120

    def meeting(answer: object) -> Any:
        everybody = threading.Event()
        present = 0

        async def script(received: Received, wire: Wire) -> None:
            nonlocal present
            present += 1
            if present == count:
                everybody.set()
            await opened(everybody)
            await wire.json(200, {"echo": received.body["prompt"], "kv_transfer_params": answer})

        return script

    proxy = setup.proxy([setup.server(meeting(TRANSFER))], [setup.server(meeting(None))])

    async def ask_all() -> list[httpx.Response]:
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=proxy.url, timeout=60, limits=limits, trust_env=False) as client:
            asked = (client.post("/v1/completions", json={"prompt": f"question {i}"}) for i in range(count))
            return await asyncio.gather(*asked)

    responses = asyncio.run(ask_all())
    assert [one.status_code for one in responses] == [200] * count
    assert [one.json()["echo"] for one in responses] == [f"question {i}" for i in range(count)]
    until(lambda: proxy.in_flight() == 0)
