"""Never wrong, never stuck: prefill, decode and the network between them, in any order of events.

Messages are lost, repeated, late and reordered; clocks move; engines die and come back; requests leave, are preempted,
share a lease, come late, or with params that somebody altered. Reads fail, and some of them go on and write later.
Legs come in turn, or at once under a name: in any order, one of them never, or twice. Then the prefill engine computes
the prompt step by step, and may preempt or abort it meanwhile. After every step the engines check:

    I1  no block under a valid lease is freed or overwritten          (``simulation.prefill``)
    I2  no block is used whose pull was not confirmed, or announced
        that is not written                                           (both, and ``simulation.prefill_steps``)
    I3  every lease ends, and its blocks are freed                    (``simulation.prefill``)
    I4  every request on a decode engine ends its wait in time        (here, at the end)
    I5  no read writes to a block that is not its request's           (``simulation.decode``)
    I6  nothing is freed twice, no unknown request id is reported     (both)
    I8  no scheduler waits for an answer                              (``simulation.network``)
    I9  prompts that are still computed hold a share of the blocks    (``simulation.decode``)

Host blocks (I7) have a test of their own, ``scheduler/host/test_host_machine.py``.
"""

import itertools
import math
import sys
from collections.abc import Callable
from dataclasses import dataclass
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
from tests.support.connector.consumers import MESSAGE_TIMEOUT_S
from tests.support.simulation.decode import PULL_TIMEOUT_S, RANKS, DecodeSim, DecodeState
from tests.support.simulation.network import HOST, PORT, Network
from tests.support.simulation.prefill import TTL_S, PrefillSim, Prompt
from tests.support.simulation.prefill_steps import PrefillSteps
from tests.support.waiting import ManualClock

pytestmark = pytest.mark.usefixtures("no_log")

ANY = st.integers(0, 11)  # of a list whose length is not known: modulo it
DECODE = st.integers(0, 1)
#: How the run goes on when its steps are over; the last two are of named prompts, which are not computed to their ends.
ENDS = ["well", "in silence", "with late releases", "standing still", "starting over"]
ALTERED = ["prompt", "remote_block_ids", "lease_id", "prompt_digest", "remote_num_tokens"]
PROMPTS = st.builds(Prompt, st.integers(0, 2), st.sampled_from([1, 4, 5, 9, 9, 13]))
LONG_PROMPTS = st.builds(Prompt, st.integers(0, 2), st.sampled_from([9, 13, 13]))
CHUNKS = st.sampled_from([1, 4, 5, 8])  # tokens of a prompt in a step
STEP_S = 2.5
LATEST_S = 15.0  # how late the bytes of a failed read land; a worker whose quarantine lasts longer may end


@dataclass(frozen=True)
class Leg:
    """What a router has yet to send of a request whose legs it sends at once."""

    transfer_id: str
    prompt: Prompt
    at: int | None  # the decode engine; None: the prefill engine


