"""The decode engine's scheduler half, state by state: what is pulled, which leases are kept alive, which let go of."""

import itertools
import logging
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import dataclass

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from pd_connector.metadata import PullOrder
from pd_connector.params import RemotePrefill
from pd_connector.scheduler.consumer import Consumer
from tests.pd_connector.support import FakeRequest, ManualClock, a_decode_request, a_prompt
from transfer.control.client import ControlClient
from transfer.control.errors import PeerUnreachable
from transfer.control.messages import Cancel, Renew, Renewed, Reply, Request

TTL_S = 30.0
BLOCKS = ((3, 9, 4, 7, 5),)


class RecordingClient(ControlClient):
    """Sends nothing: remembers what it was asked to send, and where to."""

    def __init__(self) -> None:  # no thread
        self.sent: list[tuple[str, int, Request]] = []
        self.futures: list[Future[Reply]] = []

    def request(self, host: str, port: int, message: Request, timeout_s: float) -> Future[Reply]:
        assert timeout_s > 0
        self.sent.append((host, port, message))
        self.futures.append(Future())
        return self.futures[-1]

    def cancelled(self) -> list[str]:
        """Lease ids, in the order of their cancels."""
        return [lease for _, _, sent in self.sent if isinstance(sent, Cancel) for lease in sent.lease_ids]

    def take_renewed(self) -> list[str]:
        """Lease ids of the renewals since the last call."""
        renewed = [lease for _, _, sent in self.sent if isinstance(sent, Renew) for lease in sent.lease_ids]
        self.sent = [entry for entry in self.sent if not isinstance(entry[2], Renew)]
        return renewed


class Checked(Consumer):
    """Proves its integrity after every step."""

    def add_request(self, request: FakeRequest) -> None:
        super().add_request(request)
        self.check_integrity()

    def start_pull(self, request: FakeRequest, block_ids: tuple[tuple[int, ...], ...], external_tokens: int) -> None:
        super().start_pull(request, block_ids, external_tokens)
        self.check_integrity()

    def settle(self, request_id: str) -> None:
        super().settle(request_id)
        self.check_integrity()

    def finish_request(self, request_id: str) -> None:
        super().finish_request(request_id)
        self.check_integrity()


@dataclass
class Desk:
    consumer: Consumer
    client: RecordingClient
    clock: ManualClock

    def pulls(self) -> tuple[PullOrder, ...]:
        """The pulls of a step that refuses nothing."""
        pulls, refusals = self.consumer.take_orders()
        assert refusals == ()
        return pulls


@pytest.fixture
def desk() -> Iterator[Desk]:
    clock, client = ManualClock(), RecordingClient()
    desk = Desk(Checked(client, 10.0, clock), client, clock)
    yield desk
    desk.consumer.check_integrity()


def test_all_but_the_last_prompt_token_is_pulled(desk: Desk) -> None:
    request = a_decode_request("r", tokens=70)
    desk.consumer.add_request(request)
    assert desk.consumer.missing_tokens(request, 0) == 69
    desk.consumer.start_pull(request, BLOCKS, 69)
    (order,) = desk.pulls()
    assert (order.request_id, order.first_token, order.end_token) == ("r", 0, 69)
    assert order.local_block_ids == BLOCKS
    assert order.remote.to_params() == request.kv_transfer_params
    assert desk.pulls() == ()


def test_what_the_prefix_cache_holds_is_not_pulled(desk: Desk) -> None:
    request = a_decode_request("r", tokens=70)
    desk.consumer.add_request(request)
    assert desk.consumer.missing_tokens(request, 48) == 21
    desk.consumer.start_pull(request, BLOCKS, 21)
    (order,) = desk.pulls()
    assert (order.first_token, order.end_token) == (48, 69)


def test_asking_again_before_blocks_are_allocated_changes_nothing(desk: Desk) -> None:
    request = a_decode_request("r", tokens=70)
    desk.consumer.add_request(request)
    assert [desk.consumer.missing_tokens(request, computed) for computed in (0, 0, 16)] == [69, 69, 53]
    assert desk.pulls() == ()


