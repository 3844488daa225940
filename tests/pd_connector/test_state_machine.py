"""Never wrong, never stuck: prefill, decode and the network between them, in any order of events.

Messages are lost, repeated, late and reordered; clocks move; engines die and come back; requests leave, are preempted,
share a lease, come late, or with params that somebody altered. After every step the engines check:

    I1  no block under a valid lease is freed or overwritten          (``simulation.prefill``)
    I2  no block is used whose pull was not confirmed                 (both: answers, and stamps in memory)
    I3  every lease ends, and its blocks are freed                    (``simulation.prefill``)
    I4  every request on a decode engine ends its wait in time        (here, at the end)
    I5  no read writes to a block that is not its request's           (``simulation.decode``)
    I6  nothing is freed twice, no unknown request id is reported     (both)
    I8  no scheduler waits for an answer                              (``simulation.network``)
"""

import itertools
import sys
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from pd_connector.worker.session import LANES
from tests.support.simulation.decode import MESSAGE_TIMEOUT_S, PULL_TIMEOUT_S, RANKS, DecodeSim, DecodeState
from tests.support.simulation.network import Network
from tests.support.simulation.prefill import TTL_S, PrefillSim, Prompt
from tests.support.waiting import ManualClock

pytestmark = pytest.mark.usefixtures("no_log")

ANY = st.integers(0, 11)  # of a list whose length is not known: modulo it
DECODE = st.integers(0, 1)
ENDS = ["well", "in silence", "with late releases"]  # how the run goes on when its steps are over
ALTERED = ["prompt", "remote_block_ids", "lease_id", "prompt_digest", "remote_num_tokens"]
PROMPTS = st.builds(Prompt, st.integers(0, 2), st.sampled_from([1, 4, 5, 9, 9, 13]))
STEP_S = 2.5


