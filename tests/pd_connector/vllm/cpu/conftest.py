import logging
import warnings
from collections.abc import Iterator

import pytest

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # what torch and vLLM deprecate of each other is not ours
    from vllm.v1.worker.worker_base import WorkerBase

from pd_connector.vllm.cpu import layouts


@pytest.fixture
def hooked(monkeypatch: pytest.MonkeyPatch) -> None:
    """The workers of this process are asked for their layouts as if the plugin had been loaded."""
    monkeypatch.setattr(WorkerBase, "get_supported_kv_cache_layouts", WorkerBase.get_supported_kv_cache_layouts)
    layouts.register()


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.LogCaptureFixture]:
    """Each record once, whether or not vLLM has kept its loggers from propagating to the root."""
    monkeypatch.setattr(layouts.logger, "propagate", False)
    layouts.logger.addHandler(caplog.handler)
    with caplog.at_level(logging.INFO, logger=layouts.logger.name):
        yield caplog
    layouts.logger.removeHandler(caplog.handler)
