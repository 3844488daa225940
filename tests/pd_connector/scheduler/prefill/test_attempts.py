"""What of a named prompt is complete when it begins, what is taken back, and nothing too early in any order of events.

``NamedPrefill`` compares all that is announced with the simulated memory, after every event of every test here.

Covers: pd_connector.scheduler.prefill.announcer.
"""

from typing import Any
from unittest.mock import patch

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from vllm.v1.request import Request

from pd_connector.params import contents_digest, parse_remote_prefill
from tests.support.connector.requests import a_prompt
from tests.support.releases import INSTALLED, counts_under_way
from tests.support.simulation.named_prefill import CHUNK_TOKENS, NamedPrefill, StartPrefill
from tests.support.simulation.prefill_works import PAGE_TOKENS, StepUnderWay, stamps_of
from transfer.control.messages import Cancel, Follow, Followed, Release, Released, TransferState

QUEUED, COMPUTING, COMPLETE, ENDED = (
    TransferState.QUEUED, TransferState.COMPUTING, TransferState.COMPLETE, TransferState.ENDED,
)  # fmt: skip


# What the prefix cache holds


@counts_under_way
def test_what_the_prefix_cache_holds_is_complete_at_once(start_prefill: StartPrefill) -> None:
    engine = start_prefill()
    engine.ask("before", a_prompt(200))
    engine.run()
    engine.ask("r", a_prompt(200), "t")
    engine.schedule()
    assert engine.state("t") == (COMPUTING, 0, 192)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_what_another_request_computes_in_the_same_step_is_not_complete_before_its_end(
    start_prefill: StartPrefill, asynchronous: bool
) -> None:
    """vLLM's prefix cache offers a block as soon as the step that will fill it is scheduled."""
    engine = start_prefill(asynchronous=asynchronous, chunk_tokens=256)
    engine.ask("a", a_prompt(100), "ta")
    engine.ask("b", a_prompt(100), "tb")
    step = engine.schedule()
    assert step.output.num_scheduled_tokens == {"a": 100, "b": 4}
    assert engine.state("tb") == (COMPUTING, 0, 0)
    engine.end(step)
    assert engine.state("tb") == (COMPLETE, 0, 100)


@counts_under_way
def test_what_a_step_under_way_computes_for_another_request_is_not_complete(start_prefill: StartPrefill) -> None:
    engine = start_prefill(asynchronous=True)
    engine.ask("other", a_prompt(300))
    steps = [engine.schedule(), engine.schedule()]
    engine.ask("r", a_prompt(300), "t")
    engine.end(steps.pop(0))
    steps.append(engine.schedule())  # the other request takes the whole budget
    assert engine.state("t") == (QUEUED, 0, 0)
    engine.end(steps.pop(0))
    steps += [engine.schedule(), engine.schedule()]  # which has 44 tokens left, so that this one begins
    told = engine.state("t")
    assert told[0] is COMPUTING
    assert told[2] == 128, "two steps have ended"
    for step in steps:
        engine.end(step)
    engine.run()
    assert engine.state("t") == (COMPLETE, 0, 300)


def test_what_a_step_under_way_computes_for_a_request_that_was_aborted_is_not_complete(
    start_prefill: StartPrefill,
) -> None:
    """Its blocks are free, and found by their contents, before the device has written them."""
    engine = start_prefill(asynchronous=True)
    engine.ask("other", a_prompt(64))
    step = engine.schedule()
    engine.abort("other")
    engine.ask("r", a_prompt(200), "t")
    second = engine.schedule()
    assert second.output.num_scheduled_tokens == {"r": 64}
    assert engine.state("t") == (COMPUTING, 0, 0)
    engine.end(step)
    engine.end(second)
    assert engine.state("t") == (COMPUTING, 0, 128)


def test_what_a_step_under_way_computed_of_a_prompt_before_its_preemption_is_not_complete(
    start_prefill: StartPrefill,
) -> None:
    engine = start_prefill(asynchronous=True)
    request = engine.ask("r", a_prompt(200), "t")
    step = engine.schedule()
    engine.preempt(request)
    second = engine.schedule()
    assert second.output.num_scheduled_tokens == {"r": 64}
    assert request.num_computed_tokens == 128, "its own blocks were found"
    assert engine.state("t") == (COMPUTING, 1, 0)
    engine.end(step)
    assert engine.state("t") == (COMPUTING, 1, 0)
    engine.end(second)
    assert engine.state("t") == (COMPUTING, 1, 128)


def test_what_a_preempted_request_that_has_left_was_to_be_given_is_not_complete(start_prefill: StartPrefill) -> None:
    engine = start_prefill(asynchronous=True)
    other = engine.ask("other", a_prompt(200))
    step = engine.schedule()
    engine.preempt(other)
    engine.abort("other")
    engine.ask("r", a_prompt(200), "t")
    second = engine.schedule()
    assert second.output.num_scheduled_tokens == {"r": 64}
    assert engine.state("t") == (COMPUTING, 0, 0)
    engine.end(step)
    engine.end(second)
    assert engine.state("t") == (COMPUTING, 0, 128)


