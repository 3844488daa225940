"""Cached prompt tokens in an answer's usage: what P says, which is what a single server would have said."""

import asyncio
import json
import threading
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest

from pd_proxy.usage import ANTHROPIC, CHAT_DETAILS, PromptDetails, corrected, corrected_whole
from tests.support.examples.fake_servers import NAMED_TRANSFER, FakeServer, Received, Script, Wire, answers, opened
from tests.support.examples.served_proxy import ProxySetup
from tests.support.waiting import until

#: As vLLM writes them: with nulls in a whole answer, without in a stream. The text looks like the figures, but is none.
WHOLE = (
    b'{"choices":[{"text":"say \\"prompt_tokens_details\\":{\\"cached_tokens\\":7}"}],"usage":{"prompt_tokens":100,'
    b'"prompt_tokens_details":{"cached_tokens":99,"created_cache_tokens":null,"multimodal_tokens":{"image":3}},'
    b'"completion_tokens":1},"kv_transfer_params":null}'
)
STREAM = (
    b'data: {"choices":[{"text":" \xc3\xbc"}],"usage":{"prompt_tokens":100}}\n\n'
    b'data: {"choices":[],"usage":{"prompt_tokens":100,"prompt_tokens_details":{"cached_tokens":99}}}\n\n'
    b"data: [DONE]\n\n"
)


def right(content: bytes, cached: str) -> bytes:
    """The answer with other figures, and no other byte changed."""
    return content.replace(b'"cached_tokens":99', b'"cached_tokens":' + cached.encode())


def through(pieces: list[bytes], details: PromptDetails) -> list[bytes]:
    """What becomes of the pieces of an answer."""

    async def sent() -> AsyncIterator[bytes]:
        for piece in pieces:
            yield piece

    async def told() -> PromptDetails:
        return details

    async def run() -> list[bytes]:
        return [piece async for piece in corrected(sent(), CHAT_DETAILS, told)]

    return asyncio.run(run())


def prefilled(params: dict[str, Any], usage: object = None) -> Script:
    """A prefill server that answers so."""

    async def script(_: Received, wire: Wire) -> None:
        body = {"choices": [{"finish_reason": "length"}], "kv_transfer_params": NAMED_TRANSFER | params, "usage": usage}
        await wire.json(200, body)

    return script


async def decodes_with_figures(received: Received, wire: Wire) -> None:
    """A decode server that counts what it has pulled as cached."""
    if not received.body.get("stream"):
        await wire.whole(200, WHOLE)
        return
    await wire.head()
    await wire.chunk(STREAM[:-60])
    await wire.chunk(STREAM[-60:])  # in the middle of the figures
    await wire.end()


@pytest.mark.parametrize("content", [WHOLE, STREAM])
def test_an_answer_gets_ps_figures_wherever_it_is_cut(content: bytes) -> None:
    wanted = right(content, "64")
    for cut in range(1, len(content)):
        pieces = through([content[:cut], content[cut:]], PromptDetails(cached=64))
        assert b"".join(pieces) == wanted
    assert b"".join(through([bytes([one]) for one in content], PromptDetails(64))) == wanted


def test_only_the_figures_wait_for_their_end() -> None:
    pieces = [b'"', b'{"usage":{"prompt_tokens_det', b'ails" : ', b'{"cached', b'_tokens":9}', b"}"]
    assert through(pieces, PromptDetails(4)) == [*pieces[:3], b'{"cached_tokens":4}', b"}"]


def test_a_usage_that_tells_nothing_of_caches_does_not_wait_for_p() -> None:
    """As that with which each message begins, while P may still compute."""
    whole = b'{"usage":{"input_tokens":9,"output_tokens":0}}'
    start = b'{"type":"message_start","message":' + whole + b"}"

    async def pieces() -> AsyncIterator[bytes]:
        yield start

    async def too_early() -> PromptDetails:
        raise AssertionError

    async def run() -> list[bytes]:
        corrected_start = [piece async for piece in corrected(pieces(), ANTHROPIC, too_early)]
        return [*corrected_start, await corrected_whole(whole, ANTHROPIC, too_early)]

    assert asyncio.run(run()) == [start, whole]


@pytest.mark.parametrize(
    "content", [b'{"prompt_tokens_details":null}', b'{"prompt_tokens_details":{"cached', b"\xff\x00", b""]
)
def test_what_has_no_figures_is_not_changed(content: bytes) -> None:
    assert b"".join(through([content, content], PromptDetails(4))) == 2 * content


