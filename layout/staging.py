"""Staged reads: fewer, wider reads into a buffer, and the local copies that finish them.

A descriptor costs as much as some tens of kilobytes. Where wanted runs lie close together in the peer's memory, it
is cheaper to read them as one, gaps included, and to copy the wanted bytes out. This module decides which runs are
worth it, and cuts the staged part to the size of the buffer. It moves no bytes and reads no memory.

    runs, by source   [a]..[b].[c]..............[D D D D D D D]....[e].[f]
    reads              one wide           direct, to its place     one wide
    staging           [a]..[b].[c] [e].[f]   cut into windows of half the buffer, which take turns:
                      window 0 -> first half, 1 -> second, 2 -> first ...

The read of window i + 1 may run while window i is copied out. The read of window i + 2 may start only when window i
has been copied, because it uses the same half.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from layout.copies import EMPTY, Copies, Int64Array
from layout.cost import CostModel
from layout.geometry import Region

_Seconds = npt.NDArray[np.float64]
_Flags = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class StagedWindow:
    """A part of a pull that fits half of the staging buffer: first all ``reads``, then all ``copies``."""

    reads: Copies  # the peer's memory -> staging
    copies: Copies  # staging -> final destination

    @property
    def staged_bytes(self) -> int:
        """Bytes of the staging buffer that this window fills."""
        return self.reads.total_bytes


@dataclass(frozen=True, slots=True)
class Schedule:
    """All reads of a pull from one peer. ``direct`` may be read at any time; ``windows`` in order.

    The seconds are the cost model's, with nothing overlapping: reads and copies one after another.
    """

    direct: Copies
    windows: tuple[StagedWindow, ...]
    wanted_bytes: int
    predicted_s: float
    direct_s: float  # what the pull would cost if nothing were staged

    @property
    def descriptors(self) -> int:
        """Descriptors that the transfer engine gets."""
        return len(self.direct) + sum(len(window.reads) for window in self.windows)

    @property
    def read_bytes(self) -> int:
        """Bytes that cross the wire, gaps included."""
        return self.direct.total_bytes + self.staged_bytes

    @property
    def staged_bytes(self) -> int:
        """Bytes that pass through the staging buffer."""
        return sum(window.staged_bytes for window in self.windows)

    def describe(self) -> str:
        """One line for the log."""
        if not self.descriptors:
            return "nothing to read"
        copies = sum(len(window.copies) for window in self.windows)
        return (
            f"{self.descriptors} descriptors ({len(self.direct)} direct), {self.read_bytes} bytes read for "
            f"{self.wanted_bytes} wanted, {self.staged_bytes} bytes staged in {len(self.windows)} windows with "
            f"{copies} copies, {1e3 * self.predicted_s:.3f} ms predicted, {1e3 * self.direct_s:.3f} ms all direct"
        )


def schedule_reads(
    copies: Copies,
    cost: CostModel,
    local_regions: Sequence[Region],
    remote_regions: Sequence[Region],
    staging: Region | None,
) -> Schedule:
    """The cheapest way to bring ``copies``: which runs are read straight to their place, and which through ``staging``.

    The choice of runs is the cheapest of all under ``cost`` where no two runs share source bytes; window borders then
    add at most one descriptor and one copy each. Never costs more than reading everything directly. Runs that
    continue each other on both sides are joined. No joined or wider run leaves a region: each lies inside one of
    ``remote_regions`` and, if direct, inside one of ``local_regions``. Runs that lie in none are passed on unjoined,
    for the transfer engine to refuse.

    ``staging`` is the whole buffer, of which each window uses half; None, or less than two bytes: nothing is staged.

    Raises:
        ValueError: a size is not positive.
    """
    if not len(copies):
        return Schedule(EMPTY, (), 0, 0.0, 0.0)
    if int(copies.sizes.min()) <= 0:
        index = int(copies.sizes.argmin())
        raise ValueError(f"descriptor {index} of {len(copies)} has {int(copies.sizes[index])} bytes; it must have some")
    runs, region = _join(copies, local_regions, remote_regions)
    wanted = runs.total_bytes
    direct = Schedule(runs, (), wanted, cost.read_s(len(runs), wanted), cost.read_s(len(runs), wanted))
    if staging is None or staging.size < 2 or len(runs) < 2:
        return direct
    staged, first = _choose(runs, region, cost)
    if not staged.any():
        return direct
    windows = _windows(_select(runs, staged), first[staged], staging)
    reading = [_select(runs, ~staged), *(window.reads for window in windows)]
    predicted = sum(cost.read_s(len(batch), batch.total_bytes) for batch in reading)
    predicted += sum(cost.copy_s(len(window.copies), window.copies.total_bytes) for window in windows)
    return Schedule(reading[0], windows, wanted, predicted, direct.direct_s) if predicted < direct.direct_s else direct


def _select(copies: Copies, which: _Flags | Int64Array) -> Copies:
    return Copies(copies.destinations[which], copies.sources[which], copies.sizes[which])


def _join(copies: Copies, local: Sequence[Region], remote: Sequence[Region]) -> tuple[Copies, Int64Array]:
    """Runs by source address, joined where both sides continue; and the remote region of each, -1 for none."""
    runs = _select(copies, np.argsort(copies.sources))
    there = _region_of(runs.sources, runs.sizes, remote)
    here = _region_of(runs.destinations, runs.sizes, local)
    joins = (
        (np.diff(runs.sources) == runs.sizes[:-1])
        & (np.diff(runs.destinations) == runs.sizes[:-1])
        & (np.diff(there) == 0)
        & (np.diff(here) == 0)
        & (there[1:] >= 0)
        & (here[1:] >= 0)
    )
    if not joins.any():
        return runs, there
    starts = np.flatnonzero(np.concatenate(([True], ~joins)))
    return Copies(runs.destinations[starts], runs.sources[starts], np.add.reduceat(runs.sizes, starts)), there[starts]


def _region_of(addresses: Int64Array, sizes: Int64Array, regions: Sequence[Region]) -> Int64Array:
    """Number of the region that holds all of each run, -1 where none does. Shape [n] in, [n] out."""
    if not regions:
        return np.full(len(addresses), -1, np.int64)
    ordered = sorted(regions, key=lambda region: region.address)
    found = np.searchsorted(np.array([region.address for region in ordered], np.int64), addresses, side="right") - 1
    # A run that ends past int64 would wrap: compare its size with the room that is left instead.
    room = np.array([region.end for region in ordered], np.int64)[found] - addresses
    return np.where((found >= 0) & (sizes <= room), found, -1)


def _choose(runs: Copies, region: Int64Array, cost: CostModel) -> tuple[_Flags, _Flags]:
    """Which runs to stage, and which of those begin a read. Runs by source; shape [n] each.

    Walking along the runs there are two states, and the cheapest path through them is wanted:

        direct[i] = alpha   + min(direct[i-1], staged[i-1])
        staged[i] = copy[i] + min(direct[i-1] + alpha, staged[i-1] + min(alpha, gap[i]))

    (in seconds beyond those of the wanted bytes). Only the difference of the states matters: see ``_differences``.
    """
    copy_s: _Seconds = np.asarray(cost.copy_alpha + cost.copy_beta * runs.sizes, np.float64)
    # How far runs before reach: sources of a pull hardly ever overlap, but if they do, bytes are read once.
    ends = np.where(region >= 0, runs.sources + runs.sizes, runs.sources)
    reached = np.maximum.accumulate(ends)
    gap = np.full(len(runs), np.inf)
    gap[1:] = cost.beta * (np.maximum(ends[1:], reached[:-1]) - reached[:-1] - runs.sizes[1:])
    gap[1:][(region[1:] < 0) | (region[1:] != region[:-1])] = np.inf
    gap = np.minimum(gap, cost.alpha)
    difference = _differences(copy_s, gap, cost.alpha)
    # Backwards: a run's state follows from its own difference, or else is that of the run behind it.
    to_next = np.concatenate((cost.alpha - gap[1:], [0.0]))
    decided = (difference < 0) | (difference >= to_next)
    behind = np.minimum.accumulate(np.where(decided, np.arange(len(runs)), len(runs))[::-1])[::-1]
    staged = difference[behind] < 0
    joined = staged & np.concatenate(([False], staged[:-1])) & (gap < cost.alpha)
    return staged, ~joined


def _differences(copy_s: _Seconds, gap: _Seconds, alpha: float) -> _Seconds:
    """``staged[i] - direct[i]`` of all runs.

    One step is ``d -> clip(d, 0, alpha - gap) + copy - alpha + gap``. Such clipped shifts stay of that form when
    they are chained, so that all prefixes are found by doubling; it ends as soon as no result depends on where its
    chain began, which is after a few rounds unless a gap costs nearly as much as a descriptor.
    """
    shift = copy_s - alpha + gap
    low, high = shift.copy(), copy_s.copy()
    low[0] = high[0] = copy_s[0]  # before the first run nothing is staged
    low[gap >= alpha] = high[gap >= alpha] = copy_s[gap >= alpha]
    reach = 1
    while reach < len(low) and (low[reach:] != high[reach:]).any():
        before, after = slice(None, -reach), slice(reach, None)
        chained = [np.clip(bound[before] + shift[after], low[after], high[after]) for bound in (low, high)]
        total = shift[before] + shift[after]
        low[after], high[after], shift[after] = *chained, total
        reach *= 2
    return low


def _windows(runs: Copies, first: _Flags, staging: Region) -> tuple[StagedWindow, ...]:
    """The staged runs as reads and copies, cut where a half of the staging buffer is full.

    Reads lie one after another in a space as long as they are; each stretch of half the buffer is a window.
    """
    half = staging.size // 2
    begins = np.flatnonzero(first)
    read_sources = runs.sources[begins]
    widths = np.maximum.reduceat(runs.sources + runs.sizes, begins) - read_sources
    positions = np.cumsum(widths) - widths
    of_run = np.cumsum(first) - 1
    reads = Copies(positions, read_sources, widths)
    copies = _merge(Copies(runs.destinations, positions[of_run] + runs.sources - read_sources[of_run], runs.sizes))
    read_window, reads = _cut(reads, reads.destinations, half)
    copy_window, copies = _cut(copies, copies.sources, half)
    into = staging.address + read_window % 2 * half + reads.destinations - read_window * half
    out_of = staging.address + copy_window % 2 * half + copies.sources - copy_window * half
    reads = Copies(into, reads.sources, reads.sizes)
    copies = Copies(copies.destinations, out_of, copies.sizes)
    borders = np.arange(1, int(read_window[-1]) + 1)
    read_cuts = [0, *np.searchsorted(read_window, borders).tolist(), len(reads)]
    copy_cuts = [0, *np.searchsorted(copy_window, borders).tolist(), len(copies)]
    return tuple(
        StagedWindow(reads[read_cuts[i] : read_cuts[i + 1]], copies[copy_cuts[i] : copy_cuts[i + 1]])
        for i in range(len(borders) + 1)
    )


def _merge(copies: Copies) -> Copies:
    """Neighbours that continue each other on both sides, joined: whatever the registered regions, it is one buffer."""
    joins = (np.diff(copies.sources) == copies.sizes[:-1]) & (np.diff(copies.destinations) == copies.sizes[:-1])
    if not joins.any():
        return copies
    starts = np.flatnonzero(np.concatenate(([True], ~joins)))
    return Copies(copies.destinations[starts], copies.sources[starts], np.add.reduceat(copies.sizes, starts))


def _cut(runs: Copies, positions: Int64Array, every: int) -> tuple[Int64Array, Copies]:
    """Runs cut wherever their position crosses a multiple of ``every``: the stretch of each piece, and the pieces.

    Ordered by stretch.
    """
    stretch = positions // every
    pieces = (positions + runs.sizes - 1) // every - stretch + 1
    if (pieces > 1).any():
        parent = np.repeat(np.arange(len(runs)), pieces)
        stretch = stretch[parent] + np.arange(len(parent)) - np.repeat(np.cumsum(pieces) - pieces, pieces)
        start = np.maximum(positions[parent], stretch * every)
        end = np.minimum((positions + runs.sizes)[parent], (stretch + 1) * every)
        moved = start - positions[parent]
        runs = Copies(runs.destinations[parent] + moved, runs.sources[parent] + moved, end - start)
    if (np.diff(stretch) < 0).any():
        order = np.argsort(stretch, kind="stable")
        stretch, runs = stretch[order], _select(runs, order)
    return stretch, runs
