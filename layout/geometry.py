"""A worker's paged KV cache as data: strided planes over (layer, block, head, token, content).

Some caches hold no tokens but states: what a recurrent layer (Mamba, gated delta net, short convolution) knows after
some number of tokens. A block holds one, and the token axis has the rows of a state. Others are compressed: a row of
the token axis stands for several tokens.

Whatever differs between engines (tensor parallelism, physical layout, K and V fused or apart) is a value in these
classes, so planning never branches on the name of a layout. Offsets, strides and sizes are in bytes unless a name says
otherwise. This module reads no tensor and no memory.
"""

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from math import gcd, lcm

from layout.context_parallel import WHOLE, TokenSplit
from layout.layer_numbers import LayerNumbers

#: Pulls of a compressed cache begin at multiples of so many tokens, or of its blocks if these are smaller.
_COMPRESSED_UNIT_TOKENS = 512


@dataclass(frozen=True, slots=True)
class Region:
    """A contiguous range of memory that is registered with the transfer engine."""

    address: int  # first byte, in the address space of the owning process
    size: int  # bytes

    @property
    def end(self) -> int:
        """One past the last byte."""
        return self.address + self.size


@dataclass(frozen=True, slots=True)
class Plane:
    """One strided array over (layer, block, head, token, content) of a worker's cache.

    The item (l, b, h, t, c) starts at ``address + l*layer_stride + b*block_stride + h*head_stride + t*token_stride +
    c*content_stride``, where l counts ``layers``, h counts from ``head_start``, t counts rows of ``tokens_per_row``
    tokens, and c counts items of ``item_size`` bytes.

    A plane whose ``packing`` is not empty is opaque inside one (layer, block, head): the kernel that writes it orders
    tokens and content in its own way. Its token and content strides describe one dense run (``content_stride ==
    item_size``, ``token_stride == content * item_size``) that can be moved whole but never cut by token, and only to a
    plane of the same packing.
    """

    part: str  # which logical tensor: "kv" if fused, "k", "v", or a name such as "mla_rope"
    layers: tuple[str, ...]  # layer names, in the order of the layer axis
    head_start: int  # first global KV head held
    heads: int  # KV heads held
    block_tokens: int  # rows held in a block: tokens; of a state, the last inputs of a convolution, or 1
    content: int  # items of one (head, token)
    item_size: int  # bytes of one item
    blocks: int  # blocks held
    address: int  # of (0, 0, 0, 0, 0)
    layer_stride: int
    block_stride: int
    head_stride: int
    token_stride: int
    content_stride: int
    packing: str = ""
    total_heads: int = 0  # KV heads of these layers over all ranks; 0 if unknown
    optional: bool = False  # layers that the remote engine may be without, as those that only draft tokens
    dtype: str = ""  # of an item of a state, by torch's name; empty if the engine's settings tell
    tokens_per_row: int = 1  # that a row of a compressed cache stands for
    tokens: TokenSplit = WHOLE  # which tokens of a request are held, if ranks share them

    @property
    def head_end(self) -> int:
        """One past the last global KV head held."""
        return self.head_start + self.heads

    @property
    def block_bytes(self) -> int:
        """Bytes of one block over all layers and heads of this plane, without gaps."""
        return len(self.layers) * self.heads * self.block_tokens * self.content * self.item_size


@dataclass(frozen=True, slots=True)
class CacheGroup:
    """The layers that share one block table, and the planes that hold them.

    ``window`` and ``chunk`` say what the cache manager keeps of a request: the tokens of a sliding window, or of the
    last chunk. Both are 0 if it keeps all. What attention sees is the layer's, and may be less.

    If the group holds ``states``, entry i of a block table has the state after ``(i + 1) * block_tokens`` tokens, or
    after all tokens if these are fewer. What drafts need lies in entries behind that one.

    Where ranks share the tokens of a request (context parallelism), a block of the block table has ``block_tokens`` on
    all of them together. A plane in the same group that every rank holds whole has all of these.
    """

    block_tokens: int
    window: int
    planes: tuple[Plane, ...]
    chunk: int = 0
    #: By layer, as far as known: the tokens that attention sees, the token itself included; 0: all.
    seen_tokens: dict[str, int] = field(default_factory=dict)
    states: bool = False

    def rows(self, plane: Plane) -> int:
        """Return how many rows of a plane a block of the block table has."""
        if self.states:
            return plane.block_tokens
        return self.block_tokens // (plane.tokens_per_row * plane.tokens.ranks)

    @property
    def unit_tokens(self) -> int:
        """Tokens at whose multiples a pull of the group between equal block sizes may begin."""
        if any(plane.tokens_per_row == 1 or plane.packing for plane in self.planes):
            return self.block_tokens
        return lcm(
            *(unit_rows(plane.block_tokens, plane.tokens_per_row) * plane.tokens_per_row for plane in self.planes)
        )

    @property
    def layers(self) -> frozenset[str]:
        """Names of the group's layers that this worker holds."""
        return frozenset(name for plane in self.planes for name in plane.layers)


