"""Everything of vLLM that may change between releases, in one place: here, and in ``vllm_blocks`` its block pools.

All other modules import vLLM's classes from here and ask these functions instead of reaching into vLLM's objects.
Written for and tested with vLLM 0.32. (The CPU attention backend's layouts are in ``cpu_layouts``, which must not
import vLLM before it is needed.)
"""

import hashlib
import json
import logging
import sys
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats
from vllm.logger import init_logger
from vllm.v1.metrics.cache_hit_source import CacheHitSource
from vllm.v1.request import RequestStatus

from layout.geometry import ModelIdentity
from pd_connector import cpu_layouts
from pd_connector.cache_groups import GroupSpec, Ranks

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.engine.core import EngineCoreProc
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.request import Request

__all__ = [
    "CacheHitSource",
    "KVConnectorBase_V1",
    "KVConnectorHandshakeMetadata",
    "KVConnectorMetadata",
    "KVConnectorPromMetrics",
    "KVConnectorRole",
    "KVConnectorStats",
    "KVConnectorTransferResults",
    "KVConnectorWorkerMetadata",
    "SupportsHMA",
    "init_logger",
]


class UnsupportedError(ValueError):
    """A vLLM configuration that the connector cannot serve; the message names the setting."""


@dataclass(frozen=True)
class EngineRole:
    """What an engine does with KV caches of requests, by its ``kv_role`` and ``kv_load_failure_policy``."""

    produces: bool  # prefills for others
    consumes: bool  # pulls what others prefilled
    recomputes: bool  # a request whose pull failed is computed here; otherwise it fails

    @classmethod
    def of(cls, vllm_config: "VllmConfig") -> "EngineRole":
        """The role that the user gave to this engine."""
        transfer = vllm_config.kv_transfer_config
        return cls(transfer.is_kv_producer, transfer.is_kv_consumer, transfer.kv_load_failure_policy == "recompute")


def engine_waker() -> Callable[[], None] | None:
    """What wakes the engine core from its wait for requests, so that it asks ``has_pending_push_work`` again.

    Call it while the engine core constructs the scheduler. The function may be called from any thread. None where no
    engine core's loop is waiting, as in the in-process ``LLM``.
    """
    from vllm.v1.engine import EngineCoreRequestType  # noqa: PLC0415  imports most of vLLM

    if (engine := _engine_core()) is None:
        return None
    inputs = engine.input_queue
    return lambda: inputs.put_nowait((EngineCoreRequestType.WAKEUP, None))


def stop_watcher() -> Callable[[], bool]:
    """What tells whether the engine core was told to stop (SIGTERM): it ends as soon as it has no work.

    Call it while the engine core constructs the scheduler. False for ever where no engine core's loop is running.
    """
    if (engine := _engine_core()) is None:
        return lambda: False
    reference = weakref.ref(engine)

    def is_stopping() -> bool:
        engine = reference()
        return engine is None or not engine.is_running()

    return is_stopping


def stop_timeout_s(vllm_config: "VllmConfig") -> float:
    """Seconds after being told to stop when vLLM kills its engine core (``--shutdown-timeout``)."""
    return float(vllm_config.shutdown_timeout)


def _engine_core() -> "EngineCoreProc | None":
    from vllm.v1.engine.core import EngineCoreProc  # noqa: PLC0415  imports most of vLLM

    # vLLM hands connectors no way to its engine core; the one that is being constructed is up the stack.
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        engine = frame.f_locals.get("self")
        if isinstance(engine, EngineCoreProc):
            return engine
        frame = frame.f_back
    return None


def share_logging() -> None:
    """Let this project's packages log like vLLM does: to its handlers, at its level. Idempotent."""
    vllm_logger = logging.getLogger("vllm")
    for package in ("layout", "transfer", "pd_connector"):
        logger = logging.getLogger(package)
        logger.handlers = list(vllm_logger.handlers)
        logger.setLevel(vllm_logger.level)
        logger.propagate = vllm_logger.propagate


def check_supported(vllm_config: "VllmConfig") -> None:
    """Raise for parallelism that the connector does not know.

    Raises:
        UnsupportedError: context parallelism or sleep mode is on.
    """
    if vllm_config.model_config.enable_sleep_mode:
        raise UnsupportedError(
            "enable_sleep_mode: waking up moves the KV cache to other memory than the one registered for transfers; "
            "start without --enable-sleep-mode"
        )
    parallel = vllm_config.parallel_config
    for name in ("decode_context_parallel_size", "prefill_context_parallel_size"):
        size = getattr(parallel, name, 1)
        if size != 1:
            raise UnsupportedError(f"{name} = {size}: PDConnector does not support context parallelism; set it to 1")


def check_prefix_caching(vllm_config: "VllmConfig") -> None:
    """Raise unless blocks can be found by their contents.

    Raises:
        UnsupportedError: prefix caching is off.
    """
    if not vllm_config.cache_config.enable_prefix_caching:
        raise UnsupportedError(
            "cpu_bytes_to_use: blocks in host memory are found by vLLM's prefix caching, which is off (by "
            "--no-enable-prefix-caching, or because this model or platform has none); set cpu_bytes_to_use to 0"
        )


