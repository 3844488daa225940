"""Prompts that a prefill engine finds in its host memory, under vLLM's own scheduler: who follows them reads there.

``NamedPrefill`` compares the slots that are announced with the simulated host memory, after every event of every test.
"""

import random
from unittest.mock import patch

import pytest

from pd_connector.scheduler.host.tier import HostTier
from tests.support.connector.requests import a_prompt
from tests.support.releases import counts_under_way
from tests.support.simulation.named_prefill import NamedPrefill, StartPrefill
from tests.support.simulation.prefill_works import StepUnderWay
from transfer.control.messages import Cancel, Release, SlotRange, TransferState

QUEUED, COMPUTING, COMPLETE, ENDED = (
    TransferState.QUEUED, TransferState.COMPUTING, TransferState.COMPLETE, TransferState.ENDED,
)  # fmt: skip

BLOCKS, SLOTS = 24, 64


@pytest.fixture
def engine(start_prefill: StartPrefill) -> NamedPrefill:
    """An engine whose device holds one long prompt, and whose host memory holds several."""
    return make(start_prefill)


def make(start_prefill: StartPrefill, **options: object) -> NamedPrefill:
    return start_prefill(blocks=BLOCKS, host_slots=SLOTS, **options)


def keep_in_host_memory(engine: NamedPrefill, prompt: list[int]) -> None:
    """Compute a prompt, and others after it, so that only host memory holds it."""
    engine.ask(f"before {len(engine.answers)}", prompt, do_remote_decode=False)
    settle(engine)
    pool = engine.scheduler.kv_cache_manager.block_pool
    pool.reset_prefix_cache()  # of the device alone


def settle(engine: NamedPrefill) -> None:
    engine.run()
    for _ in range(6):  # the last store ends after the last request
        engine.step()


def slots(engine: NamedPrefill, transfer_id: str = "t") -> SlotRange | None:
    return engine.told(transfer_id, host_tokens=0).in_host


def tier(engine: NamedPrefill) -> HostTier:
    (found,) = (role for role in engine.side._roles if isinstance(role, HostTier))
    return found


def test_what_is_found_in_host_memory_is_announced_there_before_it_is_loaded(engine: NamedPrefill) -> None:
    prompt = a_prompt(200)
    keep_in_host_memory(engine, prompt)
    engine.ask("r", prompt, "t")
    engine.holds_loads = True
    engine.step()
    told = engine.told("t", host_tokens=0)
    assert (told.state, told.tokens) == (COMPUTING, 0)
    assert told.in_host is not None
    assert (told.in_host.first_token, told.in_host.end_token) == (0, 192)
    engine.holds_loads = False
    engine.step()
    engine.step()
    assert engine.told("t").tokens >= 192
    engine.run()
    assert engine.state("t") == (COMPLETE, 0, 200)


def test_the_part_that_the_device_holds_is_announced_there(engine: NamedPrefill) -> None:
    prompt = a_prompt(200)
    keep_in_host_memory(engine, prompt)
    engine.ask("first", prompt[:70], do_remote_decode=False)
    settle(engine)
    engine.ask("r", prompt, "t")
    engine.holds_loads = True
    engine.step()
    told = engine.told("t", host_tokens=0)
    assert told.tokens == 64
    assert told.in_host is not None
    assert (told.in_host.first_token, told.in_host.end_token, told.in_host.first_blocks) == (64, 192, (4,))


def test_who_does_not_read_host_memory_or_knows_the_slots_is_not_told_of_them(engine: NamedPrefill) -> None:
    """And is not answered at once for their sake, or would ask without end."""
    prompt = a_prompt(200)
    keep_in_host_memory(engine, prompt)
    engine.ask("r", prompt, "t")
    engine.holds_loads = True
    engine.step()
    assert slots(engine) is not None
    for knows in (-1, 192):
        assert engine.told("t", 0, 0, host_tokens=knows).in_host is None
    assert engine.told("t", 0, 0, host_tokens=191).in_host is not None


def test_slots_are_kept_until_the_lease_ends(engine: NamedPrefill) -> None:
    prompt = a_prompt(200)
    keep_in_host_memory(engine, prompt)
    engine.ask("r", prompt, "t")
    engine.step()
    told = slots(engine)
    assert told is not None
    engine.run()
    held = {slot for slot in told.slots[0] if slot >= 0}
    assert held <= tier(engine).loans.references().keys()
    lease = engine.told("t").lease_id
    engine.service.handle(Release(engine.service.engine_id, lease, 0, 1, "pull", "nothing"))
    engine.step()
    assert not tier(engine).loans.references()
    assert engine.service.leases.active == 0


