"""The caches that are made for what a prefill engine describes: pulls into them bring the right bytes, in few runs."""

import ctypes
import threading
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from layout.conversion import physical_order
from layout.geometry import Identity, WorkerGeometry
from layout.plan import compile_plans
from layout.sharding import choose_sources
from pd_connector.doctor.decode import Sizes, at, decode_geometry, imagined_blocks, local_blocks, tables_of
from pd_connector.worker.checksums import CacheChecksums
from tests.support.connector.engines import placed
from tests.support.layout.oracle import LAYOUTS, Engine, Model, Rank, Table, build
from transfer.memory import HostMemory

FUSED = Model(kv_heads=4, contents=(6, 10), item_size=2, groups=((0, 1, 2),), windows=(0,))
WINDOWED = Model(kv_heads=4, contents=(8, 8), item_size=2, groups=((0, 2), (1, 3)), windows=(0, 40))
TOKENS = 70
NOBODY = Identity(0, b"")

PREFILL = [
    *(Engine(layout=layout, form=form, blocks=12) for layout in LAYOUTS for form in ("fused", "views", "apart")),
    *(
        Engine(layout=layout, form=form, blocks=12)
        for layout in ("LBHNC", "BHLNC")
        for form in ("packed", "transposed")
    ),
    Engine(layout="BHLNC", tp=4, blocks=12),
    Engine(layout="LBHNC", form="views", tp=2, pp=3, blocks=12),
    Engine(layout="BLHNC", blocks=24, kernel_blocks=2),
    Engine(layout="BHLNC", blocks=12, layers_apart=True),
]


def remote_ranks(model: Model, engine: Engine) -> list[Rank]:
    return placed(build(model, engine, seed=1, base=1 << 40))


def sums(geometry: WorkerGeometry, ids: Sequence[Sequence[int]], end: int) -> list[list[np.ndarray]]:
    found = CacheChecksums(geometry).sums(ids, 0, end, threading.Event())
    return [[plane.totals[-1] - plane.totals[0] for plane in group] for group in found]


def pulled(
    workers: Sequence[WorkerGeometry], remote: Sequence[Sequence[int]], sizes: Sizes, end: int
) -> tuple[HostMemory, WorkerGeometry, list[list[int]]]:
    """Pull into memory of the size that is asked for; that memory, its geometry and the block ids."""
    local = decode_geometry(workers, sizes, TOKENS)
    memory = HostMemory(local.regions[0].size)
    local = at(local, memory.region.address, "", "tcp", NOBODY)
    ours = local_blocks(local, remote, [group.block_tokens for group in workers[0].groups])
    plans = compile_plans(local, workers, choose_sources(local, workers))
    for plan in plans.values():
        copies = plan.instantiate(tables_of(ours), tables_of(remote), 0, end)
        for to, source, size in zip(copies.destinations, copies.sources, copies.sizes, strict=True):
            region = memory.region
            assert region.address <= to
            assert to + size <= region.end
            ctypes.memmove(int(to), int(source), int(size))
    return memory, local, ours


