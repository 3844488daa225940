"""Keeps the leases of requests that wait or pull alive, on a thread of its own.

Not in scheduler steps: a step can take longer than a lease lives, as when a model runs for the first time.
"""

import threading
import time
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass

from pd_connector.params import RemotePrefill
from pd_connector.vllm_compat import init_logger
from transfer.control.client import ControlClient
from transfer.control.messages import Renew, Reply

logger = init_logger(__name__)

_CLOSE_TIMEOUT_S = 2.0


@dataclass(slots=True)
class _Kept:
    remote: RemotePrefill
    renew_at: float


class Renewals:
    """The leases to be renewed, by request id. All methods may be called from any thread; none waits for a peer."""

    def __init__(
        self, client: ControlClient, message_timeout_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Nothing is renewed by itself before ``start``."""
        self._client = client
        self._message_timeout_s = message_timeout_s
        self._clock = clock
        self._changed = threading.Condition()
        self._kept: dict[str, _Kept] = {}
        self._closing = False
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Start the thread that renews in time."""
        self._thread = threading.Thread(target=self._run, name="pd-lease-renewal", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Renew nothing any more; joins the thread."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        if self._thread is not None:
            self._thread.join(_CLOSE_TIMEOUT_S)

    def keep(self, request_id: str, remote: RemotePrefill) -> None:
        """Renew a request's lease every third of its time to live, from now on."""
        with self._changed:
            self._kept[request_id] = _Kept(remote, self._clock() + remote.lease_ttl_s / 3)
            self._changed.notify()

    def drop(self, request_id: str) -> None:
        """Do not renew a request's lease any more. Unknown ids are ignored."""
        with self._changed:
            self._kept.pop(request_id, None)

    @property
    def request_ids(self) -> frozenset[str]:
        """The requests whose leases are kept alive."""
        with self._changed:
            return frozenset(self._kept)

    def renew_due(self) -> None:
        """Send one renewal to every prefill engine with leases that are due."""
        now = self._clock()
        by_engine: dict[tuple[str, str, int], list[str]] = defaultdict(list)
        with self._changed:
            for kept in self._kept.values():
                if kept.renew_at <= now:
                    remote = kept.remote
                    by_engine[remote.remote_engine_id, remote.remote_host, remote.remote_port].append(remote.lease_id)
                    kept.renew_at = now + remote.lease_ttl_s / 3
        for (engine_id, host, port), lease_ids in by_engine.items():
            future = self._client.request(host, port, Renew(engine_id, tuple(lease_ids)), self._message_timeout_s)
            future.add_done_callback(log_untold)

    def _run(self) -> None:
        while True:
            with self._changed:
                if self._closing:
                    return
                next_at = min((kept.renew_at for kept in self._kept.values()), default=None)
                if next_at is None or next_at > self._clock():
                    self._changed.wait(None if next_at is None else next_at - self._clock())
                    continue
            self.renew_due()


def log_untold(future: "Future[Reply]") -> None:
    """Done-callback of a message about a lease: if it is never answered, the lease ends by itself."""
    if not future.cancelled() and (error := future.exception()) is not None:
        logger.warning("PDConnector: a prefill engine was not told about a lease, which will expire: %s", error)
