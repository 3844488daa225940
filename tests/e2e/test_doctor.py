"""The doctor at real prefill servers: what it finds of them, and that it leaves nothing behind."""

import json
import os
import re
import subprocess
import sys

import pytest

from pd_connector.config import ConnectorConfig
from pd_connector.doctor.findings import Examination, Outcome
from pd_connector.doctor.http import HttpServer
from pd_connector.doctor.peer_check import PeerCheck
from tests.support.e2e.cluster import BLOCK_SIZE, Server
from tests.support.e2e.deployments import BHLNC, MIXED, SECRET, on

pytestmark = [pytest.mark.e2e, pytest.mark.doctor]


@on(BHLNC)
@pytest.mark.parametrize("server", ["P1", "P2"], indirect=True)
def test_a_prefill_server_is_visited(server: Server) -> None:
    config = ConnectorConfig(host="127.0.0.1", protocol="tcp")
    peer_check, report = PeerCheck(HttpServer(server.client.base_url, None, 60.0), config, 200), Examination()
    try:
        report.run_chain(peer_check.checks)
    finally:
        peer_check.close()
    assert [str(finding) for finding in report.findings if finding.outcome is not Outcome.OK] == []
    _, handshake, pull = (finding.text for finding in report.findings)
    spec = server.spec
    # On CPUs whose kernels pack K, its order is told before that of V.
    order = rf"TP {spec.tensor_parallel}, PP 1, blocks of {BLOCK_SIZE} tokens in order (BHLCN/)?{spec.layout}"
    assert re.search(order, handshake)
    assert pull.startswith("199 tokens, ")
    assert f"by {spec.tensor_parallel} workers" in pull
    assert pull.endswith("contents not compared: P has verify off")


@pytest.mark.slow
@on(MIXED)
@pytest.mark.timeout(600)
@pytest.mark.parametrize("server", ["TP2"], indirect=True)
def test_the_command_visits_a_server_with_a_secret_and_compares_checksums(server: Server) -> None:
    config = {"host": "127.0.0.1", "protocol": "tcp"}
    peer_check = ("--peer", server.client.base_url, "--config", json.dumps(config), "--tokens", "200")
    done = subprocess.run(
        [sys.executable, "-m", "pd_connector.doctor", *peer_check],
        env=os.environ | {"PD_CONNECTOR_SECRET": SECRET},
        capture_output=True,
        text=True,
        check=False,
        timeout=500,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    visited = [line for line in done.stdout.splitlines() if line[5:].startswith("peer")]
    assert [line[:4].strip() for line in visited] == ["ok", "ok", "ok"], done.stdout + done.stderr
    assert "authenticated and encrypted" in visited[1]
    assert "by 2 workers" in visited[2]
    assert visited[2].endswith("all checksums equal")
    assert SECRET not in done.stdout + done.stderr
