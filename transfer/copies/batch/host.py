"""The copy backend of the CPU platform, where "device" memory is host memory, too.

Moves the bytes on the copier's thread with the GIL released, so that vLLM's model thread can run.
"""

from layout.copies import Copies
from transfer.copies.batch.base import CopyBackend, DeviceEvent
from transfer.copies.reshape.reshape import run_copies, warm_up


class HostBackend(CopyBackend):
    """Copies with one core. A batch has ended when ``start`` returns."""

    def enter_thread(self) -> None:
        """Compile the kernel, so that the first batch does not wait for it."""
        warm_up()

    def start(self, copies: Copies, after: DeviceEvent | None) -> None:
        """Wait for ``after``, as there is no stream to do so, and copy everything."""
        if after is not None:
            after.synchronize()
        run_copies(copies)

    def drain(self) -> None:
        """Do nothing: no copy is ever in flight."""
