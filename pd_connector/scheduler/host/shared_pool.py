"""The pool behind host memory: what engines of a model have stored there, whichever computed it.

A prompt that is computed here passes through these states, each at most once:

    asked for --- the pool holds more ---> fetching to free slots --- all ranks have ---> found in host memory
        '--- it holds no more, or computing would be faster -----------'--- some blocks were gone ---> fewer are found

While peers are asked for a prompt, it is looked up already. If they bring something, it is looked up again behind that.

And a block that host memory has come to hold: remembered, pinned while it is copied, put. Puts are few at a time; what
waits for too long is left out. What the pool has not kept is put once more: a full one refuses a part of most puts, and
makes room meanwhile.

A pool that fails is not asked for a while, and nobody waits for it while something is overdue. All that is lost then is
time that was granted anyway. Everything runs on the scheduler's thread, but the look-ups.
"""

import hashlib
import logging
import math
import secrets
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from layout.block_objects import ObjectForm
from pd_connector.orders import Orders, PoolEnds, PoolOrder, Report
from pd_connector.params import is_decode_leg
from pd_connector.scheduler.compute_rate import ComputeRate
from pd_connector.scheduler.host.pool_lookups import longest_prefix
from pd_connector.scheduler.host.put_queue import PutQueue
from pd_connector.scheduler.host.tier import HostTier
from pd_connector.scheduler.prefix_search import OnItsWay, PrefixSearch, Question
from pd_connector.scheduler.scheduler_role import ended
from pd_connector.stats import StatsRecorder
from pd_connector.vllm.block_events import group_and_hash
from pd_connector.vllm.block_pools import BlockKeys, slots_of
from pd_connector.vllm.cache_specs import Retention
from pd_connector.vllm.device_blocks import HeldBlocks
from pd_connector.vllm.requests import computes_whole_prompt
from transfer.control.limits import LastFew
from transfer.store.store_thread import RETRY_S, StoreThread

if TYPE_CHECKING:
    from pd_connector.vllm.types import BlockHashWithGroupId, KVCacheBlocks, Request

logger = logging.getLogger(__name__)

#: A look-up that takes longer says that something is wrong with the pool.
_SLOW_S, _LOOKUP_S = 0.5, 2.0
_MAX_UNDER_WAY = 4  # requests that wait for the pool: a rank fetches for one after the other
#: So long after computing would have been faster, a look-up or a fetch is overdue: until it ends, all go on without.
_OVERDUE_S = 0.05
#: After a fetch is late, so that what has come meanwhile is found by others.
_GRACE_S = 2.0
#: A put has so long, of so many blocks and of no more than so many bytes of a rank: 1 Gbit/s for eight ranks.
_PUT_S, _PUT_BLOCKS, _PUT_BYTES, _MAX_PUTS = 5.0, 64, 64 << 20, 2
_MAX_KNOWN = 1 << 16  # keys of blocks that need not be put


@dataclass(frozen=True, slots=True)
class _LookUp:
    """A question to the pool. Its request may have left."""

    keys: Mapping[int, BlockKeys]  # of the prompt's blocks, by cache group
    held: int  # tokens from the beginning, of which the pool must hold more
    began_at: float
    takes_s: float  # at most, to be worth it
    answer: Future[int]  # tokens from the beginning that the pool seems to hold


@dataclass(eq=False, slots=True)
class _Asking(Question):
    look_up: _LookUp


@dataclass(eq=False, slots=True)
class _Fetch(OnItsWay):
    """Blocks on their way to host slots."""

    held: int  # tokens from the beginning that were found here before
    takes_s: float  # at most, to be worth it
    entries: tuple[tuple[int, int], ...]  # cache group and number of each block
    keys: BlockKeys
    hosts: HeldBlocks  # lent
    before: HeldBlocks  # that hold what comes before, lent as well
    ends: PoolEnds


@dataclass(slots=True)
class _Put:
    keys: BlockKeys
    namespace: str
    hosts: HeldBlocks  # lent
    ends: PoolEnds
    once_more: "set[BlockHashWithGroupId]"  # those that were not kept before


