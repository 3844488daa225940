"""Any order of requests and faults on engines with small pools: once the faults stop, every request ends in time."""

import itertools
from collections.abc import Mapping
from typing import Any, ClassVar, TypeVar

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

from tests.support.releases import INSTALLED
from tests.support.simulation.state_groups import CHECKPOINTS, DRAFTS, StateMode
from tests.support.simulation.vllm_schedulers import OUTPUT_TOKEN, ClientRequest, EngineSim, World

pytestmark = pytest.mark.thorough

_T = TypeVar("_T")

TTL_S = 3.0
QUEUE_TIMEOUT_S = 12.0
LONGEST_READ_S = 4.0
WHICH = st.integers(0, 5)  # of a few; more are none
#: With as few slots as vLLM's longest prompt takes, or more.
HOST_MEMORY = st.fixed_dictionaries(
    {
        "slots": st.sampled_from([32, 60]),
        "cpu_store": st.sampled_from(["eager", "lazy"]),
        "host_transfers": st.sampled_from(["off", "auto", "always"]),
    }
)
#: A lease is read, given up, or gives way; and what takes the longest may begin last. Before that, a transfer is given
#: up that nobody brings, or that waits in a queue.
ENOUGH_S = TTL_S + LONGEST_READ_S + 3 * QUEUE_TIMEOUT_S + 5.0
#: Where there are blocks for one at a time, each of the others may be read first.
EACH_S = LONGEST_READ_S


