"""Cross-layer KV blocks on vLLM's NPU platform, vllm-ascend.

vllm-ascend allocates the KV caches by itself, each layer apart, and a connector cannot ask for anything else. The
plugin calls ``register`` in every process of vLLM. In a worker whose configuration names this connector, the model
runner's allocation then makes one tensor over all layers for each part of the cache, K and V or MLA's two, and gives
each layer a view of it, strided in the block dimension. That is done if the layers' caches have one form
(``cache_form``) and the attention operators have just passed their check on such views on this device
(``cache_check``), also on the last blocks of the caches themselves. In all other cases the allocation is vllm-ascend's
own, and one line of log says why.

Which shapes the runner would allocate, its own code says: it is asked on the meta device, which takes no memory.

This module must stay cheap to import: no torch or vllm at module level.
"""

import inspect
import logging
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from pd_connector.vllm.devices import device_type
from pd_connector.vllm.layout_switch import SWITCH, cross_layer_blocks

if TYPE_CHECKING:
    from pd_connector.vllm.npu.cache_form import CacheForm

#: A child of vLLM's logger, so that vLLM's handlers and level apply.
logger = logging.getLogger(f"vllm.{__name__}")

_RUNNER_MODULE = "vllm_ascend.worker.model_runner_v1"
_APART = "PDConnector: each layer's KV cache is allocated apart: %s"


class _NotTogetherError(Exception):
    """The caches of all layers cannot be used together, though their form allows it; the message ends a sentence."""


class JoinedCaches(dict[str, Any]):
    """Caches of all layers that are allocated together, in the place of raw memory that is yet to get its shape."""


def register() -> None:
    """Hook the workers on the NPU platform. Idempotent."""
    try:
        if device_type() == "npu":
            _hook_workers()
    except (ImportError, AttributeError) as missing:
        # This engine may not use the connector. ``warn_if_not_hooked`` warns if it does.
        logger.debug("PDConnector: cross-layer KV blocks are off: %s", missing)


def _hook_workers() -> None:
    """Make every worker of this process hook its model runner, whose module it has imported by then. Idempotent."""
    from vllm.v1.worker.worker_base import WorkerBase  # noqa: PLC0415

    start = WorkerBase.__init__
    if start.__module__ == __name__:
        return

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        start(self, *args, **kwargs)
        if cross_layer_blocks(self.vllm_config):
            _hook_runner()
            _name_other_runners(self)

    WorkerBase.__init__ = init


def _name_other_runners(worker: Any) -> None:
    """Let the worker log, when it allocates, that its model runner is of a class that this module does not hook."""
    initialize = worker.initialize_from_config

    def initialize_from_config(*args: Any, **kwargs: Any) -> Any:
        kind, hooked = type(worker.model_runner), _runner_class()
        if hooked not in (None, kind):  # without any, ``_hook_runner`` has said so
            # Those of 310P and the second one of NPUs allocate in ways of their own, and Xlite's gives the caches to
            # code that takes them to be dense.
            name = f"{kind.__module__}.{kind.__qualname__}"
            logger.info(_APART, f"the model runner {name} is not known to take them together")
        return initialize(*args, **kwargs)

    worker.initialize_from_config = initialize_from_config


def warn_if_not_hooked() -> None:
    """Log that the workers of this engine do not allocate layers together, if the plugin was not loaded."""
    from vllm.v1.worker.worker_base import WorkerBase  # noqa: PLC0415

    if WorkerBase.__init__.__module__ != __name__:
        logger.warning(
            "PDConnector: cross-layer KV blocks are off: vLLM did not load the plugin pd_connector; add it to "
            "VLLM_PLUGINS, or unset that. Set %r to false in kv_connector_extra_config to silence this", SWITCH,
        )  # fmt: skip


def _runner_class() -> Any:
    return getattr(sys.modules.get(_RUNNER_MODULE), "NPUModelRunner", None)


def _hook_runner() -> None:
    """Put this module in front of the model runner's allocation. Idempotent."""
    runner = _runner_class()
    allocate = getattr(runner, "_allocate_kv_cache_tensors", None)
    reshape = getattr(runner, "_reshape_kv_cache_tensors", None)
    if allocate is None or reshape is None:
        logger.warning(
            "PDConnector: each layer's KV cache is allocated apart: this vllm-ascend allocates in another way (no "
            "%s.NPUModelRunner._allocate_kv_cache_tensors or _reshape_kv_cache_tensors)", _RUNNER_MODULE,
        )  # fmt: skip
        return
    if allocate.__module__ == __name__:
        return

    def allocate_kv_caches(self: Any, kv_cache_config: Any) -> Any:
        """Return the caches of all layers together, or what the runner itself allocates."""
        joined = _joined_caches(self, kv_cache_config, allocate, reshape) if type(self) is runner else None
        return allocate(self, kv_cache_config) if joined is None else joined

    def reshape_kv_caches(self: Any, kv_cache_config: Any, raw: Any, *args: Any, **kwargs: Any) -> Any:
        """Return the views of caches that are allocated together; give the runner's own their shape."""
        return dict(raw) if isinstance(raw, JoinedCaches) else reshape(self, kv_cache_config, raw, *args, **kwargs)

    runner._allocate_kv_cache_tensors = allocate_kv_caches
    runner._reshape_kv_cache_tensors = reshape_kv_caches


