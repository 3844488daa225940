"""Cross-layer KV blocks on vLLM's CPU platform.

vLLM's CPU attention backend declares only the layout LBHNC, though its kernels follow the strides they are given. The
plugin calls ``register`` in every process of vLLM, which lets a worker offer the block-outer layouts too, under three
conditions: the worker's configuration names this connector, every attention layer uses that backend, and its kernels
have just passed ``layout_check`` for the layout on this machine. It wraps the one worker method by which vLLM asks for
layouts, and changes no attribute of a backend. A worker without this connector gives vLLM's own answer.

If a private name of vLLM is missing, nothing is offered, a warning names it, and the server starts in vLLM's own
layout. This module must stay cheap to import: no torch or vllm at module level.
"""

import logging
import time
from typing import Any

from pd_connector.vllm.devices import device_type
from pd_connector.vllm.layout_switch import BLOCK_OUTER, SWITCH, cross_layer_blocks
from pd_connector.vllm.releases.installed import current

#: A child of vLLM's logger, so that vLLM's handlers and level apply.
logger = logging.getLogger(f"vllm.{__name__}")

#: The plugin's name in ``vllm.general_plugins``.
PLUGIN = "pd_connector"


def register() -> None:
    """Hook the workers on the CPU platform. Idempotent."""
    try:
        if device_type() == "cpu" and current().declares_layouts:
            _hook_workers()
    except (ImportError, AttributeError) as missing:
        # This engine may not use the connector. ``warn_if_not_hooked`` warns if it does.
        logger.debug("PDConnector: cross-layer KV blocks are off: %s", missing)


def _hook_workers() -> None:
    """Make every worker of this process answer through ``_offered`` which layouts it supports. Idempotent.

    Raises:
        ImportError, AttributeError: this vLLM asks its workers in another way.
    """
    from vllm.v1.worker.worker_base import WorkerBase  # noqa: PLC0415

    ask = WorkerBase.get_supported_kv_cache_layouts
    if ask.__module__ == __name__:
        return

    def get_supported_kv_cache_layouts(self: Any) -> list[str]:
        """Return the names of the layouts that every attention backend supports, best first."""
        return _offered(self.vllm_config, ask(self))

    WorkerBase.get_supported_kv_cache_layouts = get_supported_kv_cache_layouts


def warn_if_not_hooked() -> None:
    """Log why the workers of this engine cannot offer block-outer layouts, if that is so."""
    try:
        from vllm.v1.worker.worker_base import WorkerBase  # noqa: PLC0415

        if WorkerBase.get_supported_kv_cache_layouts.__module__ == __name__:
            return
        reason = f"vLLM did not load the plugin {PLUGIN}; add it to VLLM_PLUGINS, or unset that"
    except (ImportError, AttributeError) as missing:
        reason = f"this vLLM asks its workers for layouts in another way ({missing})"
    logger.warning(
        "PDConnector: cross-layer KV blocks are off: %s. Set %r to false in kv_connector_extra_config to silence this",
        reason, SWITCH,
    )  # fmt: skip


def _offered(vllm_config: Any, declared: list[str]) -> list[str]:
    """Return what a worker offers: block-outer layouts that passed the check, best first, then those ``declared``."""
    try:
        if not cross_layer_blocks(vllm_config):
            return declared
        proven = _proven(vllm_config, declared)
    except Exception as error:  # the server must start even if vLLM is not as this module expects
        logger.warning(
            "PDConnector: cross-layer KV blocks are off: the CPU attention kernels could not be checked (%s: %s). "
            "Using the KV cache layout %s instead", type(error).__name__, error, declared[0],
        )  # fmt: skip
        return declared
    return [*proven, *(name for name in declared if name not in proven)]


def _proven(vllm_config: Any, declared: list[str]) -> list[str]:
    """Check all attention layers of this worker; return the layouts of ``BLOCK_OUTER`` in which they all work."""
    from vllm.distributed.kv_transfer.kv_connector.utils import get_current_attn_backends  # noqa: PLC0415
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend  # noqa: PLC0415
    from vllm.v1.kv_cache_interface import KVCacheLayout  # noqa: PLC0415

    from pd_connector.vllm.cpu import layout_check  # noqa: PLC0415
    from pd_connector.vllm.cpu.kernels import attention_layers  # noqa: PLC0415

    backends = get_current_attn_backends(vllm_config)
    if others := [backend.get_name() for backend in backends if backend != CPUAttentionBackend]:
        logger.info(
            "PDConnector: cross-layer KV blocks are off: the attention backend %s is not known to accept them. "
            "Using the KV cache layout %s instead", ", ".join(others), declared[0],
        )  # fmt: skip
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
            "PDConnector: KV cache layout %s is left out, because the CPU attention kernels failed its check: %s. "
            "Using %s instead", name, found, [*proven, *declared][0],
        )  # fmt: skip
    if proven:
        elapsed_ms = (time.monotonic() - started) * 1e3
        logger.info("PDConnector: CPU attention kernels work in %s (checked in %.0f ms)", ", ".join(proven), elapsed_ms)
    return proven
