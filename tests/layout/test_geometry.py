"""What follows from the numbers of a geometry. What planning makes of them is in the other modules here."""

from dataclasses import FrozenInstanceError, replace

import pytest

from layout.geometry import CacheGroup, Plane, Region, WorkerGeometry

#: Two layers, heads 4 to 7, blocks of 16 tokens of 128 items; heads and blocks lie further apart than they are long.
PLANE = Plane("kv", ("a", "b"), 4, 3, 16, 128, 2, 10, 1 << 20, 1 << 16, 1 << 14, 4608, 256, 2)


def test_the_end_of_a_region_is_behind_its_last_byte() -> None:
    assert Region(4096, 10).end == 4106


def test_heads_are_counted_over_all_ranks() -> None:
    assert PLANE.head_end == 7


def test_bytes_of_a_block_are_those_of_its_items_without_the_gaps() -> None:
    assert PLANE.block_bytes == 2 * 3 * 16 * 128 * 2


def test_a_group_holds_the_layers_of_all_its_planes_once() -> None:
    group = CacheGroup(16, 0, (replace(PLANE, part="k"), replace(PLANE, part="v"), replace(PLANE, layers=("c",))))
    assert group.layers == {"a", "b", "c"}


def test_a_worker_adds_up_the_blocks_of_all_groups() -> None:
    groups = (
        CacheGroup(16, 0, (PLANE, PLANE)),
        CacheGroup(32, 8, (replace(PLANE, layers=("c",)),)),
        CacheGroup(16, 0, ()),
    )
    worker = WorkerGeometry(0, 1, 0, 1, "10.0.0.5:15000", groups, ())
    assert worker.block_bytes == 2 * PLANE.block_bytes + PLANE.block_bytes // 2


def test_what_one_side_told_the_other_does_not_change() -> None:
    with pytest.raises(FrozenInstanceError):
        PLANE.heads = 1  # type: ignore[misc]
