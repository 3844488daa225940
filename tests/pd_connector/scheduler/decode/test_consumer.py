"""The decode engine's scheduler half, state by state: what is pulled, which leases are kept alive, which let go of.

Covers: pd_connector.scheduler.decode.legs, pd_connector.scheduler.decode.single_use,
pd_connector.scheduler.decode.computed_prompts.
"""

import logging
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
from vllm.lora.request import LoRARequest

from pd_connector.orders import Orders, PullOrder, RefuseOrder, Report
from pd_connector.scheduler.decode import single_use
from pd_connector.scheduler.decode.consumer import Consumer
from pd_connector.scheduler.decode.renewals import Renewals
from tests.support.connector.consumers import consumer_parts
from tests.support.connector.requests import FakeRequest, RecordingClient, a_decode_request, a_prompt, allocated
from tests.support.waiting import ManualClock
from transfer.control.failures import PeerUnreachable
from transfer.control.messages import Cancel, Renew, Renewed

TTL_S = 30.0
BLOCKS = ((3, 9, 4, 7, 5),)


class Checked(Consumer):
    """Proves its integrity after every step; ``start_pull``, ``settle`` and ``leave`` stand for what vLLM says."""

    def add(self, request: FakeRequest) -> None:
        super().add(request)
        self.check_integrity()

    def start_pull(self, request: FakeRequest, block_ids: tuple[tuple[int, ...], ...], external_tokens: int) -> None:
        taken = self.allocated(request, allocated(*block_ids), external_tokens)
        assert taken in (0, external_tokens)
        self.check_integrity()

    def settle(self, request_id: str) -> None:
        self.settled({request_id}, set(), Report())
        self.check_integrity()

    def leave(self, request_id: str) -> None:
        self.finish(FakeRequest(request_id, None), ())
        self.check_integrity()


@dataclass
class ConsumerUnderTest:
    consumer: Checked
    client: RecordingClient
    renewals: Renewals
    clock: ManualClock

    def pulls(self) -> tuple[PullOrder, ...]:
        """The pulls of a step that refuses nothing."""
        orders = self.consumer.step_orders({})
        assert orders == Orders(pulls=orders.pulls)
        return orders.pulls

    def refusals(self) -> tuple[RefuseOrder, ...]:
        """The refusals of a step that pulls nothing."""
        orders = self.consumer.step_orders({})
        assert orders == Orders(refusals=orders.refusals)
        return orders.refusals


@pytest.fixture
def under_test() -> Iterator[ConsumerUnderTest]:
    clock, client = ManualClock(), RecordingClient()
    parts = consumer_parts(client, clock)
    under_test = ConsumerUnderTest(Checked(*parts), client, parts.renewals, clock)
    yield under_test
    under_test.consumer.check_integrity()


def test_all_but_the_last_prompt_token_is_pulled(under_test: ConsumerUnderTest) -> None:
    request = a_decode_request("r", tokens=70)
    under_test.consumer.add(request)
    assert under_test.consumer.missing_tokens(request, 0) == 69
    under_test.consumer.start_pull(request, BLOCKS, 69)
    (order,) = under_test.pulls()
    assert (order.request_id, order.first_token, order.end_token) == ("r", 0, 69)
    assert order.local_block_ids == BLOCKS
    assert order.remote.to_params() == request.kv_transfer_params
    assert under_test.pulls() == ()


def test_what_the_prefix_cache_holds_is_not_pulled(under_test: ConsumerUnderTest) -> None:
    request = a_decode_request("r", tokens=70)
    under_test.consumer.add(request)
    assert under_test.consumer.missing_tokens(request, 48) == 21
    under_test.consumer.start_pull(request, BLOCKS, 21)
    (order,) = under_test.pulls()
    assert (order.first_token, order.end_token) == (48, 69)


def test_asking_again_before_blocks_are_allocated_changes_nothing(under_test: ConsumerUnderTest) -> None:
    request = a_decode_request("r", tokens=70)
    under_test.consumer.add(request)
    assert [under_test.consumer.missing_tokens(request, computed) for computed in (0, 0, 16)] == [69, 69, 53]
    assert under_test.pulls() == ()


