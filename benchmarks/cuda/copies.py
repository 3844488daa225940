"""Copies on a device, and between it and pinned host memory, by the code that pulls and host memory use."""

import importlib
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from layout.copies import Copies
from transfer.copies.batch.backends import Backend, open_copier, pinned_memory
from transfer.copies.batch.base import Direction

#: Of the runs of a batch between device and host memory.
BATCH_RUN_BYTES = (4 << 10, 16 << 10, 64 << 10, 256 << 10, 1 << 20)
#: Of the runs that change places on the device: a head of a token, and more of them together.
RESHAPE_RUN_BYTES = (256, 1 << 10, 4 << 10, 64 << 10)
_MOST_RUNS = 1 << 14  # of a batch, so that small runs do not take for ever
ONE_PIECE, DEVICE_COPY = "one piece", "device copy"


@dataclass(frozen=True)
class Place:
    """Where it is measured: a CUDA device, or the CPU in its place."""

    device: str  # as torch names it: "cuda", "cpu"
    total_bytes: int  # of a copy, at most
    rounds: int  # of which the median is taken, after one that does not count

    @property
    def backend(self) -> Backend:
        """What copies between this place and host memory."""
        return Backend.CUDA if self.device == "cuda" else Backend.HOST

    def seconds(self, action: Callable[[], object]) -> float:
        """Return the median time of an action, until the device has done all of it."""
        taken = []
        for _ in range(self.rounds + 1):
            self._synchronize()
            start = time.perf_counter()
            action()
            self._synchronize()
            taken.append(time.perf_counter() - start)
        return statistics.median(taken[1:])

    def memory(self, size: int) -> torch.Tensor:
        """Return memory of the device, all of it written once."""
        return torch.ones(size, dtype=torch.uint8, device=self.device)

    def _synchronize(self) -> None:
        if self.device == "cuda":
            torch.cuda.synchronize()


def _shuffled(to: int, origin: int, size: int, count: int) -> Copies:
    """Return runs that go from places in any order to places in another one."""
    chance = np.random.default_rng(0)
    here, there = (chance.permutation(count).astype(np.int64) * size for _ in range(2))
    return Copies(to + here, origin + there, np.full(count, size, np.int64))


def copy_seconds(place: Place, size: int) -> float:
    """Return the time of one copy of ``size`` bytes from the device to itself: no read of as many can be faster."""
    source, target = place.memory(size), place.memory(size)
    return place.seconds(lambda: target.copy_(source))


def reshape(place: Place) -> dict[str, float]:
    """Return the rate of the kernel by the size of its runs, beside one copy of as many bytes, in GB/s.

    It is empty where there is no GPU: Triton's interpreter on the CPU says nothing of its speed.
    """
    if place.device != "cuda":
        print("  the reshape kernel needs a GPU: not run")
        return {}
    kernel_copier = importlib.import_module("transfer.copies.reshape.reshape_kernel").KernelCopier  # needs Triton
    total = min(place.total_bytes, 64 << 20)
    source, target = place.memory(total), place.memory(total)
    copier = kernel_copier([source], [target])
    found = {DEVICE_COPY: total / place.seconds(lambda: target.copy_(source)) / 1e9}
    for size in RESHAPE_RUN_BYTES:
        runs = _shuffled(target.data_ptr(), source.data_ptr(), size, total // size)
        found[str(size)] = total / place.seconds(lambda runs=runs: copier(runs)) / 1e9  # type: ignore[misc]
    return _printed("reshape", found)


def batches(place: Place, direction: Direction) -> dict[str, float]:
    """Return the rate of batches by the size of their runs, beside one piece, in GB/s, from order to end."""
    on_device = place.memory(place.total_bytes)
    on_host = pinned_memory(place.backend, place.total_bytes)
    ends = on_device.data_ptr(), on_host.region.address
    to, origin = ends if direction is Direction.HOST_TO_DEVICE else ends[::-1]
    found = {}
    with open_copier(place.backend, direction) as copier:
        for size in (*BATCH_RUN_BYTES, place.total_bytes):
            count = min(_MOST_RUNS, place.total_bytes // size)
            runs = _shuffled(to, origin, size, count)
            seconds = place.seconds(lambda runs=runs: copier.submit(runs).wait())  # type: ignore[misc]
            found[ONE_PIECE if count == 1 else str(size)] = count * size / seconds / 1e9
    on_host.close()
    return _printed(direction.name.lower().replace("_", " "), found)


def _printed(name: str, rates: dict[str, float]) -> dict[str, float]:
    print(f"  {name}, GB/s: " + ", ".join(f"{size} {rate:.1f}" for size, rate in rates.items()))
    return rates
