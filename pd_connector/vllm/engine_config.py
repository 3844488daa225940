"""What the connector reads of vLLM's configuration, and what of it the connector cannot serve."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm.config import VllmConfig


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


def extra_config(vllm_config: "VllmConfig") -> Mapping[str, Any]:
    """The user's ``kv_connector_extra_config``."""
    return dict(vllm_config.kv_transfer_config.kv_connector_extra_config)


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
    """Return how many blocks of the device one scheduler step takes at most, but for rare steps.

    Beside what is computed, requests that wait for blocks to be pulled or loaded take those of a whole prompt: as many
    as there are, but rarely more than a few of full length in one step.
    """
    scheduler, longest = vllm_config.scheduler_config, vllm_config.model_config.max_model_len
    computed = sum(scheduler.max_num_batched_tokens // size + scheduler.max_num_seqs for size in block_tokens)
    return int(computed + sum(_PROMPTS_A_STEP * -(-longest // size) for size in block_tokens))


def stop_timeout_s(vllm_config: "VllmConfig") -> float:
    """Seconds after being told to stop when vLLM kills its engine core (``--shutdown-timeout``)."""
    return float(vllm_config.shutdown_timeout)


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


def engine_name(vllm_config: "VllmConfig") -> str:
    """Return vLLM's name of this engine, which it makes up where the user gave none."""
    return str(vllm_config.kv_transfer_config.engine_id)
