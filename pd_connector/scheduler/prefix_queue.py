"""Who waits behind others while these look for prefixes elsewhere, at peers or in the pool.

Behind one that lacks the same block, so that this is brought once; or, while as many look as may, behind all of them.
Nobody waits so beyond the deadline of its search (``compute_rate``): then it is computed, and not asked for.

Everything runs on the scheduler's thread.
"""

import math
from collections.abc import Callable, Collection, Hashable
from typing import Generic, Protocol, TypeVar


class _Begun(Protocol):
    """What was begun for a request: a question, or what is on its way."""

    @property
    def key(self) -> Hashable:
        """The first block that is missing."""

    @property
    def give_up_at(self) -> float:
        """When its request does not wait for it any longer."""


_Work = TypeVar("_Work", bound=_Begun)


class PrefixQueue(Generic[_Work]):
    """Owns what is begun, by the first block that is missing, and who waits behind it."""

    def __init__(self, most: int, clock: Callable[[], float]) -> None:
        """Start empty. While ``most`` are under way and in time, others wait."""
        self._most = most
        self._clock = clock
        #: Requests that are not asked for again.
        self.asked: set[str] = set()
        self._begun: dict[Hashable, _Work] = {}
        self._waits: dict[str, tuple[float, _Work | None]] = {}  # until when, and behind what (None: all), by request

    @property
    def is_full(self) -> bool:
        """Whether as many are under way as may be."""
        now = self._clock()
        # Not those that are late: vLLM may leave them aside for long, because of their adapters for example.
        return sum(now < each.give_up_at for each in self._begun.values()) >= self._most

    def get(self, key: Hashable, request_id: str) -> _Work | None:
        """Return what is begun for a block that a request lacks, if it is in time, or the request waits for it."""
        work = self._begun.get(key)
        _, behind = self._waits.get(request_id, (0.0, None))
        return work if work is not None and (self._clock() < work.give_up_at or behind is work) else None

    def begin(self, work: _Work) -> None:
        """Take up what is begun, or goes on in another form."""
        self._begun[work.key] = work

    def end(self, work: _Work) -> None:
        """Forget what has ended. Those behind it are looked at anew."""
        if self._begun.get(work.key) is work:
            del self._begun[work.key]

    def wait(self, request_id: str, until: float, behind: _Work | None = None) -> bool:
        """Have a request wait, but not beyond ``until``; return whether that is worth it."""
        now = self._clock()
        self._waits[request_id] = until, behind
        if now < until and (behind is None or now < behind.give_up_at):
            return True
        self.asked.add(request_id)
        return False

    def is_waiting(self, request_id: str) -> bool:
        """Return whether nothing has changed since a request was told to ``wait``, and it is still worth it."""
        now = self._clock()
        until, behind = self._waits.get(request_id, (-math.inf, None))
        if request_id in self.asked or now >= until:
            return False
        if behind is None:
            return self.is_full
        return self._begun.get(behind.key) is behind and now < behind.give_up_at

    def forget(self, request_id: str) -> None:
        """Forget a request. What was begun for it is its owner's."""
        self.asked.discard(request_id)
        self._waits.pop(request_id, None)

    def check_integrity(self, asking: Collection[str], under_way: Collection[_Work]) -> None:
        """Raise AssertionError unless the books balance with the requests ``asking`` and what is ``under_way``."""
        assert self.asked.issuperset(asking), "a request is being asked for that may be asked for again"
        assert {*map(id, self._begun.values())} <= {*map(id, under_way)}, "what has ended is waited for"
