"""The role of host memory: which blocks are copied there, what is found there, what is in use.

A device block passes through these states:

    computed --- chosen ---> being stored --- all ranks have reported ---> found by prefix hits --- evicted ---> gone
                                  '--- a rank has failed, or a reset ----------------------------------------------^

Both ends of a copy are in use until every rank has reported it, so that neither vLLM nor this pool reuses them; of a
load, whose device blocks vLLM keeps for the waiting request, the host end. A block can be found only when its store has
ended on every rank. Everything runs on the scheduler's thread.
"""

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice
from typing import TYPE_CHECKING, Literal

from pd_connector.orders import BlockMoves, LoadOrder, Orders, Report, StoreEnds, StoreOrder
from pd_connector.scheduler.roles import SchedulerRole
from pd_connector.stats import StatsRecorder
from pd_connector.vllm.block_pools import (
    BlockKeys,
    Candidate,
    HeldBlocks,
    HostBlockPool,
    HostHit,
    Store,
    request_blocks,
    slot_of,
)

if TYPE_CHECKING:
    from pd_connector.vllm.types import KVCacheBlock, KVCacheBlocks, KVCacheEvent, Request

logger = logging.getLogger(__name__)

StoreMode = Literal["eager", "lazy"]


@dataclass(slots=True)
class _Progress:
    """How far a request's blocks have been looked at, per cache group."""

    request: "Request"
    looked_at: list[int]
    due_at: int  # computed tokens with which the next block is complete
    preemptions: int = 0  # of the request, when it last got blocks


@dataclass(frozen=True, slots=True)
class _Load:
    pinned: HeldBlocks
    tokens: int


@dataclass(slots=True)
class _StoreJob:
    stores: tuple[Store, ...]
    departed: list[BlockKeys]  # what requests had that have left before it ends, and after the job before was ordered
    ends: StoreEnds = field(default_factory=lambda: StoreEnds(0))
    abandoned: bool = False  # the contents have lost their meaning