@pytest.mark.parametrize(("tokens", "computed"), [(70, 69), (49, 48), (1, 0)])
def test_the_lease_is_cancelled_at_once_when_nothing_is_missing(
    under_test: ConsumerUnderTest, tokens: int, computed: int
) -> None:
    request = a_decode_request("r", tokens, lease_id="L", remote_host="10.0.0.9", remote_port=77)
    under_test.consumer.add(request)
    assert under_test.consumer.missing_tokens(request, computed) == 0
    under_test.consumer.start_pull(request, BLOCKS, 0)
    assert under_test.client.sent == [("10.0.0.9", 77, Cancel("engine-p", ("L",)))]
    assert under_test.pulls() == ()


def test_the_lease_is_cancelled_at_once_when_the_request_leaves_before_allocation(
    under_test: ConsumerUnderTest,
) -> None:
    request = a_decode_request("r", lease_id="L")
    under_test.consumer.add(request)
    under_test.consumer.leave("r")
    assert under_test.client.cancelled() == ["L"]
    assert under_test.consumer.missing_tokens(request, 0) == 0
    under_test.consumer.leave("r")
    assert under_test.client.cancelled() == ["L"]


def test_a_request_that_leaves_while_workers_read_keeps_its_lease_until_they_have_settled(
    under_test: ConsumerUnderTest,
) -> None:
    request = a_decode_request("r", lease_id="L")
    under_test.consumer.add(request)
    under_test.consumer.start_pull(request, BLOCKS, 69)
    under_test.consumer.leave("r")
    under_test.clock.advance(TTL_S / 3)
    under_test.renewals.send_due()
    assert under_test.client.take_renewed() == ["L"]
    under_test.consumer.settle("r")
    under_test.clock.advance(TTL_S)
    under_test.renewals.send_due()
    assert under_test.client.sent == []


def test_a_pull_starts_once_even_if_the_request_is_scheduled_again(under_test: ConsumerUnderTest) -> None:
    request = a_decode_request("r")
    under_test.consumer.add(request)
    under_test.consumer.start_pull(request, BLOCKS, 69)
    assert len(under_test.pulls()) == 1
    under_test.consumer.settle("r")
    assert under_test.consumer.missing_tokens(request, 0) == 0  # preempted, or recomputed after a failed pull
    under_test.consumer.start_pull(request, BLOCKS, 0)
    assert under_test.pulls() == ()
    assert under_test.client.cancelled() == []


def test_leases_are_renewed_every_third_of_their_time_to_live(under_test: ConsumerUnderTest) -> None:
    waiting, pulling = a_decode_request("w", lease_id="W"), a_decode_request("p", lease_id="P")
    for request in (waiting, pulling):
        under_test.consumer.add(request)
    under_test.consumer.start_pull(pulling, BLOCKS, 69)
    under_test.clock.advance(TTL_S / 3 - 0.001)
    under_test.renewals.send_due()
    assert under_test.client.take_renewed() == ["P"]  # announces the pull
    under_test.clock.advance(0.001 - TTL_S / 3)
    for _ in range(3):
        under_test.clock.advance(TTL_S / 3)
        under_test.renewals.send_due()
        assert sorted(under_test.client.take_renewed()) == ["P", "W"]
        under_test.renewals.send_due()
        assert under_test.client.take_renewed() == []


def test_one_renewal_goes_to_each_engine_however_many_leases_it_has(under_test: ConsumerUnderTest) -> None:
    for request_id, engine, port in (("1", "e1", 1), ("2", "e1", 1), ("3", "e2", 2)):
        request = a_decode_request(
            request_id, lease_id=f"L{request_id}", remote_engine_id=engine, remote_port=port, lease_ttl_s=3.0
        )
        under_test.consumer.add(request)
    under_test.clock.advance(1.0)
    under_test.renewals.send_due()
    assert under_test.client.sent == [
        ("10.0.0.5", 1, Renew("e1", ("L1", "L2"))),
        ("10.0.0.5", 2, Renew("e2", ("L3",))),
    ]


