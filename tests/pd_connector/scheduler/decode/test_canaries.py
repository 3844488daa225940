"""Canaries of a decode engine's scheduler half: who is one, who waits for it, and what its end means for others."""

import itertools
import logging
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest

from pd_connector.orders import CanaryEnds, CanaryReference, CanaryRoom, Cause, Orders, Report
from pd_connector.scheduler.decode import canaries as module
from pd_connector.scheduler.decode.canaries import Standing
from pd_connector.scheduler.decode.legs import Refused
from pd_connector.stats import ComputedHere
from pd_connector.vllm.cache_specs import Retention
from tests.support.connector.proving import PROVING_BLOCKS, PROVING_RANKS, ProvingDecode
from tests.support.connector.requests import FakeRequest, a_remote

# A canary


def test_the_first_prompt_from_an_engine_is_computed_here_and_pulled_as_well() -> None:
    d = ProvingDecode()
    first = d.add("first")
    order = d.becomes_canary(first)
    assert (order.first_token, order.end_token) == (0, 69)
    assert order.local_block_ids == ((1, 2, 3, 4, 5),)
    assert not d.canaries.wants_step, "a paused engine keeps its request, and would step for ever"
    reference = d.computes(first)
    assert d.canaries.wants_step
    assert reference.block_ids == (tuple(PROVING_BLOCKS),)
    assert d.held == PROVING_BLOCKS
    d.report(first)
    assert d.held == []
    assert d.counted() == {"canaries:proven": 1}
    assert d.canaries.wants_step, "a step tells vLLM's statistics of it"
    d.step()
    assert not d.canaries.wants_step


def test_what_comes_after_the_proof_is_pulled() -> None:
    d = ProvingDecode()
    d.proves(d.add("first"))
    second = d.add("second")
    assert d.schedules(second) == 69
    assert [pull.request_id for pull in d.step().pulls] == ["second"]


def test_what_was_computed_of_a_request_that_ends_at_once_is_kept_until_it_has_been_compared() -> None:
    d = ProvingDecode()
    first = d.add("first")
    d.becomes_canary(first)
    first.num_output_tokens = 1
    d.leave(first)
    del d.tables["first"]
    assert d.held == PROVING_BLOCKS
    assert [each.block_ids for each in d.step().references] == [(tuple(PROVING_BLOCKS),)]
    d.report(first)
    assert d.held == []
    assert d.counted() == {"canaries:proven": 1}


def test_the_lease_is_renewed_until_the_canary_has_ended() -> None:
    d = ProvingDecode()
    first = d.add("first")
    d.becomes_canary(first)
    assert d.parts.renewals.request_ids == {"first"}
    d.computes(first)
    d.leave(first)
    assert d.parts.renewals.request_ids == {"first"}
    d.report(first)
    assert d.parts.renewals.request_ids == set()
    assert d.client.cancelled() == [], "the workers have released it"


def test_of_a_prefix_only_what_the_other_engine_holds_is_compared_and_nobody_keeps_its_lease() -> None:
    d = ProvingDecode()
    prompt = list(range(70))
    request, held = FakeRequest("prefix", prompt), a_remote(prompt, remote_num_tokens=49)
    assert d.canaries.begin(request, held, 0, is_same_prompt=True, is_decode_leg=False)
    (order,) = d.canaries.step_orders({}).canaries
    assert (order.first_token, order.end_token) == (0, 48)
    assert not d.canaries.request_ids


def test_only_what_is_computed_here_is_compared() -> None:
    d = ProvingDecode()
    first = d.add("first")
    order = d.becomes_canary(first, computed=32)
    assert (order.first_token, order.end_token) == (32, 69)
    assert order.local_block_ids == ((0, 0, 1, 2, 3),)
    assert d.computes(first).block_ids == ((0, 0, 3, 4, 5),)
    assert d.held == [3, 4, 5]


