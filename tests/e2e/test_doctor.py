"""The doctor at real prefill servers: what it finds of them, and that it leaves nothing behind."""

import pytest

from pd_connector.config import ConnectorConfig
from pd_connector.doctor.findings import Examination, Outcome
from pd_connector.doctor.http import HttpServer
from pd_connector.doctor.visit import Visit, Wishes
from tests.support.e2e.cluster import BLOCK_SIZE, Server
from tests.support.e2e.deployments import BHLNC, on

pytestmark = [pytest.mark.e2e, pytest.mark.doctor]


@on(BHLNC)
@pytest.mark.parametrize("server", ["P1", "P2"], indirect=True)
def test_a_prefill_server_is_visited(server: Server) -> None:
    config = ConnectorConfig(host="127.0.0.1", protocol="tcp", staging_bytes=1 << 20, handshake_timeout_s=40.0)
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
