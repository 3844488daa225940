"""The host tier never gives a wrong byte and never keeps anything for ever, in any order of events.

Requests of a few conversations come, are preempted and leave, in every state; device and host memory are so small that
blocks are evicted all the time; copies end on each rank when they like, well or not; the weights change. In models of
one cache group, a sibling in MultiConnector loads prompts while a step computes, or fails to. After every step it is
checked that

    I1  no step and no copy touches a block or a slot that a copy is using        (``host_ranks``)
    I2  what a copy reads is there when it begins, and still there when it ends    (``host_ranks``)
    I3  attention reads what was computed for exactly these tokens before it, and a step goes on from the state after
        them                                                                      (``host_machine``)
    I4  a load names only blocks that its request has, and alone                   (``host_machine``)
    I5  who has waited for a load or a pull in vain does not wait again            (``host_machine``)
    I6  a slot that a device may still write to is not used again                  (``host_ranks``)
    I7  what can be found is there on every rank                                   (``host_machine``)
    I8  nothing is found after a reset                                             (``host_machine``)
    I9  the books balance; in the end all references have been given back          (here)
"""

import itertools
import sys

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

from pd_connector.orders import StoreOrder
from pd_connector.scheduler.host.tier import StoreMode
from tests.support.host_tier.engine import HostTierEngine
from tests.support.host_tier.ranks import Copy, End, HostTierRank
from tests.support.host_tier.setup import STATES, Job, Setup, State
from tests.support.releases import INSTALLED

MODELS = {
    "full attention": ((4, 0),),
    "a window": ((4, 7),),
    "full attention and a window": ((4, 0), (4, 6)),
    "full attention and two windows": ((4, 0), (4, 5), (4, 9)),
    "blocks of two sizes": ((8, 0), (4, 7)),
    "full attention and chunks": ((4, 0), (4, -12)),
}
if INSTALLED >= (0, 30):  # before, states are not served
    MODELS |= {
        "full attention and states": ((4, 0), (4, STATES)),
        "full attention, a window and states": ((4, 0), (4, 6), (4, STATES)),
    }
pytestmark = pytest.mark.usefixtures("no_log")

ANY = st.integers(0, 11)  # of a list whose length is not known: modulo it
MODES: st.SearchStrategy[StoreMode] = st.sampled_from(["eager", "lazy"])
ENDS = st.sampled_from([End.WELL, End.WELL, End.WELL, End.FAILED, End.UNSETTLED])


