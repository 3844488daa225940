"""Servers whose workers are Ray's actors, by either of vLLM's executors. They want Ray: ``pip install ray``."""

import importlib.util
import json
from dataclasses import replace

import pytest

from tests.support.e2e.cluster import ServerSpec
from tests.support.e2e.deployments import SECRET, Deployment, leases, on, peer, with_host_memory
from tests.support.e2e.legs import Router
from tests.support.e2e.pair import Pair, make_prompt


def _in_ray(spec: ServerSpec, *, old: bool) -> ServerSpec:
    """The server with Ray processes of its own, which believe that there are GPUs."""
    variables = {
        "RAY_OVERRIDE_RESOURCES": json.dumps({"CPU": 1, "GPU": spec.ranks, "object_store_memory": 200_000_000}),
        "RAY_USAGE_STATS_ENABLED": "0",
        "VLLM_USE_RAY_V2_EXECUTOR_BACKEND": "0" if old else "1",
    }
    server = with_host_memory(spec, ("verify", True))
    return replace(
        server,
        secret=SECRET,
        options=(*server.options, *leases(60.0)),
        arguments=(*server.arguments, "--distributed-executor-backend", "ray"),
        module="tests.support.e2e.ray_on_cpu",
        variables=tuple(variables.items()),
        start_timeout_s=600.0,
    )


RAY = Deployment(
    "Ray",
    (
        ("old TP2", _in_ray(peer(tensor_parallel=2), old=True)),
        ("TP1", _in_ray(peer(layout="LBHNC"), old=False)),
    ),
    slow=True,
)
LACKS = "" if importlib.util.find_spec("ray") else "Ray is missing (pip install ray)"
pytestmark = [
    pytest.mark.layouts,
    on(pytest.param(RAY, marks=pytest.mark.skipif(bool(LACKS), reason=LACKS))),
    pytest.mark.timeout(900),
]
BOTH_WAYS = [("old TP2", "TP1"), ("TP1", "old TP2")]


@pytest.mark.parametrize("pair", BOTH_WAYS, indirect=True, ids="-".join)
def test_pulled_prompts_give_the_outputs_of_one_server(pair: Pair) -> None:
    pair.assert_pulls_right(make_prompt(300, pair.name))
    pair.assert_concurrent_pulls_right(4)
    Router(pair).assert_right(make_prompt(900, ("at once", pair.name)), decode_first_s=0.3)


@pytest.mark.parametrize("pair", BOTH_WAYS[:1], indirect=True, ids="-".join)
def test_a_lease_with_checksums_is_not_what_steps_wait_for(pair: Pair) -> None:
    """The old executor's messages lie in memory that has room for ten steps, if nobody keeps what has come with one."""
    prompt = make_prompt(300, ("lease", pair.name))
    with pair.traffic() as traffic:
        params = pair.prefill.client.prefill(prompt)
        pair.prefill.client.compute(make_prompt(40, "steps"), 12)
        answer = pair.decode_leg(prompt, params)
    assert (traffic.leases("released"), traffic.leases("expired")) == (1, 0)
    assert traffic.source("external_kv_transfer") == len(prompt) - 1
    pair.assert_right(answer, prompt)
