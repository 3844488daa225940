"""Learns that the model of an engine changes while it serves: new weights, or an adapter in the place of another.

vLLM tells connectors nothing of it. All of it comes to the engine core as a call of ``collective_rpc`` (updates and
reloads of weights, and whatever else a user has the workers do) or of ``add_lora``. So these two methods of the engine
core that constructs the scheduler are wrapped. They run on the scheduler's thread, between steps.
"""

from collections.abc import Callable
from functools import wraps
from typing import TYPE_CHECKING, Any

from pd_connector.vllm.engine_core import core_under_construction
from pd_connector.vllm.releases.installed import current

if TYPE_CHECKING:
    from vllm.lora.request import LoRARequest

#: Calls of workers that change no weights, and beginnings of the names of such. Every other call may.
_HARMLESS = frozenset(
    {
        "checkpoint_prepare",
        "compute_weight_checksums",
        "init_weight_transfer_engine",
        "shutdown_weight_transfer_engine",
        "start_draft_weight_update",
        "synchronize_device",
    }
)
_READS = ("get_", "is_", "has_", "list_", "check_")


def watch_model(changed: Callable[[str], None], adapter_loaded: "Callable[[LoRARequest], bool]") -> None:
    """Have changes of the model told, of the engine core that is constructing its scheduler right now, if there is one.

    Args:
        changed: called after what may have changed the model, also if it has failed; gets its name.
        adapter_loaded: called after vLLM was told to load an adapter; returns whether it has replaced another.
    """
    core: Any = core_under_construction()
    if core is None:
        return
    core.collective_rpc = _calls_told(core.collective_rpc, changed)
    core.add_lora = _adapters_told(core.add_lora, changed, adapter_loaded)
    # With this allocator, vLLM sleeps on request, also without sleep mode.
    model = getattr(getattr(core, "vllm_config", None), "model_config", None)
    if getattr(model, "enable_cumem_allocator", False) and not current().tells_of_sleep:
        for name in ("sleep", "release_kv_cache_memory"):
            if hasattr(core, name):
                setattr(core, name, _refused(getattr(core, name)))


def _refused(call: Callable[..., Any]) -> Callable[..., Any]:
    """Refuse what unmaps the KV cache, whose memory is registered for transfers. Level 0 of sleep only pauses."""

    @wraps(call)
    def refuse(level: int = 1, *args: Any, **kwargs: Any) -> Any:
        if level:
            raise RuntimeError(
                f"{call.__name__}: PDConnector has the KV cache registered for transfers, and this vLLM does not tell "
                "connectors when it unmaps it; use vLLM 0.33 or later"
            )
        return call(level, *args, **kwargs)

    return refuse


def may_change_weights(method: object) -> bool:
    """Return whether a call of the workers may change weights: one by another name than those known to change none."""
    return not isinstance(method, str) or not (method in _HARMLESS or method.startswith(_READS))


def _calls_told(call: Callable[..., Any], changed: Callable[[str], None]) -> Callable[..., Any]:
    @wraps(call)
    def collective_rpc(method: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return call(method, *args, **kwargs)
        finally:
            if may_change_weights(method):
                changed(method if isinstance(method, str) else getattr(method, "__name__", repr(method)))

    return collective_rpc


def _adapters_told(
    call: Callable[..., Any], changed: Callable[[str], None], adapter_loaded: "Callable[[LoRARequest], bool]"
) -> Callable[..., Any]:
    @wraps(call)
    def add_lora(lora_request: "LoRARequest") -> Any:
        added = call(lora_request)
        if adapter_loaded(lora_request):
            changed(f"loading LoRA adapter {lora_request.lora_name!r} in the place of another")
        return added

    return add_lora
