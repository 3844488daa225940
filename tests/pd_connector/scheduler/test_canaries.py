"""Canaries of a decode engine's scheduler half: who is one, who waits for it, and what its end means for others."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from vllm.v1.core.block_pool import BlockPool

from pd_connector.orders import CanaryEnds, CanaryReference, CanaryRoom, Cause, Orders, PullOrder, Report
from pd_connector.scheduler import canaries as module
from pd_connector.scheduler.canaries import Canaries, Rejection, Standing
from pd_connector.scheduler.consumer import Consumer
from pd_connector.stats import ComputedHere, StatsRecorder
from pd_connector.vllm.cache_specs import Retention
from pd_connector.vllm.device_blocks import DeviceBlocks
from tests.support.connector.consumers import consumer_parts
from tests.support.connector.requests import (
    FakeRequest,
    RecordingClient,
    a_decode_request,
    allocated,
    cache_manager,
)
from tests.support.waiting import ManualClock

BLOCKS = [1, 2, 3, 4, 5]
RANKS = 2
WHOLE, ROOM = Retention(16), CanaryRoom(512, 2)


@dataclass
class Decode:
    """A decode engine's scheduler half, and vLLM's scheduler as far as it is needed here."""

    refuses: bool = True
    retention: Retention = WHOLE
    room: CanaryRoom = ROOM
    ranks: int = RANKS
    clock: ManualClock = field(default_factory=ManualClock)
    client: RecordingClient = field(default_factory=RecordingClient)
    tables: dict[str, list[int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.pool = BlockPool(64, enable_caching=True, hash_block_size=16)
        blocks = DeviceBlocks()
        blocks.bind(cache_manager(self.pool, self.tables))
        self.canaries = Canaries(blocks, [self.retention], refuses=self.refuses, clock=self.clock)
        self.parts = consumer_parts(self.client, self.clock, [self.retention])
        self.consumer = Consumer(*self.parts, self.canaries)
        handshakes: Any = [SimpleNamespace(canary=self.room)] * self.ranks
        self.canaries.set_workers(handshakes)

    def add(self, request_id: str, tokens: int = 70, engine: str = "P", **changes: Any) -> FakeRequest:
        request = a_decode_request(
            request_id, tokens, remote_engine_id=engine, lease_id=f"lease-of-{request_id}", **changes
        )
        self.consumer.add(request)
        return request

    def asks(self, request: FakeRequest, computed: int = 0) -> int | None:
        """What vLLM learns of a waiting request: None, or how many tokens will be pulled."""
        if self.consumer.must_wait(request):
            self.check()
            return None
        return self.consumer.missing_tokens(request, computed)

    def schedules(self, request: FakeRequest, computed: int = 0, blocks: Sequence[int] = BLOCKS) -> int | None:
        """Give a request its blocks unless it must wait; returns how many tokens it pulls."""
        missing = self.asks(request, computed)
        if missing is not None:
            self.tables[request.request_id] = list(blocks)
            self.consumer.allocated(request, allocated(blocks), missing)
            self.check()
        return missing

    def step(self) -> Orders:
        orders = self.canaries.step_orders({}) + self.consumer.step_orders({})
        self.check()
        return orders

    def becomes_canary(self, request: FakeRequest, computed: int = 0) -> PullOrder:
        assert self.schedules(request, computed) == 0
        (order,) = self.step().canaries
        assert order.request_id == request.request_id
        return order

    def computes(self, request: FakeRequest) -> CanaryReference:
        """The request samples its first token."""
        request.num_output_tokens = 1
        (reference,) = self.step().references
        return reference

    def report(self, request: FakeRequest, **ends: Any) -> None:
        """All ranks report the end of a canary, one after the other."""
        for _ in range(self.ranks):
            end = CanaryEnds(1, **({"samples": 4} | ends))
            self.settle(Report(canaries={request.request_id: end}))

    def settle(self, report: Report) -> None:
        for role in (self.canaries, self.consumer):
            role.settled(set(), set(), report)
        self.check()

    def leave(self, request: FakeRequest) -> None:
        for role in (self.canaries, self.consumer):
            role.finish(request, ([],))
        self.check()

    def check(self) -> None:
        self.canaries.check_integrity()
        self.consumer.check_integrity()

    def proves(self, request: FakeRequest, **ends: Any) -> None:
        self.becomes_canary(request)
        self.computes(request)
        self.report(request, **ends)

    @property
    def held(self) -> list[int]:
        return [block.block_id for block in self.pool.blocks if block.ref_cnt and not block.is_null]

    def counted(self) -> dict[str, Any]:
        stats = StatsRecorder()
        self.canaries.update_stats(stats)
        self.consumer.update_stats(stats)
        data = stats.take()
        return {name: number for name, number in (data["counts"] | data["gauges"]).items() if number} if data else {}


# A canary


def test_the_first_prompt_from_an_engine_is_computed_here_and_pulled_as_well() -> None:
    d = Decode()
    first = d.add("first")
    order = d.becomes_canary(first)
    assert (order.first_token, order.end_token) == (0, 69)
    assert order.local_block_ids == ((1, 2, 3, 4, 5),)
    assert d.canaries.wants_step
    reference = d.computes(first)
    assert reference.block_ids == (tuple(BLOCKS),)
    assert d.held == BLOCKS
    d.report(first)
    assert d.held == []
    assert d.counted() == {"canaries:proven": 1}
    assert d.canaries.wants_step, "a step tells vLLM's statistics of it"
    d.step()
    assert not d.canaries.wants_step


def test_what_comes_after_the_proof_is_pulled() -> None:
    d = Decode()
    d.proves(d.add("first"))
    second = d.add("second")
    assert d.schedules(second) == 69
    assert [pull.request_id for pull in d.step().pulls] == ["second"]


def test_what_was_computed_of_a_request_that_ends_at_once_is_kept_until_it_has_been_compared() -> None:
    d = Decode()
    first = d.add("first")
    d.becomes_canary(first)
    first.num_output_tokens = 1
    d.leave(first)
    del d.tables["first"]
    assert d.held == BLOCKS
    assert [each.block_ids for each in d.step().references] == [(tuple(BLOCKS),)]
    d.report(first)
    assert d.held == []
    assert d.counted() == {"canaries:proven": 1}


def test_the_lease_is_renewed_until_the_canary_has_ended() -> None:
    d = Decode()
    first = d.add("first")
    d.becomes_canary(first)
    assert d.parts.renewals.request_ids == {"first"}
    d.computes(first)
    d.leave(first)
    assert d.parts.renewals.request_ids == {"first"}
    d.report(first)
    assert d.parts.renewals.request_ids == set()
    assert d.client.cancelled() == [], "the workers have released it"


def test_only_what_is_computed_here_is_compared() -> None:
    d = Decode()
    first = d.add("first")
    order = d.becomes_canary(first, computed=32)
    assert (order.first_token, order.end_token) == (32, 69)
    assert order.local_block_ids == ((0, 0, 1, 2, 3),)
    assert d.computes(first).block_ids == ((0, 0, 3, 4, 5),)
    assert d.held == [3, 4, 5]


def test_of_a_long_prompt_the_last_tokens_are_compared() -> None:
    d = Decode()
    order = d.becomes_canary(d.add("first", tokens=1000))
    assert (order.first_token, order.end_token) == (496, 999)
    assert order.local_block_ids[0] == (*[0] * 31, *range(1, 33))


def test_what_a_window_has_passed_is_neither_pulled_nor_compared() -> None:
    d = Decode(retention=Retention(16, window=20))
    order = d.becomes_canary(d.add("first"))
    assert order.local_block_ids == ((0, 0, 0, 4, 5),)


def test_two_canaries_at_a_time_have_areas_of_their_own() -> None:
    d = Decode(room=CanaryRoom(64, 2))
    first, second = (d.becomes_canary(d.add(name, engine=name)) for name in ("a", "b"))
    areas = [set(order.local_block_ids[0]) - {0} for order in (first, second)]
    assert not areas[0] & areas[1]
    third = d.add("c", engine="c")
    assert d.asks(third) is None, "there is no room"
    d.report(FakeRequest("a", None), failure="gone", cause=Cause.READ)
    assert d.becomes_canary(third)


@pytest.mark.parametrize(("tokens", "computed"), [(15, 0), (70, 64), (70, 55), (33, 20)])
def test_a_prompt_of_which_no_whole_block_is_computed_here_proves_nothing_and_is_computed(
    tokens: int, computed: int
) -> None:
    d = Decode()
    short = d.add("short", tokens=tokens)
    assert d.schedules(short, computed) == 0
    assert d.step() == Orders()
    assert d.client.cancelled() == ["lease-of-short"]
    assert d.counted() == {f"prompts_computed:{ComputedHere.UNPROVEN}": 1}


def test_a_prompt_that_is_here_but_for_its_last_token_is_none() -> None:
    d = Decode()
    known = d.add("known")
    assert d.schedules(known, computed=69) == 0
    assert (d.step(), d.counted()) == (Orders(), {})


def test_a_request_whose_lease_is_lost_is_none() -> None:
    d = Decode()
    first = d.add("first")
    d.clock.advance(d.parts.renewals._queue_timeout_s + 1)
    d.parts.renewals.send_due()
    assert d.schedules(first) == 69
    assert d.step().refusals[0].cause is Cause.QUEUE


# Adapters


def test_each_adapter_is_proven_by_itself() -> None:
    d = Decode()
    d.proves(d.add("base"))
    with_adapter = d.add("adapted")
    with_adapter.lora_request = SimpleNamespace(lora_name="tone", lora_path="/adapters/tone")
    with_adapter.kv_transfer_params = None
    assert isinstance(d.canaries.look(with_adapter, a_remote_of("P")), Standing)
    assert d.canaries.look(with_adapter, a_remote_of("P")) is Standing.UNTRIED
    with_adapter.lora_request = None
    assert d.canaries.look(with_adapter, a_remote_of("P")) is Standing.PROVEN


def test_an_adapter_from_another_path_is_another_one() -> None:
    d = Decode()
    request = d.add("adapted")
    request.lora_request = SimpleNamespace(lora_name="tone", lora_path="/adapters/tone")
    d.canaries.begin(request, a_remote_of("P"), range(69))
    request.num_output_tokens = 1
    d.tables["adapted"] = BLOCKS
    d.canaries.step_orders({})
    for _ in range(RANKS):
        d.canaries.settled(set(), set(), Report(canaries={"adapted": CanaryEnds(1, samples=1)}))
    assert d.canaries.look(request, a_remote_of("P")) is Standing.PROVEN
    request.lora_request.lora_path = "/adapters/tone-2"
    assert d.canaries.look(request, a_remote_of("P")) is Standing.UNTRIED


def a_remote_of(engine: str) -> Any:
    return SimpleNamespace(remote_engine_id=engine)


# Who waits


def test_others_wait_for_the_verdict_without_blocks_and_then_pull() -> None:
    d = Decode()
    first, second = d.add("first"), d.add("second")
    d.becomes_canary(first)
    assert d.asks(second) is None
    assert d.consumer.waiting == 0, "it does not wait for blocks"
    d.computes(first)
    d.report(first)
    assert d.schedules(second) == 69


def test_a_prompt_from_another_engine_does_not_wait() -> None:
    d = Decode()
    d.becomes_canary(d.add("first"))
    assert d.becomes_canary(d.add("other", engine="Q"))


def test_who_has_waited_ten_seconds_goes_by_policy() -> None:
    d = Decode()
    d.becomes_canary(d.add("first"))
    second = d.add("second")
    assert d.asks(second) is None
    d.clock.advance(9.9)
    assert d.asks(second) is None
    d.clock.advance(0.2)
    assert d.schedules(second) == 69
    (refusal,) = d.step().refusals
    assert refusal.cause is Cause.CANARY
    assert "for 10 s there was no verdict" in refusal.reason
    assert d.client.cancelled() == ["lease-of-second"]


def test_nothing_lands_that_is_not_proven() -> None:
    d = Decode()
    first, second = d.add("first"), d.add("second")
    assert not d.consumer.may_land(first)
    d.becomes_canary(first)
    d.computes(first)
    d.report(first)
    assert d.consumer.may_land(second)


def test_before_workers_are_known_requests_wait() -> None:
    d = Decode()
    d.canaries = Canaries(DeviceBlocks(), [Retention(16)], clock=d.clock)
    assert d.canaries.look(d.add("first"), a_remote_of("P")) is Standing.AWAITED


# What it comes to


def test_an_engine_that_differs_is_refused_for_good_and_everybody_is_told(caplog: pytest.LogCaptureFixture) -> None:
    d = Decode()
    with caplog.at_level(logging.ERROR):
        d.proves(d.add("first"), difference="layer 'l0', part 'k': 1.28 times")
    assert "prefill engine P computes other keys and values than this engine: layer 'l0', part 'k'" in caplog.text
    assert "set canary to warn or off" in caplog.text
    d.clock.advance(1e6)
    for name in ("second", "third"):
        request = d.add(name)
        assert d.schedules(request) == 69
        (refusal,) = d.step().refusals
        assert refusal.cause is Cause.CANARY
        assert "1.28 times" in refusal.reason
    assert d.counted() == {"canaries:differs": 1, "peers_refused": 1}
    assert d.client.cancelled() == ["lease-of-second", "lease-of-third"]


def test_a_difference_on_one_rank_is_enough() -> None:
    d = Decode()
    first = d.add("first")
    d.becomes_canary(first)
    d.computes(first)
    d.settle(Report(canaries={"first": CanaryEnds(1, samples=4)}))
    d.settle(Report(canaries={"first": CanaryEnds(1, samples=4, difference="layer 'l1'")}))
    assert isinstance(d.canaries.look(first, a_remote_of("P")), Rejection)


def test_with_warn_it_is_used_all_the_same(caplog: pytest.LogCaptureFixture) -> None:
    d = Decode(refuses=False)
    with caplog.at_level(logging.WARNING):
        d.proves(d.add("first"), difference="layer 'l0', part 'k'")
    assert "They are used all the same (canary = warn)" in caplog.text
    assert d.schedules(d.add("second")) == 69
    assert d.counted() == {"canaries:differs": 1}


@pytest.mark.parametrize("cause", [Cause.LEASE, Cause.READ, Cause.TIMEOUT, Cause.UNCONFIRMED, Cause.PARAMS])
def test_after_a_canary_that_could_not_be_pulled_the_next_one_serves(cause: Cause) -> None:
    d = Decode()
    first, second = d.add("first"), d.add("second")
    d.becomes_canary(first)
    assert d.asks(second) is None
    d.report(first, failure="no", cause=cause, samples=0)
    assert d.becomes_canary(second)
    assert d.counted() == {"canaries:failed": 1}


@pytest.mark.parametrize("cause", [Cause.UNREACHABLE, Cause.DENIED, Cause.REFUSED])
def test_of_an_engine_out_of_reach_the_next_ones_fail_for_a_while(cause: Cause) -> None:
    d = Decode()
    first, second = d.add("first"), d.add("second")
    d.becomes_canary(first)
    assert d.asks(second) is None
    d.report(first, failure="no answer", cause=cause, samples=0)
    assert d.schedules(second) == 69
    (refusal,) = d.step().refusals
    assert (refusal.cause, refusal.reason) == (cause, "no answer")
    d.clock.advance(module._RETRY_S)
    assert d.becomes_canary(d.add("third"))


def test_an_engine_of_no_use_is_refused_for_good() -> None:
    d = Decode()
    first = d.add("first")
    d.becomes_canary(first)
    d.report(first, failure="head_size is 64 here and 32 there", cause=Cause.INCOMPATIBLE, samples=0)
    d.clock.advance(1e6)
    assert d.schedules(d.add("second")) == 69
    assert d.step().refusals[0].cause is Cause.INCOMPATIBLE


def test_if_one_rank_fails_the_others_wait_for_nothing() -> None:
    d = Decode()
    first = d.add("first")
    d.becomes_canary(first)
    d.settle(Report(canaries={"first": CanaryEnds(1, cause=Cause.READ, failure="no")}))
    assert d.step().references == (CanaryReference("first"),)
    first.num_output_tokens = 1
    assert d.step().references == ()
    d.settle(Report(canaries={"first": CanaryEnds(1)}))
    assert d.counted() == {"canaries:failed": 1}


def test_what_compares_nothing_proves_nothing() -> None:
    d = Decode()
    d.proves(d.add("first"), samples=0)
    assert d.canaries.look(d.add("second"), a_remote_of("P")) is Standing.UNTRIED
    assert d.counted() == {"canaries:failed": 1}


# It leaves


@pytest.mark.parametrize("how", ["aborted", "preempted"])
def test_after_a_canary_that_leaves_before_it_was_computed_the_next_one_serves(how: str) -> None:
    d = Decode()
    first, second = d.add("first"), d.add("second")
    d.becomes_canary(first)
    if how == "aborted":
        d.leave(first)
    else:
        first.num_preemptions, first.num_output_tokens = 1, 1
    assert d.step().references == (CanaryReference("first"),)
    assert d.asks(second) is None, "its area is in use"
    d.report(first, samples=0)
    assert d.counted() == {"canaries:left": 1}
    assert d.becomes_canary(second)


def test_a_second_request_of_the_same_name_is_none_while_the_first_ones_canary_goes_on() -> None:
    d = Decode()
    first = d.add("first")
    d.becomes_canary(first)
    d.leave(first)
    again = d.add("first")
    d.leave(again)
    d.report(first, samples=0)


# Resets


def test_a_reset_forgets_verdicts_and_what_is_under_way() -> None:
    """New weights, for example: what agreed with the old ones proves nothing."""
    d = Decode()
    d.proves(d.add("first"))
    other = d.add("other", engine="Q")
    d.becomes_canary(other)
    d.computes(other)
    assert d.canaries.device_references() == dict.fromkeys(BLOCKS, 1)
    assert d.canaries.reset()
    assert d.held == []
    assert d.canaries.device_references() == {}
    d.report(other, difference="what was computed is gone")
    assert d.counted() == {"canaries:proven": 1, "canaries:left": 1}
    assert d.canaries.look(d.add("second"), a_remote_of("P")) is Standing.UNTRIED


def test_verdicts_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_MAX_VERDICTS", 2)
    d = Decode()
    for name in ("a", "b", "c"):
        d.proves(d.add(name, engine=name))
    looks = [d.canaries.look(d.add(f"again {name}"), a_remote_of(name)) for name in ("a", "b", "c")]
    assert looks == [Standing.UNTRIED, Standing.PROVEN, Standing.PROVEN]


# In any order


class CanaryMachine(RuleBasedStateMachine):
    """Requests of three engines come, are computed, preempted, aborted and reported in any order.

    Kept apart: which engines are wrong. Nothing may ever be pulled from one of them, and nothing may be lost.
    """

    def __init__(self) -> None:
        super().__init__()
        self.d = Decode(ranks=1, room=CanaryRoom(64, 2))
        self.requests: dict[str, FakeRequest] = {}
        self.waiting: set[str] = set()
        self.running: set[str] = set()
        self.pulls: dict[str, bool] = {}  # canaries ordered, and whether something was said of what was computed
        self.number = 0

    @initialize(wrong=st.sets(st.sampled_from("PQR")))
    def engines(self, wrong: set[str]) -> None:
        self.wrong = wrong

    @rule(engine=st.sampled_from("PQR"), tokens=st.sampled_from([8, 40, 70]))
    def comes(self, engine: str, tokens: int) -> None:
        name = f"{engine}{self.number}"
        self.number += 1
        self.requests[name] = self.d.add(name, tokens, engine=engine)
        self.waiting.add(name)

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def is_scheduled(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.waiting)))
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
        assert not {pull.remote.remote_engine_id for pull in orders.pulls} & self.wrong, "wrong values are used"
        self.pulls |= {order.request_id: False for order in orders.canaries}
        for reference in orders.references:
            assert not self.pulls[reference.request_id], "it was told twice what was computed"
            self.pulls[reference.request_id] = True

    @precondition(lambda self: self.pulls)
    @rule(data=st.data(), fails=st.booleans())
    def a_worker_reports(self, data: st.DataObject, fails: bool) -> None:
        name = data.draw(st.sampled_from(sorted(self.pulls)))
        if fails:
            end = CanaryEnds(1, cause=Cause.READ, failure="no")
        elif self.pulls[name]:
            end = CanaryEnds(1, samples=2, difference="layer 'l0'" if name[0] in self.wrong else "")
        else:
            return
        del self.pulls[name]
        self.d.settle(Report(canaries={name: end}))

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
        assert self.d.held == []
        self.step()
        assert not self.d.canaries.wants_step
        assert self.d.parts.renewals.request_ids == set()


CanaryMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40)
TestCanaries = CanaryMachine.TestCase
