"""NHD caches as vllm-ascend allocates them, in torch tensors, and a second opinion on what each byte of them must be.

The connector describes the tensors; what a pull must write is said here by indexing them, one block at a time.

    form          K and V of a layer
    paired        views of one allocation [blocks, K or V, tokens, heads, size], as vllm-ascend 0.30 allocates them
    apart         an allocation each, [blocks, tokens, heads, size], as vllm-ascend 0.23 does
    cross_layer   views [:, layer] of an allocation for all K and one for all V, [blocks, layers, tokens, heads, size]
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch

from layout.geometry import WorkerGeometry
from layout.sharding import held_heads
from pd_connector.vllm.cache_groups import GroupSpec, Ranks
from pd_connector.vllm.cache_specs import LayerSpec
from pd_connector.worker.caches import describe_caches

NHD_FORMS = ("paired", "apart", "cross_layer")
Allocate = Callable[[int], torch.Tensor]  # bytes -> tensor of so many bytes


@dataclass(frozen=True)
class NhdModel:
    """What both engines serve; sizes are items of K and of V for each (head, token)."""

    layers: int = 4
    kv_heads: int = 4
    sizes: tuple[int, int] = (64, 64)
    dtype: torch.dtype = torch.bfloat16


@dataclass(frozen=True)
class NhdEngine:
    """How one engine keeps the cache."""

    tp: int
    form: str = "paired"
    block_tokens: int = 128
    blocks: int = 16


def on_the_cpu(size: int) -> torch.Tensor:
    """An allocation of its own."""
    return torch.empty(size, dtype=torch.uint8)


@dataclass
class NhdRank:
    """One worker's caches. ``allocate`` makes each allocation."""

    model: NhdModel
    engine: NhdEngine
    rank: int = 0
    allocate: Allocate = on_the_cpu
    allocations: list[torch.Tensor] = field(default_factory=list, init=False)

    def __post_init__(self) -> None:
        """Allocate, and fill everything with 0xA5."""
        self.caches = self._views()
        for allocation in self.allocations:
            allocation.fill_(0xA5)

    @cached_property
    def heads(self) -> range:
        """The global numbers of the heads held."""
        return range(*held_heads(self.model.kv_heads, self.engine.tp, self.rank))

    def _views(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """K and V of each layer, [blocks, tokens, heads, size]."""
        model, engine = self.model, self.engine
        inner = [(engine.block_tokens, len(self.heads), size) for size in model.sizes]
        if engine.form == "paired":
            assert model.sizes[0] == model.sizes[1], "K and V of one page each"
            pairs = [self._allocated(engine.blocks, 2, *inner[0]) for _ in range(model.layers)]
            return [(pair[:, 0], pair[:, 1]) for pair in pairs]
        if engine.form == "apart":
            made = [[self._allocated(engine.blocks, *shape) for shape in inner] for _ in range(model.layers)]
            return [(keys, values) for keys, values in made]
        keys, values = (self._allocated(engine.blocks, model.layers, *shape) for shape in inner)
        return [(keys[:, layer], values[:, layer]) for layer in range(model.layers)]

    def _allocated(self, *shape: int) -> torch.Tensor:
        size = torch.Size(shape).numel() * self.model.dtype.itemsize
        self.allocations.append(self.allocate(size))
        return self.allocations[-1][:size].view(self.model.dtype).view(shape)

    @property
    def tensors(self) -> list[torch.Tensor]:
        return [tensor for pair in self.caches for tensor in pair]

    def geometry(self, engine_address: str = "") -> WorkerGeometry:
        """As the connector describes the caches."""
        model, engine = self.model, self.engine
        item = model.dtype.itemsize
        spec = LayerSpec(
            heads=len(self.heads),
            total_heads=model.kv_heads,
            token_bytes=sum(model.sizes) * item,
            page_bytes=sum(model.sizes) * item * engine.block_tokens * len(self.heads),
            dtype=model.dtype,
            parts=(("k", model.sizes[0]), ("v", model.sizes[1])),
        )
        names = tuple(f"model.layers.{layer}.attn" for layer in range(model.layers))
        group = GroupSpec(names, engine.block_tokens, 0, engine.blocks, dict.fromkeys(names, spec))
        caches = dict(zip(names, self.caches, strict=True))
        return describe_caches(caches, [group], Ranks(self.rank, engine.tp, 0, 1), engine_address)

    def expected(self, layer: int, part: int, tokens: Sequence[int]) -> torch.Tensor:
        """What the cache holds of some tokens of the prompt, as integers. Shape [tokens, heads, size]."""
        size, item = self.model.sizes[part], self.model.dtype.itemsize
        token = torch.tensor(tokens, dtype=torch.int64)[:, None, None]
        head = torch.tensor(list(self.heads), dtype=torch.int64)[:, None]
        number = (((layer * 2 + part) * 64 + head) * 65536 + token) * 4096 + torch.arange(size)
        mixed = (number + 1) * -7046029254386353131
        integers = {1: torch.int8, 2: torch.int16, 4: torch.int32}[item]
        return (mixed >> (64 - 8 * item)).to(integers)

    def fill(self, block_ids: Sequence[int]) -> None:
        """Write the prompt's tokens into blocks, from the first token on."""
        for token, block, place in self._places(block_ids, 0, len(block_ids) * self.engine.block_tokens):
            self._write(self.caches, token, block, place)

    def check(
        self,
        block_ids: Sequence[int],
        first_token: int,
        end_token: int,
        bytes_of: Callable[[torch.Tensor], torch.Tensor] = torch.Tensor.cpu,
    ) -> None:
        """Assert that all tokens of the range are there, and that no other byte has changed since it was allocated."""
        ours = [bytes_of(allocation) for allocation in self.allocations]  # first: what is late must not be in time
        expected = NhdRank(self.model, self.engine, self.rank)
        for token, block, place in self._places(block_ids, first_token, end_token):
            self._write(expected.caches, token, block, place)
        for number, (mine, right) in enumerate(zip(ours, expected.allocations, strict=True)):
            wrong = (mine[: right.numel()] != right).nonzero()
            assert not len(wrong), f"{len(wrong)} bytes of allocation {number} are wrong, the first: {int(wrong[0])}"

    def _places(self, block_ids: Sequence[int], first_token: int, end_token: int) -> list[tuple[range, int, slice]]:
        """The prompt's tokens in each block of a range: tokens, block, and where in it they are."""
        size, places = self.engine.block_tokens, []
        for number, block in enumerate(block_ids):
            tokens = range(max(first_token, number * size), min(end_token, (number + 1) * size))
            if tokens:
                places.append((tokens, block, slice(tokens.start - number * size, tokens.stop - number * size)))
        return places

    def _write(
        self, caches: Sequence[tuple[torch.Tensor, torch.Tensor]], tokens: range, block: int, place: slice
    ) -> None:
        for layer, pair in enumerate(caches):
            for part, cache in enumerate(pair):
                values = self.expected(layer, part, tokens).view(cache.dtype)
                cache[block, place].copy_(values)
