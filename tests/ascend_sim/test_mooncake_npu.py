"""Mooncake's wheel for NPUs with its own transport for Ascend, between simulated NPUs.

CANN's ADXL below it is a stand-in, so nothing here says how HCCS or RoCE behave; all above it is real.
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.ascend import mooncake_peer
from tests.support.ascend.mooncake_peer import build_adxl
from tests.support.ascend.paths import ROOT_OF_PROJECT, mooncake_npu_directory
from tests.support.ascend.servers import simulated_environment
from tests.support.store.mooncake_processes import MooncakeProcesses

COMMAND = [sys.executable, "-m", mooncake_peer.__name__]
#: By HCCL's communicators, in the place of client-server mode.
HCCL = {"ASCEND_LOCAL_COMM_RES": '{"version":"1.2"}'}


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


def serve(environment: dict[str, str], *pool_registers: str) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [*COMMAND, "serve", *pool_registers],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment, cwd=ROOT_OF_PROJECT,
    )  # fmt: skip


def peer_of(serving: "subprocess.Popen[str]") -> str:
    assert serving.stdout is not None
    return next(line.removeprefix("PEER ") for line in serving.stdout if line.startswith("PEER "))


def test_the_pool_works_beside_the_transport(environment: dict[str, str], tmp_path: Path) -> None:
    """In one process: device memory over the transport for Ascend, and the connector's own pool over TCP."""
    processes = MooncakeProcesses(tmp_path, 64 << 20)
    serving = serve(environment)
    try:
        done = subprocess.run(
            [*COMMAND, "read", peer_of(serving), str(processes.address)],
            capture_output=True, text=True, timeout=120, check=False, env=environment, cwd=ROOT_OF_PROJECT,
        )  # fmt: skip
    finally:
        serving.communicate("", timeout=60)
        processes.close()
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["equal"]
    assert found["pooled"]


@pytest.mark.parametrize(
    "pool_registers", [(), ("before",), ("after",)], ids=["alone", "behind a pool", "before a pool"]
)
def test_device_memory_is_read_and_the_peer_proves_who_it_is(
    environment: dict[str, str], pool_registers: tuple[str, ...]
) -> None:
    """Also by the engine that vllm-ascend's pool of KV blocks uses: the memory is registered once, whoever is first."""
    serving = serve(environment, *pool_registers)
    try:
        peer = peer_of(serving)
        (published,) = Path(environment["SIMADXL_DIR"]).iterdir()
        process, *memory = published.read_text().splitlines()
        assert process.endswith(" 1"), "Mooncake and CANN 9.1 have client-server mode, and docs/npu.md says so"
        starts = [line.split()[0] for line in memory]
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


def test_both_sides_must_make_links_in_the_same_way(environment: dict[str, str]) -> None:
    serving = serve(environment | HCCL)
    try:
        done = subprocess.run(
            [*COMMAND, "link", peer_of(serving)],
            capture_output=True, text=True, timeout=120, check=False, env=environment, cwd=ROOT_OF_PROJECT,
        )  # fmt: skip
    finally:
        serving.communicate("", timeout=60)
    assert done.returncode == 0, done.stderr
    (refusal,) = json.loads(done.stdout.splitlines()[-1])
    assert refusal.startswith("cannot reach the transfer engine at")


@pytest.fixture
def peers(environment: dict[str, str]) -> Iterator[list[str]]:
    """Two peers, by HCCL's communicators, of which CANN makes one at a time."""
    serving = [serve(environment | HCCL) for _ in range(2)]
    try:
        yield [peer_of(each) for each in serving]
    finally:
        for each in serving:
            each.communicate("", timeout=60)


@pytest.mark.parametrize(
    ("timeout", "said"),
    [
        ({}, []),
        ({"ASCEND_TRANSFER_TIMEOUT": "1000"}, ["CANN did not make the link within 1 s (ASCEND_TRANSFER_TIMEOUT), and"]),
    ],
    ids=["in time", "too late"],
)
def test_links_that_cann_makes_one_after_another_have_its_time(
    environment: dict[str, str], peers: list[str], timeout: dict[str, str], said: list[str]
) -> None:
    """The last of them takes longer than a peer has for its first answer, which is 5 s."""
    done = subprocess.run(
        [*COMMAND, "link", *peers], capture_output=True, text=True, timeout=120, check=False, cwd=ROOT_OF_PROJECT,
        env={**environment, **HCCL, **timeout, "SIMADXL_LINK_MS": "3000"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    refusals = json.loads(done.stdout.splitlines()[-1])
    assert [[text for text in said if text in refusal] for refusal in refusals] == [said] * 2
    assert bool(said) == any(refusals), refusals


def test_without_cann_the_wheel_says_what_it_lacks(environment: dict[str, str]) -> None:
    bare = {**environment, "LD_LIBRARY_PATH": dict(simulated_environment())["LD_LIBRARY_PATH"]}
    done = subprocess.run(
        [sys.executable, "-c", "import mooncake.engine"], capture_output=True, text=True, check=False, env=bare
    )
    assert "libllm_datadist.so: cannot open shared object file" in done.stderr
