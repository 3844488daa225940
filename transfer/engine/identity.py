"""Who an engine is: a random number in memory that its peers can read.

No transport proves whom one reads. A port that a process has left may belong to another the next moment, with memory
registered at the same addresses, and a read from it succeeds with foreign bytes. So each engine publishes a number of
its own, announced on the control channel. A link reads it when it is opened, and again after its reads: a process that
still answers with it has lived, and kept its ports, through all of them.
"""

import ctypes
import mmap
import secrets
from typing import Protocol

from layout.geometry import Identity, Region
from transfer.engine.interface import ReadFailed
from transfer.memory import HostMemory

NONCE_BYTES = 16


class IdentityMemory(Protocol):
    """Memory that an engine registers for identities: its own number, and those that it reads from peers.

    Safe to use from any thread. Lives as long as this object.
    """

    @property
    def region(self) -> Region:
        """The whole range, page-aligned."""

    def write(self, address: int, data: bytes) -> None:
        """Store ``data`` at ``address``; return when peers can read it."""

    def read(self, address: int, size: int) -> bytes:
        """Return the ``size`` bytes at ``address``."""


class HostIdentityMemory:
    """Host memory for identities."""

    def __init__(self, size: int) -> None:
        self._memory = HostMemory(size)

    @property
    def region(self) -> Region:
        """See ``IdentityMemory``."""
        return self._memory.region

    def write(self, address: int, data: bytes) -> None:
        """See ``IdentityMemory``."""
        ctypes.memmove(address, data, len(data))

    def read(self, address: int, size: int) -> bytes:
        """See ``IdentityMemory``."""
        return ctypes.string_at(address, size)


class OwnIdentity:
    """Owns the first page of ``memory``, which holds an engine's number. The engine registers it for its peers."""

    def __init__(self, memory: IdentityMemory | None = None) -> None:
        self._memory = memory or HostIdentityMemory(mmap.PAGESIZE)
        self.region = Region(self._memory.region.address, mmap.PAGESIZE)
        self.identity = Identity(self.region.address, secrets.token_bytes(NONCE_BYTES))
        self._memory.write(self.region.address, self.identity.nonce)


def check_identity(identity: Identity, peer_address: str) -> None:
    """Raise unless ``identity``, which a peer has announced, can be read and compared.

    Raises:
        ReadFailed: naming the value and the rule (always settled).
    """
    if len(identity.nonce) != NONCE_BYTES or not 0 < identity.address < 2**63 - NONCE_BYTES:
        raise ReadFailed(
            f"cannot open a link to {peer_address}: it announced an identity of {len(identity.nonce)} bytes at "
            f"{identity.address:#x}, and must announce {NONCE_BYTES} bytes at an address",
            settled=True,
        )


def wrong_identity(peer_address: str) -> ReadFailed:
    """Return the error for a peer that turned out to be another process than the one that was to be read."""
    return ReadFailed(
        f"another process than the one that was announced answers at {peer_address}: the prefill engine's worker has "
        "ended and its port has been taken, or host on the prefill engine is an address of another machine",
        settled=True,
    )
