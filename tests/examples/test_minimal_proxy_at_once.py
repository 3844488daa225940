"""The router in one file with P's control channel: both legs at once.

Covers: examples.minimal_proxy
"""

import asyncio
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.support.examples.fake_servers import Received, Script, Wire, answers, decodes, drops, stalls
from tests.support.examples.harness import RawClient, unused_url
from tests.support.examples.minimal import BODY, Bed, MinimalProxy, started_bed

CONTROL = "[fd00::1]:8998"
FULL = answers(429, b'{"error": "full"}', Content_Type="application/json")


@pytest.fixture(scope="module")
def shared_bed() -> Iterator[Bed]:
    with started_bed("--control", CONTROL) as bed:
        yield bed


@pytest.fixture
def bed(shared_bed: Bed) -> Iterator[Bed]:
    with shared_bed.used() as bed:
        yield bed


def test_d_has_its_leg_while_p_computes(bed: Bed) -> None:
    bed.p.script = stalls
    assert bed.proxy.complete(max_tokens=9).json() == {"choices": [{"text": " the answer"}]}
    (for_p,), (for_d,) = bed.p.bodies, bed.d.bodies
    name = for_p["kv_transfer_params"]["transfer_id"]
    assert for_p["kv_transfer_params"] == {"do_remote_decode": True, "transfer_id": name}
    address = {"do_remote_prefill": True, "remote_engine_id": f"@{CONTROL}", "transfer_id": name}
    assert for_d == BODY | {"max_tokens": 9, "kv_transfer_params": address}
    assert bed.p.wait().left.wait(30)  # with D's whole answer, nobody waits for P's


def test_each_request_has_a_name_of_its_own(bed: Bed) -> None:
    for _ in range(3):
        assert bed.proxy.complete().status_code == 200
    assert len({one["kv_transfer_params"]["transfer_id"] for one in bed.d.bodies}) == 3


def test_what_d_serves_alone_goes_to_d_alone(bed: Bed) -> None:
    assert bed.proxy.complete(prompt=["a", "b"]).status_code == 200
    assert (bed.p.bodies, bed.d.bodies) == ([], [BODY | {"prompt": ["a", "b"]}])


def test_what_p_refuses_is_told_at_once_and_ends_ds_leg(bed: Bed) -> None:
    bed.p.script, bed.d.script = FULL, stalls
    response = bed.proxy.complete(stream=True)
    assert (response.status_code, response.content) == (429, b'{"error": "full"}')
    assert response.headers["content-type"] == "application/json"
    assert bed.d.wait().left.wait(30)


@pytest.mark.parametrize("script", [drops, answers(200, b"[]"), answers(200, b"\xff")])
def test_a_p_that_fails_is_told_at_once(bed: Bed, script: Script) -> None:
    bed.p.script, bed.d.script = script, stalls
    assert bed.proxy.complete().status_code == 502


def test_a_p_with_nothing_to_hand_over_breaks_no_answer(bed: Bed) -> None:
    """D had the whole prompt, and has told P, before D's answer begins."""
    answered = asyncio.Event()

    async def has_nothing(_: Received, wire: Wire) -> None:
        await wire.json(200, {"choices": [{"finish_reason": "length"}], "kv_transfer_params": None})
        answered.set()

    async def begins_later(received: Received, wire: Wire) -> None:
        await answered.wait()
        await asyncio.sleep(0.2)  # the proxy has P's answer, then
        await decodes(received, wire)

    bed.p.script, bed.d.script = has_nothing, begins_later
    assert bed.proxy.complete().status_code == 200


def test_a_p_that_cannot_be_reached_is_told_at_once(bed: Bed) -> None:
    bed.d.script = stalls
    with MinimalProxy(unused_url(), bed.d.url, "--control", CONTROL) as proxy:
        assert proxy.complete().json()["error"]["message"] == "a server failed: ConnectError"


def test_a_d_that_fails_ends_ps_leg(bed: Bed) -> None:
    bed.p.script, bed.d.script = stalls, FULL
    assert bed.proxy.complete().status_code == 429
    assert bed.p.wait().left.wait(30)


def test_what_both_refuse_at_once_is_told_once(bed: Bed) -> None:
    """Some answers are there in the same turn of the loop."""
    bed.p.script = bed.d.script = FULL
    with ThreadPoolExecutor(8) as clients:
        answers = [clients.submit(bed.proxy.complete) for _ in range(400)]
        assert {answer.result().status_code for answer in answers} == {429}


def test_a_p_that_fails_late_breaks_no_answer(bed: Bed) -> None:
    """D may have the prompt in its prefix cache, and answer before P has ended."""

    begun = asyncio.Event()

    async def fails_late(_: Received, wire: Wire) -> None:
        await begun.wait()
        wire.drop()

    async def begins(_: Received, wire: Wire) -> None:
        await wire.head()
        await wire.chunk(b"data: 1\n\n")
        await asyncio.sleep(0.1)  # the proxy has the beginning, then
        begun.set()
        while f"{bed.p.url}/v1/completions failed" not in bed.proxy.log:
            await asyncio.sleep(0.01)
        await wire.chunk(b"data: 2\n\n")
        await wire.end()

    bed.p.script, bed.d.script = fails_late, begins
    assert bed.proxy.complete(stream=True).content == b"data: 1\n\ndata: 2\n\n"


def test_a_client_that_leaves_ends_both_legs(bed: Bed) -> None:
    bed.p.script = bed.d.script = stalls
    client = RawClient.completing(bed.proxy, b'{"model": "tiny", "prompt": "a", "stream": true}')
    p, d = bed.p.wait(), bed.d.wait()
    client.leave()
    assert p.left.wait(30)
    assert d.left.wait(30)
