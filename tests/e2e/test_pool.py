"""Servers that share a pool on a real Mooncake Store: one finds what another has computed, after that one has ended."""

from collections.abc import Iterator
from dataclasses import replace

import pytest

from tests.support.e2e.cluster import Cluster, Server, ServerSpec
from tests.support.e2e.host_memory import whole_blocks
from tests.support.e2e.pair import assert_same_output, make_prompt
from tests.support.store.mooncake_processes import MooncakeProcesses
from tests.support.waiting import until

pytestmark = pytest.mark.host_tier

PROMPT = 1000


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MooncakeProcesses]:
    processes = MooncakeProcesses(tmp_path_factory.mktemp("store"))
    yield processes
    processes.close()


def spec(store: MooncakeProcesses, **values: object) -> ServerSpec:
    base = ServerSpec("kv_producer", options=(("cpu_bytes_to_use", 64 << 20), ("pool", str(store.address))))
    return replace(base, **values)  # type: ignore[arg-type]


def counted(server: Server, name: str, **labels: str) -> int:
    return int(server.client.metrics().value(f"vllm:pd_{name}", **labels))


def test_what_one_server_has_computed_another_of_other_shape_finds_after_its_end(
    cluster: Cluster, store: MooncakeProcesses
) -> None:
    prompt = make_prompt(PROMPT, "pool")
    (first,) = cluster.start([spec(store)])
    answer = first.client.complete(prompt)
    until(lambda: counted(first, "pool_blocks_total", event="put") >= whole_blocks(PROMPT) // 32, within_s=20)
    cluster.stop([first])
    (second,) = cluster.start([spec(store, tensor_parallel=2, layout="BLHNC")])
    again = second.client.complete(prompt)
    assert counted(second, "pool_tokens_total") == whole_blocks(PROMPT - 1)
    assert_same_output(again, answer)
