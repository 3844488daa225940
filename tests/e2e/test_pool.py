"""Servers that share a pool on a real Mooncake Store: one finds what another has computed, after that one has ended."""

import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.e2e.cluster import Cluster, Server, ServerSpec
from tests.support.e2e.deployments import SLIDING_WINDOW
from tests.support.e2e.host_memory import whole_blocks
from tests.support.e2e.hybrid_deployments import QWEN3_NEXT
from tests.support.e2e.pair import assert_same_output, make_prompt
from tests.support.store.mooncake_processes import MooncakeProcesses
from tests.support.waiting import until

pytestmark = [
    pytest.mark.host_tier,
    pytest.mark.slow,
    pytest.mark.skipif(
        not Path(sys.executable).with_name("mooncake_client").exists(), reason="mooncake_client is not installed"
    ),
]

PROMPT, ANSWER = 1000, 70
#: Else vLLM keeps windows at the ends of prompts only.
KEEPS_ALL = ("--prefix-cache-retention-interval", "None")
BLOCKS_OF_A_BORDER = 4  # of Qwen3-Next's cache groups, one with keys and values


@pytest.fixture
def store(tmp_path: Path) -> Iterator[MooncakeProcesses]:
    processes = MooncakeProcesses(tmp_path)
    yield processes
    processes.close()


def counted(server: Server, name: str, **labels: str) -> int:
    return int(server.client.metrics().value(f"vllm:pd_pool_{name}", **labels))


def pooled(spec: ServerSpec, store: MooncakeProcesses, *arguments: str) -> ServerSpec:
    """The server with host memory and the pool behind it."""
    options = dict(spec.options) | {"cpu_bytes_to_use": 64 << 20, "pool": str(store.address)}
    return replace(spec, options=tuple(options.items()), arguments=(*spec.arguments, *arguments))


def start_where_another_has_ended(
    cluster: Cluster, first_spec: ServerSpec, second_spec: ServerSpec, groups: int = 1
) -> Server:
    """Start a server that must find what another one has computed, which has ended: whole blocks of prompt and answer.

    ``groups``: of the model's caches, each of which has a block for those.
    """
    (first,) = cluster.start([first_spec])
    prompt = make_prompt(PROMPT, "pool")
    answer = first.client.complete(prompt, ANSWER)
    full = whole_blocks(PROMPT + ANSWER - 1, first_spec.block_size)
    until(lambda: counted(first, "blocks_total", event="put") >= groups * full // first_spec.block_size, within_s=60)
    cluster.stop([first])

    (second,) = cluster.start([second_spec])
    turn = [*prompt, *answer.tokens, *make_prompt(20, "next turn")]
    before = second.client.metrics()
    goes_on = second.client.complete(turn)
    found = second.client.metrics().since(before)
    assert found.value("vllm:pd_pool_tokens_total") == full, "what was decoded, too"
    assert found.prompt_tokens("local_compute") == len(turn) - full
    assert counted(second, "failures_total", event="fetched") == 0
    assert_same_output(goes_on, second.client.compute(turn))
    return second


def test_what_one_server_has_computed_another_of_other_shape_finds_after_its_end(
    cluster: Cluster, store: MooncakeProcesses
) -> None:
    spec = pooled(ServerSpec("kv_producer"), store)
    second = start_where_another_has_ended(cluster, spec, replace(spec, tensor_parallel=2, layout="BLHNC"))
    store.client.kill()
    other = make_prompt(PROMPT, "without the pool")
    assert_same_output(second.client.complete(other), second.client.compute(other))
    until(lambda: counted(second, "works") == 0)
    cluster.stop([second])


def test_windows_are_found_by_a_server_with_more_ranks(cluster: Cluster, store: MooncakeProcesses) -> None:
    spec = pooled(dict(SLIDING_WINDOW.servers)["TP2"], store, *KEEPS_ALL)
    second = start_where_another_has_ended(cluster, replace(spec, tensor_parallel=1), spec, groups=3)
    cluster.stop([second])


def test_states_are_found_at_the_last_border(cluster: Cluster, store: MooncakeProcesses) -> None:
    spec = pooled(dict(QWEN3_NEXT.servers)["P"], store)
    second = start_where_another_has_ended(cluster, spec, spec, BLOCKS_OF_A_BORDER)
    cluster.stop([second])
