"""Pulls between unequal tensor-parallel sizes, against one contiguous read: ``python -m benchmarks.unequal``.

A process of its own holds the caches of all prefill ranks; this one reads, as decode rank 0 of each pair of sizes,
what a 24-layer, 3,500-token prompt needs, with and without staging. Plans, schedules, reads and copies are those of
the connector; handshake and release, which do not depend on the sizes, are left out. In one run, in turn; medians
over the rounds; ratios to one read of as many bytes as are wanted. Every pull's bytes are compared before the first
round.
"""

import argparse
import statistics
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from benchmarks.apart import start_apart
from layout.copies import Copies
from layout.cost import CostModel
from layout.geometry import CacheGroup, Plane, Region, WorkerGeometry
from layout.plan import BlockTable, Plan, compile_plans
from layout.regions import RegionTable
from layout.sharding import choose_sources, held_heads
from pd_connector.worker.remote_reader import RemoteReader
from transfer.engine.interface import Link
from transfer.engine.mooncake import MooncakeEngine, MooncakeOptions

LAYERS, KV_HEADS, HEAD_SIZE, ITEM, BLOCK_TOKENS = 24, 4, 64, 2, 32
PAGE = BLOCK_TOKENS * 2 * HEAD_SIZE * ITEM  # of one (layer, block, head)
HOST = "127.0.0.1"
PAIRS = ((2, 1), (1, 2))  # prefill and decode ranks

Layout = Literal["BHLNC", "LBHNC"]
#: Of each way to read, by its name.
Figures = dict[str, dict[str, float]]
LAYOUTS: tuple[Layout, ...] = ("BHLNC", "LBHNC")
Memory = npt.NDArray[np.uint8]


def geometry(memory: Memory, layout: Layout, tp_rank: int, tp_size: int, address: str) -> WorkerGeometry:
    """One rank's cache over ``memory``."""
    start, end = held_heads(KV_HEADS, tp_size, tp_rank)
    heads = end - start
    blocks = memory.nbytes // (LAYERS * heads * PAGE)
    if layout == "BHLNC":
        layer, block, head = PAGE, heads * LAYERS * PAGE, LAYERS * PAGE
    else:
        layer, block, head = blocks * heads * PAGE, heads * PAGE, PAGE
    plane = Plane(
        part="kv", layers=tuple(f"layers.{i}" for i in range(LAYERS)), head_start=start, heads=heads,
        block_tokens=BLOCK_TOKENS, content=2 * HEAD_SIZE, item_size=ITEM, blocks=blocks, address=memory.ctypes.data,
        layer_stride=layer, block_stride=block, head_stride=head, token_stride=2 * HEAD_SIZE * ITEM,
        content_stride=ITEM, packing="cpu", total_heads=KV_HEADS,
    )  # fmt: skip
    regions = (Region(memory.ctypes.data, memory.nbytes),)
    group = CacheGroup(BLOCK_TOKENS, 0, (plane,))
    return WorkerGeometry(tp_rank, tp_size, 0, 1, address, (group,), regions)


def by_index(memory: Memory, layout: Layout, heads: int) -> Memory:
    """A view of a cache as [layer, block, head, page], whatever its layout."""
    if layout == "BHLNC":
        return memory.reshape(-1, heads, LAYERS, PAGE).transpose(2, 0, 1, 3)
    return memory.reshape(LAYERS, -1, heads, PAGE)


def serve(pipe: Connection, blocks: int) -> None:
    """All prefill ranks of all pairs and layouts; each page is filled with a byte made from its index."""
    engines, memories = [], []
    workers: dict[tuple[Layout, int], list[WorkerGeometry]] = {}
    for layout in LAYOUTS:
        for tp_size in sorted({prefill for prefill, _ in PAIRS}):
            workers[layout, tp_size] = []
            for tp_rank in range(tp_size):
                start, end = held_heads(KV_HEADS, tp_size, tp_rank)
                memory = np.empty(LAYERS * blocks * (end - start) * PAGE, np.uint8)
                by_index(memory, layout, end - start)[:] = expected(np.arange(blocks), start, end)
                engine = MooncakeEngine(MooncakeOptions(HOST))
                worker = geometry(memory, layout, tp_rank, tp_size, engine.address)
                engine.register(worker.regions)
                engines.append(engine)
                memories.append(memory)
                workers[layout, tp_size].append(worker)
    pipe.send(workers)
    pipe.recv()
    for engine in engines:
        engine.close()


def expected(blocks: npt.NDArray[np.int64], head_start: int, head_end: int) -> Memory:
    """What P holds: one byte a page, made from layer, block and global head. Shape [layer, block, head, 1]."""
    layer, block, head = np.ix_(np.arange(LAYERS), blocks, np.arange(head_start, head_end))
    pages: Memory = ((layer * 7 + block * 31 + head * 101) % 251).astype(np.uint8)
    return pages[..., None]


