"""Host memory and P/D in one, on simulated NPUs: the copies are ACL's batched ones, on streams of their own."""

from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.support.ascend.paths import ascend_release
from tests.support.ascend.servers import (
    LAZY_HOST,
    LAZY_PULLS,
    NPU_BLOCK_SIZE,
    NPU_GATED_DELTA,
    NPU_INDEXER,
    NPU_QUANTISED,
    NPU_STATE_BLOCK,
    ONE_RANK,
)
from tests.support.e2e.choice import on_pairs, pairs
from tests.support.e2e.cluster import Server
from tests.support.e2e.deployments import on
from tests.support.e2e.pair import Pair, assert_same_output, make_prompt, wait_until_at_rest

p_and_d = pytest.mark.parametrize("pair", [("P", "D")], indirect=True, ids="-".join)


def whole_blocks(tokens: int) -> int:
    """Of so many tokens, those that fill blocks."""
    return tokens // NPU_BLOCK_SIZE * NPU_BLOCK_SIZE


def evict(server: Server, seed: object, blocks: int) -> None:
    """Compute prompts that take ``blocks`` blocks of the device, which hold something else."""
    while blocks > 1:
        taken = min(blocks, 10)
        server.client.complete(make_prompt(taken * NPU_BLOCK_SIZE, (server.log.stem, seed, blocks)), 1)
        blocks -= taken


def assert_three_sources(pair: Pair) -> None:
    """A prompt comes from D's device, D's host memory, and P."""
    prompt, expected = pair.prompt_and_answer(1700, "three sources")
    pair.decode.client.complete(prompt[:1280], 1)
    wait_until_at_rest(pair.decode)
    pair.decode.client.complete(prompt[:1280], 1)  # no store holds blocks of it now: its last ones are evicted first
    evict(pair.decode, "three sources", pair.decode.client.cache_blocks() - 6)
    with pair.traffic() as traffic:
        completion = pair.disaggregate(prompt)
    on_device = traffic.source("local_cache_hit")
    assert on_device > 0
    assert traffic.loaded() == 1280 - on_device > 0
    assert traffic.pulled("pull_tokens") == 1699 - 1280
    assert traffic.source("local_compute") == 1
    pair.assert_right(completion, prompt, expected)


def assert_pulled_is_stored(pair: Pair) -> None:
    """What D has pulled comes back from its host memory when the device has dropped it."""
    prompt = make_prompt(1000, (pair.name, "pulled and stored"))
    pair.disaggregate(prompt)
    evict(pair.decode, "pulled and stored", pair.decode.client.cache_blocks())
    with pair.traffic() as traffic:
        completion = pair.decode.client.complete(prompt)
    assert traffic.loaded() == whole_blocks(999)
    pair.assert_right(completion, prompt)


@pytest.mark.ascend_short
@on(ONE_RANK)
@p_and_d
class TestBesidePulls:
    def test_an_evicted_prompt_is_loaded_and_not_computed(self, pair: Pair) -> None:
        prompt = make_prompt(1000, (pair.name, "evicted"))
        first = pair.decode.client.complete(prompt)
        evict(pair.decode, "evicted", pair.decode.client.cache_blocks())
        with pair.traffic() as traffic:
            again = pair.decode.client.complete(prompt)
        assert traffic.loaded() == whole_blocks(999)
        assert traffic.source("local_compute") == 1000 - whole_blocks(999)
        assert_same_output(again, first)

    def test_a_prompt_comes_from_the_device_host_memory_and_the_prefill_server(self, pair: Pair) -> None:
        assert_three_sources(pair)

    def test_what_was_pulled_is_stored_too(self, pair: Pair) -> None:
        assert_pulled_is_stored(pair)

    def test_preempted_requests_give_the_answers_that_they_give_alone(self, pair: Pair) -> None:
        server = pair.decode
        prompts = [make_prompt(360, (server.log.stem, "preempted", number)) for number in range(6)]
        before = server.client.metrics()
        with ThreadPoolExecutor(len(prompts)) as pool:
            together = list(pool.map(lambda prompt: server.client.complete(prompt, 160), prompts))
        assert server.client.metrics().since(before).value("vllm:num_preemptions_total") > 0
        for prompt, completion in zip(prompts, together, strict=True):
            assert_same_output(completion, server.client.compute(prompt, 160))


