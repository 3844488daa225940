"""Several prompts in one request: both legs of each, one answer as vLLM numbers it, and one end."""

import asyncio
import json
import re
import threading
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from tests.support.examples.fake_servers import (
    FakeServer,
    Received,
    Script,
    Wire,
    answers,
    drops,
    opened,
    prefills_by_name,
    stalls,
    waits,
)
from tests.support.examples.harness import RawClient
from tests.support.examples.served_proxy import Proxy, ProxySetup
from tests.support.waiting import until

PROMPTS = ["one", "two", "three"]
ERROR = b'{"error": {"message": "too long"}}'


def choices(received: Received, text: str) -> list[dict[str, Any]]:
    """What a decode server answers to one prompt."""
    return [{"index": index, "text": f"{text} {index}"} for index in range(received.body.get("n", 1))]


def answer(received: Received, **members: Any) -> dict[str, Any]:
    return {"id": f"cmpl-{received.headers['x-request-id']}", "object": "text_completion"} | members


def figures(received: Received) -> dict[str, Any]:
    words = len(received.body["prompt"])
    return {"prompt_tokens": words, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 1}}


async def completes(received: Received, wire: Wire) -> None:
    """A decode server that repeats its prompt."""
    prompt = received.body["prompt"]
    if not received.body.get("stream"):
        await wire.json(200, answer(received, choices=choices(received, prompt), usage=figures(received)))
        return
    await wire.head()
    for text in (prompt, " again"):
        for choice in choices(received, text):
            await wire.chunk(b"data: " + json.dumps(answer(received, choices=[choice])).encode() + b"\n\n")
    if received.body.get("stream_options"):
        last = json.dumps(answer(received, choices=[], usage=figures(received))).encode()
        await wire.chunk(b"data: " + last + b"\n\n")
    await wire.chunk(b"data: [DONE]\n\n")
    await wire.end()


def only(prompt: str, then: Script) -> Script:
    """A decode server that does something else with one of the prompts, and stays silent at the others."""

    async def script(received: Received, wire: Wire) -> None:
        await (then if received.body["prompt"] == prompt else stalls)(received, wire)

    return script


@pytest.fixture
def p(setup: ProxySetup) -> FakeServer:
    return setup.server(prefills_by_name)


@pytest.fixture
def d(setup: ProxySetup) -> FakeServer:
    return setup.server(completes)


def events_of(response: httpx.Response) -> list[dict[str, Any]]:
    return [json.loads(one[6:]) for one in response.text.split("\n\n") if one and one != "data: [DONE]"]


def test_each_prompt_takes_both_legs_and_the_answer_is_one(proxy: Proxy, p: FakeServer, d: FakeServer) -> None:
    response = proxy.http.post(
        "/v1/completions", json={"prompt": PROMPTS, "n": 2}, headers={"X-Request-Id": "my-id", "Accept-Encoding": "br"}
    )
    assert response.headers["x-request-id"] == "my-id"
    assert response.headers["content-type"] == "application/json"
    whole = response.json()
    assert whole["id"] == "cmpl-my-id"
    assert [one["index"] for one in whole["choices"]] == list(range(6))
    assert [one["text"] for one in whole["choices"]] == [f"{prompt} {index}" for prompt in PROMPTS for index in (0, 1)]
    assert whole["usage"]["prompt_tokens"] == sum(map(len, PROMPTS))
    assert whole["usage"]["completion_tokens"] == 6
    assert sorted(body["prompt"] for body in p.bodies) == sorted(body["prompt"] for body in d.bodies) == sorted(PROMPTS)
    assert all(body["kv_transfer_params"]["do_remote_prefill"] for body in d.bodies)
    assert {one.headers["x-request-id"] for one in (*p.received, *d.received)} == {f"my-id-{n}" for n in range(3)}
    assert {one.headers["accept-encoding"] for one in d.received} == {"identity"}


@pytest.mark.parametrize("usage", [False, True])
def test_streams_come_as_one(proxy: Proxy, usage: bool) -> None:
    options = {"stream_options": {"include_usage": True}} if usage else {}
    response = proxy.complete(prompt=PROMPTS, n=2, stream=True, **options)
    assert response.headers["content-type"] == "text/event-stream"
    assert response.text.endswith("data: [DONE]\n\n")
    assert response.text.count("[DONE]") == 1
    events = events_of(response)
    if usage:
        assert events[-1]["usage"]["completion_tokens"] == 6
        assert events[-1]["usage"]["prompt_tokens"] == sum(map(len, PROMPTS))
        assert events.pop()["choices"] == []
    assert len({event["id"] for event in events}) == 1
    texts = dict.fromkeys(range(6), "")
    for event in events:
        texts[event["choices"][0]["index"]] += event["choices"][0]["text"]
    assert texts == {2 * p + n: f"{PROMPTS[p]} {n} again {n}" for p in range(3) for n in (0, 1)}


