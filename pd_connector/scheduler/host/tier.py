"""The role of host memory: which blocks are stored there, which are found there, and which are in use.

A device block passes through these states:

    computed --- chosen ---> being stored --- all ranks have reported ---> found by prefix hits --- evicted ---> gone
                    '-------------'--- a rank has failed, a reset, or the device does not find it any more ----------^

A block is chosen with the step that computes it. If that does not end well, the device does not find the block any
more, which is looked at when its store is ordered and when it has ended.

Both blocks of a store are referenced until every rank has reported it, so that neither vLLM nor this pool reuses them.
Of a load only the host blocks are, because vLLM keeps the device blocks for the waiting request. A block can be found
only when its store has ended on every rank. Everything runs on the scheduler's thread.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice
from typing import TYPE_CHECKING, Literal

from pd_connector.orders import BlockMoves, LoadOrder, Orders, Report, StoreEnds, StoreOrder
from pd_connector.scheduler.host.landed_prompts import BorderBlocks, LandedPrompt, LandedPrompts
from pd_connector.scheduler.host.loans import HostLoans
from pd_connector.scheduler.scheduler_role import SchedulerRole, ended
from pd_connector.stats import StatsRecorder
from pd_connector.vllm.block_pools import BlockKeys, Candidate, HostBlockPool, HostHit, Store, slot_of

if TYPE_CHECKING:
    from pd_connector.vllm.types import BlockHashWithGroupId, KVCacheBlock, KVCacheBlocks, KVCacheEvent, Request

StoreMode = Literal["eager", "lazy"]


@dataclass(slots=True)
class _Progress:
    """How far a request's blocks have been scanned for stores."""

    request: "Request"
    scanned: list[int]  # blocks, by cache group
    next_full_at: int  # computed tokens at which the next block is full
    preemptions: int = 0  # of the request, when it was last given blocks


@dataclass(frozen=True, slots=True)
class _Offer:
    hit: HostHit
    goes_on: bool  # whether the blocks right after the hit were there as well, though not to be found


@dataclass(frozen=True, slots=True)
class _Load:
    hit: HostHit  # pinned, or of a prompt that has landed
    tokens: int
    landed: LandedPrompt | None


@dataclass(slots=True)
class _StoreJob:
    stores: tuple[Store, ...]
    touch_at_end: list[BlockKeys]  # of requests that have finished meanwhile
    ends: StoreEnds = field(default_factory=lambda: StoreEnds(0))
    abandoned: bool = False  # the contents are no longer valid, and the device blocks were given back


