"""Where a worker's staging buffer is: beside caches that the CPU reaches on the host, else on their device, or nowhere.

The device is the CPU here, taken for one.
"""

import json
import mmap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from layout.geometry import Region
from pd_connector.config import parse_config
from pd_connector.stats import StatsRecorder
from pd_connector.vllm.cache_groups import Ranks
from pd_connector.worker import worker as worker_half
from pd_connector.worker.worker import ConnectorWorker
from tests.support.connector.cpu_layers import cpu_only
from tests.support.connector.vllm_engine import BLOCK_TOKENS, CACHES, LAYERS, a_config
from tests.support.engine.in_process import InProcessEngine, InProcessFabric

HUGE_PAGE = 2 << 20

Staged = Callable[..., list[Region]]


@pytest.fixture
def staged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Staged:
    """What a worker registers with its transfer engine beside its caches."""
    (tmp_path / "config.json").write_text(json.dumps({"hidden_size": 128}))
    monkeypatch.setattr(worker_half, "worker_ranks", lambda: Ranks(0, 1, 0, 1))

    def start(role: str, *, on_host: bool, **tuning: Any) -> list[Region]:
        monkeypatch.setattr(worker_half, "caches_are_host_memory", lambda: on_host)
        settings: dict[str, Any] = {
            "host": "127.0.0.1",
            "protocol": "tcp",
            "model_check": "off",
            "canary": "off",
            "tuning": tuning,
        }
        engine = InProcessEngine(InProcessFabric())
        caches = {name: torch.zeros(8, 2, BLOCK_TOKENS, 128) for name in LAYERS}
        half = ConnectorWorker(
            a_config(tmp_path, role, **settings), CACHES, parse_config(settings), StatsRecorder(), lambda _: engine
        )
        half.register_caches(caches)
        regions = [region for region in engine.memory.table.regions if region.size != caches["l0"].nbytes]
        assert len(engine.memory.table.regions) - len(regions) == len(LAYERS)
        half.shutdown()
        return regions

    return start


@cpu_only
def test_beside_caches_in_host_memory_it_is_host_memory(staged: Staged) -> None:
    (buffer,) = staged("kv_consumer", on_host=True, staging_bytes=9 * mmap.PAGESIZE)
    assert buffer.size == 9 * mmap.PAGESIZE


def test_elsewhere_it_is_on_the_device_of_the_caches(staged: Staged) -> None:
    (buffer,) = staged("kv_consumer", on_host=False, staging_bytes=9 * mmap.PAGESIZE)
    assert buffer.size == HUGE_PAGE
    assert buffer.address % HUGE_PAGE == 0


@pytest.mark.parametrize("on_host", [False, pytest.param(True, marks=cpu_only)])
def test_who_pulls_nothing_or_wants_none_has_none(staged: Staged, on_host: bool) -> None:
    assert staged("kv_producer", on_host=on_host) == []
    assert staged("kv_consumer", on_host=on_host, staging_bytes=0) == []
