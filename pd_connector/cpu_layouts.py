"""Cross-layer KV blocks on vLLM's CPU platform: the physical layouts in which all layers of a block are one run.

vLLM's CPU attention backend declares the layout LBHNC only, though its kernels follow the strides that they are
given. ``register``, a plugin that vLLM loads in every process, lets a worker offer the block-outer layouts as
well, where three things hold: the worker's own configuration names our connector, every attention layer uses the
backend that we know, and its kernels have just proved on this machine that they accept the layout
(``cpu_layout_check``). It hooks the one question that vLLM asks about layouts, in the worker that is asked, and
changes no class attribute of a backend; a worker without our connector gets vLLM's own answer.

Every private name of vLLM that this needs is used here and nowhere else. If one has gone, nothing is offered, a
warning names it, and the server starts in vLLM's own layout. This module must stay cheap to import: no torch and
no vllm at module level.
"""

import logging
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from pd_connector.cpu_head_order import HeadOrder, Write
    from pd_connector.cpu_layout_check import Batch, CacheShape

#: Below vLLM's logger, so that its handlers and level apply.
logger = logging.getLogger(f"vllm.{__name__}")

CONNECTOR = "PDConnector"
PLUGIN = "pd_connector_cpu_layouts"

#: The switch in ``kv_connector_extra_config``.
SWITCH = "cross_layer_blocks"

#: Best first. BHLNC keeps a head slice of a block contiguous over all layers, which one descriptor can move.
BLOCK_OUTER = ("BHLNC", "BLHNC")


def register() -> None:
    """Entry point of ``vllm.general_plugins``. Does nothing off the CPU platform; may be called many times."""
    try:
        from vllm.platforms import current_platform  # noqa: PLC0415

        if current_platform.is_cpu():
            _hook_workers()
    except (ImportError, AttributeError) as missing:
        # Nobody has asked for our connector yet: wanted_layout says it where somebody has.
        logger.debug("Cross-layer KV blocks are off: %s", missing)


def wanted_layout(vllm_config: Any) -> str | None:
    """What the connector asks vLLM for: the best layout that the platform's backends are known to take, or None.

    None on the CPU platform, where the workers themselves rank the layouts that they have proved, so that a
    layout which fails there is not asked for; None where ``cross_layer_blocks`` is false, and on every platform
    whose backends do not declare their layouts to vLLM.
    """
    if not _cross_layer_blocks(vllm_config):
        return None
    from vllm.platforms import current_platform  # noqa: PLC0415

    if current_platform.is_cpu():
        _warn_if_not_hooked()
        return None
    if not current_platform.is_cuda():
        return None
    try:
        return _first_declared(vllm_config)
    except Exception as error:
        logger.warning("Cross-layer KV blocks are off: cannot tell which layouts the backend takes: %s", error)
        return None


def head_order(vllm_config: Any, block_tokens: int, head_size: int, cache_dtype: "torch.dtype") -> "HeadOrder":
    """Where this machine's CPU attention kernels put K and V inside a head's block of ``block_tokens`` tokens.

    Raises:
        RuntimeError: it cannot be found out; the message says why.
        NotImplementedError: vLLM has no kernel for these values.
    """
    from pd_connector.cpu_head_order import find_order  # noqa: PLC0415

    dtype = vllm_config.model_config.dtype
    try:
        write = _writer(vllm_config, block_tokens, head_size)
    except (ImportError, AttributeError) as missing:
        raise RuntimeError(
            f"cannot call this vLLM's CPU attention kernels to see how they order K and V inside a block ({missing}); "
            "use vLLM 0.32, which this connector is tested with"
        ) from missing
    return find_order(write, block_tokens, head_size, dtype, cache_dtype)


def _writer(vllm_config: Any, block_tokens: int, head_size: int) -> "Write":
    """The writing kernel of vLLM's CPU attention, for one head and one block."""
    import torch  # noqa: PLC0415
    from vllm.config import set_current_vllm_config  # noqa: PLC0415
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackendImpl, _get_attn_isa  # noqa: PLC0415

    kv_cache_dtype = vllm_config.cache_config.cache_dtype
    with set_current_vllm_config(vllm_config):
        kernels = CPUAttentionBackendImpl(1, head_size, 1.0, 1, None, None, kv_cache_dtype)
    face = _LayerFace(_get_attn_isa(vllm_config.model_config.dtype, block_tokens, head_size, kv_cache_dtype), 1.0, 1.0)
    slots = torch.arange(block_tokens, dtype=torch.int64, device="cpu")

    def write(key: "torch.Tensor", value: "torch.Tensor", cache: "torch.Tensor") -> None:
        kernels.do_kv_cache_update(face, key, value, cache, slots)

    return write


