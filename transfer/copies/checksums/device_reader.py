"""Copies cache blocks from memory that only a device can read to the host, for checksums.

Tested with CPU tensors, and under vllm-ascend on a simulated NPU; not run on hardware.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from layout.copies import Copies, Int64Array
from layout.geometry import Plane
from transfer.copies.checksums.block_checksums import ReadableBlocks
from transfer.copies.reshape.reshape_torch import SideStream, TensorCopier


class DeviceReader:
    """A ``BlockReader`` for device memory. While it copies, it needs device memory for the blocks of one call."""

    def __init__(self, caches: Sequence[torch.Tensor]) -> None:
        """Read from ``caches``, which hold all planes that will be read, on one device."""
        self._caches = tuple(caches)
        self._stream = SideStream(self._caches[0].device)

    def __call__(self, plane: Plane, blocks: Int64Array) -> ReadableBlocks:
        """Return a copy of the blocks: head by head, or whole if a token's heads lie closer together than tokens.

        Raises:
            ValueError: as in ``TensorCopier``.
        """
        together = plane.heads > 1 and plane.block_tokens > 1 and plane.head_stride < plane.token_stride
        runs, inside = (1, plane.heads) if together else (plane.heads, 1)
        size = plane.item_size + sum(
            (count - 1) * stride
            for count, stride in (
                (plane.block_tokens, plane.token_stride),
                (plane.content, plane.content_stride),
                (inside, plane.head_stride),
            )
        )
        host = self._gather(_starts(plane, blocks, runs), size)
        copied = replace(
            plane,
            blocks=len(blocks),
            address=host.data_ptr(),
            layer_stride=len(blocks) * runs * size,
            block_stride=runs * size,
            head_stride=plane.head_stride if together else size,
        )
        return ReadableBlocks(copied, np.arange(len(blocks), dtype=np.int64), host)

    def _gather(self, starts: Int64Array, size: int) -> torch.Tensor:
        """Return ``size`` bytes from each address, one after the other, in host memory."""
        # Not of the memory that torch has for the model's stream: kernels that are queued there may yet use it, though
        # its tensors are gone. What this stream had it for before is done when the block is left.
        with self._stream.running():
            buffer = torch.empty(len(starts) * size, dtype=torch.uint8, device=self._caches[0].device)
            to = np.arange(len(starts), dtype=np.int64) * size + buffer.data_ptr()
            copy = TensorCopier([*self._caches, buffer], stream=self._stream)
            copy(Copies(to, starts, np.full(len(starts), size, np.int64)))
            return buffer.cpu()


def _starts(plane: Plane, blocks: Int64Array, heads: int) -> Int64Array:
    """Return the addresses of the first ``heads`` heads of each block in each layer, by layer, block and head."""
    places = plane.address + np.arange(len(plane.layers), dtype=np.int64) * plane.layer_stride
    places = np.add.outer(places, blocks * plane.block_stride)
    return np.add.outer(places, np.arange(heads, dtype=np.int64) * plane.head_stride).ravel()
