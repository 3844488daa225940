"""A transfer engine that opens links only to hosts that are allowed. Knows nothing of any transport."""

from collections.abc import Sequence

from layout.geometry import Region
from transfer.engine.base import Link, ReadFailed, TransferEngine
from transfer.errors import PeerNotAllowed
from transfer.peers import AllowedPeers, numeric


class GuardedEngine(TransferEngine):
    """Passes everything on to another engine, except ``open`` of addresses that are not allowed.

    Addresses come from peers. A name in them is allowed only if it is one of the rules itself: the engine behind this
    one looks names up again, and could get another answer than we did.
    """

    def __init__(self, engine: TransferEngine, allowed: AllowedPeers) -> None:
        self._engine = engine
        self._allowed = allowed

    @property
    def address(self) -> str:
        """Where peers reach this engine."""
        return self._engine.address

    def register(self, regions: Sequence[Region]) -> None:
        """Let peers read ``regions``."""
        self._engine.register(regions)

    def open(self, address: str, regions: Sequence[Region]) -> Link:
        """A link to the peer at ``address``.

        Raises:
            ReadFailed: it may not be contacted, or cannot be reached (always settled).
        """
        host = address.rpartition(":")[0].removeprefix("[").removesuffix("]")
        try:
            if numeric(host) is not None:
                self._allowed.check(host, host)
            elif not self._allowed.are_all and not self._allowed.names(host):
                raise PeerNotAllowed(
                    f"{host!r} is neither an IP address nor a host name of allowed_peers: add it there, or set host to "
                    "an IP address on the prefill engine"
                )
        except PeerNotAllowed as error:
            raise ReadFailed(f"the transfer engine at {address}: {error}", settled=True) from error
        return self._engine.open(address, regions)

    def close(self) -> None:
        """Close every link and the engine."""
        self._engine.close()
