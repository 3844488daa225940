"""Requests that a control server has not answered, because its handler has nothing new to say yet.

Each waits for a topic to change, and gets a reply that says so little when it has waited long enough. Opens no sockets.
"""

import heapq
import threading
import time
from collections import defaultdict
from dataclasses import dataclass

from transfer.control.messages import Reply, Request

#: Of all peers together. Further ones are answered at once, with what there is.
MAX_WAITING = 16_384

_MOST_STALE = 1024  # times that are kept of requests that have been answered, besides as many as are waiting


@dataclass(frozen=True, slots=True)
class NotYet:
    """A handler has nothing new to say. It is asked again when ``topic`` changes, see ``ControlServer.changed``."""

    topic: str
    wait_s: float  # since the request arrived; then ``reply`` is sent
    reply: Reply


@dataclass(frozen=True, slots=True)
class WaitingRequest:
    """A request, who has sent it, and what it waits for."""

    peer: bytes  # the connection
    message_id: int
    request: Request
    topic: str
    due_at: float  # on ``time.monotonic``: when ``reply`` is sent
    reply: Reply


class WaitingRequests:
    """Holds requests by topic. ``changed`` is safe from any thread; all else belongs to the server's thread."""

    def __init__(self) -> None:
        self._by_topic: dict[str, dict[tuple[bytes, int], WaitingRequest]] = defaultdict(dict)
        self._due: list[tuple[float, bytes, int, str]] = []  # a heap; entries of requests that have left are skipped
        self._number = 0
        self._lock = threading.Lock()  # guards what follows
        self._changed: dict[str, None] = {}  # an ordered set

    def __len__(self) -> int:
        return self._number

    def add(self, waiting: WaitingRequest) -> bool:
        """Hold a request, in place of its own repetition; return False if there are too many."""
        key = (waiting.peer, waiting.message_id)
        held = self._by_topic.get(waiting.topic, {}).get(key)
        if held is not None:  # it was sent again: the first time counts
            return True
        if self._number >= MAX_WAITING:
            return False
        self._by_topic[waiting.topic][key] = waiting
        self._number += 1
        if len(self._due) > 2 * self._number + _MOST_STALE:
            self._due = [
                (each.due_at, *key, topic) for topic, held in self._by_topic.items() for key, each in held.items()
            ]
            heapq.heapify(self._due)
        else:
            heapq.heappush(self._due, (waiting.due_at, *key, waiting.topic))
        return True

    def changed(self, *topics: str) -> bool:
        """Note that what waits for one of ``topics`` is to be asked again; return whether the server must be woken."""
        with self._lock:
            is_first = not self._changed
            self._changed |= dict.fromkeys(topics)
            return is_first

    def take_changed(self) -> list[WaitingRequest]:
        """Remove and return the requests whose topics have changed since the last call."""
        with self._lock:
            topics, self._changed = self._changed, {}
        taken: list[WaitingRequest] = []
        for topic in topics:
            taken += self._by_topic.pop(topic, {}).values()
        self._number -= len(taken)
        return taken

    def take_late(self, now: float) -> list[WaitingRequest]:
        """Remove and return the requests that have waited long enough."""
        taken: list[WaitingRequest] = []
        while self._due and self._due[0][0] <= now:
            due_at, peer, message_id, topic = heapq.heappop(self._due)
            held = self._by_topic.get(topic, {})
            waiting = held.get((peer, message_id))
            if waiting is not None and waiting.due_at == due_at:
                taken.append(held.pop((peer, message_id)))
                if not held:
                    del self._by_topic[topic]
        self._number -= len(taken)
        return taken

    @property
    def timeout_ms(self) -> int | None:
        """Milliseconds until requests are to be taken, at most; None if none waits."""
        if self._changed:  # and they were not taken, because the server's turn has failed
            return 0
        return max(int((self._due[0][0] - time.monotonic()) * 1000) + 1, 0) if self._due else None

    def check_integrity(self) -> None:
        """Raise AssertionError unless the books balance."""
        held = {
            (waiting.due_at, *key, topic) for topic, each in self._by_topic.items() for key, waiting in each.items()
        }
        assert len(held) == self._number, "requests are miscounted"
        assert held <= set(self._due), "a request waits for ever"
        assert all(self._by_topic.values()), "a topic is remembered for which nobody waits"
