"""Servers that share a pool on a real Mooncake Store: one finds what another has computed, after that one has ended."""

from dataclasses import replace

from tests.support.e2e.cluster import Cluster, Server, ServerSpec
from tests.support.e2e.host_memory import whole_blocks
from tests.support.e2e.pair import assert_same_output, make_prompt
from tests.support.store.mooncake_processes import MooncakeProcesses
from tests.support.waiting import until

_PROMPT, _ANSWER = 1000, 70


def counted_in_pool(server: Server, name: str, **labels: str) -> int:
    """The number of a metric of a server's pool."""
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
    prompt = make_prompt(_PROMPT, "pool")
    answer = first.client.complete(prompt, _ANSWER)
    full = whole_blocks(_PROMPT + _ANSWER - 1, first_spec.block_size)
    blocks = groups * full // first_spec.block_size
    until(lambda: counted_in_pool(first, "blocks_total", event="put") >= blocks, within_s=60)
    cluster.stop([first])

    (second,) = cluster.start([second_spec])
    turn = [*prompt, *answer.tokens, *make_prompt(20, "next turn")]
    before = second.client.metrics()
    goes_on = second.client.complete(turn)
    found = second.client.metrics().since(before)
    assert found.value("vllm:pd_pool_tokens_total") == full, "what was decoded, too"
    assert found.prompt_tokens("local_compute") == len(turn) - full
    assert counted_in_pool(second, "failures_total", event="fetched") == 0
    assert_same_output(goes_on, second.client.compute(turn))
    return second