@pytest.mark.parametrize("when", ["loading", "computing"])
@pytest.mark.parametrize("how", ["abort", "cancel"])
def test_slots_are_given_back_with_a_prompt_that_ends_without_a_lease(
    engine: NamedPrefill, when: str, how: str
) -> None:
    prompt = a_prompt(300)
    keep_in_host_memory(engine, prompt[:200])
    engine.ask("r", prompt, "t")
    engine.holds_loads = when == "loading"
    engine.step()
    engine.step()
    assert tier(engine).loans.references()
    if how == "abort":
        engine.abort("r")
    else:
        engine.service.handle(Cancel("", (), ("t",)))
    engine.holds_loads = False
    settle(engine)
    assert engine.answers.get("r") is None
    assert engine.state("t")[0] is ENDED
    assert not tier(engine).loans.references()


@counts_under_way
def test_a_prompt_that_is_preempted_starts_over_without_its_slots(engine: NamedPrefill) -> None:
    prompt = a_prompt(300)
    keep_in_host_memory(engine, prompt[:200])
    request = engine.ask("r", prompt, "t")
    engine.step()
    engine.step()
    assert slots(engine) is not None
    engine.preempt(request)
    engine.fails_loads = False
    engine.scheduler.kv_cache_manager.block_pool.reset_prefix_cache()
    engine.holds_loads = True
    engine.step()
    told = engine.told("t", host_tokens=0)
    assert told.attempt == 1
    engine.holds_loads = False
    engine.run()
    assert engine.state("t") == (COMPLETE, 1, 300)


def test_a_load_that_fails_starts_the_prompt_over(engine: NamedPrefill) -> None:
    prompt = a_prompt(200)
    keep_in_host_memory(engine, prompt)
    engine.ask("r", prompt, "t")
    engine.holds_loads = True
    engine.step()
    assert slots(engine) is not None
    engine.holds_loads, engine.fails_loads = False, True
    engine.run()
    assert engine.state("t") == (COMPLETE, 1, 200)
    assert not tier(engine).loans.references()


def test_windows_that_have_passed_have_no_slots(start_prefill: StartPrefill) -> None:
    engine = make(start_prefill, with_window=True)
    prompt = a_prompt(170)
    keep_in_host_memory(engine, prompt)
    engine.ask("r", prompt, "t")
    engine.holds_loads = True
    engine.step()
    told = slots(engine)
    assert told is not None
    full, windowed = told.slots
    assert min(full) >= 0
    assert windowed[0] == -1
    assert windowed[-1] >= 0


class Fate:
    """Prompts that share beginnings come, go, are preempted and loaded late, in caches too small for all of them."""

    def __init__(self, engine: NamedPrefill, chance: random.Random, most_under_way: int) -> None:
        self.engine, self.chance, self.most_under_way = engine, chance, most_under_way
        self.under_way: list[StepUnderWay] = []
        self.asked = 0

    def act(self) -> None:
        engine, chance = self.engine, self.chance
        match chance.randrange(8):
            case 0 | 1 if len(engine.scheduler.requests) < 4:
                engine.ask(f"r{self.asked}", a_prompt(chance.randrange(20, 320), chance.randrange(2)), f"t{self.asked}")
                self.asked += 1
            case 2 if engine.scheduler.requests:
                engine.abort(chance.choice(sorted(engine.scheduler.requests)))
            case 3 if engine.scheduler.running and not self.under_way:
                engine.preempt(engine.scheduler.running[-1])
            case 4:
                engine.holds_loads = chance.random() < 0.5
                engine.fails_loads = chance.random() < 0.2
            case 5 if not self.under_way:
                engine.scheduler.kv_cache_manager.block_pool.reset_prefix_cache()
            case _:
                self.under_way.append(engine.schedule())
        while len(self.under_way) > self.most_under_way:
            engine.end(self.under_way.pop(0))
        if chance.random() < 0.1:
            engine.service.leases.cancel_all()

    def end(self) -> None:
        for step in self.under_way:
            self.engine.end(step)
        self.engine.holds_loads = False
        for request_id in sorted(self.engine.scheduler.requests):
            self.engine.abort(request_id)
        self.engine.service.leases.cancel_all()
        for _ in range(6):
            self.engine.step()


@pytest.mark.parametrize("first", range(4))
def test_whatever_happens_nothing_wrong_is_announced_and_nothing_stays_lent(
    start_prefill: StartPrefill, first: int
) -> None:
    announced = 0
    for seed in range(first, first + 40, 4):
        engine = make(start_prefill, asynchronous=bool(seed % 2), with_window=bool(seed & 2))
        fate = Fate(engine, random.Random(seed), seed % 2)
        with patch.object(engine.producer, "update_stats"):  # for vLLM's
            for _ in range(200):
                fate.act()
            fate.end()
        announced += engine.producer.counts["transfers", "in_host"]
        assert not tier(engine).loans.references()
    assert announced, "nothing was ever announced in host memory"