@pytest.mark.skipif(ascend_release() == "0.23", reason="vllm-ascend 0.23 calls other operators for it")
@on_pairs(pairs(NPU_INDEXER, [("TP2", "TP1")]), pairs(NPU_QUANTISED, [("P TP2", "D")]))
class TestIndexers:
    """Latent vectors and an indexer's keys, also in int8."""

    def test_a_prompt_comes_from_the_device_host_memory_and_the_prefill_server(self, pair: Pair) -> None:
        assert_three_sources(pair)

    def test_what_was_pulled_is_stored_too(self, pair: Pair) -> None:
        assert_pulled_is_stored(pair)


@pytest.mark.skipif(ascend_release() == "0.23", reason="hybrids are refused on vLLM 0.23")
@on(NPU_GATED_DELTA)
@pytest.mark.parametrize("pair", [("TP2", "other TP1")], indirect=True, ids="-".join)
class TestStates:
    """Of gated delta net: a prompt goes on from the last state at a border."""

    def evict(self, pair: Pair, seed: object) -> None:
        """Prompts of a block, behind which three groups of states have one each: no more than host memory holds."""
        for number in range(pair.decode.client.cache_blocks() // 4 + 1):
            pair.decode.client.complete(make_prompt(NPU_STATE_BLOCK + 1, (pair.name, seed, number)), 1)

    def test_an_evicted_prompt_is_loaded_and_not_computed(self, pair: Pair) -> None:
        prompt = make_prompt(3 * NPU_STATE_BLOCK + 1, (pair.name, "evicted"))
        first = pair.decode.client.complete(prompt)
        self.evict(pair, "evicted")
        with pair.traffic() as traffic:
            again = pair.decode.client.complete(prompt)
        assert traffic.loaded() == 3 * NPU_STATE_BLOCK
        assert traffic.source("local_compute") == 1
        assert_same_output(again, first)

    def test_what_was_pulled_is_stored_too(self, pair: Pair) -> None:
        prompt = make_prompt(3 * NPU_STATE_BLOCK + 90, (pair.name, "pulled and stored"))
        pair.disaggregate(prompt)
        self.evict(pair, "pulled and stored")
        with pair.traffic() as traffic:
            completion = pair.decode.client.complete(prompt)
        assert traffic.loaded() == 3 * NPU_STATE_BLOCK
        pair.assert_right(completion, prompt)


@on(LAZY_HOST)
@pytest.mark.parametrize("server", ["W"], indirect=True)
class TestLazyStores:
    """W stores what it is about to evict; its model has layers with a sliding window."""

    def test_an_evicted_prompt_is_loaded_and_not_computed(self, server: Server) -> None:
        prompt = make_prompt(1000, (server.log.stem, "evicted"))
        first = server.client.complete(prompt)
        evict(server, "evicted", server.client.cache_blocks())
        before = server.client.metrics()
        again = server.client.complete(prompt)
        counted = server.client.metrics().since(before)
        assert counted.value("vllm:pd_host_tokens_total") == whole_blocks(999)
        assert_same_output(again, first)


@on(LAZY_PULLS)
@p_and_d
class TestLazyStoresBesidePulls:
    def test_a_prompt_comes_from_the_device_host_memory_and_the_prefill_server(self, pair: Pair) -> None:
        assert_three_sources(pair)

    def test_what_was_pulled_is_stored_before_it_is_evicted(self, pair: Pair) -> None:
        assert_pulled_is_stored(pair)
