"""Stands in for the process groups of an engine with many ranks, so that one process can be any of them.

Nothing communicates: models and caches are made, and none of them runs.
"""

from dataclasses import dataclass, field
from typing import Any

import torch
from vllm.distributed import parallel_state
from vllm_ascend.distributed import parallel_state as ascend_parallel_state


class _Communicator:
    """In the place of torch's process group."""

    def __init__(self, size: int, rank: int) -> None:
        self._size, self._rank = size, rank

    def size(self) -> int:
        return self._size

    def rank(self) -> int:
        return self._rank

    def _get_backend(self, _: torch.device) -> "_Communicator":
        return self

    def get_hccl_comm_name(self, _: int) -> str:
        return "simulated"


@dataclass(eq=False)
class Group:
    """What vLLM and vllm-ascend ask of a process group while a model is made."""

    world_size: int
    rank_in_group: int
    ranks: list[int] = field(default_factory=list)
    device_group: Any = None
    cpu_group: Any = None
    device_communicator: Any = None
    local_rank: int = 0
    device: torch.device = torch.device("npu:0")  # noqa: RUF009
    unique_name: str = "simulated"

    def __post_init__(self) -> None:
        self.ranks = list(range(self.world_size))
        self.rank = self.rank_in_group
        self.device_group = self.cpu_group = _Communicator(self.world_size, self.rank_in_group)

    @property
    def is_first_rank(self) -> bool:
        return self.rank_in_group == 0

    @property
    def is_last_rank(self) -> bool:
        return self.rank_in_group == self.world_size - 1

    @property
    def first_rank(self) -> int:
        return 0

    @property
    def last_rank(self) -> int:
        return self.world_size - 1

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    def barrier(self) -> None:
        """Nobody else is there."""


def become_rank(parallel: Any, tp_rank: int, pp_rank: int) -> None:
    """Have vLLM and vllm-ascend take this process for a rank of an engine with that ``ParallelConfig``."""
    tp_size, pp_size, dp_size = (
        parallel.tensor_parallel_size,
        parallel.pipeline_parallel_size,
        parallel.data_parallel_size,
    )
    dcp_size = parallel.decode_context_parallel_size
    groups = {
        "_WORLD": Group(tp_size * pp_size, pp_rank * tp_size + tp_rank),
        "_INNER_DP_WORLD": Group(tp_size * pp_size, pp_rank * tp_size + tp_rank),
        "_TP": Group(tp_size, tp_rank),
        "_PP": Group(pp_size, pp_rank),
        "_DP": Group(dp_size, 0),
        "_EP": Group(dp_size * tp_size, tp_rank),
        "_EPLB": Group(dp_size * tp_size, tp_rank),
        "_DCP": Group(dcp_size, tp_rank % dcp_size),
        "_PCP": Group(1, 0),
    }
    for name, group in groups.items():
        setattr(parallel_state, name, group)
    torch.distributed.get_rank = lambda group: group.rank()
    parallel_state._NODE_COUNT = 1
    everyone = Group(dp_size * tp_size, tp_rank)
    for name in ("_MC2", "_MLP_TP", "_OTP", "_LMTP", "_EMBED_TP", "_P_TP", "_DYNAMIC_EPLB"):
        setattr(ascend_parallel_state, name, everyone)