def _cross_layer_blocks(vllm_config: Any) -> bool:
    """Whether this configuration names our connector, alone or inside a MultiConnector, with the switch on."""
    transfer = vllm_config.kv_transfer_config
    if transfer is None:
        return False
    extra = transfer.kv_connector_extra_config or {}
    if transfer.kv_connector == "MultiConnector":
        children = [child for child in extra.get("connectors", ()) if isinstance(child, Mapping)]
        return any(
            _is_ours(child.get("kv_connector"), child.get("kv_connector_module_path"))
            and _switched_on(child.get("kv_connector_extra_config") or {})
            for child in children
        )
    return _is_ours(transfer.kv_connector, transfer.kv_connector_module_path) and _switched_on(extra)


def _is_ours(connector: str | None, module_path: str | None) -> bool:
    return connector == CONNECTOR and (module_path or "").partition(".")[0] == __name__.partition(".")[0]


def _switched_on(extra: Mapping[str, Any]) -> bool:
    return extra.get(SWITCH, True) is True


def _hook_workers() -> None:
    """Make every worker of this process answer the layout question through ``_offered``. Idempotent.

    Raises:
        ImportError, AttributeError: this vLLM asks its workers in another way.
    """
    from vllm.v1.worker.worker_base import WorkerBase  # noqa: PLC0415

    ask = WorkerBase.get_supported_kv_cache_layouts
    if ask.__module__ == __name__:
        return

    def get_supported_kv_cache_layouts(self: Any) -> list[str]:
        """Layout names every attention backend supports, most preferred first."""
        return _offered(self.vllm_config, ask(self))

    WorkerBase.get_supported_kv_cache_layouts = get_supported_kv_cache_layouts


def _warn_if_not_hooked() -> None:
    try:
        from vllm.v1.worker.worker_base import WorkerBase  # noqa: PLC0415

        if WorkerBase.get_supported_kv_cache_layouts.__module__ == __name__:
            return
        reason = f"vLLM did not load the plugin {PLUGIN}; name it in VLLM_PLUGINS, or leave that unset"
    except (ImportError, AttributeError) as missing:
        reason = f"this vLLM asks its workers for layouts in another way ({missing})"
    logger.warning(
        "Cross-layer KV blocks are off: %s. Set %r to false in kv_connector_extra_config to silence this.",
        reason,
        SWITCH,
    )


def _offered(vllm_config: Any, declared: list[str]) -> list[str]:
    """What a worker offers: the proven block-outer layouts, best first, then what its backends ``declared``."""
    try:
        if not _cross_layer_blocks(vllm_config):
            return declared
        proven = _proven(vllm_config, declared)
    except Exception as error:  # a start-up must not depend on what this module knows of vLLM
        logger.warning(
            "Cross-layer KV blocks are off: the check of the CPU attention kernels could not run (%s: %s). "
            "Using the KV cache layout %s instead.",
            type(error).__name__,
            error,
            declared[0],
        )
        return declared
    return [*proven, *(name for name in declared if name not in proven)]


def _proven(vllm_config: Any, declared: list[str]) -> list[str]:
    """The layouts of ``BLOCK_OUTER`` that every attention layer of this worker has just worked in."""
    from vllm.distributed.kv_transfer.kv_connector.utils import get_current_attn_backends  # noqa: PLC0415
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend  # noqa: PLC0415
    from vllm.v1.kv_cache_interface import KVCacheLayout  # noqa: PLC0415

    from pd_connector import cpu_layout_check  # noqa: PLC0415

    others = [
        backend.get_name() for backend in get_current_attn_backends(vllm_config) if backend != CPUAttentionBackend
    ]
    if others:
        logger.info(
            "Cross-layer KV blocks are off: the attention backend %s is not known to accept them. "
            "Using the KV cache layout %s instead.",
            ", ".join(others),
            declared[0],
        )
        return []
    started = time.monotonic()
    layers = _attention_layers(vllm_config)
    proven, failures = [], {}
    for name in BLOCK_OUTER:
        order = KVCacheLayout[name].stride_order
        for shape, kernels in layers.items():
            if found := cpu_layout_check.difference(kernels, shape, order):
                failures[name] = f"{found} ({shape})"
                break
        else:
            proven.append(name)
    for name, found in failures.items():
        logger.warning(
            "KV cache layout %s is left out, its check of the CPU attention kernels failed: %s. Using %s instead.",
            name,
            found,
            [*proven, *declared][0],
        )
    if proven:
        elapsed_ms = (time.monotonic() - started) * 1e3
        logger.info("CPU attention kernels proved in %s (%.0f ms).", ", ".join(proven), elapsed_ms)
    return proven


