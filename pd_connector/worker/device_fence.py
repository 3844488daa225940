"""Fences: points in the work of the model's stream, which other threads wait for before they write to its blocks."""

from collections.abc import Callable
from typing import Protocol

import torch


class Fence(Protocol):
    """A point in a device's work."""

    def passed(self) -> bool:
        """Return whether the device has done everything before it. Never blocks. May be called on any thread."""


#: Returns a fence after all work that the calling thread's stream has been given; None if all of it is done already.
RaiseFence = Callable[[], Fence | None]


class DeviceFence:
    """A fence on a device of ``torch.cuda`` or ``torch.npu``."""

    def __init__(self, device: torch.device) -> None:
        """Record it after all work that the calling thread's current stream on ``device`` has."""
        self._device = device
        self._module = torch.get_device_module(device)
        self._event = self._module.current_stream(device).record_event()

    def passed(self) -> bool:
        """Implement ``Fence``."""
        self._module.set_device(self._device)  # on an NPU, a thread has none by default
        return bool(self._event.query())


def no_fence() -> None:
    """Return None: nothing needs to be waited for. Implements ``RaiseFence``."""


def fences(device: torch.device) -> RaiseFence:
    """Return what raises fences on ``device``. There are none on the CPU: its kernels end before their calls return."""
    return no_fence if device.type == "cpu" else lambda: DeviceFence(device)
