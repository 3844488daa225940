"""What zeroing slots of host memory costs (``host_scrub``): ``python -m benchmarks.host_scrub``.

The three places where it costs anything, in turn in one run, with real memory and the host backend:

- the store thread: a portion of slots that is zeroed, beside a store of as many bytes;
- a store that waits for a portion, as the first one after a reset may;
- the model's thread: what it takes to hand a portion over, and the scheduler's: what it takes to choose one.

The rest of a slot that a smaller block leaves costs what its bytes cost, in models with blocks of several sizes only.
"""

import argparse
import ctypes
import statistics
import time
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np

from benchmarks.host_step import RUN_BYTES, worker_geometry
from layout.host_blocks import host_layout
from pd_connector.orders import BlockMoves, Report, ScrubOrder, StoreOrder
from pd_connector.scheduler.host_scrub import HostScrub, portion_slots
from pd_connector.vllm.forgotten_slots import ForgottenSlots
from pd_connector.worker.host_copies import HostCopies
from transfer.batch_copy.backends import Backend, open_copier, pinned_memory
from transfer.batch_copy.base import Direction
from transfer.local_copy.zeroing import warm_up


class Worker:
    """A rank with a portion of slots, and as many blocks on its device."""

    def __init__(self, size: int, layers: int) -> None:
        self._memory = [pinned_memory(Backend.HOST, size) for _ in range(2)]
        for memory in self._memory:
            ctypes.memset(memory.region.address, 1, memory.region.size)
        device, host = (memory.region for memory in self._memory)
        layout = host_layout(worker_geometry(device, layers))
        stores, loads = (open_copier(Backend.HOST, way) for way in (Direction.DEVICE_TO_HOST, Direction.HOST_TO_DEVICE))
        self.copies = HostCopies(layout, host, stores, loads, lambda: None)
        self.slots = layout.slots_in(size)
        self._random = np.random.default_rng(1)
        self._order = self._random.permutation(self.slots)  # as slots are forgotten
        warm_up()

    def scrub(self) -> Callable[[], object]:
        """Start to zero all slots; return what tells whether they are."""
        self.copies.scrub(ScrubOrder(0, self._order))
        return self.copies.take_scrubs

    def store(self, blocks: int) -> Callable[[], object]:
        """Start a store of blocks at random places into such slots; return what tells whether it is done."""
        places = (self._random.permutation(self.slots)[:blocks] for _ in range(2))
        self.copies.store(StoreOrder(0, BlockMoves(np.zeros(blocks, np.int64), *places)))
        return self.copies.take_stores

    def close(self) -> None:
        """End the threads and free the memory."""
        self.copies.close()
        for memory in self._memory:
            memory.close()


def wait_for(has_ended: Callable[[], object]) -> None:
    """Wait until there is something that has ended."""
    while not has_ended():
        time.sleep(1e-4)


def worker_side(rounds: int, size: int, layers: int) -> dict[str, float]:
    """Return the medians in milliseconds."""
    worker, seconds = Worker(size, layers), dict[str, list[float]]()
    for number in range(-2, rounds):
        times = [time.perf_counter()]
        zeroing = worker.scrub()
        times.append(time.perf_counter())
        wait_for(zeroing)
        times.append(time.perf_counter())
        wait_for(worker.store(worker.slots))
        times.append(time.perf_counter())
        wait_for(worker.store(1))
        times.append(time.perf_counter())
        zeroing = worker.scrub()
        wait_for(worker.store(1))
        times.append(time.perf_counter())
        wait_for(zeroing)
        steps = np.diff(times)
        measured = {
            "hand over": steps[0],
            "zero": steps[0] + steps[1],
            "store as much": steps[2],
            "store a block": steps[3],
            "store a block behind a portion": steps[4],
        }
        if number >= 0:
            for name, value in measured.items():
                seconds.setdefault(name, []).append(float(value))
    worker.close()
    return {name: 1e3 * statistics.median(values) for name, values in seconds.items()}


def scheduler_side(rounds: int, slots: int) -> float:
    """Return the median in milliseconds of a portion: noted when it is given back, ordered, and reported."""
    blocks: list[Any] = [
        SimpleNamespace(block_id=number + 1, ref_cnt=0, is_null=False, block_hash=None) for number in range(slots)
    ]
    forgotten, spent = ForgottenSlots(kept=True), []
    scrub = HostScrub(forgotten, 1, slots)
    for _ in range(rounds):
        start = time.perf_counter()
        forgotten.given_back(blocks)
        (order,) = scrub.step_orders({}).scrubs
        scrub.settled(set(), set(), Report(scrubs={order.scrub_id: 1}))
        spent.append(time.perf_counter() - start)
    return 1e3 * statistics.median(spent)


def main(words: Sequence[str] | None = None) -> dict[str, Any]:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--layers", type=int, default=32, help=f"of {RUN_BYTES} bytes for each block")
    parser.add_argument("--slots", type=int, help="of a portion; default: as many as in use")
    arguments = parser.parse_args(words)
    slot_bytes = arguments.layers * RUN_BYTES
    slots = arguments.slots or portion_slots(slot_bytes)
    figures = worker_side(arguments.rounds, slots * slot_bytes, arguments.layers)
    figures["scheduler"] = scheduler_side(arguments.rounds, slots)
    print(f"a portion of {slots:,} slots, {slots * slot_bytes >> 20} MiB; ms, median of {arguments.rounds}")
    for name, value in figures.items():
        print(f"  {name:32s} {value:9.3f}")
    ratio = figures["zero"] / figures["store as much"]
    print(f"  zeroing takes {ratio:.0%} of the time of a store of as many bytes")
    return {"ms": figures, "slots": slots, "share_of_a_store": ratio}


if __name__ == "__main__":
    main()
