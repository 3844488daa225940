"""Who an engine is: a random number in memory that its peers can read.

No transport proves whom one reads. A port that a process has left may belong to another the next moment, with memory
registered at the same addresses, and a read from it succeeds with foreign bytes. So each engine publishes a number of
its own, announced on the control channel. A link reads it when it is opened, and again after its reads: a process that
still answers with it has lived, and kept its ports, through all of them.
"""

import ctypes
import mmap
import secrets

from layout.geometry import Identity, Region
from transfer.engine.base import ReadFailed
from transfer.memory import HostMemory

NONCE_BYTES = 16


class OwnIdentity:
    """Owns the page that holds an engine's number. The engine registers it, so that peers can read it."""

    def __init__(self) -> None:
        self._memory = HostMemory(mmap.PAGESIZE)
        self.region: Region = self._memory.region
        self.identity = Identity(self.region.address, secrets.token_bytes(NONCE_BYTES))
        ctypes.memmove(self.region.address, self.identity.nonce, NONCE_BYTES)


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
