"""Pauses, as vLLM's engine core carries them out: with leases, with pulls under way, with prompts that are followed."""

import queue
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.engine.core import EngineCoreProc

from pd_connector.vllm.engine_core import EngineLoop
from tests.support.releases import INSTALLED, since
from tests.support.simulation.vllm_schedulers import ClientRequest, EngineSim, World

pytestmark = pytest.mark.skipif(INSTALLED < (0, 30), reason="another engine core, whose pauses end otherwise")

WITHIN_S = 60.0

#: Earlier releases do not count requests whose tokens are on the way: such a pause ends at once, or its reset fails.
waits_for_pulls = since((0, 32), "pauses that wait for pulls under way")

either = pytest.mark.parametrize("clear_cache", [True, False], ids=["cleared", "kept"])


class Core(EngineCoreProc):  # type: ignore[misc]  # vLLM is untyped here
    """vLLM's engine core around a simulated engine: its pauses and what they wait for, without processes or models."""

    def __init__(self, engine: EngineSim) -> None:
        self.engine = engine
        self.scheduler = engine.scheduler
        self.engines_running, self.batch_queue = False, None
        self.output_queue: queue.Queue[Any] = queue.Queue()
        self._idle_state_callbacks: list[Callable[..., None]] = []
        self.model_executor = SimpleNamespace(collective_rpc=lambda *_: None)

    def reset_mm_cache(self) -> None:
        """There is none."""

    def reset_encoder_cache(self) -> None:
        """There is none."""

    def pause(self, mode: Any, *, clear_cache: bool) -> "Future[None]":
        future: Future[None] | None = self.pause_scheduler(mode, clear_cache)
        if mode == "abort":
            for request_id in list(self.engine.requests):
                asked, _ = self.engine.requests.pop(request_id)
                asked.ended = "aborted"
        if future is None:
            future = Future()
            future.set_result(None)
        return future

    def until_paused(self, future: "Future[None]") -> None:
        """Step as the busy loop does: an engine without work tells those who wait for that."""
        world = self.engine.world
        deadline = world.clock.now + WITHIN_S
        while not future.done():
            assert world.clock.now < deadline, f"the pause has not ended: {self.engine.state}"
            if not self.has_work():
                self._notify_idle_state_callbacks()
            world.step()
        future.result()


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    """Its engines step by themselves, so none needs to be kept awake for its leases, as none does in a server."""
    monkeypatch.setattr(EngineLoop, "can_be_woken", True)
    monkeypatch.setattr(EngineLoop, "wake", lambda _: None)
    world = World()
    yield world
    world.close()


def ask(prefill: EngineSim, decode: EngineSim, number: int, first: int = 0) -> list[ClientRequest]:
    all_asked = []
    for index in range(first, first + number):
        prompt = [(index * 31 + position) % 500 for position in range(100)]
        all_asked.append(ClientRequest(f"r{index}", prompt, 5, decode))
        prefill.ask(all_asked[-1])
    return all_asked


def assert_serves(world: World, prefill: EngineSim, decode: EngineSim) -> None:
    before = decode.counts["pulled"]
    (asked,) = ask(prefill, decode, 1, first=50)
    world.run(WITHIN_S)
    assert asked.ended == "finished"
    assert decode.counts["pulled"] == before + 1
    assert prefill.leases == prefill.blocks_in_use == 0
    assert decode.blocks_in_use == 0


@either
@pytest.mark.parametrize("mode", ["abort", "wait", "keep"])
def test_a_prefill_engine_with_leases_pauses(world: World, mode: str, clear_cache: bool) -> None:
    prefill = EngineSim(world, "kv_producer", blocks=64)
    decode = EngineSim(world, "kv_consumer", blocks=64, pull_s=2.0)
    asked = ask(prefill, decode, 3)
    while prefill.leases < 3:
        world.step()
    core = Core(prefill)
    core.until_paused(core.pause(mode, clear_cache=clear_cache))
    assert core.is_scheduler_paused()
    if clear_cache:
        assert prefill.leases == 0
        prefill.worker.memories.device.clear()  # as with other weights
    core.resume_scheduler()
    world.run(WITHIN_S)
    assert [each.ended for each in asked] == ["finished"] * 3
    assert decode.counts["pulled"] == (0 if clear_cache else 3)
    assert_serves(world, prefill, decode)


@either
@pytest.mark.parametrize("mode", ["abort", pytest.param("wait", marks=waits_for_pulls)])
def test_a_decode_engine_in_the_middle_of_pulls_pauses_when_they_have_ended(
    world: World, mode: str, clear_cache: bool
) -> None:
    prefill = EngineSim(world, "kv_producer", blocks=64)
    decode = EngineSim(world, "kv_consumer", blocks=64, pull_s=2.0)
    asked = ask(prefill, decode, 3)
    while len(decode.worker.pulls) < 3:
        world.step()
    core = Core(decode)
    future = core.pause(mode, clear_cache=clear_cache)
    assert not future.done(), "nothing may be reset while a read writes to blocks"
    core.until_paused(future)
    assert not decode.worker.pulls
    assert decode.blocks_in_use == 0
    core.resume_scheduler()
    world.run(WITHIN_S)
    assert [each.ended for each in asked] == ["aborted" if mode == "abort" else "finished"] * 3
    assert_serves(world, prefill, decode)


@either
def test_a_decode_engine_that_keeps_its_requests_pauses_at_once_unless_pulls_forbid_the_reset(
    world: World, clear_cache: bool
) -> None:
    prefill = EngineSim(world, "kv_producer", blocks=64)
    decode = EngineSim(world, "kv_consumer", blocks=64, pull_s=2.0)
    asked = ask(prefill, decode, 3)
    while len(decode.worker.pulls) < 3:
        world.step()
    core = Core(decode)
    if clear_cache:
        with pytest.raises(RuntimeError, match="waiting for remote KV transfer"):
            core.until_paused(core.pause("keep", clear_cache=True))
    else:
        core.until_paused(core.pause("keep", clear_cache=False))
    assert core.scheduler.pause_state is PauseState.PAUSED_ALL
    for _ in range(60):
        world.step()
    core.resume_scheduler()
    world.run(WITHIN_S)
    assert [each.ended for each in asked] == ["finished"] * 3
    assert decode.counts["pulled"] == 3
    assert_serves(world, prefill, decode)


@either
@pytest.mark.parametrize("mode", ["abort", "wait", "keep"])
def test_a_prefill_engine_pauses_while_a_prompt_is_followed(world: World, mode: str, clear_cache: bool) -> None:
    prefill = EngineSim(world, "kv_producer", blocks=64)
    decode = EngineSim(world, "kv_consumer", blocks=64, pull_s=0.3)
    prompt = [position % 500 for position in range(480)]  # two steps
    asked = ClientRequest("named", prompt, 5)
    leg = ClientRequest("named", prompt, 1, decode, transfer_id="named")
    prefill.ask(leg)
    decode.ask_by_name(asked, prefill)
    world.step()
    assert prefill.requests, "the prompt is half computed"
    core = Core(prefill)
    core.until_paused(core.pause(mode, clear_cache=clear_cache))
    if clear_cache:
        assert prefill.leases == prefill.blocks_in_use == 0
        prefill.worker.memories.device.clear()
    core.resume_scheduler()
    world.run(2 * WITHIN_S)
    assert asked.ended == "finished"
    assert_serves(world, prefill, decode)
