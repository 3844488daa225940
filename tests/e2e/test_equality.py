"""A prompt that was prefilled elsewhere gives the tokens and logprobs that it gives without disaggregation.

Every test also proves by the decode server's counters that the prompt was pulled and not computed there.
"""

import pytest

from tests.support.e2e.choice import on_pairs, pairs
from tests.support.e2e.client import LOGPROB_TOLERANCE
from tests.support.e2e.cluster import BLOCK_SIZE
from tests.support.e2e.corruption import overwrite_block
from tests.support.e2e.deployments import BHLNC, BLHNC, FAULTS, LBHNC, MIXED
from tests.support.e2e.pair import Pair, assert_same_output, make_prompt

EQUAL_SIZES = [("P1", "D1"), ("P2", "D2")]
UNEQUAL_SIZES = [("P2", "D1"), ("P1", "D2")]
EQUAL_LAYOUTS = (LBHNC, BLHNC, BHLNC)
IN_EQUAL_LAYOUTS = [one for each in EQUAL_LAYOUTS for one in pairs(each, EQUAL_SIZES)]

pytestmark = pytest.mark.equality


@on_pairs(
    pairs(MIXED, [("TP2", "TP1"), ("TP1", "TP2")], (2, 33, 64, 1000)),
    *(pairs(each, EQUAL_SIZES, (2, 31, 32, 33, 1000)) for each in EQUAL_LAYOUTS),
    *(pairs(each, UNEQUAL_SIZES, (33, 1000)) for each in EQUAL_LAYOUTS),
    value="tokens",
)
def test_a_pulled_prompt_gives_the_same_output(pair: Pair, tokens: int) -> None:
    traffic = pair.assert_pulls_right(make_prompt(tokens, (tokens, pair.name)))
    # What lies together on P is read together, through staging where it is apart on D.
    if tokens == 1000 and pair.prefill.spec.tensor_parallel >= pair.decode.spec.tensor_parallel:
        blocks = -(-tokens // BLOCK_SIZE)
        assert traffic.pulled("pull_descriptors") < 4 * blocks * pair.decode_ranks


@on_pairs(*(pairs(each, EQUAL_SIZES + UNEQUAL_SIZES) for each in EQUAL_LAYOUTS))
def test_sixteen_concurrent_prompts_give_the_same_outputs(pair: Pair) -> None:
    pair.assert_concurrent_pulls_right(16)


@on_pairs(pairs(MIXED, [("TP1", "TP2")]), IN_EQUAL_LAYOUTS)
class TestPrefixHits:
    def test_only_blocks_that_the_decode_server_does_not_hold_are_pulled(self, pair: Pair) -> None:
        pair.assert_pulls_the_rest(make_prompt(200, (pair.name, "partial hit")), computed_before=100)

    def test_pulled_blocks_serve_later_prompts_from_the_prefix_cache(self, pair: Pair) -> None:
        prompt = make_prompt(300, (pair.name, "reuse"))
        pair.disaggregate(prompt)
        with pair.traffic() as traffic:
            completion = pair.decode.client.complete(prompt)
        assert traffic.source("local_cache_hit") == 299 // BLOCK_SIZE * BLOCK_SIZE
        pair.assert_right(completion, prompt)

    def test_a_prompt_that_the_decode_server_holds_is_not_pulled(self, pair: Pair) -> None:
        prompt = make_prompt(2 * BLOCK_SIZE + 1, (pair.name, "full hit"))
        pair.disaggregate(prompt)
        with pair.traffic() as traffic:
            completion = pair.disaggregate(prompt)
        assert traffic.source("local_cache_hit") == 2 * BLOCK_SIZE
        assert traffic.source("local_compute") == 1
        assert traffic.pulled("pulls") == 0
        assert (traffic.leases("granted"), traffic.leases("cancelled")) == (1, 1)
        pair.assert_right(completion, prompt)

    def test_a_prompt_of_one_token_is_not_pulled(self, pair: Pair) -> None:
        prompt = make_prompt(1, (pair.name, "one token"))
        with pair.traffic() as traffic:
            completion = pair.disaggregate(prompt)
        assert traffic.source("local_compute") == 1
        assert traffic.pulled("pulls") == 0
        assert traffic.leases("expired") == 0
        pair.assert_right(completion, prompt)

    def test_a_prefix_hit_on_the_prefill_server_is_pulled_whole(self, pair: Pair) -> None:
        prompt = make_prompt(200, (pair.name, "prefilled before"))
        pair.prefill.client.complete(prompt[:150], 1)
        with pair.traffic() as traffic:
            completion = pair.disaggregate(prompt)
        assert traffic.source("external_kv_transfer") == 199
        pair.assert_right(completion, prompt)


@on_pairs(pairs(FAULTS, [("P", "D fail")]), IN_EQUAL_LAYOUTS)
class TestTheComparisonCanFail:
    """What the equality tests look at does change when a block is wrong. A salt keeps the wrong blocks apart."""

    @pytest.mark.parametrize("entry", [0, 15, -2])
    def test_one_block_of_other_contents_changes_the_output(self, pair: Pair, entry: int) -> None:
        prompt = make_prompt(1000, (pair.name, "corrupted", entry))
        params = pair.prefill.client.prefill(prompt)
        overwrite_block(pair.prefill, params, group=0, entry=entry)
        wrong = pair.decode_leg(prompt, params, cache_salt=f"corrupted {entry}")
        right = pair.decode.client.compute(prompt)
        assert wrong.status == 200, wrong.body
        assert wrong.logprob_difference(right) > 5 * LOGPROB_TOLERANCE
        with pytest.raises(AssertionError):
            assert_same_output(wrong, right)