def test_params_that_cannot_be_used_are_refused_when_blocks_are_allocated(under_test: ConsumerUnderTest) -> None:
    request = a_decode_request("r")
    request.prompt_token_ids = a_prompt(71)
    under_test.consumer.add(request)
    assert under_test.consumer.missing_tokens(request, 0) == 70
    under_test.consumer.start_pull(request, BLOCKS, 70)
    (refusal,) = under_test.refusals()
    assert refusal.request_id == "r"
    assert "70 prompt tokens and this request has 71" in refusal.reason
    under_test.consumer.settle("r")
    assert under_test.client.sent == []


@pytest.mark.parametrize("way", ["leaves", "is computed here"])
def test_a_refused_request_has_no_lease_to_let_go_of(under_test: ConsumerUnderTest, way: str) -> None:
    request = FakeRequest("r", a_prompt(70), {"do_remote_prefill": True})
    under_test.consumer.add(request)
    if way == "leaves":
        under_test.consumer.leave("r")
    else:
        under_test.consumer.start_pull(request, BLOCKS, 0)
    under_test.clock.advance(TTL_S)
    assert under_test.pulls() == ()
    assert under_test.client.sent == []


def test_params_of_another_lora_adapter_are_refused(under_test: ConsumerUnderTest) -> None:
    request = a_decode_request("r")
    request.lora_request = LoRARequest("german", 1, "/adapters/german")
    under_test.consumer.add(request)
    under_test.consumer.start_pull(request, BLOCKS, 69)
    (refusal,) = under_test.refusals()
    assert "belong to one request" in refusal.reason


def test_a_request_without_params_of_a_prefill_is_not_touched(under_test: ConsumerUnderTest) -> None:
    request = FakeRequest("r", a_prompt(70))
    assert under_test.consumer.missing_tokens(request, 0) == 0
    under_test.consumer.start_pull(request, BLOCKS, 0)
    under_test.consumer.settle("r")
    under_test.consumer.leave("r")
    assert under_test.pulls() == ()
    assert under_test.client.sent == []


@pytest.mark.parametrize("state", ["waiting", "pulling"])
@pytest.mark.parametrize("second", ["good", "refused"])
def test_an_id_that_comes_twice_keeps_its_first_params(
    under_test: ConsumerUnderTest, state: str, second: str, caplog: pytest.LogCaptureFixture
) -> None:
    first = a_decode_request("r", lease_id="first")
    under_test.consumer.add(first)
    if state == "pulling":
        under_test.consumer.start_pull(first, BLOCKS, 69)
    with caplog.at_level(logging.ERROR):
        under_test.consumer.add(a_decode_request("r", 71 if second == "refused" else 70, lease_id="second"))
    assert "request r came twice" in caplog.text
    under_test.clock.advance(TTL_S / 3)
    under_test.renewals.send_due()
    assert under_test.client.take_renewed() == ["first"]


def test_an_id_may_come_again_after_the_first_has_gone(under_test: ConsumerUnderTest) -> None:
    first, second = a_decode_request("r", lease_id="first"), a_decode_request("r", lease_id="second")
    under_test.consumer.add(first)
    under_test.consumer.leave("r")
    under_test.consumer.add(second)
    under_test.consumer.start_pull(second, BLOCKS, 69)
    (order,) = under_test.pulls()
    assert order.remote.lease_id == "second"
    assert under_test.client.cancelled() == ["first"]


