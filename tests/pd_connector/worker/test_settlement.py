"""What a prefill engine's answer to a release makes of a pull: good in one case, failed for a reason in all others."""

import time
from collections.abc import Callable
from concurrent.futures import Future

import pytest

from pd_connector.metadata import Cause, PullOrder
from pd_connector.params import contents_digest
from pd_connector.worker.settlement import Settled, Settlement, Stopwatch, verdict
from tests.pd_connector.support import RecordingClient, a_prompt, a_remote
from transfer.control.errors import ClientClosed
from transfer.control.messages import Cancelled, InvalidReason, Release, Released, Reply

REMOTE = a_remote(a_prompt(70))
ORDER = PullOrder("r", REMOTE, ((1, 2, 3, 4, 5),), 0, 69, "pull")


def answered(reply: Reply) -> "Future[Reply]":
    answer: Future[Reply] = Future()
    answer.set_result(reply)
    return answer


def test_a_pull_is_good_only_if_its_release_was_valid() -> None:
    assert verdict(ORDER, answered(Released(True))) == ("", "")


@pytest.mark.parametrize("reason", [*InvalidReason, "what a later version says"])
def test_a_release_that_was_not_valid_says_which_lease_and_why(reason: str) -> None:
    cause, words = verdict(ORDER, answered(Released(False, reason)))
    assert cause == "lease"
    assert words.startswith(f"lease {REMOTE.lease_id} ")
    assert len({verdict(ORDER, answered(Released(False, other)))[1] for other in [*InvalidReason, "later"]}) == 7
    assert isinstance(reason, InvalidReason) or reason in words


def given_up(answer: "Future[Reply]") -> None:
    answer.cancel()


def closed(answer: "Future[Reply]") -> None:
    answer.set_exception(ClientClosed("the control client was closed"))


def misunderstood(answer: "Future[Reply]") -> None:
    answer.set_result(Cancelled())


@pytest.mark.parametrize("end", [given_up, closed, misunderstood])
def test_without_an_answer_the_pull_is_unconfirmed(end: Callable[["Future[Reply]"], None]) -> None:
    answer: Future[Reply] = Future()
    end(answer)
    cause, words = verdict(ORDER, answer)
    assert cause == "unconfirmed"
    assert words


class Desk:
    """A settlement of reader 1 of 2, what it sent and what it settled."""

    def __init__(self) -> None:
        self.client = RecordingClient()
        self.ends: list[Settled] = []
        self.settlement = Settlement(self.client, 1, 2, 10.0, self.ends.append)
        self.watch = Stopwatch(time.monotonic())


def test_a_pull_is_settled_by_the_answer_and_not_before() -> None:
    desk = Desk()
    desk.settlement.confirm(ORDER, Settled("r", tokens=69), 5.0, desk.watch)
    assert desk.client.sent == [
        ("10.0.0.5", 8998, Release("engine-p", "lease-1", 1, 2, "pull", contents_digest(REMOTE)))
    ]
    assert desk.ends == []
    desk.client.futures[0].set_result(Released(True))
    (end,) = desk.ends
    assert (end.cause, end.tokens) == ("", 69)
    assert end.seconds.keys() == {"release", "total"}


def test_a_pull_whose_lease_had_ended_is_settled_as_failed() -> None:
    desk = Desk()
    desk.settlement.confirm(ORDER, Settled("r", tokens=69), 5.0, desk.watch)
    desk.client.futures[0].set_result(Released(False, "expired"))
    (end,) = desk.ends
    assert (end.cause, end.tokens) == ("lease", 0)
    assert end.reason.startswith("pull from engine engine-p at 10.0.0.5:8998 failed: lease lease-1 had expired")


@pytest.mark.parametrize("tell", [True, False])
def test_a_failed_pull_is_settled_at_once_and_the_engine_told_if_it_can_be(tell: bool) -> None:
    desk = Desk()
    desk.settlement.fail(ORDER, Cause.UNREACHABLE, "because", desk.watch, tell=tell)
    assert [end.cause for end in desk.ends] == ["unreachable"]
    assert len(desk.client.sent) == tell
