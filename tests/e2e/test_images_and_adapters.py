"""Prompts with images, prompts for LoRA adapters, and a decode server that drafts tokens, all on one pair of servers.

Prompts of different tests begin with different text, so that none finds another one's in a prefix cache.
"""

import itertools
import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any
from unittest.mock import ANY

import pytest

from tests.support.e2e.api_clients import ANSWERS_BY_SCHEMA, CALLS_OF_TOOLS, ApiClient, Told
from tests.support.e2e.choice import rarely
from tests.support.e2e.client import LOGPROB_TOLERANCE, MODEL_NAME, Chat
from tests.support.e2e.cluster import BLOCK_SIZE
from tests.support.e2e.corruption import overwrite_block
from tests.support.e2e.deployments import on
from tests.support.e2e.fixtures import Acquaintance, meet
from tests.support.e2e.images import Image, make_image
from tests.support.e2e.images_and_adapters import ADAPTERS, IMAGES_AND_ADAPTERS, about
from tests.support.e2e.legs import Router
from tests.support.e2e.pair import Pair, assert_failed_pull, assert_same_output, end_lease, make_prompt, make_text
from tests.support.examples.harness import ProxyProcess

ALL_IMAGES = tuple(make_image(seed) for seed in range(6))
ONE, OTHER = ALL_IMAGES[:2]
MODELS = (MODEL_NAME, *ADAPTERS)

pytestmark = [
    on(IMAGES_AND_ADAPTERS),
    pytest.mark.parametrize("pair", [("P", "D")], indirect=True, ids="-".join),
]


@pytest.fixture(autouse=True)
def proven(pair: Pair, acquainted: set[Acquaintance]) -> None:
    """D pulls for each adapter."""
    for model in ADAPTERS:
        meet(pair, acquainted, model)


def assert_pulls_right(pair: Pair, prompt: Chat) -> None:
    """A prompt is pulled whole, and gives the output that P, which does not draft, computes from it alone."""
    _, completion = pair.assert_pulls_all(prompt)
    assert_same_output(completion, pair.prefill.client.compute(prompt))


def assert_all_differ(pair: Pair, prompts: list[Chat]) -> None:
    """No two of these prompts have the same output: one that is taken for another is noticed."""
    outputs = [pair.prefill.client.compute(prompt) for prompt in prompts]
    for one, other in itertools.combinations(outputs, 2):
        assert one.logprob_difference(other) > 5 * LOGPROB_TOLERANCE


@pytest.mark.images
class TestImages:
    @pytest.mark.parametrize(
        ("images", "characters"),
        [
            pytest.param((ONE,), 8, marks=pytest.mark.slow, id="1-8"),
            pytest.param((ONE,), 300, marks=pytest.mark.slow, id="1-300"),
            pytest.param(ALL_IMAGES, 8, marks=pytest.mark.slow, id="6-8"),
            pytest.param(ALL_IMAGES, 300, id="6-300"),
        ],
    )
    def test_a_pulled_prompt_gives_the_same_output(
        self, pair: Pair, images: tuple[Image, ...], characters: int
    ) -> None:
        assert_pulls_right(pair, about(*images, seed=("images", len(images)), characters=characters))

    def test_another_image_order_or_letter_changes_the_output(self, pair: Pair) -> None:
        before, after = make_text(100, "sensitive"), make_text(100, "to images")
        images = [(), (ONE,), (OTHER,), (ONE, OTHER), (OTHER, ONE)]
        letters = [Chat((f"{before}!", ONE, after)), Chat((before, ONE, f"!{after}"))]
        assert_all_differ(pair, [*(Chat((before, *each, after)) for each in images), *letters])

    def test_the_same_text_around_another_image_is_not_taken_from_the_prefix_cache(self, pair: Pair) -> None:
        """The images come first: with one that is mixed up, all that follows would be found."""
        text = make_text(200, "one text")
        for image in ALL_IMAGES[2:]:
            assert_pulls_right(pair, Chat((image, text)))

    @pytest.mark.slow
    def test_what_follows_a_prompt_that_the_decode_server_holds_is_pulled(self, pair: Pair) -> None:
        before = about(ONE, OTHER, seed="partial hit")
        pair.assert_pulls_behind(before, Chat((*before.parts, OTHER, "and more")))

    def test_other_contents_of_a_block_of_an_image_change_the_output(self, pair: Pair) -> None:
        """It is pulled: the decode server sees no pixels of a prompt whose blocks it has."""
        prompt = about(ONE, seed="corrupted", characters=4 * BLOCK_SIZE)
        params = pair.prefill.client.prefill(prompt, cache_salt="corrupted")
        overwrite_block(pair.prefill, params, group=0, entry=2)
        wrong = pair.decode_leg(prompt, params, cache_salt="corrupted")
        assert wrong.status == 200, wrong.body
        assert wrong.logprob_difference(pair.decode.client.compute(prompt)) > 5 * LOGPROB_TOLERANCE

    @pytest.mark.parametrize("decode_first_s", [0.3, rarely(-0.3)])
    def test_both_legs_at_once_give_the_same_output(self, pair: Pair, decode_first_s: float) -> None:
        prompt = about(*ALL_IMAGES, seed=("legs", decode_first_s), characters=1000)
        Router(pair).assert_right(prompt, decode_first_s=decode_first_s)