@pytest.mark.parametrize(("tokens", "computed"), [(70, 69), (49, 48), (1, 0)])
def test_the_lease_is_cancelled_at_once_when_nothing_is_missing(desk: Desk, tokens: int, computed: int) -> None:
    request = a_decode_request("r", tokens, lease_id="L", remote_host="10.0.0.9", remote_port=77)
    desk.consumer.add_request(request)
    assert desk.consumer.missing_tokens(request, computed) == 0
    desk.consumer.start_pull(request, BLOCKS, 0)
    assert desk.client.sent == [("10.0.0.9", 77, Cancel("engine-p", ("L",)))]
    assert desk.pulls() == ()


def test_the_lease_is_cancelled_at_once_when_the_request_leaves_before_allocation(desk: Desk) -> None:
    request = a_decode_request("r", lease_id="L")
    desk.consumer.add_request(request)
    desk.consumer.finish_request("r")
    assert desk.client.cancelled() == ["L"]
    assert desk.consumer.missing_tokens(request, 0) == 0
    desk.consumer.finish_request("r")
    assert desk.client.cancelled() == ["L"]


def test_a_request_that_leaves_while_workers_read_keeps_its_lease_until_they_have_settled(desk: Desk) -> None:
    request = a_decode_request("r", lease_id="L")
    desk.consumer.add_request(request)
    desk.consumer.start_pull(request, BLOCKS, 69)
    desk.consumer.finish_request("r")
    desk.clock.advance(TTL_S / 3)
    desk.consumer.take_orders()
    assert desk.client.take_renewed() == ["L"]
    desk.consumer.settle("r")
    desk.clock.advance(TTL_S)
    desk.consumer.take_orders()
    assert desk.client.sent == []


def test_a_pull_starts_once_even_if_the_request_is_scheduled_again(desk: Desk) -> None:
    request = a_decode_request("r")
    desk.consumer.add_request(request)
    desk.consumer.start_pull(request, BLOCKS, 69)
    assert len(desk.pulls()) == 1
    desk.consumer.settle("r")
    assert desk.consumer.missing_tokens(request, 0) == 0  # preempted, or recomputed after a failed pull
    desk.consumer.start_pull(request, BLOCKS, 0)
    assert desk.pulls() == ()
    assert desk.client.cancelled() == []


def test_leases_are_renewed_every_third_of_their_time_to_live(desk: Desk) -> None:
    waiting, pulling = a_decode_request("w", lease_id="W"), a_decode_request("p", lease_id="P")
    for request in (waiting, pulling):
        desk.consumer.add_request(request)
    desk.consumer.start_pull(pulling, BLOCKS, 69)
    desk.clock.advance(TTL_S / 3 - 0.001)
    desk.consumer.take_orders()
    assert desk.client.take_renewed() == []
    for _ in range(3):
        desk.clock.advance(TTL_S / 3)
        desk.consumer.take_orders()
        assert sorted(desk.client.take_renewed()) == ["P", "W"]
        desk.consumer.take_orders()
        assert desk.client.take_renewed() == []


def test_one_renewal_goes_to_each_engine_however_many_leases_it_has(desk: Desk) -> None:
    for request_id, engine, port in (("1", "e1", 1), ("2", "e1", 1), ("3", "e2", 2)):
        request = a_decode_request(
            request_id, lease_id=f"L{request_id}", remote_engine_id=engine, remote_port=port, lease_ttl_s=3.0
        )
        desk.consumer.add_request(request)
    desk.clock.advance(1.0)
    desk.consumer.take_orders()
    assert desk.client.sent == [
        ("10.0.0.5", 1, Renew("e1", ("L1", "L2"))),
        ("10.0.0.5", 2, Renew("e2", ("L3",))),
    ]


