"""P's own token as the beginning of the answer: for which requests, how D goes on, and who does if it cannot."""

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Callable, MutableMapping
from typing import Any

import anyio
import pytest
from starlette.types import Send

from pd_proxy.apis import CHAT, COMPLETIONS
from pd_proxy.error_answers import LegFailed
from pd_proxy.first_token import FirstToken, may_begin
from pd_proxy.http_client import Client
from pd_proxy.journal import Record
from pd_proxy.moves import Written
from tests.support.examples.fake_servers import FakeServer, Received, Wire, answers, opened, stalls
from tests.support.examples.greedy import (
    A_CHAT,
    GREEDY,
    GREEDY_STREAM,
    USAGE_EVENT,
    completes,
    completion_event,
    completion_text,
    greedy_proxy,
    greedy_text,
    prefilled,
    prefills_as,
)
from tests.support.examples.harness import RawClient
from tests.support.examples.moving import DONE
from tests.support.examples.served_proxy import Proxy, ProxySetup
from tests.support.waiting import until


def first_token(send: Send) -> FirstToken:
    """That of a text completion."""
    return FirstToken(Client({"type": "http", "headers": []}, send, Record("/")), Written(COMPLETIONS, GREEDY))


# For which requests


@pytest.mark.parametrize(
    "changed",
    [
        {},
        {"temperature": 0.0},
        {"max_tokens": 2},
        {"ignore_eos": True},
        {"seed": 7, "top_p": 0.5, "top_k": 3},
        {"n": 1, "stop": [], "logprobs": None, "presence_penalty": 0.0, "repetition_penalty": 1.0, "min_tokens": 0},
        {"stream_options": {"include_usage": True}},
        {"kv_transfer_params": {"a": 1}},
    ],
    ids=str,
)
def test_a_greedy_streamed_completion_may_begin_with_ps_token(changed: dict[str, Any]) -> None:
    assert may_begin(COMPLETIONS, GREEDY | changed)


@pytest.mark.parametrize(
    "changed",
    [
        {"stream": False},
        {"stream": "yes"},
        {"temperature": None},
        {"temperature": 0.1},
        {"temperature": False},
        {"max_tokens": 1},
        {"max_tokens": "5"},
        {"n": 2},
        {"logprobs": 0},
        {"echo": True},
        {"stop": "a"},
        {"stop": ["a"]},
        {"stop_token_ids": [2]},
        {"min_tokens": 1},
        {"presence_penalty": 0.5},
        {"frequency_penalty": -0.5},
        {"repetition_penalty": 1.1},
        {"logit_bias": {"7": 100}},
        {"allowed_token_ids": [7]},
        {"bad_words": ["a"]},
        {"structured_outputs": {"json": {}}},
        {"response_format": {"type": "text"}},
        {"skip_special_tokens": False},
        {"return_token_ids": True},
        {"thinking_token_budget": 3},
        {"repetition_detection": {}},
        {"stream_options": {"continuous_usage_stats": True}},
        {"stream_options": []},
        {"vllm_xargs": {"mine": 1}},
        {"a_parameter_of_next_year": 1},
    ],
    ids=str,
)
def test_whatever_could_shape_or_end_it_keeps_it_with_d(changed: dict[str, Any]) -> None:
    allowed = changed == {"stream_options": []}  # as good as none
    assert may_begin(COMPLETIONS, GREEDY | changed) is allowed


@pytest.mark.parametrize(
    ("changed", "may"),
    [
        ({}, True),
        ({"max_completion_tokens": 2, "max_tokens": None}, True),
        ({"max_completion_tokens": 1}, False),
        ({"max_tokens": None}, True),
        ({"temperature": None}, False),
        ({"tools": [{}]}, False),
        ({"response_format": {"type": "json_object"}}, False),
        ({"logprobs": True}, False),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, False),
    ],
    ids=str,
)
def test_so_may_a_greedy_chat_of_text_alone(changed: dict[str, Any], may: bool) -> None:
    assert may_begin(CHAT, A_CHAT | changed) is may


# How D goes on


def continued(first: str, *pieces: bytes) -> bytes:
    """What the client gets behind P's token."""

    async def nowhere(_: object) -> None:
        pass

    async def stream() -> AsyncIterator[bytes]:
        for piece in pieces:
            yield piece

    async def scenario() -> bytes:
        token = first_token(nowhere)
        await token.release()
        await token.send(prefilled(first))
        assert await token.is_sent()
        return b"".join([piece async for piece in token.continued("http://d", stream())])

    return asyncio.run(scenario())


def test_an_event_with_that_text_alone_is_left_out_and_all_else_is_as_d_sent_it() -> None:
    assert continued(" gr", GREEDY_STREAM) == GREEDY_STREAM.removeprefix(completion_event(" gr"))


