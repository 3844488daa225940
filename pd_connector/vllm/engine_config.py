"""What the connector reads from vLLM's configuration, and checks of what it cannot serve."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pd_connector.vllm.devices import device_type
from pd_connector.vllm.releases.installed import current

if TYPE_CHECKING:
    from vllm.config import VllmConfig


class UnsupportedError(ValueError):
    """The connector cannot serve a vLLM configuration; the message names the setting."""


@dataclass(frozen=True)
class EngineRole:
    """What an engine does with requests' KV caches, by its ``kv_role`` and ``kv_load_failure_policy``."""

    produces: bool  # prefills for other engines
    consumes: bool  # pulls what other engines prefilled
    recomputes: bool  # computes a request whose blocks failed to arrive; otherwise the request fails
    is_read: bool  # other engines read its caches: it prefills for them, or serves prefixes
    reads: bool  # it reads those of others: it pulls prompts, or prefixes

    @classmethod
    def of(cls, vllm_config: "VllmConfig", *, serves_prefixes: bool = False, asks_peers: bool = False) -> "EngineRole":
        """Return the role that the user gave this engine, with the settings of prefixes."""
        transfer = vllm_config.kv_transfer_config
        produces, consumes = transfer.is_kv_producer, transfer.is_kv_consumer
        return cls(
            produces,
            consumes,
            _outer(vllm_config).kv_load_failure_policy == "recompute",
            is_read=produces or serves_prefixes,
            reads=consumes or asks_peers,
        )


def extra_config(vllm_config: "VllmConfig") -> Mapping[str, Any]:
    """Return the user's ``kv_connector_extra_config``."""
    return dict(vllm_config.kv_transfer_config.kv_connector_extra_config)


def kv_port(vllm_config: "VllmConfig") -> int:
    """Return the ``kv_port`` that the user has given beside ``kv_connector_extra_config``; 0 if none, or vLLM's own."""
    transfer = vllm_config.kv_transfer_config
    given = int(transfer.kv_port)
    return 0 if given == type(transfer).kv_port else given


def found_sizes(vllm_config: "VllmConfig") -> dict[str, object]:
    """Return this engine's sizes by the names that recipes of vllm-ascend have for them; None: not known."""
    from vllm import envs  # noqa: PLC0415  reads the environment

    tp_size, pp_size = engine_ranks(vllm_config)
    dp_size = vllm_config.parallel_config.data_parallel_size
    return {
        "dp_size": dp_size if dp_size > 1 else None,  # vLLM sets it to 1 where each engine has a URL of its own
        "tp_size": tp_size,
        "pp_size": pp_size,
        "pp_layer_partition": envs.VLLM_PP_LAYER_PARTITION,
    }


def _outer(vllm_config: "VllmConfig") -> Any:
    """Return the ``kv_transfer_config`` by which vLLM goes, which is MultiConnector's own if this one is inside it.

    Known to workers only; elsewhere this connector's.
    """
    from vllm.config import get_current_vllm_config_or_none  # noqa: PLC0415  heavy

    current_config = get_current_vllm_config_or_none()
    outer = current_config.kv_transfer_config if current_config is not None else None
    return outer or vllm_config.kv_transfer_config


def check_outer_config(vllm_config: "VllmConfig") -> None:
    """Raise if MultiConnector's own role or policy is another than this connector's inside it, where that matters.

    Raises:
        UnsupportedError: naming both values.
    """
    ours, outer = vllm_config.kv_transfer_config, _outer(vllm_config)
    if ours.is_kv_consumer and not outer.is_kv_consumer:
        raise UnsupportedError(
            f"kv_role = {ours.kv_role} of PDConnector, inside a MultiConnector of kv_role = {outer.kv_role}: vLLM goes "
            "by the outer one, and lets blocks be written too early; set the outer kv_role to kv_both or kv_consumer"
        )
    if ours.kv_load_failure_policy == "recompute" != outer.kv_load_failure_policy:
        raise UnsupportedError(
            "kv_load_failure_policy = recompute of PDConnector, inside a MultiConnector of kv_load_failure_policy = "
            f"{outer.kv_load_failure_policy}: vLLM goes by the outer one; set it there"
        )


