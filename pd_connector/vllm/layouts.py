"""The KV cache layouts that keep all layers of a block together, and when the connector asks vLLM for one.

vLLM resolves the layout from what the user, the connector and the attention backends ask for. On the CPU platform,
``cpu.layouts`` makes the workers offer more. This module must stay cheap to import: no torch or vllm at module level.
"""

import logging
from collections.abc import Mapping
from typing import Any

#: A child of vLLM's logger, so that vLLM's handlers and level apply.
logger = logging.getLogger(f"vllm.{__name__}")

CONNECTOR = "PDConnector"
CONNECTOR_MODULE = "pd_connector"

#: The key in ``kv_connector_extra_config`` that turns this on or off.
SWITCH = "cross_layer_blocks"

#: Best first. BHLNC keeps a head slice of a block contiguous over all layers, so that one descriptor can move it.
BLOCK_OUTER = ("BHLNC", "BLHNC")


def wanted_layout(vllm_config: Any) -> str | None:
    """Return the best layout that the attention backends are known to support, to ask vLLM for; None to ask for none.

    None if ``cross_layer_blocks`` is false, and on platforms whose backends do not declare their layouts to vLLM. None
    on the CPU platform too: there the workers rank the layouts that they have checked, so none that fails is asked for.
    """
    if not cross_layer_blocks(vllm_config):
        return None
    from vllm.platforms import current_platform  # noqa: PLC0415

    if current_platform.is_cpu():
        from pd_connector.vllm.cpu.layouts import warn_if_not_hooked  # noqa: PLC0415  it imports this module

        warn_if_not_hooked()
        return None
    if not current_platform.is_cuda():
        return None
    try:
        return _first_declared(vllm_config)
    except Exception as error:
        logger.warning("PDConnector: cross-layer KV blocks are off: cannot tell the backends' layouts: %s", error)
        return None


def cross_layer_blocks(vllm_config: Any) -> bool:
    """Return whether ``cross_layer_blocks`` is on for this connector, alone or inside a MultiConnector."""
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
    """Return whether a configured connector is this one: by the name that the plugin registers, or by its module."""
    return connector == CONNECTOR and (module_path or CONNECTOR_MODULE).partition(".")[0] == CONNECTOR_MODULE


def _switched_on(extra: Mapping[str, Any]) -> bool:
    return extra.get(SWITCH, True) is True


def _first_declared(vllm_config: Any) -> str | None:
    """Return the best block-outer layout that all attention backends of the model declare."""
    from vllm.distributed.kv_transfer.kv_connector.utils import get_current_attn_backends  # noqa: PLC0415
    from vllm.v1.attention.backends.utils import get_supported_kv_cache_layouts  # noqa: PLC0415

    backends = get_current_attn_backends(vllm_config)
    if not all(_takes_whole_blocks(backend, vllm_config.cache_config.block_size) for backend in backends):
        return None  # vLLM splits blocks for such a kernel, but refuses to do so in a block-outer layout
    declared = {layout.name for layout in get_supported_kv_cache_layouts(backends)}
    # vLLM accepts BHLNC only if the caches of all layers have the same shape.
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
