"""Servers that share a pool on a real Mooncake Store: one finds what another has computed, after that one has ended."""

import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.e2e.cluster import BLOCK_SIZE, Cluster, Server, ServerSpec
from tests.support.e2e.host_memory import whole_blocks
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


@pytest.fixture
def store(tmp_path: Path) -> Iterator[MooncakeProcesses]:
    processes = MooncakeProcesses(tmp_path)
    yield processes
    processes.close()


def counted(server: Server, name: str, **labels: str) -> int:
    return int(server.client.metrics().value(f"vllm:pd_pool_{name}", **labels))


def test_what_one_server_has_computed_another_of_other_shape_finds_after_its_end(
    cluster: Cluster, store: MooncakeProcesses
) -> None:
    spec = ServerSpec("kv_producer", options=(("cpu_bytes_to_use", 64 << 20), ("pool", str(store.address))))
    (first,) = cluster.start([spec])
    prompt = make_prompt(PROMPT, "pool")
    answer = first.client.complete(prompt, ANSWER)
    full = whole_blocks(PROMPT + ANSWER - 1)
    until(lambda: counted(first, "blocks_total", event="put") >= full // BLOCK_SIZE, within_s=60)
    cluster.stop([first])

    (second,) = cluster.start([replace(spec, tensor_parallel=2, layout="BLHNC")])
    turn = [*prompt, *answer.tokens, *make_prompt(20, "next turn")]
    before = second.client.metrics()
    goes_on = second.client.complete(turn)
    found = second.client.metrics().since(before)
    assert found.value("vllm:pd_pool_tokens_total") == full, "what was decoded, too"
    assert found.prompt_tokens("local_compute") == len(turn) - full
    assert counted(second, "failures_total", event="fetched") == 0
    assert_same_output(goes_on, second.client.compute(turn))

    store.client.kill()
    other = make_prompt(PROMPT, "without the pool")
    assert_same_output(second.client.complete(other), second.client.compute(other))
    until(lambda: counted(second, "works") == 0)
    cluster.stop([second])
