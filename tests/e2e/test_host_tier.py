"""What the device evicts comes back from host memory, on prefill and on decode servers, and the answers stay the same.

Servers whose model has layers with a sliding window store blocks when they are about to evict them; others as they are
computed. The device caches of most hold about 80 blocks, of which one prompt here takes up to 63.
"""

import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import msgspec
import pytest
import zmq

from tests.support.e2e.choice import on_pairs, on_servers, pairs
from tests.support.e2e.cluster import BLOCK_SIZE, Cluster, Server, ServerSpec
from tests.support.e2e.deployments import EVENTS_ENDPOINT, HOST_TIER, MIXED, SLIDING_WINDOW
from tests.support.e2e.host_memory import evict, whole_blocks
from tests.support.e2e.pair import (
    Pair,
    assert_same_output,
    control_keys,
    end_lease,
    make_prompt,
    wait_until_at_rest,
)
from tests.support.waiting import until

pytestmark = pytest.mark.host_tier
_OF_HOST_TIER = ((HOST_TIER, "P"), (HOST_TIER, "D"), (HOST_TIER, "W"))
every_server = on_servers((MIXED, "TP2"), *_OF_HOST_TIER)
every_fast_server = on_servers((MIXED, "TP1"), *_OF_HOST_TIER)  # for long answers, which take two workers long
#: Of which one has windows.
every_server_and_windows = on_servers((MIXED, "TP2"), (SLIDING_WINDOW, "TP1"), *_OF_HOST_TIER)


def host_metric(server: Server, name: str, **labels: str) -> int:
    return int(server.client.metrics().value(f"vllm:pd_{name}", **labels))


class TestComingBack:
    @every_server_and_windows
    def test_an_evicted_prompt_is_loaded_and_not_computed(self, server: Server) -> None:
        prompt = make_prompt(1000, (server.log.stem, "evicted"))
        first = server.client.complete(prompt)
        evict(server, "evicted")
        before = server.client.metrics()
        again = server.client.complete(prompt)
        counted = server.client.metrics().since(before)
        assert counted.value("vllm:pd_host_tokens_total") == whole_blocks(999)
        assert counted.prompt_tokens("external_kv_transfer") == whole_blocks(999)
        assert counted.prompt_tokens("local_compute") == 1000 - whole_blocks(999)
        assert_same_output(again, first)
        assert_same_output(again, server.client.compute(prompt))

    @every_server
    def test_a_prompt_on_the_device_is_not_loaded(self, server: Server) -> None:
        prompt = make_prompt(500, (server.log.stem, "on the device"))
        server.client.complete(prompt, 1)
        before = server.client.metrics()
        server.client.complete(prompt, 1)
        counted = server.client.metrics().since(before)
        assert counted.prompt_tokens("local_cache_hit") == whole_blocks(499)
        assert counted.value("vllm:pd_host_tokens_total") == 0

    @pytest.mark.slow
    @every_fast_server
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

    @every_fast_server
    def test_preempted_requests_give_the_answers_that_they_give_alone(self, server: Server) -> None:
        prompts = [make_prompt(300, (server.log.stem, "preempted", number)) for number in range(8)]
        before = server.client.metrics()
        with ThreadPoolExecutor(len(prompts)) as pool:
            together = list(pool.map(lambda prompt: server.client.complete(prompt, 250), prompts))
        counted = server.client.metrics().since(before)
        assert counted.value("vllm:num_preemptions_total") > 0
        assert counted.value("vllm:pd_host_tokens_total") > 0, "what was preempted was thrown away"
        with ThreadPoolExecutor(3) as pool:  # for which the device has room
            alone = list(pool.map(lambda prompt: server.client.compute(prompt, 250), prompts))
        for one, other in zip(together, alone, strict=True):
            assert_same_output(one, other)

    @every_server
    def test_clients_that_leave_while_blocks_are_loaded_leave_nothing_behind(self, server: Server) -> None:
        prompts = [make_prompt(1200, (server.log.stem, "abandoned", number)) for number in range(3)]
        for prompt in prompts:
            server.client.complete(prompt, 1)
        evict(server, "abandoned")
        for number, prompt in enumerate(prompts):
            server.client.abandon(prompt, after_s=0.002 * (1 + 5 * number), max_tokens=200)
        wait_until_at_rest(server)
        assert_same_output(server.client.complete(prompts[0]), server.client.compute(prompts[0]))

    @every_server
    def test_host_memory_holds_no_more_than_it_was_given(self, server: Server) -> None:
        for number in range(6):
            server.client.complete(make_prompt(60 * BLOCK_SIZE, (server.log.stem, "many", number)), 1)
        wait_until_at_rest(server)
        assert 0 < host_metric(server, "host_blocks_cached") <= host_metric(server, "host_blocks_capacity")

    @every_server
    def test_nothing_comes_back_after_a_reset(self, server: Server) -> None:
        prompt = make_prompt(400, (server.log.stem, "reset"))
        server.client.complete(prompt)
        evict(server, "reset")
        until(server.client.reset_prefix_cache, "the prefix cache is reset")
        wait_until_at_rest(server)
        before = server.client.metrics()
        server.client.complete(prompt)
        counted = server.client.metrics().since(before)
        assert counted.prompt_tokens("local_compute") == 400
        assert counted.value("vllm:pd_host_tokens_total") == 0


