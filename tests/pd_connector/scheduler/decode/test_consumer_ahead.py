"""Which prompts are pulled while they are still being computed, who goes first, and what is counted.

Covers: pd_connector.scheduler.block_demand, pd_connector.scheduler.decode.pulls_ahead.
"""

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from pd_connector.engine_limits import EngineLimits
from pd_connector.vllm.cache_specs import Retention
from tests.support.connector.consumers import layers_of
from tests.support.connector.decode_scheduler import Decode, a_decode_engine, unreachable
from tests.support.connector.followed_answers import a_named_request, complete, computing, ended
from tests.support.connector.requests import FakeRequest, a_decode_request, a_prompt
from transfer.control.messages import Cancel, Followed
from transfer.errors import TransferError


@pytest.fixture
def decode() -> Iterator[Decode]:
    made = a_decode_engine()
    yield made
    made.consumer.check_integrity()


# Bounds, and who goes first


def named(decode: Decode, *request_ids: str, tokens: int = 70, answer: Followed | None = None) -> list[FakeRequest]:
    """Requests whose prompts are being computed."""
    requests = [a_named_request(request_id, tokens, transfer_id=request_id) for request_id in request_ids]
    decode.add(*requests)
    for request in requests:
        decode.answer(answer or computing(16, tokens, lease_id=request.request_id), transfer_id=request.request_id)
    return requests


def test_no_more_prompts_are_pulled_ahead_than_the_limit(decode: Decode) -> None:
    a, b, c = named(decode, "a", "b", "c")
    assert [decode.schedules(each) for each in (a, b, c)] == [True, True, False]
    assert decode.counted() == {"prompts_ahead": 2, "transfers_waiting": 1}
    decode.settle(b)
    assert decode.schedules(c)


def test_no_more_blocks_are_held_ahead_than_the_limit() -> None:
    decode = a_decode_engine(EngineLimits(max_pulls_ahead=10, max_ahead_fraction=0.15))  # of 100; a prompt takes 5
    requests = named(decode, "a", "b", "c", "d")
    assert [decode.schedules(each) for each in requests] == [True, True, True, False]
    decode.settle(requests[0])
    assert decode.schedules(requests[3])


def test_what_may_not_be_pulled_ahead_is_pulled_when_it_is_complete() -> None:
    decode = a_decode_engine(EngineLimits(max_pulls_ahead=1, max_ahead_fraction=0.01))
    (request,) = named(decode, "r")
    assert decode.asks(request) is None
    decode.answer(complete(lease_id="r"), transfer_id="r")
    assert decode.schedules(request)
    assert decode.order().transfer_id == ""


def test_a_prompt_is_not_pulled_ahead_with_the_last_blocks(decode: Decode) -> None:
    (request,) = named(decode, "r")
    decode.blocks.used = 100 - 7
    assert decode.asks(request) is None
    decode.blocks.used = 100 - 8
    assert decode.asks(request) == 69


@pytest.mark.parametrize("other", ["relayed", "named and complete", "no decode leg"])
def test_a_request_that_finds_too_few_blocks_goes_first(decode: Decode, other: str) -> None:
    (ahead,) = named(decode, "ahead")
    if other == "named and complete":
        (first,) = named(decode, "first", tokens=800, answer=complete(800, lease_id="first"))
    elif other == "relayed":
        first = a_decode_request("first", 800)
        decode.add(first)
    else:
        first = FakeRequest("first", a_prompt(800))
        decode.add(first)
    decode.blocks.used = 60
    assert decode.asks(first) is not None  # vLLM looks, and has no 50 blocks
    decode.step()
    assert decode.asks(ahead) is None
    assert decode.asks(first) is not None
    decode.step()
    decode.blocks.used = 20  # requests have ended
    assert decode.asks(ahead) is not None


def test_a_request_that_got_its_blocks_holds_nobody_back(decode: Decode) -> None:
    (ahead,) = named(decode, "ahead")
    first = a_decode_request("first", 800)
    decode.add(first)
    assert decode.schedules(first)
    decode.blocks.used = 60
    decode.step()
    assert decode.asks(ahead) == 69


def test_a_request_that_is_not_asked_about_any_longer_holds_nobody_back(decode: Decode) -> None:
    (ahead,) = named(decode, "ahead")
    first = a_decode_request("first", 800)
    decode.add(first)
    decode.blocks.used = 60
    decode.asks(first)
    decode.leave(first)
    decode.step()
    decode.step()
    assert decode.asks(ahead) == 69


def test_requests_that_wait_for_prefill_engines_do_not_count_as_waiting_for_blocks(decode: Decode) -> None:
    """Others would be told to wait for them."""
    (request,) = named(decode, "r")
    assert decode.consumer.waiting == 0
    assert decode.consumer.awaits_blocks(request)
    decode.answer(complete(lease_id="r"), transfer_id="r")
    decode.asks(request)
    assert decode.consumer.waiting == 1
    assert decode.consumer.awaits_blocks(request)
    decode.schedules(request)
    assert decode.consumer.waiting == 0


