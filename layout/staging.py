"""Staged reads: fewer, wider reads into a buffer, and the local copies that finish them.

A descriptor costs as much as reading tens of kilobytes. Where wanted runs lie close together in the peer's memory, it
is cheaper to read them as one, gaps included, and to copy the wanted bytes out. This module chooses the runs that are
worth staging and cuts them into windows that fit the buffer. It moves no bytes and reads no memory.

    runs, by source   [a]..[b].[c]..............[D D D D D D D]....[e].[f]
    reads              one wide read      direct, to destination   one wide read
    staging           [a]..[b].[c] [e].[f]   in windows of half the buffer, which alternate:
                      window 0 -> first half, 1 -> second, 2 -> first ...

Window i + 1 may be read while window i is copied out. The read of window i + 2 may start only once window i has been
copied, because it uses the same half.

Where copying needs an operator for each area of memory that is written to, as on a device, a window also ends before it
would write to too many of them.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numba import njit

from layout.copies import EMPTY, Copies, Int64Array
from layout.cost import CostModel
from layout.geometry import Region
from layout.regions import RegionTable


@dataclass(frozen=True, slots=True)
class CopyAreas:
    """Areas of local memory, by where they start (ascending), and to how many of them (1 or more) a window may copy."""

    starts: Int64Array
    per_window: int


#: Memory to all of which any window may copy.
ONE_AREA = CopyAreas(np.empty(0, np.int64), 1)


@dataclass(frozen=True, slots=True)
class StagedWindow:
    """A part of a pull that fits half of the staging buffer: run all ``reads``, then all ``copies``."""

    reads: Copies  # peer's memory -> staging
    copies: Copies  # staging -> final destination


@dataclass(frozen=True, slots=True)
class Schedule:
    """All reads of a pull from one peer. ``direct`` may be read at any time, staged reads go window by window.

    The seconds are predicted by the cost model, with reads and copies one after another.
    """

    direct: Copies
    reads: Copies  # peer's memory -> staging, of all windows
    copies: Copies  # staging -> final destination, of all windows
    borders: Int64Array  # [windows + 1, 2]: where each window begins in reads and in copies, and where the last ends
    wanted_bytes: int
    predicted_s: float
    direct_s: float  # if nothing were staged

    def windows(self) -> Iterator[StagedWindow]:
        """Yield the staged windows in the order in which they must be read."""
        for (read, copy), (next_read, next_copy) in pairwise(self.borders.tolist()):
            yield StagedWindow(self.reads[read:next_read], self.copies[copy:next_copy])

    @property
    def descriptors(self) -> int:
        """Number of descriptors for the transfer engine."""
        return len(self.direct) + len(self.reads)

    @property
    def read_bytes(self) -> int:
        """Bytes that cross the wire, gaps included."""
        return self.direct.total_bytes + self.staged_bytes

    @property
    def staged_bytes(self) -> int:
        """Bytes that pass through the staging buffer."""
        return self.reads.total_bytes

    def describe(self) -> str:
        """Return a one-line summary for the log."""
        if not self.descriptors:
            return "nothing to read"
        return (
            f"{self.descriptors} descriptors ({len(self.direct)} direct), {self.read_bytes} bytes read for "
            f"{self.wanted_bytes} wanted, {self.staged_bytes} bytes staged in {len(self.borders) - 1} windows with "
            f"{len(self.copies)} copies, {1e3 * self.predicted_s:.3f} ms predicted, {1e3 * self.direct_s:.3f} ms all "
            "direct"
        )


def schedule_reads(
    copies: Copies,
    cost: CostModel,
    local: RegionTable,
    remote: RegionTable,
    staging: Region | None,
    areas: CopyAreas = ONE_AREA,
) -> Schedule:
    """Choose the cheapest way to read ``copies``: which runs directly, and which through ``staging``.

    The choice is optimal under ``cost`` if no two runs share source bytes and no run is larger than a window (such a
    run is read directly). Window borders then add at most one descriptor each. The result never costs more than reading
    everything directly.

    Runs that continue each other on both sides are joined. No joined or widened run leaves a region. Runs that lie in
    no region are passed on unjoined, for the transfer engine to refuse.

    Args:
        copies: the runs to read, sources in the peer's memory; fastest if the sources ascend.
        cost: the cost model.
        local: the memory registered here; each direct read stays inside one of its regions.
        remote: the memory registered by the peer; each read stays inside one of its regions.
        staging: the whole buffer, of which a window uses half. With None or less than two bytes nothing is staged.
        areas: limits the areas that each window copies to.

    Raises:
        ValueError: a size is not positive.
    """
    if len(copies) and int(copies.sizes.min()) <= 0:
        index = int(copies.sizes.argmin())
        raise ValueError(
            f"descriptor {index} of {len(copies)} has {int(copies.sizes[index])} bytes; a size must be positive"
        )
    runs = _join(_sort_by_source(copies), local, remote)
    wanted = runs.total_bytes
    direct_s = cost.read_s(len(runs), wanted)
    direct = Schedule(runs, EMPTY, EMPTY, np.zeros((1, 2), np.int64), wanted, direct_s, direct_s)
    if staging is None or staging.size < 2 or not remote.regions or len(runs) < 2:
        return direct
    begins, ends = _choose(runs, remote, cost, staging.size // 2)
    if not len(begins):
        return direct
    rest, reads, moved, borders = _lay_out(runs, begins, ends, staging, areas)
    predicted = cost.read_s(len(rest) + len(reads), rest.total_bytes + reads.total_bytes)
    predicted += cost.copy_s(len(moved), moved.total_bytes)
    return Schedule(rest, reads, moved, borders, wanted, predicted, direct_s) if predicted < direct_s else direct


def warm_up() -> None:
    """Compile the loops of ``schedule_reads``, which takes a few seconds, so that the first pull need not wait."""
    runs = np.array([1, 3], np.int64)
    everything = RegionTable([Region(1, 1 << 60)])
    schedule_reads(
        Copies(runs, runs, runs[:1].repeat(2)), CostModel(1.0, 0, 0, 0), everything, everything, Region(1, 8)
    )


def _sort_by_source(copies: Copies) -> Copies:
    copies = copies.contiguous()
    if _ascending(copies.sources):
        return copies
    return copies[np.argsort(copies.sources, kind="stable")]  # fast if the sources consist of a few ascending parts


def _join(runs: Copies, local: RegionTable, remote: RegionTable) -> Copies:
    """Join runs that continue on both sides, unless the result would leave a region. ``runs`` are sorted by source."""
    if not len(runs):
        return runs
    continues = np.empty(len(runs), np.bool_)
    _continues(*runs.columns, continues)
    later = np.flatnonzero(continues)
    before = later - 1
    both = runs.sizes[before] + runs.sizes[later]
    apart = remote.outside(runs.sources[before], both) | local.outside(runs.destinations[before], both)
    continues[later[apart]] = False
    if not continues.any():
        return runs
    starts = np.flatnonzero(~continues)
    return Copies(runs.destinations[starts], runs.sources[starts], np.add.reduceat(runs.sizes, starts))


def _choose(runs: Copies, remote: RegionTable, cost: CostModel, half: int) -> tuple[Int64Array, Int64Array]:
    """Choose the runs to stage: read i covers runs ``begins[i]`` to ``ends[i]`` (exclusive). ``runs`` by source."""
    begins, ends = np.empty((2, len(runs) // 2 + 1), np.int64)  # staging a run alone is never cheaper
    costs = np.array([cost.alpha, cost.beta, cost.copy_alpha, cost.copy_beta], np.float64)
    reads = _cheapest(runs.sources, runs.sizes, remote.starts, remote.ends, costs, half, begins, ends)
    return begins[:reads], ends[:reads]


def _lay_out(
    runs: Copies, begins: Int64Array, ends: Int64Array, staging: Region, areas: CopyAreas
) -> tuple[Copies, Copies, Copies, Int64Array]:
    """Return the direct reads, the reads into the staging buffer, the copies out of it, and the windows' borders."""
    half = staging.size // 2
    staged = int((ends - begins).sum())
    direct, reads, moves = (np.empty((3, count), np.int64) for count in (len(runs) - staged, staged, staged))
    borders = np.empty((staged + 1, 2), np.int64)
    area = np.searchsorted(areas.starts, runs.destinations, side="right")  # 0: before the first one
    last_window = np.full(len(areas.starts) + 1, -1, np.int64)
    limits = np.array([half, areas.per_window], np.int64)
    arrays = runs.columns
    windows = _place(arrays, area, last_window, begins, ends, staging.address, limits, direct, reads, moves, borders)
    borders = borders[: windows + 1]
    return Copies(*direct), Copies(*reads[:, : borders[-1, 0]]), Copies(*moves), borders


