"""Runs of bytes as rows of one width in numbered views, for operators that move rows. Pure arithmetic.

Rows of a view begin at offsets that are its *phase* modulo the width. ``reshape_torch`` moves them.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from layout.copies import Copies, Int64Array

Flags = npt.NDArray[np.bool_]

#: Rows may be this much narrower than most runs would allow, if all runs can then be moved together.
_NARROWER = 8


@dataclass(frozen=True, slots=True)
class Places:
    """One end of some runs: offsets in views. Arrays of shape [n]."""

    view: Int64Array
    offset: Int64Array

    def take(self, which: Flags | Int64Array) -> "Places":
        """Return the places of some of the runs."""
        return Places(self.view[which], self.offset[which])


@dataclass(frozen=True, slots=True)
class Runs:
    """Runs from ``origin`` to ``target`` of ``sizes`` bytes, shape [n]."""

    target: Places
    origin: Places
    sizes: Int64Array

    def __len__(self) -> int:
        return len(self.sizes)

    def take(self, which: Flags | Int64Array) -> "Runs":
        """Return some of the runs."""
        return Runs(self.target.take(which), self.origin.take(which), self.sizes[which])

    @classmethod
    def of(cls, copies: Copies, view_starts: Int64Array) -> "Runs":
        """Return ``copies`` as offsets in the views in which they start, by the ascending addresses of the views."""

        def places(addresses: Int64Array) -> Places:
            view = np.searchsorted(view_starts, addresses, side="right") - 1
            return Places(view, addresses - view_starts[view])

        return cls(places(copies.destinations), places(copies.sources), copies.sizes)


@dataclass(frozen=True, slots=True)
class RowNumbers:
    """One end of some rows: row numbers in views, shape [n], and the phase of each view, shape [views]."""

    view: Int64Array
    row: Int64Array
    phases: Int64Array


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows of ``width`` bytes from ``origin`` to ``target``. Those between the same two views follow each other."""

    width: int
    target: RowNumbers
    origin: RowNumbers

    def __len__(self) -> int:
        return len(self.target.row)

    def parts(self, most: int) -> Iterator["Rows"]:
        """Yield the rows in parts of at most ``most``."""
        for first in range(0, len(self), most):
            part = slice(first, first + most)
            yield Rows(
                self.width,
                *(RowNumbers(end.view[part], end.row[part], end.phases) for end in (self.target, self.origin)),
            )


def widest_rows(runs: Runs, views: int) -> tuple[Rows, Flags]:
    """Return rows that make up at least half of the bytes of ``runs``, and which runs these are.

    All runs, if rows that fit all of them are not much narrower than those that fit most. ``views`` is the number of
    views.
    """
    width = _heaviest(runs.sizes, runs.sizes)
    phases = tuple(_phases(end, width, runs.sizes, views) for end in (runs.target, runs.origin))
    fit = runs.sizes % width == 0
    for end, phase in zip((runs.target, runs.origin), phases, strict=True):
        fit &= end.offset % width == phase[end.view]
    if fit.all():
        return _rows(runs, width, *phases), fit
    apart = [end.offset - phase[end.view] for end, phase in zip((runs.target, runs.origin), phases, strict=True)]
    narrow = int(np.gcd.reduce(np.concatenate((runs.sizes, *apart))))
    if narrow * _NARROWER < width and 2 * int(runs.sizes[fit].sum()) >= int(runs.sizes.sum()):
        return _rows(runs.take(fit), width, *phases), fit
    return _rows(runs, narrow, *(phase % narrow for phase in phases)), np.ones(len(runs), np.bool_)


def stretches(values: Int64Array) -> list[tuple[int, int]]:
    """Return where equal values follow each other: begin and end (exclusive) of each stretch."""
    borders = (np.flatnonzero(np.diff(values)) + 1).tolist()
    return list(zip([0, *borders], [*borders, len(values)], strict=True))


def follow_each_other(rows: Int64Array) -> bool:
    """Return whether each row number is the one before and one."""
    return int(rows[-1] - rows[0]) == len(rows) - 1 and bool((np.diff(rows) == 1).all())


def _phases(end: Places, width: int, weights: Int64Array, views: int) -> Int64Array:
    """Return for each view the offset modulo ``width`` at which most bytes begin. Shape [views]."""
    inside = end.offset % width
    phases = np.zeros(views, np.int64)
    phases[end.view] = inside
    if (phases[end.view] == inside).all():
        return phases
    kinds, kind = np.unique(end.view * width + inside, return_inverse=True)
    ascending = np.argsort(np.bincount(kind, weights=weights), kind="stable")
    phases[kinds[ascending] // width] = kinds[ascending] % width  # of what is assigned twice, the last remains
    return phases


def _rows(runs: Runs, width: int, to_phases: Int64Array, from_phases: Int64Array) -> Rows:
    ends = ((runs.target, to_phases), (runs.origin, from_phases))
    first = [(end.offset - phases[end.view]) // width for end, phases in ends]
    counts = runs.sizes // width
    order = _by_view(runs)
    if order is not None or (counts != 1).any():
        order = np.arange(len(runs)) if order is None else order
        counts = counts[order]
        run = np.repeat(order, counts)
        inside = np.arange(len(run)) - np.repeat(np.cumsum(counts) - counts, counts)
        numbers = [
            RowNumbers(end.view[run], rows[run] + inside, phases)
            for (end, phases), rows in zip(ends, first, strict=True)
        ]
    else:
        numbers = [RowNumbers(end.view, rows, phases) for (end, phases), rows in zip(ends, first, strict=True)]
    return Rows(width, *numbers)


def _by_view(runs: Runs) -> Int64Array | None:
    """Return an order in which runs between the same two views follow each other; None if they do already."""
    pair = runs.origin.view * (int(runs.target.view.max()) + 1) + runs.target.view
    if np.count_nonzero(np.diff(pair)) + 1 == np.count_nonzero(np.bincount(pair)):
        return None
    return np.argsort(pair, kind="stable")


def _heaviest(values: Int64Array, weights: Int64Array) -> int:
    """Return the value with the greatest sum of weights."""
    if (values == values[0]).all():
        return int(values[0])
    found, kind = np.unique(values, return_inverse=True)
    return int(found[np.bincount(kind, weights=weights).argmax()])
