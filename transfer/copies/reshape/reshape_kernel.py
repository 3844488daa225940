"""Copies bytes on a device by one kernel: what ``reshape_torch`` does by operators, where Triton can compile one.

``RunKernel`` copies between addresses, ``KernelCopier`` between tensors. A call brings a table of 24 bytes a run to the
device, and launches one kernel. The host writes a line of the table for each run, and no row numbers.

Run by Triton's interpreter on the CPU, and compiled for GPUs. Not run on hardware.
"""

import importlib
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import numpy as np
import torch
from numba import njit

from layout.copies import EMPTY, Copies
from layout.regions import RegionTable
from transfer.copies.reshape.reshape_torch import SideStream
from transfer.copies.reshape.storages import StorageTable

#: Runs are cut into pieces of this size, so that a long one is not left to one program.
PIECE_BYTES = 8 << 10
#: Runs of one launch, so that its table takes 6 MiB, and 24 bytes for each further piece of a run.
MOST_RUNS = 1 << 18
#: Words that a program copies at once, over all of its runs.
_TILE_WORDS = 2048
#: Of one run: the fewest that hold it. The kernel is compiled for each, and for each width of words.
_RUN_WORDS = (32, 128, 512)
_WORD_BYTES = (8, 4, 1)


class KernelUnusable(RuntimeError):  # noqa: N818  named after the event
    """Triton cannot compile the kernel here, or what it copies is not what it was given."""