class HostTier(SchedulerRole):
    """Owns the host pool's bookkeeping: hits, loads and stores of one engine."""

    def __init__(self, pool: HostBlockPool, ranks: int, mode: StoreMode = "eager") -> None:
        """Start with an empty pool.

        Args:
            pool: the host blocks.
            ranks: workers of the engine, each of which copies its part of every block.
            mode: "eager" stores blocks when they are computed, "lazy" when they are among those that vLLM evicts next,
                to which ``pool`` must look ahead.
        """
        self._pool = pool
        self._ranks = ranks
        self._mode = mode
        self._requests: dict[str, _Progress] = {}
        self._hits: dict[str, HostHit] = {}  # offered, pinned, and not taken yet
        self._loads: dict[str, _Load] = {}  # under way
        self._without: set[str] = set()  # requests that a load has failed for: they compute
        self._jobs: dict[int, _StoreJob] = {}  # under way
        self._storing: dict[object, None] = {}  # keys of the blocks of all jobs and of those chosen
        self._chosen: list[Store] = []  # for the next step: what this one computes cannot be copied before
        self._ready: list[Store] = []  # for this step
        self._departed: list[BlockKeys] = []  # to go with the next job
        self._has_taken = False  # whether a request has been given blocks since the last step
        self._ordered_loads: list[LoadOrder] = []
        self._next_store = 0
        self._tokens_loaded = 0  # since they were last added to the statistics
        self._blocks_stored = 0
        self._lost_slots: set[int] = set()  # that a failed copy may still write to: never used again

    # Requests

    def add(self, request: "Request") -> None:
        """Take up a request: its blocks are stored as they are computed."""
        progress = _Progress(request, [], 0)
        self._begin_anew(progress)
        self._requests[request.request_id] = progress

    def missing_tokens(self, request: "Request", computed_tokens: int) -> int:
        """Return how many tokens behind the ``computed_tokens`` can be loaded; their blocks are pinned."""
        self.withdraw(request)
        if request.request_id in self._without:
            return 0
        hit = self._pool.find(request, computed_tokens)
        if hit is None:
            return 0
        self._pool.pin(hit.blocks)
        self._hits[request.request_id] = hit
        return hit.tokens

    def withdraw(self, request: "Request") -> None:
        """Let go of what was offered to a request."""
        hit = self._hits.pop(request.request_id, None)
        if hit is not None:
            self._pool.unpin(hit.blocks)

    def allocated(self, request: "Request", blocks: "KVCacheBlocks", external_tokens: int) -> int:
        """Order the load of what was offered, if vLLM took it; return its tokens."""
        self._pool.taken(blocks)
        self._has_taken = True
        progress = self._requests.get(request.request_id)
        if progress is not None and progress.preemptions != request.num_preemptions:
            progress.preemptions = request.num_preemptions
            self._begin_anew(progress)  # its blocks may be new ones, and forgotten here
        hit = self._hits.pop(request.request_id, None)
        if hit is None:
            return 0
        if external_tokens < hit.tokens:
            self._pool.unpin(hit.blocks)
            return 0
        self._loads[request.request_id] = _Load(hit.blocks, hit.tokens)
        moves = BlockMoves.of(_triples(hit, request_blocks(blocks), self._pool.block_tokens))
        self._ordered_loads.append(LoadOrder(request.request_id, moves, hit.tokens))
        return hit.tokens

    def loaded_tokens(self, request: "Request") -> int:
        """Return how many of a request's tokens are on their way from host memory."""
        load = self._loads.get(request.request_id)
        return load.tokens if load is not None else 0

    def settled(self, request_ids: set[str], failed: set[str], report: Report) -> None:
        """End the loads of these requests, and the stores that all ranks have reported."""
        self._end_loads(request_ids, failed)
        self._end_stores(report.stores)

    def finish(self, request: "Request", block_ids: Sequence[Sequence[int]]) -> None:
        """Let a request go. What it has computed and not stored yet is stored; its load, if any, goes on."""
        self.withdraw(request)
        self._without.discard(request.request_id)
        progress = self._requests.pop(request.request_id, None)
        if progress is not None and self._mode == "eager":
            candidates: list[Candidate] = []
            self._look_at(progress, 0, candidates)
            self._chosen += self._pool.begin(candidates)
            self._count_as_used(self._pool.keys_of(request))

    # Steps

    def step_orders(self, scheduled: Mapping[str, int]) -> Orders:
        """Return the loads, and at most one store, of all blocks that earlier steps have computed."""
        self._choose_stores(scheduled)
        loads, self._ordered_loads = tuple(self._ordered_loads), []
        return Orders(loads=loads, stores=self._order_store())

    @property
    def wants_step(self) -> bool:
        """Whether the engine must step though it has no requests: to order stores, and to hear of their end."""
        return bool(self._chosen or self._ready or self._jobs)

    @property
    def frees_blocks_soon(self) -> bool:
        """Whether blocks of the device become free when stores end: nobody else uses them any more."""
        return any(store.candidate.block.ref_cnt == 1 for store in self._stores())

    def update_stats(self, stats: StatsRecorder) -> None:
        """Add what was loaded and stored, and how full host memory is."""
        stats.count("host_tokens", self._tokens_loaded)
        stats.count("host_blocks", self._blocks_stored)
        self._tokens_loaded = self._blocks_stored = 0
        stats.gauge("host_blocks_cached", self._pool.cached)
        stats.gauge("host_blocks_capacity", self._pool.slots)

    def take_events(self) -> "list[KVCacheEvent]":
        """Return the KV cache events of host blocks since the last call."""
        return self._pool.take_events()

    def reset(self) -> bool:
        """Forget all contents, those that are being stored included.

        Returns:
            False if a request is loading such contents right now.
        """
        for hit in self._hits.values():
            self._pool.unpin(hit.blocks)
        self._hits.clear()
        for stores in (self._ready, self._chosen):
            for store in stores:
                del self._storing[store.candidate.key]
            self._pool.end(stores, look_again=True)
            stores.clear()
        self._departed.clear()
        for job in self._jobs.values():
            job.abandoned = True
        self._pool.forget_all()
        return not self._loads

    def check_integrity(self) -> None:
        """Raise AssertionError unless the books balance."""
        expected: dict[int, int] = dict.fromkeys(self._lost_slots, 1)
        in_use = [hit.blocks for hit in self._hits.values()] + [load.pinned for load in self._loads.values()]
        stores = list(self._stores())
        in_use += [(store.host,) for store in stores]
        for blocks in in_use:
            for block in blocks:
                expected[slot_of(block)] = expected.get(slot_of(block), 0) + 1
        assert self._pool.references() == expected, "slots are in use that nobody uses, or the reverse"
        assert self._storing.keys() == {store.candidate.key for store in stores}, "blocks being stored are not known"
        assert len(self._storing) == len(stores), "a block is being stored twice"
        assert all(store.candidate.block.ref_cnt > 0 for store in stores), "a block is being stored and free at once"
        assert all(job.ends.ranks < self._ranks for job in self._jobs.values()), "a store should have ended"
        assert self._without <= self._requests.keys(), "a request that has left is remembered"
        assert self._hits.keys() <= self._requests.keys(), "something is kept for a request that has left"

    def _end_loads(self, request_ids: Iterable[str], failed: set[str]) -> None:
        """Let go of what these requests have loaded; those that it failed for will compute."""
        self._without |= failed & self._loads.keys() & self._requests.keys()
        for request_id in request_ids:
            load = self._loads.pop(request_id, None)
            if load is not None:
                self._pool.unpin(load.pinned)
                self._tokens_loaded += 0 if request_id in failed else load.tokens

    def _choose_stores(self, scheduled: Mapping[str, int]) -> None:
        """Choose the blocks that this step computes, before vLLM counts its tokens as computed.

        They are stored from the next step on: a request may share blocks that another one computes only in this step,
        and when the next one is planned, a sliding window has passed some of them.

        ``scheduled``: the tokens of each request that the step works on.
        """
        self._ready += self._chosen
        self._chosen = []
        if self._mode == "lazy":
            if scheduled or self._has_taken:  # otherwise nothing is evicted
                self._store_evictable()
            self._has_taken = False
            return
        candidates: list[Candidate] = []
        for request_id, tokens in scheduled.items():
            progress = self._requests.get(request_id)
            if progress is not None and progress.request.num_computed_tokens + tokens >= progress.due_at:
                self._look_at(progress, tokens, candidates)
        self._chosen += self._pool.begin(candidates)

    def _order_store(self) -> tuple[StoreOrder, ...]:
        if not self._ready:
            return ()
        job = _StoreJob(tuple(self._ready), self._departed)
        self._ready, self._departed = [], []
        store_id = self._next_store
        self._next_store += 1
        self._jobs[store_id] = job
        triples = [
            (store.candidate.group, int(store.candidate.block.block_id), slot_of(store.host)) for store in job.stores
        ]
        return (StoreOrder(store_id, BlockMoves.of(triples)),)

    def _end_stores(self, ends: Mapping[int, StoreEnds]) -> None:
        for store_id, new in ends.items():
            job = self._jobs.get(store_id)
            if job is None:
                logger.error("PDConnector: store %d ended twice, which is a bug; ignored", store_id)
                continue
            job.ends += new
            if job.ends.ranks >= self._ranks:
                del self._jobs[store_id]
                self._end(job)

    def _stores(self) -> Iterator[Store]:
        """All that are under way or chosen."""
        return chain(self._chosen, self._ready, *(job.stores for job in self._jobs.values()))

    def _look_at(self, progress: _Progress, scheduled: int, candidates: list[Candidate]) -> None:
        """Add what a request has computed since it was last looked at, as far as there are free slots.

        ``scheduled``: its tokens in the step that is planned, as if they had been computed.
        """
        free = self._pool.free
        for group in self._pool.groups:
            first, end = progress.looked_at[group], self._pool.full_blocks(progress.request, group, scheduled)
            if first >= end:
                continue
            done = first
            for candidate in self._pool.candidates(progress.request, group, first, end):
                if candidate is not None and candidate.key not in self._storing:
                    if len(candidates) == free:
                        break
                    self._storing[candidate.key] = None
                    candidates.append(candidate)
                done += 1
            progress.looked_at[group] = done
        progress.due_at = self._next_block_at(progress.looked_at)

    def _begin_anew(self, progress: _Progress) -> None:
        progress.looked_at = [0] * len(self._pool.block_tokens)
        progress.due_at = self._next_block_at(progress.looked_at)

    def _next_block_at(self, looked_at: Sequence[int]) -> int:
        sizes = self._pool.block_tokens
        return min((looked_at[group] + 1) * sizes[group] for group in self._pool.groups)

    def _store_evictable(self) -> None:
        """Begin to store what vLLM evicts soon."""
        candidates: list[Candidate] = []
        for candidate in self._pool.next_to_be_evicted():
            if candidate.key not in self._storing:
                self._storing[candidate.key] = None
                candidates.append(candidate)
        self._ready += self._pool.begin(candidates)

    def _count_as_used(self, keys: BlockKeys) -> None:
        """What a request had counts as used when it leaves, but not before the last of it is stored.

        Stored by and by, the first blocks of a prompt would be the first to be forgotten, and the others of no use
        without them.
        """
        if self._chosen or self._ready:
            self._departed.append(keys)
        elif self._jobs:
            next(reversed(self._jobs.values())).departed.append(keys)
        else:
            self._pool.count_as_used(keys)

    def _end(self, job: _StoreJob) -> None:
        for store in job.stores:
            del self._storing[store.candidate.key]
        if not (job.ends.failed or job.abandoned):
            self._pool.publish(job.stores)
            self._blocks_stored += len(job.stores)
        if job.ends.unsettled:
            self._lost_slots.update(slot_of(store.host) for store in job.stores)
        self._pool.end(job.stores, look_again=job.abandoned, keep_slots=job.ends.unsettled)
        for keys in job.departed:
            self._pool.count_as_used(keys)


def _triples(
    hit: HostHit, tables: Sequence[Sequence["KVCacheBlock"]], block_tokens: Sequence[int]
) -> list[tuple[int, int, int]]:
    """Group, device block and slot of every block of a hit that the request needs on the device."""
    triples = []
    for group, hosts in enumerate(hit.groups):
        table = islice(tables[group], hit.first_token // block_tokens[group], None)
        for host, device in zip(hosts, table, strict=False):
            # A window passes blocks: of this hit, or, where more tokens come from elsewhere, of the whole prompt.
            if not (host.is_null or device.is_null):
                triples.append((group, int(device.block_id), slot_of(host)))
    return triples