@pytest.mark.adapters
class TestAdapters:
    def test_adapters_change_the_output(self, pair: Pair) -> None:
        kinds = itertools.product(MODELS, ((), (ONE,)))
        assert_all_differ(pair, [about(*images, seed="adapters", model=model) for model, images in kinds])

    @pytest.mark.slow
    @pytest.mark.parametrize("images", [pytest.param((), id="text"), pytest.param((ONE,), id="image")])
    def test_the_same_prompt_is_pulled_for_each_adapter_and_gives_its_output(
        self, pair: Pair, images: tuple[Image, ...]
    ) -> None:
        for model in MODELS:
            assert_pulls_right(pair, about(*images, seed=("for each", len(images)), model=model))

    def test_a_prompt_that_was_prefilled_for_another_adapter_is_refused(self, pair: Pair) -> None:
        red, blue = (about(seed="other adapter", model=model) for model in ADAPTERS)
        params = pair.prefill.client.prefill(red)
        assert_failed_pull(pair, blue, params, "params", ("prompt",))
        end_lease(params)

    def test_prompts_of_all_kinds_at_the_same_time_give_the_same_outputs(self, pair: Pair) -> None:
        kinds = itertools.product(MODELS, ((), (ONE,), (OTHER,), (OTHER, ONE)))
        pair.assert_all_pull_right([about(*images, seed="mixed", model=model) for model, images in kinds])


@pytest.mark.drafts
class TestDrafts:
    @pytest.mark.parametrize("model", [rarely(MODEL_NAME), ADAPTERS[0]])
    def test_the_answer_to_a_pulled_prompt_is_that_of_a_server_that_does_not_draft(
        self, pair: Pair, model: str
    ) -> None:
        prompt = about(ONE, seed="drafts", model=model)
        with pair.traffic() as traffic:
            completion = pair.disaggregate(prompt, 100)
        assert traffic.source("external_kv_transfer") == len(prompt) - 1
        assert_same_output(completion, pair.prefill.client.compute(prompt, 100))
        assert traffic.decode is not None
        assert traffic.decode.value("vllm:spec_decode_num_draft_tokens_total") > 0
        if model in ADAPTERS:  # whose answers repeat themselves
            assert traffic.decode.value("vllm:spec_decode_num_accepted_tokens_total") > 0
        assert "vllm:spec_decode_num_drafts" not in pair.prefill.client.metrics().families


