"""Objects to and from a worker's host slots: bytes in the order of ``layout.block_objects``, sealed.

A sealed object begins with a header: ``SEAL``, which is the version, a random nonce, and an authentication code of the
bytes (GMAC). Its key is the object's own: a keyed BLAKE3 of the deployment's secret, the object's key and the nonce.
Without the secret nobody can make one that is accepted, under another key neither. So what a stranger wrote, what is
torn and what another version wrote is the same: no object.

All of it is in host memory. Copies and codes release the GIL. Of 192 KiB, GMAC takes half of the time of BLAKE3.
"""

import secrets
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from blake3 import blake3
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from layout.block_objects import ObjectForm
from layout.geometry import Plane, Region
from transfer.memory import bytes_of

Bytes = npt.NDArray[np.uint8]

#: How objects are sealed, in this version.
SEAL = b"pdobj\x00\x00\x02"
_NONCE_BYTES, _CODE_BYTES = 8, 16
HEADER_BYTES = len(SEAL) + _NONCE_BYTES + _CODE_BYTES
KEY_BYTES = 32
_NO_NONCE = bytes(12)


@dataclass(frozen=True, slots=True)
class _View:
    """A plane of the slots: shape [slots, heads, layers, rows, content, bytes of an item], uint8."""

    array: Bytes
    layers: slice | list[int]  # their places among those of the part


class SlotObjects:
    """Objects of one form, in a worker's slots. Any thread; slots and buffers are the caller's."""

    def __init__(self, form: ObjectForm, secret: bytes) -> None:
        """Take the form, whose planes are of the slots, and ``KEY_BYTES`` that only the deployment knows."""
        self.form = form
        self._secret = secret
        self._views = [[_view(plane, layers) for plane, layers in part.planes] for part in form.parts]

    @property
    def sealed_bytes(self) -> int:
        """Size of an object with its header."""
        return HEADER_BYTES + self.form.size

    def seal(self, slot: int, share: int, key: str, into: Bytes) -> None:
        """Write a share of the block in ``slot`` to ``into``, of ``sealed_bytes``, with its header."""
        for part, view in self._pieces(slot, share, into[HEADER_BYTES:]):
            part[...] = view
        nonce = secrets.token_bytes(_NONCE_BYTES)
        header = SEAL + nonce + self._code(key, nonce, into[HEADER_BYTES:])
        into[:HEADER_BYTES] = np.frombuffer(header, np.uint8)

    def is_sealed(self, key: str, sealed: Bytes) -> bool:
        """Return whether these bytes are the object of ``key``."""
        header = sealed[:HEADER_BYTES].tobytes()
        nonce, found = header[len(SEAL) : -_CODE_BYTES], header[-_CODE_BYTES:]
        wanted = self._code(key, nonce, sealed[HEADER_BYTES:])
        return header.startswith(SEAL) and secrets.compare_digest(found, wanted)

    def unpack(self, sealed: Bytes, slot: int, share: int) -> None:
        """Write an object to its share of the block in ``slot``."""
        for part, view in self._pieces(slot, share, sealed[HEADER_BYTES:]):
            view[...] = part

    def _pieces(self, slot: int, share: int, object_bytes: Bytes) -> Sequence[tuple[Bytes, Bytes]]:
        """Return pairs of an object's bytes and the slot's that belong together, alike in shape."""
        heads = self.form.share_heads
        first = (share - self.form.first_share) * heads
        pairs = []
        for part, views in zip(self.form.parts, self._views, strict=True):
            size = heads * part.head_bytes
            whole = object_bytes[part.offset : part.offset + size]
            for view in views:
                there = view.array[slot, first : first + heads]
                here = whole.reshape(heads, part.layers, *there.shape[2:])
                if isinstance(view.layers, slice):
                    pairs.append((here[:, view.layers], there))
                else:
                    pairs += [(here[:, place], there[:, number]) for number, place in enumerate(view.layers)]
        return pairs

    def _code(self, key: str, nonce: bytes, object_bytes: Bytes) -> bytes:
        # GMAC is broken where a key and its nonce serve twice. This key serves once, so that its nonce may be constant.
        used_once = blake3(key.encode() + b"\0" + nonce, key=self._secret).digest()
        return AESGCM(used_once).encrypt(_NO_NONCE, b"", object_bytes.data)


def _view(plane: Plane, layers: Sequence[int]) -> _View:
    shape = (plane.blocks, plane.heads, len(plane.layers), plane.block_tokens, plane.content, plane.item_size)
    strides = (
        plane.block_stride, plane.head_stride, plane.layer_stride, plane.token_stride, plane.content_stride, 1,
    )  # fmt: skip
    size = 1 + sum((number - 1) * stride for number, stride in zip(shape, strides, strict=True))
    array = np.lib.stride_tricks.as_strided(bytes_of(Region(plane.address, size)), shape, strides)
    first, count = layers[0], len(layers)
    in_a_row = list(layers) == list(range(first, first + count))
    return _View(array, slice(first, first + count) if in_a_row else list(layers))