def test_of_a_long_prompt_the_last_tokens_are_compared() -> None:
    d = ProvingDecode()
    order = d.becomes_canary(d.add("first", tokens=1000))
    assert (order.first_token, order.end_token) == (496, 999)
    assert order.local_block_ids[0] == (*[0] * 31, *range(1, 33))


def test_what_a_window_has_passed_is_neither_pulled_nor_compared() -> None:
    d = ProvingDecode(retention=Retention(16, window=20))
    order = d.becomes_canary(d.add("first"))
    assert order.local_block_ids == ((0, 0, 0, 1, 2),)


def test_two_canaries_at_a_time_have_areas_of_their_own() -> None:
    d = ProvingDecode(room=CanaryRoom(64, 2, 16, 16))
    first, second = (d.becomes_canary(d.add(name, engine=name)) for name in ("a", "b"))
    areas = [set(order.local_block_ids[0]) - {0} for order in (first, second)]
    assert not areas[0] & areas[1]
    assert d.schedules(d.add("c", engine="c")) == 0, "it does not wait for what other engines are proven with"
    assert d.step() == Orders()
    assert d.counted() == {f"prompts_computed:{ComputedHere.UNPROVEN}": 1}
    d.report(FakeRequest("a", None), failure="gone", cause=Cause.READ)
    assert d.becomes_canary(d.add("d", engine="c"))


@pytest.mark.parametrize(("tokens", "computed"), [(16, 0), (70, 64), (70, 55), (33, 20)])
@pytest.mark.parametrize("border", [16, 64])
def test_a_prompt_of_which_too_little_is_computed_here_proves_nothing_and_is_computed(
    tokens: int, computed: int, border: int, caplog: pytest.LogCaptureFixture
) -> None:
    d = ProvingDecode(room=CanaryRoom(512, 2, border, 16))
    short = d.add("short", tokens=tokens)
    assert d.schedules(short, computed) == 0
    assert d.step() == Orders()
    assert d.client.cancelled() == ["lease-of-short"]
    assert d.counted() == {f"prompts_computed:{ComputedHere.UNPROVEN}": 1}
    assert "request short is computed here: its prefill engine is not proven yet" in caplog.text


def test_a_prompt_that_is_here_but_for_its_last_token_is_none() -> None:
    d = ProvingDecode()
    known = d.add("known")
    assert d.schedules(known, computed=69) == 0
    assert (d.step(), d.counted()) == (Orders(), {})


def test_a_request_whose_lease_is_lost_is_none() -> None:
    d = ProvingDecode()
    first = d.add("first")
    d.clock.advance(d.parts.renewals._queue_timeout_s + 1)
    d.parts.renewals.send_due()
    assert d.schedules(first) == 69
    assert d.step().refusals[0].cause is Cause.QUEUE


