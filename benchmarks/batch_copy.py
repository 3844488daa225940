"""How fast the host backend moves blocks: ``python -m benchmarks.batch_copy``.

Blocks at random places, as a host tier stores and loads them, by three ways that take turns in one run: a batch of the
copier, from ``submit`` to the end of its handle; a loop of ``copy_`` over the blocks; and one contiguous copy of the
same bytes by memcpy, which is what one core can do. Then what a batch of 10,240 blocks costs its caller: building the
descriptors from block ids and handing them over, while the copier's thread and a second thread of Python are busy.

The device backends are not measured: there is no device here, and the simulated ones have no speed.
"""

import argparse
import ctypes
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from layout.copies import Copies
from layout.geometry import Region
from transfer.batch_copy.backends import Backend, open_copier, pinned_memory
from transfer.batch_copy.base import BatchCopier, Direction

BLOCKS = [4 << 10, 16 << 10, 32 << 10, 128 << 10, 512 << 10, 1 << 20, 4 << 20]
TARGET, TARGET_FROM = 0.85, 32 << 10
DESCRIPTORS, HAND_OVER_MS = 10_240, 1.0


def blocks_of(ids: npt.NDArray[np.int64], region: Region, size: int) -> npt.NDArray[np.int64]:
    return region.address + ids * size


def batch(target: Region, source: Region, count: int, size: int) -> Copies:
    """Every block of ``count``, each from a random place to another."""
    random = np.random.default_rng(count)
    to, origin = random.permutation(count), random.permutation(count)
    return Copies(blocks_of(to, target, size), blocks_of(origin, source, size), np.full(count, size, np.int64))


def tensors(region: Region, addresses: npt.NDArray[np.int64], size: int) -> list[torch.Tensor]:
    whole = np.ctypeslib.as_array((ctypes.c_uint8 * region.size).from_address(region.address))
    return [torch.from_numpy(whole[a - region.address : a - region.address + size]) for a in addresses.tolist()]


def seconds(action: Callable[[], object]) -> float:
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


def rates(copier: BatchCopier, target: Region, source: Region, rounds: int) -> dict[str, float]:
    """A line for each size of block; what share of one memcpy a batch reaches, by the size in KiB."""
    shares = {}
    print(f"{target.size >> 20} MiB, median of {rounds}; target {TARGET:.0%} of one memcpy from 32 KiB on")
    print(f"  {'block':>9s} {'batch':>12s} {'copy_ loop':>12s} {'one memcpy':>12s}")
    for size in BLOCKS:
        copies = batch(target, source, target.size // size, size)
        pairs = list(
            zip(tensors(target, copies.destinations, size), tensors(source, copies.sources, size), strict=True)
        )

        def loop(pairs: list[tuple[torch.Tensor, torch.Tensor]] = pairs) -> None:
            for to, origin in pairs:
                to.copy_(origin)

        ways: list[Callable[[], object]] = [
            lambda copies=copies: copier.submit(copies).wait(),  # type: ignore[misc]
            loop,
            lambda: ctypes.memmove(target.address, source.address, target.size),
        ]
        spent: list[list[float]] = [[] for _ in ways]
        for round_number in range(-1, rounds):
            for times, way in zip(spent, ways, strict=True):
                elapsed = seconds(way)
                if round_number >= 0:
                    times.append(elapsed)
        medians = [statistics.median(times) for times in spent]
        share = medians[2] / medians[0]
        verdict = "" if size < TARGET_FROM else "reached" if share >= TARGET else "MISSED"
        shares[str(size >> 10)] = share
        columns = " ".join(f"{target.size / median / 1e9:7.2f} GB/s" for median in medians)
        print(f"  {size >> 10:5d} KiB {columns}   {share:5.0%} of memcpy  {verdict}")
    return shares


def hand_over(copier: BatchCopier, target: Region, source: Region, rounds: int) -> None:
    """What ``submit`` takes from the thread that calls it."""
    size = target.size // DESCRIPTORS // 64 * 64
    random, stop = np.random.default_rng(0), threading.Event()

    def compute() -> None:
        while not stop.is_set():
            sum(range(1000))

    busy = threading.Thread(target=compute)
    for others in ("alone", "beside a busy Python thread"):
        if others != "alone":
            busy.start()
        spent = []
        for _ in range(rounds):
            to, origin = random.permutation(DESCRIPTORS), random.permutation(DESCRIPTORS)
            start = time.perf_counter()
            copies = Copies(
                blocks_of(to, target, size), blocks_of(origin, source, size), np.full(DESCRIPTORS, size, np.int64)
            )
            handle = copier.submit(copies)
            spent.append(1e3 * (time.perf_counter() - start))
            handle.wait()
        median = statistics.median(spent)
        verdict = "reached" if median < HAND_OVER_MS else "MISSED"
        print(f"  {others:28s} {median:6.3f} ms, worst {max(spent):6.3f} ms   {verdict}")
    stop.set()
    busy.join()


def main(words: Sequence[str] | None = None) -> dict[str, Any]:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--megabytes", type=int, default=256)
    arguments = parser.parse_args(words)
    size = arguments.megabytes << 20
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    target, source = (pinned_memory(Backend.HOST, size) for _ in range(2))
    for value, memory in enumerate((target, source)):
        ctypes.memset(memory.region.address, value, size)
    with open_copier(Backend.HOST, Direction.DEVICE_TO_HOST) as copier:
        shares = rates(copier, target.region, source.region, arguments.rounds)
        print(f"\nhanding over {DESCRIPTORS:,} descriptors, target {HAND_OVER_MS:.0f} ms")
        hand_over(copier, target.region, source.region, 4 * arguments.rounds)
    torch.set_num_threads(threads)
    large = [share for size, share in shares.items() if int(size) >= TARGET_FROM >> 10]
    return {"share_of_memcpy": shares, "from_32_kib": {"least": min(large), "most": max(large)}}


if __name__ == "__main__":
    main()
