"""Tokens of steps that were under way when vLLM preempted their request, which has other blocks since.

vLLM 0.23 takes such a token as the request's own, and so does vllm-ascend's balance scheduler.

Covers: pd_connector.scheduler.prefill.announcer, pd_connector.scheduler.prefill.producer.
"""

from collections import Counter
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest

from pd_connector.scheduler.prefill.announcer import Announcer
from pd_connector.vllm.device_blocks import DeviceBlocks
from tests.support.connector.requests import FakeRequest, a_prompt
from tests.support.releases import INSTALLED
from tests.support.simulation.named_prefill import StartPrefill

PROMPT = 80


def test_a_prompt_that_is_to_be_computed_again_is_not_leased(start_prefill: StartPrefill) -> None:
    """The harness compares with memory what is leased. Three steps are under way, as in a pipeline of three stages."""
    with patch("pd_connector.scheduler.scheduler.steps_in_flight", lambda config: 5):
        engine = start_prefill(blocks=10, chunk_tokens=32)
    engine.ask("read soon", a_prompt(32))
    engine.run()
    grows = engine.ask("grows", a_prompt(31, seed=2))
    grows.sampling_params.max_tokens = grows.max_tokens = 40
    engine.step()
    request = engine.ask("r", a_prompt(PROMPT, seed=1))
    steps = [engine.schedule() for _ in range(3)]
    engine.end(steps.pop(0))
    steps.append(engine.schedule())
    assert request.num_preemptions == 1, "the request that grows needs a block"
    engine.end(steps.pop(0))
    engine.service.leases.cancel_all()  # it has been read: its blocks are free
    steps.append(engine.schedule())
    assert request.num_computed_tokens == PROMPT, "the same step computes what the prefix cache lacks"
    engine.end(steps.pop(0))
    if INSTALLED < (0, 30):
        assert engine.ended["r"] == "length"
        assert engine.answers["r"] is None
        return
    assert "r" not in engine.ended, "vLLM drops the token"
    while "r" not in engine.ended:
        engine.end(steps.pop(0))
    assert engine.answers["r"] is not None


class Counted(FakeRequest):
    """A request of a vLLM that counts its tokens under way."""

    num_in_flight_tokens = 0


@pytest.fixture
def announcer() -> Announcer:
    """Of an engine that has at most three steps under way."""
    service: Any = SimpleNamespace(block_tokens=(16,), transfers=None)
    return Announcer(service, DeviceBlocks(), Counter(), steps_in_flight=4)


def take_steps(announcer: Announcer, request: FakeRequest, *steps: Mapping[str, int]) -> None:
    """Schedule steps, of which the request is in some."""
    for scheduled in steps:
        announcer.schedule(scheduled)
        request.num_computed_tokens += scheduled.get(request.request_id, 0)


@pytest.mark.parametrize("counted", [False, True], ids=["vLLM does not count", "vLLM counts"])
@pytest.mark.parametrize(
    ("between", "lacks"), [(0, True), (1, True), (2, False), (5, False)], ids="{} steps later".format
)
def test_an_attempt_is_told_from_the_one_before(announcer: Announcer, counted: bool, between: int, lacks: bool) -> None:
    """As long as a step of the earlier one may be under way."""
    made = (Counted if counted else FakeRequest)("r", [0] * PROMPT)
    announcer.add(made)
    take_steps(announcer, made, {"r": PROMPT})
    assert not announcer.may_lack_tokens(made)
    made.num_preemptions, made.num_computed_tokens = 1, 0
    take_steps(announcer, made, *[{"other": 1}] * between, {"r": PROMPT})
    if isinstance(made, Counted):
        made.num_in_flight_tokens = PROMPT if lacks else 0
    assert announcer.may_lack_tokens(made) is lacks
