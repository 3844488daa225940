"""Following named prompts: what is asked, what answers of all kinds mean, and that nothing waits for ever."""

import logging
import re
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import msgspec
import pytest

from pd_connector.params import RemoteTransfer
from pd_connector.progress import Progress
from pd_connector.scheduler.decode.legs import Refused
from pd_connector.scheduler.decode.renewals import Renewals
from pd_connector.scheduler.decode.subscriptions import FollowLimits, Subscriptions
from pd_connector.vllm.engine_core import EngineLoop
from tests.support.connector.consumers import MESSAGE_TIMEOUT_S, QUEUE_TIMEOUT_S, consumer_parts
from tests.support.connector.followed_answers import QUEUED, UNKNOWN, blocks_of, complete, computing, ended
from tests.support.connector.requests import RecordingClient
from tests.support.waiting import ManualClock
from transfer.control.failures import AuthenticationFailed, BadRequest, PeerRefused, PeerUnreachable
from transfer.control.messages import Cancel, ErrorCode, Follow, Followed
from transfer.errors import PeerNotAllowed, TransferError

TRANSFER = RemoteTransfer("T", "10.0.0.5", 8998)
REQUEUED = msgspec.structs.replace(QUEUED, attempt=1)


@dataclass
class Following:
    subscriptions: Subscriptions
    renewals: Renewals
    client: RecordingClient
    clock: ManualClock

    def questions(self) -> list[Follow]:
        """All that were asked so far."""
        return [message for _, _, message in self.client.sent if isinstance(message, Follow)]

    def cancels(self) -> list[Cancel]:
        return [message for _, _, message in self.client.sent if isinstance(message, Cancel)]

    def open(self) -> list[int]:
        """The questions that have no answer yet, as numbers of messages."""
        kinds = [isinstance(message, Follow) for _, _, message in self.client.sent]
        return [number for number, is_question in enumerate(kinds) if is_question and self.is_open(number)]

    def is_open(self, number: int) -> bool:
        return not self.client.futures[number].done()

    def answer(self, *answers: Followed | TransferError, after_s: float = 5.0) -> None:
        """Answer one question after the other, each when the prefill engine has kept it for a while."""
        for answer in answers:
            self.clock.advance(after_s)
            (number,) = self.open()
            if isinstance(answer, TransferError):
                self.client.futures[number].set_exception(answer)
            else:
                self.client.futures[number].set_result(answer)
            self.subscriptions.check_integrity()

    def progress(self) -> Progress:
        found = self.subscriptions.look("r")
        assert isinstance(found, Progress)
        return found

    def failure(self) -> Refused:
        found = self.subscriptions.look("r")
        assert isinstance(found, Refused)
        return found


@pytest.fixture
def following() -> Iterator[Following]:
    """One request's prompt is followed."""
    clock, client = ManualClock(), RecordingClient()
    parts = consumer_parts(client, clock)
    under_test = Following(parts.subscriptions, parts.renewals, client, clock)
    under_test.subscriptions.follow("r", TRANSFER)
    yield under_test
    under_test.subscriptions.check_integrity()


def test_the_first_question_says_that_nothing_is_known(following: Following) -> None:
    assert [(host, port) for host, port, _ in following.client.sent] == [("10.0.0.5", 8998)]
    (question,) = following.questions()
    assert question == Follow("", "T", -1, 0, "unknown", question.wait_s)
    assert following.client.timeouts == [question.wait_s + MESSAGE_TIMEOUT_S]
    assert following.subscriptions.look("r") is None


def test_an_engine_that_the_router_has_named_is_asked_for(following: Following) -> None:
    following.subscriptions.follow("other", msgspec.structs.replace(TRANSFER, remote_engine_id="engine-p"))
    assert [question.engine_id for question in following.questions()] == ["", "engine-p"]