#: A read that fits this often into a window is small: the bytes that a window lacks so that it is whole are few.
_SMALL_READS = 8

_BEYOND_ALL = np.iinfo(np.int64).max  # where the region after the last one starts

# The loops, compiled at their first call. Runs are three arrays: destinations, sources and sizes, sorted by source.


def _ascending_loop(values: Any) -> Any:
    ascending = True
    for i in range(1, len(values)):
        ascending &= values[i - 1] <= values[i]
    return ascending


def _continues_loop(destinations: Any, sources: Any, sizes: Any, continues: Any) -> None:
    """Set which runs continue the one before on both sides."""
    continues[0] = False
    for i in range(1, len(sizes)):
        continues[i] = (sources[i] - sources[i - 1] == sizes[i - 1]) & (
            destinations[i] - destinations[i - 1] == sizes[i - 1]
        )


def _cheapest_loop(
    sources: Any, sizes: Any, starts: Any, region_ends: Any, costs: Any, half: Any, begins: Any, ends: Any
) -> Any:
    """Fill in the range of runs of each staged read, and return the number of reads.

    Dynamic programming over the runs with two states per run:

        direct[i] = alpha   + min(direct[i-1], staged[i-1])
        staged[i] = copy[i] + min(direct[i-1] + alpha, staged[i-1] + min(alpha, gap[i]))

    in seconds beyond those of the wanted bytes. Only the ``difference`` staged[i] - direct[i] matters. A run is staged
    if it is negative, direct if it is at least what a staged next run would save, and otherwise in the state of the
    next run. A run that shares bytes with the one before begins a new read.
    """
    alpha, beta, copy_alpha, copy_beta = costs[0], costs[1], costs[2], costs[3]
    reads = region = undecided = 0
    grows = False  # whether the run ``undecided``, if staged, belongs to the last read
    difference = 0.0
    start = stop = following = 0  # of the previous run's region, and where the region after that starts
    before, end = sources[0], sources[0] + 1  # of the previous run; there is none yet: as if run 0 shared its bytes
    for i in range(len(sizes)):  # hardly a branch: which runs lie close together cannot be predicted
        source, size = sources[i], sizes[i]
        near = (source >= end) & (before >= start) & (size <= stop - source)
        saved = alpha - beta * (source - end)  # by reading it together with the run before
        saved = saved if near & (saved > 0) else 0.0
        staged = difference < 0
        decided = staged | (difference >= saved)
        begins[reads] = undecided
        reads += staged & (not grows)
        ends[reads - staged] = i
        grows = staged & (saved > 0) if decided else grows
        undecided = i if decided else undecided
        copy = copy_alpha + copy_beta * size if size <= half else np.inf
        kept = difference if difference > 0 else 0.0
        difference = (kept if kept < saved else saved) + (copy - saved)
        before, end = source, source + size
        if source >= following:
            while region + 1 < len(starts) and starts[region + 1] <= source:
                region += 1
            start, stop = starts[region], region_ends[region]
            following = starts[region + 1] if region + 1 < len(starts) else _BEYOND_ALL
    if difference < 0:
        begins[reads] = undecided
        reads += not grows
        ends[reads - 1] = len(sizes)
    return reads


