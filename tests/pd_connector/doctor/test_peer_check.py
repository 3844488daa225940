"""Visits to prefill engines without vLLM: real control channel, real leases, real bytes; all well, and with faults.

Only HTTP is left out here: ``test_listener`` has it.
"""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from layout.geometry import CacheGroup, Plane, Region
from pd_connector.config import ConnectorConfig
from pd_connector.doctor.findings import Examination, Outcome
from pd_connector.doctor.http import HttpServer
from pd_connector.doctor.peer_check import PeerCheck
from pd_connector.engine_limits import ENGINE_LIMITS
from tests.support.connector.engines import MODEL, Blocks, PrefillEngine, Site
from tests.support.engine.in_process import Fault, InProcessEngine
from tests.support.layout.oracle import LAYOUTS, Engine, Model
from transfer.engine.interface import EngineStartError

IN_ORDER = ["peer", "peer: handshake", "peer: pull"]
WINDOWED = Model(kv_heads=4, contents=(8, 8), item_size=2, groups=((0, 2), (1, 3)), windows=(0, 40))
TOKENS = 70
#: Of the 70 tokens in each group; of a window, what has passed is not held.
HELD: Blocks = ((5, 6, 3, 9, 2), (0, 0, 0, 4, 7))


class Served(HttpServer):
    """The HTTP port of a prefill engine that computes what it is asked for at once."""

    def __init__(self, engine: PrefillEngine, held: Blocks = HELD) -> None:
        super().__init__("http://p:8000", None, 1.0)
        self.engine, self.held = engine, held
        self.answers: list[dict[str, Any]] = []

    def ask(self, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        if body is None:
            assert path == "/v1/models"
            return {"data": [{"id": "tiny", "max_model_len": TOKENS + 1}]}
        assert path == "/v1/completions"
        assert body["model"] == "tiny"
        tokens = len(body["prompt"])
        groups = self.engine.ranks[0].geometry.groups
        blocks = tuple(ids[: -(-tokens // group.block_tokens)] for ids, group in zip(self.held, groups, strict=False))
        remote = self.engine.prefill(f"request {len(self.answers)}", blocks, tokens)
        self.engine.hash_leased()
        self.answers.append({"kv_transfer_params": remote.to_params()})
        return self.answers[-1]


@pytest.fixture
def site(monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    """Where engines are, among them that of a visitor."""
    site = Site()
    monkeypatch.setattr(
        "pd_connector.worker.transfer_engine.open_engine", lambda _, *, is_read: InProcessEngine(site.fabric)
    )
    yield site
    site.close()


def settings(**config: object) -> ConnectorConfig:
    return ConnectorConfig.model_validate({"host": "127.0.0.1", "protocol": "tcp"} | config)


def report_of(server: HttpServer, tokens: int = TOKENS, **config: object) -> Examination:
    peer_check, report = PeerCheck(server, settings(**config), tokens), Examination()
    try:
        report.run_chain(peer_check.checks)
    finally:
        peer_check.close()
    return report


def only_failure(report: Examination) -> tuple[str, str]:
    """The name and the text of the check that has failed; those after it were skipped."""
    failed = [finding for finding in report.findings if finding.outcome is Outcome.FAIL]
    assert len(failed) == 1, [str(finding) for finding in report.findings]
    behind = report.findings[report.findings.index(failed[0]) + 1 :]
    assert {finding.outcome for finding in behind} <= {Outcome.SKIP}
    assert [finding.name for finding in report.findings] == IN_ORDER
    return failed[0].name, failed[0].text


def test_all_is_well(site: Site) -> None:
    engine = site.prefill(verify=True)
    report = report_of(Served(engine))
    assert [(one.name, one.outcome) for one in report.findings] == [(name, Outcome.OK) for name in IN_ORDER]
    peer, handshake, pull = (one.text for one in report.findings)
    assert peer.startswith("http://p:8000 serves 'tiny'; engine ")
    assert f"its control channel is at 127.0.0.1:{engine.port}" in peer
    assert "without a secret; LlamaForCausalLM, TP 1, PP 1, blocks of 16 tokens in order BHLNC" in handshake
    assert pull.startswith("69 tokens, ")
    assert " GB/s; " in pull
    assert pull.endswith("all checksums equal")
    assert engine.leases.active == 0


@pytest.mark.parametrize(
    ("engine", "model"),
    [
        *((Engine(layout=layout, form="views", blocks=12), MODEL) for layout in LAYOUTS),
        (Engine(layout="BHLNC", form="packed", blocks=12), MODEL),
        (Engine(layout="BHLNC", tp=4, blocks=12), MODEL),
        (Engine(layout="LBHNC", form="views", tp=2, pp=3, blocks=12), MODEL),
        (Engine(layout="BLHNC", blocks=24, kernel_blocks=2), MODEL),
        (Engine(layout="BHLNC", blocks=12, layers_apart=True), MODEL),
        (Engine(layout="BLHNC", blocks=12), WINDOWED),
    ],
    ids=str,
)
def test_every_rank_is_read_by_a_worker_of_its_own(site: Site, engine: Engine, model: Model) -> None:
    p = site.prefill(engine, model=model, verify=True)
    report = report_of(Served(p))
    assert report.passed, [str(finding) for finding in report.findings]
    assert f"by {engine.tp * engine.pp} workers" in report.findings[-1].text
    assert report.findings[-1].text.endswith("all checksums equal")
    assert p.leases.active == 0


@pytest.mark.parametrize(("state_tokens", "table"), [(1024, (4,)), (32, (0, 0, 4))])
def test_states_are_read_wherever_the_table_has_them(site: Site, state_tokens: int, table: tuple[int, ...]) -> None:
    """It has an entry for each border that the prompt has passed."""
    engine = site.prefill()
    memory = np.arange(12 * 64, dtype=np.uint8)
    region = Region(memory.ctypes.data, memory.size)
    engine.engines[0].register((region,))
    plane = Plane("state", ("layers.9",), 0, 2, 1, 8, 4, 12, region.address, 64, 64, 32, 32, 4, total_heads=2,
                  dtype="float32")  # fmt: skip
    group = CacheGroup(state_tokens, 0, (plane,), states=True)
    attention = engine.ranks[0].geometry
    geometry = replace(attention, groups=(*attention.groups, group), regions=(*attention.regions, region))
    engine.ranks[0] = replace(engine.ranks[0], geometry=geometry)
    engine.service.set_workers((geometry,))
    report = report_of(Served(engine, (HELD[0], table)))
    assert report.passed, [str(finding) for finding in report.findings]


def test_a_shorter_prompt_is_pulled_if_it_is_wanted(site: Site) -> None:
    assert report_of(Served(site.prefill()), tokens=20).findings[-1].text.startswith("19 tokens, ")


def test_without_checksums_of_p_nothing_is_said_to_be_compared(site: Site) -> None:
    text = report_of(Served(site.prefill())).findings[-1].text
    assert text.endswith("contents not compared: P has verify off")


def test_a_decode_engine_that_verifies_needs_a_p_that_does(site: Site) -> None:
    name, text = only_failure(report_of(Served(site.prefill()), verify=True))
    assert name == "peer: pull"
    assert text.startswith("incompatible: ")
    assert "verify" in text


def test_what_is_pulled_is_compared(site: Site) -> None:
    """Bytes of P's memory that change after they were leased are found."""
    engine = site.prefill(verify=True)

    class Corrupting(Served):
        def ask(self, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
            answer = super().ask(path, body)
            engine.ranks[0].memory[:] += 1
            return answer

    name, text = only_failure(report_of(Corrupting(engine)))
    assert name == "peer: pull"
    assert text.startswith("checksum: ")
    assert "checksums of what has arrived differ from those of what was leased" in text


def test_a_read_that_fails_is_named_with_its_cause(site: Site) -> None:
    engine = site.prefill()
    site.fabric.inject(1, Fault())
    name, text = only_failure(report_of(Served(engine)))
    assert name == "peer: pull"
    assert text.startswith("read: ")
    assert engine.leases.active == 0


def test_a_data_port_that_cannot_be_reached_is_named(site: Site) -> None:
    engine = site.prefill()
    engine.engines[0].close()
    name, text = only_failure(report_of(Served(engine)))
    assert name == "peer: pull"
    assert text.startswith("unreachable: ")
    assert "prefill rank 0" in text


def test_a_transfer_engine_that_does_not_start_is_a_failure(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise EngineStartError("no such device")

    monkeypatch.setattr("pd_connector.worker.transfer_engine.open_engine", refuse)
    assert only_failure(report_of(Served(site.prefill()))) == ("peer: pull", "EngineStartError: no such device")


def test_a_lease_that_ends_early_is_named(site: Site) -> None:
    engine = site.prefill()

    class Hurried(Served):
        def ask(self, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
            answer = super().ask(path, body)
            if len(self.answers) > 1:
                engine.leases.cancel_all()
            return answer

    name, text = only_failure(report_of(Hurried(engine)))
    assert name == "peer: pull"
    assert text.startswith("lease: ")


def test_a_control_port_where_nobody_answers(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    limits = replace(ENGINE_LIMITS, handshake_timeout_s=0.3)
    monkeypatch.setattr("pd_connector.doctor.peer_check.ENGINE_LIMITS", limits)
    monkeypatch.setattr("pd_connector.doctor.peer_check._CANCEL_TIMEOUT_S", 0.1)
    engine = site.prefill()

    class Dying(Served):
        def ask(self, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
            answer = super().ask(path, body)
            if body is not None:
                engine.close()
            return answer

    name, text = only_failure(report_of(Dying(engine)))
    assert name == "peer: handshake"
    assert text.startswith("unreachable: ")
    assert "did not answer 'hello'" in text


def test_another_engine_at_the_control_port_refuses_with_its_reason(site: Site) -> None:
    engine = site.prefill()

    class Restarted(Served):
        def ask(self, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
            answer = super().ask(path, body)
            return (
                answer
                if body is None
                else {"kv_transfer_params": answer["kv_transfer_params"] | {"remote_engine_id": "e"}}
            )

    name, text = only_failure(report_of(Restarted(engine)))
    engine.leases.cancel_all()
    assert name == "peer: handshake"
    assert text.startswith("refused: ")


def test_another_transport(site: Site) -> None:
    engine = site.prefill()
    workers = tuple(replace(rank.geometry, transport="tcp") for rank in engine.ranks)
    engine.service.set_workers(workers)
    name, text = only_failure(report_of(Served(engine), protocol="rdma"))
    assert name == "peer: handshake"
    assert "protocol is 'rdma' here and 'tcp' on the remote engine" in text


def test_over_ascend_nothing_is_pulled(site: Site) -> None:
    report = report_of(Served(site.prefill()), protocol="ascend")
    assert [finding.outcome for finding in report.findings] == [Outcome.OK, Outcome.OK, Outcome.SKIP]


def test_a_p_that_may_not_be_contacted(site: Site) -> None:
    engine = site.prefill()
    name, text = only_failure(report_of(Served(engine), allowed_peers=["10.0.0.0/8"]))
    engine.leases.cancel_all()  # it may not be told to
    assert name == "peer: handshake"
    assert text.startswith("denied: ")
    assert "may not be contacted: allowed_peers names 10.0.0.0/8" in text


def test_a_secret_that_cannot_be_read_is_a_failure(site: Site, tmp_path: Path) -> None:
    engine = site.prefill()
    name, text = only_failure(report_of(Served(engine), secret_file=str(tmp_path / "none")))
    engine.leases.cancel_all()
    assert name == "peer: handshake"
    assert str(tmp_path / "none") in text


class Silent(Served):
    """A server whose answers are what the test says."""

    models: Any = None
    params: Any = None

    def ask(self, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        return {"data": self.models} if body is None else {"kv_transfer_params": self.params}


@pytest.mark.parametrize(
    ("models", "params", "said"),
    [
        (None, None, "/v1/models names no model: is it a vLLM server?"),
        (
            [{"id": "tiny"}],
            None,
            "has answered without kv_transfer_params: it must be a vLLM server with the PDConnector",
        ),
        (
            [{"id": "tiny"}],
            {"remote_host": "p"},
            "kv_transfer_params are not what a PDConnector prefill engine returns",
        ),
    ],
)
def test_a_server_that_is_no_p(site: Site, models: Any, params: Any, said: str) -> None:
    server = Silent(site.prefill())
    server.models, server.params = models, params
    name, text = only_failure(report_of(server))
    assert name == "peer"
    assert said in text
