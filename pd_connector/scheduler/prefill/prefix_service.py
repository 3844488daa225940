"""Finds the beginnings of other engines' prompts in this engine's caches, and leases them.

A question comes on the control channel's thread and is answered on the scheduler's, which knows the caches:

    asked --- the engine is woken, and ends a step ---> answered: a lease, or why there is none
                                                           '--- a repetition gets the same answer, for a while

It lies on the device or, if that has more of it, in host memory as a whole. What a step under way still writes is not
offered.
"""

import threading
import time
from collections import Counter
from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Protocol

import msgspec

from pd_connector.params import RemotePrefill
from pd_connector.vllm.block_hashes import BlockHashes
from pd_connector.vllm.cache_specs import Retention
from pd_connector.vllm.device_blocks import DeviceBlocks, HeldBlocks, tokens_before
from transfer.control.limits import LastFew
from transfer.control.messages import Find, Found
from transfer.control.waiting_requests import NotYet

if TYPE_CHECKING:
    from pd_connector.vllm.block_pools import HostBlockPool
    from pd_connector.vllm.types import BlockHash, KVCacheBlock

#: Share of the blocks that stay free of leases over prefixes: of an engine that decodes, requests grow into them.
_SPARE = 0.1
#: For which a question waits for a step. Whoever asks computes its prompt long before.
_WAIT_S = 1.0
#: After which a question is not served any more: whoever asks may have been told by then that there is no answer, and
#: nobody would end the lease.
_SERVED_S = 0.8
#: Questions at a time; more are not answered.
_MAX_ASKED = 64
#: Of a step, after which no further question is answered in it. Each takes about 1.5 ms for 2,048 blocks.
_SERVE_S = 0.002
#: Answers that are remembered, for messages that come again: more than can be on their way.
_MAX_ANSWERS = 256

#: Grants a lease over blocks: their ids by cache group, 0 for those that are not held, and the tokens that they hold.
Lend = Callable[[HeldBlocks, tuple[tuple[int, ...], ...], int], RemotePrefill]


class _Cache(Protocol):
    """The device's blocks, or host memory's."""

    def longest_prefix(self, hashes: "Sequence[BlockHash]") -> "tuple[tuple[Sequence[KVCacheBlock], ...], int]": ...

    def has_spare(self, number: int, share: float) -> bool: ...


@dataclass(frozen=True, eq=False)
class _Prefix:
    """What one cache holds of some tokens."""

    cache: _Cache
    lend: Lend
    table: "tuple[tuple[KVCacheBlock, ...], ...]"  # by cache group
    tokens: int

    @cached_property
    def blocks(self) -> HeldBlocks:
        return tuple(block for group in self.table for block in group if not block.is_null)

    @cached_property
    def ids(self) -> tuple[tuple[int, ...], ...]:
        return tuple(tuple(0 if block.is_null else int(block.block_id) for block in group) for group in self.table)