def test_each_answer_is_followed_by_a_question_with_what_is_known_by_then(following: Following) -> None:
    following.answer(UNKNOWN, QUEUED, computing(16), computing(40, known=16))
    asked = [(each.engine_id, each.attempt, each.tokens, each.state) for each in following.questions()]
    assert asked == [
        ("", -1, 0, "unknown"),
        ("", -1, 0, "unknown"),
        ("engine-p", 0, 0, "queued"),
        ("engine-p", 0, 16, "computing"),
        ("engine-p", 0, 40, "computing"),
    ]
    progress = following.progress()
    assert (progress.tokens, progress.is_complete) == (40, False)
    assert progress.remote.remote_block_ids == (blocks_of(40),)
    assert progress.remote.lease_id == "L"


@pytest.mark.parametrize("answer", [UNKNOWN, QUEUED])
def test_before_the_prompt_is_computed_there_is_nothing_to_see(following: Following, answer: Followed) -> None:
    following.answer(answer)
    assert following.subscriptions.look("r") is None


def test_a_complete_prompt_is_not_asked_about_again_and_its_lease_is_renewed(following: Following) -> None:
    following.answer(computing(16))
    assert following.renewals.request_ids == frozenset()  # until then the prefill engine's request holds the blocks
    following.answer(complete())
    assert following.open() == []
    assert following.progress().is_complete
    assert following.renewals.request_ids == {"r"}
    following.clock.advance(11.0)
    following.renewals.send_due()
    assert following.client.take_renewed() == ["L"]


def test_the_lease_of_a_complete_prompt_stays_renewed_when_it_is_not_followed_any_longer(following: Following) -> None:
    following.answer(complete())
    found = following.subscriptions.take("r")
    assert isinstance(found, Progress)
    assert found.is_complete
    assert following.renewals.request_ids == {"r"}
    assert following.subscriptions.request_ids == frozenset()


def test_a_prompt_that_was_preempted_is_nothing_to_see_until_it_is_computed_again(following: Following) -> None:
    following.answer(computing(48), msgspec.structs.replace(QUEUED, attempt=1))
    assert following.subscriptions.look("r") is None
    assert following.questions()[-1].attempt == 1
    assert following.questions()[-1].tokens == 0
    following.answer(computing(32, attempt=1))
    progress = following.progress()
    assert (progress.tokens, progress.remote.remote_attempt) == (32, 1)
    assert progress.remote.remote_block_ids == (blocks_of(32, first=200),)


def test_a_new_attempt_that_was_not_seen_to_be_queued_counts_from_its_beginning(following: Following) -> None:
    following.answer(computing(48), computing(16, attempt=1))
    assert following.progress().remote.remote_block_ids == (blocks_of(16, first=200),)
    assert following.questions()[-1].tokens == 16


def test_who_ends_between_two_attempts_gets_the_newer_one_of_which_nothing_is_computed(following: Following) -> None:
    """vLLM has been told to allocate blocks; workers follow the new attempt from its beginning."""
    following.answer(computing(48), msgspec.structs.replace(QUEUED, attempt=1))
    found = following.subscriptions.take("r")
    assert isinstance(found, Progress)
    assert (found.remote.remote_attempt, found.remote.remote_block_ids, found.tokens) == (1, ((),), 0)


# What fails


def unreachable() -> TransferError:
    return PeerUnreachable(host="10.0.0.5", port=8998, request_type="follow", tried_s=15.0, attempts=3)


def refused() -> TransferError:
    return PeerRefused(
        host="10.0.0.5", port=8998, request_type="follow", code=ErrorCode.UNKNOWN_ENGINE, reason="engine e is not here"
    )


@pytest.mark.parametrize(
    ("error", "cause", "reason"),
    [
        (unreachable(), "unreachable", "did not answer 'follow'"),
        (refused(), "refused", "engine e is not here"),
        (AuthenticationFailed("another secret"), "denied", "another secret"),
        (PeerNotAllowed("allowed_peers names nothing"), "denied", "allowed_peers"),
        (BadRequest("too long"), "unreachable", "too long"),
    ],
)
@pytest.mark.parametrize("before", [(), (QUEUED,), (computing(16),)])
def test_a_question_that_fails_ends_the_transfer(
    following: Following, before: tuple[Followed, ...], error: TransferError, cause: str, reason: str
) -> None:
    following.answer(*before, error)
    failure = following.failure()
    assert failure.cause == cause
    assert "transfer T at 10.0.0.5:8998 cannot be followed" in failure.reason
    assert reason in failure.reason
    assert following.open() == []


