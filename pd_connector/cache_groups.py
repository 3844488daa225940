"""What vLLM knows of a worker's KV caches beside their tensors.

Imports no vLLM, so that ``worker.caches`` needs none; ``vllm_compat`` reads these from vLLM's configuration.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from pd_connector.cpu_head_order import HeadOrder


@dataclass(frozen=True)
class Ranks:
    """Where a worker stands among the workers of its engine."""

    tp_rank: int
    tp_size: int
    pp_rank: int
    pp_size: int

    @property
    def index(self) -> int:
        """This worker's number, 0 <= index < world_size."""
        return self.pp_rank * self.tp_size + self.tp_rank

    @property
    def world_size(self) -> int:
        """All workers of the engine."""
        return self.tp_size * self.pp_size


@dataclass(frozen=True)
class GroupSpec:
    """One KV cache group as vLLM's cache manager sees it."""

    layer_names: tuple[str, ...]
    block_tokens: int
    window: int  # tokens; 0 for full attention
    #: By layer: name and items of each logical tensor that a token's content consists of, in order.
    parts: Mapping[str, tuple[tuple[str, int], ...]] = field(default_factory=dict)
    #: By layer: how the kernels order a head's block, where the strides of the tensors do not say it.
    orders: Mapping[str, HeadOrder] = field(default_factory=dict)
