"""Decode legs that name their transfer: what is ordered for them, what fails, and who is told when they leave."""

import logging
from collections.abc import Iterator

import msgspec
import pytest

from pd_connector.orders import Orders
from pd_connector.params import parse_remote_prefill
from pd_connector.vllm.engine_core import EngineLoop
from tests.support.connector.consumers import QUEUE_TIMEOUT_S
from tests.support.connector.decode_scheduler import BLOCKS, Decode, a_decode_engine, unreachable
from tests.support.connector.followed_answers import (
    QUEUED,
    UNKNOWN,
    a_named_request,
    blocks_of,
    complete,
    computing,
    ended,
)
from tests.support.connector.requests import a_decode_request
from transfer.control.messages import Cancel, Follow, Followed, Renewed
from transfer.errors import TransferError


@pytest.fixture
def decode() -> Iterator[Decode]:
    made = a_decode_engine()
    yield made
    made.consumer.check_integrity()


# From the name to the order


def test_a_named_leg_waits_until_its_prompt_is_being_computed(decode: Decode) -> None:
    request = a_named_request("r")
    decode.add(request)
    assert decode.asks(request) is None
    for answer in (UNKNOWN, UNKNOWN, QUEUED, QUEUED):
        decode.answer(answer)
        assert decode.asks(request) is None
    decode.answer(computing(16))
    assert decode.asks(request) == 69


def test_a_prompt_that_is_being_computed_is_pulled_ahead(decode: Decode) -> None:
    request = a_named_request("r")
    decode.add(request)
    decode.answer(QUEUED, computing(16))
    assert decode.asks(request, 16) == 53
    decode.allocates(request, 53)
    order = decode.order()
    assert (order.request_id, order.first_token, order.end_token) == ("r", 16, 69)
    assert (order.transfer_id, order.complete_tokens) == ("T", 16)
    assert (order.remote.remote_engine_id, order.remote.lease_id) == ("engine-p", "L")
    assert (order.remote.remote_host, order.remote.remote_port) == ("10.0.0.5", 8998)
    assert (order.remote.remote_num_tokens, order.remote.remote_block_ids) == (70, (blocks_of(16),))
    assert order.local_block_ids == BLOCKS
    assert decode.renewals.request_ids == {"r"}


def test_an_order_has_the_newest_of_what_was_answered(decode: Decode) -> None:
    request = a_named_request("r")
    decode.add(request)
    decode.answer(computing(16))
    assert decode.asks(request) == 69
    decode.answer(computing(33, known=16))
    decode.allocates(request, 69)
    order = decode.order()
    assert (order.complete_tokens, order.remote.remote_block_ids) == (33, (blocks_of(33),))


def test_an_order_after_a_new_attempt_is_of_that_attempt(decode: Decode) -> None:
    request = a_named_request("r")
    decode.add(request)
    decode.answer(computing(48), msgspec.structs.replace(QUEUED, attempt=1))
    assert decode.asks(request) is None
    decode.answer(computing(16, attempt=1))
    assert decode.schedules(request)
    order = decode.order()
    assert (order.remote.remote_attempt, order.complete_tokens) == (1, 16)
    assert order.remote.remote_block_ids == (blocks_of(16, first=200),)


@pytest.mark.parametrize("when", ["before it is asked for", "after it was asked for"])
def test_a_complete_prompt_is_pulled_as_if_the_prefill_engines_answer_had_been_relayed(
    decode: Decode, when: str
) -> None:
    request = a_named_request("r")
    decode.add(request)
    decode.answer(QUEUED, computing(16))
    if when == "before it is asked for":
        decode.answer(complete())
    assert decode.asks(request) == 69
    if when == "after it was asked for":
        decode.answer(complete())
    decode.allocates(request, 69)
    order = decode.order()
    assert (order.transfer_id, order.complete_tokens) == ("", 0)
    assert order.remote.remote_block_ids == (blocks_of(70),)
    relayed = parse_remote_prefill(order.remote.to_params())
    assert relayed == order.remote
    assert "prompts_ahead" not in decode.counted()