def test_params_that_cannot_be_used_are_refused_when_blocks_are_allocated(desk: Desk) -> None:
    request = a_decode_request("r")
    request.prompt_token_ids = a_prompt(71)
    desk.consumer.add_request(request)
    assert desk.consumer.missing_tokens(request, 0) == 70
    desk.consumer.start_pull(request, BLOCKS, 70)
    pulls, (refusal,) = desk.consumer.take_orders()
    assert pulls == ()
    assert refusal.request_id == "r"
    assert "70 prompt tokens and this request has 71" in refusal.reason
    desk.consumer.settle("r")
    assert desk.client.sent == []


@pytest.mark.parametrize("way", ["leaves", "is computed here"])
def test_a_refused_request_has_no_lease_to_let_go_of(desk: Desk, way: str) -> None:
    request = FakeRequest("r", a_prompt(70), {"do_remote_prefill": True})
    desk.consumer.add_request(request)
    if way == "leaves":
        desk.consumer.finish_request("r")
    else:
        desk.consumer.start_pull(request, BLOCKS, 0)
    desk.clock.advance(TTL_S)
    assert desk.pulls() == ()
    assert desk.client.sent == []


def test_params_of_another_lora_adapter_are_refused(desk: Desk) -> None:
    request = a_decode_request("r")
    request.lora_request = type("Lora", (), {"lora_name": "german"})()
    desk.consumer.add_request(request)
    desk.consumer.start_pull(request, BLOCKS, 69)
    _, (refusal,) = desk.consumer.take_orders()
    assert "cannot be used for another" in refusal.reason


def test_a_request_without_params_of_a_prefill_is_not_touched(desk: Desk) -> None:
    request = FakeRequest("r", a_prompt(70))
    assert desk.consumer.missing_tokens(request, 0) == 0
    desk.consumer.start_pull(request, BLOCKS, 0)
    desk.consumer.settle("r")
    desk.consumer.finish_request("r")
    assert desk.pulls() == ()
    assert desk.client.sent == []


@pytest.mark.parametrize("state", ["waiting", "pulling"])
@pytest.mark.parametrize("second", ["good", "refused"])
def test_an_id_that_comes_twice_keeps_its_first_params(
    desk: Desk, state: str, second: str, caplog: pytest.LogCaptureFixture
) -> None:
    first = a_decode_request("r", lease_id="first")
    desk.consumer.add_request(first)
    if state == "pulling":
        desk.consumer.start_pull(first, BLOCKS, 69)
    with caplog.at_level(logging.ERROR):
        desk.consumer.add_request(a_decode_request("r", 71 if second == "refused" else 70, lease_id="second"))
    assert "request r came twice" in caplog.text
    desk.clock.advance(TTL_S / 3)
    desk.consumer.take_orders()
    assert desk.client.take_renewed() == ["first"]


def test_an_id_may_come_again_after_the_first_has_gone(desk: Desk) -> None:
    first, second = a_decode_request("r", lease_id="first"), a_decode_request("r", lease_id="second")
    desk.consumer.add_request(first)
    desk.consumer.finish_request("r")
    desk.consumer.add_request(second)
    desk.consumer.start_pull(second, BLOCKS, 69)
    (order,) = desk.pulls()
    assert order.remote.lease_id == "second"
    assert desk.client.cancelled() == ["first"]


def test_an_engine_that_was_not_told_about_a_lease_is_logged(desk: Desk, caplog: pytest.LogCaptureFixture) -> None:
    for name in ("a", "b", "c"):
        desk.consumer.add_request(a_decode_request(name, lease_id=name))
        desk.consumer.finish_request(name)
    unanswered, answered, cancelled = desk.client.futures
    cancelled.cancel()
    answered.set_result(Renewed((), 1.0))
    assert not caplog.records
    unanswered.set_exception(
        PeerUnreachable(host="10.0.0.5", port=8998, request_type="cancel", tried_s=10.0, attempts=0)
    )
    (record,) = caplog.records
    assert "which will expire: 10.0.0.5:8998 did not answer 'cancel'" in record.getMessage()


