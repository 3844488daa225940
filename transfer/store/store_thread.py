"""A thread with a connection to a store: what keeps a store that is slow, broken or gone away from everything else."""

import logging
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, TypeVar

from transfer.store.interface import ObjectStore, StoreFailed

logger = logging.getLogger(__name__)

#: For how long a store that has failed is not called.
RETRY_S = 10.0
_JOIN_S = 2.0
#: Buffers of a connection. The client keeps each until the connection is closed, which holds up this process.
_MOST_RENEWALS = 32

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class _Job:
    work: Callable[[ObjectStore], Any]
    timeout_s: float
    future: Future[Any]


class StoreThread:
    """Owns a connection to a store, and does one thing after the other with it.

    The connection is opened for the first job; after a failure, its buffer is another. ``submit``, ``works`` and
    ``close`` never block for the store.
    """

    def __init__(
        self, name: str, open_store: Callable[[], ObjectStore], clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Start the thread, of this ``name``. ``open_store`` raises StoreFailed if the store does not work."""
        self._open_store = open_store
        self._clock = clock
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._late_at: float | None = None  # when the job under way has taken too long
        self._timeout_s = 0.0  # of that job
        self._closed_until = 0.0
        self._store: ObjectStore | None = None  # of the thread
        self._is_spoiled = False  # bytes may still come to its buffer
        self._renewals = 0
        self._said: set[str] = set()  # how it has failed since it last worked
        self._ends = threading.Event()
        # A call that never returns must not keep the process.
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    @property
    def works(self) -> bool:
        """Whether the store is worth a job: it has not failed just now, and what is under way is not late."""
        late_at, now = self._late_at, self._clock()
        return now >= self._closed_until and (late_at is None or now < late_at)

    def submit(self, work: Callable[[ObjectStore], T], timeout_s: float) -> "Future[T]":
        """Have the thread do ``work``; the result is what it returns.

        It fails with StoreFailed without being begun if the store does not ``work``. ``timeout_s``: after which the
        store counts as stuck, unless the work ``goes_on``. Whoever waits does not wait longer, and it may still go on.
        """
        future: Future[T] = Future()
        if not self.works:
            future.set_exception(StoreFailed("the pool does not answer, and is not used for a while"))
            return future
        self._jobs.put(_Job(work, timeout_s, future))
        return future

    def goes_on(self) -> None:
        """Note that the store has answered, so that the time of the job under way begins anew. For that job."""
        self._late_at = self._clock() + self._timeout_s

    def close(self) -> None:
        """Begin nothing more."""
        self._ends.set()
        self._jobs.put(None)

    def join(self) -> None:
        """Wait for the thread, but not for a call that does not return."""
        self._thread.join(_JOIN_S)
        if self._thread.is_alive():
            logger.warning("PDConnector: a call to the pool has not returned; its thread is left behind")

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            if self._ends.is_set() or self._clock() < self._closed_until:
                job.future.set_exception(StoreFailed("the pool is not used"))
                continue
            self._timeout_s = job.timeout_s
            self.goes_on()
            try:
                result = job.work(self._opened())
                self._works_again()
                job.future.set_result(result)
            except StoreFailed as error:
                self._fail(error)
                job.future.set_exception(error)
            except Exception as error:
                job.future.set_exception(error)
            finally:
                self._late_at = None
        self._let_go()

    def _opened(self) -> ObjectStore:
        if self._is_spoiled and self._renewals >= _MOST_RENEWALS:
            self._let_go()
        if self._store is None:
            self._store, self._renewals = self._open_store(), 0
        elif self._is_spoiled:
            self._store.renew_buffer()
            self._renewals += 1
        else:
            return self._store
        self._is_spoiled = False
        level = logging.DEBUG if self._said else logging.INFO
        logger.log(level, "PDConnector: %s is connected to the pool", self._thread.name)
        return self._store

    def _works_again(self) -> None:
        if self._said:
            logger.info("PDConnector: %s uses the pool again", self._thread.name)
            self._said.clear()

    def _fail(self, error: StoreFailed) -> None:
        self._closed_until = self._clock() + RETRY_S
        level = logging.DEBUG if str(error) in self._said else logging.WARNING  # it may be gone for weeks
        self._said.add(str(error))
        logger.log(level, "PDConnector: the pool is not used for %.0f s: %s", RETRY_S, error)
        if not error.keeps_buffer:
            self._is_spoiled = True

    def _let_go(self) -> None:
        """Close the connection. One that cannot be closed lives as long as this thread's owner."""
        try:
            if self._store is not None and self._store.close():
                self._store = None
        except Exception:
            logger.exception("PDConnector: a connection to the pool cannot be closed")
