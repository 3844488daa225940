"""Who waits while prefixes are looked for elsewhere, at peers or in the pool.

For answers; for what is on its way; behind a request that lacks the same block, so that this is brought once; or, while
as many look as may, behind all of them. Nobody waits beyond the deadline of its search (``compute_rate``): then it is
computed, and not asked for.

Everything runs on the scheduler's thread.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Hashable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from pd_connector.scheduler.scheduler_role import SchedulerRole

if TYPE_CHECKING:
    from pd_connector.vllm.types import Request


@dataclass(eq=False, slots=True)
class PrefixWork:
    """What was begun for a request: a question, or what is on its way."""

    request: "Request"  # it may have left
    first: int  # tokens that the device held
    key: Hashable  # of the first block that is missing
    give_up_at: float  # then the request does not wait for it any longer


@dataclass(eq=False, slots=True)
class Question(PrefixWork):
    """What others have been asked for a request."""

    answers: Collection[Future[Any]]  # those that have come, and those to come


@dataclass(eq=False, slots=True)
class OnItsWay(PrefixWork):
    """What is being brought."""

    is_wanted: bool = field(default=True, kw_only=True)  # its contents are valid
    is_late: bool = field(default=False, kw_only=True)  # its request waits no longer


_Work = TypeVar("_Work", bound=PrefixWork)
_Question = TypeVar("_Question", bound=Question)
_Way = TypeVar("_Way", bound=OnItsWay)


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


class PrefixSearch(SchedulerRole, ABC, Generic[_Question, _Way]):
    """Owns who waits for answers, for what is on its way, or behind others. To ask and to bring is its heirs' part."""

    def __init__(self, most: int, clock: Callable[[], float]) -> None:
        """Start with nothing asked. While ``most`` are asked for, or wait for what comes, others wait."""
        self._clock = clock
        self._asking: dict[str, _Question] = {}  # by request
        self._waiting: dict[str, _Way] = {}  # by request
        self._queue: PrefixQueue[_Question | _Way] = PrefixQueue(most, clock)

    def must_wait(self, request: "Request", computed_tokens: int) -> bool:
        """Return whether a request must wait for what others hold of its prompt; ask them, if they have not been.

        ``computed_tokens``: those that the device holds already.
        """
        if self.is_waiting(request):
            return True
        request_id = request.request_id
        if (asking := self._asking.get(request_id)) is not None:
            return self._take_answers(asking)
        if (late := self._waiting.pop(request_id, None)) is not None:
            late.is_late = True
            self._note_late(late)
        if request_id in self._queue.asked or self._rests():
            return False
        return self._begin(request, computed_tokens)

    def is_waiting(self, request: "Request") -> bool:
        """Return whether an answer or a prefix is still to come, for a request or those before it, and in time."""
        request_id = request.request_id
        if self._rests():
            return False
        if (asking := self._asking.get(request_id)) is not None:
            return self._clock() < asking.give_up_at and not all(answer.done() for answer in asking.answers)
        if (awaited := self._waiting.get(request_id)) is not None:
            return self._clock() < awaited.give_up_at
        return self._queue.is_waiting(request_id)

    def answers(self, request: "Request") -> Collection[Future[Any]]:
        """Return what ``must_wait`` has a request wait for, if that is answers."""
        asking = self._asking.get(request.request_id)
        return asking.answers if asking is not None else ()

    def finish(self, request: "Request", block_ids: Sequence[Sequence[int]]) -> None:
        """Forget a request. What is on its way for it goes on: others may find the prefix."""
        self._queue.forget(request.request_id)
        self._waiting.pop(request.request_id, None)
        if (asking := self._asking.pop(request.request_id, None)) is not None:
            self._queue.end(asking)
            self._abandon(asking)

    def _check_waits(self, brought: Collection[_Way]) -> None:
        """Raise AssertionError unless the books balance with what is on its way."""
        assert {*map(id, self._waiting.values())} <= {*map(id, brought)}, "what has ended is waited for"
        self._queue.check_integrity(self._asking, (*self._asking.values(), *brought))

    def _rests(self) -> bool:
        """Return whether nobody is asked or waited for now."""
        return False

    @abstractmethod
    def _begin(self, request: "Request", computed_tokens: int) -> bool:
        """Ask for what a request lacks; return whether it is to wait."""

    @abstractmethod
    def _take_answers(self, asking: _Question) -> bool:
        """Go on with answers, which are all there or late; return whether the request is to wait."""

    @abstractmethod
    def _note_late(self, late: _Way) -> None:
        """Note that a request does not wait any longer for what is on its way."""

    def _abandon(self, asking: _Question) -> None:
        """Let go of what is answered for a request that has left."""
