"""Canaries in any order: nothing of a prefill engine that is wrong is ever pulled, and nothing is lost.

Covers: pd_connector.scheduler.decode.canaries.
"""

import itertools

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from pd_connector.orders import CanaryEnds, CanaryRoom, Cause, Report
from pd_connector.params import EngineAddress
from pd_connector.scheduler.decode.canaries import _Key
from pd_connector.vllm.cache_specs import Retention
from tests.support.connector.proving import ProvingDecode
from tests.support.connector.requests import FakeRequest


class CanaryMachine(RuleBasedStateMachine):
    """Requests of three engines come, are computed, preempted, aborted and reported in any order.

    Kept apart: which engines are wrong, in all that they compute or only in what prompts with a state at a border show.
    Nothing that is wrong may ever be pulled from one of them, and nothing may be lost.
    """

    def __init__(self) -> None:
        super().__init__()
        self.d = ProvingDecode(ranks=1, room=CanaryRoom(64, 2, 16, 16), retention=Retention(16, earlier_states=1))
        canaries = self.d.canaries
        canaries._last_border = lambda request, remote: 64 if request.num_prompt_tokens > 64 else 0  # type: ignore[method-assign]
        self.requests: dict[str, FakeRequest] = {}
        self.waiting: set[str] = set()
        self.running: set[str] = set()
        self.pulls: dict[str, bool] = {}  # canaries ordered, and whether something was said of what was computed
        self.pulling: set[str] = set()  # requests whose prompts are being pulled for good
        self.number = 0

    @initialize(wrong=st.sets(st.sampled_from("PQR")), in_states=st.sets(st.sampled_from("PQR")))
    def engines(self, wrong: set[str], in_states: set[str]) -> None:
        self.wrong, self.in_states = wrong, in_states

    def shows_wrong(self, name: str) -> bool:
        """Whether what a request pulls from its engine is wrong, and seen to be."""
        return name[0] in self.wrong or (name[0] in self.in_states and name.endswith("70"))

    @rule(engine=st.sampled_from("PQR"), tokens=st.sampled_from([8, 40, 70]))
    def comes(self, engine: str, tokens: int) -> None:
        name = f"{engine}{self.number}-{tokens}"
        self.number += 1
        self.requests[name] = self.d.add(name, tokens, engine=engine)
        self.waiting.add(name)

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def is_scheduled(self, data: st.DataObject) -> None:
        self.schedule(data.draw(st.sampled_from(sorted(self.waiting))))

    def schedule(self, name: str) -> None:
        if self.d.schedules(self.requests[name]) is not None:
            self.waiting.remove(name)
            self.running.add(name)

    @precondition(lambda self: self.running)
    @rule(data=st.data(), how=st.sampled_from(["samples", "is preempted"]))
    def goes_on(self, data: st.DataObject, how: str) -> None:
        request = self.requests[data.draw(st.sampled_from(sorted(self.running)))]
        if how == "samples":
            request.num_output_tokens += 1
        else:
            request.num_preemptions += 1

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def leaves(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.requests)))
        self.d.leave(self.requests.pop(name))
        self.waiting.discard(name)
        self.running.discard(name)

    @rule()
    def step(self) -> None:
        orders = self.d.step()
        assert not any(self.shows_wrong(pull.request_id) for pull in orders.pulls), "wrong values are used"
        self.pulling |= {pull.request_id for pull in orders.pulls}
        self.pulls |= {order.request_id: False for order in orders.canaries}
        for reference in orders.references:
            assert not self.pulls[reference.request_id], "it was told twice what was computed"
            self.pulls[reference.request_id] = True

    @precondition(lambda self: self.pulls)
    @rule(data=st.data(), fails=st.booleans())
    def a_worker_reports(self, data: st.DataObject, fails: bool) -> None:
        self.report(data.draw(st.sampled_from(sorted(self.pulls))), fails=fails)

    def report(self, name: str, *, fails: bool) -> None:
        if fails:
            end = CanaryEnds(1, cause=Cause.READ, failure="no")
        elif self.pulls[name]:
            end = CanaryEnds(1, samples=2, difference="layer 'l0'" if self.shows_wrong(name) else "")
        else:
            return
        del self.pulls[name]
        self.d.settle(Report(canaries={name: end}))

    @rule(engine=st.sampled_from("PQR"), tokens=st.sampled_from([40, 70]))
    def comes_and_all_goes_well(self, engine: str, tokens: int) -> None:
        """Without it, hardly anything is ever proven."""
        self.comes(engine, tokens)
        for name in sorted(self.waiting):
            self.schedule(name)
        self.step()
        for name in self.running:
            self.requests[name].num_output_tokens += 1
        self.step()
        for name in sorted(self.pulls):
            self.report(name, fails=False)

    @rule(seconds=st.sampled_from([0.1, 5.0, 20.0]))
    def time_passes(self, seconds: float) -> None:
        self.d.clock.advance(seconds)

    @rule()
    def is_reset(self) -> None:
        self.d.canaries.reset()

    @invariant()
    def books_balance(self) -> None:
        self.d.check()

    def teardown(self) -> None:
        for request in list(self.requests.values()):
            self.d.leave(request)
        self.step()
        for name in list(self.pulls):
            self.d.settle(Report(canaries={name: CanaryEnds(1, cause=Cause.READ, failure="no")}))
        self.d.consumer.settled(self.pulling, set(), Report())
        assert self.d.held == []
        self.step()
        assert not self.d.canaries.wants_step
        assert self.d.parts.renewals.request_ids == set()


CanaryMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40)
TestCanaries = CanaryMachine.TestCase


def test_verdicts_on_a_hundred_engines_with_a_hundred_adapters_are_all_remembered() -> None:
    """Whoever is forgotten is proven anew: D computes a prompt, and others wait for that."""
    d = ProvingDecode()
    d.proves(d.add("first"))
    for engine, adapter in itertools.product(range(100), range(100)):
        d.canaries._verdicts[_Key(EngineAddress(f"{engine:032x}", "10.0.0.9", 8998), f"adapter {adapter}")] = True
    assert d.schedules(d.add("second")) == 69
