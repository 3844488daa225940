"""Fences: points in the work of the model's stream, and what waits until the device has come so far.

Other threads wait for them before they write to blocks, and steps that draft before they are reported.
"""

from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol, TypeAlias

import torch

from pd_connector.vllm.model_stream import event_after_steps


class Fence(Protocol):
    """A point in a device's work."""

    def passed(self) -> bool:
        """Return whether the device has done everything before it. Never blocks. May be called on any thread."""


#: Returns a fence after all work that steps have been given on the calling thread; None if all of it is done already.
RaiseFence = Callable[[], Fence | None]


class DeviceFence:
    """A fence on a device of ``torch.cuda`` or ``torch.npu``."""

    def __init__(self, device: torch.device) -> None:
        """Record it after all work of the steps that the calling thread has launched on ``device``."""
        self._device = device
        self._module = torch.get_device_module(device)
        self._event = event_after_steps(device)

    def passed(self) -> bool:
        """Implement ``Fence``."""
        self._module.set_device(self._device)  # on an NPU, a thread has none by default
        return bool(self._event.query())


def no_fence() -> None:
    """Return None: nothing needs to be waited for. Implements ``RaiseFence``."""


class StepEnds:
    """The steps that this worker has to report, until all that they have launched is done. Belongs to one thread."""

    def __init__(self, raise_fence: RaiseFence | None = None) -> None:
        """``raise_fence``: of the device; None if a step's results come after all that it writes."""
        self._raise_fence = raise_fence
        self._begun: list[int] = []
        self._launched: deque[tuple[int, Fence | None]] = deque()  # with what is after all of their work

    def begin(self, steps: Sequence[int]) -> None:
        """Note that the step of these numbers begins: whatever those before it do has been launched.

        Not before: vllm-ascend moves states behind ``wait_for_save``.
        """
        if self._begun and self._raise_fence is not None:
            fence = self._raise_fence()
            self._launched += [(step, fence) for step in self._begun]
            self._begun = []
        self._begun += steps

    def take(self) -> list[int]:
        """Return the steps that can be reported, each once, with the results of the step that is under way."""
        if self._raise_fence is None:
            ended, self._begun = self._begun, []
            return ended
        ended = []
        while self._launched and ((fence := self._launched[0][1]) is None or fence.passed()):
            ended.append(self._launched.popleft()[0])
        return ended


#: Returns when a device has all bytes that a transfer engine has read into its memory.
Land: TypeAlias = Callable[[], None]


def nothing_to_land() -> None:
    """Implement ``Land`` where the last call of a read returns with its last byte in place."""


def landing(transport: str, device: torch.device) -> Land:
    """Return what waits until a device has all bytes that a transfer engine has read into its memory.

    Over TCP, Mooncake hands bytes to CUDA in pieces of 64 KiB, on the default stream. CUDA may return from so small a
    copy before it is done, and no other stream waits for that one: not vLLM's, nor those on which pulls are reshaped
    and compared.
    """
    if transport != "tcp" or device.type != "cuda":
        return nothing_to_land
    synchronize: Land = torch.cuda.default_stream(device).synchronize
    return synchronize


def fences(device: torch.device) -> RaiseFence:
    """Return what raises fences on ``device``. There are none on the CPU: its kernels end before their calls return."""
    return no_fence if device.type == "cpu" else lambda: DeviceFence(device)