class PrefixService:
    """Owns the questions that have not been answered, and the last answers."""

    def __init__(
        self,
        blocks: DeviceBlocks,
        hashes: BlockHashes,
        groups: Sequence[Retention],
        being_written: Callable[[], set[int] | None],
        lend: Lend,
        wake: Callable[[], None],
        notify: Callable[[str], None],
        counts: Counter[tuple[str, str]],
        clock: Callable[[], float] = time.monotonic,
        *,
        wants_blocks: Callable[[], bool],
        is_outdated: Callable[[], bool] = lambda: False,
    ) -> None:
        """Start without questions.

        Args:
            blocks: of the device.
            hashes: name them.
            groups: what vLLM keeps of a request in every cache group.
            being_written: returns the ids of the blocks that steps under way may write, None if nobody knows. They are
                asked when a step has been scheduled.
            lend: grants a lease.
            wake: wakes the engine, on any thread.
            notify: has the question of an id answered, on any thread.
            counts: see ``SchedulerRole.counts``.
            clock: monotonic, in seconds.
            wants_blocks: returns whether requests wait for blocks of the device. Then it lends none: who waits for
                leases to end would wait for ever.
            is_outdated: returns whether another model has computed what is found here. Whoever asks would keep it under
                the present one's name.
        """
        self._is_outdated = is_outdated
        self._wants_blocks = wants_blocks
        self._clock = clock
        self._blocks = blocks
        self._hashes = hashes
        every = enumerate(groups)
        self._whole = {  # block sizes of the groups that keep every token
            group: kept.block_tokens for group, kept in every if not (kept.window or kept.chunk or kept.states)
        }
        self._being_written = being_written
        self._lend = lend
        self._host: HostBlockPool | None = None
        self._lend_in_host = lend  # until there is host memory
        self._wake = wake
        self._notify = notify
        self._lock = threading.Lock()
        self._asked: dict[str, tuple[Find, float]] = {}  # and when it came
        self._answers: LastFew[str, Found] = LastFew(_MAX_ANSWERS)
        self._counts = counts

    def use_host(self, host: "HostBlockPool", lend: Lend) -> None:
        """Look in host memory as well from now on. ``lend`` grants leases over its blocks."""
        self._lend_in_host, self._host = lend, host

    def ask(self, find: Find, engine_id: str) -> Found | NotYet:
        """Return the answer to a question, or that there is none yet. On the control channel's thread.

        What needs no lease is answered at once: a step may take long.
        """
        own = Found(engine_id, self._hashes.hashing, self._blocks.hash_tokens)
        if find.hashing != own.hashing:
            return msgspec.structs.replace(
                own,
                reason=f"it names blocks otherwise ({own.hashing}, not {find.hashing}): start all engines with the "
                "same --prefix-caching-hash-algo and the same PYTHONHASHSEED",
            )
        nothing = _busy(own)
        with self._lock:
            if (answer := self._answers.get(find.find_id)) is not None:
                return answer
            if find.hash_tokens != own.hash_tokens or not self._may_hold(find):
                return own
            if find.find_id not in self._asked:
                if len(self._asked) >= _MAX_ASKED:
                    return nothing
                self._asked[find.find_id] = find, self._clock()
        self._wake()
        return NotYet(find.find_id, _WAIT_S, nothing)

    @property
    def is_asked(self) -> bool:
        """Whether a question has not been answered."""
        return bool(self._asked)

    def serve(self, engine_id: str) -> None:
        """Answer questions as they came, for a while. On the scheduler's thread, when a step has been scheduled."""
        if not self._asked:
            return
        began = self._clock()
        with self._lock:
            asked = list(self._asked.values())
        unfinished = self._being_written()  # looks through all requests
        for find, since in asked:
            found = self._answer(find, engine_id, unfinished, is_late=self._clock() - since >= _SERVED_S)
            what = "found" if found.lease_id else "refused" if found.reason else "nothing"
            self._counts["prefixes_served", what] += 1
            with self._lock:
                self._answers[find.find_id] = found
                del self._asked[find.find_id]
            self._notify(find.find_id)
            if self._clock() - began >= _SERVE_S:
                return

    def forget(self) -> None:
        """Forget all answers: their leases have ended."""
        with self._lock:
            self._answers.clear()

    def check_integrity(self) -> None:
        """Raise AssertionError unless the books balance."""
        with self._lock:
            assert not self._asked.keys() & self._answers.keys(), "a question is answered and open"

    def _answer(self, find: Find, engine_id: str, unfinished: Container[int] | None, *, is_late: bool) -> Found:
        own = Found(engine_id, self._hashes.hashing, self._blocks.hash_tokens)
        if is_late:
            return _busy(own)
        if self._is_outdated():
            return msgspec.structs.replace(own, reason="another model has computed what it holds: reset its caches")
        found = [each for each in self._prefixes(find, unfinished) if each.tokens >= max(find.least_tokens, 1)]
        is_short = self._wants_blocks()
        offers = [
            each
            for each in found
            if each.cache.has_spare(len(each.blocks), _SPARE) and not (is_short and each.cache is self._blocks)
        ]
        if not offers:
            return msgspec.structs.replace(own, reason="it is short of blocks") if found else own
        best = max(offers, key=lambda each: each.tokens)  # the device before host memory
        remote = best.lend(best.blocks, best.ids, best.tokens)
        return msgspec.structs.replace(
            own,
            lease_id=remote.lease_id,
            lease_ttl_s=remote.lease_ttl_s,
            tokens=best.tokens,
            block_ids=best.ids,
            block_sizes=remote.remote_block_sizes,
            layers=remote.remote_layers,
        )

    def _may_hold(self, find: Find) -> bool:
        wanted = find.hashes, max(find.least_tokens, 1), self._whole
        return self._blocks.may_hold(*wanted) or (self._host is not None and self._host.may_hold(*wanted))

    def _prefixes(self, find: Find, unfinished: Container[int] | None) -> "Iterator[_Prefix]":
        """Yield what each cache holds of the tokens in question that nobody writes any more."""
        if unfinished is not None:
            yield self._prefix(find, self._blocks, unfinished, self._lend)
        if self._host is not None:
            yield self._prefix(find, self._host, frozenset(), self._lend_in_host)

    def _prefix(self, find: Find, cache: _Cache, unfinished: Container[int], lend: Lend) -> "_Prefix":
        """Return the longest prefix that is complete, of a multiple of ``find.unit_tokens`` tokens.

        A shorter prefix may need other blocks: windows move. Beside drafts, a cache leaves out the end of what it has.
        """
        hashes, left_out = find.hashes, -1
        while hashes:
            table, tokens = cache.longest_prefix(hashes)
            whole = tuple(tuple(group) for group in table)
            complete = tokens_before(whole, self._blocks.block_tokens, tokens, unfinished)
            complete -= complete % find.unit_tokens
            if complete == tokens:
                return _Prefix(cache, lend, whole, tokens)
            if left_out < 0:
                left_out = tokens - cache.longest_prefix(hashes[: tokens // self._blocks.hash_tokens])[1]
            hashes = hashes[: min((complete + left_out) // self._blocks.hash_tokens, len(hashes) - 1)]
        return _Prefix(cache, lend, (), 0)


def _busy(own: Found) -> Found:
    return msgspec.structs.replace(own, reason="it is busy")