class SharedPool(PrefixSearch[_Asking, _Fetch]):
    """Owns the look-ups in the pool, and the slots that blocks are fetched to and put from."""

    def __init__(
        self,
        tier: HostTier,
        forms: "tuple[tuple[ObjectForm, ...], ...]",
        groups: Sequence[Retention],
        ranks: int,
        name_contents: Callable[[], str],
        rate: ComputeRate,
        lookups: StoreThread,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Start with nothing asked.

        Args:
            tier: of the host blocks.
            forms: of the objects of the first rank, by cache group.
            groups: what vLLM keeps of a request in every cache group.
            ranks: number of workers of the engine.
            name_contents: returns what must be equal for two engines' blocks to be alike. Called once, when requests
                have come.
            rate: at which prompts are computed here.
            lookups: has a connection to the pool.
            clock: monotonic, in seconds.
        """
        super().__init__(_MAX_UNDER_WAY, clock)
        self._host = host = tier.pool
        self._loans = tier.loans
        self._forms = forms
        self._groups = groups
        self._ranks = ranks
        self._name_contents = name_contents
        self._rate = rate
        self._lookups = lookups
        self._epoch = ""  # not empty if what was put before is no longer valid
        self._namespace = ""  # made when it is needed
        self._unit = math.lcm(*(host.block_tokens[group] for group in host.groups))
        self._ahead: dict[str, _LookUp] = {}  # by request, which is to ask
        self._looking: deque[_LookUp] = deque()  # one after the other
        self._fetches: dict[int, _Fetch] = {}  # one after the other, too
        self._fetch_due_at = math.inf  # that of the first of them
        self._to_put = PutQueue(tier)
        largest = max(sum(form.size * form.shares for form in of_group) for of_group in forms)
        self._put_blocks = max(1, min(_PUT_BLOCKS, _PUT_BYTES // max(largest, 1)))
        self._puts: dict[int, _Put] = {}
        self._known: LastFew[BlockHashWithGroupId, None] = LastFew(_MAX_KNOWN)  # in the pool, as far as known
        self._closed_until = -math.inf
        self._has_failed = False  # and nothing has succeeded since
        self._next_id = 0
        self._orders = Orders()
        host.take_news()  # from now on there are some

    # Requests

    def look_ahead(self, request: "Request", computed_tokens: int) -> None:
        """Look up what a request lacks while it waits for peers: if they bring nothing, the answer is there, too."""
        request_id = request.request_id
        # Behind more than a few, one is soon overdue, and all would go on without the pool.
        if request_id in self._ahead or len(self._looking) >= _MAX_UNDER_WAY:
            return
        if self._rests() or not self._is_worth_it(request, computed_tokens):
            return
        held, ends, first = self._lacking(request, computed_tokens)
        if first is not None and ends:
            self._ahead[request_id] = self._look_up(request, held, ends)

    def allocated(self, request: "Request", blocks: "KVCacheBlocks", external_tokens: int) -> int:
        """Bring nothing. The prompt is computed now, and will be put."""
        self._to_put.follow(request)
        return 0

    def step_orders(self, scheduled: Mapping[str, int]) -> Orders:
        """Return the fetches since the last step, and a put if few are under way."""
        self.counts["pool_blocks", "left"] += self._to_put.release()
        if self._to_put and len(self._puts) < _MAX_PUTS and self._clock() >= self._closed_until:
            self._begin_put()
        orders, self._orders = self._orders, Orders()
        return orders

    def settled(self, request_ids: set[str], failed: set[str], report: Report) -> None:
        """End the fetches and puts that all ranks have reported."""
        for fetch in ended(self._fetches, report.fetches, self._ranks, "the pool's fetch"):
            self._end_fetch(fetch)
            first = next(iter(self._fetches.values()), None)
            self._fetch_due_at = math.inf if first is None else self._clock() + first.takes_s + _OVERDUE_S
        for put in ended(self._puts, report.puts, self._ranks, "the pool's put"):
            self._end_put(put)
        self._remember_news()  # an engine without requests steps only for what is known to be put

    def finish(self, request: "Request", block_ids: Sequence[Sequence[int]]) -> None:
        """Forget a request. A fetch for it goes on: others may find the prefix."""
        super().finish(request, block_ids)
        self._to_put.forget(request.request_id)
        self._ahead.pop(request.request_id, None)

    @property
    def wants_step(self) -> bool:
        """Whether the engine must step even without requests, to put blocks and to learn of their end."""
        if self._fetches or self._puts or self._to_put.is_released_soon:
            return True
        return bool(self._to_put) and self._clock() >= self._closed_until

    def update_stats(self, stats: StatsRecorder) -> None:
        """Record what was looked up, fetched and put."""
        super().update_stats(stats)
        stats.gauge("pool_works", float(not self._has_failed))

    def reset(self) -> bool:
        """Find nothing any more of what is in the pool: it may be no longer valid, or only for other engines."""
        for fetch in self._fetches.values():
            fetch.is_wanted = False
        for asking in self._asking.values():
            self._queue.end(asking)
        self._asking.clear()
        self._ahead.clear()
        self.counts["pool_blocks", "refused"] += self._to_put.clear()
        self._known.clear()
        self._host.take_news()
        self._epoch, self._namespace = secrets.token_hex(8), ""
        logger.info(
            "PDConnector: the caches were reset: until this engine restarts, it finds in the pool only what it puts "
            "there from now on, and others do not find that"
        )
        return True

    def close(self) -> None:
        """Stop looking up."""
        self._lookups.close()
        self._lookups.join()

    def check_integrity(self) -> None:
        """Raise AssertionError unless the books balance."""
        held = [(*fetch.before, *fetch.hosts) for fetch in self._fetches.values()] + [
            put.hosts for put in self._puts.values()
        ]
        assert self._loans.are_lent(held), "blocks are fetched to, or put from, slots that are not lent"
        self._check_waits(self._fetches.values())
        assert not self._ahead.keys() & self._asking.keys(), "a request that asks is to ask"
        assert len(self._puts) <= _MAX_PUTS, "more is put at a time than is allowed"
        self._to_put.check_integrity()

    # Looking up

    def _begin(self, request: "Request", computed_tokens: int) -> bool:
        """Look up what a request lacks; return whether it is to wait."""
        request_id = request.request_id
        ahead = self._ahead.pop(request_id, None)
        if not self._is_worth_it(request, computed_tokens):
            return False
        held, ends, first = self._lacking(request, computed_tokens)
        if first is None or not ends:
            self._queue.asked.add(request_id)
            return False
        give_up_at = self._rate.deadline_of(request_id, request.num_prompt_tokens - 1 - held)
        same = self._queue.get(first, request_id)
        if same is not None or self._queue.is_full or self._clock() >= give_up_at:
            if ahead is not None:
                self._ahead[request_id] = ahead
            is_waiting = self._queue.wait(request_id, give_up_at, same)
            self.counts["pool_prompts", "late"] += not is_waiting
            return is_waiting
        self._queue.asked.add(request_id)
        # What has been brought meanwhile ends elsewhere than what was looked for.
        look_up = ahead if ahead is not None and ahead.held == held else self._look_up(request, held, ends)
        asking = _Asking(request, computed_tokens, first, give_up_at, (look_up.answer,), look_up)
        self._asking[request_id] = asking
        self._queue.begin(asking)
        self.counts["pool_prompts", "asked"] += 1
        return not look_up.answer.done() or self._take_answers(asking)

    def _is_worth_it(self, request: "Request", computed_tokens: int) -> bool:
        """Return whether a prompt is computed here, and so much of it is missing on the device."""
        missing = request.num_prompt_tokens - 1 - computed_tokens
        is_computed_here = not (is_decode_leg(request.kv_transfer_params) or computes_whole_prompt(request))
        return is_computed_here and missing >= self._rate.least_tokens

    def _lacking(
        self, request: "Request", computed_tokens: int
    ) -> "tuple[int, Sequence[int], BlockHashWithGroupId | None]":
        """Return how much of a prompt is found here, where what the pool holds may end, and the first missing block."""
        hit = self._host.find(request, computed_tokens)
        held = computed_tokens + (hit.tokens if hit is not None else 0)
        least = held + self._rate.least_tokens
        ends = range((request.num_prompt_tokens - 1) // self._unit * self._unit, least - 1, -self._unit)
        keys = (self._host.key_at(request, group, held) for group in self._host.groups)
        return held, ends, next((key for key in keys if key is not None), None)

    def _look_up(self, request: "Request", held: int, ends: Sequence[int]) -> _LookUp:
        """Ask the pool at which of the ``ends`` it has what is behind ``held`` tokens."""
        keys = {group: self._host.keys_of(request, group) for group in self._host.groups}
        kept = {group: self._groups[group] for group in keys}
        whole = [group for group, of in kept.items() if not (of.window or of.chunk or of.states)]
        look = partial(longest_prefix, self._forms, self._space(), keys, self._host.block_tokens, ends, held, whole)
        takes_s = self._rate.seconds_for(request.num_prompt_tokens - 1 - held)
        look_up = _LookUp(keys, held, self._clock(), takes_s, self._lookups.submit(look, _LOOKUP_S))
        self._looking.append(look_up)
        return look_up

    def _space(self) -> str:
        """Return the namespace of the objects that are valid here."""
        if not self._namespace:
            named = f"{self._name_contents()} {self._epoch}".encode()
            self._namespace = f"pd/{hashlib.blake2b(named, digest_size=16).hexdigest()}"
        return self._namespace

    def _note_late(self, late: _Fetch) -> None:
        self.counts["pool_prompts", "late"] += 1

    def _take_answers(self, asking: _Asking) -> bool:
        """Go on with the answer, which is there or late; return whether the request is to wait for a fetch."""
        now, look_up = self._clock(), asking.look_up
        del self._asking[asking.request.request_id]
        self._queue.end(asking)
        if not look_up.answer.done():
            self.counts["pool_prompts", "late"] += 1
            if now - look_up.began_at >= _SLOW_S:
                self._close_for_a_while()
            return False
        if look_up.answer.exception() is not None:
            self.counts["pool_prompts", "failed"] += 1
            self._close_for_a_while()
            return False
        self._has_failed = False
        tokens, sizes = look_up.answer.result(), self._host.block_tokens
        self._forget(key for group, keys in look_up.keys.items() for key in keys[tokens // sizes[group] :])
        if tokens <= look_up.held:
            self.counts["pool_prompts", "nothing"] += 1
            return False
        give_up_at = self._rate.deadline_of(asking.request.request_id, tokens - look_up.held)
        if self._rests() or now >= give_up_at:
            self.counts["pool_prompts", "late"] += 1
            return False
        return self._begin_fetch(asking, tokens, give_up_at)

    def _forget(self, keys: "Iterable[BlockHashWithGroupId]") -> None:
        """Note that the pool has lost blocks: they may be put again."""
        for key in keys if self._known else ():
            self._known.pop(key, None)

    def _rests(self) -> bool:
        """Return whether requests go on without the pool: it has failed, or what it does is overdue."""
        now = self._clock()
        while self._looking and self._looking[0].answer.done():
            self._looking.popleft()
        first = self._looking[0] if self._looking else None
        look_up_due_at = math.inf if first is None else first.began_at + first.takes_s + _OVERDUE_S
        return now < self._closed_until or now >= min(look_up_due_at, self._fetch_due_at)

    def _close_for_a_while(self) -> None:
        self._closed_until, self._has_failed = self._clock() + RETRY_S, True
        self._known.clear()  # it may come back empty

    # Fetching

    def _begin_fetch(self, asking: _Asking, end: int, give_up_at: float) -> bool:
        """Fetch what host memory lacks; return whether the request is to wait for it."""
        request = asking.request
        entries, keys = [], []
        for group in self._host.groups:
            of_group = asking.look_up.keys[group]
            for number in self._groups[group].needed_blocks(asking.first, end)[0]:
                if not self._host.holds(of_group[number]):
                    entries.append((group, number))
                    keys.append(of_group[number])
        # What host memory holds before these must not be evicted for them.
        hit = self._host.find(request, asking.first)
        before = hit.blocks if hit is not None else ()
        hosts = self._loans.lend(before, len(entries)) if entries else None
        if hosts is None:
            self.counts["pool_prompts", "full" if entries else "nothing"] += 1
            return False
        held = asking.look_up.held
        takes_s = self._rate.seconds_for(end - held)
        fetch = _Fetch(
            request, asking.first, asking.key, give_up_at, held, takes_s, tuple(entries), tuple(keys), hosts,
            before, PoolEnds(0),
        )  # fmt: skip
        order = self._order(keys, hosts, takes_s + _GRACE_S)
        self._orders += Orders(fetches=(order,))
        if not self._fetches:
            self._fetch_due_at = self._clock() + takes_s + _OVERDUE_S
        self._fetches[order.pool_id] = self._waiting[request.request_id] = fetch
        self._queue.begin(fetch)
        return True

    def _order(self, keys: Sequence["BlockHashWithGroupId"], hosts: HeldBlocks, timeout_s: float) -> PoolOrder:
        """Return the order for blocks, the last one first."""
        self._next_id += 1
        named = [group_and_hash(key) for key in reversed(keys)]
        groups = np.array([group for group, _ in named], np.int64)
        hashes = tuple(block_hash for _, block_hash in named)
        return PoolOrder(self._next_id, self._space(), groups, slots_of(hosts)[::-1].copy(), hashes, timeout_s)

    def _end_fetch(self, fetch: _Fetch) -> None:
        """Let what has come on every rank be found, and give the slots back."""
        is_awaited = self._waiting.pop(fetch.request.request_id, None) is not None
        self._queue.end(fetch)
        if fetch.ends.failed:
            self._close_for_a_while()
        last = len(fetch.entries) - 1
        came = [index for index in range(len(fetch.entries)) if last - index not in fetch.ends.missing]
        for run in _runs(fetch.entries, came) if fetch.is_wanted else ():
            for index in run:
                self._known[fetch.keys[index]] = None
            group, number = fetch.entries[run[0]]
            self._host.publish_at(fetch.request, group, number, tuple(fetch.hosts[index] for index in run))
        hit = self._host.find(fetch.request, fetch.first) if is_awaited else None  # others compute them
        self.counts["pool_tokens", ""] += max(fetch.first + hit.tokens - fetch.held, 0) if hit is not None else 0
        if not fetch.is_late:
            is_found = bool(came) and fetch.is_wanted
            self.counts["pool_prompts", "failed" if fetch.ends.failed else "fetched" if is_found else "nothing"] += 1
        self.counts["pool_blocks", "fetched"] += len(came)
        self.counts["pool_blocks", "gone"] += len(fetch.entries) - len(came)
        self._forget(fetch.keys[last - number] for number in fetch.ends.missing)
        self._loans.take_back((*fetch.before, *fetch.hosts))

    # Putting

    def _remember_news(self) -> None:
        lacking = []
        for key in self._host.take_news():
            if key in self._known:
                self._known.move_to_end(key)
            else:
                lacking.append(key)
        self.counts["pool_blocks", "left"] += self._to_put.add(lacking)

    def _begin_put(self) -> None:
        """Put the next blocks: of a prompt, its end."""
        taken, once_more = self._to_put.take(self._put_blocks)
        held = [(key, host) for key, host in zip(taken, self._host.holding(taken), strict=True) if host]
        self.counts["pool_blocks", "refused"] += len(once_more.difference(key for key, _ in held))
        if not held:
            return
        keys, hosts = zip(*held, strict=True)
        self._loans.lend(hosts, 0)
        order = self._order(keys, hosts, _PUT_S)
        self._orders += Orders(puts=(order,))
        self._puts[order.pool_id] = _Put(keys, order.namespace, hosts, PoolEnds(0), once_more)

    def _end_put(self, put: _Put) -> None:
        self._loans.take_back(put.hosts)
        if put.ends.failed:
            self._close_for_a_while()
        elif len(put.ends.missing) < len(put.keys):
            self._has_failed = False
        last = len(put.keys) - 1
        missing = {put.keys[last - number] for number in put.ends.missing}
        self.counts["pool_blocks", "put"] += len(put.keys) - len(put.ends.missing)
        is_valid = put.namespace == self._namespace
        for key in put.keys:
            if key not in missing:
                if is_valid:
                    self._known[key] = None
            elif not (is_valid and key not in put.once_more and self._to_put.add_again(key)):
                self.counts["pool_blocks", "refused"] += 1


def _runs(entries: Sequence[tuple[int, int]], came: Iterable[int]) -> Iterator[list[int]]:
    """Yield the indices of entries that have come, in runs of neighbours in a block table."""
    run: list[int] = []
    for index in came:
        group, number = entries[index]
        if run and entries[run[-1]] != (group, number - 1):
            yield run
            run = []
        run.append(index)
    if run:
        yield run