_PROMPTS_A_STEP = 4  # that are pulled or loaded


def most_blocks_a_step(vllm_config: "VllmConfig", block_tokens: Sequence[int]) -> int:
    """How many blocks of the device one scheduler step may take, nearly at the most.

    Beside what is computed, requests that wait for blocks to be pulled or loaded take those of a whole prompt: as many
    as there are, but rarely more than a few of full length in one step.
    """
    scheduler, longest = vllm_config.scheduler_config, vllm_config.model_config.max_model_len
    computed = sum(scheduler.max_num_batched_tokens // size + scheduler.max_num_seqs for size in block_tokens)
    return int(computed + sum(_PROMPTS_A_STEP * -(-longest // size) for size in block_tokens))


def worker_ranks() -> Ranks:
    """This worker process's ranks. Call it in a worker, after its process groups exist."""
    from vllm.distributed.parallel_state import get_pp_group, get_tp_group  # noqa: PLC0415  only exists in workers

    tp, pp = get_tp_group(), get_pp_group()
    return Ranks(tp.rank_in_group, tp.world_size, pp.rank_in_group, pp.world_size)


def engine_ranks(vllm_config: "VllmConfig") -> tuple[int, int]:
    """Tensor- and pipeline-parallel size of the engine."""
    parallel = vllm_config.parallel_config
    return parallel.tensor_parallel_size, parallel.pipeline_parallel_size


def workers_on_this_machine(vllm_config: "VllmConfig") -> int:
    """How many workers of the engine share a machine."""
    return int(vllm_config.parallel_config.local_world_size)


def data_parallel_index(vllm_config: "VllmConfig") -> int:
    """This engine's number among the engines of a data-parallel deployment."""
    return int(vllm_config.parallel_config.data_parallel_index)


def host_address() -> str:
    """The address that vLLM would give to other machines for this one."""
    from vllm.utils.network_utils import get_ip  # noqa: PLC0415  looks at the network

    return str(get_ip())


def default_protocol() -> str:
    """The transfer engine's transport for this platform."""
    return {"cuda": "rdma", "npu": "ascend"}.get(_device_type(), "tcp")


def caches_are_host_memory() -> bool:
    """Whether this process can read and write the KV caches with the CPU."""
    return _device_type() == "cpu"


def _device_type() -> str:
    from vllm.platforms import current_platform  # noqa: PLC0415  resolves the platform on first use

    return str(current_platform.device_type)


def cache_groups(vllm_config: "VllmConfig", kv_cache_config: "KVCacheConfig") -> tuple[GroupSpec, ...]:
    """The KV cache groups in vLLM's order.

    Raises:
        UnsupportedError: a group holds something else than attention (such as Mamba state), whose blocks do not
            belong to tokens.
    """
    groups = []
    for group in kv_cache_config.kv_cache_groups:
        spec = group.kv_cache_spec
        by_layer = getattr(spec, "kv_cache_specs", None) or dict.fromkeys(group.layer_names, spec)
        layer_specs = list(by_layer.values()) or [spec]
        if not all(hasattr(layer_spec, "num_kv_heads") for layer_spec in layer_specs):
            layer = next(iter(group.layer_names), "layers of another pipeline stage")
            kind = type(layer_specs[0]).__name__
            raise UnsupportedError(f"KV cache group of {layer!r} is a {kind}: PDConnector moves attention caches only")
        window = max(int(getattr(layer_spec, "sliding_window", None) or 0) for layer_spec in layer_specs)
        parts = {name: _parts(vllm_config, layer_spec) for name, layer_spec in by_layer.items()}
        groups.append(GroupSpec(tuple(group.layer_names), int(spec.block_size), window, parts))
    return tuple(groups)


def _parts(vllm_config: "VllmConfig", layer_spec: Any) -> tuple[tuple[str, int], ...]:
    """What a token's content consists of: K and V, or MLA's latent vector and rotary key."""
    if not vllm_config.model_config.use_mla:
        return ("k", int(layer_spec.head_size)), ("v", int(layer_spec.head_size_v))
    model = vllm_config.model_config.hf_text_config
    latent, rope = getattr(model, "kv_lora_rank", None), getattr(model, "qk_rope_head_dim", None)
    return (("mla_latent", int(latent)), ("mla_rope", int(rope))) if latent and rope else ()


def with_head_orders(vllm_config: "VllmConfig", group: GroupSpec, caches: Mapping[str, "torch.Tensor"]) -> GroupSpec:
    """``group`` with the orders of the CPU kernels, where they are the ones that write its caches.

    Raises:
        RuntimeError, NotImplementedError: they cannot be found out.
    """
    if _device_type() != "cpu" or vllm_config.model_config.use_mla:
        return group
    forms = {name: (*caches[name].shape[-2:], caches[name].dtype) for name in group.layer_names}
    found = {
        (block_tokens, content, dtype): cpu_layouts.head_order(vllm_config, block_tokens, content // 2, dtype)
        for block_tokens, content, dtype in set(forms.values())
    }
    return replace(group, orders={name: found[form] for name, form in forms.items()})


def model_identity(vllm_config: "VllmConfig", check: str) -> ModelIdentity:
    """What must be equal on both sides of a transfer.

    ``check`` is the setting ``model_check``: "weights", "config" or "off".
    """
    model = vllm_config.model_config
    directory = _model_directory(model)
    model_dtype = str(model.dtype).removeprefix("torch.")
    cache_dtype = str(vllm_config.cache_config.cache_dtype)
    return ModelIdentity(
        architecture=str(model.architecture),
        config_digest="" if check == "off" else _config_digest(model, directory),
        weights_digest=_weights_digest(directory) if directory and check == "weights" else "",
        layers=int(model.get_total_num_hidden_layers()),
        kv_heads=1 if model.use_mla else int(model.get_total_num_kv_heads()),
        head_size=int(model.get_head_size()),
        model_dtype=model_dtype,
        cache_dtype=model_dtype if cache_dtype == "auto" else cache_dtype,
    )


#: Keys of a model's configuration that say how it was saved or run, not what it computes.
_VOLATILE_KEYS = frozenset({"_name_or_path", "dtype", "torch_dtype", "transformers_version", "use_cache"})


def _model_directory(model_config: Any) -> Path | None:
    """Where the model's files are on this machine: a path, or the cache of a model that was named by its hub id."""
    path = Path(model_config.model)
    if path.is_dir():
        return path
    from huggingface_hub import snapshot_download  # noqa: PLC0415  only for models from a hub
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError  # noqa: PLC0415

    try:
        return Path(snapshot_download(model_config.model, revision=model_config.revision, local_files_only=True))
    except (HFValidationError, LocalEntryNotFoundError, OSError):
        return None


def _config_digest(model_config: Any, directory: Path | None) -> str:
    """Digest of the model's configuration file (of what transformers made of it if there is none) and of overrides."""
    path = directory / "config.json" if directory else None
    config = json.loads(path.read_text()) if path and path.is_file() else model_config.hf_config.to_diff_dict()
    content = {key: value for key, value in config.items() if key not in _VOLATILE_KEYS}
    if overrides := model_config.hf_overrides:
        content["hf_overrides"] = overrides if isinstance(overrides, dict) else "callable"
    return hashlib.blake2b(json.dumps(content, sort_keys=True, default=str).encode(), digest_size=8).hexdigest()


_SAMPLE_BYTES = 4096
_SAMPLES_PER_FILE = 8


def _weights_digest(directory: Path) -> str:
    """Digest of a few kilobytes of every weight file; empty if there are no safetensors.

    Fine-tuned variants of one model differ in almost every tensor, so a sample tells them apart at no cost.
    """
    files = sorted(directory.glob("*.safetensors"))
    if not files:
        return ""
    digest = hashlib.blake2b(digest_size=8)
    for file in files:
        size = file.stat().st_size
        digest.update(f"{file.name}:{size}".encode())
        with file.open("rb") as stream:
            for sample in range(_SAMPLES_PER_FILE):
                stream.seek(size * (2 * sample + 1) // (2 * _SAMPLES_PER_FILE))
                digest.update(stream.read(_SAMPLE_BYTES))
    return digest.hexdigest()


def prompt_shape(request: "Request") -> tuple[list[int] | None, tuple[str, ...]]:
    """A request's prompt token ids, None if it has other inputs, and the names of all else that shapes its KV cache."""
    extra = [f"lora:{request.lora_request.lora_name}"] if request.lora_request else []
    # What identifies an image or an embedding to vLLM may differ between engines that are given the same one.
    is_text = not request.mm_features and getattr(request, "prompt_embeds", None) is None
    return (request.prompt_token_ids if is_text else None), tuple(extra)


def is_placeholder(request: "Request") -> bool:
    """Whether a request only stands for one that the API server has rejected, and is aborted as soon as it is added."""
    return bool(getattr(request, "abort_immediately", False))


def prefill_is_complete(request: "Request") -> bool:
    """Whether a finished request got its first token, so that its whole prompt is in the cache."""
    return request.status in (RequestStatus.FINISHED_STOPPED, RequestStatus.FINISHED_LENGTH_CAPPED)


def block_ids_by_group(blocks: "KVCacheBlocks") -> tuple[tuple[int, ...], ...]:
    """The block table of each cache group; 0 is vLLM's null block, which holds nothing."""
    return tuple(tuple(ids) for ids in blocks.get_block_ids())


def extra_config(vllm_config: "VllmConfig") -> Mapping[str, Any]:
    """The user's ``kv_connector_extra_config``."""
    return dict(vllm_config.kv_transfer_config.kv_connector_extra_config)