@pytest.mark.parametrize("unknown", [{"mm_features": ["an image"]}, {"prompt_embeds": "of another model"}])
def test_a_prompt_that_may_be_another_one_there_can_prove_and_not_refuse(
    unknown: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    d = ProvingDecode()
    first, second = d.add("first"), d.add("second")
    for request, (name, value) in itertools.product((first, second), unknown.items()):
        setattr(request, name, value)
    d.proves(first, difference="layer 'l0', part 'k'")
    assert "its images or embeddings may differ as well" in caplog.text
    d.clock.advance(module._RETRY_S)
    d.proves(second)
    assert d.counted() == {"canaries:failed": 1, "canaries:proven": 1}
    assert d.schedules(d.add("third")) == 69


def test_an_image_of_the_same_name_may_be_another_one_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """Clients name them (``uuid``), and each engine has in its cache what came first."""
    d = ProvingDecode()
    monkeypatch.setattr(d.consumer._prompts, "_hashing", "aa")
    image = SimpleNamespace(
        modality="image", identifier="picture-1", mm_position=SimpleNamespace(offset=0, length=8)
    )  # fmt: skip
    named: Any = SimpleNamespace(mm_features=[image])
    first = d.add("first", media_digest=d.consumer._prompts._media_digest(named))
    first.mm_features = [image]
    others = [d.add(name) for name in ("second", "third")]
    d.proves(first, difference="layer 'l0', part 'k'")
    assert [d.schedules(each) for each in others] == [0, 0]
    assert d.step() == Orders(), "nobody waits for one such canary after another"
    d.clock.advance(module._RETRY_S)
    assert d.becomes_canary(d.add("fourth"))


def test_what_another_connector_brings_is_not_compared() -> None:
    """It may come from the engine that is to be proven, or be wrong."""
    d = ProvingDecode()
    first = d.add("first")
    assert d.schedules(first, computed=16) == 0
    first.num_computed_tokens = 64
    orders = d.step()
    assert len(orders.canaries) == 1, "a pull is what releases the lease"
    assert orders.references == (CanaryReference("first"),)
    d.report(first, samples=0)
    assert d.counted() == {"canaries:left": 1}


def test_what_was_found_here_is_not_taken_for_what_another_connector_brings() -> None:
    d = ProvingDecode()
    first = d.add("first")
    first.num_computed_tokens = 32
    d.becomes_canary(first, computed=32)
    first.num_computed_tokens = 70
    assert len(d.computes(first).block_ids) == 1


@pytest.mark.parametrize("ends", [False, True])
def test_what_comes_of_a_load_that_has_failed_is_not_compared(ends: bool) -> None:
    d = ProvingDecode()
    first = d.add("first")
    d.becomes_canary(first)
    d.spoilt.add("first")
    first.num_output_tokens = 1
    if ends:
        d.leave(first)
    assert d.step().references == (CanaryReference("first"),)
    d.report(first, samples=0)
    assert d.counted() == {"canaries:left": 1}


# Adapters


def test_each_adapter_is_proven_by_itself() -> None:
    d = ProvingDecode()
    d.proves(d.add("base"))
    with_adapter = d.add("adapted")
    with_adapter.lora_request = SimpleNamespace(lora_name="tone", lora_path="/adapters/tone")
    with_adapter.kv_transfer_params = None
    assert isinstance(d.canaries.look(with_adapter, a_remote_of("P")), Standing)
    assert d.canaries.look(with_adapter, a_remote_of("P")) is Standing.UNTRIED
    with_adapter.lora_request = None
    assert d.canaries.look(with_adapter, a_remote_of("P")) is Standing.PROVEN


def test_an_adapter_from_another_path_is_another_one() -> None:
    d = ProvingDecode()
    request = d.add("adapted")
    request.lora_request = SimpleNamespace(lora_name="tone", lora_path="/adapters/tone")
    assert d.canaries.begin(request, a_remote_of("P"), 0, is_same_prompt=True)
    request.num_output_tokens = 1
    d.tables["adapted"] = PROVING_BLOCKS
    d.canaries.step_orders({})
    for _ in range(PROVING_RANKS):
        d.canaries.settled(set(), set(), Report(canaries={"adapted": CanaryEnds(1, samples=1)}))
    assert d.canaries.look(request, a_remote_of("P")) is Standing.PROVEN
    request.lora_request.lora_path = "/adapters/tone-2"
    assert d.canaries.look(request, a_remote_of("P")) is Standing.UNTRIED


def a_remote_of(engine: str) -> Any:
    return a_remote([0] * 70, remote_engine_id=engine)


# What it comes to


def test_an_engine_that_differs_is_refused_for_good_and_everybody_is_told(caplog: pytest.LogCaptureFixture) -> None:
    d = ProvingDecode()
    with caplog.at_level(logging.ERROR):
        d.proves(d.add("first"), difference="layer 'l0', part 'k': 1.28 times")
    assert (
        "prefill engine P at 10.0.0.5:8998 computes other keys and values than this engine: layer 'l0'" in caplog.text
    )
    assert "set canary to warn or off" in caplog.text
    d.clock.advance(1e6)
    for name in ("second", "third"):
        request = d.add(name)
        assert d.schedules(request) == 69
        (refusal,) = d.step().refusals
        assert refusal.cause is Cause.CANARY
        assert "1.28 times" in refusal.reason
    assert d.counted() == {"canaries:differs": 1, "peers_refused": 1}
    with patch.object(type(d.canaries._verdicts), "values", side_effect=AssertionError("in every step")):
        assert d.counted() == {}
    assert d.client.cancelled() == ["lease-of-second", "lease-of-third"]


def test_a_difference_on_one_rank_is_enough() -> None:
    d = ProvingDecode()
    first = d.add("first")
    d.becomes_canary(first)
    d.computes(first)
    d.settle(Report(canaries={"first": CanaryEnds(1, samples=4)}))
    d.settle(Report(canaries={"first": CanaryEnds(1, samples=4, difference="layer 'l1'")}))
    assert isinstance(d.canaries.look(first, a_remote_of("P")), Refused)


@pytest.mark.parametrize("fails_first", [False, True])
def test_a_difference_on_one_rank_counts_though_the_pull_of_another_has_failed(fails_first: bool) -> None:
    d = ProvingDecode()
    first = d.add("first")
    d.becomes_canary(first)
    d.computes(first)
    ends = [CanaryEnds(1, samples=4, difference="layer 'l1'"), CanaryEnds(1, cause=Cause.READ, failure="no")]
    for end in ends[::-1] if fails_first else ends:
        d.settle(Report(canaries={"first": end}))
    assert isinstance(d.canaries.look(first, a_remote_of("P")), Refused)


@pytest.mark.parametrize("media", [[], ["an image"]])
def test_with_warn_it_is_used_all_the_same(media: list[Any], caplog: pytest.LogCaptureFixture) -> None:
    d = ProvingDecode(refuses=False)
    first = d.add("first")
    first.mm_features = media
    with caplog.at_level(logging.WARNING):
        d.proves(first, difference="layer 'l0', part 'k'")
    assert "They are used all the same (canary = warn)" in caplog.text
    assert d.schedules(d.add("second")) == 69
    assert d.counted() == {"canaries:differs": 1}


@pytest.mark.parametrize("cause", [Cause.LEASE, Cause.PARAMS])
def test_after_a_canary_that_could_not_be_pulled_the_next_one_serves(cause: Cause) -> None:
    d = ProvingDecode()
    first, second = d.add("first"), d.add("second")
    d.becomes_canary(first)
    assert d.asks(second) is None
    d.report(first, failure="no", cause=cause, samples=0)
    assert d.becomes_canary(second)
    assert d.counted() == {"canaries:failed": 1}


@pytest.mark.parametrize("cause", [Cause.READ, Cause.TIMEOUT, Cause.UNCONFIRMED, Cause.CHECKSUM, Cause.INTERNAL])
def test_nobody_waits_for_one_canary_after_another_that_fails_slowly(cause: Cause) -> None:
    d = ProvingDecode()
    first, others = d.add("first"), [d.add(name) for name in ("second", "third")]
    d.becomes_canary(first)
    assert [d.asks(each) for each in others] == [None, None]
    d.report(first, failure="no", cause=cause, samples=0)
    assert [d.schedules(each) for each in others] == [0, 0]
    assert d.step() == Orders(), "they are computed here, and prove nothing"
    d.clock.advance(module._RETRY_S)
    assert d.becomes_canary(d.add("fourth"))


@pytest.mark.parametrize("cause", [Cause.UNREACHABLE, Cause.DENIED, Cause.REFUSED])
def test_of_an_engine_out_of_reach_the_next_ones_fail_for_a_while(cause: Cause) -> None:
    d = ProvingDecode()
    first, second = d.add("first"), d.add("second")
    d.becomes_canary(first)
    assert d.asks(second) is None
    d.report(first, failure="no answer", cause=cause, samples=0)
    assert d.schedules(second) == 69
    (refusal,) = d.step().refusals
    assert (refusal.cause, refusal.reason) == (cause, "no answer")
    d.clock.advance(module._RETRY_S)
    assert d.becomes_canary(d.add("third"))


def test_an_engine_of_no_use_is_refused_for_good() -> None:
    d = ProvingDecode()
    first = d.add("first")
    d.becomes_canary(first)
    d.report(first, failure="head_size is 64 here and 32 there", cause=Cause.INCOMPATIBLE, samples=0)
    d.clock.advance(1e6)
    assert d.schedules(d.add("second")) == 69
    assert d.step().refusals[0].cause is Cause.INCOMPATIBLE


def test_if_one_rank_fails_the_others_wait_for_nothing() -> None:
    d = ProvingDecode()
    first = d.add("first")
    d.becomes_canary(first)
    d.settle(Report(canaries={"first": CanaryEnds(1, cause=Cause.READ, failure="no")}))
    assert d.step().references == (CanaryReference("first"),)
    first.num_output_tokens = 1
    assert d.step().references == ()
    d.settle(Report(canaries={"first": CanaryEnds(1)}))
    assert d.counted() == {"canaries:failed": 1}


def test_what_compares_nothing_proves_nothing() -> None:
    d = ProvingDecode()
    d.proves(d.add("first"), samples=0)
    assert d.canaries.look(d.add("second"), a_remote_of("P")) is Standing.UNTRIED
    assert d.counted() == {"canaries:failed": 1}


# It leaves


@pytest.mark.parametrize("how", ["aborted", "preempted", "preempted and ended"])
def test_after_a_canary_that_leaves_before_it_was_computed_the_next_one_serves(how: str) -> None:
    d = ProvingDecode()
    first, second = d.add("first"), d.add("second")
    d.becomes_canary(first)
    if how == "aborted":
        d.leave(first)
    else:
        first.num_preemptions, first.num_output_tokens = 1, 1
    if how == "preempted and ended":
        d.leave(first)
    assert d.step().references == (CanaryReference("first"),)
    assert d.asks(second) is None, "its area is in use"
    d.report(first, samples=0)
    assert d.counted() == {"canaries:left": 1}
    assert d.becomes_canary(second)


def test_a_second_request_of_the_same_name_is_none_while_the_first_ones_canary_goes_on() -> None:
    d = ProvingDecode()
    first = d.add("first")
    d.becomes_canary(first)
    d.leave(first)
    again = d.add("first")
    d.leave(again)
    d.report(first, samples=0)


# Resets


def test_a_reset_forgets_verdicts_and_what_is_under_way() -> None:
    """New weights, for example: what agreed with the old ones proves nothing."""
    d = ProvingDecode()
    d.proves(d.add("first"))
    other = d.add("other", engine="Q")
    d.becomes_canary(other)
    d.computes(other)
    assert d.canaries.device_references() == dict.fromkeys(PROVING_BLOCKS, 1)
    assert d.canaries.reset()
    assert d.held == []
    assert d.canaries.device_references() == {}
    d.report(other, difference="what was computed is gone")
    assert d.counted() == {"canaries:proven": 1, "canaries:left": 1}
    assert d.canaries.look(d.add("second"), a_remote_of("P")) is Standing.UNTRIED


def test_after_a_reset_nobody_rests() -> None:
    """What failed may have been of the weights, or the network, of before."""
    d = ProvingDecode()
    first = d.add("first")
    d.becomes_canary(first)
    d.report(first, failure="no", cause=Cause.READ, samples=0)
    assert d.canaries.reset()
    assert d.becomes_canary(d.add("second"))


def test_verdicts_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_MAX_VERDICTS", 2)
    d = ProvingDecode()
    for name in ("a", "b", "c"):
        d.proves(d.add(name, engine=name))
        assert d.canaries.look(d.add(f"beside {name}"), a_remote_of("a")) is Standing.PROVEN
    looks = [d.canaries.look(d.add(f"again {name}"), a_remote_of(name)) for name in ("a", "b", "c")]
    assert looks == [Standing.PROVEN, Standing.UNTRIED, Standing.PROVEN], "what nobody asks for is forgotten"