def test_an_event_does_not_wait_for_the_other_prompts(proxy: Proxy, d: FakeServer) -> None:
    gate = threading.Event()

    async def one_first(received: Received, wire: Wire) -> None:
        await (completes if received.body["prompt"] == "two" else waits(gate, completes))(received, wire)

    d.script = one_first
    with proxy.http.stream("POST", "/v1/completions", json={"prompt": PROMPTS, "stream": True}) as response:
        pieces = response.iter_raw()
        assert json.loads(next(pieces).split(b"\n\n")[0][6:])["choices"][0]["index"] == 1
        gate.set()
        assert b"".join(pieces).endswith(b"data: [DONE]\n\n")


def test_figures_that_are_not_told_of_each_prompt_are_null(setup: ProxySetup, p: FakeServer) -> None:
    async def tells_some(received: Received, wire: Wire) -> None:
        usage = {"prompt_tokens": 1} | ({} if received.body["prompt"] == "two" else {"cached_tokens": 1})
        await wire.json(200, answer(received, choices=[], usage=usage))

    whole = setup.proxy([p], [setup.server(tells_some)]).complete(prompt=PROMPTS).json()
    assert whole["usage"] == {"prompt_tokens": 3, "cached_tokens": None}


@pytest.mark.parametrize("prompts", [PROMPTS, [[1, 2], [3]]], ids=["texts", "ids"])
def test_what_keeps_one_prompt_with_d_keeps_all_of_them_there(
    setup: ProxySetup, p: FakeServer, prompts: list[Any]
) -> None:
    d = setup.server(answers(200, b"{}"))
    proxy = setup.proxy([p], [d])
    unusual: list[dict[str, Any]] = [{"use_beam_search": True}, {"prompt_logprobs": 1}, {"stream": 1}]
    unusual += [{"prompt": [*prompts, more]} for more in (7, [[2], [3]], ["a"])]
    for changed in unusual:
        assert proxy.complete(**{"prompt": prompts} | changed).content == b"{}"
    assert not p.received
    assert [body["prompt"] for body in d.bodies] == [each.get("prompt", prompts) for each in unusual]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("legs", ["in-turn", "together"])
def test_an_error_of_d_is_the_answer_and_ends_the_other_prompts(
    setup: ProxySetup, p: FakeServer, warnings: Callable[[str], str], legs: str, stream: bool
) -> None:
    refuses = answers(400, ERROR, Content_Type="application/json", Retry_After="7")
    d = setup.server(completes)
    proxy = setup.proxy([p], [d], legs=legs)
    assert proxy.complete(prompt=PROMPTS).status_code == 200
    d.received.clear()
    d.script = only("two", refuses)
    response = proxy.complete(prompt=PROMPTS, stream=stream)
    assert (response.status_code, response.content, response.headers["retry-after"]) == (400, ERROR, "7")
    assert "problem: prompt 1 failed with status 400" in warnings("problem: prompt")
    others = [one for one in d.received if one.body["prompt"] != "two"]
    assert all(one.left.wait(30) for one in others)
    until(lambda: proxy.in_flight() == 0)


def test_a_prompt_that_breaks_off_breaks_a_stream_off(proxy: Proxy, d: FakeServer) -> None:
    begun = threading.Event()

    async def one_breaks(received: Received, wire: Wire) -> None:
        if received.body["prompt"] == "two":
            await opened(begun)
            await drops(received, wire)
            return
        await wire.head()
        event = answer(received, choices=choices(received, "a"))
        await wire.chunk(b"data: " + json.dumps(event).encode() + b"\n\n")
        await stalls(received, wire)

    d.script = one_breaks
    client = RawClient.completing(proxy, json.dumps({"prompt": PROMPTS, "stream": True}).encode())
    client.receive_until(b'"index"')
    begun.set()
    got = client.receive_all()
    assert not got.endswith(b"0\r\n\r\n")
    assert got.count(b'"error"') == got.count(b'"message":"a decode server broke off"') == 1
    assert b"[DONE]" not in got
    assert "pd_proxy_broken_off_total 1" in proxy.http.get("/metrics").text
    until(lambda: proxy.in_flight() == 0)


