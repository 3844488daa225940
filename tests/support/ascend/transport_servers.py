"""Sets of servers on simulated NPUs over Mooncake's own transport for Ascend, on a stand-in for CANN's ADXL."""

import os
import tempfile
from dataclasses import replace
from pathlib import Path

from tests.support.ascend.paths import mooncake_npu_directory
from tests.support.ascend.servers import on_npu
from tests.support.e2e.cluster import ServerSpec, Sibling
from tests.support.e2e.deployments import Deployment, peer, prefill
from tests.support.e2e.models import DEFAULT_MODEL

#: Stand-ins for the libraries of CANN below Mooncake's own transport, and what processes leave there for each other.
ADXL = Path(tempfile.gettempdir()) / f"ascend-sim-adxl-{os.getpid()}"


def _by_ascend(spec: ServerSpec) -> ServerSpec:
    """The server with Mooncake's wheel for NPUs, over the transport that is the default on NPUs."""
    variables = dict(spec.variables)
    return replace(
        spec,
        options=tuple(option for option in spec.options if option[0] != "protocol"),
        variables=(
            *spec.variables,
            ("LD_LIBRARY_PATH", f"{variables['LD_LIBRARY_PATH']}:{ADXL}"),
            ("PYTHONPATH", f"{mooncake_npu_directory()}:{variables['PYTHONPATH']}"),
            ("SIMADXL_DIR", str(ADXL / "engines")),
        ),
    )


#: Mooncake's own transport for Ascend, on a stand-in for CANN's ADXL.
ASCEND_TRANSPORT = Deployment(
    "ascend transport",
    (
        ("P", _by_ascend(on_npu(prefill()))),
        ("P TP2", _by_ascend(on_npu(prefill(tensor_parallel=2)))),
        ("D", _by_ascend(on_npu(replace(peer(DEFAULT_MODEL, None), role="kv_consumer")))),
    ),
)


#: What vllm-ascend's pool of KV blocks reads at start: where Mooncake's master is.
STORE_CONFIG = ADXL / "mooncake.json"


def _beside_store(spec: ServerSpec, *, store_is_first: bool) -> ServerSpec:
    """The server with AscendStoreConnector in MultiConnector, too, before this connector or behind it."""
    # Its workers are asked at a socket of this name, and all servers are on this machine.
    options = (("backend", "mooncake"), ("lookup_rpc_port", f"{os.getpid()}-{spec.role}"))
    spec = _by_ascend(spec)
    variables = (*spec.variables, ("MOONCAKE_CONFIG_PATH", str(STORE_CONFIG)), ("VLLM_HOST_IP", "127.0.0.1"))
    store = Sibling("AscendStoreConnector", options=options, is_first=store_is_first)
    return replace(spec, sibling=store, variables=variables)


#: The same transport, by vllm-ascend's engine, beside its pool in AscendMultiConnector. P's device has room for little
#: more than one prompt. D neither stores in the pool nor loads from it.
ASCEND_STORE = Deployment(
    "ascend store",
    (
        ("P", _beside_store(on_npu(prefill(), device_blocks=20), store_is_first=False)),
        ("D", _beside_store(on_npu(replace(peer(DEFAULT_MODEL, None), role="kv_consumer")), store_is_first=True)),
    ),
)
