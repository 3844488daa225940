"""Leases are renewed in time by a thread, whatever the scheduler does. When they are due: ``test_consumer``."""

import logging
import math
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import pytest
from msgspec import structs

from pd_connector.scheduler.decode.renewals import Renewals
from tests.support.connector.requests import RecordingClient, a_prompt, a_remote
from tests.support.waiting import ManualClock, until
from transfer.control.failures import ClientClosed, PeerRefused, PeerUnreachable
from transfer.control.messages import ErrorCode, Renew, Renewed, Reply, decode_request, encode
from transfer.errors import TransferError

PROMPT = a_prompt(70)
QUEUE_TIMEOUT_S = 120.0


@pytest.fixture
def client() -> RecordingClient:
    return RecordingClient()


@pytest.fixture
def renewals(client: RecordingClient) -> Iterator[Renewals]:
    before = set(threading.enumerate())
    renewals = Renewals(client, 5.0, 120.0)
    renewals.start()
    yield renewals
    renewals.close()
    assert set(threading.enumerate()) <= before


def test_a_lease_is_renewed_again_and_again_though_no_step_is_made(client: RecordingClient, renewals: Renewals) -> None:
    renewals.keep("r", a_remote(PROMPT, lease_id="L", lease_ttl_s=0.06))
    until(lambda: len(client.sent) >= 3)
    renewals.drop("r")
    renewals.drop("r")
    assert renewals.request_ids == frozenset()
    assert set(client.take_renewed()) == {"L"}


def test_a_lease_that_is_due_sooner_is_not_kept_waiting(client: RecordingClient, renewals: Renewals) -> None:
    renewals.keep("late", a_remote(PROMPT, lease_id="late", lease_ttl_s=1000.0, remote_port=77))
    renewals.keep("soon", a_remote(PROMPT, lease_id="soon", lease_ttl_s=0.06))
    until(lambda: bool(client.sent))
    renewals.drop("soon")
    assert set(client.take_renewed()) == {"soon"}


def test_a_lease_that_is_due_later_does_not_wake_the_thread(
    renewals: Renewals, monkeypatch: pytest.MonkeyPatch
) -> None:
    renewals.keep("first", a_remote(PROMPT, lease_id="first", lease_ttl_s=30.0))
    until(lambda: renewals._wakes_at < math.inf)
    monkeypatch.setattr(renewals._changed, "notify", lambda: pytest.fail("the thread was woken"))
    renewals.keep("second", a_remote(PROMPT, lease_id="second", lease_ttl_s=30.0))
    monkeypatch.undo()


def test_many_leases_of_one_engine_are_renewed_in_several_messages(client: RecordingClient) -> None:
    clock = ManualClock()
    renewals = Renewals(client, 5.0, 120.0, clock)
    remote = a_remote(PROMPT)
    for number in range(20_000):
        renewals.keep(str(number), structs.replace(remote, lease_id=f"{number:032}"))
        renewals.start_reading(str(number))
    clock.advance(remote.lease_ttl_s / 3)
    renewals.send_due()
    sent = client.take_renewals()
    assert len(sent) == 2
    for renew in sent:
        assert set(renew.reading) == set(renew.lease_ids)
        assert decode_request(encode(1, renew)) == (1, renew)  # within all limits
    assert len({lease_id for renew in sent for lease_id in renew.lease_ids}) == 20_000


# What is being pulled


def test_a_pull_is_announced_soon_and_with_every_renewal(under_test: "RenewalsUnderTest") -> None:
    under_test.keep("pulled")
    under_test.keep("waits")
    under_test.renewals.start_reading("pulled")
    under_test.renewals.send_due()
    assert under_test.client.take_renewals() == []
    under_test.clock.advance(0.1)
    under_test.renewals.send_due()
    assert under_test.client.take_renewals() == [Renew("engine-p", ("pulled",), ("pulled",))]
    under_test.renew()
    assert under_test.client.take_renewals() == [Renew("engine-p", ("waits", "pulled"), ("pulled",))]


def test_a_later_pull_does_not_put_off_the_announcement_of_an_earlier_one(under_test: "RenewalsUnderTest") -> None:
    for name in ("first", "second"):
        under_test.keep(name)
        under_test.renewals.start_reading(name)
        under_test.clock.advance(0.03)
    under_test.renewals.send_due()
    assert under_test.client.take_renewals() == [Renew("engine-p", ("first", "second"), ("first", "second"))]


def test_a_pull_that_ends_soon_is_not_announced(under_test: "RenewalsUnderTest") -> None:
    under_test.keep("pulled")
    under_test.keep("waits")
    under_test.renewals.start_reading("pulled")
    under_test.renewals.drop("pulled")
    under_test.clock.advance(0.1)
    under_test.renewals.send_due()
    assert under_test.client.take_renewals() == []