@pytest.mark.parametrize("how", ["in order", "breaks off", "refused"])
def test_the_error_of_one_prompt_ends_a_stream_that_has_begun(proxy: Proxy, d: FakeServer, how: str) -> None:
    """By itself, behind what the others have said; nothing but the end is behind it."""
    begun = threading.Event()
    refuses = answers(400, ERROR, Content_Type="application/json")

    async def one_fails(received: Received, wire: Wire) -> None:
        is_second = received.body["prompt"] == "two"
        if is_second:
            await opened(begun)
        if is_second and how == "refused":
            await refuses(received, wire)
            return
        await wire.head()
        event = answer(received, choices=choices(received, "a"))
        await wire.chunk(b"data: " + json.dumps(event).encode() + b"\n\n")
        if not is_second:
            await stalls(received, wire)
        elif how == "in order":
            await wire.chunk(b"data: " + ERROR + b"\n\ndata: [DONE]\n\n")
            await wire.end()
        else:
            await drops(received, wire)

    d.script = one_fails
    client = RawClient.completing(proxy, json.dumps({"prompt": PROMPTS, "stream": True}).encode())
    client.receive_until(b'"index"')
    begun.set()
    got = client.receive_until(b"0\r\n\r\n") if how == "in order" else client.receive_all()
    assert got.count(b'"error"') == 1
    assert (b"too long" in got) == (how != "breaks off")
    assert (b"[DONE]" in got, got.endswith(b"0\r\n\r\n")) == (how == "in order",) * 2
    assert b'"index"' not in got.partition(b'"error"')[2]
    assert b"status 200" not in got
    assert all(one.left.wait(30) for one in d.received if one.body["prompt"] != "two")
    client.leave()


def test_what_is_no_answer_is_an_error(proxy: Proxy, d: FakeServer) -> None:
    d.script = answers(200, b"<html>")
    response = proxy.complete(prompt=PROMPTS)
    assert response.status_code == 502
    assert re.fullmatch(r"prompt \d failed", response.json()["error"]["message"])


def test_only_so_many_are_under_way_at_once(proxy: Proxy, d: FakeServer) -> None:
    most = under_way = 0

    async def counts(received: Received, wire: Wire) -> None:
        nonlocal most, under_way
        under_way += 1
        most = max(most, under_way)
        await asyncio.sleep(0.01)
        under_way -= 1
        await completes(received, wire)

    d.script = counts
    whole = proxy.complete(prompt=[str(number) for number in range(50)]).json()
    assert [one["text"] for one in whole["choices"]] == [f"{number} 0" for number in range(50)]
    assert 1 < most <= 16


def test_behind_one_that_fails_none_is_begun(
    proxy: Proxy, p: FakeServer, access_lines: Callable[[int], list[str]], warnings: Callable[[str], str]
) -> None:
    async def refuses_the_first(received: Received, wire: Wire) -> None:
        while len(p.received) < 16:
            await asyncio.sleep(0.002)
        await (answers(400, ERROR) if received.body["prompt"] == "0" else stalls)(received, wire)

    p.script = refuses_the_first
    assert proxy.complete(prompt=[str(number) for number in range(40)]).status_code == 400
    assert warnings("problem: prompt 0 failed with status 400"), "the last line of all"
    assert len(access_lines(17)) == 17, "one of each that was begun, and one of the whole"


def test_a_client_that_leaves_takes_all_prompts_along(
    proxy: Proxy, d: FakeServer, access_lines: Callable[[int], list[str]]
) -> None:
    d.script = stalls
    client = RawClient.completing(proxy, json.dumps({"prompt": PROMPTS, "stream": True}).encode())
    d.wait(3)
    client.leave()
    assert all(one.left.wait(30) for one in d.received)
    assert all("status=499" in line for line in access_lines(4))
    until(lambda: proxy.in_flight() == 0)
    d.script = completes
    assert proxy.complete(prompt=PROMPTS).status_code == 200


def test_a_batch_of_chats_is_counted_as_what_d_computes(proxy: Proxy, p: FakeServer, d: FakeServer) -> None:
    chats = {"model": "tiny", "messages": [[{"role": "user", "content": text}] for text in "ab"]}
    d.script = answers(200, b"{}")
    assert proxy.http.post("/v1/chat/completions/batch", json=chats).status_code == 200
    assert p.received == []
    assert 'pd_proxy_not_disaggregated_total{reason="several prompts"} 1' in proxy.http.get("/metrics").text
