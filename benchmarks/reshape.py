"""How fast local copies are, against memcpy of the same bytes: ``python -m benchmarks.reshape``.

The last step of a staged pull: tokens and heads change places (NHD to HND), or the heads of 2, 4 or 8 prefill ranks
are merged, rank after rank, as their pulls arrive. Every case and the plain copy take turns in one run; the tensor
operators that do the same on devices are run on CPU tensors, which says what the host does for them, and nothing of a
device. Then how long it takes to plan such a pull, which happens beside the model.
"""

import argparse
import ctypes
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from benchmarks.planning import CASES, Case, compiled, table
from layout.copies import Copies
from layout.cost import CostModel
from layout.geometry import Region
from layout.regions import RegionTable
from layout.staging import Schedule, schedule_reads
from transfer.local_copy.reshape import run_copies, warm_up
from transfer.local_copy.reshape_torch import TensorCopier

HEADS, BLOCK_TOKENS, HEAD_BYTES = 8, 32, 128 * 2
TARGET = 0.6
BUDGET = 64 << 20  # bytes of staging for the planning cases
MERGE = "merge of {} ranks"
TRANSPOSE = "NHD -> HND"
OPERATORS = "merge of 2 ranks, operators"


def page_aligned(size: int) -> npt.NDArray[np.uint8]:
    """Memory as KV caches and staging buffers have it, written once so that its pages exist."""
    memory = np.ones(size + 4096, np.uint8)
    start = -memory.ctypes.data % 4096
    return memory[start : start + size]


def transpose(tokens: int) -> list[Copies]:
    """Head runs of NHD blocks in the order of the source, to HND blocks."""
    runs = np.arange(tokens * HEADS, dtype=np.int64)
    token, head = np.divmod(runs, HEADS)
    block, token = np.divmod(token, BLOCK_TOKENS)
    to = ((block * HEADS + head) * BLOCK_TOKENS + token) * HEAD_BYTES
    return [Copies(to, runs * HEAD_BYTES, np.full(len(runs), HEAD_BYTES, np.int64))]


def merge(tokens: int, ranks: int) -> list[Copies]:
    """One batch a rank: its share of the heads of every token, to the cache that has them all."""
    run = HEADS // ranks * HEAD_BYTES
    token = np.arange(tokens, dtype=np.int64)
    return [
        Copies((token * ranks + rank) * run, (rank * tokens + token) * run, np.full(tokens, run, np.int64))
        for rank in range(ranks)
    ]


def seconds(action: Callable[[], object]) -> float:
    """Wall time of one call."""
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


def moves(megabytes: int, rounds: int) -> dict[str, dict[str, float]]:
    """Print a line for each case: median, rate, and the rate as a share of memcpy's; return them by the case."""
    tokens = (megabytes << 20) // (HEADS * HEAD_BYTES)
    source, target = page_aligned(megabytes << 20), page_aligned(megabytes << 20)

    operators = TensorCopier([torch.from_numpy(target)], [torch.from_numpy(source)])

    def placed(parts: list[Copies], copy: Callable[[Copies], None] = run_copies) -> Callable[[], None]:
        here, there = target.ctypes.data, source.ctypes.data
        batches = [Copies(part.destinations + here, part.sources + there, part.sizes) for part in parts]

        def run() -> None:
            for batch in batches:
                copy(batch)

        return run

    cases: dict[str, Callable[[], object]] = {
        "memcpy": lambda: ctypes.memmove(target.ctypes.data, source.ctypes.data, source.nbytes),
        TRANSPOSE: placed(transpose(tokens)),
        **{MERGE.format(ranks): placed(merge(tokens, ranks)) for ranks in (2, 4, 8)},
        OPERATORS: placed(merge(tokens, 2), operators),
    }
    spent: dict[str, list[float]] = {name: [] for name in cases}
    for round_number in range(-2, rounds):
        for name, action in cases.items():
            elapsed = seconds(action)
            if round_number >= 0:
                spent[name].append(elapsed)
    reference = statistics.median(spent["memcpy"])
    figures = {}
    print(f"\n{megabytes} MiB, {HEADS} heads of {HEAD_BYTES} bytes, median of {rounds}; target {TARGET:.0%} of memcpy")
    for name, values in spent.items():
        median = statistics.median(values)
        share = reference / median
        verdict = {"memcpy": "", OPERATORS: f"{share:6.0%}"}.get(
            name, f"{share:6.0%}  {'reached' if share >= TARGET else 'MISSED'}"
        )
        print(f"  {name:28s} {1e3 * median:8.2f} ms {source.nbytes / median / 1e9:6.2f} GB/s {verdict}")
        figures[_key(name)] = {"ms": 1e3 * median, "share": share}
    return figures


def plan(case: Case, rounds: int) -> dict[str, dict[str, float]]:
    """Print the median time to schedule the largest pull of a case, and what comes out; return it by its name."""
    everything = RegionTable([Region(1, 1 << 60)])
    copies = next(iter(compiled(case).values())).instantiate(table(case, 1), table(case, 2), 0, case.tokens)

    def schedule() -> Schedule:
        cost = CostModel.of_protocol("tcp")
        return schedule_reads(copies, cost, everything, everything, Region(1 << 61, BUDGET))

    result = schedule()
    median = statistics.median(seconds(schedule) for _ in range(rounds))
    name = f"{case.layout} TP {case.remote_tp}->{case.local_tp} {'adjacent' if case.contiguous else 'fragmented'}"
    print(f"  {name:30s} {len(copies):8,} planned in {1e3 * median:6.2f} ms\n      {result.describe()}")
    return {_key(name): {"runs": len(copies), "ms": 1e3 * median}}


def _key(name: str) -> str:
    """Return a case's name as pages can refer to it, in which ``>`` ends a mark."""
    return name.replace(" -> ", " to ").replace("->", " to ")


def main(words: Sequence[str] | None = None) -> dict[str, Any]:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    arguments = parser.parse_args(words)
    warm_up()
    torch.set_num_threads(1)  # as all other copies here
    copied = {f"{megabytes} MiB": moves(megabytes, arguments.rounds) for megabytes in (4, 64)}
    planned: dict[str, dict[str, float]] = {}
    print(
        "\nscheduling of pulls of 131,072 tokens, or of 20,480 where each layer is apart; target 20 ms for 100,000 runs"
    )
    for case in CASES:
        if case.remote_tp != case.local_tp and not (case.layout == "LBHNC" and case.contiguous):
            planned |= plan(replace(case, tokens=20_480) if case.layout != "BHLNC" else case, arguments.rounds)
    return {"copied": copied, "planned": planned}


if __name__ == "__main__":
    main()