def _attention_layers(vllm_config: Any) -> dict["CacheShape", "_CpuKernels"]:
    """One layer of each shape in the worker's model."""
    from vllm.config import get_layers_from_vllm_config  # noqa: PLC0415
    from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase  # noqa: PLC0415

    from pd_connector.cpu_layout_check import CacheShape  # noqa: PLC0415

    layers: dict[CacheShape, _CpuKernels] = {}
    for layer in get_layers_from_vllm_config(vllm_config, AttentionLayerBase).values():
        spec = layer.get_kv_cache_spec(vllm_config)
        if spec is None:  # it keeps no cache, or uses another layer's
            continue
        dtype = vllm_config.model_config.dtype
        shape = CacheShape(layer.impl.num_heads, spec.num_kv_heads, spec.head_size, spec.block_size, dtype, spec.dtype)
        if shape not in layers:
            layers[shape] = _CpuKernels(layer, shape, vllm_config.cache_config.cache_dtype)
    if not layers:
        raise LookupError("the worker has no attention layer with a KV cache")
    return layers


class _CpuKernels:
    """A layer's own attention implementation, called as vLLM's model runner calls it."""

    def __init__(self, layer: Any, shape: "CacheShape", kv_cache_dtype: str) -> None:
        from vllm.v1.attention.backends.cpu_attn import _get_attn_isa  # noqa: PLC0415

        self._impl = layer.impl
        self._shape = shape
        self._kv_cache_dtype = kv_cache_dtype
        self._isa = _get_attn_isa(shape.dtype, shape.block_tokens, shape.head_size, kv_cache_dtype)
        self._layer = _LayerFace(self._isa, layer._k_scale_float, layer._v_scale_float)

    def write(self, key: "torch.Tensor", value: "torch.Tensor", cache: "torch.Tensor", batch: "Batch") -> None:
        self._impl.do_kv_cache_update(self._layer, key, value, cache, batch.slots)

    def attend(self, query: "torch.Tensor", cache: "torch.Tensor", batch: "Batch") -> "torch.Tensor":
        import torch  # noqa: PLC0415
        from vllm import _custom_ops as ops  # noqa: PLC0415
        from vllm import envs  # noqa: PLC0415
        from vllm.v1.attention.backends.cpu_attn import CPUAttentionMetadata  # noqa: PLC0415

        plan = ops.cpu_attn_get_scheduler_metadata(
            num_reqs=len(batch.sequence_lengths),
            num_heads=self._shape.heads,
            num_kv_heads=self._shape.kv_heads,
            head_dim=self._shape.head_size,
            seq_lens=batch.sequence_lengths,
            dtype=self._shape.dtype,
            query_start_loc=batch.query_start,
            causal=True,
            sliding_window_size=self._impl.sliding_window,
            isa=self._isa,
            enable_kv_split=envs.VLLM_CPU_ATTN_SPLIT_KV,
            kv_cache_dtype=self._kv_cache_dtype,
        )
        metadata = CPUAttentionMetadata(
            num_actual_tokens=batch.tokens,
            max_query_len=batch.longest_query,
            query_start_loc=batch.query_start,
            max_seq_len=batch.longest_sequence,
            seq_lens=batch.sequence_lengths,
            block_table=batch.block_table,
            slot_mapping=batch.slots,
            scheduler_metadata=plan,
        )
        output = torch.zeros_like(query)
        # Keys and values are in the cache: a decoder's forward does not look at these arguments.
        self._impl.forward(self._layer, query, query, query, cache, metadata, output)
        return output


class _LayerFace:
    """The attributes that the implementation reads from its layer; vLLM sets ``isa`` on the real one only later."""

    def __init__(self, isa: str, k_scale: float, v_scale: float) -> None:
        self.isa = isa
        self._k_scale_float = k_scale
        self._v_scale_float = v_scale


def _first_declared(vllm_config: Any) -> str | None:
    """The best block-outer layout that all of this model's backends declare."""
    from vllm.distributed.kv_transfer.kv_connector.utils import get_current_attn_backends  # noqa: PLC0415
    from vllm.v1.attention.backends.utils import get_supported_kv_cache_layouts  # noqa: PLC0415

    backends = get_current_attn_backends(vllm_config)
    if not all(_takes_whole_blocks(backend, vllm_config.cache_config.block_size) for backend in backends):
        return None  # vLLM cuts such blocks for the kernel, which it refuses to do in a block-outer layout
    declared = {layout.name for layout in get_supported_kv_cache_layouts(backends)}
    # vLLM takes BHLNC only where the caches of all layers have one shape.
    one_shape = not (
        vllm_config.model_config.is_hybrid
        or vllm_config.model_config.use_mla
        or vllm_config.speculative_config is not None
    )
    candidates = BLOCK_OUTER if one_shape else ("BLHNC",)
    return next((name for name in candidates if name in declared), None)


def _takes_whole_blocks(backend: Any, block_tokens: int) -> bool:
    from vllm.v1.attention.backend import MultipleOf  # noqa: PLC0415

    sizes = backend.get_supported_kernel_block_sizes()
    return not sizes or any(
        block_tokens % size.base == 0 if isinstance(size, MultipleOf) else block_tokens == size for size in sizes
    )
