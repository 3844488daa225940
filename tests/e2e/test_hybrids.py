"""Models of which some layers keep states: recurrent ones, and convolutions.

The last prompt token is left to the decode server. So its answers are those of a server that computes this token in a
step of its own: the same bits at equal tensor parallel sizes, and up to rounding otherwise.
"""

import json
from collections.abc import Iterator
from contextlib import closing, contextmanager
from itertools import count
from typing import Any

import pytest

from tests.support.e2e.client import Client, Completion
from tests.support.e2e.corruption import (
    assert_wrong_numbers_change_the_answer,
    spoil_numbers,
    wait_until_summed,
)
from tests.support.e2e.deployments import on
from tests.support.e2e.hybrid_deployments import (
    GRANITE,
    GRANITE_BLOCK,
    GRANITE_BLOCKS,
    GRANITE_BORDERS,
    GRANITE_MODES,
    GRANITE_ODD,
    GRANITE_STEP,
    GRANITE_TO_TWO,
    LFM2,
    OTHER_HYBRIDS,
    QWEN3_NEXT,
    QWEN3_NEXT_BLOCK,
    QWEN3_NEXT_PRECISIONS,
    QWEN3_NEXT_RANKS,
    QWEN3_NEXT_TRANSFERS,
)
from tests.support.e2e.legs import Router
from tests.support.e2e.pair import (
    Pair,
    assert_failed_pull,
    assert_same_output,
    control_address,
    control_keys,
    end_lease,
    make_prompt,
)
from tests.support.examples.harness import ProxyProcess
from tests.support.waiting import until

pytestmark = pytest.mark.cache_kinds
_OTHER_TOLERANCE = 5e-3
BLOCKS_OF_A_BORDER = 4  # of Qwen3-Next's cache groups, one with keys and values
SAME, FEWER, MORE = ("P1", "D1"), ("P2", "D1"), ("P1", "D2")


