"""How a pull ends, once its reads have: confirmed by the prefill engine, or failed. What it reads is in test_peer."""

import threading
import time
from dataclasses import replace
from typing import Any
from unittest.mock import Mock

import pytest

from pd_connector.orders import Cause, PullOrder
from pd_connector.params import contents_digest
from pd_connector.traces import PullTrace
from pd_connector.worker.peer import Peer, PullContext
from pd_connector.worker.pull import AnyEnd, Pull
from pd_connector.worker.pull_end import PullEnd, PullFailed
from tests.support.connector.requests import RecordingClient, a_prompt, a_remote
from tests.support.waiting import ManualClock
from transfer.control.failures import ClientClosed
from transfer.control.messages import Followed, Release, Released, TransferState

REMOTE = a_remote(a_prompt(70))
ORDER = PullOrder("r", REMOTE, ((1, 2, 3, 4, 5),), 0, 69, "pull")


class Reader:
    """A pull of reader 1 of 2, whose reads have ended; what it sent and how it ended."""

    def __init__(self, order: PullOrder = ORDER) -> None:
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
        self.pull = Pull(context, order, self.ends.append, threading.Event())


def test_a_pull_ends_with_the_answer_and_not_before() -> None:
    reader = Reader()
    reader.pull.confirm()
    assert reader.client.sent == [
        ("10.0.0.5", 8998, Release("engine-p", "lease-1", 1, 2, "pull", contents_digest(REMOTE)))
    ]
    assert reader.ends == []
    reader.clock.advance(0.25)
    reader.client.futures[0].set_result(Released(True))
    (end,) = reader.ends
    assert isinstance(end, PullEnd)
    assert (end.cause, end.tokens, end.is_ahead) == ("", 69, False)
    assert end.seconds == {"release": 0.25, "total": 0.25}


def test_what_was_read_is_confirmed_though_the_time_is_out() -> None:
    reader = Reader()
    reader.clock.advance(60.0)
    reader.pull.confirm()
    assert reader.client.timeouts == [1.0]


def test_a_pull_whose_lease_had_ended_has_failed() -> None:
    reader = Reader()
    reader.pull.confirm()
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


@pytest.mark.parametrize(("state", "is_ahead"), [("computing", True), ("queued", True), ("complete", False)])
def test_a_pull_is_ahead_until_p_says_that_the_prompt_is_complete(state: str, is_ahead: bool) -> None:
    """The session looks before the pull has taken the answer: whether it goes before others depends on it."""
    reader = Reader(replace(ORDER, transfer_id="transfer-1"))
    assert reader.pull.is_ahead
    reader.pull.follow()
    assert reader.pull.is_ahead
    reader.client.futures[0].set_result(Followed("engine-p", state))
    assert reader.pull.is_ahead == is_ahead


def test_a_question_without_an_answer_leaves_the_pull_ahead_and_a_pull_in_turn_never_is() -> None:
    reader = Reader(replace(ORDER, transfer_id="transfer-1"))
    reader.pull.follow().set_exception(OSError("no answer"))
    assert reader.pull.is_ahead
    assert not Reader().pull.is_ahead


def test_p_is_asked_for_more_at_once_after_progress() -> None:
    reader = Reader(replace(ORDER, transfer_id="t", complete_tokens=16))
    waits: list[float] = []
    closing = Mock(is_set=lambda: False, wait=waits.append)
    reader.pull = Pull(reader.pull._context, reader.pull.order, reader.ends.append, closing)
    for tokens in (32, 48, 64, 64):
        reader.pull.follow()
        answer = Followed(
            "engine-p", TransferState.COMPUTING, REMOTE.lease_id, 30.0, 0, 70, REMOTE.prompt_digest, (16,), tokens,
            (tuple(range(1, tokens // 16 + 1)),), (0,),
        )  # fmt: skip
        reader.client.futures[-1].set_result(answer)
        reader.pull.take_answer()
    assert waits == []
    reader.pull.follow()
    assert waits == [0.05], "the last answer told of none"


# Traces


def traced(order: PullOrder, trace: Any) -> Reader:
    reader = Reader(order)
    context = replace(reader.pull._context, trace=trace)
    reader.pull = Pull(context, order, reader.ends.append, threading.Event())
    return reader


def test_p_is_not_asked_in_a_hurry_if_what_it_answers_at_once_is_new_and_no_progress() -> None:
    """As one attempt after the other."""
    reader = Reader(replace(ORDER, transfer_id="t", complete_tokens=16))
    started = time.monotonic()
    for attempt in range(1, 6):
        reader.pull.follow()
        answer = Followed(
            "engine-p", TransferState.QUEUED if attempt % 2 else TransferState.COMPUTING, REMOTE.lease_id, 30.0,
            attempt, 70, REMOTE.prompt_digest, (16,), 16, ((attempt,),), (0,),
        )  # fmt: skip
        reader.client.futures[-1].set_result(answer)
        reader.pull.take_answer()
        assert reader.pull.prompt.progress.attempt == attempt
    assert time.monotonic() - started > 4 * 0.05


def test_a_pull_of_a_traced_request_is_traced_once_however_it_ends() -> None:
    order = replace(ORDER, traceparent="00-1-2-01")
    traces: list[PullTrace] = []
    reader = traced(order, traces.append)
    reader.pull.confirm()
    reader.clock.advance(0.25)
    reader.client.futures[0].set_result(Released(True))
    traced(order, traces.append).pull.fail(PullFailed(Cause.READ, "broken"))
    traced(order, traces.append).pull.lose(RuntimeError("lost"))
    assert [trace.cause for trace in traces] == ["", Cause.READ, Cause.INTERNAL]
    assert [[lap.phase for lap in trace.laps] for trace in traces] == [["release"], [], []]
    assert traces[0].laps[0].end - traces[0].laps[0].start == 0.25
    assert traces[0].figures["tokens"] == 69
    assert "broken" in traces[1].reason


def test_a_pull_without_a_trace_keeps_no_laps() -> None:
    reader = traced(ORDER, lambda _: pytest.fail("it has no trace"))
    reader.pull.fail(PullFailed(Cause.READ, "broken"))
    assert reader.pull._laps is None
    assert Reader(replace(ORDER, traceparent="00-1-2-01")).pull._laps is None  # tracing is off


def test_a_pull_ends_though_its_trace_cannot_be_written() -> None:
    def raises(_: PullTrace) -> None:
        raise RuntimeError

    reader = traced(replace(ORDER, traceparent="00-1-2-01"), raises)
    reader.pull.fail(PullFailed(Cause.READ, "broken"))
    assert len(reader.ends) == 1


def test_the_wait_for_an_answer_ends_when_it_comes_and_the_rest_is_the_queue() -> None:
    traces: list[PullTrace] = []
    reader = traced(replace(ORDER, transfer_id="transfer-1", traceparent="00-1-2-01"), traces.append)
    question = reader.pull.follow()
    reader.clock.advance(1.0)
    question.set_exception(ClientClosed("closed"))
    reader.clock.advance(2.0)
    with pytest.raises(PullFailed) as failed:
        reader.pull.run(no_peer)
    reader.pull.fail(failed.value)
    assert [(lap.phase, lap.end - lap.start) for lap in traces[0].laps] == [("wait", 1.0), ("queue", 2.0)]


def no_peer(_deadline: float) -> Peer:
    raise AssertionError("there is nothing to read")
