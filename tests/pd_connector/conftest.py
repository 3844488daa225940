"""Loads vLLM before the tests, undoes what a connector does to the logging of its process, and starts whole engines."""

import importlib
import json
import logging
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # what vLLM and its dependencies deprecate of each other is not ours to fail on
    import torch

    importlib.import_module("vllm.v1.core.sched.scheduler")  # which the connector hooks in some releases
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
    from vllm.v1.core.block_pool import BlockPool

    from pd_connector.connector import PDConnector
    from pd_connector.vllm.cache_groups import Ranks
    from pd_connector.worker import worker as worker_module
    from tests.support.connector.vllm_calls import bind_cache_manager
    from tests.support.connector.vllm_engine import (
        BLOCK_TOKENS,
        CACHES,
        LAYERS,
        EngineUnderTest,
        StartEngine,
        a_config,
    )
    from tests.support.engine.in_process import InProcessEngine, InProcessFabric


@pytest.fixture(autouse=True)
def _loggers_as_they_were() -> Iterator[None]:
    loggers = [logging.getLogger(package) for package in ("layout", "transfer", "pd_connector", "vllm")]
    before = [(logger.handlers, logger.level, logger.propagate) for logger in loggers]
    # vLLM sets its logger up on import or later, by its release. The connector's follow it, and caplog hears the root.
    loggers[-1].handlers, loggers[-1].propagate = [], True
    loggers[-1].setLevel(logging.INFO)
    yield
    for logger, (handlers, level, propagate) in zip(loggers, before, strict=True):
        logger.handlers, logger.propagate = handlers, propagate
        logger.setLevel(level)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps({"hidden_size": 128, "_name_or_path": "here"}))
    save_file({"model.embed_tokens.weight": np.arange(256, dtype=np.int16)}, tmp_path / "model.safetensors")
    return tmp_path


@pytest.fixture
def fabric(monkeypatch: pytest.MonkeyPatch) -> InProcessFabric:
    fabric = InProcessFabric()
    monkeypatch.setattr(worker_module, "open_engine", lambda config, **_: InProcessEngine(fabric))
    monkeypatch.setattr(worker_module, "worker_ranks", lambda: Ranks(0, 1, 0, 1))
    return fabric


@pytest.fixture
def start(model: Path, fabric: InProcessFabric) -> Iterator[StartEngine]:
    """Starts an engine as vLLM does."""
    before = set(threading.enumerate())
    started: list[EngineUnderTest] = []

    def start(role: str, policy: str = "fail", **extra: Any) -> EngineUnderTest:
        config = a_config(model, role, policy, **extra)
        generator = torch.Generator().manual_seed(len(started))
        caches = {name: torch.rand(8, 2, BLOCK_TOKENS, 128, generator=generator) for name in LAYERS}
        worker = PDConnector(config, KVConnectorRole.WORKER, CACHES)
        worker.register_kv_caches(caches)
        scheduler = PDConnector(config, KVConnectorRole.SCHEDULER, CACHES)
        pool = BlockPool(8, enable_caching=True, hash_block_size=BLOCK_TOKENS)
        engine = EngineUnderTest(scheduler, worker, caches, pool)
        bind_cache_manager(scheduler, engine.cache_manager)
        scheduler.set_xfer_handshake_metadata_pp_aware({(0, 0): worker.get_handshake_metadata()})
        started.append(engine)
        return engine

    yield start
    for engine in started:
        engine.close()
    assert set(threading.enumerate()) <= before


@pytest.fixture
def no_log() -> Iterator[None]:
    """For tests in which thousands of pulls fail."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)
