"""Renews the leases of requests that wait or pull, on a thread of its own, and remembers which have ended.

Scheduler steps are no place for this: a step can outlast a lease, for example when a model runs for the first time.
"""

import logging
import math
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial

from pd_connector.orders import Cause
from pd_connector.params import RemotePrefill
from transfer.control.client import ControlClient
from transfer.control.errors import PeerRefused
from transfer.control.messages import ErrorCode, Renew, Renewed, Reply

logger = logging.getLogger(__name__)

_CLOSE_TIMEOUT_S = 2.0
_LEASES_PER_MESSAGE = 1000  # prefill engines limit the size of messages

_Engine = tuple[str, str, int]  # engine id, host and port


@dataclass(frozen=True, slots=True)
class LeaseLost:
    """A prefill engine has said that a lease is no longer valid, which is final."""

    cause: Cause
    reason: str  # for people


@dataclass(slots=True)
class _Kept:
    remote: RemotePrefill
    renew_at: float  # infinite once it is lost
    lost: LeaseLost | None = None

    @property
    def engine(self) -> _Engine:
        return self.remote.remote_engine_id, self.remote.remote_host, self.remote.remote_port


class Renewals:
    """Renews leases, by request id. Thread-safe; no method waits for a peer."""

    def __init__(
        self, client: ControlClient, message_timeout_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Renew nothing until ``start``, or a call of ``renew_due``."""
        self._client = client
        self._message_timeout_s = message_timeout_s
        self._clock = clock
        self._changed = threading.Condition()
        self._kept: dict[str, _Kept] = {}
        self._wakes_at = math.inf  # when the thread checks again without being woken
        self._closing = False
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Start the thread that renews leases in time."""
        self._thread = threading.Thread(target=self._run, name="pd-lease-renewal", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop renewing leases; join the thread."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        if self._thread is not None:
            self._thread.join(_CLOSE_TIMEOUT_S)

    def keep(self, request_id: str, remote: RemotePrefill) -> None:
        """Renew a request's lease every third of its time to live from now on."""
        with self._changed:
            renew_at = self._clock() + remote.lease_ttl_s / 3
            self._kept[request_id] = _Kept(remote, renew_at)
            if renew_at < self._wakes_at:  # waking the thread for nothing costs the caller time
                self._changed.notify()

    def drop(self, request_id: str) -> None:
        """Stop renewing a request's lease. Unknown ids are ignored."""
        with self._changed:
            self._kept.pop(request_id, None)

    def lost(self, request_id: str) -> LeaseLost | None:
        """Return why a request's lease has ended; None if it is not known to have ended, or is not renewed."""
        with self._changed:
            kept = self._kept.get(request_id)
            return kept.lost if kept is not None else None

    @property
    def request_ids(self) -> frozenset[str]:
        """The requests whose leases are renewed, or are lost and not dropped yet."""
        with self._changed:
            return frozenset(self._kept)

    def renew_due(self) -> None:
        """Send a renewal to every prefill engine for its leases that are due."""
        now = self._clock()
        due: dict[_Engine, list[str]] = defaultdict(list)
        with self._changed:
            for kept in self._kept.values():
                if kept.renew_at <= now:
                    due[kept.engine].append(kept.remote.lease_id)
                    kept.renew_at = now + kept.remote.lease_ttl_s / 3
        for engine, lease_ids in due.items():
            engine_id, host, port = engine
            for first in range(0, len(lease_ids), _LEASES_PER_MESSAGE):
                asked = lease_ids[first : first + _LEASES_PER_MESSAGE]
                future = self._client.request(host, port, Renew(engine_id, tuple(asked)), self._message_timeout_s)
                future.add_done_callback(partial(self._take_answer, engine, asked))

    def check_integrity(self) -> None:
        """Raise AssertionError unless every lease is either due or lost and, until ``close``, the thread runs."""
        with self._changed:
            for request_id, kept in self._kept.items():
                assert (kept.lost is None) == (kept.renew_at < math.inf), f"the lease of {request_id} is in two states"
            assert self._thread is None or self._closing or self._thread.is_alive(), "the renewal thread has died"

    def _take_answer(self, engine: _Engine, asked: list[str], future: "Future[Reply]") -> None:
        """Take the answer to a renewal. Runs on the control client's thread."""
        if future.cancelled():
            return
        error = future.exception()
        if error is None:
            reply = future.result()
            if isinstance(reply, Renewed):
                ended = set(asked).difference(reply.valid)
                self._mark_lost(engine, ended, Cause.LEASE, "it expired or was cancelled before its blocks were read")
        elif isinstance(error, PeerRefused) and error.code is ErrorCode.UNKNOWN_ENGINE:
            self._mark_lost(engine, set(asked), Cause.REFUSED, str(error))
        else:
            log_undelivered(future)

    def _mark_lost(self, engine: _Engine, lease_ids: set[str], cause: Cause, reason: str) -> None:
        engine_id, host, port = engine
        with self._changed:
            for kept in self._kept.values():
                lease_id = kept.remote.lease_id
                if kept.engine == engine and lease_id in lease_ids and kept.lost is None:
                    kept.renew_at = math.inf
                    kept.lost = LeaseLost(
                        cause, f"lease {lease_id} of engine {engine_id} at {host}:{port} has ended: {reason}"
                    )

    def _run(self) -> None:
        while True:
            with self._changed:
                if self._closing:
                    return
                next_at = min((kept.renew_at for kept in self._kept.values()), default=math.inf)
                if next_at > self._clock():
                    self._wakes_at = next_at
                    self._changed.wait(None if next_at == math.inf else next_at - self._clock())
                    continue
            self.renew_due()


def log_undelivered(future: "Future[Reply]") -> None:
    """Log that a message about a lease was not answered, if so; the lease then expires. A done-callback."""
    if not future.cancelled() and (error := future.exception()) is not None:
        logger.warning("PDConnector: a prefill engine was not told about a lease, which will expire: %s", error)
