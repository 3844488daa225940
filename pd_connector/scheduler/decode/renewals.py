"""Renews the leases of requests that wait or pull, on a thread of its own, and remembers which have ended.

Scheduler steps are no place for this: a step can outlast a lease, for example when a model runs for the first time.

All leases of a prefill engine are renewed in one message, three times in their time to live; one that does not answer
is asked again when the message has timed out. What waits for blocks for longer than the queue timeout is given up, so
that a decode engine that is stuck or overloaded frees what it holds of others. What is being pulled is announced, so
that the prefill engine does not revoke it.
"""

import logging
import math
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from pd_connector.orders import Cause
from pd_connector.params import EngineAddress, RemotePrefill
from pd_connector.scheduler.decode.legs import Refused
from transfer.control.client import ControlClient
from transfer.control.failures import ClientClosed, PeerRefused
from transfer.control.messages import MAX_REQUEST_BYTES, Cancel, ErrorCode, Renew, Renewed

logger = logging.getLogger(__name__)

_CLOSE_TIMEOUT_S = 2.0
_MESSAGE_BYTES = MAX_REQUEST_BYTES - 4096  # of lease ids
_ANNOUNCED_AFTER_S = 0.05  # pulls that end sooner are not announced

_Engine = tuple[EngineAddress, float]  # leases of another time to live are kept apart


@dataclass(slots=True, eq=False)
class _Kept:
    request_id: str
    remote: RemotePrefill
    give_up_at: float  # unless it is being pulled by then
    lost: Refused | None = None

    @property
    def engine(self) -> _Engine:
        return self.remote.engine, self.remote.lease_ttl_s

    @property
    def name(self) -> str:
        return f"lease {self.remote.lease_id} of {self.remote.engine}"


@dataclass(slots=True)
class _Bucket:
    """The leases of a prefill engine that are not lost, by request id, and when to send it what."""

    renew_at: float
    interval_s: float
    waiting: dict[str, _Kept] = field(default_factory=dict)  # longest first
    reading: dict[str, _Kept] = field(default_factory=dict)
    announced_at: float = math.inf  # when ``unannounced`` is to be sent
    unannounced: dict[str, _Kept] = field(default_factory=dict)  # some of those that are being read

    @property
    def due_at(self) -> float:
        give_up_at = next((kept.give_up_at for kept in self.waiting.values()), math.inf)
        return min(self.renew_at, self.announced_at, give_up_at)

    def remove(self, request_id: str) -> None:
        for leases in (self.waiting, self.reading, self.unannounced):
            leases.pop(request_id, None)

    def give_up(self, now: float) -> list[_Kept]:
        """Remove and return the leases that have waited for too long."""
        late = []
        while self.waiting and (first := next(iter(self.waiting.values()))).give_up_at <= now:
            late.append(self.waiting.pop(first.request_id))
        return late

    def renew(self, now: float, answer_s: float) -> tuple[tuple[_Kept, ...], tuple[_Kept, ...]]:
        """Return the leases to renew now, and those of them that are being read. ``answer_s``: for an answer."""
        reading = tuple(self.unannounced.values())
        self.unannounced.clear()
        self.announced_at = math.inf
        if now < self.renew_at:
            return reading, reading
        self.renew_at = now + max(self.interval_s, answer_s)  # sooner, once it is answered
        reading = tuple(self.reading.values())
        return (*self.waiting.values(), *reading), reading


