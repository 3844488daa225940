"""Host memory that a device's copy engines reach directly: page-aligned, never swapped, known to the driver.

Made by ``transfer.batch_copy.backends.pinned_memory``. How it is pinned is each backend's matter; here is who holds it
and when it is let go.
"""

import weakref
from collections.abc import Callable

from layout.geometry import Region


class PinnedMemory:
    """A page-aligned run of pinned host memory. Let go by ``close``, or with this object."""

    def __init__(self, region: Region, release: Callable[[], object], owner: object = None) -> None:
        """``release`` unpins the memory; called once, and not at the interpreter's exit.

        ``owner`` is whatever frees the memory when it goes, if ``release`` does not; it outlives the call of that.
        """
        self.region = region
        self._owner = owner
        self._release = weakref.finalize(self, release)
        self._release.atexit = False  # drivers are torn down by then, and the memory goes with the process

    def close(self) -> None:
        """Unpin and free the memory, which nobody uses any more: every batch over it is settled. Idempotent."""
        self._release()
        self._owner = None