class HostTier(SchedulerRole):
    """Owns the host pool, and the hits, loads and stores of one engine."""

    def __init__(self, pool: HostBlockPool, ranks: int, mode: StoreMode = "eager") -> None:
        """Start with an empty pool.

        Args:
            pool: the host blocks.
            ranks: number of workers of the engine, each of which copies its part of every block.
            mode: "eager" stores blocks when they are computed, "lazy" when vLLM evicts them soon, which needs a pool
                with lookahead.
        """
        #: The host blocks. Others look up what they hold, and lend them by ``loans``.
        self.pool = pool
        #: To leases that move here, and to prompts that are pulled here.
        self.loans = HostLoans(pool)
        self._ranks = ranks
        self._mode = mode
        self._requests: dict[str, _Progress] = {}
        self._offers: dict[str, _Offer] = {}  # their blocks are pinned
        self._loads: dict[str, _Load] = {}  # under way
        self._landed = LandedPrompts(pool, self.loans)
        self._has_failed: set[str] = set()  # requests whose load or pull has: they compute their tokens
        self._jobs: dict[int, _StoreJob] = {}  # under way
        self._storing: dict[object, None] = {}  # keys of all blocks chosen or being stored; an ordered set
        self._chosen: list[Store] = []  # to be ordered in the next step: this step still computes them
        self._ready: list[Store] = []  # to be ordered in this step
        self._touch_at_end: list[BlockKeys] = []  # for the next job
        self._has_allocated = False  # whether a request was given blocks since the last step
        self._ordered_loads: list[LoadOrder] = []
        self._next_store = 0

    @property
    def is_lazy(self) -> bool:
        """Whether blocks are stored when vLLM evicts them soon, the last ones of a request first."""
        return self._mode == "lazy"

    # Requests

    def add(self, request: "Request") -> None:
        """Take up a request. In eager mode its blocks are stored as they are computed."""
        progress = self._requests[request.request_id] = _Progress(request, [], 0)
        self._restart_scan(progress)

    def missing_tokens(self, request: "Request", computed_tokens: int) -> int:
        """Return how many tokens beyond ``computed_tokens`` can be loaded, and pin their host blocks.

        vLLM asks in every step until it has blocks for the request. The blocks that were found stay pinned meanwhile:
        finding and pinning a long prompt takes milliseconds.
        """
        if (landed := self._landed.tokens(request, computed_tokens)) is not None:
            return landed
        offer = self._offers.get(request.request_id)
        if offer is not None and offer.hit.first_token == computed_tokens and not self._has_grown(request, offer):
            return offer.hit.tokens
        for request_id in [*self._offers]:  # at most one: vLLM had no blocks for it, and will ask about it again
            self._withdraw(request_id)
        if request.request_id in self._has_failed:
            return 0
        hit = self.pool.find(request, computed_tokens)
        if hit is None:
            return 0
        self.pool.pin(hit.blocks)
        self._offers[request.request_id] = _Offer(hit, self.pool.holds_next(request, hit))
        return hit.tokens

    def allocated(self, request: "Request", blocks: "KVCacheBlocks", external_tokens: int) -> int:
        """Order the load that was offered, if vLLM has accepted it, and return its number of tokens."""
        self.pool.on_allocated(blocks)
        self._has_allocated = True
        progress = self._requests.get(request.request_id)
        if progress is not None and progress.preemptions != request.num_preemptions:
            progress.preemptions = request.num_preemptions
            self._restart_scan(progress)  # it may have other blocks now, and host memory may have evicted its old ones
        if not external_tokens:
            self._has_failed.discard(request.request_id)  # it runs: what vLLM kept for it is its own
        landed, offer = self._landed.take(request.request_id), self._offers.pop(request.request_id, None)
        if landed is not None:
            hit, first_token = landed.hit, landed.first_token
        elif offer is not None:
            hit, first_token = offer.hit, offer.hit.first_token
        else:
            return 0
        tokens = hit.first_token + hit.tokens - first_token
        if not tokens or external_tokens < tokens:  # none if the device has come to hold all that has landed
            self._let_go(hit, landed)
            return 0
        self._loads[request.request_id] = _Load(hit, tokens, landed)
        filled, unfilled = _divided(hit, blocks.blocks, self.pool.block_tokens, first_token)
        self.pool.give_back(blocks.blocks, unfilled)
        self._ordered_loads.append(LoadOrder(request.request_id, BlockMoves.of(filled), tokens))
        return tokens

    def loaded_tokens(self, request: "Request") -> int:
        """Return how many of a request's tokens are being loaded from host memory."""
        load = self._loads.get(request.request_id)
        return load.tokens if load is not None else 0

    def settled(self, request_ids: set[str], failed: set[str], report: Report) -> None:
        """End the loads of these requests, and the stores that all ranks have reported."""
        self._end_loads(request_ids, failed)
        stores = {store_id: ends for store_id, ends in report.stores.items() if store_id >= 0}  # others move leases
        for job in ended(self._jobs, stores, self._ranks, "store"):
            self._end_job(job)

    def finish(self, request: "Request", block_ids: Sequence[Sequence[int]]) -> None:
        """Forget a request. Its load, if any, goes on; in eager mode, its full blocks not stored yet are stored."""
        self._withdraw(request.request_id)
        self._has_failed.discard(request.request_id)
        progress = self._requests.pop(request.request_id, None)
        if progress is not None and self.pool.remembers_tokens:
            self._remember_tokens(progress, 0)
        if progress is not None and self._mode == "eager":
            candidates: list[Candidate] = []
            self._scan(progress, 0, candidates)
            self._chosen += self.pool.start_stores(candidates)
            self._touch_when_stored(self.pool.block_keys(request))

    # Leases that move here, and prompts that are pulled here

    def will_hold(self, keys: "Iterable[BlockHashWithGroupId | None]") -> bool:
        """Return whether one of the blocks is on its way to host memory."""
        return not self._storing.keys().isdisjoint(keys)

    def loading(self, request_id: str) -> HostHit | None:
        """Return what a request is being loaded from; None if it is not."""
        load = self._loads.get(request_id)
        return load.hit if load is not None else None

    def landed(self, request: "Request", hit: HostHit, first_token: int, borders: BorderBlocks) -> None:
        """Offer a request what has landed for it in blocks that were lent: see ``LandedPrompts.add``."""
        self._withdraw(request.request_id)  # what it was offered before, which the hit covers
        self._landed.add(request, hit, first_token, borders)

    def store_state(self, request: "Request", group: int, entry: int, block: "KVCacheBlock") -> None:
        """Store a state of a request's prompt that others can find only now. In lazy mode, it is as vLLM evicts it."""
        if self._mode == "eager":
            found = self.pool.candidates(request, group, entry, entry + 1, (block,))
            new = [each for each in found if each is not None and each.key not in self._storing][: self.pool.free]
            self._storing |= dict.fromkeys(each.key for each in new)
            self._chosen += self.pool.start_stores(new)

    # Steps

    def step_orders(self, scheduled: Mapping[str, int]) -> Orders:
        """Return the loads, and at most one store, which covers all blocks that earlier steps have computed."""
        self._choose_stores(scheduled)
        loads, self._ordered_loads = tuple(self._ordered_loads), []
        return Orders(loads=loads, stores=self._order_store())

    @property
    def wants_step(self) -> bool:
        """Whether the engine must step even without requests, to order stores and to learn of their end."""
        return bool(self._chosen or self._ready or self._jobs)

    @property
    def frees_blocks_soon(self) -> bool:
        """Whether device blocks become free when stores end, because nothing else uses them."""
        return any(store.candidate.block.ref_cnt == 1 for store in self._stores_of_device_blocks())

    def update_stats(self, stats: StatsRecorder) -> None:
        """Record what was loaded and stored, and how full host memory is."""
        super().update_stats(stats)
        stats.gauge("host_blocks_cached", self.pool.cached)
        # All in use but by stores: of leases, landings, and requests that wait for blocks or are being loaded.
        stats.gauge("host_blocks_lent", self.pool.used - len(self._storing) - self.loans.lost)
        stats.gauge("host_blocks_capacity", self.pool.slots)

    def take_events(self) -> "list[KVCacheEvent]":
        """Return the KV cache events of host blocks since the last call."""
        return self.pool.take_events()

    def device_references(self) -> "Counter[int]":
        """Return the number of references to each device block that stores hold, by block id."""
        return Counter(int(store.candidate.block.block_id) for store in self._stores_of_device_blocks())

    def release_device_blocks(self) -> None:
        """Abandon all stores: their contents are no longer valid. Copies that are under way go on to the end."""
        for stores in (self._ready, self._chosen):
            self._forget_keys(stores)
            self.pool.release_device_blocks(stores, retry=True)
            self.pool.release_slots(stores)
            stores.clear()
        self._touch_at_end.clear()
        for job in self._jobs.values():
            if not job.abandoned:
                job.abandoned = True
                self.pool.release_device_blocks(job.stores, retry=True)

    def reset(self) -> bool:
        """Drop all contents, including those being stored; return False if a request is loading some."""
        for request_id in [*self._offers]:
            self._withdraw(request_id)
        self._landed.reset()
        self.release_device_blocks()
        self.pool.evict_all()
        return not self._loads

    def check_integrity(self) -> None:
        """Raise AssertionError unless the books balance."""
        expected = self.loans.references()
        in_use = [offer.hit.blocks for offer in self._offers.values()]
        in_use += [load.hit.blocks for load in self._loads.values() if load.landed is None]
        stores = list(self._stores())
        in_use += [(store.host,) for store in stores]
        for blocks in in_use:
            for block in blocks:
                expected[slot_of(block)] += 1
        self.pool.check_integrity()
        assert self.pool.references() == expected, "slots are in use that nobody uses, or the reverse"
        assert self._storing.keys() == {store.candidate.key for store in stores}, "blocks being stored are not known"
        assert len(self._storing) == len(stores), "a block is being stored twice"
        device_blocks = [store.candidate.block for store in self._stores_of_device_blocks()]
        assert all(block.ref_cnt > 0 for block in device_blocks), "a block is being stored and free at once"
        assert all(job.ends.ranks < self._ranks for job in self._jobs.values()), "a store should have ended"
        assert self._has_failed <= self._requests.keys(), "a request that has finished is remembered"
        self._landed.check_integrity()
        landed = self._landed.request_ids
        assert not self._offers.keys() & landed, "a request is offered two hits"
        assert self._offers.keys() | landed <= self._requests.keys(), "something is kept for a request that has left"

    def _withdraw(self, request_id: str) -> None:
        """Let go of what was offered to a request, or has landed for it."""
        if (offer := self._offers.pop(request_id, None)) is not None:
            self.pool.unpin(offer.hit.blocks)
        self._landed.withdraw(request_id)

    def _let_go(self, hit: HostHit, landed: LandedPrompt | None) -> None:
        if landed is not None:
            self._landed.leave(landed)
        else:
            self.pool.unpin(hit.blocks)

    def _has_grown(self, request: "Request", offer: _Offer) -> bool:
        """Return whether more of a prompt may be found now than what was offered."""
        return not offer.goes_on and self.pool.holds_next(request, offer.hit)

    def _end_loads(self, request_ids: Iterable[str], failed: set[str]) -> None:
        """Unpin what these requests have loaded. Those that have ``failed``, be it by a pull, compute their tokens.

        Until they run, vLLM counts all blocks that they need as others': without room for both, no load would begin.
        """
        self._has_failed |= failed & self._requests.keys()
        for request_id in request_ids:
            load = self._loads.pop(request_id, None)
            if load is not None:
                self._let_go(load.hit, load.landed)
                self.counts["host_tokens", ""] += 0 if request_id in failed else load.tokens

    def _choose_stores(self, scheduled: Mapping[str, int]) -> None:
        """Choose the blocks to store.

        In lazy mode, those that vLLM evicts soon, to be stored in this step. In eager mode, those that this step fills,
        to be stored in the next: a request may share blocks that another one computes only now. They are chosen before
        vLLM counts this step's tokens as computed, because afterwards a sliding window has passed some of them.

        ``scheduled``: tokens of each request that the step works on.
        """
        self._ready += self._chosen
        self._chosen = []
        if self._mode == "lazy":
            if self.pool.remembers_tokens:
                for progress, tokens in self._filling(scheduled):
                    self._remember_tokens(progress, tokens)
            if scheduled or self._has_allocated:  # otherwise nothing is evicted
                self._choose_evictable()
            self._has_allocated = False
            return
        candidates: list[Candidate] = []
        for progress, tokens in self._filling(scheduled):
            self._scan(progress, tokens, candidates)
        self._chosen += self.pool.start_stores(candidates)

    def _order_store(self) -> tuple[StoreOrder, ...]:
        self._drop_wrong()
        if not self._ready:
            return ()
        job = _StoreJob(tuple(self._ready), self._touch_at_end)
        self._ready, self._touch_at_end = [], []
        store_id = self._next_store
        self._next_store += 1
        self._jobs[store_id] = job
        triples = [
            (store.candidate.group, int(store.candidate.block.block_id), slot_of(store.host)) for store in job.stores
        ]
        return (StoreOrder(store_id, BlockMoves.of(triples)),)

    def _drop_wrong(self) -> None:
        """Let go of the blocks that were chosen, and do not hold what they were chosen for."""
        wrong = [store for store in self._ready if not store.is_right]
        if wrong:
            self._ready = [store for store in self._ready if store.is_right]
            self._forget_keys(wrong)
            self.pool.finish_stores(wrong)

    def _stores(self) -> Iterator[Store]:
        """Return all stores that are chosen or under way."""
        return chain(self._chosen, self._ready, *(job.stores for job in self._jobs.values()))

    def _stores_of_device_blocks(self) -> Iterator[Store]:
        """Return the stores that hold references to their device blocks."""
        jobs = (job.stores for job in self._jobs.values() if not job.abandoned)
        return chain(self._chosen, self._ready, *jobs)

    def _scan(self, progress: _Progress, scheduled: int, candidates: list[Candidate]) -> None:
        """Add the blocks that a request has filled since the last scan to ``candidates``, as far as slots are free.

        ``scheduled`` tokens, those of the step being planned, count as computed.
        """
        free = self.pool.free
        for group in self.pool.groups:
            first, end = progress.scanned[group], self.pool.num_full_blocks(progress.request, group, scheduled)
            if first >= end:
                continue
            done = first
            for candidate in self.pool.candidates(progress.request, group, first, end):
                if candidate is not None and candidate.key not in self._storing:
                    if len(candidates) == free:
                        break
                    self._storing[candidate.key] = None
                    candidates.append(candidate)
                done += 1
            progress.scanned[group] = done
        progress.next_full_at = self._next_full_at(progress.scanned)

    def _filling(self, scheduled: Mapping[str, int]) -> Iterator[tuple[_Progress, int]]:
        """Yield the requests of which the step being planned fills a block, and how many tokens it computes of each."""
        for request_id, tokens in scheduled.items():
            progress = self._requests.get(request_id)
            if progress is not None and progress.request.num_computed_tokens + tokens >= progress.next_full_at:
                yield progress, tokens

    def _remember_tokens(self, progress: _Progress, scheduled: int) -> None:
        """Keep what events need of the blocks that a request has filled since the last scan.

        ``scheduled`` tokens, those of the step being planned, count as computed.
        """
        for group in self.pool.groups:
            first, end = progress.scanned[group], self.pool.num_full_blocks(progress.request, group, scheduled)
            if first < end:
                self.pool.remember_tokens(progress.request, group, first, end)
                progress.scanned[group] = end
        progress.next_full_at = self._next_full_at(progress.scanned)

    def _restart_scan(self, progress: _Progress) -> None:
        progress.scanned = [0] * len(self.pool.block_tokens)
        progress.next_full_at = self._next_full_at(progress.scanned)

    def _next_full_at(self, scanned: Sequence[int]) -> int:
        return min((scanned[group] + 1) * self.pool.block_tokens[group] for group in self.pool.groups)

    def _choose_evictable(self) -> None:
        candidates: list[Candidate] = []
        for candidate in self.pool.eviction_candidates():
            if candidate.key not in self._storing:
                self._storing[candidate.key] = None
                candidates.append(candidate)
        self._ready += self.pool.start_stores(candidates)

    def _touch_when_stored(self, keys: BlockKeys) -> None:
        """Mark a finished request's blocks as recently used, once the last of them is stored.

        They are stored over many steps. In that order, the first blocks of a prompt would be evicted first, and the
        others are useless without them.
        """
        if self._chosen or self._ready:
            self._touch_at_end.append(keys)
        elif self._jobs:
            next(reversed(self._jobs.values())).touch_at_end.append(keys)
        else:
            self.pool.touch(keys)

    def _forget_keys(self, stores: Iterable[Store]) -> None:
        for store in stores:
            del self._storing[store.candidate.key]

    def _end_job(self, job: _StoreJob) -> None:
        self._forget_keys(job.stores)
        if not (job.ends.failed or job.abandoned):
            self.counts["host_blocks", ""] += self.pool.publish(job.stores)
        if job.ends.unsettled:
            self.loans.lose(tuple(store.host for store in job.stores))
        if not job.abandoned:
            self.pool.finish_stores(job.stores, keep_slots=job.ends.unsettled)
        elif not job.ends.unsettled:
            self.pool.release_slots(job.stores)
        for keys in job.touch_at_end:
            self.pool.touch(keys)


def _divided(
    hit: HostHit, tables: Sequence[Sequence["KVCacheBlock"]], block_tokens: Sequence[int], first_token: int
) -> tuple[list[tuple[int, int, int]], list[tuple[int, int]]]:
    """Return what a hit fills from ``first_token`` on, and what it does not.

    The former as (group, device block, slot), the latter as (group, entry of the table).

    For drafts of several tokens, vLLM keeps a window's blocks longer than it asks for in a hit.
    """
    filled, unfilled = [], []
    for group, hosts in enumerate(hit.groups):
        first = first_token // block_tokens[group]
        wanted = islice(hosts, first - hit.first_token // block_tokens[group], None)
        for entry, (host, device) in enumerate(zip(wanted, islice(tables[group], first, None), strict=False), first):
            # Null where a sliding window has passed: that of the hit, or of the prompt, if other tokens follow the hit.
            if device.is_null:
                continue
            if host.is_null:
                unfilled.append((group, entry))
            else:
                filled.append((group, int(device.block_id), slot_of(host)))
    return filled, unfilled
