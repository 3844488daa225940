"""Pulls of one request's states, against one contiguous read of as many bytes: ``python -m benchmarks.states``.

The states are those of 32 layers of gated delta net as in Qwen3-Next-80B: 2 MiB a layer for the recurrence in float32,
48 KiB for the convolution. A process of its own holds those of all prefill ranks; this one reads as decode rank 0, with
the plans, schedules and copies of the connector. In one run, in turn; medians over the rounds. Every pull's bytes are
compared before.
"""

import argparse
import statistics
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from benchmarks.apart import start_apart
from benchmarks.unequal import HOST, Memory
from layout.copies import Copies
from layout.cost import CostModel
from layout.geometry import CacheGroup, Plane, Region, WorkerGeometry
from layout.plan import BlockTable, compile_plans
from layout.regions import RegionTable
from layout.sharding import choose_sources, held_heads
from pd_connector.worker.remote_reader import RemoteReader
from transfer.engine.mooncake import MooncakeEngine, MooncakeOptions

LAYERS, BLOCKS, ROWS = 32, 3, 3
KEY_HEADS, VALUE_HEADS, SIZE = 16, 32, 128
#: Parts of the convolution, in the order of its columns: name, heads, columns of each.
CONVOLUTION = (("conv_q", KEY_HEADS, SIZE), ("conv_k", KEY_HEADS, SIZE), ("conv_v", VALUE_HEADS, SIZE))
PAIRS = ((1, 1), (2, 1), (1, 2))  # prefill and decode ranks
TABLE = BlockTable.of([1])


def geometry(memory: Memory, tp_rank: int, tp_size: int, address: str) -> WorkerGeometry:
    """One rank's states over ``memory``: all layers of a block together, rows of a convolution outside its columns."""
    page, base = page_bytes(tp_size), memory.ctypes.data
    columns = sum(heads * size for _, heads, size in CONVOLUTION) // tp_size

    def plane(part: str, total: int, rows: int, content: int, item: int, offset: int, head_stride: int) -> Plane:
        start, end = held_heads(total, tp_size, tp_rank)
        return Plane(
            part=part, layers=tuple(f"layers.{i}" for i in range(LAYERS)), head_start=start, heads=end - start,
            block_tokens=rows, content=content, item_size=item, blocks=BLOCKS, address=base + offset,
            layer_stride=page, block_stride=LAYERS * page, head_stride=head_stride,
            token_stride=columns * item, content_stride=item, total_heads=total,
        )  # fmt: skip

    planes, first = [], 0
    for part, heads, size in CONVOLUTION:
        planes.append(plane(part, heads, ROWS, size, 2, 2 * first, 2 * size))
        first += heads * size // tp_size
    planes.append(plane("state", VALUE_HEADS, 1, SIZE * SIZE, 4, ROWS * columns * 2, 4 * SIZE * SIZE))
    group = CacheGroup(2**15, 0, tuple(planes), states=True)
    return WorkerGeometry(tp_rank, tp_size, 0, 1, address, (group,), (Region(base, memory.nbytes),))


def page_bytes(tp_size: int) -> int:
    """Bytes of a layer's state on a rank."""
    columns = sum(heads * size for _, heads, size in CONVOLUTION)
    return (ROWS * columns * 2 + VALUE_HEADS * SIZE * SIZE * 4) // tp_size


def heads_of(worker: WorkerGeometry, memory: Memory) -> Iterator[tuple[tuple[str, int, int], Memory]]:
    """Yield part, layer and head, and a view of what block 1 has of it, [rows, bytes]."""
    for plane in worker.groups[0].planes:
        for layer in range(LAYERS):
            for head in range(plane.heads):
                offset = plane.address - memory.ctypes.data + plane.block_stride
                offset += layer * plane.layer_stride + head * plane.head_stride
                shape, strides = (plane.block_tokens, plane.content * plane.item_size), (plane.token_stride, 1)
                view = np.lib.stride_tricks.as_strided(memory[offset:], shape, strides)
                yield (plane.part, layer, plane.head_start + head), view


