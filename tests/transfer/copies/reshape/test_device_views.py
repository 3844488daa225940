"""Views over allocations: which are joined, where they are cut, and that they show the same memory."""

from collections.abc import Sequence
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from layout.copies import Int64Array
from layout.geometry import Region
from tests.support.memory import Memory
from transfer.copies.reshape.device_views import DeviceViews, Storage, mapped_segments

MEMORY = Memory.of_noise(1 << 16, 5)


def storages(*places: tuple[int, int, int]) -> list[Storage]:
    """Storages by (first byte, bytes, side)."""
    return [Storage(torch.from_numpy(MEMORY.view[start : start + size]), side) for start, size, side in places]


def segment(start: int, size: int) -> Region:
    return Region(MEMORY.region.address + start, size)


def shown(views: DeviceViews) -> list[tuple[int, int]]:
    """First byte and end of each view, whose bytes are compared."""
    ranges = []
    for view, start in zip(views.views, views.starts.tolist(), strict=True):
        first = start - MEMORY.region.address
        np.testing.assert_array_equal(view.numpy(), MEMORY.view[first : first + view.numel()])
        ranges.append((first, first + view.numel()))
    return ranges


def views_of(held: Sequence[Storage], segments: Sequence[Region] = (), view_bytes: int = 1 << 31) -> DeviceViews:
    return DeviceViews(held, segments, view_bytes, 100)


def numbers(views: DeviceViews, addresses: Int64Array) -> list[int]:
    """Return the number of the view of each address."""
    return (np.searchsorted(views.starts, addresses, side="right") - 1).tolist()  # type: ignore[no-any-return]


APART = ((0, 1000, 0), (1500, 1000, 0), (3000, 500, 0))


def test_allocations_of_no_known_segment_are_views_of_their_own() -> None:
    assert shown(views_of(storages(*APART))) == [(0, 1000), (1500, 2500), (3000, 3500)]


def test_neighbours_in_one_segment_are_one_view_which_shows_what_lies_between_them() -> None:
    assert shown(views_of(storages(*APART), [segment(0, 4000)])) == [(0, 3500)]


@pytest.mark.parametrize("segments", [[(0, 2600), (2600, 1400)], [(0, 2500)], [(0, 3499)]])
def test_an_allocation_that_is_not_all_in_the_segment_is_not_joined(segments: list[tuple[int, int]]) -> None:
    views = views_of(storages(*APART), [segment(*one) for one in segments])
    assert shown(views) == [(0, 2500), (3000, 3500)]


def test_an_allocation_of_the_other_side_parts_its_neighbours() -> None:
    held = storages((0, 1000, 0), (1000, 1000, 0), (2000, 1000, 1), (3000, 1000, 0), (4000, 1000, 0))
    assert shown(views_of(held, [segment(0, 8000)])) == [(0, 2000), (2000, 3000), (3000, 5000)]


def test_views_are_cut_between_allocations_where_that_is_possible() -> None:
    held = storages(*((start, 1000, 0) for start in range(0, 5000, 1000)))
    views = views_of(held, [segment(0, 5000)], 2500)
    assert shown(views) == [(0, 2600), (2000, 4600), (4000, 5000)]
    assert numbers(views, views.starts + 999) == [0, 1, 2]


def test_an_allocation_larger_than_a_view_has_several_and_a_run_ends_where_it_starts() -> None:
    views = views_of(storages((0, 10, 0), (100, 5000, 0)), [segment(0, 5200)], 2000)
    assert shown(views) == [(0, 2100), (100, 2200), (2100, 4200), (4100, 5100)]
    assert numbers(views, np.array([2099, 2100]) + MEMORY.region.address) == [1, 2]


def test_without_a_tensor_over_an_address_each_allocation_is_a_view(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch._C, "_construct_storage_from_data_pointer")
    assert shown(views_of(storages(*APART), [segment(0, 4000)])) == [(0, 1000), (1500, 2500), (3000, 3500)]


def test_the_segments_of_a_device_are_those_that_its_allocator_states(monkeypatch: pytest.MonkeyPatch) -> None:
    held = [{"device": number, "address": 4096 * (number + 1), "total_size": 1 << 21} for number in (0, 1, 1)]
    monkeypatch.setattr(torch, "get_device_module", lambda device: SimpleNamespace(memory_snapshot=lambda: held))
    assert mapped_segments(torch.device("cuda", 1)) == [Region(8192, 1 << 21)] * 2
    monkeypatch.setattr(torch, "get_device_module", lambda device: SimpleNamespace())
    assert mapped_segments(torch.device("cuda", 1)) == []
    assert mapped_segments(torch.device("cpu")) == []