def test_every_pull_has_an_id_of_its_own(desk: Desk) -> None:
    for request_id in ("a", "b"):
        request = a_decode_request(request_id, lease_id=request_id)
        desk.consumer.add_request(request)
        desk.consumer.start_pull(request, BLOCKS, 69)
    first, second = desk.pulls()
    assert first.pull_id
    assert first.pull_id != second.pull_id


# Requests that share a lease, as the n choices of one client request do


@pytest.fixture
def shared(desk: Desk) -> tuple[FakeRequest, FakeRequest]:
    """A request and one that follows it, both waiting."""
    first, second = (a_decode_request(request_id, lease_id="L") for request_id in ("first", "second"))
    desk.consumer.add_request(first)
    desk.consumer.add_request(second)
    return first, second


def test_a_request_whose_lease_is_in_use_waits_until_that_pull_has_settled(
    desk: Desk, shared: tuple[FakeRequest, FakeRequest]
) -> None:
    first, second = shared
    assert desk.consumer.missing_tokens(second, 0) is None
    assert desk.consumer.missing_tokens(first, 0) == 69
    desk.consumer.start_pull(first, BLOCKS, 69)
    assert desk.consumer.missing_tokens(second, 0) is None
    assert [order.request_id for order in desk.pulls()] == ["first"]
    desk.consumer.settle("first")
    assert desk.consumer.missing_tokens(second, 64) == 0
    desk.consumer.start_pull(second, BLOCKS, 0)
    assert desk.pulls() == ()
    assert desk.client.sent == []


@pytest.mark.parametrize("way", ["leaves", "nothing is missing"])
def test_a_follower_is_computed_here_when_the_first_lets_go_of_the_lease(
    desk: Desk, shared: tuple[FakeRequest, FakeRequest], way: str
) -> None:
    first, second = shared
    if way == "leaves":
        desk.consumer.finish_request("first")
    else:
        desk.consumer.start_pull(first, BLOCKS, 0)
    assert desk.client.cancelled() == ["L"]
    assert desk.consumer.missing_tokens(second, 0) == 0
    desk.consumer.start_pull(second, BLOCKS, 0)
    assert desk.client.cancelled() == ["L"]


def test_a_follower_that_leaves_does_not_end_the_lease_of_the_first(
    desk: Desk, shared: tuple[FakeRequest, FakeRequest]
) -> None:
    desk.consumer.finish_request("second")
    assert desk.client.sent == []
    desk.clock.advance(TTL_S / 3)
    desk.consumer.take_orders()
    assert desk.client.take_renewed() == ["L"]
    assert desk.consumer.missing_tokens(shared[0], 0) == 69


