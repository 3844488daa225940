"""An engine on simulated NPUs that is started in this process, without an API server.

    python -m tests.support.ascend.engine_process MODEL_DIRECTORY JSON

The JSON has arguments for the engine, and ``transfer`` for its ``kv_transfer_config``. The program ends when the engine
has started, and prints ``SCHEDULER``, the names of its scheduler's classes, and whether that balances.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.support.ascend.paths import ROOT_OF_PROJECT
from tests.support.ascend.servers import NPU_BLOCK_SIZE, simulated_environment

TRANSFER_CONFIG = {
    "kv_connector": "PDConnector",
    "kv_connector_module_path": "pd_connector",
    "kv_role": "kv_both",
    "kv_connector_extra_config": {"protocol": "tcp", "host": "127.0.0.1"},
}


def start_engine(model: str, transfer: dict[str, object] | None = None, **arguments: object) -> Any:
    """Start vLLM's ``LLM``; a single worker is in this process."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    from vllm import LLM  # noqa: PLC0415  after the variable is set
    from vllm.config import KVTransferConfig  # noqa: PLC0415

    usual: dict[str, Any] = {
        "dtype": "float32", "enforce_eager": True, "block_size": NPU_BLOCK_SIZE, "max_model_len": 1024,
        "max_num_seqs": 4, "num_gpu_blocks_override": 20, "gpu_memory_utilization": 0.2,
    }  # fmt: skip
    return LLM(
        model, kv_transfer_config=KVTransferConfig(**(TRANSFER_CONFIG | (transfer or {}))), **(usual | arguments)
    )


def output_of(module: str, *arguments: str, devices: int = 1) -> tuple[int, str]:
    """Run a program of these tests with simulated devices; returns its exit status and all that it says."""
    done = subprocess.run(
        [sys.executable, "-m", module, *arguments],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=600, check=False,
        env={**os.environ, **dict(simulated_environment(devices))}, cwd=ROOT_OF_PROJECT,
    )  # fmt: skip
    return done.returncode, done.stdout


def output_of_start(model: Path, *, devices: int = 1, **arguments: object) -> tuple[int, str]:
    """Start an engine in a process of its own; returns its exit status and all that it says."""
    return output_of(__name__, str(model), json.dumps(arguments), devices=devices)


if __name__ == "__main__":
    engine = start_engine(sys.argv[1], **json.loads(sys.argv[2]))
    scheduler = engine.llm_engine.engine_core.engine_core.scheduler
    names = [each.__name__ for each in type(scheduler).__mro__]
    print("SCHEDULER", *names, getattr(scheduler, "_balance_enabled", False))  # noqa: T201  its result
