"""Limits that every engine keeps, and no setting changes: each value suits all deployments.

Who needs another, such as a test, gives it to the constructor of what keeps it.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """What is bounded on either side. Times are in seconds, shares from 0 to 1."""

    #: For which P keeps a finished prompt's blocks at most, however often the lease is renewed: no D that goes on
    #: renewing can keep them for ever.
    max_lease_age_s: float = 600.0
    #: Share of P's blocks that leases may hold. None: ``BOTH_ROLES_FRACTION`` of an engine that also decodes, else all.
    max_leased_fraction: float | None = None
    #: Share of P's blocks above which leases that nobody reads yet move to host memory, the oldest first.
    move_leases_above: float = 0.1
    #: For how many prompts that P is still computing D pulls at a time, and the share of its blocks that they may hold.
    max_pulls_ahead: int = 16
    max_ahead_fraction: float = 0.5
    #: For which D waits for P to answer a message, or for a connection to one of its workers. On Ascend, CANN's time
    #: for a link comes on top (ASCEND_TRANSFER_TIMEOUT).
    handshake_timeout_s: float = 10.0
    #: For which D keeps a connection to P without a pull.
    peer_idle_s: float = 600.0

    def leased_fraction(self, *, consumes: bool) -> float:
        """Return the share of the blocks that leases may hold, on an engine that also decodes (``consumes``) or not."""
        if self.max_leased_fraction is not None:
            return self.max_leased_fraction
        return BOTH_ROLES_FRACTION if consumes else 1.0


#: With less than all blocks leased, there are always some for requests that pull, which end leases.
BOTH_ROLES_FRACTION = 0.5

ENGINE_LIMITS = EngineLimits()