class RunKernel:
    """The kernel on one device, compiled and tried. Any thread may use it, on a stream of its choice."""

    def __init__(self, device: torch.device) -> None:
        """Compile the kernel, and try it.

        Raises:
            KernelUnusable: it cannot be used here.
        """
        self.stream = SideStream(device)
        try:
            language: Any = importlib.import_module("triton.language")
            self._kernel: Any = importlib.import_module("transfer.copies.reshape.run_kernel").copy_runs
            self._words = {8: language.int64, 4: language.int32, 1: language.int8}
            with torch.inference_mode():
                self._try(device)
            self.launches(EMPTY, RegionTable(()))  # compiles what looks at the runs
        except Exception as error:
            raise KernelUnusable(f"{type(error).__name__}: {error}") from error

    def launches(self, copies: Copies, within: RegionTable, most_programs: int = 0) -> list[Callable[[], None]]:
        """Return calls that copy all runs: each submits a part of them to torch's current stream.

        Args:
            copies: no destination byte may be written twice or be a source. This is not checked.
            within: the memory in which both ends of every run must lie.
            most_programs: of the kernel's, at a time; 0: as many as there is work for.

        Raises:
            ValueError: a size is negative, or a run leaves ``within``.
        """
        runs = copies.contiguous()
        calls: list[Callable[[], None]] = []
        for first in range(0, max(len(runs), 1), MOST_RUNS):
            part = runs[first : first + MOST_RUNS].columns
            are_right, pieces, bits, longest = _look(*part, within.starts, within.ends, PIECE_BYTES)
            if not are_right:
                raise ValueError("a run leaves the memory that it may touch, or has a negative size")
            if pieces:
                width = next(width for width in _WORD_BYTES if not bits % width)
                calls.append(partial(self._launch, part, pieces, width, longest, most_programs))
        return calls

    def _launch(self, runs: tuple[Any, ...], pieces: int, width: int, longest: int, most_programs: int = 0) -> None:
        """Copy ``pieces`` pieces of runs of at most ``longest`` bytes, which words of ``width`` bytes divide."""
        table = np.empty((3, pieces), np.int64)
        _write(*runs, PIECE_BYTES, width, table)
        most = longest // width
        words = next((words for words in _RUN_WORDS if words >= most), _RUN_WORDS[-1])
        at_once = _TILE_WORDS // words
        groups = -(-pieces // at_once)
        with torch.inference_mode():
            self._kernel[(min(groups, most_programs or groups),)](
                self.stream.upload(table), pieces, most, WORD=self._words[width], RUNS=at_once, WORDS=words
            )

    def _try(self, device: torch.device) -> None:
        """Copy pieces of every width of words and of several lengths, and compare.

        Raises:
            KernelUnusable: not all bytes are what they should be.
        """
        half = 1 << 15
        with self.stream.running():
            memory = torch.randint(0, 256, (2 * half,), dtype=torch.uint8, device=device)
        base = int(memory.data_ptr())
        for width in _WORD_BYTES:
            for size in (width, 100 * width, 600 * width):
                origins = np.arange(width, half - size, max(size + 8 * width, half // 16), dtype=np.int64)
                targets = half + origins[::-1]
                sizes = np.full(len(origins), size, np.int64)
                with self.stream.running():
                    expected = memory.clone()
                    for target, origin in zip(targets.tolist(), origins.tolist(), strict=True):
                        expected[target : target + size] = memory[origin : origin + size]
                        memory[target : target + size] = ~expected[target : target + size]  # nothing is right by chance
                    self._launch((targets + base, origins + base, sizes), len(sizes), width, size)
                    are_equal = torch.equal(memory, expected)
                if not are_equal:
                    raise KernelUnusable("what it copied at start is not what it was given")


class KernelCopier:
    """Copies runs of bytes between the storages of some tensors, on their device.

    Several threads may call it at once. Each call returns when its own bytes are in place. The calls share a stream, so
    a call may also wait for the bytes of others.
    """

    def __init__(self, *sides: Iterable[torch.Tensor]) -> None:
        """Keep the storages of all tensors alive, and copy between them. Compiles the kernel, and tries it.

        Raises:
            KernelUnusable: it cannot be used here.
            ValueError: as in ``TensorCopier``.
        """
        self._storages = StorageTable(sides)
        self._kernel = RunKernel(self._storages.device)

    def __call__(self, copies: Copies) -> None:
        """Copy every run. When this returns, the bytes are in place, also for other streams and engines.

        No destination byte may be written twice or be a source. This is not checked.

        Raises:
            ValueError: a size is negative, or a run leaves the storages. Nothing was copied.
        """
        try:
            launches = self._kernel.launches(copies, self._storages.table)
        except ValueError:
            self._storages.checked(copies)  # says which
            raise
        if launches:
            with self._kernel.stream.running():
                for launch in launches:
                    launch()


def _look_loop(destinations: Any, sources: Any, sizes: Any, starts: Any, ends: Any, piece: Any) -> Any:
    """Return whether all runs lie in regions, how many pieces they make, the bits of their numbers, the longest piece.

    The bits tell which widths of words divide all addresses and sizes.
    """
    pieces = bits = longest = here = there = 0  # and the regions of the last run
    for i in range(len(sizes)):
        to, origin, size = destinations[i], sources[i], sizes[i]
        if size == 0:
            continue
        if to < starts[here] or to >= ends[here]:
            here = max(np.searchsorted(starts, to, side="right") - 1, 0)
        if origin < starts[there] or origin >= ends[there]:
            there = max(np.searchsorted(starts, origin, side="right") - 1, 0)
        if size < 0 or to < starts[here] or size > ends[here] - to:
            return False, 0, 0, 0
        if origin < starts[there] or size > ends[there] - origin:
            return False, 0, 0, 0
        pieces += -(-size // piece)
        bits |= to | origin | size
        longest = max(longest, size)
    return True, pieces, bits, min(longest, piece)


def _write_loop(destinations: Any, sources: Any, sizes: Any, piece: Any, width: Any, table: Any) -> None:
    """Write a column of the kernel's table for each piece."""
    at = 0
    for i in range(len(sizes)):
        done = 0
        while done < sizes[i]:
            size = min(sizes[i] - done, piece)
            table[0, at], table[1, at], table[2, at] = destinations[i] + done, sources[i] + done, size // width
            done, at = done + size, at + 1


_look, _write = (njit(nogil=True)(loop) for loop in (_look_loop, _write_loop))
