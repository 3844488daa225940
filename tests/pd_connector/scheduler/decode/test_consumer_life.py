"""Any order of arrivals, allocations, settlements and departures on a decode engine, against sets of lease ids."""

import itertools
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, multiple, rule

from pd_connector.orders import Report
from pd_connector.params import RemotePrefill
from pd_connector.scheduler.decode.consumer import Consumer
from tests.support.connector.consumers import QUEUE_TIMEOUT_S, consumer_parts
from tests.support.connector.requests import FakeRequest, RecordingClient, a_decode_request, allocated
from tests.support.waiting import ManualClock

TTL_S = 30.0
BLOCKS = ((3, 9, 4, 7, 5),)


class ConsumerLife(RuleBasedStateMachine):
    """Requests that come, are allocated, settle and leave in any order, against sets of lease ids."""

    waiting = Bundle("waiting")
    pulling = Bundle("pulling")

    def __init__(self) -> None:
        super().__init__()
        self.clock, self.client = ManualClock(), RecordingClient()
        parts = consumer_parts(self.client, self.clock)
        self.renewals, self.consumer = parts.renewals, Consumer(*parts)
        self.numbers = itertools.count()
        self.renewed_at: dict[str, float] = {}  # of every lease that must be kept alive, by request id
        self.waits_since: dict[str, float] = {}  # of those whose requests have no blocks
        self.in_use: set[str] = set()  # leases of requests that have neither settled nor left, given up or not
        self.given_up: set[str] = set()
        self.cancelled: list[str] = []
        self.ordered: list[str] = []
        self.refused: list[str] = []
        self.following: dict[str, str] = {}  # request id to the lease id that it shares

    @rule(target=waiting, good=st.booleans(), tokens=st.integers(1, 100))
    def arrive(self, good: bool, tokens: int) -> FakeRequest:
        request_id = f"r{next(self.numbers)}"
        request = a_decode_request(request_id, tokens, lease_id=request_id)
        if good:
            self.renewed_at[request_id] = self.waits_since[request_id] = self.clock.now
            self.in_use.add(request_id)
        else:
            assert request.kv_transfer_params is not None
            del request.kv_transfer_params["lease_id"]
        self.consumer.add(request)
        return request

    @rule(target=waiting, tokens=st.integers(1, 100), data=st.data())
    def arrive_with_a_lease_in_use(self, tokens: int, data: st.DataObject) -> Any:
        if not self.renewed_at:
            return multiple()
        lease_id = data.draw(st.sampled_from(sorted(self.renewed_at)))
        request = a_decode_request(f"r{next(self.numbers)}", tokens, lease_id=lease_id)
        self.following[request.request_id] = lease_id
        self.consumer.add(request)
        return request

    @rule(target=pulling, request=consumes(waiting), computed=st.integers(0, 6))
    def allocate(self, request: FakeRequest, computed: int) -> Any:
        waits = self.consumer.must_wait(request, 16 * computed)
        missing = self.consumer.missing_tokens(request, 16 * computed)
        if (lease_id := self.following.get(request.request_id)) is not None:
            assert missing == 0
            return self.allocate_follower(request, waits, in_use=lease_id in self.in_use)
        assert not waits
        assert missing == max(0, request.num_prompt_tokens - 1 - 16 * computed)
        self.consumer.allocated(request, allocated(*BLOCKS), missing)
        self.waits_since.pop(request.request_id, None)
        if missing:
            (self.ordered if request.request_id in self.renewed_at else self.refused).append(request.request_id)
        else:
            self.lets_go(request)
        return request

    def allocate_follower(self, request: FakeRequest, waits: bool, *, in_use: bool) -> Any:
        """vLLM asks again in a later step while it must wait; this one leaves instead."""
        assert waits == in_use
        if in_use:
            self.consumer.finish(request, ())
        else:
            self.consumer.allocated(request, allocated(*BLOCKS), 0)
        return multiple()

    @rule(request=consumes(pulling))
    def settle(self, request: FakeRequest) -> None:
        self.consumer.settled({request.request_id}, set(), Report())
        self.renewed_at.pop(request.request_id, None)
        self.in_use.discard(request.request_id)

    @rule(request=consumes(waiting))
    def leave_early(self, request: FakeRequest) -> None:
        self.consumer.finish(request, ())
        self.lets_go(request)

    @rule(request=pulling)
    def leave_while_pulling(self, request: FakeRequest) -> None:
        self.consumer.finish(request, ())

    @rule(thirds=st.sampled_from([0.0, 0.25, 0.5, 1.0, 1.5]))
    def step(self, thirds: float) -> None:
        self.clock.advance(thirds * 10.0)
        orders = self.consumer.step_orders({})
        assert [order.request_id for order in orders.pulls] == self.ordered
        assert [order.request_id for order in orders.refusals] == self.refused
        assert all(isinstance(order.remote, RemotePrefill) for order in orders.pulls)
        self.ordered, self.refused = [], []
        self.renewals.send_due()
        for request_id, since in list(self.waits_since.items()):
            if self.clock.now >= since + QUEUE_TIMEOUT_S:
                self.cancelled.append(request_id)
                del self.renewed_at[request_id], self.waits_since[request_id]
        renewals = self.client.take_renewals()
        assert len(renewals) <= 1
        for renewal in renewals:
            assert set(renewal.lease_ids) <= self.renewed_at.keys()
            assert set(renewal.reading) <= set(renewal.lease_ids) - self.waits_since.keys()
            self.renewed_at |= dict.fromkeys(renewal.lease_ids, self.clock.now)
        assert all(self.clock.now < at + TTL_S / 3 for at in self.renewed_at.values())

    def lets_go(self, request: FakeRequest) -> None:
        self.in_use.discard(request.request_id)
        self.waits_since.pop(request.request_id, None)
        if self.renewed_at.pop(request.request_id, None) is not None:
            self.cancelled.append(request.request_id)

    @invariant()
    def books_balance(self) -> None:
        self.consumer.check_integrity()
        assert self.client.cancelled() == self.cancelled


TestConsumerLife = ConsumerLife.TestCase
TestConsumerLife.settings = settings(max_examples=50, stateful_step_count=40, deadline=None)
