"""States of recurrent layers as vLLM lays them out, by global arrays: a second opinion on what lies where.

A state of a layer is, over all ranks, an array for each part: of a convolution [rows, heads, columns], of the
recurrence [heads, columns]. A rank's pages are put together from its heads as vLLM's layers do it. Nothing here knows
planes.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from vllm.model_executor.layers.mamba import mamba_utils
from vllm.model_executor.layers.mamba.mamba_utils import MambaStateShapeCalculator as Shapes
from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum as Kind
from vllm.v1.kv_cache_interface import MambaSpec

from layout.copies import Copies
from layout.geometry import WorkerGeometry
from pd_connector.vllm.cache_groups import Ranks
from pd_connector.worker.caches import describe_caches
from tests.support.connector.stated import model_config, stated_groups

StateBytes = npt.NDArray[np.uint8]
Pages: TypeAlias = torch.Tensor
Views = Callable[[Pages, Sequence[tuple[int, ...]], Sequence[torch.dtype], int], Sequence[torch.Tensor]]
STATE_BLOCKS = 6
KERNEL = 4  # inputs that a convolution sees, the present one included


@dataclass(frozen=True)
class StateModel:
    """A kind of recurrent layer: parts of the convolution (name, heads, columns of each), heads and recurrence."""

    kind: Kind
    conv: tuple[tuple[str, int, int], ...]
    heads: int = 0
    inner: tuple[int, ...] = ()  # of a head's recurrence
    drafts_in_rows: bool = True  # whether a convolution has rows for drafts
    layers: int = 2
    conv_dtype: torch.dtype = torch.bfloat16
    dtype: torch.dtype = torch.float32

    def shapes(self, tp: int, drafts: int) -> Any:
        """The shapes of a rank's state by vLLM's own functions: a tuple for each tensor."""
        sizes = {name: (heads, width) for name, heads, width in self.conv}
        match self.kind:
            case Kind.MAMBA2:
                inner = self.heads * self.inner[0]
                return Shapes.mamba2_state_shape(
                    tp, inner, sizes["b"][0], self.heads, *self.inner, conv_kernel=KERNEL, num_spec=drafts
                )
            case Kind.GDN_ATTN:
                keys, width = sizes["q"]
                return Shapes.gated_delta_net_state_shape(
                    tp, keys, self.heads, width, self.inner[0], KERNEL, num_spec=drafts
                )
            case Kind.MAMBA1:
                return Shapes.mamba1_state_shape(tp, self.heads, self.inner[0], KERNEL)
            case Kind.SHORT_CONV:
                return Shapes.short_conv_state_shape(tp, sizes["x"][0], KERNEL, num_spec=drafts)
        return Shapes.linear_attention_state_shape(self.heads, tp, self.inner[0])

    def state(self, seed: int) -> dict[str, StateBytes]:
        """A state of all ranks, the same for the same seed: bytes [layers, rows, heads, bytes of a head]."""
        noise = np.random.default_rng(seed)

        def of(rows: int, heads: int, columns: int, dtype: torch.dtype) -> StateBytes:
            return noise.integers(0, 256, (self.layers, rows, heads, columns * dtype.itemsize), np.uint8)

        parts = {name: of(KERNEL - 1, heads, width, self.conv_dtype) for name, heads, width in self.conv}
        return parts | ({"state": of(1, self.heads, int(np.prod(self.inner)), self.dtype)} if self.heads else {})


MAMBA2 = StateModel(Kind.MAMBA2, (("x", 24, 4), ("b", 1, 6), ("c", 1, 6)), 24, (4, 6))
GROUPED = StateModel(Kind.MAMBA2, (("x", 24, 4), ("b", 24, 6), ("c", 24, 6)), 24, (4, 6))
GDN = StateModel(Kind.GDN_ATTN, (("q", 24, 4), ("k", 24, 4), ("v", 48, 6)), 48, (6, 4))
KDA = StateModel(Kind.GDN_ATTN, (("q", 24, 4), ("k", 24, 4), ("v", 24, 4)), 24, (4, 4))
MAMBA1 = StateModel(Kind.MAMBA1, (("x", 48, 1),), 48, (5,), drafts_in_rows=False)
SHORT_CONV = StateModel(Kind.SHORT_CONV, (("x", 48, 1),))
LINEAR = StateModel(Kind.LINEAR, (), 24, (4, 4))
MODELS = {
    "Mamba2, one group": MAMBA2,
    "Mamba2, a group for each head": GROUPED,
    "GDN": GDN,
    "KDA": KDA,
    "Mamba1": MAMBA1,
    "short convolution": SHORT_CONV,
    "linear attention": LINEAR,
}


def state_views(
    pages: Pages, shapes: Sequence[tuple[int, ...]], dtypes: Sequence[torch.dtype], page_bytes: int
) -> tuple[torch.Tensor, ...]:
    """A tensor for each part of a state."""
    views, offset = [], 0
    for (_, *shape), dtype in zip(shapes, dtypes, strict=True):
        size = int(np.prod(shape)) * dtype.itemsize
        views.append(pages[:, offset : offset + size].view(dtype).unflatten(1, shape))
        offset += size
    return tuple(views)


@dataclass(frozen=True)
class StateLayout:
    """How an engine keeps states."""

    tp: int = 1
    is_column_first: bool = False
    drafts: int = 0
    block_tokens: int = 32
    padding: int = 0  # bytes behind each state
    blocks_outermost: bool = False  # all layers of a block together
    stages: tuple[int, ...] = ()  # layers of each pipeline stage; without: all layers are in one
    is_replicated: bool = False  # every rank has all heads
    #: Passes a tensor for each part, as vllm-ascend does: made of a layer's pages [blocks, bytes] and a page's bytes.
    views: Views | None = None


class StateRank:
    """A rank's memory: a cache group with the model's layers, those of its pipeline stage."""

    def __init__(self, model: StateModel, engine: StateLayout, rank: int, monkeypatch: Any, stage: int = 0) -> None:
        monkeypatch.setattr(mamba_utils, "is_conv_state_dim_first", lambda: engine.is_column_first)
        drafts = engine.drafts if model.drafts_in_rows else 0
        self.model, self.engine, self.rank = model, engine, rank
        stages = engine.stages or (model.layers,)
        self.layers = range(sum(stages[:stage]), sum(stages[: stage + 1]))
        self.shapes: tuple[tuple[int, ...], ...] = model.shapes(1 if engine.is_replicated else engine.tp, drafts)
        self.dtypes = ((model.conv_dtype,) if model.conv else ()) + ((model.dtype,) if model.heads else ())
        self._sizes = [
            int(np.prod(shape)) * dtype.itemsize for shape, dtype in zip(self.shapes, self.dtypes, strict=True)
        ]
        content = sum(self._sizes)
        self.page = -(-(content + engine.padding) // 16) * 16
        layers = len(self.layers)
        self.memory = np.random.default_rng(rank).integers(0, 256, (layers * STATE_BLOCKS * self.page,), np.uint8)
        self.writers = np.zeros(len(self.memory), np.int64)
        whole = torch.from_numpy(self.memory.view(np.int8))
        shape = (STATE_BLOCKS, layers, self.page) if engine.blocks_outermost else (layers, STATE_BLOCKS, self.page)
        pages = whole.view(shape).transpose(0, 1) if engine.blocks_outermost else whole.view(shape)
        spec = MambaSpec(
            block_size=engine.block_tokens, shapes=self.shapes, dtypes=self.dtypes, mamba_type=model.kind,
            page_size_padded=self.page, num_speculative_blocks=engine.drafts, tp_replicated=engine.is_replicated,
        )  # fmt: skip
        names = [f"model.layers.{number}.mixer" for number in self.layers]
        caches = {name: pages[number, :, None, None, :content] for number, name in enumerate(names)}
        config = model_config(engine.tp, text={"conv_kernel": KERNEL, "n_groups": dict_of(model).get("b", 1)})
        groups = stated_groups((names, spec), blocks=STATE_BLOCKS, config=config)
        given: Any = caches
        if (views := engine.views) is not None:
            of = [(STATE_BLOCKS, *shape) for shape in self.shapes]
            given = {
                name: views(pages[number], of, self.dtypes, int(pages.stride(1))) for number, name in enumerate(names)
            }
        self.geometry: WorkerGeometry = describe_caches(
            given, groups, Ranks(rank, engine.tp, stage, len(stages)), f"host:{stage}:{rank}"
        )
        self.base = int(whole.data_ptr())

    def bytes_of(self, block: int, state: dict[str, StateBytes]) -> tuple[npt.NDArray[np.int64], StateBytes]:
        """Where in the memory every byte of a state is, if it lies in ``block``, and the bytes."""
        model, places, values = self.model, [], []
        for number, layer in enumerate(self.layers):
            outer, inner = (block, number) if self.engine.blocks_outermost else (number, block)
            start = (outer * (len(self.layers) if self.engine.blocks_outermost else STATE_BLOCKS) + inner) * self.page
            if model.conv:
                places.append(start + self._conv_places())
                values.append(
                    np.concatenate([self._mine(state[name][layer]) for name, _, _ in model.conv], axis=1).ravel()
                )
                start += self._sizes[0]
            if model.heads:
                mine = self._mine(state["state"][layer]).ravel()
                places.append(start + np.arange(len(mine)))
                values.append(mine)
        return np.concatenate(places), np.concatenate(values)

    def _conv_places(self) -> npt.NDArray[np.int64]:
        """Byte numbers of the inputs in a convolution's tensor: rows, then columns."""
        item = self.dtypes[0].itemsize
        index = np.arange(self._sizes[0]).reshape(*self.shapes[0], item)
        rows = index.transpose(1, 0, 2) if self.engine.is_column_first else index
        return rows[: KERNEL - 1].ravel()

    def _mine(self, part: StateBytes) -> StateBytes:
        """This rank's heads of a part [rows, heads, bytes]: [rows, bytes]."""
        heads, tp = part.shape[1], self.engine.tp
        is_whole = heads == 1 or self.engine.is_replicated
        mine = part if is_whole else part[:, self.rank * (heads // tp) : (self.rank + 1) * (heads // tp)]
        return mine.reshape(len(part), -1)

    def fill(self, block: int, state: dict[str, StateBytes]) -> None:
        places, values = self.bytes_of(block, state)
        self.memory[places] = values

    def receive(self, copies: Copies, source: "StateRank") -> None:
        """Execute copies one by one."""
        for to, start, size in zip(copies.destinations, copies.sources, copies.sizes, strict=True):
            here, there = int(to) - self.base, int(start) - source.base
            assert 0 <= here <= len(self.memory) - size, "a descriptor writes beyond the cache"
            assert 0 <= there <= len(source.memory) - size, "a descriptor reads beyond the cache"
            self.memory[here : here + size] = source.memory[there : there + size]
            self.writers[here : here + size] += 1


def dict_of(model: StateModel) -> dict[str, int]:
    """Heads of each part of a convolution."""
    return {name: heads for name, heads, _ in model.conv}


def ranks(model: StateModel, engine: StateLayout, monkeypatch: Any) -> list[StateRank]:
    """All ranks of an engine, those of a pipeline stage one after the other."""
    stages = range(max(1, len(engine.stages)))
    return [StateRank(model, engine, rank, monkeypatch, stage) for stage in stages for rank in range(engine.tp)]


def fill(engine: Sequence[StateRank], blocks: dict[int, int], model: StateModel) -> None:
    """Put the state after each number of tokens into its block, on every rank."""
    for tokens, block in blocks.items():
        for rank in engine:
            rank.fill(block, model.state(tokens))
