"""Registered memory as a table, which tells for many runs at once whether they lie inside it. Pure arithmetic."""

import itertools
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from layout.copies import Int64Array
from layout.geometry import Region


class RegionTable:
    """Holds the regions of one process, to check many addresses against them at once. Immutable.

    Raises:
        ValueError: a region is empty, has no address, or overlaps another.
    """

    def __init__(self, regions: Sequence[Region]) -> None:
        self.regions = tuple(regions)  # in the order given
        ascending = sorted(regions, key=lambda region: region.address)
        for region in ascending:
            if region.size <= 0 or region.address <= 0:
                raise ValueError(f"{describe_region(region)} is empty or has no address")
        for before, after in itertools.pairwise(ascending):
            if before.end > after.address:
                raise ValueError(f"{describe_region(after)} overlaps {describe_region(before)}")
        self.starts = np.array([region.address for region in ascending], np.int64)  # ascending, as are the ends
        self.ends = np.array([region.end for region in ascending], np.int64)

    def outside(self, addresses: Int64Array, sizes: Int64Array) -> npt.NDArray[np.bool_]:
        """Return which runs do not lie within one region. ``sizes`` must be positive. Shape [n] in, [n] out."""
        if not self.regions:
            return np.ones(len(addresses), np.bool_)
        index = np.searchsorted(self.starts, addresses, side="right") - 1
        # address + size may overflow int64, so the size is compared with the bytes left in the region.
        return np.asarray((index < 0) | (sizes > self.ends[index] - addresses), np.bool_)


def describe_region(region: Region) -> str:
    """Return a description of ``region`` for error messages."""
    return f"region at {region.address:#x} of {region.size} bytes"