@on_servers((MIXED, "TP2"), (HOST_TIER, "P"), (HOST_TIER, "D"))
class TestStoringAtOnce:
    def test_what_is_computed_is_stored_by_the_time_the_server_rests(self, server: Server) -> None:
        stored = host_metric(server, "host_blocks_total")
        server.client.complete(make_prompt(10 * BLOCK_SIZE + 1, (server.log.stem, "stored")), 1)
        until(lambda: host_metric(server, "host_blocks_total") == stored + 10, "ten blocks are stored")
        wait_until_at_rest(server)

    def test_the_device_holds_the_begin_and_host_memory_the_rest(self, server: Server) -> None:
        prompt = make_prompt(1600, (server.log.stem, "begin"))
        first = server.client.complete(prompt)
        evict(server, "begin", 50)  # the last blocks of a prompt go first
        before = server.client.metrics()
        again = server.client.complete(prompt)
        counted = server.client.metrics().since(before)
        on_device, loaded = counted.prompt_tokens("local_cache_hit"), counted.prompt_tokens("external_kv_transfer")
        assert on_device > 0
        assert loaded == whole_blocks(1599) - on_device > 0
        assert_same_output(again, first)


@on_pairs(pairs(MIXED, [("TP1", "TP2")]), pairs(HOST_TIER, [("P", "D")]))
class TestPrefillAndDecode:
    def test_a_prompt_comes_from_the_device_host_memory_and_the_prefill_server(self, pair: Pair) -> None:
        prompt = make_prompt(1900, (pair.name, "three sources"))
        pair.decode.client.complete(prompt[:1600], 1)
        evict(pair.decode, "three sources", 50)
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
        evict(pair.decode, "not pulled")
        with pair.traffic() as traffic:
            completion = pair.disaggregate(prompt)
        assert traffic.loaded() == 20 * BLOCK_SIZE
        assert traffic.pulled("pulls") == 0
        assert (traffic.leases("granted"), traffic.leases("cancelled")) == (1, 1)
        pair.assert_right(completion, prompt)

    def test_what_was_pulled_is_stored_too(self, pair: Pair) -> None:
        prompt = make_prompt(1000, (pair.name, "pulled and stored"))
        pair.disaggregate(prompt)
        evict(pair.decode, "pulled and stored")
        with pair.traffic() as traffic:
            completion = pair.decode.client.complete(prompt)
        assert traffic.loaded() == whole_blocks(999)
        pair.assert_right(completion, prompt)

    def test_what_a_prefill_server_loads_from_host_memory_can_be_pulled(self, pair: Pair) -> None:
        prompt = make_prompt(1500, (pair.name, "loaded and pulled"))
        pair.prefill.client.complete(prompt[:1200], 1)
        evict(pair.prefill, "loaded and pulled")
        with pair.traffic() as traffic:
            completion = pair.disaggregate(prompt)
        assert traffic.loaded("prefill") == whole_blocks(1200, pair.prefill.spec.block_size)
        assert traffic.pulled("pull_tokens") == 1499 * pair.decode_ranks
        pair.assert_right(completion, prompt)

    def test_many_at_once_from_all_sources_give_the_right_outputs(self, pair: Pair) -> None:
        for number in range(3):
            pair.decode.client.complete(make_prompt(400, (number, pair.name, "concurrent")), 1)
        evict(pair.decode, "concurrent")
        pair.assert_concurrent_pulls_right(8)

    def test_a_lost_lease_fails_the_request_though_host_memory_held_its_begin(self, pair: Pair) -> None:
        prompt = make_prompt(1500, (pair.name, "lost lease"))
        pair.decode.client.complete(prompt[:640], 1)
        evict(pair.decode, "lost lease")
        params = pair.prefill.client.prefill(prompt)
        completion = pair.decode_leg(prompt, {**params, "lease_id": "no such lease"})
        assert completion.status == 500
        assert "lease" in pair.decode.log_since()
        wait_until_at_rest(pair.decode)
        assert_same_output(pair.decode.client.complete(prompt), pair.decode.client.compute(prompt))
        end_lease(params, control_keys(pair.prefill))


