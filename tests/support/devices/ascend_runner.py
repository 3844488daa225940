"""A model runner on the CPU that allocates KV caches as vllm-ascend's does, by two private methods."""

import sys
from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

MODULE = "vllm_ascend.worker.model_runner_v1"
PD_CONNECTOR = {"kv_connector": "PDConnector", "kv_connector_module_path": "pd_connector"}


class FullAttentionSpec:
    """What vLLM states of a layer of full attention, as far as an allocation needs it."""

    def __init__(self, content: tuple[int, ...], tokens: int, heads: int) -> None:
        self.content, self.block_size, self.num_kv_heads = content, tokens, heads
        self.dtype = torch.float32


@dataclass
class RunnerModel:
    """The caches of a model: its layers, and the content of each part of a token."""

    layers: tuple[str, ...] = ("l0", "l1", "l2")
    content: tuple[int, ...] = (16, 16)
    tokens: int = 8
    heads: int = 2
    blocks: int = 5
    groups: int = 1
    others: dict[str, tuple[int, ...]] = field(default_factory=dict)  # layers with other content

    def kv_cache_config(self) -> Any:
        spec = FullAttentionSpec(self.content, self.tokens, self.heads)
        group = SimpleNamespace(kv_cache_spec=spec, layer_names=list(self.layers))
        return SimpleNamespace(num_blocks=self.blocks, kv_cache_groups=[group] * self.groups)


class NPUModelRunner:
    """The two steps of an allocation. ``allocated`` has the bytes of each raw tensor that took memory."""

    def __init__(self, model: RunnerModel, connector: dict[str, Any] | None = PD_CONNECTOR) -> None:
        transfer = None
        if connector is not None:
            transfer = SimpleNamespace(
                **{"kv_connector_module_path": None, "kv_connector_extra_config": {}, **connector}
            )
        self.vllm_config = SimpleNamespace(kv_transfer_config=transfer)
        self.device = torch.device("cpu")
        self.model = model
        self.kernel_block_sizes = [model.tokens]
        self.allocated: list[int] = []

    def initialize_kv_cache_tensors(self, kv_cache_config: Any) -> dict[str, Any]:
        """Allocate and shape the caches: what the runner's own caller does."""
        raw = self._allocate_kv_cache_tensors(kv_cache_config)
        return self._reshape_kv_cache_tensors(kv_cache_config, raw, self.kernel_block_sizes)

    def _allocate_kv_cache_tensors(self, kv_cache_config: Any) -> dict[str, Any]:
        raw = {}
        for layer in self.model.layers:
            sizes = [
                self.model.blocks * self.model.tokens * self.model.heads * items * 4
                for items in self.model.others.get(layer, self.model.content)
            ]
            raw[layer] = tuple(torch.zeros(size, dtype=torch.int8, device=self.device) for size in sizes)
            self.allocated += sizes if self.device.type != "meta" else []
        return raw

    def _reshape_kv_cache_tensors(
        self, kv_cache_config: Any, raw: dict[str, Any], kernel_block_sizes: list[int] | None = None
    ) -> dict[str, Any]:
        assert kernel_block_sizes == self.kernel_block_sizes
        shape = (self.model.blocks, self.model.tokens, self.model.heads, -1)
        return {layer: tuple(part.view(torch.float32).view(shape) for part in parts) for layer, parts in raw.items()}


def install(monkeypatch: pytest.MonkeyPatch) -> type[NPUModelRunner]:
    """Put a fresh runner class where vllm-ascend has its own, and return it."""
    runner = type("NPUModelRunner", (NPUModelRunner,), dict(vars(NPUModelRunner)))
    module = ModuleType(MODULE)
    module.NPUModelRunner = runner  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, MODULE, module)
    return runner
