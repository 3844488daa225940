"""Descriptor arrays: which bytes go where, as three equally long int64 arrays."""

from dataclasses import dataclass, fields
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

Int64Array = npt.NDArray[np.int64]
_Data = TypeVar("_Data")


class OwnArrays:
    """A base of data classes whose arrays are their own after unpickling.

    Others may be views of memory that lent them: Ray's channels have room for ten steps, and wait until nothing refers
    to the oldest.
    """

    __slots__ = ()

    def __reduce__(self) -> tuple[Any, ...]:
        return _with_own_arrays, (type(self), *(getattr(self, each.name) for each in fields(self)))  # type: ignore[arg-type]


def _with_own_arrays(kind: type[_Data], *values: Any) -> _Data:
    return kind(*(value.copy() if isinstance(value, np.ndarray) else value for value in values))


@dataclass(frozen=True, slots=True)
class Copies:
    """Descriptors of a batch of copies: ``sizes[i]`` bytes from ``sources[i]`` to ``destinations[i]``.

    Arrays of shape [n], int64. Addresses are absolute, each in its own process. The order has no meaning: engines may
    run the copies in any order or at once.
    """

    destinations: Int64Array
    sources: Int64Array
    sizes: Int64Array

    def __post_init__(self) -> None:
        if not self.destinations.shape == self.sources.shape == self.sizes.shape:
            raise ValueError(
                f"descriptor arrays differ in length: {self.destinations.shape}, {self.sources.shape}, "
                f"{self.sizes.shape}"
            )

    def __len__(self) -> int:
        return len(self.sizes)

    def __getitem__(self, which: slice | Int64Array | npt.NDArray[np.bool_]) -> "Copies":
        return Copies(self.destinations[which], self.sources[which], self.sizes[which])

    @property
    def columns(self) -> tuple[Int64Array, Int64Array, Int64Array]:
        """Destinations, sources and sizes, as compiled loops and C take them."""
        return self.destinations, self.sources, self.sizes

    def contiguous(self) -> "Copies":
        """Return the same in arrays that lie dense in memory, which C and compiled loops need."""
        return Copies(*(np.ascontiguousarray(column, np.int64) for column in self.columns))

    @property
    def total_bytes(self) -> int:
        """Total bytes of all descriptors."""
        return int(self.sizes.sum())

    def check_sizes(self) -> None:
        """Raise ValueError if a size is negative."""
        if len(self) and self.sizes[index := int(self.sizes.argmin())] < 0:
            raise ValueError(f"copy {index} of {len(self)} has a negative size: {int(self.sizes[index])} bytes")


EMPTY = Copies(np.empty(0, np.int64), np.empty(0, np.int64), np.empty(0, np.int64))


def concatenate(parts: list[Copies]) -> Copies:
    """Return one batch with the descriptors of all ``parts``, in order."""
    if not parts:
        return EMPTY
    return Copies(
        np.concatenate([part.destinations for part in parts]),
        np.concatenate([part.sources for part in parts]),
        np.concatenate([part.sizes for part in parts]),
    )


def merge_adjacent(
    local: Int64Array, remote: Int64Array, sizes: Int64Array
) -> tuple[Int64Array, Int64Array, Int64Array]:
    """Sort runs by local address, join those that are neighbours on both sides, and return the three arrays."""
    order = np.argsort(local, kind="stable")
    local, remote, sizes = local[order], remote[order], sizes[order]
    starts = np.concatenate(([0], np.flatnonzero(apart(local, remote, sizes)) + 1))
    return local[starts], remote[starts], np.add.reduceat(sizes, starts)


def apart(local: Int64Array, remote: Int64Array, sizes: Int64Array) -> npt.NDArray[np.bool_]:
    """Return for each run but the first whether it does not continue its predecessor on both sides. Shape [n - 1]."""
    continues = (local[:-1] + sizes[:-1] == local[1:]) & (remote[:-1] + sizes[:-1] == remote[1:])
    return np.asarray(~continues, np.bool_)
