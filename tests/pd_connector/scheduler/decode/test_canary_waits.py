"""Who waits for a canary of a decode engine, and for how long.

Covers: pd_connector.scheduler.decode.canaries.
"""

from pd_connector.orders import Cause
from pd_connector.scheduler.decode.canaries import Canaries, Standing
from pd_connector.vllm.cache_specs import Retention
from pd_connector.vllm.device_blocks import DeviceBlocks
from tests.support.connector.proving import ProvingDecode
from tests.support.connector.requests import a_remote


def test_others_wait_for_the_verdict_without_blocks_and_then_pull() -> None:
    d = ProvingDecode()
    first, second = d.add("first"), d.add("second")
    d.becomes_canary(first)
    assert d.asks(second) is None
    assert d.consumer.waiting == 0, "it does not wait for blocks"
    d.computes(first)
    d.report(first)
    assert d.schedules(second) == 69


def test_who_waits_for_another_engines_verdict_does_not_hide_who_waits_for_blocks() -> None:
    d = ProvingDecode()
    d.proves(d.add("first"))
    d.becomes_canary(d.add("other", engine="Q"))
    named, waits = d.add("named", engine="Q"), d.add("waits")
    assert d.asks(named) is None
    d.consumer._legs.drop("named")  # one that is followed is not among them, and waits for a verdict as well
    assert d.asks(waits) == 69
    assert d.consumer.waiting == 1


def test_what_is_at_another_address_decides_nothing_about_an_engine() -> None:
    """Params come from clients."""
    d = ProvingDecode()
    wrong = d.add("wrong", remote_host="10.9.9.9")
    d.becomes_canary(wrong)
    right = d.add("right")
    d.becomes_canary(right)
    d.report(wrong, failure="head_size is 64 here and 32 there", cause=Cause.INCOMPATIBLE, samples=0)
    d.computes(right)
    d.report(right)
    assert d.schedules(d.add("second")) == 69
    assert len(d.step().pulls) == 1
    assert d.schedules(d.add("wrong-too", remote_host="10.9.9.9")) == 69
    assert d.step().refusals[0].cause is Cause.INCOMPATIBLE


def test_a_prompt_from_another_engine_does_not_wait() -> None:
    d = ProvingDecode()
    d.becomes_canary(d.add("first"))
    assert d.becomes_canary(d.add("other", engine="Q"))


def test_as_long_as_the_canary_is_computed_others_wait() -> None:
    """A long prompt takes more than ten seconds."""
    d = ProvingDecode()
    first, second = d.add("first"), d.add("second")
    d.becomes_canary(first)
    for _ in range(5):
        assert d.asks(second) is None
        d.clock.advance(9.9)
        first.num_computed_tokens += 1
    assert d.asks(second) is None
    d.clock.advance(10.1)
    assert d.schedules(second) == 69
    assert [refusal.cause for refusal in d.step().refusals] == [Cause.CANARY]


def test_what_the_canary_decodes_is_no_progress_of_its_proof() -> None:
    d = ProvingDecode()
    first, second = d.add("first"), d.add("second")
    d.becomes_canary(first)
    for tokens in range(70, 180):
        first.num_computed_tokens = tokens
        if d.asks(second) is not None:
            break
        d.clock.advance(0.1)
    assert d.schedules(second) == 69
    assert [refusal.cause for refusal in d.step().refusals] == [Cause.CANARY]


def test_who_has_waited_ten_seconds_goes_by_policy() -> None:
    d = ProvingDecode()
    d.becomes_canary(d.add("first"))
    second = d.add("second")
    assert d.asks(second) is None
    d.clock.advance(9.9)
    assert d.asks(second) is None
    d.clock.advance(0.2)
    assert d.schedules(second) == 69
    (refusal,) = d.step().refusals
    assert refusal.cause is Cause.CANARY
    assert "request first is computed here and pulled from there as well" in refusal.reason
    assert "for 10 s nothing was computed of it, and there was no verdict. Send the request again" in refusal.reason
    assert d.client.cancelled() == ["lease-of-second"]


def test_nothing_lands_that_is_not_proven() -> None:
    d = ProvingDecode()
    first, second = d.add("first"), d.add("second")
    assert not d.consumer.may_land(first)
    d.becomes_canary(first)
    d.computes(first)
    d.report(first)
    assert d.consumer.may_land(second)


def test_before_workers_are_known_nothing_is_proven() -> None:
    d = ProvingDecode()
    canaries = Canaries(DeviceBlocks(), [Retention(16)], clock=d.clock)
    first = d.add("first")
    assert canaries.look(first, a_remote([0] * 70, remote_engine_id="P")) is Standing.UNTRIED
    assert not canaries.begin(first, a_remote([0] * 70, remote_engine_id="P"), 0, is_same_prompt=True)
