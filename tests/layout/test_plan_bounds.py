"""What a peer may state of its caches: whatever it is, planning ends soon, takes little memory and says what is wrong.

Covers: layout.plan, layout.context_parallel, layout.sharding.
"""

import tracemalloc
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from layout.compatibility import IncompatibleCachesError
from layout.context_parallel import TokenSplit
from layout.geometry import CacheGroup, Plane, WorkerGeometry
from layout.plan import PlanError, compile_plans
from layout.sharding import choose_sources

LAYERS = tuple(f"layers.{number}" for number in range(128))
#: Bytes: what numpy may hold at a time. Without a bound, these cases take from twenty times as much to all there is.
MOST_BYTES = 1 << 28
TOO_MUCH = "reading from the other engine would take .* Start both engines with the same parallel sizes"


def a_plane(heads: int = 8, rows: int = 128, layers: Sequence[str] = LAYERS, **changes: Any) -> Plane:
    """Keys of layers whose blocks lie one behind the other, the heads of a token together."""
    head, token, block = 256, heads * 256, rows * heads * 256
    whole = Plane(
        "k", tuple(layers), 0, heads, rows, 128, 2, 1024, 1 << 44, 1024 * block, block, head, token, 2, total_heads=8
    )
    return replace(whole, **changes)


def a_worker(plane: Plane, block_tokens: int = 128, rank: int = 0, ranks: int = 1) -> WorkerGeometry:
    return WorkerGeometry(rank, ranks, 0, 1, f"host:{rank}", (CacheGroup(block_tokens, 0, (plane,)),), ())


def sharing(interleave: int, ranks: int, rows: int = 128, layers: Sequence[str] = LAYERS) -> list[WorkerGeometry]:
    """Workers of one KV head that share tokens."""
    plane = a_plane(1, rows, layers, total_heads=1)
    splits = [TokenSplit(interleave, ranks, rank) for rank in range(ranks)]
    return [a_worker(replace(plane, tokens=split), rows * ranks, split.rank, ranks) for split in splits]


def runs_of(local: WorkerGeometry, remotes: Sequence[WorkerGeometry]) -> int:
    plans = compile_plans(local, remotes, choose_sources(local, remotes))
    return sum(plan.runs for plan in plans.values())


def peak_bytes(local: WorkerGeometry, remotes: Sequence[WorkerGeometry]) -> int:
    """The memory that refusing an engine takes."""
    tracemalloc.start()
    try:
        with pytest.raises((PlanError, IncompatibleCachesError, ValueError), match=TOO_MUCH):
            compile_plans(local, remotes, choose_sources(local, remotes))
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


# What engines are


def test_tokens_whose_heads_lie_together_may_each_be_a_run() -> None:
    remotes = [a_worker(a_plane(1, 512, head_start=head), 512, head, 8) for head in range(8)]
    assert runs_of(a_worker(a_plane(8, 512), 512), remotes) == 8 * 512 * 128


@pytest.mark.parametrize("interleave", [1, 128])
def test_sixty_four_ranks_may_share_tokens_in_any_way(interleave: int) -> None:
    whole = a_worker(a_plane(1, layers=LAYERS[:2], total_heads=1))
    there = sharing(interleave, 64, layers=LAYERS[:2])
    assert runs_of(whole, there) > 0
    assert runs_of(there[5], sharing(1024, 48, 1024, LAYERS[:2])) > 0


# What none is


def test_a_stride_off_by_a_factor_is_refused_before_every_item_is_a_run() -> None:
    twice = a_plane(content_stride=4)
    assert peak_bytes(a_worker(a_plane()), [a_worker(twice)]) < MOST_BYTES


def test_many_planes_that_are_each_cut_a_little_are_refused_together() -> None:
    local = a_worker(a_plane())
    groups = tuple(CacheGroup(128, 0, (a_plane(layers=[layer], content_stride=4),)) for layer in LAYERS)
    assert peak_bytes(local, [replace(local, groups=groups)]) < MOST_BYTES


@pytest.mark.parametrize("interleave", [500_000, 350_003])
def test_runs_that_no_block_could_hold_are_refused(interleave: int) -> None:
    assert peak_bytes(a_worker(a_plane(1, 8, total_heads=1), 8), sharing(interleave, 2, 8)) < MOST_BYTES


def test_layers_that_different_primes_of_ranks_share_are_refused() -> None:
    """All of them recur together after ten million tokens."""
    primes = [2, 3, 5, 7, 11, 13, 17, 19]
    by_layer = [sharing(1, prime, 16, [layer]) for layer, prime in zip(LAYERS, primes, strict=False)]
    groups = [tuple(each[rank].groups[0] for each in by_layer if rank < len(each)) for rank in range(primes[-1])]
    remotes = [replace(by_layer[-1][rank], groups=groups[rank]) for rank in range(primes[-1])]
    local = a_worker(a_plane(1, 16, LAYERS[: len(primes)], total_heads=1), 16)
    assert peak_bytes(local, remotes) < MOST_BYTES


def test_more_ranks_than_there_are_workers_are_not_gone_through() -> None:
    (rank, *_) = sharing(1, 2)
    split = replace(rank.groups[0].planes[0], tokens=TokenSplit(1, 1 << 20, 0))
    with pytest.raises(IncompatibleCachesError, match="only for other heads or tokens"):
        choose_sources(a_worker(a_plane(1, total_heads=1)), [a_worker(split)])
