import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pd_connector.config import parse_config
from pd_connector.scheduler.scheduler import ConnectorScheduler
from pd_connector.stats import StatsRecorder
from tests.support.connector.vllm_engine import CACHES, a_config
from tests.support.simulation.named_prefill import NamedPrefill, StartPrefill
from tests.support.simulation.vllm_schedulers import World


@pytest.fixture
def world() -> Iterator[World]:
    world = World()
    yield world
    world.close()


@pytest.fixture
def start_prefill() -> Iterator[StartPrefill]:
    started: list[NamedPrefill] = []

    def start(*args: Any, **options: Any) -> NamedPrefill:
        started.append(NamedPrefill(*args, **options))
        return started[-1]

    yield start
    for engine in started:
        engine.close()


@pytest.fixture
def side_of(model: Path) -> Iterator[Callable[..., ConnectorScheduler]]:
    """Makes scheduler sides of a kv_role; changes of vLLM's configuration are given as ``vllm``."""
    before, made = set(threading.enumerate()), list[ConnectorScheduler]()

    def make(role: str, vllm: Callable[[Any], object] = lambda config: None, **extra: Any) -> ConnectorScheduler:
        settings = {"host": "127.0.0.1", "canary": "off", **extra}
        config = a_config(model, role, **settings)
        config.cache_config.enable_prefix_caching = True
        config.max_in_flight_tokens, config.num_prefill_lookahead_tokens = 64, 0
        config.scheduler_config = SimpleNamespace(max_num_batched_tokens=64, max_num_seqs=4)
        config.model_config.max_model_len = 64
        vllm(config)
        made.append(ConnectorScheduler(config, CACHES, parse_config(settings), StatsRecorder()))
        return made[-1]

    yield make
    for side in made:
        side.shutdown()
    assert set(threading.enumerate()) <= before