@pytest.mark.parametrize(("first_token", "cut"), [(32, True), (0, False)])
def test_what_the_prefill_engine_will_cut_short_is_not_pulled_ahead(first_token: int, cut: bool) -> None:
    """Window 128, blocks of 32: the last of 159 tokens sees the first block."""
    tokens = 159
    decode = a_decode_engine(retentions=[Retention(32), Retention(32, window=128)])
    request = a_named_request("r", tokens)
    decode.add(request)
    sizes: dict[str, Any] = {"block_sizes": (32, 32), "first_blocks": (0, 0), "layers": layers_of(2)}
    sizes["first_tokens"] = 0, first_token
    decode.answer(computing(32, tokens, block_ids=((1,), (2,)), **sizes))
    assert (decode.asks(request) is None) == cut
    windowed = (0, 12, 13, 14, 15) if cut else (11, 12, 13, 14, 15)
    decode.answer(complete(tokens, block_ids=((1, 2, 3, 4, 5), windowed), **sizes))
    assert decode.asks(request) == (0 if cut else tokens - 1)


# What is counted


@pytest.mark.parametrize(
    ("answer", "cause"),
    [(ended("aborted"), "transfer"), (unreachable(), "unreachable"), (complete(prompt_digest="00ff"), "params")],
)
@pytest.mark.parametrize("policy", ["recompute", "fail"])
def test_a_prompt_that_is_computed_here_because_its_transfer_did_not_come_is_counted(
    decode: Decode, answer: Followed | TransferError, cause: str, policy: str
) -> None:
    request = a_named_request("r")
    decode.add(request)
    decode.answer(answer)
    decode.refusal(request)
    decode.settle(request, fails=True)
    if policy == "fail":
        decode.leave(request)
    else:
        assert decode.asks(request) == 0
        decode.allocates(request, 0)
    counted = decode.counted()
    assert counted == ({f"prompts_computed:{cause}": 1} if policy == "recompute" else {})
    assert decode.counted() == {}


@pytest.mark.parametrize(("ahead", "cached"), [(True, 0), (False, 0), (False, 16)])
def test_a_prompt_whose_pull_has_failed_is_counted_when_it_is_computed(
    decode: Decode, ahead: bool, cached: int
) -> None:
    request = a_named_request("r") if ahead else a_decode_request("r")
    decode.add(request)
    if ahead:
        decode.answer(computing(16))
    decode.schedules(request, cached)
    decode.settle(request, fails=True)
    assert "prompts_computed:pull" not in decode.counted()
    decode.schedules(request, cached)
    decode.schedules(request, cached)  # preempted, and computed again
    assert decode.counted()["prompts_computed:pull"] == 1


def test_what_vllm_does_not_take_is_counted(decode: Decode) -> None:
    """vLLM may give a request its blocks for less than the connector offers, and although it is to wait."""
    waits, relayed, cached = a_named_request("waits"), a_decode_request("relayed"), a_decode_request("c", lease_id="C")
    decode.add(waits, relayed, cached)
    assert decode.asks(waits) is None
    decode.allocates(waits, 0)
    decode.asks(relayed)
    decode.allocates(relayed, 0)
    decode.asks(cached, 69)
    decode.allocates(cached, 0)
    assert decode.counted() == {"prompts_computed:declined": 2}
    assert Cancel("", (), ("T",)) in decode.cancels()


@pytest.mark.parametrize("kept", [[Retention(16)], [Retention(16), Retention(4096, states=True)]], ids=str)
@pytest.mark.parametrize(("cached", "number"), [(69, 0), (64, 0), (48, 1), (0, 1)])
def test_a_follower_is_counted_if_more_is_computed_than_the_last_block(
    cached: int, number: int, kept: list[Retention]
) -> None:
    decode = a_decode_engine(retentions=kept)
    first, second = a_decode_request("first"), a_decode_request("second")
    decode.add(first, second)
    decode.schedules(first)
    decode.settle(first)
    decode.schedules(second, cached)
    assert decode.counted().get("prompts_computed:shared", 0) == number


CHOICES = pytest.mark.parametrize("make", [a_decode_request, a_named_request], ids=["leased", "named"])


@CHOICES
def test_a_choice_whose_first_one_is_at_another_engine_is_computed_here(make: Callable[[str], FakeRequest]) -> None:
    """vLLM gives the choices of a request (``n``) to its data-parallel engines, each to any of them."""
    decode = a_decode_engine(retentions=[Retention(16)])
    for index in (1, 2):
        choice = make(f"{index}_cmpl-a")
        decode.add(choice)
        assert decode.asks(choice) == 0
        decode.allocates(choice, 0)
    decode.clock.advance(20)
    decode.renewals.send_due()
    assert decode.client.sent == [], "lease and name are the first one's"
    assert decode.counted()["prompts_computed:shared"] == 2


@CHOICES
def test_a_choice_follows_the_first_one_at_its_engine(make: Callable[[str], FakeRequest]) -> None:
    decode = a_decode_engine(retentions=[Retention(16)])
    first, second = make("0_cmpl-a"), make("1_cmpl-a")
    decode.add(first, second)
    assert decode.asks(second) is None
    decode.leave(first)
    assert decode.asks(second) == 0
