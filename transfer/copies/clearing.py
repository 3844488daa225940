"""Sets rows of caches to zero."""

from collections.abc import Sequence

import torch

from layout.geometry import WorkerGeometry
from layout.plan import BlockTable
from layout.tails import Tail, tails
from transfer.copies.reshape.reshape_torch import SideStream
from transfer.copies.reshape.storages import StorageTable


class TailCleaner:
    """Clears the tails of requests in a worker's caches, on their device. Any thread."""

    def __init__(self, geometry: WorkerGeometry, tensors: Sequence[torch.Tensor]) -> None:
        """Take the caches, and the tensors that hold them, at least one.

        Raises:
            ValueError: as ``StorageTable``.
        """
        self._geometry = geometry
        self._storages = StorageTable([tensors])
        self._stream = SideStream(self._storages.device)

    def __call__(self, tables: Sequence[BlockTable], end_token: int) -> None:
        """Set the bytes of all ``tails`` to zero. When this returns, they are, also for other streams and engines."""
        with torch.inference_mode(), self._stream.running():
            for tail in tails(self._geometry, tables, end_token):
                for layer in range(len(tail.plane.layers)):
                    self._rows(tail, layer).zero_()

    def _rows(self, tail: Tail, layer: int) -> torch.Tensor:
        """Return the bytes of a layer's rows. Shape [heads, rows, content, bytes of an item], uint8."""
        plane, rows = tail.plane, tail.plane.block_tokens - tail.first_row
        address = (
            plane.address
            + layer * plane.layer_stride
            + tail.block * plane.block_stride
            + tail.first_row * plane.token_stride
        )
        shape = (plane.heads, rows, plane.content, plane.item_size)
        strides = (plane.head_stride, plane.token_stride, plane.content_stride, 1)
        size = 1 + sum((number - 1) * stride for number, stride in zip(shape, strides, strict=True))
        return self._storages.bytes_at(address, size).as_strided(shape, strides)