def test_the_lease_of_a_complete_prompt_is_renewed_though_nobody_asks_about_its_request(decode: Decode) -> None:
    """vLLM does not, as long as no request more may run."""
    decode.add(a_named_request("r"))
    decode.answer(complete())
    decode.clock.advance(10.5)
    decode.renewals.send_due()
    assert decode.client.take_renewed() == ["L"]


def test_the_lease_of_a_pull_ahead_is_renewed_and_announced(decode: Decode) -> None:
    request = a_named_request("r")
    decode.add(request)
    decode.answer(computing(16))
    decode.schedules(request)
    decode.clock.advance(0.1)
    decode.renewals.send_due()
    (renewal,) = decode.client.take_renewals()
    assert (renewal.engine_id, renewal.lease_ids, renewal.reading) == ("engine-p", ("L",), ("L",))
    decode.settle(request)
    assert decode.renewals.request_ids == frozenset()


def test_following_ends_when_the_pull_is_ordered(decode: Decode) -> None:
    request = a_named_request("r")
    decode.add(request)
    decode.answer(computing(16))
    decode.schedules(request)
    for (_, _, sent), future in zip(decode.client.sent, decode.client.futures, strict=True):
        assert future.done() or not isinstance(sent, Follow)
    decode.clock.advance(1000.0)
    decode.consumer.step_orders({})
    assert sum(isinstance(sent, Follow) for _, _, sent in decode.client.sent) == 2


def test_nothing_is_pulled_if_all_is_here(decode: Decode) -> None:
    request = a_named_request("r")
    decode.add(request)
    decode.answer(computing(16))
    assert decode.schedules(request, 69)
    assert decode.consumer.step_orders({}) == Orders()
    assert decode.cancels() == [Cancel("engine-p", ("L",))]
    assert decode.counted() == {}


# What fails


@pytest.mark.parametrize(
    ("answers", "wait_s", "cause", "reason"),
    [
        ([UNKNOWN], QUEUE_TIMEOUT_S, "transfer", "transfer T at 10.0.0.5:8998 did not begin within 120 s"),
        ([QUEUED], QUEUE_TIMEOUT_S, "queue", "in the prefill engine's queue"),
        ([ended("its client has left")], 0, "transfer", "its client has left"),
        ([computing(16), ended("it was aborted")], 0, "transfer", "it was aborted"),
        ([unreachable()], 0, "unreachable", "did not answer 'follow'"),
        ([computing(16), unreachable()], 0, "unreachable", "did not answer 'follow'"),
        ([computing(16, 71, prompt_digest="")], 0, "params", "computed 71 prompt tokens and this request has 70"),
        ([complete(71)], 0, "params", "computed 71 prompt tokens and this request has 70"),
        ([computing(16, prompt_digest="00ff")], 0, "params", "digest 00ff"),
        ([complete(prompt_digest="00ff")], 0, "params", "digest 00ff"),
        ([computing(16, lease_id="")], 0, "transfer", "invalid values"),
    ],
)
def test_a_transfer_that_does_not_come_is_refused(
    decode: Decode, answers: list[Followed | TransferError], wait_s: float, cause: str, reason: str
) -> None:
    request = a_named_request("r")
    decode.add(request)
    decode.answer(*answers)
    decode.clock.advance(wait_s)
    refusal = decode.refusal(request)
    assert refusal.cause == cause
    assert reason in refusal.reason
    decode.settle(request, fails=True)
    assert decode.renewals.request_ids == frozenset()


@pytest.mark.parametrize(("answer", "level"), [(ended("aborted"), "INFO"), (unreachable(), "ERROR")])
def test_that_a_client_may_have_left_is_no_error_in_the_log(
    decode: Decode, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch,
    answer: Followed | TransferError, level: str,
) -> None:  # fmt: skip
    """If it has not, its request fails, and then a worker says so."""
    monkeypatch.setattr(logging.getLogger("pd_connector"), "propagate", True)
    caplog.set_level("INFO")
    request = a_named_request("r")
    decode.add(request)
    decode.answer(answer)
    assert decode.refusal(request).request_id == "r"
    assert [each.levelname for each in caplog.records if "request r cannot pull" in each.message] == [level]
    decode.settle(request, fails=True)