def pairs(*names: tuple[str, str]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("pair", names, indirect=True, ids="-".join)


def assert_same_bits(pair: Pair, prompt: list[int]) -> None:
    completion = pair.disaggregate(prompt)
    reference = pair.decode.client.compute(prompt, len(completion.tokens))
    assert (completion.tokens, completion.logprobs) == (reference.tokens, reference.logprobs)


@contextmanager
def proxied(pair: Pair, legs: str) -> Iterator[Client]:
    """A client of a proxy in front of both servers, which it has met."""
    servers = ("--prefill", pair.prefill.client.base_url, "--decode", pair.decode.client.base_url)
    with ProxyProcess(["-m", "pd_proxy", *servers, "--legs", legs]) as proxy, closing(Client(proxy.url)) as client:
        assert client.complete(make_prompt(33, (pair.name, "introduced", legs))).status == 200
        yield client


@on(GRANITE_TO_TWO)
@pairs(MORE, ("P2", "D2"))
@pytest.mark.parametrize("tokens", [2, 33, 97, 1000])
def test_states_of_more_ranks(pair: Pair, tokens: int) -> None:
    pair.assert_pulls_right(make_prompt(tokens, (tokens, pair.name)))


@on(GRANITE_TO_TWO)
@pairs(("P2", "D2"))
def test_every_bit_of_two_ranks_is_the_same(pair: Pair) -> None:
    assert_same_bits(pair, make_prompt(3 * GRANITE_STEP + 1, (pair.name, "bits")))


@on(GRANITE_MODES)
@pairs(("P none", "D align"), ("P align", "D none"))
@pytest.mark.parametrize("tokens", [2, GRANITE_BLOCK + 1, 1000])
def test_a_state_at_borders_beside_one_of_a_request(pair: Pair, tokens: int) -> None:
    pair.assert_pulls_right(make_prompt(tokens, (tokens, pair.name)))


@on(GRANITE_ODD)
@pairs(("P3", "D1"), ("P3", "D2"))
@pytest.mark.parametrize("tokens", [2, 97, 1000])
def test_states_of_three_ranks(pair: Pair, tokens: int) -> None:
    pair.assert_pulls_right(make_prompt(tokens, (tokens, pair.name)))


@on(GRANITE)
class TestOneStateOfARequest:
    """At pairs of tensor parallel sizes."""

    @pairs(SAME, FEWER)
    @pytest.mark.parametrize("tokens", [2, 33, 97, 1000])
    def test_a_pulled_prompt_gives_the_same_output(self, pair: Pair, tokens: int) -> None:
        pair.assert_pulls_right(make_prompt(tokens, (tokens, pair.name)))

    @pairs(SAME)
    def test_every_bit_is_the_same(self, pair: Pair) -> None:
        assert_same_bits(pair, make_prompt(3 * GRANITE_STEP + 1, (pair.name, "bits")))

    @pairs(FEWER)
    def test_both_legs_at_once(self, pair: Pair) -> None:
        Router(pair).assert_right(make_prompt(1000, (pair.name, "legs")), decode_first_s=0.3)

    @pairs(FEWER)
    def test_concurrent_prompts_give_the_same_outputs(self, pair: Pair) -> None:
        pair.assert_concurrent_pulls_right(4)

    @pairs(FEWER)
    @pytest.mark.parametrize("part", ["state", "conv_b", "v"])
    def test_wrong_numbers_change_the_output(self, pair: Pair, part: str) -> None:
        """In every kind of cache: none of them is moved in vain."""
        assert_wrong_numbers_change_the_answer(pair, make_prompt(300, (pair.name, "spoilt", part)), part)

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


@on(GRANITE_BORDERS)
@pairs(SAME)
def test_a_short_prompt_proves_the_prefill_server_for_short_ones_and_a_longer_one_for_all(pair: Pair) -> None:
    pair.wait_until_at_rest()
    assert pair.decode.client.reset_prefix_cache()  # D forgets that it is proven
    start = pair.decode.client.metrics()
    for tokens, is_pulled in (40, False), (41, True), (300, False), (42, True), (301, True):
        prompt = make_prompt(tokens, (pair.name, "proof", tokens))
        with pair.traffic() as traffic:
            pair.assert_right(pair.disaggregate(prompt), prompt)
        assert traffic.pulled("pulls") == is_pulled, f"{tokens} tokens"
    added = pair.decode.client.metrics().since(start)
    assert added.value("vllm:pd_canaries_total", outcome="proven") == 2
    assert added.value("vllm:pd_prompts_computed_total", cause="unproven") == 0


@on(GRANITE_BORDERS)
@pairs(SAME, FEWER)
class TestBordersOfMamba2:
    def test_the_next_turn_pulls_only_what_is_new(self, pair: Pair) -> None:
        pair.assert_next_turn_pulls_the_rest(make_prompt(10 * GRANITE_BLOCK, (pair.name, "turns")), 700, GRANITE_BLOCK)

    @pytest.mark.parametrize("asked", [5, 90], ids=["within a block", "over a border"])
    def test_the_next_turn_pulls_no_keys_that_were_decoded(self, pair: Pair, asked: int) -> None:
        """Though D keeps no states of its answers. The one after it finds the state of this one's last border."""
        prompt = make_prompt(5 * GRANITE_BLOCK + 20, (pair.name, "answer", asked))
        said = pair.disaggregate(prompt, GRANITE_BLOCK + 20)
        turn = [*prompt, *said.tokens, *make_prompt(asked, (pair.name, "question", asked))]
        known = (len(prompt) + len(said.tokens) - 1) // GRANITE_BLOCK * GRANITE_BLOCK
        with pair.traffic() as traffic:
            completion = pair.disaggregate(turn)
        assert traffic.source("local_cache_hit") == known
        assert traffic.source("external_kv_transfer") == len(turn) - 1 - known
        pair.assert_right(completion, turn)
        with pair.traffic() as traffic:
            pair.decode.client.complete([*turn, *make_prompt(200, (pair.name, "alone", asked))])
        assert traffic.source("local_cache_hit") == (len(turn) - 1) // GRANITE_BLOCK * GRANITE_BLOCK

    def test_both_legs_at_once_behind_a_prefix(self, pair: Pair) -> None:
        turn, router = make_prompt(10 * GRANITE_BLOCK, (pair.name, "legs")), Router(pair)
        router.assert_right(turn[:500], decode_first_s=0.3)
        router.assert_right(turn, decode_first_s=0.3, hit=500 // GRANITE_BLOCK * GRANITE_BLOCK)

    @pytest.mark.parametrize("legs", ["together", "in-turn"])
    def test_turns_through_the_proxy_are_told_as_by_a_single_server(self, pair: Pair, legs: str) -> None:
        """Also how much of each was known: P's last border is that which D would have had."""
        turn, salt = make_prompt(10 * GRANITE_BLOCK + 20, (pair.name, "proxied", legs)), f"alone {legs}"
        with proxied(pair, legs) as client:
            for tokens, known in ((500, 0), (len(turn), 500), (len(turn), len(turn))):
                held = known // GRANITE_BLOCK * GRANITE_BLOCK
                with pair.traffic() as traffic:
                    completion = client.complete(turn[:tokens])
                alone = pair.decode.client.complete(turn[:tokens], cache_salt=salt)
                assert_same_output(completion, alone)
                assert traffic.source("external_kv_transfer") == tokens - 1 - held
                assert self._usage(completion) == self._usage(alone) == (tokens, 16, held)

    @staticmethod
    def _usage(completion: Completion) -> tuple[int, int, int]:
        """The tokens of the prompt and of the answer, and of the prompt those that were known."""
        usage = json.loads(completion.body)["usage"]
        details = usage.get("prompt_tokens_details") or {}  # vLLM leaves them out where nothing was
        return usage["prompt_tokens"], usage["completion_tokens"], details.get("cached_tokens") or 0

    @pytest.mark.parametrize("part", ["state", "conv_c"])
    def test_wrong_numbers_change_the_output(self, pair: Pair, part: str) -> None:
        prompt = make_prompt(3 * GRANITE_BLOCK + 1, (pair.name, "spoilt", part))
        params = pair.prefill.client.prefill(prompt)
        wait_until_summed(pair.prefill, params)
        spoil_numbers(pair.prefill, params, part)
        assert_failed_pull(pair, prompt, params, "checksum", (f"part '{part}'", "checksums of what has arrived differ"))


@on(GRANITE_BLOCKS)
@pytest.mark.parametrize(
    ("pair", "common"),
    [(("TP2", "TP1"), 1440), (("TP1", "TP2"), 1440), (("TP2", "wide"), 320), (("wide", "TP2"), 320)],
    indirect=["pair"],
    ids=["TP2-TP1", "TP1-TP2", "TP2-wide", "wide-TP2"],
)
class TestUnequalBlocks:
    """``common``: the distance of borders that both sides have."""

    @pytest.mark.parametrize("tokens", [2, 161, 1000])
    def test_a_pulled_prompt_gives_the_same_output(self, pair: Pair, common: int, tokens: int) -> None:
        pair.assert_pulls_right(make_prompt(tokens, (pair.name, tokens)))

    def test_the_next_turn_goes_on_from_a_border_that_both_have(self, pair: Pair, common: int) -> None:
        known = max(common, 1280)
        pair.assert_next_turn_pulls_the_rest(make_prompt(known + 300, (pair.name, "turns")), known + 20, common)

    def test_without_such_a_border_the_next_turn_pulls_what_lies_behind_the_keys(self, pair: Pair, common: int) -> None:
        turn = make_prompt(900, (pair.name, "no border"))
        pair.disaggregate(turn[:310])
        known = 310 // pair.decode.spec.block_size * pair.decode.spec.block_size
        with pair.traffic() as traffic:
            completion = pair.disaggregate(turn)
        assert traffic.source("external_kv_transfer") == len(turn) - 1 - known
        pair.assert_right(completion, turn)

    def test_both_legs_at_once(self, pair: Pair, common: int) -> None:
        Router(pair).assert_right(make_prompt(1500, (pair.name, "legs")), decode_first_s=0.3)


@on(QWEN3_NEXT)
@pairs(("P", "D"))
class TestStatesAtBorders:
    @pytest.mark.parametrize("blocks", [1, 3])
    def test_every_bit_is_the_same(self, pair: Pair, blocks: int) -> None:
        assert_same_bits(pair, make_prompt(blocks * QWEN3_NEXT_BLOCK + 1, (pair.name, blocks)))

    @pytest.mark.slow
    @pytest.mark.parametrize("at_once", [False, True], ids=["in turn", "at once"])
    @pytest.mark.parametrize("tokens", [2, 100, QWEN3_NEXT_BLOCK, QWEN3_NEXT_BLOCK + 2])
    def test_every_bit_is_the_same_at_any_length(self, pair: Pair, tokens: int, at_once: bool) -> None:
        """Of a prompt whose last token D has written itself, in a step of its own."""
        start = make_prompt(tokens - 1, (pair.name, "any length", tokens, at_once))
        alone = pair.decode.client.compute(start, 17)
        prompt = [*start, alone.tokens[0]]
        with pair.traffic() as traffic:
            completion = Router(pair).send(prompt, decode_first_s=0.3).decode if at_once else pair.disaggregate(prompt)
        assert traffic.source("external_kv_transfer") == tokens - 1
        assert (completion.tokens, completion.logprobs) == (alone.tokens[1:], alone.logprobs[1:])

    @pytest.mark.slow
    @pytest.mark.parametrize("legs", ["together", "in-turn"])
    def test_a_stream_through_the_proxy_is_the_decode_servers_own(self, pair: Pair, legs: str) -> None:
        """The token that P has written is no part of it."""
        prompt = make_prompt(QWEN3_NEXT_BLOCK + 1, (pair.name, "proxied", legs))
        with proxied(pair, legs) as client, pair.traffic() as traffic:
            answer = self._streamed(client, prompt)
        assert traffic.source("external_kv_transfer") == len(prompt) - 1
        assert answer == self._streamed(pair.decode.client, prompt, cache_salt=f"alone {legs}")

    @staticmethod
    def _streamed(client: Client, prompt: list[int], **options: object) -> tuple[str, dict[str, Any]]:
        """The text and the usage of a stream that could begin with P's token."""
        plain = {"logprobs": None, "return_token_ids": False, "stream_options": {"include_usage": True}}
        with client.stream(prompt, 16, **plain, **options) as lines:
            *events, end = (line.removeprefix("data: ") for line in lines)
        assert end == "[DONE]"
        told = [json.loads(event) for event in events]
        text = "".join(choice["text"] for event in told for choice in event["choices"])
        return text, {name: told[-1]["usage"][name] for name in ("prompt_tokens", "completion_tokens", "total_tokens")}

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

    @pytest.mark.slow
    def test_an_evicted_prompt_comes_back_with_the_state_at_its_last_border(self, pair: Pair) -> None:
        for server, tokens in ((pair.prefill, 2 * QWEN3_NEXT_BLOCK), (pair.decode, 3 * QWEN3_NEXT_BLOCK)):
            prompt = make_prompt(tokens + 1, (pair.name, "evicted"))
            server.client.complete(prompt)
            # Prompts of a block: vLLM keeps the states after it too, which take more of the device than the block.
            for number in range(server.client.cache_blocks() // BLOCKS_OF_A_BORDER + 1):
                server.client.complete(make_prompt(QWEN3_NEXT_BLOCK + 1, (pair.name, "other", number)), 1)
            before = server.client.metrics()
            again = server.client.complete(prompt)
            counted = server.client.metrics().since(before)
            assert counted.value("vllm:pd_host_tokens_total") == tokens
            reference = server.client.compute(prompt, len(again.tokens))
            assert (again.tokens, again.logprobs) == (reference.tokens, reference.logprobs)

    def test_what_was_decoded_is_pulled_by_another_server(self, pair: Pair) -> None:
        """With the state at a border that the answer has crossed. A P that is late once is not asked for a while."""
        attempts = count()
        until(lambda: self._goes_on_elsewhere(pair, next(attempts)), within_s=60)

    @staticmethod
    def _goes_on_elsewhere(pair: Pair, attempt: int) -> bool:
        """Check an answer of D; return whether D pulled what P holds before it had computed it itself."""
        first = make_prompt(2 * QWEN3_NEXT_BLOCK - 20, (pair.name, "conversation", attempt))
        answer = pair.prefill.client.complete(first, 40)
        second = [*first, *answer.tokens, *make_prompt(100, (pair.name, "question"))]
        with pair.traffic() as traffic:
            completion = pair.decode.client.complete(second, kv_transfer_params={"prefixes_at": control_address(pair)})
        pulled = traffic.pulled("prefix_tokens")
        assert pulled in {0, 2 * QWEN3_NEXT_BLOCK}
        assert traffic.source("local_compute") == len(second) - pulled
        assert traffic.failures() == 0
        if pulled:  # P goes on from the same state; one that was computed from the prompt would have other bits
            reference = pair.prefill.client.complete(second)
            assert (completion.tokens, completion.logprobs) == (reference.tokens, reference.logprobs)
        return bool(pulled)

    def test_a_wrong_number_in_a_state_fails_the_pull(self, pair: Pair) -> None:
        prompt = make_prompt(700, (pair.name, "spoilt"))
        params = pair.prefill.client.prefill(prompt)
        wait_until_summed(pair.prefill, params)
        spoil_numbers(pair.prefill, params, "state")
        assert_failed_pull(pair, prompt, params, "checksum", ("part 'state'", "checksums of what has arrived differ"))


@on(QWEN3_NEXT_TRANSFERS)
@pairs(("P", "D"))
class TestStatesInHostMemory:
    """D pulls every prompt to host memory first; leases move there when P is short of blocks."""

    def test_every_bit_is_the_same(self, pair: Pair) -> None:
        with pair.traffic() as traffic:
            assert_same_bits(pair, make_prompt(3 * QWEN3_NEXT_BLOCK + 1, (pair.name, "bits")))
        assert traffic.loaded() == 3 * QWEN3_NEXT_BLOCK

    def test_the_next_turn_pulls_only_what_is_new(self, pair: Pair) -> None:
        """The state at the last border has landed, too."""
        turn = make_prompt(4 * QWEN3_NEXT_BLOCK + 1, (pair.name, "turns"))
        pair.disaggregate(turn[:700])
        with pair.traffic() as traffic:
            assert_same_bits(pair, turn)
        assert traffic.pulled("pull_tokens") == len(turn) - 1 - 2 * QWEN3_NEXT_BLOCK
        assert traffic.loaded() == len(turn) - 1

    def test_a_state_that_has_moved_is_read_in_host_memory(self, pair: Pair) -> None:
        prompts = [make_prompt(3 * QWEN3_NEXT_BLOCK + 1, (pair.name, "moved", number)) for number in range(8)]
        prompt, params, *others = prompts[0], *map(pair.prefill.client.prefill, prompts)
        until(lambda: pair.prefill.client.metrics().value("vllm:pd_leases_in_host") > 0, "a lease has moved")
        for other in others:
            end_lease(other, control_keys(pair.prefill))
        before = pair.decode.client.metrics()
        completion = pair.decode_leg(prompt, params)
        counted = pair.decode.client.metrics().since(before)
        assert counted.value("vllm:pd_pull_bytes_from_host_total") > 0
        reference = pair.decode.client.compute(prompt, len(completion.tokens))
        assert (completion.tokens, completion.logprobs) == (reference.tokens, reference.logprobs)


@on(QWEN3_NEXT_RANKS)
class TestStatesOfTwoRanks:
    """Or of one on one side. To the host memory of one rank, every prompt is pulled first.

    In bfloat16, unequal sizes round otherwise: logprobs of 12 right answers differed by 0.02 to 0.8 from what D
    computed, those of 18 from spoilt caches by 0.03 to 1.9. So checksums tell what is right, and no tolerance.
    """

    @pairs(("P2", "D2"))
    @pytest.mark.parametrize("blocks", [1, 3])
    def test_every_bit_is_the_same_on_two(self, pair: Pair, blocks: int) -> None:
        assert_same_bits(pair, make_prompt(blocks * QWEN3_NEXT_BLOCK + 1, (pair.name, blocks)))

    @pairs(("P2", "D2"), ("P2", "D1"), ("P1", "D2"))
    def test_the_next_turn_pulls_only_what_is_new(self, pair: Pair) -> None:
        turn = make_prompt(4 * QWEN3_NEXT_BLOCK + 1, (pair.name, "turns"))
        pair.disaggregate(turn[:700])
        with pair.traffic() as traffic:
            completion = pair.disaggregate(turn)
        held, lands = 2 * QWEN3_NEXT_BLOCK, pair.decode_ranks == 1
        assert traffic.pulled("pull_tokens") == (len(turn) - 1 - held) * pair.decode_ranks
        assert traffic.loaded() == (len(turn) - 1 if lands else 0)
        assert traffic.failures() == 0
        if pair.prefill.spec.ranks == pair.decode_ranks:
            reference = pair.decode.client.compute(turn, len(completion.tokens))
            assert (completion.tokens, completion.logprobs) == (reference.tokens, reference.logprobs)

    @pairs(("P2", "D1"))
    @pytest.mark.parametrize("part", ["state", "conv_q"])
    def test_a_wrong_number_does_not_land(self, pair: Pair, part: str) -> None:
        prompt = make_prompt(QWEN3_NEXT_BLOCK + 1, (pair.name, "spoilt", part))
        with pair.traffic() as traffic:
            params = pair.prefill.client.prefill(prompt)
            wait_until_summed(pair.prefill, params)
            spoil_numbers(pair.prefill, params, part)
            completion = pair.decode_leg(prompt, params)
        assert completion.status == 500, completion.body
        assert (traffic.failures("checksum"), traffic.failures("landing"), traffic.failures()) == (1, 1, 2)


@on(QWEN3_NEXT_PRECISIONS)
class TestPrecisionOfStates:
    @pairs(("P float32", "D float32"))
    def test_every_bit_is_the_same(self, pair: Pair) -> None:
        assert_same_bits(pair, make_prompt(3 * QWEN3_NEXT_BLOCK + 1, (pair.name, "bits")))

    @pairs(("P bfloat16", "D float32"))
    def test_another_precision_is_refused_with_both_named(self, pair: Pair) -> None:
        prompt = make_prompt(300, (pair.name, "precisions"))
        named = ("'dtype' of part 'state'", "'float32' here and 'bfloat16'", "--mamba-ssm-cache-dtype")
        assert_failed_pull(pair, prompt, pair.prefill.client.prefill(prompt), "incompatible", named)


class TestOtherModels:
    """Kernels compute the last token in another way where it is alone, which some models make more of than others."""

    @on(*OTHER_HYBRIDS, LFM2)
    @pairs(("P", "D"))
    @pytest.mark.parametrize("tokens", [2, 300, 1000])
    def test_every_bit_is_the_same_whatever_the_order_of_a_convolution(self, pair: Pair, tokens: int) -> None:
        prompt, right = pair.prompt_and_answer(tokens, "bits")
        completion = pair.disaggregate(prompt)
        assert (completion.tokens, completion.logprobs) == (right.tokens, right.logprobs)

    @on(*OTHER_HYBRIDS)
    @pairs(("P2", "D"))
    @pytest.mark.parametrize("tokens", [2, 300, 1000])
    def test_states_of_two_ranks(self, pair: Pair, tokens: int) -> None:
        prompt = make_prompt(tokens, (tokens, pair.name))
        _, completion = pair.assert_pulls_all(prompt)
        reference = pair.decode.client.compute(prompt, len(completion.tokens))
        assert completion.tokens == reference.tokens
        assert completion.logprob_difference(reference) < _OTHER_TOLERANCE

    @on(*OTHER_HYBRIDS, LFM2)
    @pairs(("P", "D"))
    def test_wrong_numbers_in_a_convolution_change_the_output(self, pair: Pair) -> None:
        prompt = make_prompt(300, (pair.name, "spoilt"))
        right = pair.decode.client.compute(prompt)
        params = pair.prefill.client.prefill(prompt)
        spoil_numbers(pair.prefill, params, "conv_x")
        wrong = pair.decode_leg(prompt, params)
        assert wrong.logprob_difference(right) > 2 * _OTHER_TOLERANCE