def test_an_engine_that_was_not_told_about_a_lease_is_logged(
    under_test: ConsumerUnderTest, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("a", "b", "c"):
        under_test.consumer.add(a_decode_request(name, lease_id=name))
        under_test.consumer.leave(name)
    unanswered, answered, cancelled = under_test.client.futures
    cancelled.cancel()
    answered.set_result(Renewed(()))
    assert not caplog.records
    unanswered.set_exception(
        PeerUnreachable(host="10.0.0.5", port=8998, request_type="cancel", tried_s=10.0, attempts=0)
    )
    (record,) = caplog.records
    assert "which will expire: 10.0.0.5:8998 did not answer 'cancel'" in record.getMessage()


def test_every_pull_has_an_id_of_its_own(under_test: ConsumerUnderTest) -> None:
    for request_id in ("a", "b"):
        request = a_decode_request(request_id, lease_id=request_id)
        under_test.consumer.add(request)
        under_test.consumer.start_pull(request, BLOCKS, 69)
    first, second = under_test.pulls()
    assert first.pull_id
    assert first.pull_id != second.pull_id


# Requests that share a lease, as the n choices of one client request do


@pytest.fixture
def shared(under_test: ConsumerUnderTest) -> tuple[FakeRequest, FakeRequest]:
    """A request and one that follows it, both waiting."""
    first, second = (a_decode_request(request_id, lease_id="L") for request_id in ("first", "second"))
    under_test.consumer.add(first)
    under_test.consumer.add(second)
    return first, second


def test_a_request_whose_lease_is_in_use_waits_until_that_pull_has_settled(
    under_test: ConsumerUnderTest, shared: tuple[FakeRequest, FakeRequest]
) -> None:
    first, second = shared
    assert under_test.consumer.must_wait(second, 0)
    assert not under_test.consumer.must_wait(first, 0)
    assert under_test.consumer.missing_tokens(first, 0) == 69
    under_test.consumer.start_pull(first, BLOCKS, 69)
    assert under_test.consumer.must_wait(second, 0)
    assert [order.request_id for order in under_test.pulls()] == ["first"]
    under_test.consumer.settle("first")
    assert not under_test.consumer.must_wait(second, 0)
    assert under_test.consumer.missing_tokens(second, 64) == 0
    under_test.consumer.start_pull(second, BLOCKS, 0)
    assert under_test.pulls() == ()
    assert under_test.client.sent == []


@pytest.mark.parametrize("way", ["leaves", "nothing is missing"])
def test_a_follower_is_computed_here_when_the_first_lets_go_of_the_lease(
    under_test: ConsumerUnderTest, shared: tuple[FakeRequest, FakeRequest], way: str
) -> None:
    first, second = shared
    if way == "leaves":
        under_test.consumer.leave("first")
    else:
        under_test.consumer.start_pull(first, BLOCKS, 0)
    assert under_test.client.cancelled() == ["L"]
    assert under_test.consumer.missing_tokens(second, 0) == 0
    under_test.consumer.start_pull(second, BLOCKS, 0)
    assert under_test.client.cancelled() == ["L"]


def test_a_follower_that_leaves_does_not_end_the_lease_of_the_first(
    under_test: ConsumerUnderTest, shared: tuple[FakeRequest, FakeRequest]
) -> None:
    under_test.consumer.leave("second")
    assert under_test.client.sent == []
    under_test.clock.advance(TTL_S / 3)
    under_test.renewals.send_due()
    assert under_test.client.take_renewed() == ["L"]
    assert under_test.consumer.missing_tokens(shared[0], 0) == 69


def test_a_decode_leg_that_the_api_server_rejected_lets_go_of_its_lease(under_test: ConsumerUnderTest) -> None:
    """vLLM adds a placeholder with another prompt for it, and aborts that at once."""
    request = a_decode_request("r", lease_id="L")
    request.prompt_token_ids, request.abort_immediately = [0], True
    under_test.consumer.add(request)
    under_test.consumer.leave("r")
    assert under_test.client.cancelled() == ["L"]


def test_a_smaller_offer_than_was_asked_for_is_pulled_from_its_start(under_test: ConsumerUnderTest) -> None:
    request = a_decode_request("r", tokens=70)
    under_test.consumer.add(request)
    assert under_test.consumer.missing_tokens(request, 16) == 53
    under_test.consumer.start_pull(request, BLOCKS, 48)
    (order,) = under_test.pulls()
    assert (order.first_token, order.end_token) == (16, 64)


def test_a_lease_that_was_let_go_of_is_not_pulled_again(under_test: ConsumerUnderTest) -> None:
    """A sibling that comes after the pull has settled, or a router that tries again: it takes the prefix cache's."""
    for request_id in ("pulled", "left"):
        under_test.consumer.add(a_decode_request(request_id, lease_id=request_id))
    under_test.consumer.start_pull(a_decode_request("pulled"), BLOCKS, 69)
    under_test.consumer.settle("pulled")
    under_test.consumer.leave("left")
    assert len(under_test.pulls()) == 1
    for lease_id in ("pulled", "left"):
        late = a_decode_request(f"late {lease_id}", lease_id=lease_id)
        under_test.consumer.add(late)
        assert under_test.consumer.missing_tokens(late, 64) == 0
        under_test.consumer.start_pull(late, BLOCKS, 0)
    assert under_test.pulls() == ()
    assert under_test.client.cancelled() == ["left"]


def test_leases_that_were_let_go_of_are_forgotten_in_the_end(
    under_test: ConsumerUnderTest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(single_use, "_MAX_SPENT", 3)
    for number in range(5):
        under_test.consumer.add(a_decode_request(f"r{number}", lease_id=f"L{number}"))
        under_test.consumer.leave(f"r{number}")
    for number, missing in ((1, 69), (2, 0)):
        late = a_decode_request(f"late {number}", lease_id=f"L{number}")
        under_test.consumer.add(late)
        assert under_test.consumer.missing_tokens(late, 0) == missing


# Leases that a prefill engine says have ended


def test_a_request_whose_lease_has_ended_is_refused_instead_of_read(under_test: ConsumerUnderTest) -> None:
    request = a_decode_request("r", lease_id="L")
    under_test.consumer.add(request)
    under_test.clock.advance(TTL_S / 3)
    under_test.renewals.send_due()
    under_test.client.futures[-1].set_result(Renewed(()))
    assert under_test.consumer.missing_tokens(request, 0) == 69
    under_test.consumer.start_pull(request, BLOCKS, 69)
    (refusal,) = under_test.refusals()
    assert (refusal.request_id, refusal.cause) == ("r", "lease")
    assert "lease L of engine engine-p at 10.0.0.5:8998 has ended" in refusal.reason
    under_test.consumer.settle("r")
    assert under_test.client.cancelled() == []


def test_a_pull_under_way_is_left_to_its_release_when_its_lease_has_ended(under_test: ConsumerUnderTest) -> None:
    request = a_decode_request("r")
    under_test.consumer.add(request)
    under_test.consumer.start_pull(request, BLOCKS, 69)
    assert len(under_test.pulls()) == 1
    under_test.clock.advance(TTL_S / 3)
    under_test.renewals.send_due()
    under_test.client.futures[-1].set_result(Renewed(()))
    assert under_test.consumer.step_orders({}) == Orders()
    under_test.consumer.settle("r")


def test_a_lease_that_has_ended_is_not_cancelled(under_test: ConsumerUnderTest) -> None:
    under_test.consumer.add(a_decode_request("r"))
    under_test.clock.advance(TTL_S / 3)
    under_test.renewals.send_due()
    under_test.client.futures[-1].set_result(Renewed(()))
    under_test.consumer.leave("r")
    assert under_test.client.cancelled() == []


# Traces


@pytest.mark.parametrize("tokens", [70, 71], ids=["pulled", "refused"])
def test_an_order_carries_the_trace_of_its_request(under_test: ConsumerUnderTest, tokens: int) -> None:
    request = a_decode_request("r")
    request.prompt_token_ids = a_prompt(tokens)
    request.trace_headers = {"traceparent": "00-1-2-01", "tracestate": "vendor=1"}
    under_test.consumer.add(request)
    under_test.consumer.start_pull(request, BLOCKS, tokens - 1)
    (order,) = under_test.pulls() if tokens == 70 else under_test.refusals()
    assert order.traceparent == "00-1-2-01"
