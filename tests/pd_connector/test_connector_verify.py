"""``verify`` through whole connectors: what has arrived is compared with what was leased, where both sides do."""

import logging
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from pd_connector.config import parse_config
from pd_connector.orders import Orders, RankEnds
from pd_connector.params import parse_remote_prefill
from pd_connector.scheduler.prefill.producer import Producer
from pd_connector.stats import StatsRecorder
from pd_connector.worker.worker import ConnectorWorker
from tests.support.connector.engines import an_order
from tests.support.connector.requests import FakeRequest, a_prompt
from tests.support.connector.vllm_calls import Results
from tests.support.connector.vllm_engine import BLOCK_TOKENS, CACHES, LAYERS, StartEngine, a_config, role_of
from tests.support.engine.in_process import InProcessEngine, InProcessFabric
from tests.support.waiting import until


def test_a_prompt_is_verified_where_both_sides_do(start: StartEngine) -> None:
    p, d = start("kv_producer", verify=True), start("kv_consumer", verify=True)
    params = p.prefill("r", [3, 1, 6])[1]
    assert p.scheduler.has_pending_push_work(), "nobody would take the checksums"
    d.allocate(FakeRequest("r", a_prompt(70), params), [2, 7, 4])

    def settled() -> object:
        p.step()
        d.step()
        return d.results.finished_recving

    until(lambda: bool(settled()))
    assert d.results == Results(finished_recving={"r"})
    for name in LAYERS:
        assert torch.equal(d.caches[name][[2, 7, 4]], p.caches[name][[3, 1, 6]])
    counted = d.worker.get_kv_connector_stats()
    assert counted is not None
    assert len(counted.data["seconds"]["verify"]) == 1


def test_a_byte_that_changes_under_its_lease_fails_the_pull_and_is_named(
    start: StartEngine, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    p, d = start("kv_both", verify=True), start("kv_both", verify=True)
    monkeypatch.setattr(logging.getLogger("pd_connector"), "propagate", True)
    params = p.prefill("r", [3, 1, 6])[1]
    checksums = role_of(p, Producer)._service.checksums

    def summed() -> bool:
        p.step()
        return not checksums.wants_step

    until(summed)
    p.caches["l1"][1, 1, 0, 0] += 1  # the second block of the prompt
    d.allocate(FakeRequest("r", a_prompt(70), params), [2, 7, 4])
    d.steps_until(lambda results: results.failed_recving)
    assert d.results == Results(finished_recving={"r"}, failed_recving={"r"})
    assert "request r: pull from engine" in caplog.text
    assert "checksums of what has arrived differ" in caplog.text
    assert "layer 'l1'" in caplog.text
    assert "KV head 1, tokens 32 to " in caplog.text
    counted = d.worker.get_kv_connector_stats()
    assert counted is not None
    assert counted.data["counts"] == {"pull_failures:checksum": 1}


@pytest.mark.parametrize("changes", [False, True])
def test_what_lands_in_host_memory_is_verified_as_well(
    start: StartEngine,
    model: Path,
    fabric: InProcessFabric,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    *,
    changes: bool,
) -> None:
    p = start("kv_producer", verify=True)
    monkeypatch.setattr(logging.getLogger("pd_connector"), "propagate", True)
    settings: dict[str, Any] = {"cpu_bytes_to_use": 64 << 20, "host_transfers": "always", "verify": True}
    config = a_config(model, "kv_consumer", **settings)
    worker = ConnectorWorker(config, CACHES, parse_config(settings), StatsRecorder(), lambda _: InProcessEngine(fabric))
    worker.register_caches({name: torch.rand(8, 2, BLOCK_TOKENS, 128) for name in LAYERS})
    remote = parse_remote_prefill(p.prefill("r", [3, 1, 6])[1])
    checksums = role_of(p, Producer)._service.checksums

    def summed() -> bool:
        p.step()
        return not checksums.wants_step

    until(summed)
    if changes:
        p.caches["l1"][1, 1, 0, 0] += 1
    worker.execute(Orders(landings=(an_order("r", remote, ((2, 7, 4),)),)))
    ends: dict[str, RankEnds] = {}

    def landed() -> bool:
        ends.update(worker.take_report().landings)
        return bool(ends)

    until(landed)
    worker.shutdown()
    assert ends == {"r": RankEnds(1, failed=changes)}
    assert ("checksums of what has arrived differ" in caplog.text) == changes


def test_an_engine_that_need_not_verify_starts_no_thread_and_orders_nothing(start: StartEngine) -> None:
    p = start("kv_producer")
    p.prefill("r", [3, 1, 6])
    orders = p.scheduler.build_connector_meta(SimpleNamespace(num_scheduled_tokens={}))
    assert orders.orders == Orders()
    assert "pd-checksums" not in {thread.name for thread in threading.enumerate()}
    assert p.worker.build_connector_worker_meta() is None
