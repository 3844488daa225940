"""Batches between two places in host memory: the backend of the CPU platform, where "device" memory is host memory.

Bytes are moved on the copier's thread, with the interpreter's lock released: vLLM's model thread goes on meanwhile.
"""

from layout.copies import Copies
from transfer.batch_copy.base import CopyBackend, DeviceEvent
from transfer.local_copy.reshape import run_copies, warm_up


class HostBackend(CopyBackend):
    """Moves bytes with one core. A batch is over when the thread is through with it."""

    def enter_thread(self) -> None:
        """Compile the kernel, so that the first batch does not wait for it."""
        warm_up()

    def start(self, copies: Copies, after: DeviceEvent | None) -> None:
        """Copy everything. ``after`` is waited for here, as there is no stream to wait for it."""
        if after is not None:
            after.synchronize()
        run_copies(copies)

    def drain(self) -> None:
        """Nothing is ever in flight."""
