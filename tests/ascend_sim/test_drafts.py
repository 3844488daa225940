"""Tokens that a layer with a cache of its own drafts (MTP, EAGLE-3): its rows are pulled with those of the model.

D drafts as well for a prompt that it computes alone, so how much of that it accepts tells whether the rows are right.
"""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import ClassVar, TypeAlias

import pytest

from tests.support.ascend.drafting_servers import (
    NPU_DRAFTS,
    NPU_DRAFTS_BESIDE_BORDERED_STATES,
    NPU_DRAFTS_BESIDE_STATES,
    NPU_DRAFTS_BY_POOLS,
    NPU_DRAFTS_COMPRESSED,
    NPU_DRAFTS_EAGLE3,
    NPU_DRAFTS_EAGLE3_MLA,
    NPU_DRAFTS_QUANTISED,
)
from tests.support.ascend.paths import ascend_release
from tests.support.ascend.servers import NPU_BLOCK_SIZE, NPU_STATE_BLOCK, STEP_TOKENS
from tests.support.e2e.client import Completion
from tests.support.e2e.cluster import Server
from tests.support.e2e.corruption import spoil_numbers
from tests.support.e2e.deployments import on
from tests.support.e2e.legs import Router
from tests.support.e2e.pair import Pair, assert_same_output, end_lease, make_prompt

pytestmark = pytest.mark.skipif(ascend_release() == "0.23", reason="vllm-ascend 0.23 calls other operators for it")

ANSWER = 24
#: What two runs may differ by in a logprob, of a model that is computed in bfloat16, or whose prompts are.
BFLOAT16_TOLERANCE = 0.05
#: Tokens of a turn, and of its answer, behind which three blocks are whole: vLLM leaves out the last that it finds. It
#: does not keep every state of a border that accepted drafts pass.
BORDERED_TURN = (3 * NPU_STATE_BLOCK - 1, 60)