@pytest.fixture
def events() -> Iterator["zmq.Socket[bytes]"]:
    """A subscription to P's KV cache events."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    subscription = context.socket(zmq.SUB)
    subscription.setsockopt(zmq.RCVTIMEO, 10_000)
    subscription.subscribe(b"")
    subscription.connect(EVENTS_ENDPOINT)
    yield subscription
    context.destroy(linger=0)


@on_servers((MIXED, "TP1"), (HOST_TIER, "P"))
def test_routers_are_told_what_is_in_host_memory(server: Server, events: "zmq.Socket[bytes]") -> None:
    stored: dict[tuple[int, ...], object] = {}
    for number in range(20):  # until the subscription has reached P
        size = server.spec.block_size
        prompt = make_prompt(2 * size + 1, (server.log.stem, "events", number))
        server.client.complete(prompt, 1)
        wanted = {tuple(prompt[:size]), tuple(prompt[size : 2 * size])}
        while events.poll(1000) and not wanted <= stored.keys():
            _, _, payload = events.recv_multipart()
            for event in msgspec.msgpack.decode(payload)[1]:
                if event["type"] == "BlockStored" and event["medium"] == "CPU":
                    assert len(event["token_ids"]) == size * len(event["block_hashes"])
                    for block, block_hash in enumerate(event["block_hashes"]):
                        stored[tuple(event["token_ids"][block * size : (block + 1) * size])] = block_hash
        if wanted <= stored.keys():
            return
    pytest.fail(f"no event named the blocks in host memory; {len(stored)} others were named")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("option", "says"),
    [
        (1 << 50, r"cpu_bytes_to_use = 1125899906842624: .* are available; set it to [0-9]+ or less"),
        (1000, r"cpu_bytes_to_use = 1000: .* do not hold one block of 131072 bytes; set it to 131072 or more"),
    ],
    ids=["more than there is", "less than a block"],
)
def test_a_size_that_cannot_be_is_refused_with_one_that_can(cluster: Cluster, option: int, says: str) -> None:
    with pytest.raises(RuntimeError, match=says):
        cluster.start([ServerSpec("kv_both", options=(("cpu_bytes_to_use", option),))])