@pytest.mark.parametrize("before", [(), (QUEUED,), (computing(16),)])
def test_a_transfer_that_has_ended_fails_with_the_prefill_engines_reason(
    following: Following, before: tuple[Followed, ...]
) -> None:
    following.answer(*before, ended("its client has left"))
    failure = following.failure()
    assert failure.cause == "transfer"
    assert "says that transfer T at 10.0.0.5:8998 has ended: its client has left" in failure.reason
    assert following.open() == []


def test_a_state_of_a_later_version_is_an_end(following: Following) -> None:
    following.answer(msgspec.structs.replace(UNKNOWN, state="archived"))
    assert "has ended: it is 'archived'" in following.failure().reason


@pytest.mark.parametrize("before", [QUEUED, computing(16)])
def test_a_transfer_that_is_forgotten_fails(following: Following, before: Followed) -> None:
    following.answer(before, UNKNOWN)
    failure = following.failure()
    assert failure.cause == "transfer"
    assert f"no longer knows transfer T at 10.0.0.5:8998, which was {before.state}" in failure.reason


def test_an_answer_that_does_not_fit_fails(following: Following) -> None:
    following.answer(computing(16), computing(64, known=48))
    failure = following.failure()
    assert failure.cause == "transfer"
    assert "announced from block 3 on, and 1 blocks are known" in failure.reason


# Nothing waits for ever


@pytest.mark.parametrize(
    ("answers", "limit_s", "cause", "reason"),
    [
        ([], QUEUE_TIMEOUT_S, "unreachable", "has not answered for 120 s .queue_timeout_s"),
        ([UNKNOWN], QUEUE_TIMEOUT_S - 5, "transfer", "within 120 s .queue_timeout_s.*received no request"),
        ([QUEUED], QUEUE_TIMEOUT_S, "queue", "waited 120 s in the prefill engine's queue .queue_timeout_s"),
        ([UNKNOWN, QUEUED], QUEUE_TIMEOUT_S, "queue", "in the prefill engine's queue"),
        ([computing(16)], QUEUE_TIMEOUT_S, "queue", "not gone on with it for 120 s .queue_timeout_s"),
        ([computing(48), REQUEUED], QUEUE_TIMEOUT_S - 5, "preempted", "attempt 2.*beyond 48 tokens for 120 s"),
        ([computing(48), computing(16, attempt=1)], QUEUE_TIMEOUT_S - 5, "preempted", "beyond 48 tokens"),
    ],
)
def test_what_takes_too_long_is_given_up_and_cancelled(
    following: Following, answers: list[Followed], limit_s: float, cause: str, reason: str
) -> None:
    following.answer(*answers)
    following.clock.advance(limit_s - 0.01)
    assert not isinstance(following.subscriptions.look("r"), Refused)
    following.clock.advance(0.02)
    failure = following.failure()
    assert failure.cause == cause
    assert re.search(reason, failure.reason)
    is_leased = any(answer.lease_id for answer in answers)
    assert following.cancels() == [Cancel("engine-p", ("L",)) if is_leased else Cancel("", (), ("T",))]
    assert following.open() == []
    following.failure()
    assert len(following.cancels()) == 1


def test_progress_of_any_size_postpones_the_end(following: Following) -> None:
    known = 0
    for tokens in (1, 2, 16, 17, 69):
        following.answer(computing(tokens, known=known), after_s=QUEUE_TIMEOUT_S - 1)
        known = tokens
        assert following.progress().tokens == tokens


def test_a_prompt_that_is_started_over_again_and_again_is_given_up(following: Following) -> None:
    for attempt in range(int(QUEUE_TIMEOUT_S / 20)):
        assert not isinstance(following.subscriptions.look("r"), Refused)
        queued = msgspec.structs.replace(QUEUED, attempt=attempt + 1)
        following.answer(computing(48 - 16 * (attempt % 2), attempt=attempt), queued, after_s=10.0)
    following.clock.advance(10.0)
    assert following.failure().cause == "preempted"