def said_in(conversation: int, tokens: int) -> tuple[int, ...]:
    """The first tokens of a conversation; two and two begin alike."""
    return tuple(position * 7 + (conversation // 2 if position < 9 else conversation) for position in range(tokens))


class HostMemory(RuleBasedStateMachine):
    """One engine."""

    groups: tuple[tuple[int, int], ...] = ()

    def __init__(self) -> None:
        super().__init__()
        self.names = itertools.count()

    @initialize(
        ranks=st.sampled_from([1, 2]),
        mode=MODES,
        ahead=st.booleans(),
        device_blocks=st.sampled_from([6, 8, 11]),
        slots=st.sampled_from([2, 5, 9]),
        recomputes=st.booleans(),
        served=st.lists(st.tuples(ANY, st.integers(4, 21)), min_size=1, max_size=4),
    )
    def an_engine_starts(
        self,
        ranks: int,
        mode: StoreMode,
        ahead: bool,
        device_blocks: int,
        slots: int,
        recomputes: bool,
        served: list[tuple[int, int]],
    ) -> None:
        count = len(self.groups)
        setup = Setup(
            self.groups,
            device_blocks * count,
            slots * count,
            ranks,
            mode,
            lookahead=6,
            ahead=ahead,
            events=ahead,
            recomputes=recomputes,
        )
        self.engine = HostTierEngine(setup)
        for conversation, tokens in served:
            self.a_request_is_served(conversation, tokens, 2)

    @property
    def copies(self) -> list[tuple[HostTierRank, Copy]]:
        return [(rank, copy) for rank in self.engine.ranks for copy in rank.under_way]

    def pick(self, which: int, *states: State) -> Job | None:
        jobs = self.engine.in_state(*states)
        return jobs[which % len(jobs)] if jobs else None

    # Requests

    @rule(conversation=st.integers(0, 3), tokens=st.integers(2, 21), outputs=st.integers(1, 5))
    def a_request_arrives(self, conversation: int, tokens: int, outputs: int) -> None:
        self.engine.arrive(f"r{next(self.names)}", said_in(conversation % 4, tokens + outputs), outputs)

    @rule(conversation=st.integers(0, 3), tokens=st.integers(2, 21), outputs=st.integers(1, 5))
    def a_request_is_served(self, conversation: int, tokens: int, outputs: int) -> None:
        """So that there is something in host memory, and on the device something else."""
        self.a_request_arrives(conversation, tokens, outputs)
        self.engine.go_on(20)
        self.engine.other_requests_come(99)

    @rule(conversation=st.integers(0, 3), tokens=st.integers(5, 21), others=st.integers(0, 40), pulls=st.booleans())
    def a_request_begins_to_load(self, conversation: int, tokens: int, others: int, pulls: bool) -> None:
        """Some of its prompt may still be on the device, and what is in neither place is pulled or computed."""
        self.engine.other_requests_come(others)
        self.a_request_arrives(conversation, tokens, 2)
        self.engine.step(20, pulls=pulls)

    @rule(which=ANY)
    def a_request_leaves(self, which: int) -> None:
        if job := self.pick(which, State.WAITING, State.LOADING, State.READY, State.RUNNING):
            self.engine.abort(job)

    @rule(which=ANY)
    def a_request_leaves_while_it_is_loaded(self, which: int) -> None:
        if job := self.pick(which, State.LOADING):
            self.engine.abort(job)

    @rule()
    def the_last_request_is_preempted(self) -> None:
        if self.engine.running:
            self.engine.preempt(self.engine.running[-1])

    @rule(blocks=st.integers(1, 12))
    def other_requests_come(self, blocks: int) -> None:
        self.engine.other_requests_come(blocks)

    # Steps

    @rule(
        budget=st.sampled_from([1, 3, 8, 20]),
        pulls=st.sampled_from([False, False, True]),
        fate=st.sampled_from(["", "", "", "", "asked later", "declined"]),
    )
    def the_engine_steps(self, budget: int, pulls: bool, fate: str) -> None:
        self.engine.step(budget, pulls=pulls, fate=fate)

    @precondition(lambda self: len(self.groups) == 1)
    @rule(
        conversation=st.integers(0, 3),
        tokens=st.integers(5, 21),
        budget=st.sampled_from([3, 20]),
        again=st.booleans(),
        fails=st.booleans(),
        leaves=st.booleans(),
    )
    def a_sibling_loads_while_a_step_computes(
        self, conversation: int, tokens: int, budget: int, again: bool, fails: bool, leaves: bool
    ) -> None:
        """Perhaps for two requests of a conversation in one step, the first of which leaves before it has ended."""
        self.engine.run_all()
        again |= bool(self.engine.in_state(State.WAITING))
        for _ in range(1 + again):
            self.a_request_arrives(conversation, tokens, 2)
        # vLLM keeps requests that have found a failed load one step too late: see ``test_external_loads``.
        fails = fails and not self.engine.setup.ahead
        # It takes tokens back into blocks that a window has passed; and of two requests that share what has failed, one
        # computes it for both, also if that one leaves. Whatever is answered then, vLLM has read garbage.
        fails = fails and not again and not any(window for _, window in self.engine.setup.groups)
        self.engine.plan(budget, fate="a sibling fails" if fails else "a sibling loads")
        loading = [work.job for step in self.engine.steps for work in step.works if work.sibling]
        if leaves and loading:
            self.engine.abort(loading[0])
        self.engine.update()

    @precondition(lambda self: any(not step.executed for step in self.engine.steps))
    @rule()
    def the_ranks_run_a_step(self) -> None:
        self.engine.execute()

    @rule(rounds=st.integers(1, 6))
    def all_goes_well(self, rounds: int) -> None:
        """So that runs get far."""
        self.engine.go_on(rounds)

    # Copies

    @precondition(lambda self: self.copies)
    @rule(ends=st.lists(st.tuples(ANY, ENDS), min_size=1, max_size=3))
    def copies_end(self, ends: list[tuple[int, End]]) -> None:
        for which, end in ends:
            if copies := self.copies:
                rank, copy = copies[which % len(copies)]
                is_store = isinstance(copy.order, StoreOrder)
                rank.finish(copy, End.FAILED if end is End.UNSETTLED and not is_store else end)

    @rule()
    def lost_slots_are_written_to(self) -> None:
        for rank in self.engine.ranks:
            rank.run_away()

    @rule(happens=st.sampled_from([*[False] * 5, True]), preempts=st.booleans())
    def the_weights_change(self, happens: bool, preempts: bool) -> None:
        if happens:
            self.engine.reset(preempts=preempts)

    # What must always hold

    @invariant()
    def books_balance(self) -> None:
        self.engine.check()

    def teardown(self) -> None:
        if sys.exc_info()[0] is not None or not hasattr(self, "engine"):
            return  # a step has failed: what the end would find is not the cause
        engine = self.engine
        for job in engine.in_state(State.WAITING, State.LOADING, State.READY, State.RUNNING):
            engine.abort(job)
        engine.settle()
        engine.check()
        engine.check_at_rest()


def run(model: str, examples: int) -> None:
    machine = type(f"HostMemoryOf {model}", (HostMemory,), {"groups": MODELS[model]})
    run_state_machine_as_test(machine, settings=settings(max_examples=examples, stateful_step_count=40, deadline=None))


@pytest.mark.thorough
@pytest.mark.parametrize("model", MODELS)
def test_never_a_wrong_byte_and_nothing_kept_for_ever(model: str) -> None:
    run(model, 16)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("model", MODELS)
def test_never_a_wrong_byte_in_many_more_runs(model: str) -> None:
    run(model, 2000)