def test_a_prompt_of_another_request_is_left_to_it(decode: Decode) -> None:
    """Whoever the transfer belongs to may still want it."""
    request = a_named_request("r")
    decode.add(request)
    decode.answer(complete(prompt_digest="00ff"))
    decode.refusal(request)
    decode.settle(request)
    assert decode.cancels() == []


def test_a_prompt_of_another_request_is_not_followed_to_its_end(
    decode: Decode, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would count among the pulls by which an engine that can be woken decides whether to rest."""
    monkeypatch.setattr(EngineLoop, "can_be_woken", True)
    request = a_named_request("r")
    decode.add(request)
    decode.answer(computing(16, prompt_digest="00ff"))
    assert not decode.consumer.must_wait(request, 0)
    assert decode.consumer._subscriptions.pulled == frozenset()
    assert decode.consumer._subscriptions.request_ids == frozenset()
    decode.refusal(request)
    decode.settle(request)


@pytest.mark.parametrize("answer", [ended("aborted"), unreachable()])
def test_a_transfer_that_fails_just_before_its_blocks_are_allocated_is_refused(
    decode: Decode, answer: Followed | TransferError
) -> None:
    request = a_named_request("r")
    decode.add(request)
    decode.answer(computing(16))
    assert decode.asks(request) == 69
    decode.answer(answer)
    decode.allocates(request, 69)
    orders = decode.consumer.step_orders({})
    assert [refusal.request_id for refusal in orders.refusals] == ["r"]
    assert not orders.pulls
    decode.settle(request)


def test_a_lease_that_ends_while_its_request_waits_for_blocks_is_not_read(decode: Decode) -> None:
    request = a_named_request("r")
    decode.add(request)
    decode.answer(complete())
    assert decode.asks(request) == 69
    decode.clock.advance(10.5)
    decode.renewals.send_due()
    decode.client.futures[-1].set_result(Renewed(()))
    refusal = decode.refusal(request)
    assert refusal.cause == "lease"
    decode.settle(request, fails=True)
    assert decode.cancels() == []


def test_a_transfer_id_of_both_contracts_is_refused(decode: Decode) -> None:
    request = a_decode_request("r")
    assert request.kv_transfer_params is not None
    request.kv_transfer_params["transfer_id"] = "T"
    decode.add(request)
    refusal = decode.refusal(request)
    assert refusal.cause == "params"
    assert "transfer_id and lease_id" in refusal.reason
    assert not decode.client.sent


def test_a_leg_that_the_api_server_rejected_lets_go_of_its_transfer(decode: Decode) -> None:
    """vLLM adds a placeholder with another prompt for it, and aborts that at once."""
    request = a_named_request("r")
    request.prompt_token_ids, request.abort_immediately = [0], True
    decode.add(request)
    decode.leave(request)
    assert decode.cancels() == [Cancel("", (), ("T",))]


# Who leaves


@pytest.mark.parametrize(
    ("answers", "cancel"),
    [
        ([], Cancel("", (), ("T",))),
        ([UNKNOWN], Cancel("", (), ("T",))),
        ([QUEUED], Cancel("", (), ("T",))),
        ([computing(16)], Cancel("engine-p", ("L",))),
        ([complete()], Cancel("engine-p", ("L",))),
    ],
)
def test_who_leaves_before_its_prompt_is_there_cancels_it(
    decode: Decode, answers: list[Followed], cancel: Cancel
) -> None:
    request = a_named_request("r")
    decode.add(request)
    decode.answer(*answers)
    decode.leave(request)
    assert decode.cancels() == [cancel]
    assert decode.renewals.request_ids == frozenset()
    decode.leave(request)
    assert len(decode.cancels()) == 1


def test_who_leaves_while_it_waits_for_blocks_cancels_its_lease(decode: Decode) -> None:
    request = a_named_request("r")
    decode.add(request)
    decode.answer(complete())
    assert decode.asks(request) == 69
    decode.leave(request)
    assert decode.cancels() == [Cancel("engine-p", ("L",))]


def test_who_leaves_while_its_prompt_is_pulled_ahead_ends_the_computation(decode: Decode) -> None:
    """So that its workers, which follow the prompt, learn at once that nothing more will come."""
    request = a_named_request("r")
    decode.add(request)
    decode.answer(computing(16))
    decode.schedules(request)
    decode.leave(request)
    assert decode.cancels() == [Cancel("engine-p", ("L",))]
    decode.settle(request, fails=True)
    assert "prompts_ahead" not in decode.counted()


def test_who_leaves_while_a_complete_prompt_is_pulled_leaves_its_lease_to_the_workers(decode: Decode) -> None:
    request = a_named_request("r")
    decode.add(request)
    decode.answer(complete())
    decode.schedules(request)
    decode.leave(request)
    assert decode.cancels() == []
    decode.settle(request)


# The same name again


def test_requests_of_the_same_transfer_follow_the_first(decode: Decode) -> None:
    first, second = a_named_request("first"), a_named_request("second")
    decode.add(first, second)
    assert sum(isinstance(sent, Follow) for _, _, sent in decode.client.sent) == 1
    decode.answer(computing(16))
    assert decode.asks(second) is None
    decode.schedules(first)
    assert decode.asks(second) is None
    decode.settle(first)
    assert decode.asks(second, 64) == 0
    decode.allocates(second, 0)
    late = a_named_request("late")
    decode.add(late)
    assert decode.asks(late, 64) == 0
    assert decode.cancels() == []


@pytest.mark.parametrize(
    ("state", "tokens", "seed"),
    [
        ("announced", 71, 0),
        ("pulling", 71, 0),
        *((state, 70, 1) for state in ("announced", "pulling", "settled")),
        ("settled", 71, 1),
        ("settled", 69, 0),
    ],
)
def test_another_prompt_with_the_same_transfer_id_is_refused(
    decode: Decode, state: str, tokens: int, seed: int
) -> None:
    first, other = a_named_request("first"), a_named_request("other", tokens, seed=seed)
    decode.add(first)
    if state != "announced":
        decode.answer(computing(16))
        decode.schedules(first)
        decode.consumer.step_orders({})
    if state == "settled":
        decode.settle(first)
    decode.add(other)
    refusal = decode.refusal(other)
    assert refusal.cause == "params"
    assert "transfer T at 10.0.0.5:8998 is that of another request, whose prompt has 70 tokens" in refusal.reason
    assert "a transfer_id of its own" in refusal.reason
    decode.settle(other)
    assert decode.cancels() == []


@pytest.mark.parametrize("is_named", [True, False])
def test_a_prompt_that_goes_on_behind_one_that_was_pulled_is_computed_here(decode: Decode, is_named: bool) -> None:
    """As vLLM asks when it has called one of its own tools: with the same params."""
    first = a_named_request("first") if is_named else a_decode_request("first")
    decode.add(first)
    if is_named:
        decode.answer(computing(16))
    decode.schedules(first)
    decode.consumer.step_orders({})
    decode.settle(first)
    behind = a_named_request("behind", 90)
    behind.kv_transfer_params = first.kv_transfer_params
    decode.add(behind)
    assert decode.asks(behind, 64) == 0
    decode.allocates(behind, 0)
    assert decode.consumer.step_orders({}).refusals == ()
    assert decode.cancels() == []


def test_the_same_transfer_id_at_another_engine_is_another_transfer(decode: Decode) -> None:
    """Routers that try again elsewhere may keep the name."""
    first, second = a_named_request("first"), a_named_request("second", remote_port=9000)
    decode.add(first, second)
    assert [port for _, port, sent in decode.client.sent if isinstance(sent, Follow)] == [8998, 9000]


def test_a_name_is_spent_when_its_request_has_left(decode: Decode) -> None:
    first, second = a_named_request("first"), a_named_request("second")
    decode.add(first)
    decode.leave(first)
    decode.add(second)
    assert decode.asks(second) == 0
