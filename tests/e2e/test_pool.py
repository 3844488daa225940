"""Servers that share a pool on a real Mooncake Store: one finds what another has computed, after that one has ended."""

import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.e2e.cluster import Cluster, ServerSpec
from tests.support.e2e.deployments import SLIDING_WINDOW
from tests.support.e2e.hybrid_deployments import QWEN3_NEXT
from tests.support.e2e.pair import assert_same_output, make_prompt
from tests.support.e2e.pooled_servers import counted_in_pool, pooled, start_where_another_has_ended
from tests.support.store.mooncake_processes import MooncakeProcesses
from tests.support.waiting import until

pytestmark = [
    pytest.mark.host_tier,
    pytest.mark.slow,
    pytest.mark.skipif(
        not Path(sys.executable).with_name("mooncake_client").exists(), reason="mooncake_client is not installed"
    ),
]

#: Else vLLM keeps windows at the ends of prompts only.
KEEPS_ALL = ("--prefix-cache-retention-interval", "None")
BLOCKS_OF_A_BORDER = 4  # of Qwen3-Next's cache groups, one with keys and values


@pytest.fixture
def store(tmp_path: Path) -> Iterator[MooncakeProcesses]:
    processes = MooncakeProcesses(tmp_path)
    yield processes
    processes.close()


def test_what_one_server_has_computed_another_of_other_shape_finds_after_its_end(
    cluster: Cluster, store: MooncakeProcesses
) -> None:
    spec = pooled(ServerSpec("kv_producer"), store)
    second = start_where_another_has_ended(cluster, spec, replace(spec, tensor_parallel=2, layout="BLHNC"))
    store.client.kill()
    other = make_prompt(1000, "without the pool")
    assert_same_output(second.client.complete(other), second.client.compute(other))
    until(lambda: counted_in_pool(second, "works") == 0)
    cluster.stop([second])


def test_windows_are_found_by_a_server_with_more_ranks(cluster: Cluster, store: MooncakeProcesses) -> None:
    spec = pooled(dict(SLIDING_WINDOW.servers)["TP2"], store, *KEEPS_ALL)
    second = start_where_another_has_ended(cluster, replace(spec, tensor_parallel=1), spec, groups=3)
    cluster.stop([second])


def test_states_are_found_at_the_last_border(cluster: Cluster, store: MooncakeProcesses) -> None:
    spec = pooled(dict(QWEN3_NEXT.servers)["P"], store)
    second = start_where_another_has_ended(cluster, spec, spec, BLOCKS_OF_A_BORDER)
    cluster.stop([second])
