"""What the device evicts comes back from host memory, on prefill and on decode servers, and the answers stay the same.

The device caches of these servers hold 80 blocks, of which the prompts here take up to 62.
"""

import random

import pytest

from tests.e2e.client import wait_until
from tests.e2e.cluster import BLOCK_SIZE, Server
from tests.e2e.deployments import DEVICE_BLOCKS, HOST_BLOCKS, HOST_TIER, on
from tests.e2e.pair import Pair, assert_same_output, make_prompt, wait_until_at_rest

pytestmark = on(HOST_TIER)


def whole_blocks(tokens: int) -> int:
    """Of so many tokens, those that fill blocks."""
    return tokens // BLOCK_SIZE * BLOCK_SIZE


def evict(server: Server, blocks: int, seed: object) -> None:
    """Compute prompts that take ``blocks`` blocks of the device which hold something else."""
    while blocks > 1:
        taken = min(blocks, 40)
        server.client.complete(make_prompt(taken * BLOCK_SIZE - 1, (server.log.stem, seed, blocks)), 1)
        blocks -= taken


def host_metric(server: Server, name: str, **labels: str) -> int:
    return int(server.client.metrics().value(f"vllm:pd_{name}", **labels))


@pytest.mark.parametrize("server", ["P", "D"], indirect=True)
class TestOneServer:
    def test_an_evicted_prompt_is_loaded_and_not_computed(self, server: Server) -> None:
        prompt = make_prompt(1000, (server.log.stem, "evicted"))
        first = server.client.complete(prompt)
        evict(server, DEVICE_BLOCKS, "evicted")
        before = server.client.metrics()
        again = server.client.complete(prompt)
        counted = server.client.metrics().since(before)
        assert counted.value("vllm:pd_host_tokens_total") == whole_blocks(999)
        assert counted.prompt_tokens("external_kv_transfer") == whole_blocks(999)
        assert counted.prompt_tokens("local_compute") == 1000 - whole_blocks(999)
        assert_same_output(again, first)
        assert_same_output(again, server.client.compute(prompt))

    def test_what_is_computed_is_stored_by_the_time_the_server_rests(self, server: Server) -> None:
        stored = host_metric(server, "host_blocks_total")
        server.client.complete(make_prompt(10 * BLOCK_SIZE + 1, (server.log.stem, "stored")), 1)
        wait_until(lambda: host_metric(server, "host_blocks_total") == stored + 10, 20, "ten blocks are stored")
        wait_until_at_rest(server)

    def test_a_prompt_on_the_device_is_not_loaded(self, server: Server) -> None:
        prompt = make_prompt(500, (server.log.stem, "on the device"))
        server.client.complete(prompt, 1)
        before = server.client.metrics()
        server.client.complete(prompt, 1)
        counted = server.client.metrics().since(before)
        assert counted.prompt_tokens("local_cache_hit") == whole_blocks(499)
        assert counted.value("vllm:pd_host_tokens_total") == 0

    def test_the_device_holds_the_begin_and_host_memory_the_rest(self, server: Server) -> None:
        prompt = make_prompt(1600, (server.log.stem, "begin"))
        first = server.client.complete(prompt)
        evict(server, 50, "begin")  # the last blocks of a prompt go first
        before = server.client.metrics()
        again = server.client.complete(prompt)
        counted = server.client.metrics().since(before)
        on_device, loaded = counted.prompt_tokens("local_cache_hit"), counted.prompt_tokens("external_kv_transfer")
        assert on_device > 0
        assert loaded == whole_blocks(1599) - on_device > 0
        assert_same_output(again, first)

    def test_a_conversation_of_many_turns_gives_the_answers_that_it_gives_without(self, server: Server) -> None:
        """Four conversations in turn, together larger than the device cache but not than host memory."""
        dice = random.Random(f"{server.log.stem} conversations")
        histories = [make_prompt(300, (server.log.stem, "conversation", number)) for number in range(4)]
        before = server.client.metrics()
        for _ in range(3):
            for history in histories:
                answer = server.client.complete(history, 40)
                assert answer.tokens == server.client.compute(history, 40).tokens
                history += [*answer.tokens, *(dice.randrange(100) for _ in range(100))]
        counted = server.client.metrics().since(before)
        assert counted.value("vllm:pd_host_tokens_total") > 4 * 300
        assert counted.value("vllm:pd_host_failures_total") == 0

    def test_host_memory_holds_no_more_than_it_was_given(self, server: Server) -> None:
        for number in range(6):
            server.client.complete(make_prompt(60 * BLOCK_SIZE, (server.log.stem, "many", number)), 1)
        wait_until_at_rest(server)
        assert 0 < host_metric(server, "host_blocks_cached") <= HOST_BLOCKS
        assert host_metric(server, "host_blocks_capacity") == HOST_BLOCKS