@dataclass(frozen=True, slots=True)
class Identity:
    """A random number that one life of a transfer engine keeps in registered memory, by which readers know it again."""

    address: int  # of the number, in the address space of the owning process
    nonce: bytes  # the number


@dataclass(frozen=True, slots=True)
class WorkerGeometry:
    """What one worker (one TP rank of one PP stage) holds, and the address of its transfer engine."""

    tp_rank: int
    tp_size: int
    pp_rank: int
    pp_size: int
    engine_address: str  # of the transfer engine, e.g. "10.0.0.5:15342"
    groups: tuple[CacheGroup, ...]
    regions: tuple[Region, ...]  # all memory that peers may read
    transport: str = ""  # of the transfer engine, e.g. "rdma"; empty if unknown
    identity: Identity | None = None  # of its transfer engine; None as long as it has not started
    pcp_rank: int = 0  # among the workers that share a prompt's computation
    pcp_size: int = 1
    #: Of its engine for processes of the same host; empty if it has none. Whoever has it may read and write the memory.
    same_host_address: str = field(default="", repr=False)

    @property
    def block_bytes(self) -> int:
        """Total bytes of one block of every group, over the layers and heads held here."""
        return sum(plane.block_bytes for group in self.groups for plane in group.planes)


def unit_rows(rows: int, tokens_per_row: int) -> int:
    """Return into how many rows a pull may cut ``rows`` that no border of blocks cuts, if they are not opaque.

    Blocks of a compressed cache have so many tokens that pulls may begin inside.
    """
    return rows if tokens_per_row == 1 else gcd(rows, max(1, _COMPRESSED_UNIT_TOKENS // tokens_per_row))


def over_layers(parts: Iterable[tuple[Hashable, Plane]]) -> tuple[Plane, ...]:
    """Return planes of one layer each, given with their kinds, as the fewest planes.

    Those of one kind and form are joined into the longest runs whose addresses are one stride apart, by address.
    """
    forms: dict[tuple[Hashable, Plane], list[Plane]] = {}
    for kind, plane in parts:
        forms.setdefault((kind, replace(plane, layers=(), address=0)), []).append(plane)
    runs: list[list[Plane]] = []
    for alike in forms.values():
        alike.sort(key=lambda plane: plane.address)
        runs.append(alike[:1])
        for previous, plane in pairwise(alike):
            run = runs[-1]
            if len(run) > 1 and plane.address - previous.address != run[1].address - run[0].address:
                runs.append([plane])
            else:
                run.append(plane)
    return tuple(_joined(run) for run in runs)


def _joined(run: Sequence[Plane]) -> Plane:
    stride = run[1].address - run[0].address if len(run) > 1 else 0
    return replace(run[0], layers=tuple(name for plane in run for name in plane.layers), layer_stride=stride)


def layers_by_group(workers: Sequence[WorkerGeometry]) -> tuple[frozenset[str], ...]:
    """Return the names of each cache group's layers, over all of an engine's workers."""
    groups = zip(*(worker.groups for worker in workers), strict=True)
    return tuple(frozenset[str]().union(*(group.layers for group in same)) for same in groups)


@dataclass(frozen=True, slots=True)
class ModelIdentity:
    """What must be equal on both engines for KV blocks of one to be valid on the other."""

    architecture: str  # e.g. "LlamaForCausalLM"
    config_digest: str  # of the model configuration, without names and paths
    weights_digest: str  # of some bytes of every tensor; empty if they could not be read
    layers: int  # attention layers of the whole model
    kv_heads: int
    head_size: int  # items
    model_dtype: str
    cache_dtype: str
    numbers: tuple[LayerNumbers, ...] = ()  # read off the loaded model; of the worker's own layers on a worker
    draft_digest: str = ""  # of the weights that draft, if they have files of their own. The draft may be another one

    def with_other_weights(self) -> "ModelIdentity":
        """Return what is known of the model when its weights are no longer those of files: scales come with weights."""
        # Not "attention temperature attn_scale", for example, which is the configuration's.
        kept = tuple(each for each in self.numbers if " " in each.name or not each.name.endswith("_scale"))
        return replace(self, weights_digest="", numbers=kept)