def test_a_prompt_that_gets_further_each_time_it_is_started_over_is_waited_for(following: Following) -> None:
    for attempt in range(4):
        queued = msgspec.structs.replace(QUEUED, attempt=attempt + 1)
        following.answer(computing(16 * (attempt + 1), attempt=attempt), queued, after_s=QUEUE_TIMEOUT_S / 2 - 1)
    assert following.subscriptions.look("r") is None


def test_an_answer_that_says_nothing_new_postpones_nothing(following: Following) -> None:
    following.answer(QUEUED, *[QUEUED] * 23)
    following.clock.advance(5.0)
    assert following.failure().cause == "queue"


def test_a_complete_prompt_is_not_given_up_here_but_by_the_renewals(following: Following) -> None:
    following.answer(complete())
    following.clock.advance(QUEUE_TIMEOUT_S + 1)
    assert following.progress().is_complete
    following.renewals.send_due()
    lost = following.renewals.lost("r")
    assert lost is not None
    assert lost.cause == "queue"


# Who leaves, and when


def test_a_transfer_that_nobody_wants_is_cancelled_by_its_name(following: Following) -> None:
    following.answer(QUEUED)
    following.subscriptions.abandon("r")
    assert following.cancels() == [Cancel("", (), ("T",))]
    assert following.open() == []
    assert following.subscriptions.request_ids == frozenset()


@pytest.mark.parametrize("answer", [computing(16), complete()])
def test_a_prompt_that_nobody_wants_is_cancelled_by_its_lease(following: Following, answer: Followed) -> None:
    following.answer(answer)
    following.subscriptions.abandon("r")
    assert following.cancels() == [Cancel("engine-p", ("L",))]
    assert following.open() == []
    assert following.renewals.request_ids == frozenset()


def test_a_transfer_that_has_failed_is_not_cancelled(following: Following) -> None:
    following.answer(ended())
    following.subscriptions.abandon("r")
    assert following.cancels() == []


def test_an_answer_that_comes_after_the_end_changes_nothing(following: Following) -> None:
    """The client's thread may be in the middle of it."""
    future = following.client.futures[0]
    following.subscriptions.abandon("r")
    assert future.cancelled()
    old = following_of(following)
    old.asked = answered(complete())
    following.subscriptions._take_answer(old, old.asked)
    assert following.renewals.request_ids == frozenset()
    assert following.open() == []


def following_of(following: Following) -> Any:
    """A subscription that is no longer followed, though its request may be followed by another one."""
    following.subscriptions.follow("r", TRANSFER)
    old = following.subscriptions._followed["r"]
    following.subscriptions.abandon("r")
    return old


def answered(reply: Followed) -> Any:
    client = RecordingClient()
    future = client.request("h", 1, Follow("", "T"), 1.0)
    future.set_result(reply)
    return future


def test_the_same_request_id_may_be_followed_again(following: Following) -> None:
    following.subscriptions.abandon("r")
    following.subscriptions.follow("r", msgspec.structs.replace(TRANSFER, transfer_id="U"))
    following.answer(computing(16))
    assert following.progress().tokens == 16
    assert following.questions()[-1].transfer_id == "U"


# How often is asked


def test_an_engine_that_answers_at_once_is_asked_again_after_a_pause(following: Following) -> None:
    """As one does to which too many questions are put."""
    following.answer(UNKNOWN, after_s=0.0)
    following.subscriptions.ask_due()
    assert following.open() == []
    following.clock.advance(0.06)
    following.subscriptions.ask_due()
    assert len(following.open()) == 1
    following.subscriptions.ask_due()
    assert len(following.questions()) == 2


def test_a_step_asks_about_a_few_only(following: Following) -> None:
    for number in range(50):
        following.subscriptions.follow(f"r{number}", TRANSFER)
    for number in following.open():
        following.client.futures[number].set_result(UNKNOWN)
    following.clock.advance(0.06)
    asked = []
    for _ in range(4):
        following.subscriptions.ask_due()
        following.subscriptions.check_integrity()
        asked.append(len(following.open()))
    assert asked == [20, 40, 51, 51]


