"""How long the geometry of the host-memory tier takes: ``python -m benchmarks.host_blocks``.

Compiled once, when a worker's caches are known; descriptors are made for every batch of blocks that is stored or
loaded, beside the model. Only addresses: no memory is touched.
"""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from benchmarks.planning import KV_HEADS, LAYERS, median_ms, worker
from layout.copies import Int64Array
from layout.geometry import CacheGroup, Plane, Region, WorkerGeometry
from layout.host_blocks import host_layout

DESCRIPTORS = 10_240
BLOCKS = 20_480  # on the device as in host memory
TARGET_MS = 1.0
COMPILED_LAYOUTS = ("BHLNC", "BLHNC", "BLNHC", "LBHNC", "LBNHC", "LHBNC")


@dataclass(frozen=True)
class Case:
    """One line of the table of batches."""

    layout: str
    layers: int
    blocks: int  # of the batch
    ids: str  # "random": blocks and slots drawn from all; "adjacent": each next to the one before; "paired": two by two


CASES = [
    Case("LBHNC", 32, DESCRIPTORS // 32, "random"),
    Case("LBHNC", 32, DESCRIPTORS // 32, "adjacent"),
    Case("BLHNC", 32, DESCRIPTORS, "random"),
    Case("BHLNC", 32, DESCRIPTORS, "random"),
    Case("BHLNC", 32, DESCRIPTORS, "paired"),
    Case("BHLNC", 32, DESCRIPTORS, "adjacent"),
]


def cache(layout: str, layers: int, block_tokens: int = 16, *, split: bool = False) -> WorkerGeometry:
    """A rank's cache in ``layout``; ``split``: the same bytes, described as K and V."""
    whole = worker(layout, 1, 0, BLOCKS)
    plane = whole.groups[0].planes[0]
    sizes = {"L": layers, "B": BLOCKS, "H": KV_HEADS, "N": block_tokens, "C": plane.content}
    strides, stride = {}, plane.item_size
    for axis in reversed(layout):
        strides[axis], stride = stride, stride * sizes[axis]
    plane = replace(
        plane,
        layers=plane.layers[:layers],
        block_tokens=block_tokens,
        layer_stride=strides["L"],
        block_stride=strides["B"],
        head_stride=strides["H"],
        token_stride=strides["N"],
    )
    planes = _split(plane) if split else (plane,)
    return replace(whole, groups=(CacheGroup(block_tokens, 0, planes),))


def _split(plane: Plane) -> tuple[Plane, Plane]:
    half = plane.content // 2
    return (
        replace(plane, part="k", content=half),
        replace(plane, part="v", content=half, address=plane.address + half * plane.item_size),
    )


def pairs(case: Case) -> tuple[Int64Array, Int64Array]:
    """Block ids and slots of a batch."""
    if case.ids == "adjacent":
        return np.arange(case.blocks), np.arange(case.blocks)
    draw = np.random.default_rng(7)
    together = 2 if case.ids == "paired" else 1

    def ids() -> Int64Array:
        rows = draw.permutation(BLOCKS // together)[: case.blocks // together]
        return np.asarray(np.add.outer(rows * together, np.arange(together)).ravel(), np.int64)

    return ids(), ids()


def measure(case: Case) -> tuple[str, dict[str, float]]:
    """One line, and its figures: stores and loads of a batch, to descriptors."""
    layout = host_layout(cache(case.layout, case.layers))
    pool = Region(1 << 45, BLOCKS * layout.slot_bytes)
    blocks, slots = pairs(case)
    store_ms = median_ms(lambda: layout.stores(pool, 0, blocks, slots))
    load_ms = median_ms(lambda: layout.loads(pool, 0, blocks, slots))
    slowest_ms = max(store_ms, load_ms)
    descriptors = len(layout.stores(pool, 0, blocks, slots))
    line = (
        f"{case.layout:6} {case.layers:6}  {case.blocks:6,}  {case.ids:8} "
        f"{descriptors:11,} {store_ms:9.3f} {load_ms:9.3f}  "
        f"{'under' if slowest_ms < TARGET_MS else 'OVER'} {TARGET_MS:.0f} ms"
    )
    return line, {"descriptors": descriptors, "store_ms": store_ms, "load_ms": load_ms}


def measure_compiling(layout: str) -> str:
    """One line: runs of a block and milliseconds to find them, K and V fused and split, small and large blocks."""
    columns = []
    for block_tokens in (16, 64):
        for split in (False, True):
            geometry = cache(layout, LAYERS, block_tokens, split=split)
            compiled = host_layout(geometry)
            columns.append(f"{len(compiled.groups[0]):5} {median_ms(partial(host_layout, geometry)):8.2f}")
    return f"{layout:6} " + "  ".join(columns)


def main(words: Sequence[str] | None = None) -> dict[str, Any]:
    """Measure all cases, one line each."""
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args(words)
    print("descriptors of a batch, median milliseconds")
    print("layout layers  blocks  ids      descriptors    stores     loads")
    figures = {}
    for case in CASES:
        line, figures[f"{case.layout} {case.layers} layers, {case.blocks} {case.ids} blocks"] = measure(case)
        print(line)
    print(f"compiling {LAYERS} layers, {KV_HEADS} KV heads: runs of a block, median milliseconds")
    print("       16 tokens, fused   16, K and V    64, fused       64, K and V")
    for layout in COMPILED_LAYOUTS:
        print(measure_compiling(layout))
    return figures


if __name__ == "__main__":
    main()