class Deployment(RuleBasedStateMachine):
    """Engines with both roles and with one, requests among them, and what operators and networks do to them."""

    with_host_memory: ClassVar[bool] = False
    states: ClassVar[StateMode] = ""
    stated: ClassVar[Mapping[str, int]] = {}  # of the states, beside
    keeps_all: ClassVar[bool] = True  # states at borders; by default, vLLM keeps the last one of a prompt

    def __init__(self) -> None:
        super().__init__()
        self.world = World()
        self.engines: list[EngineSim] = []
        self.all_asked: list[ClientRequest] = []
        self.numbers = itertools.count()
        self.other_legs: list[tuple[EngineSim, ClientRequest]] = []  # that their router has not sent yet

    @initialize(
        roles=st.sampled_from([["kv_both"], ["kv_both", "kv_both"], ["kv_producer", "kv_consumer", "kv_consumer"]]),
        blocks=st.lists(st.integers(20, 40), min_size=3, max_size=3),
        policy=st.sampled_from(["recompute", "fail"]),
        fraction=st.sampled_from([None, None, 0.3, 1.0]),
        host_memory=HOST_MEMORY,
    )
    def start(
        self, roles: list[str], blocks: list[int], policy: str, fraction: float | None, host_memory: dict[str, Any]
    ) -> None:
        changes = dict(host_memory) if self.with_host_memory else {}
        more = 6 + 2 * len(self.stated) if self.states else 0  # for states of the longest prompt
        if changes:
            changes["slots"] += more
        for role, number in zip(roles, blocks, strict=False):
            self.engines.append(
                EngineSim(
                    self.world, role, number + more, policy, states=self.states, stated=self.stated,
                    lease_ttl_s=TTL_S, claim_timeout_s=TTL_S, queue_timeout_s=QUEUE_TIMEOUT_S,
                    max_leased_fraction=fraction, max_pulls_ahead=3,
                    **changes,
                )
            )  # fmt: skip
            if not self.keeps_all:
                self.engines[-1].scheduler.kv_cache_manager.coordinator.retention_interval = 0

    def _pick(self, things: list[_T], which: int) -> _T:
        return things[which % len(things)]

    def _new(self, tokens: int, outputs: int, decodes_on: EngineSim | None) -> ClientRequest:
        """A request of one of many prompts; every third of them begins alike, and is found in caches."""
        number = next(self.numbers)
        seed = number if number % 3 else 0
        prompt = [(seed * 31 + position) % 500 for position in range(tokens)]
        asked = ClientRequest(f"r{number}", prompt, outputs, decodes_on)
        self.all_asked.append(asked)
        return asked

    @property
    def producers(self) -> list[EngineSim]:
        return [engine for engine in self.engines if engine.produces]

    @property
    def consumers(self) -> list[EngineSim]:
        return [engine for engine in self.engines if engine.consumes]

    @rule(number=st.integers(1, 5), tokens=st.integers(1, 200), outputs=st.integers(1, 10), which=WHICH)
    def clients_ask(self, number: int, tokens: int, outputs: int, which: int) -> None:
        """Several of them at once ask for the same amount of different work."""
        for each in range(which, which + number):
            asked = self._new(tokens, outputs, self._pick(self.consumers, each // 2))
            self._pick(self.producers, each).ask(asked)

    @rule(
        number=st.integers(1, 5), tokens=st.integers(1, 250), outputs=st.integers(1, 10), which=WHICH,
        first=st.sampled_from(["both", "prefill", "decode"]),
    )  # fmt: skip
    def both_legs_are_sent(self, number: int, tokens: int, outputs: int, which: int, first: str) -> None:
        """Or one of them first, and the other one perhaps never."""
        for each in range(which, which + number):
            prefill, decode = self._pick(self.producers, each), self._pick(self.consumers, each // 2)
            ours = self._new(tokens, outputs, None)
            theirs = ClientRequest(ours.name, ours.tokens, 1, decode, transfer_id=ours.name)
            if first != "prefill":
                decode.ask_by_name(ours, prefill)
            else:
                self.all_asked.remove(ours)
            if first != "decode":
                prefill.ask(theirs)
            else:
                self.other_legs.append((prefill, theirs))

    @precondition(lambda self: self.other_legs)
    @rule(which=WHICH)
    def a_prefill_leg_follows(self, which: int) -> None:
        engine, theirs = self.other_legs.pop(which % len(self.other_legs))
        engine.ask(theirs)

    @rule(tokens=st.integers(1, 200), which=WHICH)
    def a_client_asks_one_engine_alone(self, tokens: int, which: int) -> None:
        self._pick(self.engines, which).ask(self._new(tokens, 5, None))

    @rule(steps=st.integers(1, 40), seconds=st.sampled_from([0.01, 0.05, 0.5]))
    def time_passes(self, steps: int, seconds: float) -> None:
        for _ in range(steps):
            self.world.step(seconds)

    @rule(which=WHICH, request=WHICH)
    def a_client_leaves(self, which: int, request: int) -> None:
        engine = self._pick(self.engines, which)
        if engine.requests:
            engine.abort(self._pick(sorted(engine.requests), request))

    @rule(which=WHICH, paused=st.booleans())
    def an_operator_pauses(self, which: int, paused: bool) -> None:
        self._pick(self.engines, which).pause(paused=paused)

    @rule(which=WHICH)
    def an_operator_resets(self, which: int) -> None:
        engine = self._pick(self.engines, which)
        pulls = engine.pulling
        try:
            assert engine.scheduler.reset_prefix_cache(reset_running_requests=True, reset_connector=True)
        except RuntimeError:
            assert pulls, "a reset failed though nothing is being pulled"
        else:
            assert not (engine.produces and engine.leases)

    @rule(which=WHICH, cut=st.booleans())
    def the_network_fails(self, which: int, cut: bool) -> None:
        self._pick(self.engines, which).is_cut = cut

    @rule(which=WHICH, seconds=st.sampled_from([0.0, 0.1, 1.0, LONGEST_READ_S]))
    def reads_take(self, which: int, seconds: float) -> None:
        self._pick(self.consumers, which).worker.pull_s = seconds

    @precondition(lambda self: self.with_host_memory)
    @rule(which=WHICH, seconds=st.sampled_from([0.0, 0.1, 1.0]), fail=st.booleans())
    def copies_take(self, which: int, seconds: float, fail: bool) -> None:
        """To host memory and back, from now on; those under way may fail."""
        worker = self._pick(self.engines, which).worker
        worker.copy_s = seconds
        if fail:
            worker.fail_copies()

    @precondition(lambda self: self.engines)
    @invariant()
    def books_balance(self) -> None:
        for engine in self.engines:
            engine.side.check_integrity()

    def teardown(self) -> None:
        try:
            for engine in self.engines:
                engine.pause(paused=False)
                engine.is_cut = False
            self.world.run_to_the_end(ENOUGH_S, EACH_S)
            assert all(asked.ended for asked in self.all_asked)
            for _ in range(int(2 * TTL_S / 0.05)):
                self.world.step()
            for engine in self.engines:
                assert engine.blocks_in_use == 0, "blocks are held for ever"
                assert engine.slots_in_use == 0, "slots of host memory are held for ever"
        finally:
            self.world.close()


class DeploymentWithHostMemory(Deployment):
    """The same, where leases may move to host memory and prompts may land there."""

    with_host_memory = True


class DeploymentWithStates(Deployment):
    """The same of a model with states, of which vLLM keeps one a request."""

    states = "none"


class DeploymentWithBorderStates(Deployment):
    """The same where vLLM also keeps states at borders of blocks, by which it finds prefixes."""

    states = "align"


class DeploymentWithBorderStatesInHostMemory(DeploymentWithBorderStates):
    """And where those come to host memory and back, with leases and landings as without states."""

    with_host_memory = True


class DeploymentWithStatesOfPrompts(DeploymentWithBorderStates):
    """And finds keys behind the last one of them, for prompts that are pulled."""

    keeps_all = False

    @rule(
        asked=WHICH, which=WHICH, answer=st.integers(1, 40), tokens=st.integers(1, 40), at_once=st.booleans(),
        waited_for=st.sampled_from([0, 2, 4]),
    )  # fmt: skip
    def a_conversation_goes_on(
        self, asked: int, which: int, answer: int, tokens: int, at_once: bool, waited_for: int
    ) -> None:
        """Or begins. Perhaps with what another engine has answered; by a turn, or as many as are ``waited_for``."""
        for number in range(waited_for or 1):
            turn = self._take_turn(0 if number else asked, which, answer, tokens, at_once)
            for _ in range(100 if waited_for else 0):
                if turn.ended:
                    break
                self.world.step()

    def _take_turn(self, asked: int, which: int, answer: int, tokens: int, at_once: bool) -> ClientRequest:
        decode, prefill = self._pick(self.consumers, which), self.producers[0]
        ended = [each for each in self.all_asked if each.ended == "finished" and len(each.tokens) < 250]
        turn = self._new(tokens, answer, None if at_once else decode)
        if ended:
            before = self._pick(ended[::-1], asked)
            turn.tokens[:0] = [*before.tokens, *[OUTPUT_TOKEN] * before.outputs]
        prefilled = turn
        if at_once:
            decode.ask_by_name(turn, prefill)
            prefilled = ClientRequest(turn.name, turn.tokens, answer, decode, transfer_id=turn.name)
        prefill.ask(prefilled)
        return turn


class DeploymentWithStatesOfDrafts(DeploymentWithStates):
    """A model with states that drafts a token, for which vLLM takes a block more of each group."""

    stated = DRAFTS


class DeploymentWithCheckpoints(DeploymentWithBorderStates):
    """Mamba2 layers since vLLM 0.32: a step hands out the state of a border within it."""

    stated = CHECKPOINTS


class DeploymentWithCheckpointsOfDraftedPrompts(DeploymentWithStatesOfPrompts):
    """And of Mamba2 layers of a model that drafts a token."""

    stated = CHECKPOINTS | DRAFTS


class DeploymentWithCheckpointsAndDrafts(DeploymentWithBorderStatesInHostMemory):
    """The same of a model that drafts a token, with host memory."""

    stated = CHECKPOINTS | DRAFTS


#: How many examples of each are made in every run.
EXAMPLES: dict[type[Deployment], int] = {Deployment: 15, DeploymentWithHostMemory: 15}
if INSTALLED >= (0, 30):  # states of recurrent layers
    EXAMPLES |= {
        DeploymentWithStates: 7,
        DeploymentWithBorderStates: 9,
        DeploymentWithBorderStatesInHostMemory: 7,
        DeploymentWithStatesOfPrompts: 9,
        DeploymentWithStatesOfDrafts: 5,
    }
if INSTALLED >= (0, 32):
    EXAMPLES |= {
        DeploymentWithCheckpoints: 9,
        DeploymentWithCheckpointsAndDrafts: 7,
        DeploymentWithCheckpointsOfDraftedPrompts: 9,
    }
every_machine = pytest.mark.parametrize("machine", EXAMPLES, ids=lambda machine: machine.__name__)


def run(machine: type[Deployment], examples: int) -> None:
    run_state_machine_as_test(machine, settings=settings(max_examples=examples, stateful_step_count=25, deadline=None))


@every_machine
def test_every_request_ends_in_time(machine: type[Deployment]) -> None:
    run(machine, EXAMPLES[machine])


@pytest.mark.slow
@pytest.mark.timeout(1800)
@every_machine
def test_every_request_ends_in_time_in_many_more_runs(machine: type[Deployment]) -> None:
    run(machine, 20 * EXAMPLES[machine])
