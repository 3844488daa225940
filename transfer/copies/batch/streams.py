"""The torch stream that a device copier works on. Imports torch when the first stream is made, not before."""

import importlib
from collections.abc import Callable
from typing import Any

from transfer.copies.batch.base import CopierStartError, DeviceEvent


class DeviceStream:
    """A stream of ``torch.cuda`` or ``torch.npu``, which can wait for events of the model's streams. For one thread.

    torch_npu queues waits, records and copies for its own thread, and a call made directly to the runtime overtakes
    them: a copy would start before the event that it waits for. Reading a stream's handle empties that queue first, so
    the handle is read again before every submission and never kept.
    """

    def __init__(self, platform: str, device: int) -> None:
        """Create a stream on ``device``; ``platform`` is "cuda" or "npu".

        Raises:
            CopierStartError: torch, torch_npu or the device is missing.
        """
        try:
            torch = importlib.import_module("torch")
            if platform == "npu":
                importlib.import_module("torch_npu")
            self._device = device
            self._module: Any = getattr(torch, platform)
            self._stream: Any = self._module.Stream(device=torch.device(platform, device))
        except (ImportError, RuntimeError, AssertionError, AttributeError) as error:
            needed = "torch and torch_npu" if platform == "npu" else "torch built with CUDA"
            said = str(error).strip().splitlines()[:1]  # torch_npu appends its own stack
            raise CopierStartError(
                f"no stream on {platform}:{device}: {''.join(said)}. It needs {needed} and a device of that number"
            ) from error
        self._handle_attribute = f"{platform}_stream"

    def enter_thread(self) -> None:
        """Make the stream's device current in the calling thread."""
        self._module.set_device(self._device)

    def handle(self) -> int:
        """Return the driver's handle for one submission, after everything this thread has queued on the stream."""
        return int(getattr(self._stream, self._handle_attribute))

    def run(self, submit: Callable[[], None]) -> None:
        """Have ``submit`` give its work to this stream, which torch takes for the current one meanwhile."""
        with self._module.stream(self._stream):
            submit()

    def wait_event(self, event: DeviceEvent) -> None:
        """Make everything submitted later wait for ``event``. Does not block."""
        self._stream.wait_event(event)

    def record_event(self) -> DeviceEvent:
        """Record and return an event after everything submitted so far."""
        event: DeviceEvent = self._stream.record_event()
        return event

    def synchronize(self) -> None:
        """Block until everything submitted is done, or raise the device's error."""
        self._stream.synchronize()