class Renewals:
    """Renews leases, by request id. Thread-safe; no method waits for a peer."""

    def __init__(
        self,
        client: ControlClient,
        message_timeout_s: float,
        queue_timeout_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Renew nothing until ``start``, or a call of ``send_due``.

        Args:
            client: sends the messages; closed with this.
            message_timeout_s: for which a message is sent again until it is answered.
            queue_timeout_s: after which the lease of a request that still waits for blocks is given up.
            clock: a monotonic clock, in seconds.
        """
        self._client = client
        self._message_timeout_s = message_timeout_s
        self._queue_timeout_s = queue_timeout_s
        self._clock = clock
        self._changed = threading.Condition()
        self._kept: dict[str, _Kept] = {}
        self._buckets: dict[_Engine, _Bucket] = {}
        self._wakes_at = math.inf  # when the thread checks again without being woken
        self._closing = False
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Start the thread that renews leases in time."""
        self._thread = threading.Thread(target=self._run, name="pd-lease-renewal", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop renewing leases; join the thread, and close the control client."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        if self._thread is not None:
            self._thread.join(_CLOSE_TIMEOUT_S)
        self._client.close()

    def keep(self, request_id: str, remote: RemotePrefill) -> None:
        """Renew the lease of a request that waits for blocks, from now on three times in its time to live."""
        with self._changed:
            now, interval_s = self._clock(), remote.lease_ttl_s / 3
            kept = self._kept[request_id] = _Kept(request_id, remote, now + self._queue_timeout_s)
            bucket = self._buckets.setdefault(kept.engine, _Bucket(now + interval_s, interval_s))
            bucket.waiting[request_id] = kept
            self._wake_at(bucket.due_at)

    def start_reading(self, request_id: str) -> None:
        """Note that a request is being pulled now, so that its lease is neither given up nor revoked."""
        with self._changed:
            kept = self._kept[request_id]
            bucket = self._buckets.get(kept.engine)
            if kept.lost is not None or bucket is None:
                return
            bucket.reading[request_id] = bucket.unannounced[request_id] = bucket.waiting.pop(request_id)
            bucket.announced_at = min(bucket.announced_at, self._clock() + _ANNOUNCED_AFTER_S)
            self._wake_at(bucket.announced_at)

    def drop(self, request_id: str) -> None:
        """Stop renewing a request's lease. Unknown ids are ignored."""
        with self._changed:
            kept = self._kept.pop(request_id, None)
            if kept is not None and kept.lost is None:
                self._remove(kept)

    def cancel(self, remote: RemotePrefill, transfer_id: str = "") -> None:
        """Tell a prefill engine that a lease will not be read, if it can be reached.

        ``transfer_id``: names the prompt if there is no lease yet. Then whichever engine is there is told.
        """
        by_lease = Cancel(remote.remote_engine_id, (remote.lease_id,))
        message = by_lease if remote.lease_id else Cancel("", (), (transfer_id,))
        future = self._client.request(remote.remote_host, remote.remote_port, message, self._message_timeout_s)
        future.add_done_callback(_log_undelivered)

    def lost(self, request_id: str) -> Refused | None:
        """Return why a request's lease has ended; None if it is not known to have ended, or is not renewed."""
        with self._changed:
            kept = self._kept.get(request_id)
            return kept.lost if kept is not None else None

    @property
    def request_ids(self) -> frozenset[str]:
        """The requests whose leases are renewed, or are lost and not dropped yet."""
        with self._changed:
            return frozenset(self._kept)

    def send_due(self) -> None:
        """Send what is due to every prefill engine, and give up the leases that have waited for too long."""
        now = self._clock()
        messages: list[tuple[_Engine, tuple[_Kept, ...], tuple[_Kept, ...]]] = []
        late: list[_Kept] = []
        with self._changed:
            for engine, bucket in self._buckets.items():
                if bucket.due_at <= now:
                    late += bucket.give_up(now)
                    messages.append((engine, *bucket.renew(now, self._message_timeout_s)))
            for kept in late:
                kept.lost = Refused(
                    Cause.QUEUE,
                    f"{kept.name} was given up, because the request waited {self._queue_timeout_s:g} s for blocks of "
                    "this engine (queue_timeout_s): it has too few for its requests, or is paused",
                )
                self._forget_if_empty(kept.engine)
        for kept in late:
            self.cancel(kept.remote)
        for engine, renewed, reading in messages:
            self._send(engine, renewed, reading, now)

    def check_integrity(self) -> None:
        """Raise AssertionError unless every lease is either renewed or lost and, until ``close``, the thread runs."""
        with self._changed:
            renewed = {
                (engine, request_id)
                for engine, bucket in self._buckets.items()
                for request_id in (*bucket.waiting, *bucket.reading)
            }
            wanted = {(kept.engine, request_id) for request_id, kept in self._kept.items() if kept.lost is None}
            assert renewed == wanted, "other leases are renewed than those that are kept"
            for bucket in self._buckets.values():
                assert bucket.waiting or bucket.reading, "an engine without leases is remembered"
                assert not bucket.waiting.keys() & bucket.reading.keys(), "a lease waits and is read at once"
                assert bucket.unannounced.keys() <= bucket.reading.keys(), "a lease is announced that is not read"
                assert bucket.due_at < math.inf, "leases are never renewed"
            assert self._thread is None or self._closing or self._thread.is_alive(), "the renewal thread has died"

    def _send(self, engine: _Engine, renewed: tuple[_Kept, ...], reading: tuple[_Kept, ...], now: float) -> None:
        engine_id, host, port = engine[0]
        lease_ids = tuple(kept.remote.lease_id for kept in renewed)
        being_read = tuple(kept.remote.lease_id for kept in reading)
        # An id takes up to three bytes besides its characters, and those that are being read are named twice.
        at_once = _MESSAGE_BYTES // (2 * (max(map(len, lease_ids), default=0) + 3))
        for first in range(0, len(lease_ids), at_once):
            asked = lease_ids[first : first + at_once]
            among = being_read if len(asked) == len(lease_ids) else tuple(frozenset(being_read).intersection(asked))
            future = self._client.request(host, port, Renew(engine_id, asked, among), self._message_timeout_s)
            future.add_done_callback(partial(self._answered, engine, now))
            future.add_done_callback(partial(self._take_answer, renewed[first : first + at_once], asked))

    def _answered(self, engine: _Engine, asked_at: float, _: "Future[Renewed]") -> None:
        """Renew in time again: as long as an engine is silent, it is not asked to renew again."""
        with self._changed:
            if (bucket := self._buckets.get(engine)) is not None:
                bucket.renew_at = min(bucket.renew_at, asked_at + bucket.interval_s)
                self._wake_at(bucket.renew_at)

    def _take_answer(self, renewed: tuple[_Kept, ...], asked: tuple[str, ...], future: "Future[Renewed]") -> None:
        """Take the answer to a renewal. Runs on the control client's thread."""
        if future.cancelled():
            return
        error = future.exception()
        if error is None:
            reply = future.result()
            if reply.valid != asked:  # as it mostly is; sets of thousands take long
                valid = frozenset(reply.valid)
                ended = [kept for kept in renewed if kept.remote.lease_id not in valid]
                self._mark_lost(ended, Cause.LEASE, "it expired, was cancelled, or gave way to other requests")
        elif isinstance(error, PeerRefused) and error.code == ErrorCode.UNKNOWN_ENGINE:
            self._mark_lost(renewed, Cause.REFUSED, str(error))
        elif not isinstance(error, ClientClosed):
            logger.warning(
                "PDConnector: a renewal of %d leases was not answered; they expire unless one of the next is: %s",
                len(asked), error,
            )  # fmt: skip

    def _mark_lost(self, ended: Sequence[_Kept], cause: Cause, reason: str) -> None:
        with self._changed:
            for kept in ended:
                if self._kept.get(kept.request_id) is kept and kept.lost is None:
                    kept.lost = Refused(cause, f"{kept.name} has ended: {reason}")
                    self._remove(kept)

    def _remove(self, kept: _Kept) -> None:
        self._buckets[kept.engine].remove(kept.request_id)
        self._forget_if_empty(kept.engine)

    def _forget_if_empty(self, engine: _Engine) -> None:
        bucket = self._buckets.get(engine)
        if bucket is not None and not (bucket.waiting or bucket.reading):
            del self._buckets[engine]

    def _wake_at(self, due_at: float) -> None:
        if due_at < self._wakes_at:  # waking the thread for nothing costs the caller time
            self._wakes_at = due_at
            self._changed.notify()

    def _run(self) -> None:
        while True:
            with self._changed:
                if self._closing:
                    return
                next_at = min((bucket.due_at for bucket in self._buckets.values()), default=math.inf)
                if next_at > self._clock():
                    self._wakes_at = next_at
                    self._changed.wait(None if next_at == math.inf else next_at - self._clock())
                    continue
            self.send_due()


def _log_undelivered(future: "Future[Any]") -> None:
    """Log that a message about a lease was not answered, if so; the lease then expires. A done-callback.

    Not where this engine ends, or the other has: a restart of either is no trouble.
    """
    if future.cancelled() or (error := future.exception()) is None or isinstance(error, ClientClosed):
        return
    if not (isinstance(error, PeerRefused) and error.code == ErrorCode.UNKNOWN_ENGINE):
        logger.warning("PDConnector: an engine was not told about a lease, which will expire: %s", error)
