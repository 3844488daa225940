"""Models of which some layers keep states: recurrent ones, and convolutions.

The last prompt token is left to the decode server. So its answers are those of a server that computes this token in a
step of its own: the same bits at equal tensor parallel sizes, and up to rounding otherwise.
"""

import pytest

from tests.support.e2e.client import LOGPROB_TOLERANCE
from tests.support.e2e.corruption import spoil_number
from tests.support.e2e.deployments import on
from tests.support.e2e.hybrid_deployments import GRANITE, GRANITE_STEP, QWEN3_NEXT, QWEN3_NEXT_BLOCK
from tests.support.e2e.legs import Router
from tests.support.e2e.pair import Pair, make_prompt

pytestmark = pytest.mark.cache_kinds
SAME, FEWER, MORE = ("P1", "D1"), ("P2", "D1"), ("P1", "D2")


def pairs(*names: tuple[str, str]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("pair", names, indirect=True, ids="-".join)


def assert_same_bits(pair: Pair, prompt: list[int]) -> None:
    completion = pair.disaggregate(prompt)
    reference = pair.decode.client.compute(prompt, len(completion.tokens))
    assert (completion.tokens, completion.logprobs) == (reference.tokens, reference.logprobs)


@on(GRANITE)
class TestOneStateOfARequest:
    """At pairs of tensor parallel sizes."""

    @pairs(SAME, FEWER, MORE, ("P2", "D2"))
    @pytest.mark.parametrize("tokens", [2, 33, 97, 1000])
    def test_a_pulled_prompt_gives_the_same_output(self, pair: Pair, tokens: int) -> None:
        pair.assert_pulls_right(make_prompt(tokens, (tokens, pair.name)))

    @pairs(SAME)
    def test_every_bit_is_the_same(self, pair: Pair) -> None:
        assert_same_bits(pair, make_prompt(3 * GRANITE_STEP + 1, (pair.name, "bits")))

    @pairs(FEWER, MORE)
    def test_both_legs_at_once(self, pair: Pair) -> None:
        Router(pair).assert_right(make_prompt(1000, (pair.name, "legs")), decode_first_s=0.3)

    @pairs(FEWER)
    def test_concurrent_prompts_give_the_same_outputs(self, pair: Pair) -> None:
        pair.assert_concurrent_pulls_right(4)

    @pairs(FEWER)
    @pytest.mark.parametrize("part", ["state", "conv_b", "v"])
    def test_one_wrong_number_changes_the_output(self, pair: Pair, part: str) -> None:
        """In every kind of cache: none of them is moved in vain."""
        prompt = make_prompt(300, (pair.name, "spoilt", part))
        right = pair.decode.client.compute(prompt)
        params = pair.prefill.client.prefill(prompt)
        spoil_number(pair.prefill, params, part)
        wrong = pair.decode_leg(prompt, params)
        assert wrong.status == 200, wrong.body
        assert wrong.logprob_difference(right) > 5 * LOGPROB_TOLERANCE

    @pairs(FEWER)
    def test_the_prefill_server_does_not_go_on_though_it_is_asked_to(self, pair: Pair) -> None:
        prompt = make_prompt(300, (pair.name, "more tokens"))
        leg = pair.prefill.client.complete(prompt, 8, kv_transfer_params={"do_remote_decode": True})
        assert leg.kv_transfer_params is not None
        assert leg.kv_transfer_params["prompt_is_cut"]
        assert leg.kv_transfer_params["remote_num_tokens"] == 300
        pair.assert_right(pair.decode_leg(prompt, leg.kv_transfer_params), prompt)

    @pairs(FEWER)
    def test_of_a_prompt_of_one_token_nothing_is_pulled(self, pair: Pair) -> None:
        prompt = make_prompt(1, (pair.name, "one"))
        with pair.traffic() as traffic:
            pair.assert_right(pair.disaggregate(prompt, 1), prompt)
        assert (traffic.pulled("pulls"), traffic.leases("granted"), traffic.leases("cancelled")) == (0, 1, 1)


@on(QWEN3_NEXT)
@pairs(("P", "D"))
class TestStatesAtBorders:
    @pytest.mark.parametrize("blocks", [1, 3])
    def test_every_bit_is_the_same(self, pair: Pair, blocks: int) -> None:
        assert_same_bits(pair, make_prompt(blocks * QWEN3_NEXT_BLOCK + 1, (pair.name, blocks)))

    def test_the_next_turn_pulls_only_what_is_new(self, pair: Pair) -> None:
        """Both servers find its beginning, up to the last border before it ended."""
        turn = make_prompt(4 * QWEN3_NEXT_BLOCK + 1, (pair.name, "turns"))
        pair.disaggregate(turn[:700])
        with pair.traffic() as traffic:
            completion = pair.disaggregate(turn)
        reference = pair.decode.client.compute(turn, len(completion.tokens))
        assert (completion.tokens, completion.logprobs) == (reference.tokens, reference.logprobs)
        held = 2 * QWEN3_NEXT_BLOCK
        assert traffic.source("local_cache_hit") == held
        assert traffic.source("external_kv_transfer") == len(turn) - 1 - held
        assert traffic.prefill is not None
        assert traffic.prefill.prompt_tokens("local_cache_hit") == held

    def test_a_prompt_that_the_prefill_server_knows_already(self, pair: Pair) -> None:
        """Its last token is not there, whatever was computed of it for others."""
        prompt = make_prompt(2 * QWEN3_NEXT_BLOCK + 1, (pair.name, "twice"))
        pair.prefill.client.complete(prompt)
        assert_same_bits(pair, prompt)