def pairs(*prefill: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("pair", [(name, "D") for name in prefill], indirect=True, ids="-".join)


@dataclass(slots=True)
class Drafts:
    """What a server drafted while a ``drafts_of`` block ran, and what of that was accepted."""

    drafted: int = 0
    accepted: int = 0


#: A prompt, what D answers to it alone, and its drafts.
Reference: TypeAlias = tuple[list[int], Completion, Drafts]


@contextmanager
def drafts_of(server: Server) -> Iterator[Drafts]:
    before, drafts = server.client.metrics(), Drafts()
    yield drafts
    counted = server.client.metrics().since(before)
    drafts.drafted = int(counted.value("vllm:spec_decode_num_draft_tokens_total"))
    drafts.accepted = int(counted.value("vllm:spec_decode_num_accepted_tokens_total"))


class Drafting:
    """What holds whatever the caches, of one pair of servers. D has three drafts a step."""

    turn: ClassVar[tuple[int, int]] = (NPU_BLOCK_SIZE - 10, NPU_BLOCK_SIZE + 20)  # tokens of a first one, its answer's
    found_tokens: ClassVar[int] = NPU_BLOCK_SIZE  # of these, which fill two blocks
    layer: ClassVar[str] = ".layers.3.self_attn.attn"  # which drafts: the end of its name
    spare: ClassVar[int] = 0  # by how many accepted drafts two answers may differ

    def assert_same(self, a: Completion, b: Completion) -> None:
        assert_same_output(a, b)

    def reference(self, server: Server, prompt: list[int]) -> Reference:
        with drafts_of(server) as drafts:
            completion = server.client.compute(prompt, ANSWER)
        return prompt, completion, drafts

    def assert_right(self, completion: Completion, drafts: Drafts, reference: Reference) -> None:
        prompt, expected, alone = reference
        self.assert_same(completion, expected)
        assert abs(drafts.accepted - alone.accepted) <= self.spare_of(prompt)
        assert alone.accepted > ANSWER // 4

    def assert_cost(self, drafts: Drafts, alone: Drafts, prompt: list[int]) -> None:
        assert drafts.accepted < alone.accepted - self.spare_of(prompt)

    def spare_of(self, prompt: list[int]) -> int:
        """P computes long prompts in parts; vllm-ascend 0.30 makes a draft's last row of each of a wrong token."""
        return self.spare + len(prompt) // STEP_TOKENS

    def pulled(self, pair: Pair, tokens: int) -> tuple[list[int], Completion]:
        """A prompt that gives the same output by the same drafts as computed by D alone, and that output."""
        reference = self.reference(pair.decode, make_prompt(tokens, (tokens, pair.name)))
        with drafts_of(pair.decode) as drafts:
            _, completion = pair.assert_pulls_all(reference[0], ANSWER)
        self.assert_right(completion, drafts, reference)
        return reference[0], completion

    @pairs("P TP2")
    def test_a_second_turn_drafts_the_same_behind_what_was_drafted(self, pair: Pair) -> None:
        """D finds blocks of the first answer, into which it wrote rows of tokens that it did not accept, too."""
        tokens, answer = self.turn
        prompt = make_prompt(tokens, (pair.name, "turns"))
        first = pair.disaggregate(prompt, answer)
        more = make_prompt(100, (pair.name, "second turn"))
        reference = self.reference(pair.decode, [*prompt, *first.tokens, *more])
        with pair.traffic() as traffic, drafts_of(pair.decode) as drafts:
            completion = pair.disaggregate(reference[0], ANSWER)
        assert traffic.source("local_compute") == 1
        assert traffic.source("local_cache_hit") == self.found_tokens
        self.assert_right(completion, drafts, reference)

    @pairs("P TP2")
    def test_both_legs_at_once_bring_the_same_drafts(self, pair: Pair) -> None:
        reference = self.reference(pair.decode, make_prompt(1100, (pair.name, "legs")))
        router = Router(pair)
        with drafts_of(pair.decode) as drafts:
            answers = router.send(reference[0], ANSWER, decode_first_s=0.3)
        self.assert_right(answers.decode, drafts, reference)

    def assert_spoilt_rows_cost_drafts(self, pair: Pair, part: str) -> None:
        """A number in each row of the prompt's last block, of the layer that drafts: the output stays right."""
        prompt, expected, alone = self.reference(
            pair.decode, make_prompt(4 * NPU_BLOCK_SIZE - 1, (pair.name, "spoilt", part))
        )
        params = pair.prefill.client.prefill(prompt)
        spoil_numbers(pair.prefill, params, part, self.layer)
        with drafts_of(pair.decode) as drafts:
            completion = pair.decode_leg(prompt, params, ANSWER)
        self.assert_same(completion, expected)
        self.assert_cost(drafts, alone, prompt)


class DraftingFromAny(Drafting):
    """Also from prefill servers of other sizes, and without drafts."""

    @pairs("P TP1", "P TP2")
    @pytest.mark.parametrize("tokens", [NPU_BLOCK_SIZE + 1, 1000])
    def test_a_pulled_prompt_gives_the_same_output_by_the_same_drafts(
        self, pair: Pair, servers: dict[str, Server], tokens: int
    ) -> None:
        """And the same output as without drafts."""
        prompt, completion = self.pulled(pair, tokens)
        self.assert_as_without_drafts(completion, servers["P without"], prompt)

    def assert_as_without_drafts(self, completion: Completion, server: Server, prompt: list[int]) -> None:
        self.assert_same(completion, server.client.compute(prompt, ANSWER))

    @pairs("P without")
    def test_without_drafts_on_the_prefill_server_fewer_are_accepted(self, pair: Pair) -> None:
        """D's layer attends to what its blocks last held."""
        prompt, expected, alone = self.reference(
            pair.decode, make_prompt(4 * NPU_BLOCK_SIZE - 1, (pair.name, "none there"))
        )
        with drafts_of(pair.decode) as drafts:
            _, completion = pair.assert_pulls_all(prompt, ANSWER)
        self.assert_same(completion, expected)
        self.assert_cost(drafts, alone, prompt)


class ConcurrentDrafting(DraftingFromAny):
    """Prompts at once, too, where numbers have so many bits that it does not matter which are computed together."""

    @pairs("P TP1", "P TP2")
    def test_concurrent_prompts_give_the_same_outputs_by_the_same_drafts(self, pair: Pair) -> None:
        prompts = [make_prompt(100 + 250 * number, (pair.name, "concurrent", number)) for number in range(4)]
        references = [self.reference(pair.decode, prompt) for prompt in prompts]
        with drafts_of(pair.decode) as drafts, ThreadPoolExecutor(len(prompts)) as clients:
            completions = list(clients.map(lambda each: pair.disaggregate(each[0], ANSWER), references))
        for completion, (_, expected, _) in zip(completions, references, strict=True):
            self.assert_same(completion, expected)
        difference = drafts.accepted - sum(alone.accepted for _, _, alone in references)
        assert abs(difference) <= sum(map(self.spare_of, prompts))


@on(NPU_DRAFTS)
class TestIndexers(ConcurrentDrafting):
    @pairs("P TP2")
    @pytest.mark.parametrize("part", ["mla_latent", "mla_rope"])
    def test_spoilt_rows_cost_drafts(self, pair: Pair, part: str) -> None:
        """Of prompts as long as these, the indexer selects all tokens, whatever its keys."""
        self.assert_spoilt_rows_cost_drafts(pair, part)


class ByEagle3(ConcurrentDrafting):
    """A checkpoint of its own drafts, whose layer is numbered behind the model's.

    Of some prompts that P computes on two ranks, D accepts one draft more or fewer than of the same alone.
    """

    spare = 1
    layer = ".layers.4.self_attn.attn"


@on(NPU_DRAFTS_EAGLE3)
class TestEagle3(ByEagle3):
    @pairs("P TP2")
    @pytest.mark.parametrize("part", ["k", "v"])
    def test_spoilt_rows_cost_drafts(self, pair: Pair, part: str) -> None:
        self.assert_spoilt_rows_cost_drafts(pair, part)


class LastTokenAlone(Drafting):
    """Each reference has computed the last token of the prompt in a step that follows, as D has of a pulled prompt."""

    def reference(self, server: Server, prompt: list[int]) -> Reference:
        with drafts_of(server) as drafts:
            whole = server.client.compute(prompt, 1 + ANSWER)
        return [*prompt, whole.tokens[0]], Completion(200, "", whole.tokens[1:], whole.logprobs[1:]), drafts

    def assert_as_without_drafts(self, completion: Completion, server: Server, prompt: list[int]) -> None:
        """The same tokens: numbers in bfloat16 depend on how many tokens a step has."""
        assert completion.tokens == server.client.compute(prompt[:-1], 1 + ANSWER).tokens[1:]


class InBfloat16(LastTokenAlone):
    """Where other drafts are accepted, steps have other tokens, and numbers round otherwise."""

    def assert_same(self, a: Completion, b: Completion) -> None:
        assert a.tokens == b.tokens
        assert a.logprob_difference(b) < BFLOAT16_TOLERANCE


@on(NPU_DRAFTS_EAGLE3_MLA)
class TestEagle3BesideLatentVectors(InBfloat16, ByEagle3):
    """vllm-ascend computes the model's prompts in bfloat16, and tokens that follow in its own type."""

    spare = 4

    def assert_cost(self, drafts: Drafts, alone: Drafts, prompt: list[int]) -> None:
        """Of some prompts, few are accepted at best: of as many drafts, less than half."""
        assert 2 * drafts.accepted * alone.drafted < alone.accepted * drafts.drafted

    @pairs("P TP2")
    @pytest.mark.parametrize("part", ["v"])
    def test_spoilt_rows_cost_drafts(self, pair: Pair, part: str) -> None:
        """The draft's queries have zeros where a number of its keys would be spoilt."""
        self.assert_spoilt_rows_cost_drafts(pair, part)


@on(NPU_DRAFTS_QUANTISED)
class TestQuantised(LastTokenAlone, DraftingFromAny):
    """Latent vectors in int8. The numbers have the same bits as the reference's.

    But the reference had drafts in the step of the last token, and its other steps are other ones, too.
    """

    spare = 4

    @pairs("P TP2")
    @pytest.mark.parametrize("part", ["mla_scale"])
    def test_spoilt_rows_cost_drafts(self, pair: Pair, part: str) -> None:
        """One of 512 numbers in int8 would not do."""
        self.assert_spoilt_rows_cost_drafts(pair, part)


@on(NPU_DRAFTS_BESIDE_STATES)
class TestBesideStates(ConcurrentDrafting):
    """Of the same prompt of a dozen tokens, D alone accepts some drafts more or less from one time to the next."""

    spare = 2
    found_tokens = 0  # without prefix caching
    layer = "mtp.layers.0.self_attn.attn"

    @pairs("P TP2")
    @pytest.mark.parametrize("part", ["k", "v"])
    def test_spoilt_rows_cost_drafts(self, pair: Pair, part: str) -> None:
        self.assert_spoilt_rows_cost_drafts(pair, part)

    @pairs("P TP1")
    def test_the_layer_that_drafts_sees_the_token_that_is_left_to_the_decode_server(self, pair: Pair) -> None:
        """As P's answer: its last row is made of the last token that it computes, and of the one behind."""
        prompt = make_prompt(NPU_BLOCK_SIZE + 1, (pair.name, "left out"))
        answer = pair.prefill.client.complete(prompt, 1, kv_transfer_params={"do_remote_decode": True})
        assert answer.kv_transfer_params is not None
        end_lease(answer.kv_transfer_params)
        assert list(answer.tokens) == prompt[-1:]


class DraftingFromOne(Drafting):
    """From one prefill server, which has drafts, too."""

    @pairs("P TP2")
    @pytest.mark.parametrize("tokens", [NPU_BLOCK_SIZE + 1, 1000])
    def test_a_pulled_prompt_gives_the_same_output_by_the_same_drafts(self, pair: Pair, tokens: int) -> None:
        self.pulled(pair, tokens)


@on(NPU_DRAFTS_BESIDE_BORDERED_STATES)
class TestBesideBorderedStates(DraftingFromOne):
    """With prefix caching: D's next turn goes on from a state at a border, which came with the turn before."""

    spare = 2
    turn = BORDERED_TURN
    found_tokens = 2 * NPU_STATE_BLOCK
    layer = "mtp.layers.0.self_attn.attn"

    @pairs("P TP2")
    def test_spoilt_rows_cost_drafts(self, pair: Pair) -> None:
        self.assert_spoilt_rows_cost_drafts(pair, "k")


@on(NPU_DRAFTS_COMPRESSED)
class TestBesideCompressedCaches(InBfloat16, DraftingFromOne):
    """DeepSeek-V4: a layer with a window drafts."""

    spare = 2
    found_tokens = 0  # all caches together end a block after 16384 tokens
    layer = "mtp.0.self_attn.swa_cache"

    @pairs("P TP2")
    def test_spoilt_rows_cost_drafts(self, pair: Pair) -> None:
        self.assert_spoilt_rows_cost_drafts(pair, "part0")


@on(NPU_DRAFTS_BY_POOLS)
class TestByPools(InBfloat16, DraftingFromOne):
    """GLM-5.3-Flash: a layer with latent vectors, keys of pools and a ring drafts, beside states."""

    spare = 2
    turn = BORDERED_TURN
    found_tokens = 2 * NPU_STATE_BLOCK
    layer = ".layers.5.self_attn.attn"

    @pairs("P TP2")
    def test_spoilt_rows_cost_drafts(self, pair: Pair) -> None:
        self.assert_spoilt_rows_cost_drafts(pair, "part0")