@pytest.mark.parametrize("engine", PREFILL, ids=str)
def test_what_is_pulled_is_what_was_leased(engine: Engine) -> None:
    ranks = remote_ranks(FUSED, engine)
    workers = [rank.geometry for rank in ranks]
    block = engine.tokens_of(0)
    ids = [5, 6, 3, 9, 2, 7, 8, 4, 1][: -(-TOKENS // block)]
    for rank in ranks:
        rank.fill([Table(0, tuple(ids))])
    _memory, local, ours = pulled(workers, [ids], Sizes(), TOKENS)
    there: dict[tuple[str, str, int], int] = {}
    for worker in workers:
        for plane, totals in zip(worker.groups[0].planes, sums(worker, [ids], TOKENS)[0], strict=True):
            for layer, name in enumerate(plane.layers):
                for head in range(plane.heads):
                    there[plane.part, name, plane.head_start + head] = int(totals[layer, head])
    here = {}
    for plane, totals in zip(local.groups[0].planes, sums(local, ours, TOKENS)[0], strict=True):
        for layer, name in enumerate(plane.layers):
            for head in range(plane.heads):
                here[plane.part, name, head] = int(totals[layer, head])
    assert here == there
    assert len(set(here.values())) == len(here)  # no two are alike, so a mix-up would show


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("form", ["fused", "views", "apart"])
def test_the_plan_has_the_runs_that_it_has_between_equal_engines(layout: str, form: str) -> None:
    engine = Engine(layout=layout, form=form, blocks=12)
    (rank,) = remote_ranks(FUSED, engine)
    workers = [rank.geometry]
    local = decode_geometry(workers, Sizes(), TOKENS)
    ours = compile_plans(local, workers, choose_sources(local, workers))
    equal = compile_plans(rank.geometry, workers, choose_sources(rank.geometry, workers))
    assert [plan.runs for plan in ours.values()] == [plan.runs for plan in equal.values()]
    assert [physical_order(plane) for plane in local.groups[0].planes] == [
        physical_order(plane) for plane in rank.geometry.groups[0].planes
    ]


@pytest.mark.parametrize("sizes", [Sizes(2), Sizes(4, 32), Sizes(1, 8)], ids=str)
def test_other_sizes(sizes: Sizes) -> None:
    engine = Engine(layout="BHLNC", tp=2, blocks=12)
    ranks = remote_ranks(FUSED, engine)
    for rank in ranks:
        rank.fill([Table(0, (5, 6, 3, 9, 2))])
    _memory, local, ours = pulled([rank.geometry for rank in ranks], [[5, 6, 3, 9, 2]], sizes, TOKENS)
    (plane,) = local.groups[0].planes
    assert (plane.head_start, plane.heads) == (0, 4 // sizes.tensor_parallel)
    assert plane.block_tokens == local.groups[0].block_tokens == (sizes.block_tokens or 16)
    assert len(ours[0]) == -(-80 // plane.block_tokens)


def test_blocks_that_are_not_held_are_not_pulled() -> None:
    """A window's passed blocks are holes on both sides; larger blocks are pulled only if all of it is held."""
    ranks = remote_ranks(WINDOWED, Engine(layout="BLHNC", blocks=12))
    workers = [rank.geometry for rank in ranks]
    remote = [[5, 6, 3, 9, 2], [0, 0, 0, 4, 7]]
    local = decode_geometry(workers, Sizes(), TOKENS)
    assert local_blocks(local, remote, [16, 16]) == [[1, 2, 3, 4, 5], [0, 0, 0, 4, 5]]
    local = decode_geometry(workers, Sizes(1, 32), TOKENS)
    assert local_blocks(local, remote, [16, 16]) == [[1, 2, 3], [0, 0, 3]]


def test_imagined_blocks_are_those_that_a_prefill_engine_could_give() -> None:
    workers = [rank.geometry for rank in remote_ranks(WINDOWED, Engine(layout="BLHNC", blocks=12))]
    full, windowed = imagined_blocks(workers, TOKENS)
    assert full == [1, 2, 3, 4, 5]
    assert windowed == [0, 1, 2, 3, 4]  # 69 - 40 = 29 tokens have passed, and with them one block
    assert len(imagined_blocks(workers, 11 * 16)[0]) == 11
    with pytest.raises(ValueError, match="a prompt of 177 tokens takes 12 blocks; the prefill engine has 12"):
        imagined_blocks(workers, 11 * 16 + 1)


def test_sizes_that_cannot_be() -> None:
    workers = [rank.geometry for rank in remote_ranks(FUSED, Engine(layout="BHLNC", form="packed", blocks=12))]
    with pytest.raises(ValueError, match="whose packing 'k_transposed' cannot be cut: choose a multiple"):
        decode_geometry(workers, Sizes(1, 24), TOKENS)
    with pytest.raises(ValueError, match="4 KV heads cannot be shared among 3 tensor-parallel ranks"):
        decode_geometry(workers, Sizes(3), TOKENS)
    with pytest.raises(ValueError, match="must be at least 1"):
        Sizes(0)


def test_heads_that_are_not_told_are_counted() -> None:
    ranks = remote_ranks(FUSED, Engine(layout="BHLNC", tp=2, blocks=12))
    silent = [
        replace(
            rank.geometry,
            groups=tuple(
                replace(group, planes=tuple(replace(plane, total_heads=0) for plane in group.planes))
                for group in rank.geometry.groups
            ),
        )
        for rank in ranks
    ]
    assert [plane.heads for plane in decode_geometry(silent, Sizes(), TOKENS).groups[0].planes] == [4]
