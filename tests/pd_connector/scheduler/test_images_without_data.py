"""Images of which a decode engine gets the shape alone: pulled, and never given to vLLM's encoder, by its schedulers.

The simulated worker ends as vLLM's does if its encoder gets one.
"""

import logging
from typing import Any

import pytest
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.request import RequestStatus

from tests.support.releases import module_needs
from tests.support.simulation.vllm_schedulers import ClientRequest, EngineSim, World

module_needs((0, 30), "images without data on decode engines")

PROMPT = list(range(60))


def a_prompt(name: str, decodes_on: EngineSim | None = None, *, behind: int = 20, **given: Any) -> ClientRequest:
    """A request with an image in its prompt, of which a decode engine is shown the shape."""
    return ClientRequest(name, PROMPT, 4, decodes_on, image=30, behind_image=behind, **{"shown": "shape", **given})


def test_one_that_comes_to_a_decode_engine_ends_with_an_error_and_others_go_on(
    world: World, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    decode = EngineSim(world, "kv_consumer", 60)
    monkeypatch.setattr(logging.getLogger("pd_connector"), "propagate", True)
    of_text = ClientRequest("text", [1000 + token for token in PROMPT], 2)
    requests = [a_prompt("first"), of_text, a_prompt("last"), a_prompt("whole", shown="whole")]
    for each in requests:
        decode.ask(each)
    world.run(10.0)
    assert [each.ended for each in requests] == ["failed", "finished", "failed", "finished"]
    assert decode.counts["images"] == 1
    told = [record.getMessage() for record in caplog.records if record.levelno == logging.ERROR]
    assert [message.partition(": of an image")[0] for message in told] == [
        f"PDConnector: request {name}-d ends with an error" for name in ("first", "last")
    ]
    assert decode.blocks_in_use == 0


def test_it_ends_once_if_another_step_is_scheduled_before_the_end_of_the_first(
    world: World, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    decode = EngineSim(world, "kv_consumer", 60)
    monkeypatch.setattr(logging.getLogger("pd_connector"), "propagate", True)
    decode.ask(asked := a_prompt("a"))
    under_way = [decode.begin_step(), decode.begin_step()]
    for step in under_way:
        assert step is not None
        decode.end_step(*step)
    assert asked.ended == "failed"
    assert not decode.scheduler.requests
    assert caplog.text.count("request a-d ends") == 1


def test_an_engine_that_pulls_nothing_computes_what_vllm_lets_it(world: World) -> None:
    """There, vLLM takes no images without data: whatever looks like one is for its encoder to judge."""
    prefill = EngineSim(world, "kv_producer", 60)
    prefill.ask(a_prompt("a"))
    with pytest.raises(AssertionError, match="an encoder finds nothing to look at"):
        world.run(10.0)


def test_one_behind_more_tokens_than_a_step_has_ends_when_its_turn_comes(world: World) -> None:
    decode = EngineSim(world, "kv_consumer", 60)
    decode.ask(asked := ClientRequest("a", list(range(400)), 4, image=30, behind_image=20, shown="shape"))
    world.run(10.0)
    assert asked.ended == "failed"
    assert decode.computed_tokens == 256  # of the first step
    assert decode.blocks_in_use == 0


def test_one_that_is_pulled_is_served_and_the_prefill_engine_has_looked_at_it(world: World) -> None:
    prefill, decode = EngineSim(world, "kv_producer", 60), EngineSim(world, "kv_consumer", 60)
    prefill.ask(asked := a_prompt("a", decode))
    world.run(10.0)
    assert asked.ended == "finished"
    assert (decode.counts["pulled"], prefill.counts["images"], decode.counts["images"]) == (1, 1, 0)


@pytest.mark.parametrize(
    ("why", "settings", "changes"),
    [
        ("P is not proven", {"canary": "refuse"}, {}),
        ("the last token is the image's", {}, {"behind": 0}),
        ("all of the prompt is to be computed", {}, {"sampling": {"prompt_logprobs": 1}}),
    ],
)
def test_one_that_would_be_computed_beside_or_behind_a_pull_ends_with_an_error(
    world: World, why: str, settings: dict[str, Any], changes: dict[str, Any]
) -> None:
    prefill, decode = EngineSim(world, "kv_producer", 60), EngineSim(world, "kv_consumer", 60, **settings)
    prefill.ask(asked := a_prompt("a", decode, **changes))
    world.run(10.0)
    assert asked.ended == "failed", why
    world.run(60.0)
    assert (prefill.leases, decode.blocks_in_use) == (0, 0)


def test_a_prefill_engine_is_proven_by_a_text_when_one_of_a_later_step_has_failed_to(world: World) -> None:
    prefill, decode = EngineSim(world, "kv_producer", 80), EngineSim(world, "kv_consumer", 80, canary="refuse")
    late = ClientRequest("late", list(range(400)), 4, decode, image=30, behind_image=20, shown="shape")
    of_text, asked = ClientRequest("text", list(range(1000, 1060)), 2, decode), a_prompt("a", decode)
    for each in (late, of_text, asked):
        prefill.ask(each)
        world.run(30.0)
    assert [each.ended for each in (late, of_text, asked)] == ["failed", "finished", "finished"]
    assert (decode.counts["canaries: left"], decode.counts["canaries: proven"], decode.counts["pulled"]) == (1, 1, 1)
    assert (prefill.leases, decode.blocks_in_use) == (0, 0)


def test_one_whose_pull_fails_ends_with_an_error_although_prompts_are_computed_then(world: World) -> None:
    prefill, decode = EngineSim(world, "kv_producer", 60), EngineSim(world, "kv_consumer", 60, "recompute")
    prefill.ask(asked := a_prompt("a", decode))
    prefill.step()
    prefill.service.leases.revoke_oldest()
    world.run(60.0)
    assert decode.counts["pulled"] == 0
    assert asked.ended == "failed"


def test_one_that_was_pulled_and_is_preempted_ends_with_an_error(world: World) -> None:
    prefill, decode = EngineSim(world, "kv_producer", 60), EngineSim(world, "kv_consumer", 60)
    prefill.ask(asked := a_prompt("a", decode))
    while not decode.scheduler.running:
        world.step()
    request = decode.scheduler.running.pop()
    decode.scheduler._preempt_request(request, 0.0)
    decode.scheduler.kv_cache_manager.reset_prefix_cache()  # what it has computed is evicted meanwhile
    assert request.status is RequestStatus.PREEMPTED
    world.run(10.0)
    assert asked.ended == "failed"


def test_schedulers_that_are_derived_from_vllms_have_what_is_added(world: World) -> None:
    EngineSim(world, "kv_consumer", 60)
    assert AsyncScheduler._try_schedule_encoder_inputs.wrapped_by_pd_connector
