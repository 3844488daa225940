"""A prompt that was prefilled on one simulated NPU gives on another the tokens that it gives there alone.

Every pull is verified. Prompts of more than 512 tokens are prefilled in several steps.
"""

import pytest

from tests.support.ascend.paths import ascend_release
from tests.support.ascend.servers import HEADS_FIRST, NPU_BLOCK_SIZE, ONE_RANK, SEVERAL_RANKS
from tests.support.e2e.corruption import overwrite_block, wait_until_summed
from tests.support.e2e.deployments import on
from tests.support.e2e.pair import Pair, assert_failed_pull, make_prompt


class Pulls:
    """What holds whatever the tensor parallel sizes of the two sides."""

    @pytest.mark.parametrize("tokens", [2, NPU_BLOCK_SIZE, NPU_BLOCK_SIZE + 1, 1000])
    def test_a_pulled_prompt_gives_the_same_output(self, pair: Pair, tokens: int) -> None:
        pair.assert_pulls_right(make_prompt(tokens, (tokens, pair.name)))

    def test_concurrent_prompts_give_the_same_outputs(self, pair: Pair) -> None:
        pair.assert_concurrent_pulls_right(4)

    def test_only_blocks_that_the_decode_server_does_not_hold_are_pulled(self, pair: Pair) -> None:
        pair.assert_pulls_the_rest(make_prompt(700, (pair.name, "partial hit")), computed_before=300)


@pytest.mark.ascend_short
@on(ONE_RANK)
@pytest.mark.parametrize("pair", [("P", "D")], indirect=True, ids="-".join)
class TestOneRank(Pulls):
    def test_a_prefix_hit_on_the_prefill_server_is_pulled_whole(self, pair: Pair) -> None:
        prompt = make_prompt(600, (pair.name, "prefilled before"))
        pair.prefill.client.complete(prompt[:400], 1)
        with pair.traffic() as traffic:
            completion = pair.disaggregate(prompt)
        assert traffic.source("external_kv_transfer") == 599
        pair.assert_right(completion, prompt)

    def test_a_second_turn_pulls_only_what_is_new(self, pair: Pair) -> None:
        prompt = make_prompt(400, (pair.name, "turns"))
        first = pair.disaggregate(prompt, 30)
        history = [*prompt, *first.tokens, *make_prompt(300, (pair.name, "second turn"))]
        with pair.traffic() as traffic:
            second = pair.disaggregate(history, 30)
        held = (len(prompt) + 29) // NPU_BLOCK_SIZE * NPU_BLOCK_SIZE
        assert traffic.source("local_cache_hit") == held
        assert traffic.pulled("pull_tokens") == len(history) - 1 - held
        pair.assert_right(second, history)

    def test_a_block_that_changes_under_its_lease_fails_the_pull_and_is_named(self, pair: Pair) -> None:
        prompt = make_prompt(700, (pair.name, "overwritten"))
        params = pair.prefill.client.prefill(prompt)
        wait_until_summed(pair.prefill, params)
        overwrite_block(pair.prefill, params, group=0, entry=2)
        place = f"tokens {2 * NPU_BLOCK_SIZE} to"
        assert_failed_pull(pair, prompt, params, "checksum", ("what has arrived differ", place))


@on(SEVERAL_RANKS)
@pytest.mark.parametrize("pair", [("TP2", "TP1"), ("TP1", "TP2"), ("TP2", "other TP2")], indirect=True, ids="-".join)
class TestSeveralRanks(Pulls):
    """Nothing more: each rank's own part of a pull is the subject."""


@pytest.mark.skipif(ascend_release() == "0.23", reason="vllm-ascend 0.23 has no caches with heads before tokens")
@on(HEADS_FIRST)
@pytest.mark.parametrize(
    "pair", [("HND TP2", "HND"), ("HND", "HND TP2"), ("HND", "NHD"), ("NHD", "HND")], indirect=True, ids="-".join
)
class TestHeadsFirst(Pulls):
    """Nothing more: the order of heads and tokens in a block is the subject."""

    def test_the_caches_are_as_their_servers_names_say(self, pair: Pair) -> None:
        for server in (pair.prefill, pair.decode):
            heads_first = ("VLLM_KV_CACHE_LAYOUT", "LBHNC") in server.spec.variables
            assert f"Using {'LBHNC' if heads_first else 'LBNHC'} KV cache layout" in server.log.read_text()
