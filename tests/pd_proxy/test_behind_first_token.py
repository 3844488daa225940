"""An answer that has begun with P's own token, where D cannot go on behind it, and chats that begin so."""

import json
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import httpx
import pytest

from pd_proxy.apis import Body
from tests.support.examples.fake_servers import (
    FakeServer,
    Received,
    Script,
    Wire,
    answers,
    drops,
    opened,
    stalls,
    waits,
)
from tests.support.examples.greedy import (
    A_CHAT,
    GREEDY,
    GREEDY_STREAM,
    TOKEN_ID,
    completes,
    completion_event,
    completion_text,
    greedy_proxy,
    greedy_text,
    prefilled,
    prefills_as,
)
from tests.support.examples.harness import RawClient
from tests.support.examples.moving import DONE, PROMPT_IDS
from tests.support.examples.served_proxy import Proxy, ProxySetup
from tests.support.waiting import until


@pytest.fixture
def p(setup: ProxySetup) -> FakeServer:
    return setup.server(prefills_as(" gr"))


@pytest.fixture
def d(setup: ProxySetup) -> FakeServer:
    return setup.server(completes)


@pytest.fixture(params=["in-turn", "together"])
def proxy(setup: ProxySetup, p: FakeServer, d: FakeServer, request: pytest.FixtureRequest) -> Proxy:
    """A proxy whose next request goes in either way."""
    return greedy_proxy(setup, p, d, request.param)


async def goes_on(received: Received, wire: Wire) -> None:
    """A decode server that is given what the client has."""
    assert received.body["prompt"] == [*PROMPT_IDS, TOKEN_ID]
    assert received.body["max_tokens"] == GREEDY["max_tokens"] - 1
    await wire.head()
    await wire.chunk(GREEDY_STREAM.removeprefix(completion_event(" gr")))
    await wire.end()


@contextmanager
def p_has_answered(proxy: Proxy, *ds: FakeServer) -> Iterator[threading.Event]:
    """An event that is set when P has answered the request that one of these decode servers has."""
    gate = threading.Event()

    def opens() -> None:
        until(lambda: any(d.received for d in ds))
        until(lambda: re.search(r'^pd_proxy_in_flight{leg="prefill".* 0$', proxy.http.get("/metrics").text, re.M))
        gate.set()

    opener = threading.Thread(target=opens)
    opener.start()
    yield gate
    opener.join()


def ask_two(proxy: Proxy, d: FakeServer, script: Script, then: Script) -> bytes:
    """A stream whose decode server gets the whole request, acts when P has answered, and then gets the rest."""
    got = b""
    with p_has_answered(proxy, d) as gate, suppress(httpx.RemoteProtocolError):

        async def both(received: Received, wire: Wire) -> None:
            await (waits(gate, script) if received.body["prompt"] == "a" else then)(received, wire)

        d.script = both
        with proxy.http.stream("POST", "/v1/completions", json=GREEDY) as response:
            for piece in response.iter_raw():
                got += piece
    return got


async def differs(_: Received, wire: Wire) -> None:
    await wire.head()
    await wire.chunk(completion_event(" rot") + completion_event(" und"))
    await wire.end()


async def fails_in_its_stream(_: Received, wire: Wire) -> None:
    await wire.head()
    await wire.chunk(b'data: {"error": {"message": "the pull failed", "code": 500}}\n\n' + DONE)
    await wire.end()


async def gives_up(_: Received, wire: Wire) -> None:
    await wire.head()
    await wire.chunk(completion_event("", "abort") + DONE)
    await wire.end()


FAILURES = pytest.mark.parametrize(
    ("script", "reason"),
    [
        (differs, "does not begin with the prefill server's token: ' gr'"),
        (fails_in_its_stream, "the pull failed"),
        (gives_up, "gave the request up: finish reason 'abort'"),
        (answers(500, b"no"), "answered with status 500"),
        (drops, "broke off"),
    ],
    ids=["differs", "error", "abort", "500", "drops"],
)


@FAILURES
def test_where_d_fails_behind_ps_token_the_answer_goes_on_from_there(
    proxy: Proxy, p: FakeServer, d: FakeServer, warnings: Callable[[str], str], script: Script, reason: str
) -> None:
    answer = ask_two(proxy, d, script, goes_on)
    assert completion_text(answer) == " grün dich"
    assert answer.endswith(DONE)
    usage = next(json.loads(one[6:])["usage"] for one in answer.split(b"\n\n") if b'"usage"' in one)
    assert usage == {"prompt_tokens": 3, "completion_tokens": 4, "total_tokens": 7}
    assert reason in warnings("the request goes on from there")
    assert p.bodies[-1]["prompt"] == [*PROMPT_IDS, TOKEN_ID]
    until(lambda: proxy.in_flight() == 0)
    metrics = proxy.http.get("/metrics").text
    assert f"pd_proxy_first_tokens_different_total {int(script is differs)}" in metrics
    assert 'pd_proxy_moved_total{result="continued"} 1' in metrics
    assert "pd_proxy_broken_off_total 0" in metrics


