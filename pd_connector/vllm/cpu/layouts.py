"""Cross-layer KV blocks on vLLM's CPU platform.

vLLM's CPU attention backend declares the layout LBHNC only, though its kernels follow the strides that they are
given. ``register``, a plugin that vLLM loads in every process, lets a worker offer the block-outer layouts as
well, where three things hold: the worker's own configuration names our connector, every attention layer uses the
backend that we know, and its kernels have just proved on this machine that they accept the layout
(``layout_check``). It hooks the one question that vLLM asks about layouts, in the worker that is asked, and
changes no class attribute of a backend; a worker without our connector gets vLLM's own answer.

If a private name of vLLM that this needs has gone, nothing is offered, a warning names it, and the server starts in
vLLM's own layout. This module must stay cheap to import: no torch and no vllm at module level.
"""

import logging
import time
from typing import Any

from pd_connector.vllm.layouts import BLOCK_OUTER, SWITCH, cross_layer_blocks

#: Below vLLM's logger, so that its handlers and level apply.
logger = logging.getLogger(f"vllm.{__name__}")

PLUGIN = "pd_connector_cpu_layouts"


def register() -> None:
    """Entry point of ``vllm.general_plugins``. Does nothing off the CPU platform; may be called many times."""
    try:
        from vllm.platforms import current_platform  # noqa: PLC0415

        if current_platform.is_cpu():
            _hook_workers()
    except (ImportError, AttributeError) as missing:
        # Nobody has asked for our connector yet: wanted_layout says it where somebody has.
        logger.debug("Cross-layer KV blocks are off: %s", missing)


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


def warn_if_not_hooked() -> None:
    """Log why the workers of this engine cannot offer block-outer layouts, if they cannot."""
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
        if not cross_layer_blocks(vllm_config):
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

    from pd_connector.vllm.cpu import layout_check  # noqa: PLC0415
    from pd_connector.vllm.cpu.kernels import attention_layers  # noqa: PLC0415

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
    layers = attention_layers(vllm_config)
    proven, failures = [], {}
    for name in BLOCK_OUTER:
        order = KVCacheLayout[name].stride_order
        for shape, kernels in layers.items():
            if found := layout_check.difference(kernels, shape, order):
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
