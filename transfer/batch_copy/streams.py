"""The stream that a device copier works on: one of torch's.

torch is imported when the first stream is made, and not with this module.
"""

import importlib
from typing import Any

from transfer.batch_copy.base import CopierStartError, DeviceEvent


class DeviceStream:
    """An ordered queue of a device's work: a stream of ``torch.cuda`` or ``torch.npu``. Used by one thread.

    Of torch, so that it understands the events of the model's streams.

    torch_npu puts waits, records and copies in a queue that a thread of its own empties, and a call made directly to
    the runtime overtakes them: a copy would start before the event that it waits for. Asking a stream for its handle
    empties that queue first, so the handle is asked for anew before every submission and never kept.
    """

    def __init__(self, platform: str, device: int) -> None:
        """A new stream on ``device``; ``platform`` is "cuda" or "npu".

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
                f"no stream on {platform}:{device}: {''.join(said)}. Needed are {needed} and a device of that number"
            ) from error
        self._handle_attribute = f"{platform}_stream"

    def enter_thread(self) -> None:
        """Make the stream's device current in the calling thread."""
        self._module.set_device(self._device)

    def handle(self) -> int:
        """The driver's handle of the stream, for one submission: all that this thread asked of it before is in it."""
        return int(getattr(self._stream, self._handle_attribute))

    def wait_event(self, event: DeviceEvent) -> None:
        """Let everything submitted later wait for ``event``. Does not block."""
        self._stream.wait_event(event)

    def record_event(self) -> DeviceEvent:
        """An event behind everything submitted so far."""
        event: DeviceEvent = self._stream.record_event()
        return event

    def synchronize(self) -> None:
        """Block until everything submitted is done; raises what the device says if it failed."""
        self._stream.synchronize()