def check_supported(vllm_config: "VllmConfig") -> None:
    """Raise unless the connector serves sleep mode, experts, videos, scales, faults, executor and contexts as set.

    Raises:
        UnsupportedError: naming the setting and the way out.
    """
    if vllm_config.model_config.enable_sleep_mode and not current().tells_of_sleep:
        raise UnsupportedError(
            "enable_sleep_mode: this vLLM does not tell connectors when it unmaps the KV cache, whose memory is "
            "registered for transfers; start without --enable-sleep-mode, or use vLLM 0.33 or later"
        )
    # In some releases that is a setting of the model's, in others one of its own.
    asking = (getattr(vllm_config, "aux_output_config", None), vllm_config.model_config)
    if any(getattr(each, "enable_return_routed_experts", False) for each in asking):
        raise UnsupportedError(
            "enable_return_routed_experts: the experts of tokens that are pulled, or loaded from host memory, are not "
            "known to this engine; start without --enable-return-routed-experts, or without PDConnector"
        )
    media = getattr(vllm_config.model_config, "multimodal_config", None)
    rate = getattr(media, "video_pruning_rate", None)
    if rate and vllm_config.model_config.uses_mrope:
        raise UnsupportedError(
            f"video_pruning_rate = {rate}: this model's positions behind a video depend on which "
            "of its tokens are kept, which vLLM learns by computing the video only, not where its blocks are pulled or "
            "loaded; start without --video-pruning-rate, or without PDConnector"
        )
    if getattr(vllm_config.parallel_config, "enable_fault_tolerance", False):  # from vLLM 0.32 on
        raise UnsupportedError(
            "enable_fault_tolerance: when vLLM goes on after a fault, orders to workers or their reports are lost, so "
            "that the blocks of pulls and copies would never be free again; start without --enable-fault-tolerance and "
            "without --fault-tolerance-config, and let the engine be restarted"
        )
    cache = vllm_config.cache_config
    if getattr(cache, "calculate_kv_scales", False) and str(cache.cache_dtype).startswith("fp8"):  # of vLLM 0.23
        raise UnsupportedError(
            "calculate_kv_scales: each engine finds the scales of its quantised cache by its first prompt, so that no "
            "other can use its blocks; serve a checkpoint that has scales, or start without --calculate-kv-scales"
        )
    _check_executor(vllm_config)
    device, served = device_type(), current().devices
    if served and device not in served:
        raise UnsupportedError(
            f"device {device}: with this vLLM, PDConnector serves {' and '.join(served)} only, because it does not "
            "know how the KV caches of other devices are laid out; use vLLM 0.30 or later"
        )
    _check_context_parallel(vllm_config, device)


def _check_executor(vllm_config: "VllmConfig") -> None:
    """Raise if the scheduler side does not hear of all workers: whatever waits for them would wait for ever."""
    import vllm.envs  # noqa: PLC0415

    parallel = vllm_config.parallel_config
    if parallel.distributed_executor_backend == "external_launcher" and workers_of(vllm_config) > 1:
        raise UnsupportedError(
            "distributed_executor_backend = external_launcher: each rank has a scheduler of its own, which hears of "
            f"one worker of {workers_of(vllm_config)}; use mp or ray, or one rank"
        )
    is_old_ray = parallel.use_ray and not getattr(vllm.envs, "VLLM_USE_RAY_V2_EXECUTOR_BACKEND", True)
    if is_old_ray and parallel.pipeline_parallel_size > 1:
        raise UnsupportedError(
            "VLLM_USE_RAY_V2_EXECUTOR_BACKEND = 0: that executor passes on the last pipeline stage's reports only; "
            "unset it, or set pipeline_parallel_size to 1"
        )


def _check_context_parallel(vllm_config: "VllmConfig", device: str) -> None:
    """Raise if context parallelism is on where vLLM has none, or in a way that is not served."""
    decode, prefill = context_parallel(vllm_config)
    if decode == prefill == 1:
        return
    what = f"decode_context_parallel_size = {decode}" if decode > 1 else f"prefill_context_parallel_size = {prefill}"
    if device == "cpu":
        raise UnsupportedError(f"{what}: vLLM's CPU attention kernels have no context parallelism; set it to 1")
    if not current().serves_context_parallel:
        raise UnsupportedError(
            f"{what}: with this vLLM, PDConnector serves no context parallelism; set it to 1, or use vLLM 0.30 or later"
        )
    if prefill > 1 and vllm_config.kv_transfer_config.is_kv_consumer:
        raise UnsupportedError(
            f"prefill_context_parallel_size = {prefill}: PDConnector serves ranks that share the computation of "
            "prompts on prefill engines only; start with kv_role kv_producer, or set it to 1"
        )


def check_prefix_caching(vllm_config: "VllmConfig", setting: str) -> None:
    """Raise unless prefix caching is on, which a ``setting`` of the connector needs.

    Raises:
        UnsupportedError: naming the reason and the way out.
    """
    if not vllm_config.cache_config.enable_prefix_caching:
        raise UnsupportedError(
            f"{setting}: blocks are found by vLLM's prefix caching, which is off (by --no-enable-prefix-caching, or "
            "because this model or platform has none); leave the setting out"
        )


def check_one_engine_per_url(vllm_config: "VllmConfig") -> None:
    """Raise if data-parallel engines share a URL, so that nobody can say which of them takes a request.

    Raises:
        UnsupportedError: naming the setting and the way out.
    """
    parallel = vllm_config.parallel_config
    index = data_parallel_index(vllm_config)
    # Of ranks that are independent, vLLM sets the size to 1; the first of them cannot tell then, but the others can.
    if parallel.data_parallel_external_lb or (parallel.data_parallel_size <= 1 and not index):
        return
    raise UnsupportedError(
        f"bootstrap_port: this is the data-parallel engine {index} of several behind one URL, and a router that sends "
        "both legs of a request at once cannot tell which of them takes it; give each engine a URL of its own (servers "
        "without --data-parallel-size or, for experts, with --data-parallel-rank), or set bootstrap_port to 0"
    )


