"""Sides that differ where they may, and half precision. Outputs of sides that differ in tensor parallel size 1 and 2
are in ``test_equality`` and ``test_cache_kinds``.
"""

import pytest

from tests.support.e2e.choice import on_pairs, pairs
from tests.support.e2e.corruption import overwrite_block, wait_until_summed
from tests.support.e2e.deployments import FOUR_RANKS, HALF_PRECISION, MIXED, THREE_FORMS, on
from tests.support.e2e.pair import Pair, assert_failed_pull, make_prompt
from transfer.control.client import ControlClient
from transfer.control.failures import AuthenticationFailed
from transfer.control.messages import Hello

#: bfloat16 keeps 8 bits: the same sum in another order differs in the second decimal of a logprob.
BFLOAT16_TOLERANCE = 0.25

LAYOUT_PAIRS = [("LBHNC", "BHLNC"), ("BHLNC", "LBHNC")]
BLOCK_SIZE_PAIRS = [("BHLNC", "BHLNC 64"), ("BHLNC 64", "BHLNC")]
PAIRS_OF_BOTH = [("LBHNC", "BHLNC 64"), ("BHLNC 64", "LBHNC")]
FOUR_RANK_PAIRS = [("TP4", "TP2"), ("TP2", "TP4"), ("TP4", "TP1"), ("TP1", "TP4")]


class TestLayoutsAndBlockSizes:
    @pytest.mark.layouts
    @on_pairs(pairs(THREE_FORMS, LAYOUT_PAIRS + BLOCK_SIZE_PAIRS + PAIRS_OF_BOTH, (2, 33, 1000)), value="tokens")
    def test_another_form_of_cache_gives_the_same_output(self, pair: Pair, tokens: int) -> None:
        pair.assert_pulls_right(make_prompt(tokens, (tokens, pair.name)))

    @pytest.mark.layouts
    @on_pairs(pairs(THREE_FORMS, BLOCK_SIZE_PAIRS, (31, 32, 63, 64, 65, 97)), value="tokens")
    def test_a_prompt_may_end_anywhere_in_a_block_of_either_size(self, pair: Pair, tokens: int) -> None:
        pair.assert_pulls_right(make_prompt(tokens, (tokens, pair.name)))

    @pytest.mark.security
    @on_pairs(pairs(MIXED, [("TP1", "TP2")]), pairs(THREE_FORMS, LAYOUT_PAIRS))
    def test_who_does_not_know_the_secret_is_turned_away_and_nobody_logs_it(self, pair: Pair) -> None:
        prompt = make_prompt(100, (pair.name, "stranger"))
        params = pair.prefill.client.prefill(prompt)
        stranger = ControlClient()
        hello = stranger.request(params["remote_host"], params["remote_port"], Hello(params["remote_engine_id"]), 10.0)
        assert isinstance(hello.exception(), AuthenticationFailed)
        stranger.close()
        pair.assert_right(pair.decode_leg(prompt, params), prompt)
        for server in (pair.prefill, pair.decode):
            assert server.spec.secret
            assert server.spec.secret not in server.log_since()

    @pytest.mark.verify
    @on_pairs(pairs(MIXED, [("TP2", "TP1")]), pairs(THREE_FORMS, LAYOUT_PAIRS + BLOCK_SIZE_PAIRS))
    def test_a_block_that_changes_under_its_lease_fails_the_pull_and_is_named(self, pair: Pair) -> None:
        prompt = make_prompt(300, (pair.name, "overwritten"))
        params = pair.prefill.client.prefill(prompt)
        wait_until_summed(pair.prefill, params)
        overwrite_block(pair.prefill, params, 0, 2)
        place = f"tokens {2 * pair.prefill.spec.block_size} to"
        assert_failed_pull(pair, prompt, params, "checksum", ("what has arrived differ", "KV head 0", place))
        other = make_prompt(300, (pair.name, "after the overwritten one"))
        pair.assert_right(pair.disaggregate(other), other)

    @pytest.mark.layouts
    @on_pairs(pairs(MIXED, [("TP2", "TP1"), ("TP1", "TP2")]), pairs(THREE_FORMS, LAYOUT_PAIRS + BLOCK_SIZE_PAIRS))
    def test_concurrent_prompts_give_the_same_outputs(self, pair: Pair) -> None:
        pair.assert_concurrent_pulls_right(8)

    @pytest.mark.layouts
    @on_pairs(pairs(MIXED, [("TP2", "TP1")]), pairs(THREE_FORMS, BLOCK_SIZE_PAIRS))
    def test_what_the_decode_server_holds_is_not_pulled(self, pair: Pair) -> None:
        """Where the prefill server's blocks are larger, the first missing token lies inside one of them."""
        pair.assert_pulls_the_rest(make_prompt(300, (pair.name, "partial hit")), computed_before=100)


@pytest.mark.layouts
@on(FOUR_RANKS)
@pytest.mark.parametrize("pair", FOUR_RANK_PAIRS, indirect=True, ids="-".join)
class TestFourRanks:
    @pytest.mark.parametrize("tokens", [33, 1000])
    def test_another_tensor_parallel_size_gives_the_same_output(self, pair: Pair, tokens: int) -> None:
        pair.assert_pulls_right(make_prompt(tokens, (tokens, pair.name)))

    def test_concurrent_prompts_give_the_same_outputs(self, pair: Pair) -> None:
        pair.assert_concurrent_pulls_right(4)


@pytest.mark.equality
@on(HALF_PRECISION)
@pytest.mark.parametrize("pair", [("P bfloat16", "D bfloat16")], indirect=True, ids="-".join)
@pytest.mark.parametrize("tokens", [31, 33, 1000])
def test_half_precision_is_right_but_for_rounding(pair: Pair, tokens: int) -> None:
    prompt = make_prompt(tokens, ("half", tokens))
    with pair.traffic() as traffic:
        completion = pair.disaggregate(prompt)
    assert traffic.source("external_kv_transfer") == tokens - 1
    assert completion.logprob_difference(pair.decode.client.compute(prompt)) < BFLOAT16_TOLERANCE
