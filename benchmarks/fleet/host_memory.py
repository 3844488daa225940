"""Host memory at both ends, as a rule: **modelled**, not run. No figure of it is a measurement.

- P copies what is leased to host memory, from where it is read, and gives the device's blocks back at once.
- D lets a prompt land in host memory while it has no blocks for it, and copies it to the device when it has.

What is copied goes at the settings' rate, beside the steps, and costs them nothing.
"""


class HostMemory:
    """Blocks of one engine's host memory."""

    def __init__(self, total: int) -> None:
        self.total = total
        self.free = total

    def take(self, blocks: int) -> bool:
        """Take blocks; return False, and take none, if there are too few."""
        if blocks > self.free:
            return False
        self.free -= blocks
        return True

    def give_back(self, blocks: int) -> None:
        """Take blocks back."""
        self.free += blocks

    def check_integrity(self) -> None:
        """Raise AssertionError unless the books balance."""
        assert 0 <= self.free <= self.total, "host memory is miscounted"
