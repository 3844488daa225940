"""How a pull ends, once its reads have: confirmed by the prefill engine, or failed. What it reads is in test_peer."""

import threading
from typing import Any

import pytest

from pd_connector.orders import Cause, PullOrder
from pd_connector.params import contents_digest
from pd_connector.worker.peer import PullContext
from pd_connector.worker.pull import AnyEnd, Pull
from pd_connector.worker.pull_end import PullEnd, PullFailed
from tests.support.connector.requests import RecordingClient, a_prompt, a_remote
from tests.support.waiting import ManualClock
from transfer.control.messages import Release, Released

REMOTE = a_remote(a_prompt(70))
ORDER = PullOrder("r", REMOTE, ((1, 2, 3, 4, 5),), 0, 69, "pull")


class Reader:
    """A pull of reader 1 of 2, whose reads have ended; what it sent and how it ended."""

    def __init__(self) -> None:
        nothing: Any = None
        self.clock, self.client, self.ends = ManualClock(), RecordingClient(), list[AnyEnd]()
        context = PullContext(
            local=nothing,
            model=nothing,
            engine=nothing,
            client=self.client,
            allowed=nothing,
            reader=1,
            readers=2,
            reads=nothing,
            handshake_timeout_s=10.0,
            pull_timeout_s=60.0,
            clock=self.clock,
        )
        self.pull = Pull(context, ORDER, self.ends.append, threading.Event())


def test_a_pull_ends_with_the_answer_and_not_before() -> None:
    reader = Reader()
    reader.pull.confirm(())
    assert reader.client.sent == [
        ("10.0.0.5", 8998, Release("engine-p", "lease-1", 1, 2, "pull", contents_digest(REMOTE)))
    ]
    assert reader.ends == []
    reader.clock.advance(0.25)
    reader.client.futures[0].set_result(Released(True))
    (end,) = reader.ends
    assert isinstance(end, PullEnd)
    assert (end.cause, end.tokens) == ("", 69)
    assert end.seconds == {"release": 0.25, "total": 0.25}


def test_what_was_read_is_confirmed_though_the_time_is_out() -> None:
    reader = Reader()
    reader.clock.advance(60.0)
    reader.pull.confirm(())
    assert reader.client.timeouts == [1.0]


def test_a_pull_whose_lease_had_ended_has_failed() -> None:
    reader = Reader()
    reader.pull.confirm(())
    reader.client.futures[0].set_result(Released(False, "expired"))
    (end,) = reader.ends
    assert isinstance(end, PullEnd)
    assert (end.cause, end.tokens) == ("lease", 0)
    assert end.reason.startswith("pull from engine engine-p at 10.0.0.5:8998 failed: lease lease-1 had expired")


@pytest.mark.parametrize("is_unresponsive", [True, False])
def test_a_failed_pull_ends_at_once_and_the_engine_is_told_if_it_can_be(is_unresponsive: bool) -> None:
    reader = Reader()
    reader.pull.fail(PullFailed(Cause.UNREACHABLE, "because", is_unresponsive=is_unresponsive))
    assert [end.cause for end in reader.ends if isinstance(end, PullEnd)] == ["unreachable"]
    assert len(reader.client.sent) == (not is_unresponsive)