@counts_under_way
def test_tokens_that_the_first_step_loads_from_elsewhere_are_complete_when_it_has_ended(
    start_prefill: StartPrefill,
) -> None:
    """Beside this connector, vLLM's MultiConnector may have one that loads while the model computes."""
    engine = start_prefill()
    connector: Any = engine.scheduler.connector
    found = connector.get_num_new_matched_tokens

    def more(request: Request, computed: int) -> tuple[int, bool]:
        assert found(request, computed) == (0, False)
        return 48, False

    engine.ask("before", a_prompt(32))
    engine.run()
    engine.ask("r", a_prompt(200), "t")
    with patch.object(connector, "get_num_new_matched_tokens", more):
        step = engine.schedule()
    table = engine.scheduler.kv_cache_manager.get_block_ids("r")[0]
    assert engine.scheduler.requests["r"].num_computed_tokens == 32 + 48 + 64
    assert engine.state("t") == (COMPUTING, 0, 32)
    loaded = [(table[token // PAGE_TOKENS], token % PAGE_TOKENS) for token in range(32, 80)]
    engine.memory |= dict(zip(loaded, stamps_of(a_prompt(200))[32:80], strict=True))
    engine.end(step)
    assert engine.state("t") == (COMPUTING, 0, 144)


# What is taken back


def test_a_preempted_prompt_begins_another_attempt_before_anything_of_it_is_announced(
    start_prefill: StartPrefill,
) -> None:
    """Two prompts that fit one by one, and not together."""
    engine = start_prefill(blocks=20)
    engine.scheduler.scheduler_config.long_prefill_token_threshold = CHUNK_TOKENS // 2  # they take turns
    engine.ask("first", a_prompt(200), "t1")
    second = engine.ask("second", a_prompt(200, 1), "t2")
    attempts = []
    while engine.scheduler.has_unfinished_requests():
        engine.step()
        attempts.append(engine.state("t2"))
        if engine.state("t1")[0] is COMPLETE and engine.service.leases.active:
            engine.service.handle(Cancel(engine.service.engine_id, (engine.told("t1").lease_id,)))
    assert second.num_preemptions, "the pool is not small enough for this test"
    numbers = [attempt for _, attempt, _ in attempts]
    assert numbers == sorted(numbers)
    assert numbers[-1] == second.num_preemptions
    assert engine.state("t2") == (COMPLETE, second.num_preemptions, 200)
    assert parse_remote_prefill(engine.answers["second"]).remote_attempt == second.num_preemptions


def test_a_preemption_is_told_with_the_step_in_which_it_happens(start_prefill: StartPrefill) -> None:
    engine = start_prefill()
    request = engine.ask("r", a_prompt(300), "t")
    engine.step()
    engine.preempt(request)
    told = engine.told("t")
    assert told.attempt == 0
    seen = len(engine.changes)
    step = engine.schedule()
    assert "t" in engine.changes[seen:]
    # Its own blocks were found again: nobody else had taken them.
    assert engine.state("t") == (COMPUTING, 1, 64 if INSTALLED >= (0, 30) else 0)
    engine.end(step)
    assert engine.state("t") == (COMPUTING, 1, 128)


def test_the_report_of_a_step_before_the_preemption_announces_nothing_of_the_new_attempt(
    start_prefill: StartPrefill,
) -> None:
    engine = start_prefill(asynchronous=True)
    request = engine.ask("r", a_prompt(300), "t")
    engine.step()
    step = engine.schedule()
    engine.preempt(request)
    seen = len(engine.changes)
    engine.end(step)
    assert engine.state("t") == (QUEUED, 1, 0)
    assert engine.changes[seen:] == ["t"]


def test_a_reset_of_the_prefix_cache_with_running_requests_begins_another_attempt(start_prefill: StartPrefill) -> None:
    engine = start_prefill()
    engine.ask("r", a_prompt(300), "t")
    engine.step()
    engine.step()
    old = engine.told("t")
    assert engine.scheduler.reset_prefix_cache(reset_running_requests=True, reset_connector=True)
    engine.step()
    assert engine.state("t") == (COMPUTING, 1, 64)
    assert engine.told("t").lease_id == old.lease_id
    engine.run()
    assert engine.state("t") == (COMPLETE, 1, 300)


def test_what_was_read_of_another_attempt_is_not_confirmed(start_prefill: StartPrefill) -> None:
    """Even if the blocks are the same: in between they were somebody else's."""
    engine = start_prefill()
    request = engine.ask("r", a_prompt(100), "t")
    engine.step()
    engine.preempt(request)
    engine.run()
    remote = parse_remote_prefill(engine.answers["r"])
    assert remote.remote_attempt == 1
    stale = parse_remote_prefill({**(engine.answers["r"] or {}), "remote_attempt": 0})

    def released(contents: str, reader: int) -> Released:
        message = Release(engine.service.engine_id, remote.lease_id, reader, 2, f"pull {reader}", contents)
        reply = engine.service.handle(message)
        assert isinstance(reply, Released)
        return reply

    assert released(contents_digest(stale), 0) == Released(False, "contents")
    assert released(contents_digest(remote), 1) == Released(True)


def test_tokens_that_vllm_computes_again_without_a_preemption_begin_another_attempt(
    start_prefill: StartPrefill,
) -> None:
    """As after a load that another connector of a MultiConnector has reported as failed, and the policy recompute."""
    engine = start_prefill(asynchronous=True)
    request = engine.ask("r", a_prompt(300), "t")
    engine.step()
    engine.step()
    step = engine.schedule()
    assert engine.state("t") == (COMPUTING, 0, 128)
    engine.scheduler.recompute_kv_load_failures = True
    table = engine.scheduler.kv_cache_manager.get_block_ids("r")[0]
    affected = engine.scheduler._handle_invalid_blocks({table[2]}, step.output.num_scheduled_tokens)
    assert affected == {"r"}
    assert (request.num_computed_tokens, request.num_preemptions) == (32, 0)
    engine.announcer.computed(dict.fromkeys(step.numbers, 1), 1)
    assert engine.state("t") == (QUEUED, 1, 0)


class AnyOrder(RuleBasedStateMachine):
    """Any order of requests with common beginnings, steps, aborts and resets: nothing is announced too early."""

    steps: list[StepUnderWay]

    @initialize(
        blocks=st.integers(19, 40), asynchronous=st.booleans(), with_window=st.booleans(), most=st.integers(1, 3)
    )
    def begin(self, blocks: int, asynchronous: bool, with_window: bool, most: int) -> None:
        blocks *= 1 + with_window  # so that each prompt fits by itself
        self.engine = NamedPrefill(blocks, asynchronous=asynchronous, with_window=with_window)
        self.steps, self.most, self.number = [], most if asynchronous else 1, 0
        self.seen: dict[str, Followed] = {}

    @rule(family=st.integers(0, 1), common=st.integers(0, 200), more=st.integers(1, 60), is_named=st.booleans())
    def ask(self, family: int, common: int, more: int, is_named: bool) -> None:
        self.number += 1
        tokens = [*a_prompt(common, family), *a_prompt(more, 7 + self.number % 3)]
        self.engine.ask(f"r{self.number}", tokens, f"t{self.number}" if is_named else None)

    @precondition(lambda self: len(self.steps) < self.most)
    @rule(number=st.integers(1, 3))
    def schedule(self, number: int) -> None:
        for _ in range(min(number, self.most - len(self.steps))):
            self.steps.append(self.engine.schedule())

    @precondition(lambda self: self.steps)
    @rule()
    def end_step(self) -> None:
        self.engine.end(self.steps.pop(0))

    @rule(which=st.integers(0, 5))
    def abort(self, which: int) -> None:
        running = sorted(self.engine.scheduler.requests)
        if running:
            self.engine.abort(running[which % len(running)])

    @rule()
    def reset(self) -> None:
        if not self.steps:  # vLLM drains them before
            self.engine.scheduler.reset_prefix_cache(reset_running_requests=True, reset_connector=True)

    @rule()
    def let_leases_go(self) -> None:
        self.engine.service.leases.cancel_all()

    @rule()
    def follow(self) -> None:
        """Somebody follows from answer to answer: attempts and tokens only grow, and tables are continued."""
        for number in range(1, self.number + 1):
            before = self.seen.get(f"t{number}")
            known = (before.attempt, before.tokens) if before is not None else (-1, 0)
            reply = self.engine.service.handle(Follow("", f"t{number}", *known))
            if isinstance(reply, Followed):
                assert before is None or (reply.attempt, reply.tokens) >= known or reply.state == ENDED
                self.seen[f"t{number}"] = reply

    def teardown(self) -> None:
        if not hasattr(self, "engine"):
            return
        try:
            for step in self.steps:
                self.engine.end(step)
            for _ in range(400):
                if not self.engine.scheduler.has_unfinished_requests():
                    break
                self.engine.service.leases.cancel_all()
                self.engine.step()
            assert not self.engine.scheduler.has_unfinished_requests()
            assert not self.engine.announcer._named
            assert not self.engine.service.leases._growing
        finally:
            self.engine.close()


TestAnyOrder: Any = AnyOrder.TestCase
TestAnyOrder.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)
