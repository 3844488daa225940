"""Models whose KV caches are of other kinds: a window of some layers, one latent vector for all heads, one head.

Each is pulled between tensor parallel size 1 and 2, in both directions.
"""

import pytest

from tests.support.e2e.architectures import WINDOW
from tests.support.e2e.choice import rarely
from tests.support.e2e.client import LOGPROB_TOLERANCE
from tests.support.e2e.cluster import BLOCK_SIZE
from tests.support.e2e.corruption import overwrite_block
from tests.support.e2e.deployments import MLA, ONE_KV_HEAD, SLIDING_WINDOW, on
from tests.support.e2e.pair import Pair, assert_failed_pull, make_prompt

BOTH_WAYS = [("TP2", "TP1"), ("TP1", "TP2")]
#: The decode server recomputes what it cannot pull.
ONE_WAY = [("TP1", "TP2"), rarely(("TP2", "TP1"))]

pytestmark = pytest.mark.cache_kinds
both_ways = pytest.mark.parametrize("pair", BOTH_WAYS, indirect=True, ids="-".join)
one_way = pytest.mark.parametrize("pair", ONE_WAY, indirect=True, ids="-".join)


@on(rarely(SLIDING_WINDOW), MLA, ONE_KV_HEAD)
@both_ways
@pytest.mark.parametrize("tokens", [rarely(2), 33, 1000])
def test_a_pulled_prompt_gives_the_same_output(pair: Pair, tokens: int) -> None:
    pair.assert_pulls_right(make_prompt(tokens, (tokens, pair.name)))


@on(SLIDING_WINDOW, MLA, ONE_KV_HEAD)
@one_way
def test_concurrent_prompts_give_the_same_outputs(pair: Pair) -> None:
    pair.assert_concurrent_pulls_right(4)


@on(SLIDING_WINDOW, MLA, ONE_KV_HEAD)
@one_way
def test_one_block_of_other_contents_changes_the_output(pair: Pair) -> None:
    """In every cache group: none of them is moved in vain."""
    prompt = make_prompt(1000, (pair.name, "corrupted"))
    whole = pair.prefill.client.prefill(prompt)
    right = pair.decode.client.compute(prompt)
    pair.assert_right(pair.decode_leg(prompt, whole, cache_salt="whole"), prompt)
    for group in range(len(whole["remote_block_ids"])):
        params = pair.prefill.client.prefill(prompt, cache_salt=f"corrupted {group}")
        # Near the end, where a sliding window still holds it.
        overwrite_block(pair.prefill, params, group, entry=-2)
        wrong = pair.decode_leg(prompt, params, cache_salt=f"corrupted {group}")
        assert wrong.status == 200, wrong.body
        assert wrong.logprob_difference(right) > 5 * LOGPROB_TOLERANCE, f"cache group {group}"


@on(SLIDING_WINDOW, MLA)
@one_way
def test_a_failed_pull_ends_as_the_policy_says_and_the_next_one_works(pair: Pair) -> None:
    """With several cache groups vLLM has no block ids to report, only requests."""
    prompt = make_prompt(300, (pair.name, "unknown lease"))
    params = pair.prefill.client.prefill(prompt)
    assert_failed_pull(pair, prompt, {**params, "lease_id": "nothing"}, "lease", ("nothing",))
    pair.assert_right(pair.decode_leg(prompt, params, cache_salt="the right lease"), prompt)


@on(SLIDING_WINDOW)
class TestSlidingWindow:
    @both_ways
    @pytest.mark.parametrize(
        "tokens",
        [
            *(WINDOW + BLOCK_SIZE - 2, WINDOW + BLOCK_SIZE - 1, WINDOW + BLOCK_SIZE),
            *(rarely(1022), 1023, rarely(1024), rarely(3000)),
        ],
    )
    def test_the_blocks_of_the_window_are_enough(self, pair: Pair, tokens: int) -> None:
        """Of one length in ``BLOCK_SIZE``, vLLM would free the block whose last token the prompt's last one sees."""
        pair.assert_pulls_right(make_prompt(tokens, (tokens, pair.name)))

    @pytest.mark.parametrize("pair", BOTH_WAYS[:1], indirect=True, ids="-".join)
    def test_of_a_prompt_of_many_windows_the_last_ones_are_enough(self, pair: Pair) -> None:
        pair.assert_pulls_right(make_prompt(3000, (pair.name, "many windows")))

    @one_way
    def test_what_the_decode_server_holds_is_not_pulled(self, pair: Pair) -> None:
        pair.assert_pulls_the_rest(make_prompt(600, (pair.name, "partial hit")), computed_before=300)


@on(MLA)
@one_way
def test_the_servers_say_why_mla_has_no_cross_layer_blocks(pair: Pair) -> None:
    for server in (pair.prefill, pair.decode):
        assert "CPU_MLA is not known to accept them. Using the KV cache layout LBNHC instead" in server.log_since()


@on(ONE_KV_HEAD)
@pytest.mark.parametrize("pair", [("TP2", "TP1")], indirect=True, ids="-".join)
def test_a_head_that_two_ranks_hold_is_pulled_once(pair: Pair) -> None:
    traffic = pair.assert_pulls_right(make_prompt(1000, (pair.name, "bytes")))
    whole_prompt = 2 * 32 * 4 * 4 * 999  # K and V of a head of 32 float32 items, 4 layers, tokens
    assert traffic.pulled("pull_bytes") < 1.1 * whole_prompt