def _place_loop(
    runs: Any, area: Any, last_window: Any, begins: Any, ends: Any, buffer: Any, limits: Any,
    direct: Any, reads: Any, moves: Any, borders: Any,
) -> Any:  # fmt: skip
    """Fill in the result of ``_lay_out`` and return the number of windows. Cuts a read where its window is full.

    A read that is small against a window is not cut, but begins the next window. ``last_window`` is, for each area, the
    last window that copies to it, -1 at first.
    """
    _, sources, sizes = runs
    half, most_areas = limits[0], limits[1]
    zero: Any = np.int64(0)  # as a literal, it would have ``_append`` compiled for itself
    directs = moved = count = window = filled = areas = done = zero
    borders[0] = 0
    for read in range(len(begins)):
        begin = begins[read]
        directs = _append(direct, directs, runs, done, begin, zero)
        done = ends[read]
        while begin < done:
            room = half - filled
            width = sources[done - 1] + sizes[done - 1] - sources[begin]
            if width > room and width * _SMALL_READS <= half:
                room = 0
            end = begin
            while end < done and sources[end] + sizes[end] - sources[begin] <= room:
                if last_window[area[end]] != window:
                    if areas == most_areas:
                        break
                    areas += 1
                    last_window[area[end]] = window
                end += 1
            if end == begin:
                window, filled, areas = window + 1, 0, 0
                borders[window, 0], borders[window, 1] = count, moved
                continue
            address = buffer + window % 2 * half + filled
            width = sources[end - 1] + sizes[end - 1] - sources[begin]
            reads[0, count], reads[1, count], reads[2, count] = address, sources[begin], width
            moved = _append(moves, moved, runs, begin, end, address - sources[begin])
            count, filled, begin = count + 1, filled + width, end
    _append(direct, directs, runs, done, len(sizes), zero)
    borders[window + 1, 0], borders[window + 1, 1] = count, moved
    return window + 1


def _append_loop(batch: Any, count: Any, runs: Any, begin: Any, end: Any, shift: Any) -> Any:
    """Append runs to ``batch``, their sources moved by ``shift``, and return how many it holds."""
    destinations, sources, sizes = runs
    for i in range(end - begin):
        batch[0, count + i] = destinations[begin + i]
        batch[1, count + i] = sources[begin + i] + shift
        batch[2, count + i] = sizes[begin + i]
    return count + end - begin


_compile = njit(nogil=True)
_append = _compile(_append_loop)
_ascending, _continues, _cheapest, _place = (
    _compile(loop) for loop in (_ascending_loop, _continues_loop, _cheapest_loop, _place_loop)
)