@dataclass
class Reader:
    """Decode rank 0 of one pair, in one layout."""

    name: str
    layout: Layout
    heads: int
    memory: Memory
    engine: MooncakeEngine
    ways: dict[str, RemoteReader]
    plans: dict[int, Plan]
    links: dict[int, Link]
    regions: dict[int, RegionTable]
    wanted: int  # bytes

    def pull(self, planner: RemoteReader, ours: list[int], theirs: list[int], tokens: int) -> tuple[float, int]:
        """Seconds and descriptors of one pull, from all ranks at once as the connector does it."""

        def read(index: int) -> int:
            copies = self.plans[index].instantiate([BlockTable.of(ours)], [BlockTable.of(theirs)], 0, tokens)
            with planner.planned(copies, self.regions[index]) as schedule:
                planner.carry_out(self.links[index], schedule, 60.0)
                return schedule.descriptors

        start = time.perf_counter()
        with ThreadPoolExecutor(len(self.plans)) as threads:
            descriptors = sum(threads.map(read, self.plans))
        return time.perf_counter() - start, descriptors

    def contiguous(self) -> float:
        """Seconds of one read of the wanted bytes, in as few runs as the peer's memory allows: one."""
        index = next(iter(self.plans))
        region = self.regions[index].regions[0]
        run = Copies(*(np.array([value], np.int64) for value in (self.memory.ctypes.data, region.address, self.wanted)))
        start = time.perf_counter()
        self.links[index].read(run, 60.0)
        return time.perf_counter() - start

    def check(self, ours: list[int], theirs: list[int]) -> None:
        """Raise AssertionError unless every page is the right one."""
        got = by_index(self.memory, self.layout, self.heads)[:, ours]
        assert (got == expected(np.array(theirs), 0, self.heads)).all(), f"{self.name}: wrong bytes"


def main(words: Sequence[str] | None = None) -> dict[str, Any]:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=3500)
    parser.add_argument("--rounds", type=int, default=20)
    arguments = parser.parse_args(words)
    needed = -(-arguments.tokens // BLOCK_TOKENS)
    blocks = 2 * needed
    pipe, process = start_apart(serve, blocks)
    workers: dict[tuple[Layout, int], list[WorkerGeometry]] = pipe.recv()
    random = np.random.default_rng(3)
    print(f"\n{arguments.tokens} tokens, {LAYERS} layers, {KV_HEADS} KV heads, median of {arguments.rounds}")
    print(f"  {'':40s} {'descr.':>7s} {'pull':>12s}   of one contiguous read")
    figures: Figures = {}
    for layout in LAYOUTS:
        for prefill, decode in PAIRS:
            reader = _reader(layout, workers[layout, prefill], decode, blocks, needed)
            for kind in ("adjacent", "scattered"):
                anywhere = (random.permutation(blocks)[:needed].tolist() for _ in range(2))
                ours, theirs = anywhere if kind == "scattered" else (list(range(needed)), list(range(needed)))
                figures |= _measure(reader, kind, (ours, theirs), arguments.tokens, arguments.rounds)
            reader.engine.close()
    pipe.send(None)
    process.join(10)
    return figures


def _reader(layout: Layout, remotes: list[WorkerGeometry], decode: int, blocks: int, needed: int) -> Reader:
    _, heads = held_heads(KV_HEADS, decode, 0)
    memory = np.zeros(LAYERS * blocks * heads * PAGE, np.uint8)
    engine = MooncakeEngine(MooncakeOptions(HOST))
    local = geometry(memory, layout, 0, decode, engine.address)
    cost = CostModel.of_protocol("tcp")
    staged = RemoteReader.with_staging(cost, local.regions, 64 << 20)
    assert staged.staging is not None
    engine.register((*local.regions, staged.staging.region))
    plans = compile_plans(local, remotes, choose_sources(local, remotes))
    links: dict[int, Link] = {
        index: engine.open(remotes[index].engine_address, remotes[index].regions) for index in plans
    }
    ways = {"direct": RemoteReader(cost, local.regions), "planned": staged}
    regions = {index: RegionTable(remotes[index].regions) for index in plans}
    name = f"{layout}, TP {len(remotes)} to {decode}"
    return Reader(name, layout, heads, memory, engine, ways, plans, links, regions, needed * LAYERS * heads * PAGE)


def _measure(reader: Reader, kind: str, tables: tuple[list[int], list[int]], tokens: int, rounds: int) -> Figures:
    """Compare the bytes of every way, then measure all in turn, print, and return the figures."""
    for planner in reader.ways.values():
        reader.memory[:] = 255
        reader.pull(planner, *tables, tokens)
        reader.check(*tables)
    seconds: dict[str, list[float]] = {way: [] for way in (*reader.ways, "contiguous")}
    descriptors: dict[str, int] = {}
    for _ in range(rounds):
        for way, planner in reader.ways.items():
            took, descriptors[way] = reader.pull(planner, *tables, tokens)
            seconds[way].append(took)
        seconds["contiguous"].append(reader.contiguous())
    base = statistics.median(seconds["contiguous"])
    figures = {}
    for way in reader.ways:
        median = statistics.median(seconds[way])
        name = f"{reader.name}, {kind}, {way}"
        print(f"  {name:40s} {descriptors[way]:7,} {1e3 * median:9.1f} ms   {median / base:5.2f} times")
        figures[name] = {"descriptors": descriptors[way], "ms": 1e3 * median, "ratio": median / base}
    return figures


if __name__ == "__main__":
    main()
