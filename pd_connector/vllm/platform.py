"""This machine as vLLM knows it, this process's place among the workers, and vLLM's logging."""

import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from pd_connector.vllm.cache_groups import Ranks
from pd_connector.vllm.engine_config import context_parallel

if TYPE_CHECKING:
    from vllm.config import VllmConfig

T = TypeVar("T")

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def share_logging() -> None:
    """Make this project's packages log like vLLM: to its handlers, at its level. Idempotent."""
    vllm_logger = logging.getLogger("vllm")
    for package in ("layout", "transfer", "pd_connector"):
        logger = logging.getLogger(package)
        logger.handlers = list(vllm_logger.handlers)
        logger.setLevel(vllm_logger.level)
        logger.propagate = vllm_logger.propagate


def worker_ranks() -> Ranks:
    """Return the ranks of this worker process, whose process groups must exist."""
    from vllm.distributed import parallel_state  # noqa: PLC0415  exists only in workers

    tp, pp = parallel_state.get_tp_group(), parallel_state.get_pp_group()
    pcp, dcp = parallel_state.get_pcp_group(), parallel_state.get_dcp_group()
    return Ranks(
        tp.rank_in_group, tp.world_size, pp.rank_in_group, pp.world_size, pcp.rank_in_group, pcp.world_size,
        dcp.rank_in_group,
    )  # fmt: skip


def workers_on_this_machine(vllm_config: "VllmConfig") -> int:
    """Return how many workers of the engine share this machine.

    With Ray, vLLM takes all workers for local, so they are asked: every worker must call this, as all do that register
    their caches.
    """
    if not vllm_config.parallel_config.use_ray:
        return int(vllm_config.parallel_config.local_world_size)
    from vllm.distributed.parallel_state import get_pp_group, get_tp_group  # noqa: PLC0415  exists only in workers

    here = _BOOT_ID.read_text()
    stage = _gather(here, get_tp_group())
    if context_parallel(vllm_config)[1] > 1:
        from vllm.distributed.parallel_state import get_pcp_group  # noqa: PLC0415  exists only in workers

        stage = [machine for shared in _gather(stage, get_pcp_group()) for machine in shared]
    return sum(machine == here for stage in _gather(stage, get_pp_group()) for machine in stage)


def _gather(value: T, group: Any) -> list[T]:
    """Return the values of all workers of one of vLLM's groups. Every one of them must call this."""
    import torch.distributed  # noqa: PLC0415  this module must stay cheap to import

    values: list[Any] = [None] * group.world_size
    torch.distributed.all_gather_object(values, value, group=group.cpu_group)
    return values


def host_address() -> str:
    """Return the address of this machine that vLLM would give to others."""
    from vllm.utils.network_utils import get_ip  # noqa: PLC0415  probes the network

    return str(get_ip())
