"""The doctor at real prefill servers: what it finds of them, and that it leaves nothing behind."""

import json
import os
import subprocess
import sys

import pytest

from pd_connector.config import ConnectorConfig, Tuning
from pd_connector.doctor.findings import Examination, Outcome
from pd_connector.doctor.http import HttpServer
from pd_connector.doctor.visit import Visit, Wishes
from tests.support.e2e.cluster import BLOCK_SIZE, Server
from tests.support.e2e.deployments import BHLNC, MIXED, SECRET, on

pytestmark = [pytest.mark.e2e, pytest.mark.doctor]


@on(BHLNC)
@pytest.mark.parametrize("server", ["P1", "P2"], indirect=True)
def test_a_prefill_server_is_visited(server: Server) -> None:
    config = ConnectorConfig(host="127.0.0.1", protocol="tcp", tuning=Tuning(staging_bytes=1 << 20))
    wishes = Wishes(tokens=500, pull_bytes=200_000)
    visit, report = (
        Visit(HttpServer(server.client.base_url, None, 60.0), config, "127.0.0.1", "tcp", wishes),
        Examination(),
    )
    try:
        report.run_chain(visit.checks)
    finally:
        visit.close()
    assert [str(line) for line in report.lines if line.verdict.outcome is not Outcome.OK] == []
    found = {line.name: line.verdict.values for line in report.lines}
    spec = server.spec
    assert found["geometry"]["tp"] == found["handshake"]["workers"] == spec.tensor_parallel
    assert found["geometry"]["block_tokens"] == [BLOCK_SIZE]
    assert found["conversion"]["ranks_read"] == list(range(spec.tensor_parallel))
    token_bytes = found["geometry"]["token_bytes"]
    assert found["plan"]["bytes"] == 16 * BLOCK_SIZE * token_bytes
    pulled = found["pull"]
    assert pulled["tokens"] >= 200_000 // token_bytes
    assert pulled["bytes"] == -(-pulled["tokens"] // BLOCK_SIZE) * BLOCK_SIZE * token_bytes
    assert pulled["verified"] is False  # the server does not take checksums


@on(MIXED)
@pytest.mark.timeout(600)
@pytest.mark.parametrize("server", ["TP2"], indirect=True)
def test_the_command_visits_a_server_with_a_secret_and_compares_checksums(server: Server) -> None:
    config = {"host": "127.0.0.1", "protocol": "tcp", "tuning": {"staging_bytes": 1 << 20}}
    visit = ("--peer", server.client.base_url, "--config", json.dumps(config), "--pull-bytes", "200000", "--json")
    done = subprocess.run(
        [sys.executable, "-m", "pd_connector.doctor", *visit],
        env=os.environ | {"PD_CONNECTOR_SECRET": SECRET},
        capture_output=True,
        text=True,
        check=False,
        timeout=500,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    told = json.loads(done.stdout)
    found = {check["name"]: check for check in told["checks"]}
    visited = {name: check["outcome"] for name, check in found.items() if name.startswith("peer")}
    assert told["passed"] is True
    assert "peer: pull" in visited
    assert set(visited.values()) == {"ok"}
    assert found["peer: handshake"]["values"]["secret"] is True
    assert found["peer: pull"]["values"]["verified"] is True
    assert "all checksums equal" in found["peer: pull"]["text"]
    assert SECRET not in done.stdout + done.stderr
