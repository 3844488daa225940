"""A worker's model and model runner as vllm-ascend makes them, as far as KV caches need it: nothing can run a step.

The model is on the meta device. Its runner's constructor is left out, which makes buffers for steps; what its methods
for KV caches read is set here, as the constructor sets it.
"""

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from vllm.config import set_current_vllm_config
from vllm.distributed.kv_transfer.kv_connector.utils import get_current_attn_backends
from vllm.distributed.parallel_state import get_dcp_group, get_pp_group, get_tp_group
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.model_executor.model_loader.utils import initialize_model
from vllm.platforms import current_platform
from vllm.utils.torch_utils import kv_cache_dtype_str_to_dtype, set_default_torch_dtype
from vllm.v1.attention.backend import AttentionBackend, AttentionMetadataBuilder
from vllm.v1.worker.utils import prepare_kernel_block_sizes
from vllm_ascend.ascend_config import get_ascend_config, init_ascend_config
from vllm_ascend.ops import rotary_embedding
from vllm_ascend.spec_decode.eagle_proposer import AscendEagleProposer
from vllm_ascend.utils import adapt_patch, enable_sfa_dcp_replicated_indexer, register_ascend_customop

from tests.support.ascend.recipe_groups import become_rank
from tests.support.ascend.recipe_releases import is_sparse, let_models_be_made_alone, make_caches, supported_layouts

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheSpec

_CONFIGS = ("model", "cache", "compilation", "parallel", "scheduler", "speculative", "lora", "offload")


class Worker:
    """A rank of an engine: its layers, and the caches that its runner makes for them."""

    def __init__(self, vllm_config: "VllmConfig", tp_rank: int, pp_rank: int) -> None:
        """Become that rank, and make its layers."""
        self.vllm_config = vllm_config
        become_rank(vllm_config.parallel_config, tp_rank, pp_rank)
        adapt_patch()
        register_ascend_customop(vllm_config)
        init_ascend_config(vllm_config)
        let_models_be_made_alone()
        # Tables of the first rotary embedding, which cannot be made of one without columns, and no step reads.
        rotary_embedding._record_cos_and_sin_cache_interleaved = lambda *_: None
        with set_current_vllm_config(vllm_config), set_default_torch_dtype(vllm_config.model_config.dtype):
            self.model = self._make_model()
            current_platform.update_block_size_for_backend(vllm_config)
            self.runner = _SecondRunner(vllm_config) if vllm_config.use_v2_model_runner else self._make_runner()

    def specs(self) -> "dict[str, KVCacheSpec]":
        """What the runner states of each layer's cache."""
        with set_current_vllm_config(self.vllm_config):
            specs: dict[str, KVCacheSpec] = self.runner.get_kv_cache_spec()
            return specs

    def layouts(self) -> list[str]:
        """The names of the KV cache layouts that all its attention backends know."""
        return supported_layouts(get_current_attn_backends(self.vllm_config))

    def layers(self) -> dict[str, Any]:
        """The layers that have caches, by name."""
        context = self.vllm_config.compilation_config.static_forward_context
        return {name: layer for name, layer in context.items() if isinstance(layer, AttentionLayerBase)}

    def allocate(self, kv_cache_config: "KVCacheConfig") -> dict[str, Any]:
        """Make the caches of a plan, as the runner hands them over to a connector."""
        with set_current_vllm_config(self.vllm_config), _without_builders(self.layers()):
            caches: dict[str, Any] = (
                self.runner.allocate(kv_cache_config)
                if isinstance(self.runner, _SecondRunner)
                else _allocate(self.runner, kv_cache_config)
            )
        torch.npu.synchronize()  # what clears them is queued
        return caches

    def _make_model(self) -> list[torch.nn.Module]:
        config = self.vllm_config
        with torch.device("cpu"):
            models = [initialize_model(config)]
            if config.speculative_config is not None and get_pp_group().is_last_rank:
                proposer = AscendEagleProposer.__new__(AscendEagleProposer)
                proposer.vllm_config, proposer.speculative_config = config, config.speculative_config
                draft_config = proposer._create_draft_vllm_config()
                draft = config.speculative_config.draft_model_config
                with set_default_torch_dtype(draft.dtype):
                    models.append(initialize_model(draft_config, model_config=draft))
        return models

    def _make_runner(self) -> Any:
        from vllm_ascend.worker.model_runner_v1 import NPUModelRunner  # noqa: PLC0415

        config = self.vllm_config
        runner = NPUModelRunner.__new__(NPUModelRunner)
        runner.vllm_config, runner.device = config, torch.device("npu:0")
        for name in _CONFIGS:
            setattr(runner, f"{name}_config", getattr(config, f"{name}_config"))
        runner.dtype = config.model_config.dtype
        runner.kv_cache_dtype = kv_cache_dtype_str_to_dtype(config.cache_config.cache_dtype, config.model_config)
        runner.block_size = config.cache_config.block_size
        runner.shared_kv_cache_layers, runner.runner_only_attn_layers = {}, set()
        runner.kv_caches, runner.attn_groups = [], []
        runner.use_compress = hasattr(config.model_config.hf_config, "compress_ratios")
        runner.use_sparse = is_sparse(config)
        runner.enable_sparse_sfa_c8 = config.cache_config.cache_dtype in {"fp8", "int8"}
        of_indexer = getattr(config.attention_config, "indexer_kv_dtype", "auto")
        runner.enable_sparse_li_c8 = of_indexer in {"fp8", "int8"}
        if runner.enable_sparse_li_c8:
            kind = kv_cache_dtype_str_to_dtype(of_indexer, config.model_config)
            runner.c8_k_cache_dtype = kind
            runner.c8_k_scale_cache_dtype = torch.float32 if kind == torch.float8_e4m3fn else torch.float16
        if runner.enable_sparse_sfa_c8:
            runner.c8_cache_dtype = runner.kv_cache_dtype
        runner.dcp_size, runner.dcp_rank = get_dcp_group().world_size, get_dcp_group().rank_in_group
        runner.sfa_dcp_replicated_indexer_size = runner.dcp_size if enable_sfa_dcp_replicated_indexer() else 1
        runner.ascend_config = get_ascend_config()
        runner.sparse_kv_offload_config = getattr(runner.ascend_config, "sparse_kv_offload_config", None)
        runner.sparse_kv_offload_enabled = getattr(runner.sparse_kv_offload_config, "enabled", False)
        runner.tp_rank = get_tp_group().rank_in_group
        runner._check_and_update_cudagraph_mode = lambda *_: None
        runner.calculate_reorder_batch_threshold = lambda: None
        return runner