class Disaggregation(RuleBasedStateMachine):
    """One prefill engine, two decode engines with the two failure policies."""

    def __init__(self) -> None:
        super().__init__()
        self.clock = ManualClock()
        self.network = Network(self.clock)
        self.prefills: list[PrefillSim] = []  # all lives; the last one may be dead
        self.decodes = [self.new_decode(recomputes=True), self.new_decode(recomputes=False)]
        self.params: list[tuple[Prompt, dict[str, Any]]] = []
        self.legs: list[Leg] = []  # yet to be sent
        self.sent: list[Leg] = []
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

    def prefill_answers(self, *, by_itself: bool = True) -> None:
        """The prefill engine frees what it can; its steps end before one is made of a prompt at once."""
        if by_itself:
            self.steps.end_all()
        self.prefill.free_ended()

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
        self.prefill_answers()
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
            self.network.restart(None)

    @precondition(lambda self: not self.lives)
    @rule()
    def prefill_starts(self) -> None:
        self.prefills.append(PrefillSim(self.clock))
        self.network.restart(self.prefill.serve)
        self.steps = PrefillSteps(self.prefill, self.network)

    @precondition(lambda self: self.lives)
    @rule(number=st.integers(1, 6))
    def other_prompts_overwrite_free_blocks(self, number: int) -> None:
        self.prefill_answers()
        self.prefill.overwrite_free_blocks(number)

    @precondition(lambda self: self.lives)
    @rule()
    def prefill_steps(self) -> None:
        self.prefill.free_ended()

    # Legs at once

    @precondition(lambda self: self.lives)
    @rule(
        prompt=PROMPTS,
        at=DECODE,
        order=st.sampled_from(["prefill, decode", "decode, prefill", "prefill, decode", "prefill", "decode"]),
        chunk=CHUNKS,
    )
    def legs_come_at_once(self, prompt: Prompt, at: int, order: str, chunk: int) -> None:
        """Of the one that does not come now, nobody knows whether it will. Perhaps the prompt is begun."""
        name = f"t{next(self.numbers)}"
        legs = {"prefill": Leg(name, prompt, None), "decode": Leg(name, prompt, at)}
        for each in order.split(", "):
            self.send(legs.pop(each))
        self.legs += legs.values()
        if chunk > 1:
            self.a_step_begins(chunk, 3)

    @precondition(lambda self: self.lives)
    @rule(prompt=LONG_PROMPTS, at=DECODE, rounds=st.integers(1, 3))
    def a_prompt_is_pulled_while_it_is_computed(self, prompt: Prompt, at: int, rounds: int) -> None:
        """So that what follows happens in the middle of it."""
        name = f"t{next(self.numbers)}"
        self.send(Leg(name, prompt, None))
        self.send(Leg(name, prompt, at))
        self.all_goes_well(at, rounds, 4)

    @precondition(lambda self: self.legs)
    @rule(which=ANY)
    def the_other_leg_comes(self, which: int) -> None:
        self.send(self.legs.pop(which % len(self.legs)))

    @precondition(lambda self: self.sent)
    @rule(which=ANY, prompt=st.one_of(st.none(), PROMPTS), at=st.sampled_from([0, 1, None]))
    def a_name_comes_again(self, which: int, prompt: Prompt | None, at: int | None) -> None:
        """Of ``n`` choices; or by mistake, for another prompt, or to another engine."""
        leg = self.sent[-1 - which % len(self.sent)]
        self.send(Leg(leg.transfer_id, prompt or leg.prompt, at))

    def send(self, leg: Leg) -> None:
        if leg.at is not None:
            params = {"do_remote_prefill": True, "transfer_id": leg.transfer_id}
            params |= {"remote_host": HOST, "remote_port": PORT}
            self.decodes[leg.at].arrive(f"r{next(self.numbers)}", leg.prompt, params)
        elif self.lives:
            self.steps.add(leg.prompt, leg.transfer_id)
        self.sent.append(leg)

    @precondition(lambda self: self.lives and self.steps.jobs)
    @rule(chunk=CHUNKS, most=st.sampled_from([1, 3, 3]))
    def a_step_begins(self, chunk: int, most: int) -> None:
        self.prefill.free_ended()
        self.steps.begin(chunk, most)

    @precondition(lambda self: self.lives and self.steps.is_busy)
    @rule(is_told=st.booleans())
    def a_step_ends(self, is_told: bool) -> None:
        self.steps.end()
        if is_told:
            self.network.answer_waiting()

    @precondition(lambda self: self.lives and self.steps.jobs)
    @rule(which=ANY, is_aborted=st.sampled_from([False, False, True]), is_told=st.booleans())
    def a_prompt_loses_its_blocks(self, which: int, is_aborted: bool, is_told: bool) -> None:
        """It is preempted, or its client leaves the prefill engine."""
        jobs = list(self.steps.jobs.values())
        job = jobs[which % len(jobs)]
        if is_aborted:
            self.steps.abort(job)
        elif job.blocks:
            self.steps.preempt(job)
        if is_told:
            self.network.answer_waiting()

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
        self.prefill_answers()
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
        fails=st.sampled_from([*[""] * 7, "at once", "and goes on"]),
        lane=st.integers(0, LANES - 1),
    )
    def a_rank_reads(self, at: int, number: int, blocks: int, fails: str, lane: int) -> None:
        for session in self.decodes[at].ranks[number].sessions:
            session.step(blocks, fails=bool(fails), lane=lane, is_late=fails == "and goes on")

    @precondition(lambda self: self.lives)
    @rule(prompt=PROMPTS, at=DECODE, number=st.integers(0, RANKS - 1), leaves=st.booleans(), reports=st.booleans())
    def a_read_fails_and_goes_on(self, prompt: Prompt, at: int, number: int, leaves: bool, reports: bool) -> None:
        self.a_request_comes_and_its_pull_begins(prompt, at)
        decode = self.decodes[at]
        for _ in range(2):  # the handshake, and the read
            for session in decode.ranks[number].sessions:
                session.step(0, fails=False)
            self.network.deliver_all()
        for session in decode.ranks[number].sessions:
            session.step(0, fails=True, is_late=True)
        for job in decode.in_state(DecodeState.PULLING) if leaves else []:
            decode.leave(job)
        if reports:
            self.all_messages_arrive(0.0, twice=False, reads=True)
            decode.report()

    @rule(at=DECODE, number=st.integers(0, RANKS - 1))
    def late_bytes_land(self, at: int, number: int) -> None:
        self.decodes[at].ranks[number].land()

    @rule(at=DECODE)
    def the_ranks_report(self, at: int) -> None:
        self.decodes[at].report()

    @rule(at=DECODE, rounds=st.integers(1, 3), chunk=CHUNKS)
    def all_goes_well(self, at: int, rounds: int, chunk: int) -> None:
        """So that runs get far."""
        for _ in range(rounds):
            if self.lives and self.steps.jobs:
                self.a_step_begins(chunk, 3)
                self.steps.end()
            self.network.deliver_all()
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

    @precondition(lambda self: len(self.network.waiting) > 0)
    @rule()
    def who_waits_is_answered(self) -> None:
        self.network.answer_waiting()

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
        self.network.waiting.check_integrity()
        if self.lives:
            self.prefill.service.check_integrity()
            self.steps.check()

    def teardown(self) -> None:
        """Everything ends: first what waits on the decode engines, in time; then all leases."""
        if sys.exc_info()[0] is not None:
            return  # a step has failed: what the end would find is not the cause
        started = self.clock.now
        self.land()
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
            for job in list(self.steps.jobs.values()):
                self.steps.abort(job)
            self.steps.end_all()
            self.pass_time(TTL_S, renews=True)
            self.prefill.free_ended()
            assert self.prefill.service.leases.active == 0, "I3: a lease does not end"
            assert not self.prefill.service.leases._growing, "I3: a lease grows for ever"
            assert len(self.prefill.free) == len(self.prefill.memory) - 1
        self.books_balance()

    def end_round(self, started: float) -> None:
        """Threads run and time passes."""
        self.pass_time(STEP_S, renews=True)
        if self.lives:
            self.prefill.free_ended()
            self.steps_of_the_end()
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
                waited -= PULL_TIMEOUT_S if job.is_followed else 0  # in which there may be news of the prompt
                assert waited <= PULL_TIMEOUT_S + MESSAGE_TIMEOUT_S + 2 * STEP_S, "I4: a pull outlives its timeout"
            decode.check_integrity()

    def steps_of_the_end(self) -> None:
        """The prefill engine computes its prompts; or nothing any longer; or the beginning of each, again and again."""
        starts_over = self.end == "starting over"
        for _ in range({"standing still": 0, "starting over": 1}.get(self.end, 4)):
            self.steps.begin(4, 3)
        self.steps.end_all()
        for job in list(self.steps.jobs.values()) if starts_over else []:
            self.steps.preempt(job)

    def pass_time(self, seconds: float, *, renews: bool) -> None:
        self.land(before=self.clock.now + seconds - LATEST_S)
        self.clock.advance(seconds)
        self.network.answer_waiting()
        for decode in self.decodes:
            decode.client.give_up()
            if renews:
                decode.renewals.send_due()

    def land(self, before: float = math.inf) -> None:
        """What late reads write arrives, of those that have failed by then."""
        for decode in self.decodes:
            for rank in decode.ranks:
                rank.land(before)

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
    run(80)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_never_wrong_and_never_stuck_in_many_more_runs() -> None:
    run(3000)