@pytest.mark.parametrize("pair", [("P", "D")], indirect=True, ids="-".join)
class TestPrefillAndDecode:
    def test_a_prompt_comes_from_the_device_host_memory_and_the_prefill_server(self, pair: Pair) -> None:
        prompt = make_prompt(1900, (pair.name, "three sources"))
        pair.decode.client.complete(prompt[:1600], 1)
        evict(pair.decode, 50, "three sources")
        with pair.traffic() as traffic:
            completion = pair.disaggregate(prompt)
        on_device = traffic.source("local_cache_hit")
        assert on_device > 0
        assert traffic.loaded() == 1600 - on_device > 0
        assert traffic.pulled("pull_tokens") == (1899 - 1600) * pair.decode_ranks
        assert traffic.source("external_kv_transfer") == 1899 - on_device
        assert traffic.source("local_compute") == 1
        pair.assert_right(completion, prompt)

    def test_a_prompt_that_host_memory_holds_is_not_pulled(self, pair: Pair) -> None:
        prompt = make_prompt(20 * BLOCK_SIZE + 1, (pair.name, "not pulled"))
        pair.decode.client.complete(prompt, 1)
        evict(pair.decode, DEVICE_BLOCKS, "not pulled")
        with pair.traffic() as traffic:
            completion = pair.disaggregate(prompt)
        assert traffic.loaded() == 20 * BLOCK_SIZE
        assert traffic.pulled("pulls") == 0
        assert (traffic.leases("granted"), traffic.leases("cancelled")) == (1, 1)
        pair.assert_right(completion, prompt)

    def test_what_was_pulled_is_stored_too(self, pair: Pair) -> None:
        prompt = make_prompt(1000, (pair.name, "pulled and stored"))
        pair.disaggregate(prompt)
        evict(pair.decode, DEVICE_BLOCKS, "pulled and stored")
        with pair.traffic() as traffic:
            completion = pair.decode.client.complete(prompt)
        assert traffic.loaded() == whole_blocks(999)
        pair.assert_right(completion, prompt)

    def test_what_a_prefill_server_loads_from_host_memory_can_be_pulled(self, pair: Pair) -> None:
        prompt = make_prompt(1500, (pair.name, "loaded and pulled"))
        pair.prefill.client.complete(prompt[:1200], 1)
        evict(pair.prefill, DEVICE_BLOCKS, "loaded and pulled")
        with pair.traffic() as traffic:
            completion = pair.disaggregate(prompt)
        assert traffic.loaded("prefill") == whole_blocks(1200)
        assert traffic.pulled("pull_tokens") == 1499 * pair.decode_ranks
        pair.assert_right(completion, prompt)

    def test_many_at_once_from_all_sources_give_the_right_outputs(self, pair: Pair) -> None:
        for number in range(3):
            pair.decode.client.complete(make_prompt(400, (number, pair.name, "concurrent")), 1)
        evict(pair.decode, DEVICE_BLOCKS, "concurrent")
        pair.assert_concurrent_pulls_right(8)