class Disaggregation(RuleBasedStateMachine):
    """One prefill engine, two decode engines with the two failure policies."""

    def __init__(self) -> None:
        super().__init__()
        self.clock = ManualClock()
        self.network = Network(self.clock)
        self.prefills: list[PrefillSim] = []  # all lives; the last one may be dead
        self.decodes = [self.new_decode(recomputes=True), self.new_decode(recomputes=False)]
        self.params: list[tuple[Prompt, dict[str, Any]]] = []
        self.numbers = itertools.count()
        self.end = ENDS[0]
        self.prefill_starts()

    def new_decode(self, *, recomputes: bool) -> DecodeSim:
        return DecodeSim(self.network, self.find_engine, recomputes=recomputes)

    def find_engine(self, engine_id: str) -> PrefillSim | None:
        is_there = self.network.serve is not None and self.prefill.service.engine_id == engine_id
        return self.prefill if is_there else None

    @property
    def prefill(self) -> PrefillSim:
        return self.prefills[-1]

    @property
    def lives(self) -> bool:
        return self.network.serve is not None

    # The prefill engine

    @initialize(prompts=st.lists(st.tuples(PROMPTS, DECODE), min_size=1, max_size=3), end=st.sampled_from(ENDS))
    def some_requests_are_there(self, prompts: list[tuple[Prompt, int]], end: str) -> None:
        self.end = end
        for prompt, at in prompts:
            self.a_prompt_is_computed(prompt, at)

    @precondition(lambda self: self.lives)
    @rule(prompt=PROMPTS, at=st.sampled_from([0, 0, 1, 1, None]))
    def a_prompt_is_computed(self, prompt: Prompt, at: int | None) -> None:
        """And sent to a decode engine, where the router does not take its time."""
        self.prefill.free_ended()
        if (params := self.prefill.prefill(prompt)) is not None:
            self.params.append((prompt, params))
            if at is not None:
                self.a_request_arrives(at, 0)

    @precondition(lambda self: self.lives)
    @rule(prompt=PROMPTS, at=DECODE)
    def a_request_comes_and_its_pull_begins(self, prompt: Prompt, at: int) -> None:
        self.a_prompt_is_computed(prompt, at)
        for job in self.decodes[at].in_state(DecodeState.WAITING):
            self.decodes[at].schedule(job, 0)

    @rule(
        kind=st.sampled_from(["prefill restarts", "prefill is gone for a while", "cut", "reset", "decode restarts"]),
        at=DECODE,
    )
    def disaster(self, kind: str, at: int) -> None:
        if kind == "decode restarts":
            self.decodes[at] = self.new_decode(recomputes=at == 0)
        elif kind == "cut":
            self.network.is_cut = not self.network.is_cut
        elif kind == "reset" and self.lives:
            self.prefill.reset()
        elif kind == "prefill restarts" or not self.lives:
            self.prefill_starts()
        else:
            self.network.serve = None

    @precondition(lambda self: not self.lives)
    @rule()
    def prefill_starts(self) -> None:
        self.prefills.append(PrefillSim(self.clock))
        self.network.serve = self.prefill.serve

    @precondition(lambda self: self.lives)
    @rule(number=st.integers(1, 6))
    def other_prompts_overwrite_free_blocks(self, number: int) -> None:
        self.prefill.free_ended()
        self.prefill.overwrite_free_blocks(number)

    @precondition(lambda self: self.lives)
    @rule()
    def prefill_steps(self) -> None:
        self.prefill.free_ended()

    # Requests on the decode engines

    @precondition(lambda self: self.params)
    @rule(at=DECODE, which=ANY)
    def a_request_arrives(self, at: int, which: int) -> None:
        """The first one with its params, or one more: of ``n`` choices, or tried again."""
        prompt, params = self.params[-1 - which % len(self.params)]
        self.decodes[at].arrive(f"r{next(self.numbers)}", prompt, params)

    @precondition(lambda self: self.lives and self.params)
    @rule(prompt=PROMPTS, at=DECODE, other=ANY, field=st.sampled_from(ALTERED))
    def a_request_arrives_with_altered_params(self, prompt: Prompt, at: int, other: int, field: str) -> None:
        """With the blocks or the lease of another prompt, with another prompt or another length."""
        strange, others = self.params[-1 - other % len(self.params)]
        if (params := self.prefill.prefill(prompt)) is None:
            return
        altered = params
        if field in {"prompt", "prompt_digest"}:
            prompt = Prompt(strange.seed, prompt.tokens)
            if field == "prompt_digest":
                altered = params | {"prompt_digest": ""}
        elif field == "remote_num_tokens":
            altered = params | {"remote_num_tokens": prompt.tokens + 1}
        else:
            altered = params | {field: others[field]}
        self.decodes[at].arrive(f"r{next(self.numbers)}", prompt, altered)

    @rule(at=DECODE, which=ANY, cached=st.sampled_from([0, 0, 1, 9]))
    def a_request_is_scheduled(self, at: int, which: int, cached: int) -> None:
        if waiting := self.decodes[at].in_state(DecodeState.WAITING):
            self.decodes[at].schedule(waiting[which % len(waiting)], cached)

    @rule(at=DECODE, which=ANY)
    def a_request_leaves(self, at: int, which: int) -> None:
        if jobs := self.decodes[at].in_state(*DecodeState):
            self.decodes[at].leave(jobs[which % len(jobs)])

    @rule(at=DECODE, which=ANY)
    def a_request_is_preempted(self, at: int, which: int) -> None:
        if running := self.decodes[at].in_state(DecodeState.RUNNING):
            self.decodes[at].preempt(running[which % len(running)])

    @rule(
        at=DECODE,
        number=st.integers(0, RANKS - 1),
        blocks=st.integers(1, 4),
        fails=st.sampled_from([*[False] * 7, True]),
        lane=st.integers(0, LANES - 1),
    )
    def a_rank_reads(self, at: int, number: int, blocks: int, fails: bool, lane: int) -> None:
        for session in self.decodes[at].ranks[number].sessions:
            session.step(blocks, fails=fails, lane=lane)

    @rule(at=DECODE)
    def the_ranks_report(self, at: int) -> None:
        self.decodes[at].report()

    @rule(at=DECODE, rounds=st.integers(1, 3))
    def all_goes_well(self, at: int, rounds: int) -> None:
        """So that runs get far."""
        for _ in range(rounds):
            for job in self.decodes[at].in_state(DecodeState.WAITING):
                self.decodes[at].schedule(job, 0)
            self.read_all(self.decodes[at])
            self.network.deliver_all()
            self.decodes[at].report()

    # The network, and time

    @precondition(lambda self: self.network.to_prefill)
    @rule(which=ANY, fate=st.sampled_from(["arrives", "arrives", "arrives twice", "is lost"]))
    def a_request_message(self, which: int, fate: str) -> None:
        self._meet(self.network.to_prefill, which, fate, self.network.deliver_request)

    @precondition(lambda self: self.network.to_decode)
    @rule(which=ANY, fate=st.sampled_from(["arrives", "arrives", "arrives twice", "is lost"]))
    def a_reply(self, which: int, fate: str) -> None:
        self._meet(self.network.to_decode, which, fate, self.network.deliver_reply)

    def _meet(self, queue: list[Any], which: int, fate: str, deliver: Callable[[int], None]) -> None:
        which %= len(queue)
        if fate == "arrives twice":
            queue.append(queue[which])
        if fate == "is lost":
            del queue[which]
        else:
            deliver(which)

    @rule(seconds=st.sampled_from([0.0, 0.0, 0.0, 5.0, 31.0]), twice=st.booleans(), reads=st.booleans())
    def all_messages_arrive(self, seconds: float, twice: bool, reads: bool) -> None:
        """Late, or some of them once more behind the others, and those among them that end a pull."""
        for decode in self.decodes if reads else []:
            self.read_all(decode)
        self.pass_time(seconds, renews=False)
        repeated = list(self.network.to_prefill) if twice else []
        self.network.deliver_all()
        self.network.to_prefill += repeated
        self.network.deliver_all()

    @rule(at=DECODE)
    def unanswered_messages_are_sent_again(self, at: int) -> None:
        self.decodes[at].client.resend()

    @rule(seconds=st.sampled_from([0.5, 5.0, 10.0, 10.0, 31.0, 61.0]), renews=st.booleans())
    def time_passes(self, seconds: float, renews: bool) -> None:
        self.pass_time(seconds, renews=renews)

    # What must always hold

    @invariant()
    def books_balance(self) -> None:
        for decode in self.decodes:
            decode.check_integrity()
        if self.lives:
            self.prefill.service.check_integrity()

    def teardown(self) -> None:
        """Everything ends: first what waits on the decode engines, in time; then all leases."""
        if sys.exc_info()[0] is not None:
            return  # a step has failed: what the end would find is not the cause
        started = self.clock.now
        self.network.is_cut = self.end == "in silence"
        if self.end == "with late releases":
            for decode in self.decodes:
                self.read_all(decode)
            self.pass_time(TTL_S, renews=False)
        for _ in range(400):
            if not any(decode.jobs for decode in self.decodes):
                break
            self.end_round(started)
        assert not any(decode.jobs for decode in self.decodes), "I4: a request waits for ever"
        for decode in self.decodes:
            assert not decode.renewals.request_ids, "I3: a lease is renewed for nobody"
            assert len(decode.free) == decode.blocks
        if self.lives:
            self.pass_time(TTL_S, renews=True)
            self.prefill.free_ended()
            assert self.prefill.service.leases.active == 0, "I3: a lease does not end"
            assert len(self.prefill.free) == len(self.prefill.memory) - 1
        self.books_balance()

    def end_round(self, started: float) -> None:
        """Threads run and time passes."""
        self.pass_time(STEP_S, renews=True)
        if self.lives:
            self.prefill.free_ended()
        for decode in self.decodes:
            decode.client.resend()
            self.read_all(decode)
            self.network.deliver_all()
            decode.report()
            for job in decode.in_state(DecodeState.RUNNING):
                decode.leave(job)
            for job in decode.in_state(DecodeState.WAITING):
                decode.schedule(job, 0)
            for job in decode.in_state(DecodeState.PULLING):
                waited = self.clock.now - max(job.since, started)
                assert waited <= PULL_TIMEOUT_S + MESSAGE_TIMEOUT_S + 2 * STEP_S, "I4: a pull outlives its timeout"
            decode.check_integrity()

    def pass_time(self, seconds: float, *, renews: bool) -> None:
        self.clock.advance(seconds)
        for decode in self.decodes:
            decode.client.give_up()
            if renews:
                decode.renewals.send_due()

    @staticmethod
    def read_all(decode: DecodeSim) -> None:
        for rank in decode.ranks:
            for session in rank.sessions:
                for _ in range(len(session)):
                    session.step(9, fails=False)


def run(examples: int) -> None:
    run_state_machine_as_test(
        Disaggregation, settings=settings(max_examples=examples, stateful_step_count=50, deadline=None)
    )


def test_never_wrong_and_never_stuck() -> None:
    run(300)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_never_wrong_and_never_stuck_in_many_more_runs() -> None:
    run(3000)
