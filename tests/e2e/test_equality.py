"""A prompt that was prefilled elsewhere gives the tokens and logprobs that it gives without disaggregation.

Every test also proves by the decode server's counters that the prompt was pulled and not computed there.
"""

import itertools
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.e2e.client import LOGPROB_TOLERANCE
from tests.e2e.cluster import BLOCK_SIZE
from tests.e2e.deployments import BHLNC, BLHNC, LBHNC
from tests.e2e.pair import Pair, assert_same_output, make_prompt

EQUAL_SIZES = [("P1", "D1"), ("P2", "D2")]
UNEQUAL_SIZES = [("P2", "D1"), ("P1", "D2")]

pytestmark = [
    pytest.mark.parametrize("deployment", [LBHNC, BLHNC, BHLNC], indirect=True, ids=lambda one: one.name),
]


@pytest.mark.parametrize(
    ("pair", "tokens"),
    [*itertools.product(EQUAL_SIZES, (2, 31, 32, 33, 1000)), *itertools.product(UNEQUAL_SIZES, (33, 1000))],
    indirect=["pair"],
    ids=lambda value: "-".join(value) if isinstance(value, tuple) else str(value),
)
def test_a_pulled_prompt_gives_the_same_output(pair: Pair, tokens: int) -> None:
    prompt = make_prompt(tokens, (tokens, pair.name))
    with pair.traffic() as traffic:
        completion = pair.disaggregate(prompt)
    assert traffic.source("external_kv_transfer") == tokens - 1
    assert traffic.source("local_compute") == 1
    assert traffic.pulled("pulls") == pair.decode_ranks
    assert traffic.pulled("pull_tokens") == (tokens - 1) * pair.decode_ranks
    assert traffic.failures() == 0
    assert (traffic.leases("granted"), traffic.leases("released")) == (1, 1)
    # What lies together on P is read together, through staging where it is apart on D.
    if tokens == 1000 and pair.prefill.spec.tensor_parallel >= pair.decode.spec.tensor_parallel:
        blocks = -(-tokens // BLOCK_SIZE)
        assert traffic.pulled("pull_descriptors") < 4 * blocks * pair.decode_ranks
    pair.assert_right(completion, prompt)


@pytest.mark.parametrize("pair", EQUAL_SIZES + UNEQUAL_SIZES, indirect=True, ids="-".join)
def test_sixteen_concurrent_prompts_give_the_same_outputs(pair: Pair) -> None:
    prompts = [make_prompt(40 + 23 * i, (i, pair.name, "concurrent")) for i in range(16)]
    with pair.traffic() as traffic, ThreadPoolExecutor(len(prompts)) as pool:
        completions = list(pool.map(pair.disaggregate, prompts))
    assert traffic.source("local_compute") == len(prompts)
    assert traffic.pulled("pulls") == len(prompts) * pair.decode_ranks
    assert traffic.leases("released") == len(prompts)
    for prompt, completion in zip(prompts, completions, strict=True):
        pair.assert_right(completion, prompt)


@pytest.mark.parametrize("pair", EQUAL_SIZES, indirect=True, ids="-".join)
class TestPrefixHits:
    def test_only_blocks_that_the_decode_server_does_not_hold_are_pulled(self, pair: Pair) -> None:
        prompt = make_prompt(200, (pair.name, "partial hit"))
        pair.disaggregate(prompt[:100])
        with pair.traffic() as traffic:
            completion = pair.disaggregate(prompt)
        held = 100 // BLOCK_SIZE * BLOCK_SIZE
        assert traffic.source("local_cache_hit") == held
        assert traffic.source("external_kv_transfer") == 199 - held
        assert traffic.source("local_compute") == 1
        assert traffic.pulled("pull_tokens") == (199 - held) * pair.decode_ranks
        pair.assert_right(completion, prompt)

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


@pytest.mark.parametrize("pair", EQUAL_SIZES, indirect=True, ids="-".join)
class TestTheComparisonCanFail:
    """What the equality tests look at does change when a block is wrong. A salt keeps the wrong blocks apart."""

    def test_one_block_in_the_place_of_another_changes_the_output(self, pair: Pair) -> None:
        """Not two blocks exchanged: keys carry their positions, so attention does not see the order of blocks."""
        prompt = make_prompt(1000, (pair.name, "repeated block"))
        params = pair.prefill.client.prefill(prompt)
        (block_ids,) = params["remote_block_ids"]
        block_ids[10] = block_ids[20]
        wrong = pair.decode_leg(prompt, params, cache_salt="repeated block")
        right = pair.decode.client.compute(prompt)
        assert wrong.status == 200, wrong.body
        assert wrong.logprob_difference(right) > 5 * LOGPROB_TOLERANCE

    def test_one_block_of_another_prompt_changes_the_output(self, pair: Pair) -> None:
        prompt = make_prompt(1000, (pair.name, "corrupted"))
        donor = make_prompt(1000, (pair.name, "the other"))
        other = pair.prefill.client.prefill(donor)
        params = pair.prefill.client.prefill(prompt)
        params["remote_block_ids"][0][15] = other["remote_block_ids"][0][15]
        wrong = pair.decode_leg(prompt, params, cache_salt="corrupted")
        pair.assert_right(pair.decode_leg(donor, other), donor)
        right = pair.decode.client.compute(prompt)
        assert wrong.status == 200, wrong.body
        assert wrong.logprob_difference(right) > 5 * LOGPROB_TOLERANCE
        with pytest.raises(AssertionError):
            assert_same_output(wrong, right)
