"""How long it takes to turn the blocks of a long request into descriptors: ``python -m benchmarks.planning``.

Plans are compiled once per peer. For every pull they are instantiated and its reads are scheduled, on the pull threads
of the decode workers, which share the interpreter with the model. Both together have targets: see ``CASES``. Times are
of all the ranks that a pull reads from together.
"""

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from layout.copies import Copies
from layout.cost import CostModel
from layout.geometry import CacheGroup, Plane, Region, WorkerGeometry
from layout.plan import BlockTable, Plan, compile_plans
from layout.regions import RegionTable
from layout.sharding import choose_sources, held_heads
from layout.staging import Schedule, schedule_reads, warm_up
from pd_connector.worker.remote_reader import for_each_rank

LAYERS = 80
KV_HEADS = 8
CONTENT = 256  # K and V of one head, 128 items each
ITEM_SIZE = 2
BLOCK_TOKENS = 16
COST = CostModel.of_protocol("tcp")
SLOT = Region(1 << 61, 16 << 20)  # what a pull gets of a staging buffer of 64 MiB
EVERYTHING = RegionTable([Region(1, 1 << 60)])  # is registered on both sides
ROUNDS = 15


@dataclass(frozen=True)
class Case:
    """One line of the table."""

    layout: str
    tokens: int
    local_tp: int
    remote_tp: int
    contiguous: bool
    target_ms: float


CASES = [
    Case(layout, tokens, local_tp, remote_tp, contiguous, target_ms)
    for tokens, remote_tp, local_tp, target_ms in [(32_768, 1, 1, 5.0), (131_072, 2, 1, 20.0), (131_072, 1, 2, 20.0)]
    for layout in ("BHLNC", "BLHNC", "LBHNC")
    for contiguous in (True, False)
]


def worker(layout: str, tp_size: int, tp_rank: int, blocks: int) -> WorkerGeometry:
    """A rank whose whole cache is one plane in ``layout``; only addresses, no memory."""
    start, end = held_heads(KV_HEADS, tp_size, tp_rank)
    sizes = {"L": LAYERS, "B": blocks, "H": end - start, "N": BLOCK_TOKENS, "C": CONTENT}
    strides, stride = {}, ITEM_SIZE
    for axis in reversed(layout):
        strides[axis] = stride
        stride *= sizes[axis]
    plane = Plane(
        part="kv",
        layers=tuple(f"model.layers.{layer}" for layer in range(LAYERS)),
        head_start=start,
        heads=end - start,
        block_tokens=BLOCK_TOKENS,
        content=CONTENT,
        item_size=ITEM_SIZE,
        blocks=blocks,
        address=1 << 40,
        layer_stride=strides["L"],
        block_stride=strides["B"],
        head_stride=strides["H"],
        token_stride=strides["N"],
        content_stride=strides["C"],
    )
    return WorkerGeometry(tp_rank, tp_size, 0, 1, "", (CacheGroup(BLOCK_TOKENS, 0, (plane,)),), ())


def compiled(case: Case) -> dict[int, Plan]:
    """The plans of the first local rank."""
    blocks = 2 * case.tokens // BLOCK_TOKENS
    local = worker(case.layout, case.local_tp, 0, blocks)
    remotes = [worker(case.layout, case.remote_tp, rank, blocks) for rank in range(case.remote_tp)]
    return compile_plans(local, remotes, choose_sources(local, remotes))


def table(case: Case, seed: int) -> list[BlockTable]:
    """Block ids of the request on one side: neighbours, or drawn from the whole cache."""
    blocks = case.tokens // BLOCK_TOKENS
    ids = np.arange(blocks) if case.contiguous else np.random.default_rng(seed).permutation(2 * blocks)[:blocks]
    return [BlockTable.of(ids)]


def median_ms(work: Callable[[], object]) -> float:
    """Median wall time of ``ROUNDS`` runs after one to warm up."""
    work()
    times = []
    for _ in range(ROUNDS):
        begin = time.perf_counter()
        work()
        times.append(time.perf_counter() - begin)
    return statistics.median(times) * 1000


def measure(case: Case) -> tuple[str, dict[str, float]]:
    """One line of the table, and its figures.

    All remote ranks at once on threads, as in a pull, and their descriptors together.
    """
    plans = compiled(case)
    ranks = list(plans)
    local, remote = table(case, 1), table(case, 2)

    def instantiate() -> dict[int, Copies]:
        return for_each_rank(lambda rank: plans[rank].instantiate(local, remote, 0, case.tokens), ranks)

    def schedule(staging: Region | None) -> dict[int, Schedule]:
        return for_each_rank(lambda rank: schedule_reads(batches[rank], COST, EVERYTHING, EVERYTHING, staging), ranks)

    batches = instantiate()
    descriptors = sum(plan.descriptors for plan in schedule(SLOT).values())
    instantiate_ms = median_ms(instantiate)
    staged_ms, direct_ms = median_ms(lambda: schedule(SLOT)), median_ms(lambda: schedule(None))
    compile_ms, slowest_ms = median_ms(lambda: compiled(case)), instantiate_ms + max(staged_ms, direct_ms)
    line = (
        f"{case.layout:6} {case.tokens:7,}  {case.remote_tp:4}->{case.local_tp}  "
        f"{'adjacent' if case.contiguous else 'fragmented':10} {sum(map(len, batches.values())):9,} {descriptors:9,} "
        f"{compile_ms:8.2f} {instantiate_ms:11.2f} {staged_ms:7.2f} {direct_ms:7.2f} "
        f"{slowest_ms:6.2f}  {'under' if slowest_ms < case.target_ms else 'OVER':>5} {case.target_ms:2.0f}"
    )
    return line, {"descriptors": descriptors, "compile_ms": compile_ms, "sum_ms": slowest_ms}


def main(words: Sequence[str] | None = None) -> dict[str, Any]:
    """Measure all cases, one line each."""
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args(words)
    warm_up()
    print(f"{LAYERS} layers, {KV_HEADS} KV heads of 2 x 128 x {ITEM_SIZE} bytes, blocks of {BLOCK_TOKENS} tokens")
    print("milliseconds; sum: instantiating and scheduling, with staging or without, whichever takes longer")
    print(
        "layout  tokens  TP P->D  block ids       runs  descript.  compile instantiate  staged  direct    sum  target"
    )
    figures = {}
    for case in CASES:
        kind = "adjacent" if case.contiguous else "fragmented"
        name = f"{case.layout} {case.tokens} tokens TP {case.remote_tp} to {case.local_tp} {kind}"
        line, figures[name] = measure(case)
        print(line)
    return figures


if __name__ == "__main__":
    main()