@pytest.mark.parametrize("is_cut", [False, True])
def test_a_token_behind_a_prompt_that_was_cut_is_none_of_the_text(is_cut: bool) -> None:
    async def nowhere(_: object) -> None:
        pass

    async def scenario() -> bool:
        token = first_token(nowhere)
        await token.release()
        await token.send(prefilled(" gr", prompt_is_cut=is_cut))
        return await token.is_sent()

    assert asyncio.run(scenario()) is not is_cut


def test_it_comes_when_the_client_is_sent_it_though_p_has_answered_before() -> None:
    async def nowhere(_: object) -> None:
        pass

    async def scenario() -> None:
        record = Record("/v1/completions")
        record.streams, record.prefill_at, record.prefill_s = True, record.started, 0.0
        client = Client({"type": "http", "headers": []}, nowhere, record)
        token = FirstToken(client, Written(COMPLETIONS, GREEDY))
        await token.send(prefilled(" gr"))
        assert record.first_token_s is None
        await asyncio.sleep(0.1)  # D reads its request
        await token.release()
        assert record.first_token_s is not None
        assert 0.1 <= record.first_token_s < 5.0

    asyncio.run(scenario())


def test_d_goes_on_only_behind_it_though_the_client_is_slow_to_take_it() -> None:
    async def scenario() -> None:
        order: list[str] = []
        may_take = anyio.Event()

        async def slow(message: MutableMapping[str, Any]) -> None:
            await may_take.wait()
            order.append(message["type"])

        token = first_token(slow)
        await token.release()

        async def goes_on() -> None:
            assert await token.is_sent()
            order.append("D")

        async with anyio.create_task_group() as group:
            group.start_soon(token.send, prefilled(" gr"))
            await anyio.wait_all_tasks_blocked()
            group.start_soon(goes_on)
            await anyio.wait_all_tasks_blocked()
            may_take.set()
        assert order == ["http.response.start", "http.response.body", "D"]

    anyio.run(scenario)


def test_it_waits_until_d_has_taken_the_request() -> None:
    async def scenario() -> list[str]:
        sent: list[str] = []

        async def noted(message: MutableMapping[str, Any]) -> None:
            sent.append(message["type"])

        token = first_token(noted)
        await token.send(prefilled(" gr"))
        assert not sent
        await token.release()
        return sent

    assert asyncio.run(scenario()) == ["http.response.start", "http.response.body"]


@pytest.mark.parametrize("size", [1, 2, 7, 100])
def test_it_does_not_matter_how_the_stream_is_cut(size: int) -> None:
    pieces = [GREEDY_STREAM[start : start + size] for start in range(0, len(GREEDY_STREAM), size)]
    assert continued(" gr", *pieces) == GREEDY_STREAM.removeprefix(completion_event(" gr"))


def test_what_an_event_has_beyond_it_is_passed_on() -> None:
    """D's first event may have several tokens."""
    assert (
        completion_text(continued(" gr", completion_event(" grün dich"), completion_event("!", "stop"), DONE))
        == "ün dich!"
    )


def test_events_of_less_than_the_token_are_left_out_together() -> None:
    assert (
        continued(
            " gr", completion_event(""), completion_event(" "), completion_event("g"), completion_event("rün"), DONE
        )
        == completion_event("ün") + DONE
    )


def test_the_end_is_passed_on_though_it_has_no_text_left() -> None:
    assert continued(" gr", completion_event(" gr", "stop"), DONE) == completion_event("", "stop") + DONE


@pytest.mark.parametrize("size", [5, 1000])
def test_comments_are_no_beginning_and_are_passed_on(size: int) -> None:
    """vLLM sends some to keep a silent connection open, if its operator says so."""
    comment = b": keep-alive\n\n"
    stream = comment + completion_event(" g") + comment + completion_event("rün") + comment + DONE
    pieces = [stream[start : start + size] for start in range(0, len(stream), size)]
    assert continued(" gr", *pieces) == 2 * comment + completion_event("ün") + comment + DONE


@pytest.mark.parametrize(
    "stream",
    [
        completion_event(" rot"),
        completion_event(" g") + completion_event("elb"),
        completion_event(" g", "stop") + DONE,
        DONE,
        USAGE_EVENT,
        b"",
        b"data: no JSON\n\n",
    ],
    ids=str,
)
def test_another_beginning_is_an_error(stream: bytes) -> None:
    with pytest.raises(LegFailed, match="does not begin with the prefill server's token: ' gr'"):
        continued(" gr", stream)


def test_an_error_of_d_is_told_as_such() -> None:
    with pytest.raises(LegFailed, match=r"http://d failed: .*the pull failed"):
        continued(" gr", b'data: {"error": {"message": "the pull failed", "code": 500}}\n\n' + DONE)


# Through the proxy


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


