"""Batches of copies on the simulated runtime: what CANN's checks, and what is under way when it fails.

These are the rules that a backend for ``aclrtMemcpyBatchAsync`` has to keep.
"""

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch

INVALID_ACL, INVALID, UNSUPPORTED = 100000, 107000, 207000
HOST, DEVICE = 0, 1
NONE_FAILED = ctypes.c_size_t(-1).value


class Location(ctypes.Structure):
    """aclrtMemLocation"""

    _fields_ = (("id", ctypes.c_uint32), ("type", ctypes.c_int))


class Attribute(ctypes.Structure):
    """aclrtMemcpyBatchAttr"""

    _fields_ = (("to", Location), ("from_", Location), ("reserved", ctypes.c_uint8 * 16))


def attribute(to: int, start: int, device: int = 0) -> Attribute:
    return Attribute(Location(device, to), Location(device, start))


@dataclass
class Batch:
    """Host memory and device memory, and what is copied between them."""

    acl: ctypes.CDLL
    host: torch.Tensor = field(default_factory=lambda: torch.arange(256, dtype=torch.uint8).pin_memory())
    device: torch.Tensor = field(default_factory=lambda: torch.empty(256, dtype=torch.uint8, device="npu:0"))

    def __post_init__(self) -> None:
        self.device.copy_(torch.zeros(256, dtype=torch.uint8))
        torch.npu.synchronize()

    def submit(
        self, sizes: Sequence[int], attributes: Sequence[Attribute] = (), begins: Sequence[int] = (0,), **changes: Any
    ) -> tuple[int, int]:
        """Copy runs at multiples of 64 to the device; the error and the entry that failed."""
        attributes = attributes or [attribute(DEVICE, HOST)]
        count = len(sizes)
        pointers, numbers = ctypes.c_void_p * count, ctypes.c_size_t * count
        to = pointers(*(self.device.data_ptr() + 64 * i for i in range(count)))
        start = pointers(*(self.host.data_ptr() + 64 * i for i in range(count)))
        if changes.get("to_host"):
            to, start = start, to
        failed = ctypes.c_size_t(77)
        error = self.acl.aclrtMemcpyBatchAsync(
            to, numbers(*[changes.get("room", 64)] * count), start, numbers(*sizes), ctypes.c_size_t(count),
            (Attribute * len(attributes))(*attributes), (ctypes.c_size_t * len(begins))(*begins),
            ctypes.c_size_t(len(attributes)), ctypes.byref(failed), None,
        )  # fmt: skip
        return error, failed.value

    @property
    def arrived(self) -> list[bool]:
        """Which of the four runs are on the device."""
        torch.npu.synchronize()
        there, here = self.device.cpu().view(4, 64), self.host.view(4, 64)
        return [torch.equal(there[i], here[i]) for i in range(4)]


@pytest.fixture
def batch(acl: ctypes.CDLL) -> Batch:
    return Batch(acl)


def test_a_batch_is_copied(batch: Batch, calls: Callable[[str], int]) -> None:
    assert batch.submit([64] * 4) == (0, NONE_FAILED)
    assert batch.arrived == [True] * 4
    assert (calls("batches"), calls("batch_entries"), calls("pageable_copies")) == (1, 4, 0)


def test_a_batch_is_copied_back(batch: Batch) -> None:
    batch.submit([64] * 4)
    assert batch.arrived == [True] * 4
    batch.host.zero_()
    assert batch.submit([64] * 3, [attribute(HOST, DEVICE)], to_host=True) == (0, NONE_FAILED)
    torch.npu.synchronize()
    np.testing.assert_array_equal(batch.host.numpy(), [*range(192), *[0] * 64])


def test_the_entries_before_the_one_that_fails_are_under_way(batch: Batch, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SIMACL_FAIL_AT", "2")
    assert batch.submit([64] * 4) == (INVALID, 2)
    assert batch.arrived == [True, True, False, False]


def test_an_entry_without_bytes_fails(batch: Batch) -> None:
    assert batch.submit([64, 0, 64]) == (INVALID, 1)


@pytest.mark.parametrize(
    ("attributes", "begins", "error"),
    [
        ([attribute(HOST, DEVICE)], [0], (INVALID, 0)),  # the wrong way round
        ([attribute(DEVICE, HOST, device=1)], [0], (INVALID, 0)),
        ([attribute(DEVICE, HOST), attribute(DEVICE, DEVICE)], [0, 2], (INVALID, 2)),
        ([attribute(DEVICE, HOST)], [1], (INVALID, NONE_FAILED)),
        ([attribute(DEVICE, HOST)] * 2, [0, 0], (INVALID, NONE_FAILED)),
        (
            [Attribute(Location(0, DEVICE), Location(0, HOST), (ctypes.c_uint8 * 16)(1))],
            [0],
            (INVALID_ACL, NONE_FAILED),
        ),
    ],
)
def test_attributes_must_be_true(
    batch: Batch, attributes: list[Attribute], begins: list[int], error: tuple[int, int]
) -> None:
    assert batch.submit([64] * 4, attributes, begins) == error
    assert batch.arrived[2:] == [False, False]


def test_a_batch_without_entries_is_refused(batch: Batch) -> None:
    assert batch.submit([]) == (INVALID_ACL, NONE_FAILED)


def test_too_little_room_is_refused_before_anything_is_copied(batch: Batch) -> None:
    assert batch.submit([64] * 4, room=63) == (INVALID_ACL, NONE_FAILED)
    assert batch.arrived == [False] * 4


def test_a_driver_without_batches_says_so_when_it_is_asked(batch: Batch, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SIMACL_BATCH_UNSUPPORTED", "1")
    assert batch.submit([64] * 4) == (UNSUPPORTED, NONE_FAILED)
    assert batch.arrived == [False] * 4