def expected(name: tuple[str, int, int]) -> int:
    """The byte that fills a head."""
    part, layer, head = name
    return (len(part) * 31 + ord(part[-1]) + layer * 7 + head * 101) % 251


def serve(pipe: Connection) -> None:
    """All prefill ranks of all pairs."""
    engines, memories = [], []
    workers: dict[int, list[WorkerGeometry]] = {}
    for tp_size in sorted({prefill for prefill, _ in PAIRS}):
        workers[tp_size] = []
        for tp_rank in range(tp_size):
            memory = np.full(BLOCKS * LAYERS * page_bytes(tp_size), 1, np.uint8)
            engine = MooncakeEngine(MooncakeOptions(HOST))
            worker = geometry(memory, tp_rank, tp_size, engine.address)
            for name, view in heads_of(worker, memory):
                view[:] = expected(name)
            engine.register(worker.regions)
            engines.append(engine)
            memories.append(memory)
            workers[tp_size].append(worker)
    pipe.send(workers)
    pipe.recv()
    for engine in engines:
        engine.close()


def main(words: Sequence[str] | None = None) -> dict[str, Any]:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20)
    arguments = parser.parse_args(words)
    pipe, process = start_apart(serve)
    workers: dict[int, list[WorkerGeometry]] = pipe.recv()
    print(f"\nstates of {LAYERS} layers, {LAYERS * page_bytes(1) / 2**20:.1f} MiB, median of {arguments.rounds}")
    figures = {f"TP {p} to {d}": _measure(workers[p], d, arguments.rounds) for p, d in PAIRS}
    for name, figure in figures.items():
        print(
            f"  {name:12s} {figure['descriptors']:6,} descriptors {figure['ms']:8.1f} ms   {figure['ratio']:5.2f} times"
        )
    pipe.send(None)
    process.join(10)
    return figures


def _measure(remotes: list[WorkerGeometry], decode: int, rounds: int) -> dict[str, float]:
    memory = np.full(BLOCKS * LAYERS * page_bytes(decode), 1, np.uint8)
    engine = MooncakeEngine(MooncakeOptions(HOST))
    local = geometry(memory, 0, decode, engine.address)
    reads = RemoteReader.with_staging(CostModel.of_protocol("tcp"), local.regions, 64 << 20)
    engine.register((*local.regions, *reads.regions))
    plans = compile_plans(local, remotes, choose_sources(local, remotes))
    links = {rank: engine.open(remotes[rank].engine_address, remotes[rank].regions) for rank in plans}
    regions = {rank: RegionTable(remotes[rank].regions) for rank in plans}
    wanted = sum(plan.state_bytes for plan in plans.values())

    def read(rank: int) -> int:
        copies = plans[rank].instantiate_states([TABLE], [TABLE], 100)
        with reads.planned(copies, regions[rank]) as schedule:
            reads.carry_out(links[rank], schedule, 60.0)
            return schedule.descriptors

    def pull() -> int:
        with ThreadPoolExecutor(len(plans)) as threads:
            return sum(threads.map(read, plans))

    def contiguous() -> None:
        rank = next(iter(plans))
        size = min(wanted, remotes[rank].regions[0].size)
        addresses = (memory.ctypes.data, remotes[rank].regions[0].address, size)
        links[rank].read(Copies(*(np.array([value], np.int64) for value in addresses)), 60.0)

    descriptors = pull()
    for name, view in heads_of(local, memory):
        assert (view == expected(name)).all(), f"wrong bytes of {name}"
    seconds: dict[str, list[float]] = {"pull": [], "contiguous": []}
    for _ in range(rounds):
        for way, run in (("pull", pull), ("contiguous", contiguous)):
            start = time.perf_counter()
            run()
            seconds[way].append(time.perf_counter() - start)
    engine.close()
    took, base = statistics.median(seconds["pull"]), statistics.median(seconds["contiguous"])
    return {"descriptors": descriptors, "ms": 1e3 * took, "ratio": took / base}


if __name__ == "__main__":
    main()
