import warnings

import pytest

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # what torch and vLLM deprecate of each other is not ours
    from vllm.v1.worker.worker_base import WorkerBase

from pd_connector.vllm.cpu import cpu_layouts


@pytest.fixture
def hooked(monkeypatch: pytest.MonkeyPatch) -> None:
    """The workers of this process are asked for their layouts as if the plugin had been loaded."""
    if (ask := getattr(WorkerBase, "get_supported_kv_cache_layouts", None)) is not None:  # since vLLM 0.30
        monkeypatch.setattr(WorkerBase, "get_supported_kv_cache_layouts", ask)
    cpu_layouts.register()
