"""On which stream the copy of blocks is made that a device hands to the host.

What is in it: ``test_lease_checksums``.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch

from layout.geometry import Plane
from transfer.copies.checksums import device_reader
from transfer.copies.checksums.device_reader import DeviceReader
from transfer.copies.reshape.reshape_torch import SideStream, TensorCopier

BLOCKS, BLOCK_BYTES = 8, 64


def cache_of_one_plane() -> tuple[torch.Tensor, Plane]:
    cache = torch.arange(BLOCKS * BLOCK_BYTES, dtype=torch.int16).view(torch.uint8)[: BLOCKS * BLOCK_BYTES]
    sizes = 0, 1, 1, BLOCK_BYTES, 1, BLOCKS
    return cache, Plane("kv", ("layer",), *sizes, cache.data_ptr(), 0, BLOCK_BYTES, BLOCK_BYTES, BLOCK_BYTES, 1)


def test_the_copy_is_in_no_memory_of_the_model_s_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """What torch has freed there may still be used by kernels that are queued."""
    seen: list[tuple[str, object]] = []
    current: list[object] = ["the model's"]

    class Traced(SideStream):
        @contextmanager
        def running(self) -> Iterator[None]:
            current.append(self)
            try:
                yield
            finally:
                current.pop()
                seen.append(("waited", self))

    def empty(*size: Any, **options: Any) -> torch.Tensor:
        seen.append(("allocated", current[-1]))
        return torch.zeros(*size, **options)

    class Tracing(TensorCopier):
        def __call__(self, *arguments: Any) -> None:
            seen.append(("written", current[-1]))
            super().__call__(*arguments)

    monkeypatch.setattr(device_reader, "SideStream", Traced)
    monkeypatch.setattr(device_reader, "TensorCopier", Tracing)
    cache, plane = cache_of_one_plane()
    reader = DeviceReader([cache])
    monkeypatch.setattr(torch, "empty", empty)
    copied = reader(plane, np.array([5, 2]))
    own = reader._stream
    assert seen == [("allocated", own), ("written", own), ("waited", own), ("waited", own)]
    assert isinstance(copied.owner, torch.Tensor)
    assert bytes(copied.owner.numpy()) == bytes(cache.view(BLOCKS, -1)[[5, 2]].numpy())


def test_a_reader_has_one_stream_for_all_its_life(monkeypatch: pytest.MonkeyPatch) -> None:
    """Streams of an NPU are few: one more for each read goes round them, and works on those of others."""
    made: list[torch.device] = []
    start = SideStream.__init__

    def counted(self: SideStream, device: torch.device) -> None:
        made.append(device)
        start(self, device)

    monkeypatch.setattr(SideStream, "__init__", counted)
    cache, plane = cache_of_one_plane()
    reader = DeviceReader([cache])
    for _ in range(40):
        reader(plane, np.arange(BLOCKS))
    assert made == [cache.device]