class ConsumerLife(RuleBasedStateMachine):
    """Requests that come, are allocated, settle and leave in any order, against sets of lease ids."""

    waiting = Bundle("waiting")
    pulling = Bundle("pulling")

    def __init__(self) -> None:
        super().__init__()
        self.clock, self.client = ManualClock(), RecordingClient()
        self.consumer = Consumer(self.client, 10.0, self.clock)
        self.numbers = itertools.count()
        self.renewed_at: dict[str, float] = {}  # of every lease that must be kept alive, by request id
        self.cancelled: list[str] = []
        self.ordered: list[str] = []
        self.refused: list[str] = []

    @rule(target=waiting, good=st.booleans(), tokens=st.integers(1, 100))
    def arrive(self, good: bool, tokens: int) -> FakeRequest:
        request_id = f"r{next(self.numbers)}"
        request = a_decode_request(request_id, tokens, lease_id=request_id)
        if good:
            self.renewed_at[request_id] = self.clock.now
        else:
            assert request.kv_transfer_params is not None
            del request.kv_transfer_params["lease_id"]
        self.consumer.add_request(request)
        return request

    @rule(target=pulling, request=consumes(waiting), computed=st.integers(0, 6))
    def allocate(self, request: FakeRequest, computed: int) -> FakeRequest:
        missing = self.consumer.missing_tokens(request, 16 * computed)
        assert missing == max(0, request.num_prompt_tokens - 1 - 16 * computed)
        self.consumer.start_pull(request, BLOCKS, missing)
        if missing:
            (self.ordered if request.request_id in self.renewed_at else self.refused).append(request.request_id)
        else:
            self.lets_go(request)
        return request

    @rule(request=consumes(pulling))
    def settle(self, request: FakeRequest) -> None:
        self.consumer.settle(request.request_id)
        self.renewed_at.pop(request.request_id, None)

    @rule(request=consumes(waiting))
    def leave_early(self, request: FakeRequest) -> None:
        self.consumer.finish_request(request.request_id)
        self.lets_go(request)

    @rule(request=pulling)
    def leave_while_pulling(self, request: FakeRequest) -> None:
        self.consumer.finish_request(request.request_id)

    @rule(thirds=st.sampled_from([0.0, 0.25, 0.5, 1.0, 1.5]))
    def step(self, thirds: float) -> None:
        self.clock.advance(thirds * 10.0)
        pulls, refusals = self.consumer.take_orders()
        assert [order.request_id for order in pulls] == self.ordered
        assert [order.request_id for order in refusals] == self.refused
        assert all(isinstance(order.remote, RemotePrefill) for order in pulls)
        self.ordered, self.refused = [], []
        due = [lease for lease, at in self.renewed_at.items() if self.clock.now >= at + TTL_S / 3]
        assert sorted(self.client.take_renewed()) == sorted(due)
        self.renewed_at |= dict.fromkeys(due, self.clock.now)

    def lets_go(self, request: FakeRequest) -> None:
        if self.renewed_at.pop(request.request_id, None) is not None:
            self.cancelled.append(request.request_id)

    @invariant()
    def books_balance(self) -> None:
        self.consumer.check_integrity()
        assert self.client.cancelled() == self.cancelled


TestConsumerLife = ConsumerLife.TestCase
TestConsumerLife.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)


class TestRequestsThatShareALease:
    """As the ``n`` requests do that vLLM makes of one request for ``n`` choices."""

    def share(self, desk: Desk) -> tuple[FakeRequest, FakeRequest]:
        leader, follower = (a_decode_request(name, lease_id="L") for name in ("leader", "follower"))
        desk.consumer.add_request(leader)
        desk.consumer.add_request(follower)
        return leader, follower

    def test_the_second_waits_until_the_first_has_pulled_and_pulls_nothing(self, desk: Desk) -> None:
        leader, follower = self.share(desk)
        assert desk.consumer.missing_tokens(follower, 0) is None
        desk.consumer.start_pull(leader, BLOCKS, 69)
        assert len(desk.pulls()) == 1
        assert desk.consumer.missing_tokens(follower, 0) is None
        desk.consumer.settle("leader")
        assert desk.consumer.missing_tokens(follower, 64) == 0
        desk.consumer.start_pull(follower, BLOCKS, 0)
        assert desk.pulls() == ()
        assert desk.client.cancelled() == []

    def test_the_second_is_computed_when_the_first_leaves_before_its_pull(self, desk: Desk) -> None:
        _, follower = self.share(desk)
        desk.consumer.finish_request("leader")
        assert desk.consumer.missing_tokens(follower, 0) == 0
        assert desk.client.cancelled() == ["L"]

    def test_the_second_may_leave_first(self, desk: Desk) -> None:
        leader, _ = self.share(desk)
        desk.consumer.finish_request("follower")
        assert desk.client.cancelled() == []
        assert desk.consumer.missing_tokens(leader, 0) == 69

    def test_only_the_first_renews(self, desk: Desk) -> None:
        self.share(desk)
        desk.clock.advance(TTL_S / 3)
        desk.pulls()
        assert desk.client.take_renewed() == ["L"]