#: Methods of speculative decoding that keep nothing in KV caches.
_WITHOUT_CACHES = ("ngram", "ngram_gpu", "suffix")
_PROMPTS_PER_STEP = 4  # that start to be pulled or loaded


def max_blocks_per_step(vllm_config: "VllmConfig", block_tokens: Sequence[int]) -> int:
    """Return how many device blocks a scheduler step allocates at most, apart from rare steps.

    Besides the blocks of what it computes, a step allocates those of whole prompts that are to be pulled or loaded.
    Their number is not limited, but is rarely more than a few of full length.
    """
    scheduler, longest = vllm_config.scheduler_config, vllm_config.model_config.max_model_len
    computed = sum(scheduler.max_num_batched_tokens // size + scheduler.max_num_seqs for size in block_tokens)
    return int(computed + sum(_PROMPTS_PER_STEP * -(-longest // size) for size in block_tokens))


def drafts_late(vllm_config: "VllmConfig") -> bool:
    """Return whether a step's results may come before the device has written what the step drafts.

    vLLM launches the draft model behind what the results wait for, and with any drafts what moves states to their
    blocks. On the CPU, a kernel is done when its call returns.
    """
    moves_states = vllm_config.speculative_config is not None and bool(vllm_config.model_config.is_hybrid)
    return (moves_states or drafts_keep_caches(vllm_config)) and device_type() != "cpu"


def drafts_keep_caches(vllm_config: "VllmConfig") -> bool:
    """Return whether an engine drafts by layers that keep KV caches."""
    speculative = vllm_config.speculative_config
    return speculative is not None and speculative.method not in _WITHOUT_CACHES


def draft_tokens(vllm_config: "VllmConfig") -> int:
    """Return for how many tokens a request's first step that drafts has blocks besides its own, at most.

    Those that vLLM takes for drafts that it has yet to make, the one that is sampled, and those that are drafted then,
    for which some methods need one more.
    """
    speculative = vllm_config.speculative_config
    number = int(speculative.num_speculative_tokens or 0) if speculative is not None else 0
    return 2 * (number + 1) if number else 0


def arithmetic(vllm_config: "VllmConfig") -> str:
    """Return what decides on the numbers with which a worker computes, besides its files: quantization and device.

    To be asked in a worker: only there the device is in use.
    """
    from vllm.platforms import current_platform  # noqa: PLC0415  resolves the platform on first use

    model = vllm_config.model_config
    # By its capability, vLLM chooses kernels for a GPU: they may emulate what it lacks. Other devices have a name only.
    device = current_platform.get_device_capability() or current_platform.get_device_name()
    return repr((model.quantization, model.quantization_config, device))


def stop_timeout_s(vllm_config: "VllmConfig") -> float:
    """Return the seconds after which vLLM kills an engine core that it told to stop (``--shutdown-timeout``)."""
    return float(vllm_config.shutdown_timeout)


def max_model_len(vllm_config: "VllmConfig") -> int:
    """Return how many tokens a request may have, prompt and answer together."""
    return int(vllm_config.model_config.max_model_len)


def context_parallel(vllm_config: "VllmConfig") -> tuple[int, int]:
    """Return among how many ranks an engine shares the tokens of a cache, and the computation of a prompt."""
    parallel = vllm_config.parallel_config
    decode, prefill = (int(getattr(parallel, f"{name}_context_parallel_size", 1)) for name in ("decode", "prefill"))
    return decode, prefill


def workers_of(vllm_config: "VllmConfig") -> int:
    """Return how many workers the engine has. Those that share a cache's tokens are tensor-parallel ones, too."""
    return math.prod(engine_ranks(vllm_config)) * context_parallel(vllm_config)[1]


def engine_ranks(vllm_config: "VllmConfig") -> tuple[int, int]:
    """Return the engine's tensor-parallel and pipeline-parallel sizes."""
    parallel = vllm_config.parallel_config
    return parallel.tensor_parallel_size, parallel.pipeline_parallel_size


def steps_in_flight(vllm_config: "VllmConfig") -> int:
    """Return how many steps are scheduled at most before the first of them has ended: two more than stages."""
    _, stages = engine_ranks(vllm_config)
    return stages + 2


def data_parallel_index(vllm_config: "VllmConfig") -> int:
    """Return this engine's index among the engines of a data-parallel deployment."""
    return int(vllm_config.parallel_config.data_parallel_index)


def engine_name(vllm_config: "VllmConfig") -> str:
    """Return vLLM's name of this engine, which is random unless the user gave one."""
    return str(vllm_config.kv_transfer_config.engine_id)
