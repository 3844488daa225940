"""Blocks as objects that any engine of a model can use: what a pool keeps, whoever wrote it.

An object holds one share of the heads of one block, of all layers in which heads are counted alike. Its bytes are in an
order of their own, which no tensor parallel size, layout or stride changes:

    share of heads:  (head, part, layer, row, content)

where parts and layers are in the order of their names, numbers in them by value. So a rank writes whole objects, and
reads whole objects. A pipeline stage has its own: they differ in their layers.

What must be equal to read an object is in its form: layers, rows, contents, packings. Two engines of which one divides
a block into other parts share nothing, and lose nothing by it.
"""

import hashlib
import math
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from layout.context_parallel import WHOLE
from layout.geometry import CacheGroup, Plane, WorkerGeometry

#: Shares of a block at most, because every object costs a fraction of a millisecond.
MOST_SHARES = 64
_DIGEST_BYTES = 8


class ObjectError(ValueError):
    """A worker's blocks cannot be kept as objects; the message names the layer and the rule."""


@dataclass(frozen=True, slots=True)
class ObjectPart:
    """Layers of one part with equal shapes, which lie together in an object."""

    offset: int  # bytes into the object
    head_bytes: int  # of one head, over all layers
    layers: int
    #: Planes that hold some of the layers, and where each layer stands among those of the part.
    planes: tuple[tuple[Plane, tuple[int, ...]], ...]


@dataclass(frozen=True, slots=True)
class ObjectForm:
    """The objects of a block of one cache group that hold the same layers. Made by ``object_forms``."""

    digest: str  # equal for equal objects, whatever the tensor parallel size
    parts: tuple[ObjectPart, ...]
    share_heads: int  # heads in an object
    first_share: int  # held by this rank
    shares: int  # held by this rank
    size: int  # bytes of an object
    holders: int  # ranks that hold the same
    holder: int  # this rank's number among them

    def key(self, namespace: str, share: int, block_hash: bytes) -> str:
        """Return the name of the object with the global number ``share`` of a block."""
        return f"{namespace}/{self.digest}/{share}/{block_hash.hex()}"

    @property
    def held(self) -> range:
        """The shares that this rank holds."""
        return range(self.first_share, self.first_share + self.shares)


def object_forms(geometry: WorkerGeometry) -> tuple[tuple[ObjectForm, ...], ...]:
    """Return the forms of the objects that a worker's block of each cache group consists of.

    ``geometry``: of memory whose blocks are not divided into kernel blocks, as ``slot_geometry`` makes it.

    Raises:
        ObjectError: ranks share tokens, a share of heads lies on two ranks, or it is not known how many heads there
            are.
    """
    return tuple(_forms(group, geometry) for group in geometry.groups)


def _forms(group: CacheGroup, geometry: WorkerGeometry) -> tuple[ObjectForm, ...]:
    # Drafts are apart, because an engine may do without.
    alike: dict[tuple[int, int, int, bool], list[Plane]] = defaultdict(list)
    for plane in group.planes:
        if plane.tokens != WHOLE:
            raise ObjectError(
                f"ranks share the tokens of layer {plane.layers[0]!r} (context parallelism): a pool takes whole blocks"
            )
        total = plane.total_heads or (plane.heads if geometry.tp_size == 1 else 0)
        if not total:
            raise ObjectError(f"it is not known how many heads layer {plane.layers[0]!r} has over all ranks")
        alike[total, plane.head_start, plane.heads, plane.optional].append(plane)
    return tuple(_form(group, planes, key[0], geometry) for key, planes in sorted(alike.items()))


def _form(group: CacheGroup, planes: Sequence[Plane], total: int, geometry: WorkerGeometry) -> ObjectForm:
    first = planes[0]
    shares = total if total <= MOST_SHARES else math.gcd(total, MOST_SHARES)
    heads = total // shares
    if first.head_start % heads or first.heads % heads:
        raise ObjectError(
            f"heads {first.head_start} to {first.head_end - 1} of {total} of layer {first.layers[0]!r} are no whole "
            f"shares of {heads}: a pool takes whole shares"
        )
    by_form: dict[tuple[str | int, ...], list[Plane]] = defaultdict(list)
    for plane in planes:
        by_form[_shape(plane, group)].append(plane)
    parts, offset, described = [], 0, []
    for shape, members in sorted(by_form.items(), key=lambda item: tuple(map(str, item[0]))):
        layers = sorted((layer for plane in members for layer in plane.layers), key=_natural)
        place: Mapping[str, int] = {layer: index for index, layer in enumerate(layers)}
        rows = group.rows(members[0]) * members[0].content * members[0].item_size
        placed = tuple((plane, tuple(place[layer] for layer in plane.layers)) for plane in members)
        parts.append(ObjectPart(offset, len(layers) * rows, len(layers), placed))
        offset += heads * len(layers) * rows
        described.append((shape, layers))
    said = repr((group.block_tokens, group.states, total, heads, described)).encode()
    digest = hashlib.blake2b(said, digest_size=_DIGEST_BYTES).hexdigest()
    copies = max(1, geometry.tp_size * first.heads // total)  # neighbouring tensor parallel ranks hold the same
    holder = geometry.pcp_rank * copies + geometry.tp_rank % copies
    return ObjectForm(
        digest, tuple(parts), heads, first.head_start // heads, first.heads // heads, offset,
        copies * geometry.pcp_size, holder,
    )  # fmt: skip


def _shape(plane: Plane, group: CacheGroup) -> tuple[str | int, ...]:
    """Return what must be equal for the bytes of a head and layer to mean the same."""
    rows = group.rows(plane)
    return plane.part, rows, plane.content, plane.item_size, plane.packing, plane.dtype, plane.tokens_per_row


def _natural(name: str) -> tuple[tuple[int, str], ...]:
    """Return a key by which names are in order, and numbers in them by value."""
    return tuple((int(piece), "") if piece.isdigit() else (-1, piece) for piece in re.split(r"(\d+)", name))