@FAILURES
def test_only_one_more_decode_server_gets_the_request(
    proxy: Proxy, d: FakeServer, warnings: Callable[[str], str], script: Script, reason: str
) -> None:
    """It may be what kills them."""
    answer = ask_two(proxy, d, script, answers(500, b"no"))
    assert answer.startswith(completion_event(" gr").replace(b'"created":8', b'"created":7'))
    assert b'data: {"error":{"message":"a decode server answered with status 500' in answer
    assert not answer.endswith(DONE)
    assert "answered with status 500" in warnings("problem:")
    assert len(d.received) == 2
    assert 'pd_proxy_moved_total{result="failed"} 1' in proxy.http.get("/metrics").text


def test_another_d_gets_it_even_if_it_has_more_requests(setup: ProxySetup, p: FakeServer) -> None:
    async def is_busy(received: Received, wire: Wire) -> None:
        await (stalls if received.body["prompt"] == "b" else goes_on)(received, wire)

    other, failing = setup.server(is_busy), setup.server(answers(500, b"no"))
    proxy = setup.proxy([p], [other, failing], legs="in-turn")
    busy = RawClient.completing(proxy, json.dumps(GREEDY | {"prompt": "b", "temperature": 1}).encode())
    other.wait()
    assert greedy_text(proxy) == " grün dich"
    assert [len(server.received) for server in (other, failing)] == [2, 1]
    busy.leave()


def test_cached_tokens_stay_those_of_the_clients_prompt(setup: ProxySetup, p: FakeServer) -> None:
    async def counts(received: Received, wire: Wire) -> None:
        await wire.json(200, prefilled(" gr", remote_prefill_cached_tokens=2 if received.body["prompt"] == "a" else 3))

    async def ends(_: Received, wire: Wire) -> None:
        await wire.head()
        usage = {"prompt_tokens": 4, "completion_tokens": 1, "prompt_tokens_details": {"cached_tokens": 3}}
        await wire.chunk(
            completion_event("ün", "length") + b'data: {"choices":[],"usage":%s}\n\n' % json.dumps(usage).encode()
        )
        await wire.end()

    p.script = counts
    proxy = setup.proxy([p], [setup.server(answers(500, b"no")), setup.server(ends)], legs="in-turn")
    answer = proxy.http.post("/v1/completions", json=GREEDY).content
    assert json.loads(answer.split(b"\n\n")[-2][6:])["usage"]["prompt_tokens_details"] == {"cached_tokens": 2}


def test_if_no_p_can_compute_the_rest_d_does_alone(setup: ProxySetup, p: FakeServer) -> None:
    async def refuses(received: Received, wire: Wire) -> None:
        whole = received.body["prompt"] == "a"
        await (prefills_as(" gr") if whole else answers(400, b'{"error": {}}'))(received, wire)

    p.script = refuses
    failing, other = setup.server(answers(500, b"no")), setup.server(goes_on)
    assert greedy_text(setup.proxy([p], [failing, other], legs="in-turn")) == " grün dich"
    assert "kv_transfer_params" not in other.bodies[0]


def test_an_answer_of_which_the_client_has_more_is_broken_off(
    proxy: Proxy, d: FakeServer, warnings: Callable[[str], str]
) -> None:
    async def breaks_off(_: Received, wire: Wire) -> None:
        await wire.head()
        await wire.chunk(completion_event(" gr") + completion_event("ün"))
        wire.drop()

    answer = ask_two(proxy, d, breaks_off, goes_on)
    assert b'data: {"error":{"message":"a decode server broke off' in answer
    assert "broke off" in warnings("problem:")
    assert len(d.received) == 1