def test_many_figures_in_one_piece_take_no_more_time_each() -> None:
    """As where a client has them echoed: another request must not wait for that."""

    def seconds(number: int) -> float:
        piece = b'"prompt_tokens_details":{"cached_tokens":9},' * number
        began = time.process_time()
        assert b"".join(through([piece], PromptDetails(4))) == piece.replace(b":9", b":4")
        return time.process_time() - began

    few, many = seconds(2_000), seconds(32_000)
    assert many < 64 * few, "sixteen times as many"


def test_figures_that_never_end_are_passed_on() -> None:
    pieces = [b'"prompt_tokens_details":{', b"a" * 3000, b"a" * 3000, b"}"]
    assert b"".join(through(pieces, PromptDetails(4))) == b"".join(pieces)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("legs", ["in-turn", "together"])
@pytest.mark.parametrize(
    ("params", "usage", "cached"),
    [
        ({"remote_prefill_cached_tokens": 64}, None, "64"),
        ({}, {"prompt_tokens_details": {"cached_tokens": 32, "created_cache_tokens": None}}, "32"),
        ({"remote_prefill_cached_tokens": True}, {"prompt_tokens_details": None}, "null"),
    ],
    ids=["by params", "by usage", "untold"],
)
def test_the_client_gets_ps_figures(
    setup: ProxySetup, params: dict[str, Any], usage: object, cached: str, legs: Any, stream: bool
) -> None:
    proxy = setup.proxy([setup.server(prefilled(params, usage))], [setup.server(decodes_with_figures)], legs=legs)
    for _ in range(2):  # the second time both at once
        response = proxy.complete(stream=stream)
        assert response.content == right(STREAM if stream else WHOLE, cached)
    until(lambda: f'pd_proxy_legs_total{{legs="{legs}"}}' in proxy.http.get("/metrics").text)


def test_an_answer_that_is_there_before_ps_waits_for_its_figures(setup: ProxySetup) -> None:
    gate = threading.Event()
    answer = prefilled({"remote_prefill_cached_tokens": 64})

    async def decodes_first(received: Received, wire: Wire) -> None:
        await decodes_with_figures(received, wire)
        gate.set()

    p, d = setup.server(answer), setup.server(decodes_first)
    proxy = setup.proxy([p], [d])
    proxy.complete()
    gate.clear()

    async def prefills_last(received: Received, wire: Wire) -> None:
        await opened(gate)
        await answer(received, wire)

    p.script = prefills_last
    assert proxy.complete().content == right(WHOLE, "64")


def test_figures_of_a_decode_server_that_prefilled_itself_are_its_own(setup: ProxySetup, p: FakeServer) -> None:
    proxy = setup.proxy([p], [setup.server(decodes_with_figures)])
    assert proxy.complete(prompt=["a", 7]).content == WHOLE


def test_ps_other_figures_are_taken_too_and_ds_kept(setup: ProxySetup) -> None:
    told = {
        "prompt_tokens_details": {"cached_tokens": 32, "created_cache_tokens": 68, "multimodal_tokens": {"image": 9}}
    }
    proxy = setup.proxy([setup.server(prefilled({}, told))], [setup.server(decodes_with_figures)])
    details = json.loads(proxy.complete().content)["usage"]["prompt_tokens_details"]
    assert details == {"cached_tokens": 32, "created_cache_tokens": 68, "multimodal_tokens": {"image": 3}}


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_ps_figures_count_though_it_hands_nothing_over(setup: ProxySetup, stream: bool) -> None:
    """Of a prompt of one token, say: D has nothing to pull, and tells P so while P computes."""
    usage = {"prompt_tokens_details": {"cached_tokens": 0}}
    p = setup.server(prefilled({}, usage))
    proxy = setup.proxy([p], [setup.server(decodes_with_figures)])
    proxy.complete()
    kept = {"choices": [{"finish_reason": "length"}], "usage": usage, "kv_transfer_params": None}
    p.script = answers(200, json.dumps(kept).encode())
    assert proxy.complete(stream=stream).content == right(STREAM if stream else WHOLE, "0")
    assert p.received[-1].body["kv_transfer_params"].get("transfer_id"), "both legs went at once"
