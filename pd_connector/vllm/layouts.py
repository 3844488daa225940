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
from pd_connector.vllm.devices import device_type
from pd_connector.vllm.engine_core import core_under_construction
from pd_connector.vllm.layout_switch import BLOCK_OUTER, SWITCH, cross_layer_blocks, is_ours
from pd_connector.vllm.npu import allocation
from pd_connector.vllm.releases.installed import current

#: A child of vLLM's logger, so that vLLM's handlers and level apply.
logger = logging.getLogger(f"vllm.{__name__}")

#: Devices whose workers decide on their caches' layout by themselves: vllm-ascend's.
_ALLOCATING = "npu"


@dataclass(frozen=True)
class _LayoutChoice:
    """The layout to ask vLLM for, if any, and why."""

    layout: str | None
    reason: str


@dataclass(frozen=True)
class WorkerLayers:
    """What the attention layers of a worker take."""

    backends: frozenset[str]
    layouts: frozenset[str]  # that all of its backends declare
    shapes: frozenset[tuple[int, int, int]]  # of a block in a layer: KV heads, states or tokens, bytes
    refused: str  # why kernels take no block-outer layout, and the way out; empty if all take one


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
    if not cross_layer_blocks(vllm_config):
        return
    device = device_type()
    if device == "cpu" and current().declares_layouts:
        cpu_layouts.warn_if_not_hooked()
    elif device == _ALLOCATING:
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
    if device_type() == _ALLOCATING:
        logger.info("PDConnector: the workers lay out their KV caches: %s", reason)
        return
    effect = "keeps all layers of a block together" if chosen in BLOCK_OUTER else "keeps each layer apart"
    logger.info("PDConnector: the KV cache layout %s %s: %s", chosen, effect, reason)


def _choice(vllm_config: Any) -> _LayoutChoice:
    from vllm.platforms import current_platform  # noqa: PLC0415

    if not cross_layer_blocks(vllm_config):
        return _LayoutChoice(None, f"{SWITCH} is false, or this connector was not found in kv_transfer_config")
    device = device_type()
    if device == "cpu":
        return _LayoutChoice(None, "the best that the workers offer, whose log says why")
    if device == _ALLOCATING:
        return _LayoutChoice(None, "their log says whether all layers of a block are together")
    if not current_platform.is_cuda():
        return _LayoutChoice(None, "the attention backends of this platform do not declare their layouts")
    try:
        return _first_declared()
    except Exception as error:
        logger.warning("PDConnector: cross-layer KV blocks are off: cannot tell the backends' layouts: %s", error)
        return _LayoutChoice(None, f"the layouts of the attention backends cannot be told ({error})")


def _first_declared() -> _LayoutChoice:
    """Return the best block-outer layout that all attention layers of all workers take.

    Raises:
        RuntimeError: vLLM's engine core is not being constructed, or a worker cannot answer.
    """
    core = core_under_construction()
    if core is None:
        raise RuntimeError("no engine core is being constructed, whose workers could be asked")
    if asked := _asked_by_another(core.vllm_config):
        return _LayoutChoice(None, asked)
    workers = core.collective_rpc(worker_layers)
    if failed := next((worker for worker in workers if isinstance(worker, str)), ""):
        raise RuntimeError(failed)
    if refused := next((worker.refused for worker in workers if worker.refused), ""):
        return _LayoutChoice(None, refused)
    names = ", ".join(sorted(frozenset.union(*(worker.backends for worker in workers))))
    declared = frozenset.intersection(*(worker.layouts for worker in workers))
    # vLLM accepts BHLNC only if the caches of all layers have the same shape. One head is contiguous in either.
    shapes = frozenset.union(*(worker.shapes for worker in workers))
    several_heads = len(shapes) == 1 and all(heads > 1 for heads, _, _ in shapes)
    for name in BLOCK_OUTER if several_heads else ("BLHNC",):
        if name in declared:
            return _LayoutChoice(name, f"{names} takes it")
    return _LayoutChoice(None, f"{names} takes {', '.join(sorted(declared))} only")


def _asked_by_another(vllm_config: Any) -> str:
    """Return what a connector beside this one asks vLLM for, empty if none does: MultiConnector refuses two layouts."""
    if vllm_config.kv_transfer_config.kv_connector != "MultiConnector":
        return ""
    from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector  # noqa: PLC0415  heavy

    for connector, config in MultiConnector._get_connector_classes_and_configs(vllm_config):
        child = config.kv_transfer_config
        if is_ours(child.kv_connector, child.kv_connector_module_path):
            continue
        if layout := connector.get_required_kvcache_layout(config):
            return f"{child.kv_connector} beside this connector asks for {layout}"
    return ""


def worker_layers(worker: Any) -> WorkerLayers | str:
    """Return what the attention layers of a worker take, or why that cannot be told.

    Called in the worker: the engine core has no layers. Raises nothing, because behind one worker's error vLLM takes
    the answers of the others for those to its next call.
    """
    try:
        return _layers(worker)
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def _layers(worker: Any) -> WorkerLayers:
    from vllm.config import get_layers_from_vllm_config, set_current_vllm_config  # noqa: PLC0415
    from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase  # noqa: PLC0415

    backends: set[str] = set()
    shapes: set[tuple[int, int, int]] = set()
    refused = ""
    specs = worker.get_kv_cache_spec()
    for name, layer in get_layers_from_vllm_config(worker.vllm_config, AttentionLayerBase).items():
        spec = specs.get(getattr(layer, "kv_sharing_target_layer_name", None) or name)
        if spec is None:  # it keeps nothing
            continue
        backend = layer.get_attn_backend()
        with set_current_vllm_config(worker.vllm_config):  # which sizes a kernel takes may depend on the model
            sizes = current().kernel_block_sizes(backend, spec)
        if not _takes_whole_blocks(sizes, spec.block_size):
            # vLLM splits blocks for such a kernel, but refuses to do so in a block-outer layout.
            refused = (
                f"kernels of {backend.get_name()} do not take whole blocks of {spec.block_size} tokens: try another "
                "--block-size or --attention-backend"
            )
        elif not current().aligns_rows(backend, spec):
            refused = f"kernels of {backend.get_name()} count rows over blocks: vLLM aligns these since 0.32"
        backends.add(backend.get_name())
        shapes.add((spec.num_heads, spec.num_states, spec.page_size_bytes))
    layouts = frozenset(worker.get_supported_kv_cache_layouts())
    return WorkerLayers(frozenset(backends), layouts, frozenset(shapes), refused)


def _takes_whole_blocks(sizes: Sequence[Any], block_tokens: int) -> bool:
    """Return whether a kernel of such ``sizes`` takes a block whole."""
    from vllm.v1.attention.backend import MultipleOf  # noqa: PLC0415

    return not sizes or any(
        block_tokens % size.base == 0 if isinstance(size, MultipleOf) else block_tokens == size for size in sizes
    )