@pytest.mark.routers
class TestApis:
    """The proxy in front of the pair: both legs in turn, then, as it knows P's control address, at once."""

    @pytest.fixture
    def proxy(self, pair: Pair) -> Iterator[str]:
        urls = pair.prefill.client.base_url, pair.decode.client.base_url
        with ProxyProcess(["-m", "pd_proxy", "--prefill", urls[0], "--decode", urls[1]]) as process:
            yield process.url

    def assert_told_right(self, pair: Pair, proxy: str, api: str, prompt: Chat, tokens: int, **asked: Any) -> Told:
        """The prompt is pulled, and the client told what P alone tells; returns that."""
        with pair.traffic() as traffic:
            told = ApiClient(proxy, tokens).told(api, prompt, **asked)
        assert (traffic.pulled("pulls"), traffic.failures()) == (1, 0)
        alone = ApiClient(pair.prefill.client.base_url, tokens).told(api, prompt, **asked)
        assert told.logprobs == pytest.approx(alone.logprobs, abs=LOGPROB_TOLERANCE)
        assert replace(told, logprobs=()) == replace(alone, logprobs=())
        return told

    @pytest.mark.parametrize(
        ("api", "stream"),
        [
            ("responses", False),
            ("messages", True),
            *(pytest.param(*each, marks=pytest.mark.slow) for each in (("responses", True), ("messages", False))),
        ],
    )
    def test_a_chat_is_pulled_and_answered_as_p_alone_does(
        self, pair: Pair, proxy: str, api: str, stream: bool
    ) -> None:
        for legs in ("in turn", "at once"):
            prompt = about(ONE, seed=("api", api, legs, stream), model=ADAPTERS[stream])
            asked = {"ignore_eos": True} if api == "responses" else {}
            told = self.assert_told_right(pair, proxy, api, prompt, 16, stream=stream, **asked)
            assert len(told.text) >= 16, "a token has at least a character"

    @pytest.mark.parametrize("stream", [pytest.param(False, marks=pytest.mark.slow, id="whole"), True])
    @pytest.mark.parametrize("api", ["chats", "responses", "messages"])
    def test_calls_of_tools_are_those_of_p_alone(self, pair: Pair, proxy: str, api: str, stream: bool) -> None:
        for legs in ("in turn", "at once"):
            prompt = about(seed=("tools", api, legs, stream))
            told = self.assert_told_right(pair, proxy, api, prompt, 120, stream=stream, **CALLS_OF_TOOLS[api])
            assert [(name, json.loads(arguments)["city"]) for name, arguments in told.calls] == [("look_up", ANY)]

    @pytest.mark.parametrize("stream", [pytest.param(False, marks=pytest.mark.slow, id="whole"), True])
    @pytest.mark.parametrize("api", ["chats", "responses", "messages"])
    def test_reasoning_is_that_of_p_alone(self, pair: Pair, proxy: str, api: str, stream: bool) -> None:
        for legs in ("in turn", "at once"):
            prompt = Chat((make_text(200, ("reasoning", api, legs, stream)), "<think>"))
            asked = {"chat_template_kwargs": {"thinking": True}, "stream": stream}
            asked |= {"thinking_token_budget": 10} if api == "chats" else {}  # the model by itself may think on and on
            told = self.assert_told_right(pair, proxy, api, prompt, 30, **asked)
            assert told.reasoning
            assert told.text or api != "chats"

    @pytest.mark.parametrize("stream", [pytest.param(False, marks=pytest.mark.slow, id="whole"), True])
    @pytest.mark.parametrize("api", ["chats", "responses", "messages"])
    def test_answers_by_a_schema_and_their_log_probabilities_are_those_of_p_alone(
        self, pair: Pair, proxy: str, api: str, stream: bool
    ) -> None:
        for legs in ("in turn", "at once"):
            prompt = about(seed=("schema", api, legs, stream))
            told = self.assert_told_right(pair, proxy, api, prompt, 40, stream=stream, **ANSWERS_BY_SCHEMA[api])
            assert told.text.startswith('{"numbers')
            assert len(told.logprobs) == (0 if api == "messages" else 40)  # that API has none

    def test_tokens_are_pulled_and_answered_as_p_alone_does(self, pair: Pair, proxy: str) -> None:
        for legs, stream in (("in turn", False), ("at once", True)):
            prompt = make_prompt(100, ("tokens in, tokens out", legs))
            with pair.traffic() as traffic:
                answer = ApiClient(proxy).generate(prompt, stream=stream)
            assert traffic.pulled("pulls") == 1
            assert answer == ApiClient(pair.prefill.client.base_url).generate(prompt, stream=False)
            assert len(answer) == 16