def test_the_client_has_ps_token_before_d_has_computed_anything(
    proxy: Proxy, d: FakeServer, warnings: Callable[[str], str]
) -> None:
    gate = threading.Event()

    async def computes(_: Received, wire: Wire) -> None:
        await wire.head()
        await opened(gate)
        await wire.chunk(GREEDY_STREAM)
        await wire.end()

    d.script = computes
    with proxy.http.stream("POST", "/v1/completions", json=GREEDY, headers={"X-Request-Id": "my-id"}) as response:
        pieces = response.iter_raw()
        first = next(pieces)
        gate.set()
        rest = b"".join(pieces)
    assert first == completion_event(" gr").replace(b'"created":8', b'"created":7')  # else the same as without
    assert rest == GREEDY_STREAM.removeprefix(completion_event(" gr"))
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert response.headers["x-request-id"] == "my-id"
    assert " first_token=prefill" in warnings("id=my-id")
    assert "pd_proxy_first_tokens_from_prefill_total 2" in proxy.http.get("/metrics").text


def test_d_is_asked_for_the_whole_text_and_p_ends_it_where_the_client_would(
    proxy: Proxy, p: FakeServer, d: FakeServer
) -> None:
    greedy_text(proxy)
    greedy_text(proxy, ignore_eos=True)
    until(lambda: len(p.bodies) == 2)  # an answer may be D's own, if that is faster
    assert [body.get("ignore_eos") for body in p.bodies] == [None, True]
    assert [body["max_tokens"] for body in d.bodies] == [5, 5]


def test_ps_token_is_sampled_by_what_the_client_says_and_not_by_what_the_model_has_instead(
    proxy: Proxy, p: FakeServer, d: FakeServer
) -> None:
    neutral = {"repetition_penalty": 1.0, "presence_penalty": 0, "frequency_penalty": 0, "skip_special_tokens": True}
    greedy_text(proxy, **neutral)
    until(lambda: p.bodies and d.bodies)  # an answer may be D's own, if that is faster
    assert neutral.items() <= p.bodies[0].items()
    assert neutral.items() <= d.bodies[0].items()


def test_a_request_that_may_not_begin_so_is_ds_alone(proxy: Proxy, p: FakeServer, d: FakeServer) -> None:
    assert greedy_text(proxy, temperature=1) == " grün dich"
    assert p.bodies[0]["ignore_eos"] is True
    assert "pd_proxy_first_tokens_from_prefill_total 1" in proxy.http.get("/metrics").text


def test_a_browser_gets_the_headers_of_d_with_the_whole_answer(proxy: Proxy, d: FakeServer) -> None:
    d.script = answers(200, GREEDY_STREAM, Content_Type="text/event-stream", Access_Control_Allow_Origin="*")
    response = proxy.http.post("/v1/completions", json=GREEDY, headers={"Origin": "http://page"})
    assert response.headers["access-control-allow-origin"] == "*"
    assert response.content == GREEDY_STREAM


def test_a_token_without_text_is_left_to_d(proxy: Proxy, p: FakeServer) -> None:
    p.script = prefills_as("")
    assert greedy_text(proxy) == " grün dich"
    assert "pd_proxy_first_tokens_from_prefill_total 1" in proxy.http.get("/metrics").text


def test_a_text_that_ends_with_its_first_token_is_ds_alone(
    proxy: Proxy, p: FakeServer, d: FakeServer, warnings: Callable[[str], str]
) -> None:
    """P hands nothing over then, and D is told so where it asked by name."""

    async def ends(received: Received, wire: Wire) -> None:
        if "kv_transfer_params" in received.body:
            await answers(500, b"the transfer has ended")(received, wire)
        else:
            await wire.whole(200, completion_event("", "stop") + DONE, {"Content-Type": "text/event-stream"})

    p.script, d.script = prefills_as("", "stop"), ends
    assert proxy.http.post("/v1/completions", json=GREEDY).content == completion_event("", "stop") + DONE
    assert "not disaggregated: the text ends with its first token" in warnings("not disaggregated")


def test_without_ids_the_whole_answer_is_ds(proxy: Proxy, p: FakeServer) -> None:
    """No other D could go on behind the token."""

    async def tells_none(received: Received, wire: Wire) -> None:
        answer = prefilled(" gr")
        del answer["choices"][0]["token_ids"]
        await wire.json(200, answer)

    p.script = tells_none
    assert greedy_text(proxy) == " grün dich"
    assert "pd_proxy_first_tokens_from_prefill_total 1" in proxy.http.get("/metrics").text


def test_a_client_that_leaves_behind_ps_token_takes_the_request_from_d(proxy: Proxy, d: FakeServer) -> None:
    async def begins(received: Received, wire: Wire) -> None:
        await wire.head()
        await stalls(received, wire)

    d.script = begins
    client = RawClient.completing(proxy, json.dumps(GREEDY).encode())
    client.receive_until(b" gr")
    received = d.wait()
    client.leave()
    assert received.left.wait(30)
    until(lambda: proxy.in_flight() == 0)
