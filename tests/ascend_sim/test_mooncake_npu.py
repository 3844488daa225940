"""Mooncake's wheel for NPUs with its own transport for Ascend, between simulated NPUs.

CANN's ADXL below it is a stand-in, so nothing here says how HCCS or RoCE behave; all above it is real.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.ascend import mooncake_peer
from tests.support.ascend.mooncake_peer import build_adxl
from tests.support.ascend.paths import ROOT_OF_PROJECT, mooncake_npu_directory
from tests.support.ascend.servers import simulated_environment

COMMAND = [sys.executable, "-m", mooncake_peer.__name__]


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    build_adxl(tmp_path)
    simulated = {**os.environ, **dict(simulated_environment())}
    return {
        **simulated,
        "LD_LIBRARY_PATH": f"{simulated['LD_LIBRARY_PATH']}:{tmp_path}",
        "PYTHONPATH": f"{mooncake_npu_directory()}:{simulated['PYTHONPATH']}",
        "SIMADXL_DIR": str(tmp_path / "engines"),
    }


@pytest.mark.parametrize(
    "pool_registers", [(), ("before",), ("after",)], ids=["alone", "behind a pool", "before a pool"]
)
def test_device_memory_is_read_and_the_peer_proves_who_it_is(
    environment: dict[str, str], pool_registers: tuple[str, ...]
) -> None:
    """Also by the engine that vllm-ascend's pool of KV blocks uses: the memory is registered once, whoever is first."""
    serving = subprocess.Popen(
        [*COMMAND, "serve", *pool_registers],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment, cwd=ROOT_OF_PROJECT,
    )  # fmt: skip
    assert serving.stdout is not None
    try:
        peer = next(line.removeprefix("PEER ") for line in serving.stdout if line.startswith("PEER "))
        (published,) = Path(environment["SIMADXL_DIR"]).iterdir()
        starts = [line.split()[0] for line in published.read_text().splitlines()[1:]]
        assert starts.count(str(json.loads(peer)[1])) == 1
        done = subprocess.run(
            [*COMMAND, "read", peer],
            capture_output=True, text=True, timeout=120, check=False, env=environment, cwd=ROOT_OF_PROJECT,
        )  # fmt: skip
    finally:
        serving.communicate("", timeout=60)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["equal"]
    assert found["counts"], "batches are told by Mooncake's own counters"
    assert found["impostor"].startswith("another process than the one that was announced answers at")


def test_without_cann_the_wheel_says_what_it_lacks(environment: dict[str, str]) -> None:
    bare = {**environment, "LD_LIBRARY_PATH": dict(simulated_environment())["LD_LIBRARY_PATH"]}
    done = subprocess.run(
        [sys.executable, "-c", "import mooncake.engine"], capture_output=True, text=True, check=False, env=bare
    )
    assert "libllm_datadist.so: cannot open shared object file" in done.stderr