# What waits for too long


def test_the_lease_of_a_request_that_waits_for_blocks_too_long_is_given_up(under_test: "RenewalsUnderTest") -> None:
    under_test.keep("waits")
    under_test.keep("pulled")
    under_test.renewals.start_reading("pulled")
    under_test.clock.advance(QUEUE_TIMEOUT_S)
    under_test.keep("later")
    under_test.renewals.send_due()
    lost = under_test.renewals.lost("waits")
    assert lost is not None
    assert lost.cause == "queue"
    assert "the request waited 120 s for blocks of this engine (queue_timeout_s)" in lost.reason
    assert under_test.client.cancelled() == ["waits"]
    assert under_test.client.take_renewed() == ["later", "pulled"]
    assert under_test.renewals.lost("pulled") is None


def test_nothing_is_renewed_only_because_something_is_given_up(under_test: "RenewalsUnderTest") -> None:
    for number in range(100):
        under_test.keep(str(number))
        under_test.clock.advance(0.1)
    under_test.clock.advance(QUEUE_TIMEOUT_S - 10.0)
    under_test.renewals.send_due()
    under_test.client.take_renewals()
    for _ in range(50):
        under_test.clock.advance(0.1)
        under_test.renewals.send_due()
    assert 49 <= len(under_test.client.cancelled()) <= 51
    assert under_test.client.take_renewals() == []


def test_a_lease_with_a_short_time_to_live_sets_no_pace_for_others(under_test: "RenewalsUnderTest") -> None:
    under_test.keep("patient")
    under_test.keep("hasty", lease_ttl_s=0.3)
    for _ in range(50):
        under_test.clock.advance(0.1)
        under_test.renewals.send_due()
    assert set(under_test.client.take_renewed()) == {"hasty"}


def test_a_lease_is_given_up_in_time_though_no_renewal_is_due(client: RecordingClient) -> None:
    clock = ManualClock()
    renewals = Renewals(client, 5.0, 2.0, clock)
    renewals.keep("waits", a_remote(PROMPT, lease_id="waits", lease_ttl_s=1000.0))
    clock.advance(2.0)
    renewals.send_due()
    assert client.cancelled() == ["waits"]
    assert client.take_renewed() == []
    renewals.check_integrity()


def test_an_idle_thread_ends_at_once(client: RecordingClient) -> None:
    renewals = Renewals(client, 5.0, 120.0)
    renewals.start()
    renewals.close()
    assert client.sent == []


# What prefill engines answer

TTL_S = 30.0


@dataclass
class RenewalsUnderTest:
    """Renewals without their thread, and the answers to what they asked."""

    clock: ManualClock
    client: RecordingClient
    renewals: Renewals

    def keep(self, request_id: str, **changes: Any) -> None:
        self.renewals.keep(request_id, a_remote(PROMPT, **{"lease_id": request_id, **changes}))

    def renew(self) -> "Future[Reply]":
        """Renew what is due; the answer of the engine that was asked last."""
        self.clock.advance(TTL_S / 3)
        self.renewals.send_due()
        self.renewals.check_integrity()
        return self.client.futures[-1]


@pytest.fixture
def under_test() -> Iterator[RenewalsUnderTest]:
    clock, client = ManualClock(), RecordingClient()
    under_test = RenewalsUnderTest(clock, client, Renewals(client, 5.0, QUEUE_TIMEOUT_S, clock))
    yield under_test
    under_test.renewals.check_integrity()


def test_a_lease_that_the_engine_does_not_confirm_is_lost(under_test: RenewalsUnderTest) -> None:
    under_test.keep("gone")
    under_test.keep("valid")
    under_test.renew().set_result(Renewed(("valid",)))
    lost = under_test.renewals.lost("gone")
    assert lost is not None
    assert lost.cause == "lease"
    assert "lease gone of engine engine-p at 10.0.0.5:8998 has ended" in lost.reason
    assert under_test.renewals.lost("valid") is None
    assert under_test.renewals.lost("never kept") is None


def test_an_engine_that_does_not_answer_is_not_asked_again_before_the_message_has_timed_out(
    under_test: RenewalsUnderTest,
) -> None:
    """A client may state a time to live of a tenth of a second."""
    under_test.keep("hasty", lease_ttl_s=0.1)

    def renewed(within_s: float) -> int:
        for _ in range(round(within_s / 0.04)):
            under_test.clock.advance(0.04)
            under_test.renewals.send_due()
        return len(under_test.client.take_renewed())

    assert renewed(4.0) == 1
    under_test.client.futures[-1].set_result(Renewed(("hasty",)))
    assert renewed(4.0) == 1, "at once, and not again"
    assert renewed(4.0) == 1, "after the timeout of 5 s"
    for _ in range(3):
        under_test.client.futures[-1].set_result(Renewed(("hasty",)))
        assert renewed(0.04) == 1, "as often as it wants, if it answers"


