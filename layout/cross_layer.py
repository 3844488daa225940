"""Buffers that keep all layers of a block together, for engines that let the connector allocate their caches.

Only sizes, offsets and strides: the caller allocates the memory and makes the views with its own tensor library. Each
part of a cache (K, V, one of MLA's two, a scale) has its own buffer, because parts differ in heads, content and item
size:

    shape = cross_layer_shapes(parts, layers, blocks, block_tokens)[0]
    raw = empty(shape.allocation_bytes, dtype=uint8)
    buffer = shape.at(address of raw)
    view = buffer.layer_view(name)
    cache = as_strided(raw.view(dtype), view.shape, view.strides, view.offset)

``pd_connector.vllm.cross_layer_tensors`` does this with torch. An attention kernel sees the view of one layer, whose
blocks are far apart: give a view only to a backend that is known to honour its strides.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from layout.geometry import Plane, Region

ALIGNMENT = 2 * 1024 * 1024  # bytes; Ascend's transfer engine registers memory in units of this size
AXES = "LBHNC"  # layer, block, head, token, content
LAYER_AXES = "BNHC"  # of one layer's view: [blocks, tokens, heads, content]


class CrossLayerError(ValueError):
    """The requested buffer layout is impossible; the message names the value and the rule."""


@dataclass(frozen=True, slots=True)
class CachePart:
    """One logical tensor of every layer's cache, as one worker holds it."""

    name: str  # as in ``Plane.part``: "k", "v", "mla_rope"
    head_start: int  # first global KV head held
    heads: int  # KV heads held
    content: int  # items of one (head, token)
    item_size: int  # bytes of one item

    def check_item_size(self, item_size: int, of: str) -> None:
        """Raise unless ``item_size``, the item size in bytes of ``of``, is this part's.

        Raises:
            CrossLayerError: names both.
        """
        if item_size != self.item_size:
            raise CrossLayerError(f"part {self.name!r} has items of {self.item_size} bytes; {of} has {item_size}")