def test_news_are_followed_by_a_question_at_once(following: Following) -> None:
    following.answer(QUEUED, computing(16), computing(32, known=16), after_s=0.0)
    assert len(following.open()) == 1


def test_news_without_progress_are_followed_by_a_question_after_a_pause(following: Following) -> None:
    """As of one attempt after the other: each answer is new, and none says more."""
    following.answer(computing(16), after_s=0.0)
    for attempt in range(1, 4):
        following.answer(computing(16, attempt=attempt), after_s=0.0)
        assert following.open() == []
        assert following.progress().attempt == attempt
        following.clock.advance(0.06)
        following.subscriptions.ask_due()
    following.answer(computing(32, attempt=3, known=16), after_s=0.0)
    assert len(following.open()) == 1


def test_a_pause_of_one_that_has_left_does_not_hold_up_the_others(following: Following) -> None:
    following.answer(UNKNOWN, after_s=0.0)
    following.subscriptions.abandon("r")
    following.subscriptions.follow("s", TRANSFER)
    following.answer(UNKNOWN, after_s=0.0)
    following.clock.advance(0.06)
    following.subscriptions.ask_due()
    assert len(following.open()) == 1


def test_nothing_is_asked_after_the_end(following: Following) -> None:
    following.answer(UNKNOWN, after_s=0.0)
    following.subscriptions.follow("s", TRANSFER)
    following.subscriptions.close()
    following.clock.advance(1.0)
    following.subscriptions.ask_due()
    assert following.open() == []
    assert following.cancels() == []


# Threads


def test_answers_may_come_while_the_scheduler_looks_and_leaves() -> None:
    """A thousand prompts are answered by another thread while this one looks, ends and abandons."""
    client = RecordingClient()
    parts = consumer_parts(client)
    subscriptions, stop = parts.subscriptions, threading.Event()

    def answer() -> None:
        number = 0
        while not stop.is_set() or number < len(client.futures):
            if number >= len(client.futures):
                continue
            future = client.futures[number]
            if isinstance(client.sent[number][2], Follow) and future.set_running_or_notify_cancel():
                future.set_result([UNKNOWN, QUEUED, computing(16), complete()][number % 4])
            number += 1

    thread = threading.Thread(target=answer)
    thread.start()
    try:
        for number in range(1000):
            subscriptions.follow(f"r{number}", TRANSFER)
        for number in range(1000):
            found = subscriptions.look(f"r{number}")
            if found is not None and number % 3:
                subscriptions.take(f"r{number}")
                parts.renewals.drop(f"r{number}")
            else:
                subscriptions.abandon(f"r{number}")
    finally:
        stop.set()
        thread.join()
    assert subscriptions.request_ids == frozenset()
    assert parts.renewals.request_ids == frozenset()
    subscriptions.check_integrity()
    parts.renewals.check_integrity()


@pytest.mark.parametrize(("queue_s", "wait_s"), [(120.0, 5.0), (0.4, 0.1)])
def test_an_answer_comes_long_before_a_transfer_is_given_up(queue_s: float, wait_s: float) -> None:
    """Or a prefill engine that has nothing new to say looks like one that does not answer."""
    client, clock = RecordingClient(), ManualClock()
    renewals = Renewals(client, MESSAGE_TIMEOUT_S, queue_s, clock)
    subscriptions = Subscriptions(client, renewals, FollowLimits(MESSAGE_TIMEOUT_S, queue_s), EngineLoop(), clock)
    subscriptions.follow("r", TRANSFER)
    client.futures[0].set_result(QUEUED)
    asked = [message.wait_s for _, _, message in client.sent if isinstance(message, Follow)]
    assert asked == [wait_s] * 2
    assert client.timeouts == [wait_s + MESSAGE_TIMEOUT_S] * 2


def test_of_a_bug_the_log_has_the_traceback(
    following: Following, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("pd_connector"), "propagate", True)
    following.client.futures[-1].set_exception(IndexError("odd"))
    assert following.failure().cause == "internal"
    assert "IndexError: odd" in caplog.text