def test_a_lost_lease_is_not_renewed_any_more(under_test: RenewalsUnderTest) -> None:
    under_test.keep("gone")
    under_test.keep("valid")
    under_test.renew().set_result(Renewed(("valid",)))
    under_test.client.take_renewed()
    under_test.renew()
    assert under_test.client.take_renewed() == ["valid"]
    under_test.renewals.drop("gone")
    assert under_test.renewals.lost("gone") is None


def test_all_leases_of_an_engine_that_has_restarted_are_lost(under_test: RenewalsUnderTest) -> None:
    under_test.keep("a")
    under_test.keep("elsewhere", remote_port=77)
    refused = PeerRefused(
        host="10.0.0.5", port=8998, request_type="renew", code=ErrorCode.UNKNOWN_ENGINE, reason="this is engine q"
    )
    under_test.renew()
    under_test.client.futures[0].set_exception(refused)
    lost = under_test.renewals.lost("a")
    assert lost is not None
    assert lost.cause == "refused"
    assert "this is engine q" in lost.reason
    assert under_test.renewals.lost("elsewhere") is None


def test_an_answer_says_nothing_about_leases_that_were_not_asked_for(under_test: RenewalsUnderTest) -> None:
    under_test.keep("asked")
    answer = under_test.renew()
    under_test.keep("later")
    under_test.keep("same id elsewhere", lease_id="asked", remote_host="10.0.0.6")
    answer.set_result(Renewed(()))
    assert under_test.renewals.lost("asked") is not None
    assert under_test.renewals.lost("later") is None
    assert under_test.renewals.lost("same id elsewhere") is None


def test_an_answer_that_comes_late_or_never_changes_nothing(
    under_test: RenewalsUnderTest, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("pd_connector"), "propagate", True)
    under_test.keep("dropped")
    under_test.keep("kept")
    first = under_test.renew()
    under_test.renewals.drop("dropped")
    second = under_test.renew()
    second.cancel()
    unreachable = PeerUnreachable(host="10.0.0.5", port=8998, request_type="renew", tried_s=5.0, attempts=3)
    under_test.renew().set_exception(unreachable)
    first.set_result(Renewed(("kept",)))
    assert under_test.renewals.request_ids == {"kept"}
    assert under_test.renewals.lost("kept") is None
    assert "a renewal of 1 leases was not answered; they expire unless one of the next is" in caplog.text
    assert "will expire" not in caplog.text, "the next renewal is in time"


ANOTHER = PeerRefused(host="P", port=1, request_type="cancel", code=ErrorCode.UNKNOWN_ENGINE, reason="this is q")
SILENT = PeerUnreachable(host="P", port=1, request_type="cancel", tried_s=5.0, attempts=3)


@pytest.mark.parametrize(
    ("error", "told"),
    [(ClientClosed("closed"), 0), (ANOTHER, 0), (SILENT, 1)],
    ids=["this engine ends", "that one has ended", "it does not answer"],
)
def test_that_an_engine_was_not_told_is_no_warning_where_a_restart_is_the_reason(
    client: RecordingClient, renewals: Renewals, caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch, error: TransferError, told: int,
) -> None:  # fmt: skip
    monkeypatch.setattr(logging.getLogger("pd_connector"), "propagate", True)
    renewals.cancel(a_remote(PROMPT))
    client.futures[-1].set_exception(error)
    assert caplog.text.count("an engine was not told about a lease, which will expire") == told


def test_that_this_engine_ends_is_no_warning_of_a_renewal(
    under_test: RenewalsUnderTest, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("pd_connector"), "propagate", True)
    under_test.keep("kept")
    under_test.renew().set_exception(ClientClosed("closed"))
    assert caplog.records == []


def test_requests_with_the_same_lease_id_do_not_disturb_each_other(renewals: Renewals) -> None:
    """A prefill engine that errs may say it, and one that is not ours anything."""
    for request_id in ("a", "b"):
        renewals.keep(request_id, a_remote(PROMPT, lease_id="same"))
    renewals.check_integrity()
    renewals.start_reading("a")
    renewals.drop("a")
    renewals.check_integrity()
    renewals.start_reading("b")
    assert renewals.request_ids == {"b"}
