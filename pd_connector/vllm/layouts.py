"""The KV cache layouts that keep all layers of a block together, and when the connector asks vLLM for one.

vLLM resolves the layout from what the user, the connector and the attention backends ask for. On the CPU platform,
``cpu.cpu_layouts`` makes the workers offer more; on the NPU platform, ``npu.allocation`` lays the caches out. This
module must stay cheap to import: no torch or vllm at module level.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pd_connector.vllm.cpu import cpu_layouts
from pd_connector.vllm.layout_switch import BLOCK_OUTER, SWITCH, cross_layer_blocks
from pd_connector.vllm.npu import allocation
from pd_connector.vllm.releases.installed import current

#: A child of vLLM's logger, so that vLLM's handlers and level apply.
logger = logging.getLogger(f"vllm.{__name__}")


@dataclass(frozen=True)
class _LayoutChoice:
    """The layout to ask vLLM for, if any, and why."""

    layout: str | None
    reason: str


def wanted_layout(vllm_config: Any) -> str | None:
    """Return the best layout that the attention backends are known to support, to ask vLLM for; None to ask for none.

    None if ``cross_layer_blocks`` is false, and where backends do not declare their layouts to vLLM: in some releases,
    and on some platforms. None on the CPU platform too: there the workers rank the layouts that they have checked, so
    none that fails is asked for.
    """
    return _choice(vllm_config).layout if current().declares_layouts else None


def warn_if_not_hooked(vllm_config: Any) -> None:
    """Log a warning if the workers cannot keep all layers of a block together, because the plugin was not loaded.

    Depends on no call that only some releases make, unlike ``wanted_layout``.
    """
    from vllm.platforms import current_platform  # noqa: PLC0415

    if not cross_layer_blocks(vllm_config):
        return
    if current_platform.is_cpu() and current().declares_layouts:
        cpu_layouts.warn_if_not_hooked()
    elif _workers_allocate():
        allocation.warn_if_not_hooked()


def log_layout(vllm_config: Any, chosen: str | None) -> None:
    """Log in one line the KV cache layout that vLLM has ``chosen``, and why."""
    import vllm.envs  # noqa: PLC0415

    choice = _choice(vllm_config)
    reason = choice.reason
    if requested := vllm.envs.VLLM_KV_CACHE_LAYOUT:
        reason = f"VLLM_KV_CACHE_LAYOUT is {requested}"
    elif choice.layout is not None and choice.layout != chosen:
        reason = f"{choice.layout} was asked for ({choice.reason}), and vLLM could not use it"
    if _workers_allocate():
        logger.info("PDConnector: the workers lay out their KV caches: %s", reason)
        return
    effect = "keeps all layers of a block together" if chosen in BLOCK_OUTER else "keeps each layer apart"
    logger.info("PDConnector: the KV cache layout %s %s: %s", chosen, effect, reason)


def _choice(vllm_config: Any) -> _LayoutChoice:
    from vllm.platforms import current_platform  # noqa: PLC0415

    if not cross_layer_blocks(vllm_config):
        return _LayoutChoice(None, f"{SWITCH} is false, or this connector was not found in kv_transfer_config")
    if current_platform.is_cpu():
        return _LayoutChoice(None, "the best that the workers offer, whose log says why")
    if _workers_allocate():
        return _LayoutChoice(None, "their log says whether all layers of a block are together")
    if not current_platform.is_cuda():
        return _LayoutChoice(None, "the attention backends of this platform do not declare their layouts")
    try:
        return _first_declared(vllm_config)
    except Exception as error:
        logger.warning("PDConnector: cross-layer KV blocks are off: cannot tell the backends' layouts: %s", error)
        return _LayoutChoice(None, f"the layouts of the attention backends cannot be told ({error})")


def _workers_allocate() -> bool:
    """Return whether the platform's workers decide on their caches' layout by themselves, as vllm-ascend's do."""
    from vllm.platforms import current_platform  # noqa: PLC0415

    return getattr(current_platform, "device_type", "") == "npu"


def _first_declared(vllm_config: Any) -> _LayoutChoice:
    """Return the best block-outer layout that all attention backends of the model declare."""
    from vllm.config import set_current_vllm_config  # noqa: PLC0415
    from vllm.distributed.kv_transfer.kv_connector.utils import get_current_attn_backends  # noqa: PLC0415
    from vllm.v1.attention.backends.utils import get_supported_kv_cache_layouts  # noqa: PLC0415

    backends = get_current_attn_backends(vllm_config)
    block_tokens = _block_tokens(vllm_config, backends)
    # Blocks of a hybrid are as large as a state, which the engine core learns too late.
    blocks = "blocks of any size" if vllm_config.model_config.is_hybrid else f"whole blocks of {block_tokens} tokens"
    for backend in backends:
        with set_current_vllm_config(vllm_config):  # which sizes a kernel takes may depend on the model
            sizes = backend.get_supported_kernel_block_sizes()
        if not _takes_whole_blocks(sizes, block_tokens, of_any_size=vllm_config.model_config.is_hybrid):
            # vLLM splits blocks for such a kernel, but refuses to do so in a block-outer layout.
            return _LayoutChoice(None, f"kernels of {backend.get_name()} do not take {blocks}")
    names = ", ".join(backend.get_name() for backend in backends)
    declared = {layout.name for layout in get_supported_kv_cache_layouts(backends)}
    # vLLM accepts BHLNC only if the caches of all layers have the same shape.
    one_shape = not (
        vllm_config.model_config.is_hybrid
        or vllm_config.model_config.use_mla
        or vllm_config.speculative_config is not None
    )
    candidates = BLOCK_OUTER if one_shape else ("BLHNC",)
    for name in candidates:
        if name in declared:
            return _LayoutChoice(name, f"{names} takes it, in blocks of {block_tokens} tokens")
    return _LayoutChoice(None, f"{names} takes {', '.join(sorted(declared))} only")


def _block_tokens(vllm_config: Any, backends: Sequence[Any]) -> int:
    """Return the tokens of a block as the workers have or will set them.

    vLLM chooses a layout before an engine core with several workers learns which block size these have chosen for
    their attention backends: its own configuration still holds the default then.
    """
    cache = vllm_config.cache_config
    if cache.user_specified_block_size or cache.block_size != cache.DEFAULT_BLOCK_SIZE:
        return int(cache.block_size)
    return current().preferred_block_tokens(backends, vllm_config)


def _takes_whole_blocks(sizes: Sequence[Any], block_tokens: int, *, of_any_size: bool) -> bool:
    """Return whether a kernel of such ``sizes`` takes a block whole; ``of_any_size``: whatever vLLM makes of it."""
    from vllm.v1.attention.backend import MultipleOf  # noqa: PLC0415

    if of_any_size and not all(isinstance(size, MultipleOf) for size in sizes):
        return False
    return not sizes or any(
        block_tokens % size.base == 0 if isinstance(size, MultipleOf) else block_tokens == size for size in sizes
    )
