"""An engine rests while all its requests wait for prefill engines, and no longer than that.

Covers: pd_connector.scheduler.decode.subscriptions.
"""

import pytest

from pd_connector.vllm.engine_core import EngineLoop
from tests.support.connector.decode_scheduler import Decode, a_decode_engine, unreachable
from tests.support.connector.followed_answers import QUEUED, UNKNOWN, a_named_request, complete, computing, ended
from tests.support.connector.requests import FakeRequest, a_decode_request
from transfer.control.messages import Follow, Followed
from transfer.errors import TransferError

REQUEUED = Followed("engine-p", "queued", attempt=1)


class WakeableLoop(EngineLoop):
    """Counts how often the engine is woken."""

    def __init__(self) -> None:
        super().__init__()
        self.woken = 0

    @property
    def can_be_woken(self) -> bool:
        return True

    def wake(self) -> None:
        self.woken += 1

    def take_woken(self) -> int:
        woken, self.woken = self.woken, 0
        return woken


@pytest.fixture
def engine() -> WakeableLoop:
    return WakeableLoop()


@pytest.fixture
def decode(engine: WakeableLoop) -> Decode:
    return a_decode_engine(engine=engine)


def pulled_ahead(decode: Decode, request_id: str = "r") -> FakeRequest:
    """A request whose prompt of 70 tokens is pulled while it is computed."""
    request = a_named_request(request_id, transfer_id=request_id)
    decode.add(request)
    decode.answer(computing(16, lease_id=request_id), transfer_id=request_id)
    assert decode.schedules(request)
    return request


def questions(decode: Decode) -> list[Follow]:
    return [sent for _, _, sent in decode.client.sent if isinstance(sent, Follow)]


def test_it_rests_while_prompts_are_announced_queued_and_computed(decode: Decode) -> None:
    assert decode.consumer.waiting_for_prefill == 0
    decode.add(a_named_request("r"))
    assert decode.consumer.waiting_for_prefill == 1
    decode.answer(QUEUED)
    assert decode.consumer.waiting_for_prefill == 1
    pulled_ahead(decode, "ahead")
    assert decode.consumer.waiting_for_prefill == 2


def test_the_prefill_engine_is_asked_once_for_the_whole_prompt(decode: Decode) -> None:
    pulled_ahead(decode)
    asked = questions(decode)[-1]
    assert asked == Follow("engine-p", "r", 0, 70, "computing", 5.0)
    decode.clock.advance(5.0)
    decode.answer(computing(32, lease_id="r"), transfer_id="r")  # it has kept the question as long as it may
    assert questions(decode)[-1] == asked
    assert decode.consumer.waiting_for_prefill == 1


@pytest.mark.parametrize(
    "answer", [complete(lease_id="r"), ended("gone"), UNKNOWN, Followed("engine-p", "a later state"), unreachable()],
    ids=["complete", "ended", "unknown", "a state of a later version", "unreachable"],
)  # fmt: skip
def test_news_end_the_rest(decode: Decode, engine: WakeableLoop, answer: Followed | TransferError) -> None:
    pulled_ahead(decode)
    engine.take_woken()
    decode.answer(answer, transfer_id="r")
    assert decode.consumer.waiting_for_prefill == 0
    assert engine.take_woken() == 1


def test_a_prompt_that_starts_over_is_expected_again(decode: Decode, engine: WakeableLoop) -> None:
    pulled_ahead(decode)
    engine.take_woken()
    decode.answer(REQUEUED, computing(16, lease_id="r", attempt=1), transfer_id="r")
    assert decode.consumer.waiting_for_prefill == 1
    assert questions(decode)[-1] == Follow("engine-p", "r", 1, 70, "computing", 5.0)
    decode.answer(complete(lease_id="r", attempt=1), transfer_id="r")
    assert decode.consumer.waiting_for_prefill == 0
    assert engine.take_woken() == 1


def test_an_engine_that_answers_at_once_without_news_is_not_asked_for_ever(decode: Decode) -> None:
    pulled_ahead(decode)
    asked = len(questions(decode))
    decode.client.futures[-1].set_result(computing(32, lease_id="r"))
    assert len(questions(decode)) == asked
    assert decode.consumer.waiting_for_prefill == 0


def test_a_prompt_that_starts_over_at_once_is_asked_about_after_a_pause(decode: Decode) -> None:
    pulled_ahead(decode)
    asked = len(questions(decode))
    decode.client.futures[-1].set_result(REQUEUED)
    assert len(questions(decode)) == asked
    assert decode.consumer.waiting_for_prefill == 1
    decode.clock.advance(0.06)
    decode.consumer._subscriptions.ask_due()
    assert len(questions(decode)) == asked + 1


@pytest.mark.parametrize(
    "answer", [QUEUED, computing(16), complete(), ended(), unreachable()],
    ids=["queued", "computing", "complete", "ended", "unreachable"],
)  # fmt: skip
def test_news_of_prompts_that_are_not_pulled_yet_wake_the_engine(
    decode: Decode, engine: WakeableLoop, answer: Followed | TransferError
) -> None:
    decode.add(a_named_request("r"))
    decode.answer(UNKNOWN)
    assert engine.take_woken() == 0
    decode.answer(answer)
    assert engine.take_woken() == 1


def test_it_does_not_rest_while_anything_else_is_under_way(decode: Decode) -> None:
    ahead = pulled_ahead(decode)
    relayed = a_decode_request("relayed")
    decode.add(relayed)
    assert decode.consumer.waiting_for_prefill == 0, "it waits for blocks, which may be free in the next step"
    assert decode.schedules(relayed)
    assert decode.consumer.waiting_for_prefill == 0, "its pull may end at any time"
    decode.settle(relayed)
    assert decode.consumer.waiting_for_prefill == 1
    decode.settle(ahead)
    assert decode.consumer.waiting_for_prefill == 0


def test_what_has_ended_is_forgotten(decode: Decode, engine: WakeableLoop) -> None:
    request = pulled_ahead(decode)
    decode.settle(request, fails=True)
    assert all(future.done() for future in decode.client.futures)
    other = pulled_ahead(decode, "other")
    engine.take_woken()
    assert decode.consumer.waiting_for_prefill == 1
    decode.settle(other)
    assert decode.consumer.waiting_for_prefill == 0
    assert engine.take_woken() == 0


def test_an_engine_that_cannot_be_woken_asks_nothing_and_does_not_rest() -> None:
    decode = a_decode_engine()
    pulled_ahead(decode)
    assert all(future.done() for future in decode.client.futures)
    assert decode.consumer.waiting_for_prefill == 0
