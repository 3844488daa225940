"""Which engine has read a prompt: it decodes it, and so holds what follows it when the conversation goes on."""

import threading
from collections.abc import Sequence

from transfer.control.limits import LastFew
from transfer.errors import BadAddress
from transfer.peers import Address, parse_address

#: Prompts that are remembered, the last ones: some megabytes.
_MAX_PROMPTS = 16_384
#: Blocks of a prompt by which it is known again. What a chat template puts behind the last message, the next turn may
#: not have, so it is not the last one alone.
_LAST_BLOCKS = 3


class Readers:
    """Remembers the readers of leased prompts. ``read`` may be called on any thread."""

    def __init__(self, max_prompts: int = _MAX_PROMPTS) -> None:
        """Remember nothing yet, and at most so many prompts."""
        self._lock = threading.Lock()
        self._leased: LastFew[str, tuple[bytes, ...]] = LastFew(max_prompts)  # hashes of the last blocks, by lease
        self._readers: LastFew[bytes, Address] = LastFew(_LAST_BLOCKS * max_prompts)  # by such a hash

    def leased(self, lease_id: str, hashes: Sequence[bytes]) -> None:
        """Take up a lease over a prompt whose whole blocks have these ``hashes``, each of all tokens up to its end."""
        last = tuple(bytes(each) for each in hashes[-_LAST_BLOCKS:])
        if not last:
            return
        with self._lock:
            self._leased[lease_id] = last

    def read(self, lease_id: str, prefixes_at: str) -> None:
        """Note that an engine has read a lease, whose control channel is at ``prefixes_at``, ``host:port``.

        It is a peer's word: what is no address, or of another lease, is ignored.
        """
        try:
            reader = parse_address(prefixes_at)
        except BadAddress:
            return
        with self._lock:
            for key in self._leased.pop(lease_id, ()):
                self._readers[key] = reader

    def reader_of(self, hashes: Sequence[bytes]) -> Address | None:
        """Return who has read the longest beginning of a prompt whose whole blocks have these ``hashes``."""
        with self._lock:
            return next((self._readers[key] for key in map(bytes, reversed(hashes)) if key in self._readers), None)
