"""Two engines with settings for security: who may pull from whom, and what the one that may not is told."""

import json
import logging
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

from pd_connector.config import ConfigError
from pd_connector.connector import PDConnector
from tests.support.connector.requests import FakeRequest, a_prompt
from tests.support.connector.vllm_engine import BLOCK_TOKENS, CACHES, LAYERS, EngineUnderTest, StartEngine, a_config
from tests.support.control.junk import Junk, send_conversations
from tests.support.control.recorder import Recorder
from tests.support.engine.in_process import InProcessEngine, InProcessFabric
from tests.support.waiting import until

SECRET = "correct horse battery staple"


@pytest.fixture(autouse=True)
def _no_secret_of_the_developer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PD_CONNECTOR_SECRET", raising=False)


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> pytest.LogCaptureFixture:
    """All that both engines log, down to debug."""
    caplog.set_level(logging.DEBUG)
    for package in ("pd_connector", "transfer"):
        monkeypatch.setattr(logging.getLogger(package), "propagate", True)
        logging.getLogger(package).setLevel(logging.DEBUG)
    return caplog


def a_secret(path: Path, text: str = SECRET) -> str:
    path.write_text(text)
    path.chmod(0o600)
    return str(path)


def pull(p: EngineUnderTest, d: EngineUnderTest) -> bool:
    """Let D pull a prompt from P; whether it succeeded."""
    d.allocate(FakeRequest("r", a_prompt(70), json.loads(json.dumps(p.prefill("r", [3, 1, 6])[1]))), [2, 7, 4])
    d.steps_until(lambda results: results.finished_recving)
    return not d.results.failed_recving


@pytest.mark.thorough
def test_engines_with_the_same_secret_work_and_never_show_it(
    start: StartEngine,
    tmp_path: Path,
    log: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    p = start("kv_producer", secret_file=a_secret(tmp_path / "secret", f"{SECRET}\n"))
    monkeypatch.setenv("PD_CONNECTOR_SECRET", SECRET)
    d = start("kv_consumer")
    assert pull(p, d)
    assert SECRET not in log.text


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("p_secret", "d_secret", "cause"),
    [
        (SECRET, "another secret of a kind", "the secrets of the two engines differ"),
        (SECRET, None, "that engine has a secret and this one has none"),
        (None, SECRET, "that one has none"),
    ],
)
def test_engines_with_unequal_secrets_say_so_on_both_sides(
    start: StartEngine,
    tmp_path: Path,
    log: pytest.LogCaptureFixture,
    p_secret: str | None,
    d_secret: str | None,
    cause: str,
) -> None:
    p, d = (
        start(role, **({"secret_file": a_secret(tmp_path / role, secret)} if secret else {}))
        for role, secret in (("kv_producer", p_secret), ("kv_consumer", d_secret))
    )
    assert not pull(p, d)
    (failure,) = [record.message for record in log.records if "pull from engine" in record.message]
    assert "authentication with 127.0.0.1:" in failure
    assert cause in failure
    counted = d.worker.get_kv_connector_stats()
    assert counted is not None
    assert counted.data["counts"] == {"pull_failures:denied": 1}

    def refused() -> bool:
        stats = p.scheduler.get_kv_connector_stats()
        # Where only one side has a secret, both notice, and the one that does so first leaves the other in the dark.
        names = [f"control_refusals:{cause}" for cause in ("authentication", "handshake")]
        return stats is not None and any(stats.data["counts"].get(name) for name in names)

    until(refused)
    assert all(secret not in log.text for secret in (p_secret, d_secret) if secret)


@pytest.mark.parametrize("role", list(KVConnectorRole))
def test_a_secret_file_that_cannot_be_used_stops_the_start(
    model: Path,
    tmp_path: Path,
    role: KVConnectorRole,
) -> None:
    path = Path(a_secret(tmp_path / "secret"))
    path.chmod(0o644)
    with pytest.raises(ConfigError, match="has mode 0644"):
        PDConnector(a_config(model, secret_file=str(path)), role, CACHES)