def _allocate(runner: Any, kv_cache_config: "KVCacheConfig") -> Any:
    """Make caches as the runner's ``initialize_kv_cache`` does it."""
    runner.kv_cache_config = kv_cache_config
    runner.maybe_add_kv_sharing_layers_to_kv_cache_groups(kv_cache_config)
    runner.initialize_attn_backend(kv_cache_config)
    runner.use_hybrid_blocks = len(runner.attn_groups) > 1
    sizes = prepare_kernel_block_sizes(kv_cache_config, runner.attn_groups)
    return make_caches(runner, kv_cache_config, sizes)


class _SecondRunner:
    """What vLLM's second model runner does for KV caches, by the functions that vllm-ascend puts in place of vLLM's."""

    def __init__(self, vllm_config: "VllmConfig") -> None:
        from vllm.v1.worker.gpu import model_runner  # noqa: PLC0415  patched by then

        self._vllm_config, self._functions = vllm_config, model_runner

    def get_kv_cache_spec(self) -> "dict[str, KVCacheSpec]":
        specs: dict[str, KVCacheSpec] = self._functions.get_kv_cache_spec(self._vllm_config)
        return specs

    def allocate(self, kv_cache_config: "KVCacheConfig") -> Any:
        device = torch.device("npu:0")
        _, _, sizes = self._functions.init_attn_backend(kv_cache_config, self._vllm_config, device)
        context = self._vllm_config.compilation_config.static_forward_context
        return self._functions.init_kv_cache(context, kv_cache_config, device, sizes, self._vllm_config)


class _NoBuilder(AttentionMetadataBuilder):  # type: ignore[misc]  # vLLM is not typed here
    """In the place of what prepares an attention backend's steps."""

    def __init__(self, *_: Any) -> None:
        pass

    def build(self, *_: Any, **__: Any) -> None:
        raise AssertionError("there are no steps")


@contextlib.contextmanager
def _without_builders(layers: dict[str, Any]) -> Iterator[None]:
    backends: set[type[AttentionBackend]] = {layer.get_attn_backend() for layer in layers.values()}
    with contextlib.ExitStack() as stack:
        for backend in backends:
            own = backend.__dict__.get("get_builder_cls")
            backend.get_builder_cls = staticmethod(lambda: _NoBuilder)
            stack.callback(_put_back, backend, own)
        yield


def _put_back(backend: type[AttentionBackend], own: Any) -> None:
    if own is None:
        del backend.get_builder_cls
    else:
        backend.get_builder_cls = own