def _joined_caches(
    runner: Any, kv_cache_config: Any, allocate: Callable[..., Any], reshape: Callable[..., Any]
) -> JoinedCaches | None:
    """Return the caches of all layers together, or None, with one line of log, if they are to be allocated apart."""
    from pd_connector.vllm.npu.cache_form import LayersApartError  # noqa: PLC0415  imports torch

    if not cross_layer_blocks(runner.vllm_config):
        return None
    started = time.monotonic()
    try:
        form = _form(runner, kv_cache_config, allocate, reshape)
        _check(runner, form)
        caches = _allocate_together(form, runner.device)
        _check(runner, form, caches)
    except LayersApartError as reason:
        logger.info(_APART, reason)
    except _NotTogetherError as reason:
        logger.warning(_APART, reason)
    except Exception as error:  # the server must start even if vllm-ascend is not as this module expects
        logger.warning(_APART, f"the attention operators could not be checked ({type(error).__name__}: {error})")
    else:
        logger.info(
            "PDConnector: the KV caches of %d layers are allocated together, %d bytes of each block in %d runs; the "
            "attention operators have passed their check on this (%.0f ms with the allocation)",
            len(form.layers), form.block_bytes, len(form.parts), (time.monotonic() - started) * 1e3,
        )  # fmt: skip
        return caches
    return None


def _form(runner: Any, kv_cache_config: Any, allocate: Callable[..., Any], reshape: Callable[..., Any]) -> "CacheForm":
    """Return the form of the caches that the runner would allocate, without allocating them.

    Raises:
        LayersApartError: they have none in common.
    """
    import torch  # noqa: PLC0415

    from pd_connector.vllm.npu.cache_form import check_groups, common_form  # noqa: PLC0415

    groups = [group for group in kv_cache_config.kv_cache_groups if group.layer_names]
    check_groups(groups)
    # 0.30 passes what 0.23 only keeps in the runner.
    passed = "kernel_block_sizes" in inspect.signature(reshape).parameters
    sizes = (runner.kernel_block_sizes,) if passed else ()
    device = runner.device
    runner.device = torch.device("meta")
    try:
        caches = reshape(runner, kv_cache_config, allocate(runner, kv_cache_config), *sizes)
    finally:
        runner.device = device
    return common_form(caches, int(groups[0].kv_cache_spec.block_size), int(kv_cache_config.num_blocks))


def _check(runner: Any, form: "CacheForm", caches: JoinedCaches | None = None) -> None:
    """Check the model's attention operators on the last blocks of ``caches``; None: on small caches of their own.

    Raises:
        _NotTogetherError: they fail.
    """
    if found := _failed_check(runner, form, caches):
        which = "caches of all layers together" if caches is None else "the last blocks of all layers' caches together"
        raise _NotTogetherError(f"the attention operators fail their check on {which}: {found}")


def _failed_check(runner: Any, form: "CacheForm", caches: JoinedCaches | None) -> str:
    from pd_connector.vllm.npu.cache_check import difference, difference_at_end  # noqa: PLC0415
    from pd_connector.vllm.npu.memory_watch import DeviceMemoryWatch  # noqa: PLC0415
    from pd_connector.vllm.npu.operators import attention_operators  # noqa: PLC0415

    watch = DeviceMemoryWatch()
    try:
        for operators in attention_operators(runner.vllm_config, form.layers, runner.device):
            if caches is None:
                found = difference(operators, form.parts, form.block_tokens, runner.device, watch)
            else:
                found = difference_at_end(operators, list(caches.values()), form.block_tokens)
            if found:
                if caches is not None:
                    caches.clear()  # so that their memory is given back
                return found
    finally:
        watch.give_back()
    return ""


def _allocate_together(form: "CacheForm", device: Any) -> JoinedCaches:
    """Return caches of zeros.

    Raises:
        _NotTogetherError: there is no memory in one piece, for example; the runner may find it in smaller ones.
    """
    from pd_connector.vllm.cross_layer_tensors import allocate_cross_layer  # noqa: PLC0415

    try:
        return JoinedCaches(allocate_cross_layer(form.parts, form.layers, form.blocks, device))
    except Exception as error:
        size = form.block_bytes * form.blocks
        raise _NotTogetherError(
            f"{size} bytes cannot be allocated together ({type(error).__name__}: {error})"
        ) from error
