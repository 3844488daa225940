"""The memory behind some tensors of one device, by address."""

from collections.abc import Iterable, Sequence

import numpy as np
import torch

from layout.copies import Copies
from layout.regions import RegionTable
from transfer.copies.reshape.device_views import Storage


class StorageTable:
    """Keeps the storages of tensors alive, and finds memory in them. A tensor stands for its whole storage."""

    def __init__(self, sides: Sequence[Iterable[torch.Tensor]]) -> None:
        """Take tensors of any shape and dtype, in groups that ``Storage`` tells apart.

        Raises:
            ValueError: they are on several devices or there are none, storages overlap partly, or one has a private
                format of its device.
        """
        self.storages = _storages(sides)
        devices = {storage.memory.device for storage in self.storages}
        if len(devices) != 1:
            raise ValueError(f"tensors must be on one device, not on {sorted(map(str, devices)) or 'none'}")
        self.device: torch.device = devices.pop()
        self.table = RegionTable([storage.region for storage in self.storages])

    def checked(self, copies: Copies) -> Copies:
        """Return the runs that are not empty; raise unless all lie in the storages."""
        copies.check_sizes()
        copies = copies[copies.sizes > 0]
        for what, addresses in (("destination", copies.destinations), ("source", copies.sources)):
            outside = self.table.outside(addresses, copies.sizes)
            if outside.any():
                index = int(outside.argmax())
                raise ValueError(
                    f"the {what} of non-empty copy {index} of {len(copies)}, {int(copies.sizes[index])} bytes at "
                    f"{int(addresses[index]):#x}, does not lie in one of the {len(self.storages)} storages"
                )
        return copies

    def bytes_at(self, address: int, size: int) -> torch.Tensor:
        """Return memory that lies in one storage. Shape [bytes], uint8."""
        storage = int(np.searchsorted(self.table.starts, address, side="right")) - 1
        first = address - int(self.table.starts[storage])
        return self.storages[storage].memory[first : first + size]


def _storages(sides: Sequence[Iterable[torch.Tensor]]) -> list[Storage]:
    """Return each storage as bytes, by address, leaving out storages that lie inside another."""
    storages = [Storage(_all_bytes(tensor), side) for side, tensors in enumerate(sides) for tensor in tensors]
    storages.sort(key=lambda storage: (storage.region.address, -storage.region.size))
    outermost: list[Storage] = []
    end = 0  # of the memory seen so far
    for storage in storages:
        if storage.region.size and storage.region.end > end:
            outermost.append(storage)
            end = storage.region.end
    return outermost


def _all_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return the whole storage of a tensor as bytes. Shape [bytes], uint8."""
    storage = tensor.untyped_storage()
    # By views, which leave the device library's metadata of the storage alone (set_ would not).
    memory = tensor.as_strided((storage.nbytes() // tensor.element_size(),), (1,), 0).view(torch.uint8)
    if memory.data_ptr() != storage.data_ptr():
        raise ValueError(
            f"a tensor of shape {tuple(tensor.shape)} on {tensor.device} has a private format of its device, which "
            "cannot be viewed as bytes"
        )
    return memory