@pytest.mark.parametrize("status", [400, 503])
@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("legs", ["in-turn", "together"])
def test_what_d_refuses_is_the_clients_answer(
    setup: ProxySetup, p: FakeServer, warnings: Callable[[str], str], legs: str, count: int, status: int
) -> None:
    """P's leg lacks what D refuses, a limit beyond the context, say; or D is full, and clients know what to do then."""
    ds = [setup.server(completes) for _ in range(count)]
    proxy = setup.proxy([p], [*ds], legs=legs)
    for _ in ds:
        assert greedy_text(proxy) == " grün dich"
    for one in ds:
        one.received.clear()
    with p_has_answered(proxy, *ds) as gate:
        for one in ds:
            one.script = waits(gate, answers(status, b'{"error": {}}'))
        response = proxy.http.post("/v1/completions", json=GREEDY)
    assert (response.status_code, response.content) == (status, b'{"error": {}}')
    assert (sum(len(one.received) for one in ds), len(p.received)) == (1, count + 1), "nobody computes anything again"
    assert f"legs={legs}" in warnings(f"status={status}")
    assert "first_token=prefill" not in warnings(f"status={status}")
    assert "pd_proxy_broken_off_total 0" in proxy.http.get("/metrics").text


def test_where_no_d_takes_the_request_the_client_gets_a_status(
    setup: ProxySetup, p: FakeServer, closed_port: str
) -> None:
    proxy = setup.proxy([p], [closed_port], legs="in-turn")
    assert proxy.http.post("/v1/completions", json=GREEDY).status_code == 502
    assert len(p.received) == 1


# Chats


def chat_event(delta: Body, finish_reason: str | None = None) -> bytes:
    """One of D's, as vLLM writes it."""
    choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish_reason}
    body = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 8, "model": "tiny", "choices": [choice]}
    return b"data: " + json.dumps(body, separators=(",", ":"), ensure_ascii=False).encode() + b"\n\n"


@pytest.mark.parametrize("plain", [False, True])
def test_chats_begin_with_ps_token_where_the_operator_says_that_no_server_has_a_parser(
    setup: ProxySetup, p: FakeServer, plain: bool
) -> None:
    gate = threading.Event()

    async def prefills(_: Received, wire: Wire) -> None:
        await wire.json(200, prefilled(" gr", chat=True))

    rest = chat_event({"content": "ün"}) + chat_event({"content": " dich"}, "length") + DONE

    async def chats(_: Received, wire: Wire) -> None:
        await wire.head()
        await opened(gate)
        await wire.chunk(chat_event({"role": "assistant", "content": ""}) + chat_event({"content": " gr"}) + rest)
        await wire.end()

    p.script = prefills
    proxy = setup.proxy([p], [setup.server(chats)], legs="in-turn", plain_chats=plain)
    if not plain:
        gate.set()
    with proxy.http.stream("POST", "/v1/chat/completions", json=A_CHAT) as response:
        pieces = response.iter_raw()
        first = next(pieces)
        gate.set()
        whole = first + b"".join(pieces)
    deltas = [json.loads(one[6:])["choices"][0]["delta"] for one in whole.split(b"\n\n")[:-2]]
    assert deltas == [{"role": "assistant", "content": ""}, *({"content": text} for text in (" gr", "ün", " dich"))]
    assert whole.endswith(rest)
    assert p.bodies[0].get("ignore_eos") is (None if plain else True)
    until(lambda: f"pd_proxy_first_tokens_from_prefill_total {int(plain)}\n" in proxy.http.get("/metrics").text)


@pytest.mark.parametrize("limit", [GREEDY["max_tokens"], None])
def test_a_chat_whose_d_fails_goes_on_as_a_chat(setup: ProxySetup, p: FakeServer, limit: int | None) -> None:
    said = json.dumps({"data": [{"max_model_len": len(PROMPT_IDS) + GREEDY["max_tokens"]}]}).encode()

    def tells(script: Script) -> Script:
        async def told(received: Received, wire: Wire) -> None:
            await (wire.whole(200, said) if received.path == "/v1/models" else script(received, wire))

        return told

    async def prefills(received: Received, wire: Wire) -> None:
        await wire.json(200, prefilled(" gr", chat="messages" in received.body))

    p.script = prefills
    failing, other = setup.server(tells(answers(500, b"no"))), setup.server(tells(goes_on))
    asked: list[FakeServer | str] = [failing, other] if limit else [other, failing]  # without, the first for its models
    proxy = setup.proxy([p], asked, legs="in-turn", plain_chats=True)
    stream = proxy.http.post("/v1/chat/completions", json=A_CHAT | {"max_tokens": limit}).content
    events = [json.loads(one[6:]) for one in stream.split(b"\n\n") if one and one != b"data: [DONE]"]
    assert {one["object"] for one in events} == {"chat.completion.chunk"}
    deltas = [choice["delta"] for one in events for choice in one["choices"]]
    assert deltas == [{"role": "assistant", "content": ""}, *({"content": text} for text in (" gr", "ün", " dich"))]
