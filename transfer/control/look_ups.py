"""The look-up of host names, on threads: DNS may take many seconds, and libzmq would stall every peer meanwhile."""

import threading
import time
from collections.abc import Callable

import msgspec

from transfer.control.failures import TooManyPeers
from transfer.errors import PeerNotAllowed, TransferError
from transfer.peers import AllowedPeers, resolve


class Resolved(msgspec.Struct, frozen=True):
    """The result of looking up a host name: an IP address, or why there is none."""

    host: str
    ip: str
    failure: TransferError | str = ""


class HostLookUps:
    """Looks up hosts, up to ``most`` at a time; others wait for their turn. Belongs to the client's thread.

    A look-up calls ``report`` on its own thread when it ends; then the owner calls ``ended``.
    """

    def __init__(self, most: int, allowed: AllowedPeers, report: Callable[[Resolved], object]) -> None:
        self._most = most
        self._allowed = allowed
        self._report = report
        self._threads: dict[str, threading.Thread] = {}  # by host
        self._waiting: dict[str, None] = {}  # hosts, in the order of their turns

    def begin(self, host: str) -> None:
        """Look up a host when its turn comes, unless that is under way.

        Raises:
            TooManyPeers: the system has no thread left.
        """
        if host in self._threads:
            return
        if len(self._threads) >= self._most:
            self._waiting[host] = None
        else:
            self._start(host)

    def withdraw(self, host: str) -> None:
        """Forget a host that waits for its turn, so that no more wait than there are peers."""
        self._waiting.pop(host, None)

    def ended(self, host: str) -> list[Resolved]:
        """Begin what waits for the look-up that has ended, and return what cannot begin."""
        self._threads.pop(host).join()
        failed = []
        while self._waiting and len(self._threads) < self._most:
            following = next(iter(self._waiting))
            del self._waiting[following]
            try:
                self._start(following)
            except TooManyPeers as error:
                failed.append(Resolved(following, "", error))
        return failed

    def close(self, timeout_s: float) -> None:
        """Wait for running look-ups, for so long."""
        until = time.monotonic() + timeout_s
        for thread in self._threads.values():
            thread.join(max(0.0, until - time.monotonic()))

    def _start(self, host: str) -> None:
        thread = threading.Thread(target=self._run, args=(host,), name=f"pd-control-look-up-{host}", daemon=True)
        try:
            thread.start()
        except RuntimeError as error:  # the system has no thread left
            raise TooManyPeers(f"{host} cannot be looked up now: {error}") from error
        self._threads[host] = thread

    def _run(self, host: str) -> None:
        try:
            ip = resolve(host)
            self._allowed.check(host, ip)
        except PeerNotAllowed as error:
            self._report(Resolved(host, "", error))
        except OSError as error:
            self._report(Resolved(host, "", f"the host name could not be looked up: {error}"))
        else:
            self._report(Resolved(host, ip))