@dataclass(frozen=True, slots=True)
class LayerView:
    """One layer of a buffer, as arguments of ``as_strided``. All numbers count items, not bytes."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int  # of the first item, from the start of the allocation


@dataclass(frozen=True, slots=True)
class CrossLayerShape:
    """The shape of one part's buffer, independent of its address. Made by ``cross_layer_shapes``."""

    part: CachePart
    layers: tuple[str, ...]
    blocks: int
    block_tokens: int
    order: str  # the axes, outermost first

    @property
    def sizes(self) -> dict[str, int]:
        """Length of each axis."""
        counts = (len(self.layers), self.blocks, self.part.heads, self.block_tokens, self.part.content)
        return dict(zip(AXES, counts, strict=True))

    @property
    def strides(self) -> dict[str, int]:
        """Items between neighbours on each axis, by axis name. An axis of length 1 has a stride, too."""
        sizes, strides, step = self.sizes, {}, 1
        for axis in reversed(self.order):
            strides[axis] = step
            step *= sizes[axis]
        return strides

    @property
    def size(self) -> int:
        """Bytes of all items."""
        sizes = self.sizes
        return sizes[self.order[0]] * self.strides[self.order[0]] * self.part.item_size

    @property
    def allocation_bytes(self) -> int:
        """Bytes to allocate so that ``registered_bytes`` remain from the first aligned address on."""
        return self.registered_bytes + ALIGNMENT

    @property
    def registered_bytes(self) -> int:
        """Bytes of the whole aligned units that hold the items."""
        return -(-self.size // ALIGNMENT) * ALIGNMENT

    def at(self, base_address: int) -> "CrossLayerBuffer":
        """Return the buffer inside an allocation of ``allocation_bytes`` that starts at ``base_address``.

        Raises:
            CrossLayerError: ``base_address`` is negative or not a multiple of the item size.
        """
        if base_address < 0 or base_address % self.part.item_size:
            raise CrossLayerError(
                f"part {self.part.name!r}: base address {base_address:#x} must be a multiple of the item size "
                f"{self.part.item_size} and not negative"
            )
        return CrossLayerBuffer(self, base_address)


@dataclass(frozen=True, slots=True)
class CrossLayerBuffer:
    """One part's buffer in memory. Made by ``CrossLayerShape.at``."""

    shape: CrossLayerShape
    base_address: int  # of the allocation

    @property
    def aligned_offset(self) -> int:
        """Bytes from the start of the allocation to the first item."""
        return -self.base_address % ALIGNMENT

    @property
    def region(self) -> Region:
        """The memory to register: the whole aligned units that hold the items."""
        return Region(self.base_address + self.aligned_offset, self.shape.registered_bytes)

    @property
    def plane(self) -> Plane:
        """The buffer as planning sees it."""
        shape, part = self.shape, self.shape.part
        strides = {axis: step * part.item_size for axis, step in shape.strides.items()}
        return Plane(
            part=part.name,
            layers=shape.layers,
            head_start=part.head_start,
            heads=part.heads,
            block_tokens=shape.block_tokens,
            content=part.content,
            item_size=part.item_size,
            blocks=shape.blocks,
            address=self.base_address + self.aligned_offset,
            layer_stride=strides["L"],
            block_stride=strides["B"],
            head_stride=strides["H"],
            token_stride=strides["N"],
            content_stride=strides["C"],
        )

    def layer_view(self, layer: str, axes: str = LAYER_AXES) -> LayerView:
        """Return the view of one layer's cache, its axes in the order of ``axes``.

        Raises:
            CrossLayerError: the buffer has no such layer, or ``axes`` is not a permutation of a layer's axes.
        """
        _check_axes(axes, LAYER_AXES, "a layer's view")
        shape = self.shape
        if layer not in shape.layers:
            raise CrossLayerError(
                f"part {shape.part.name!r} holds no layer {layer!r}; it holds {len(shape.layers)} layers, from "
                f"{shape.layers[0]!r} to {shape.layers[-1]!r}"
            )
        sizes, strides = shape.sizes, shape.strides
        return LayerView(
            tuple(sizes[axis] for axis in axes),
            tuple(strides[axis] for axis in axes),
            self.aligned_offset // shape.part.item_size + shape.layers.index(layer) * strides["L"],
        )


def cross_layer_shapes(
    parts: Sequence[CachePart], layers: Sequence[str], blocks: int, block_tokens: int, order: str = "BLHNC"
) -> tuple[CrossLayerShape, ...]:
    """Return the shape of each part's buffer, in the order of ``parts``.

    Args:
        parts: the parts of every layer's cache; each may have its own heads, content and item size.
        layers: layer names, in the order of the layer axis.
        blocks: number of kernel blocks.
        block_tokens: tokens in a kernel block.
        order: the axes layer, block, head, token, content as letters of "LBHNC", outermost first. "BHLNC" and
            "BLHNC" keep each block of all layers together; so does "BLNHC", with the inner order of NHD kernels.

    Raises:
        CrossLayerError: a size is not positive, a name is repeated or missing, or ``order`` is not a permutation.
    """
    _check_axes(order, AXES, "a buffer")
    _check_names([part.name for part in parts], "parts")
    _check_names(layers, "layers")
    _check_positive("blocks", blocks)
    _check_positive("block_tokens", block_tokens)
    for part in parts:
        _check_part(part)
    return tuple(CrossLayerShape(part, tuple(layers), blocks, block_tokens, order) for part in parts)


def _check_axes(axes: str, allowed: str, of: str) -> None:
    if sorted(axes) != sorted(allowed):
        raise CrossLayerError(f"axis order {axes!r} of {of} must hold each letter of {allowed!r} exactly once")


def _check_names(names: Sequence[str], what: str) -> None:
    if not names:
        raise CrossLayerError(f"no {what} are given; a cross-layer cache needs at least one")
    name, count = Counter(names).most_common(1)[0]
    if count > 1:
        raise CrossLayerError(f"the names of {what} must differ: {name!r} is given {count} times")


def _check_positive(name: str, value: int) -> None:
    if value < 1:
        raise CrossLayerError(f"{name} is {value}; it must be at least 1")


def _check_part(part: CachePart) -> None:
    for name in ("heads", "content", "item_size"):
        _check_positive(f"{name} of part {part.name!r}", getattr(part, name))
    if part.head_start < 0:
        raise CrossLayerError(f"head_start of part {part.name!r} is {part.head_start}; it must not be negative")
    if ALIGNMENT % part.item_size:
        raise CrossLayerError(
            f"item_size of part {part.name!r} is {part.item_size} bytes; it must divide the alignment of {ALIGNMENT} "
            "bytes, so that the first item lies at a whole item offset"
        )