@pytest.mark.thorough
@pytest.mark.parametrize("secret", [None, SECRET], ids=["without a secret", "with a secret"])
def test_pulls_go_on_while_strangers_talk_to_the_control_port(
    start: StartEngine,
    tmp_path: Path,
    secret: str | None,
) -> None:
    settings = {} if secret is None else {"secret_file": a_secret(tmp_path / "secret", secret)}
    p, d = start("kv_producer", **settings), start("kv_consumer", **settings)
    port = p.prefill("a lease that nobody takes", [7])[1]["remote_port"]
    pulled = 0

    def assert_pulls_right(**changes: Any) -> None:
        nonlocal pulled
        request = FakeRequest(f"r{pulled}", a_prompt(70), p.prefill(f"r{pulled}", [3, 1, 6])[1] | changes)
        for cache in d.caches.values():
            cache.zero_()
        d.allocate(request, [2, 7, 4])
        d.steps_until(lambda results: request.request_id in results.finished_recving)
        assert all(torch.equal(d.caches[name][[2, 7, 4]], p.caches[name][[3, 1, 6]]) for name in p.caches)
        p.step()
        pulled += 1

    with Recorder(port) as recorder:
        assert_pulls_right(remote_port=recorder.port)
    attack = threading.Thread(target=send_conversations, args=(port, Junk(3, recorder.sent), 5_000))
    attack.start()
    while attack.is_alive() or pulled < 20:
        assert_pulls_right()
    attack.join()
    assert not d.results.failed_recving
    assert p.held == [7], "no other lease is left, and this one was not ended by strangers"


def test_an_engine_that_is_not_allowed_is_not_contacted(
    start: StartEngine,
    log: pytest.LogCaptureFixture,
) -> None:
    p, d = start("kv_producer"), start("kv_consumer", allowed_peers=["10.9.0.0/16", "192.0.2.7"])
    assert not pull(p, d)
    (failure,) = [record.message for record in log.records if "pull from engine" in record.message]
    assert "127.0.0.1 may not be contacted: allowed_peers names 10.9.0.0/16, 192.0.2.7" in failure


def test_a_welcome_cannot_lead_to_an_engine_that_is_not_allowed(
    start: StartEngine,
    fabric: InProcessFabric,
    log: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(InProcessEngine, "address", "192.0.2.9:15000")
    p, d = start("kv_producer"), start("kv_consumer", allowed_peers=["127.0.0.0/8"])
    assert not pull(p, d)
    assert "the transfer engine at 192.0.2.9:15000: 192.0.2.9 may not be contacted" in log.text
    assert fabric.reads == 0


@pytest.mark.usefixtures("fabric")
@pytest.mark.parametrize(
    ("theirs", "ours", "values"),
    [
        (None, SECRET, "has no secret, and the engine core has one"),
        (SECRET, None, "has another secret, and the engine core has none"),
        ("another secret of a kind", SECRET, "has another secret, and the engine core has one"),
    ],
)
def test_a_worker_on_another_node_without_the_secret_is_told_at_start(
    model: Path, monkeypatch: pytest.MonkeyPatch, theirs: str | None, ours: str | None, values: str
) -> None:
    """Without it, all its pulls would be refused."""

    def side(role: KVConnectorRole, secret: str | None) -> PDConnector:
        if secret is None:
            monkeypatch.delenv("PD_CONNECTOR_SECRET", raising=False)
        else:
            monkeypatch.setenv("PD_CONNECTOR_SECRET", secret)
        return PDConnector(a_config(model, "kv_consumer"), role, CACHES)

    worker, scheduler = side(KVConnectorRole.WORKER, theirs), side(KVConnectorRole.SCHEDULER, ours)
    worker.register_kv_caches({name: torch.zeros(8, 2, BLOCK_TOKENS, 128) for name in LAYERS})
    handshake = worker.get_handshake_metadata()
    assert handshake is not None
    with pytest.raises(ConfigError, match=f"worker 0 of 1 {values}: .* PD_CONNECTOR_SECRET"):
        scheduler.set_xfer_handshake_metadata_pp_aware({(0, 0): handshake})
    worker.shutdown()
    scheduler.shutdown()
