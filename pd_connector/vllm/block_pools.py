"""vLLM's block pool as the connector uses it for host memory.

Reaches into vLLM's objects for what vLLM does not offer to connectors. All methods belong to the scheduler's thread.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, repeat
from typing import TYPE_CHECKING, Any, TypeAlias

import msgspec
from vllm.v1.core.kv_cache_utils import get_group_id, make_block_hash_with_group_id

from layout.copies import Int64Array
from pd_connector.vllm.block_events import BlockEvents, BlockOfRun
from pd_connector.vllm.cache_specs import RING_TOKENS, is_ring, is_state
from pd_connector.vllm.device_blocks import HeldBlocks, ids_of, may_hold
from pd_connector.vllm.releases.installed import current
from pd_connector.vllm.requests import computes_whole_prompt

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.distributed.kv_events import KVCacheEvent
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
    from vllm.v1.core.kv_cache_utils import BlockHash, BlockHashWithGroupId, KVCacheBlock
    from vllm.v1.request import Request


@dataclass(frozen=True, eq=False)
class Leased:
    """What a lease holds references to: blocks of the device, host blocks, or both.

    If both, the host blocks hold some of the same tokens: readers may have begun with them before the device had these.
    """

    blocks: HeldBlocks = ()
    hosts: HeldBlocks = ()


#: Keys by which a request's blocks are found, in block table order.
BlockKeys: TypeAlias = "tuple[BlockHashWithGroupId, ...]"


@dataclass(frozen=True, slots=True)
class HostHit:
    """A run of a request's tokens that host memory holds, right after those that the device holds."""

    first_token: int
    tokens: int
    #: By cache group, the blocks from ``first_token`` on; null blocks where a sliding window has passed.
    groups: "tuple[tuple[KVCacheBlock, ...], ...]"

    @property
    def blocks(self) -> HeldBlocks:
        """All host blocks of the hit, without null blocks."""
        return tuple(block for blocks in self.groups for block in blocks if not block.is_null)


class Candidate(msgspec.Struct, frozen=True, gc=False):
    """A full device block that can be stored in host memory."""

    block: "KVCacheBlock"
    key: "BlockHashWithGroupId"
    told: BlockOfRun | None  # by its event when it is stored; None if events are off

    @property
    def group(self) -> int:
        """Its cache group."""
        return int(get_group_id(self.key))


class Store(msgspec.Struct, frozen=True, gc=False):
    """A device block and the host block that it is copied to. Both are in use until ``finish_stores``."""

    candidate: Candidate
    host: "KVCacheBlock"

    @property
    def is_right(self) -> bool:
        """Whether the device block is still found by its key: if not, what it was to hold has not come there."""
        return bool(self.candidate.block.block_hash == self.candidate.key)


class HostBlockPool:
    """Slots of host memory under vLLM's own block pool and coordinator: prefix hits, reference counts, LRU, events.

    Slots are numbered from 0. Slot s is block s + 1, because vLLM reserves block 0 as the null block. No two blocks are
    found by the same key.
    """

    def __init__(self, vllm_config: "VllmConfig", device: "KVCacheManager", slots: int, lookahead: int = 0) -> None:
        """Create an empty pool of ``slots`` host blocks beside the blocks that ``device`` manages.

        ``lookahead``: how many of the blocks that vLLM evicts next ``eviction_candidates`` covers; 0 if it is not used.
        """
        self._device = device
        self._release = current()
        self._coordinator = self._release.host_coordinator(vllm_config, device, slots)
        self._pool: BlockPool = self._coordinator.block_pool
        self._pool.medium = self._release.host_medium
        self._with_events = self._release.has_events(device)
        # No deeper than the pool: otherwise storing some of the blocks would evict others, and so on forever.
        self._cursor = self._release.free_queue_cursor(device.block_pool, min(lookahead, slots)) if lookahead else None
        self.slots = slots
        #: Indices of the cache groups whose blocks can be found by their contents.
        self.groups: tuple[int, ...] = self._release.cacheable_groups(device)
        managers = self._coordinator.single_type_managers
        # A ring is one block, at the first place of its table, whatever vLLM calls its block size.
        self.block_tokens: tuple[int, ...] = tuple(
            RING_TOKENS if is_ring(manager.kv_cache_spec) else size
            for manager, size in zip(managers, self._release.block_tokens(self._coordinator), strict=True)
        )
        self._states = {group for group in self.groups if is_state(managers[group].kv_cache_spec)}
        self._chunks = self._release.chunk_tokens(self._coordinator)
        self._finds_all = len(self.groups) == len(self.block_tokens)
        largest = max(self.block_tokens[group] for group in self.groups)
        self._names_parts = self._release.names_parts and largest > self._pool.hash_block_size
        self._events = BlockEvents(device, self._pool, self._release, self.block_tokens)
        self._news: list[BlockHashWithGroupId] | None = None  # keys that have come to be found; None if nobody asks

    # What is in host memory

    @property
    def free(self) -> int:
        """Number of slots that can be taken. Taking them evicts what they hold, least recently used first."""
        return int(self._pool.get_num_free_blocks())

    def has_spare(self, number: int, share: float) -> bool:
        """Return whether so many slots are free, and a ``share`` of all beside them."""
        return self.free - number >= share * self.slots

    @property
    def used(self) -> int:
        """Number of slots to which somebody has references."""
        return self.slots - self.free

    @property
    def cached(self) -> int:
        """Number of blocks that can be found."""
        return len(self._pool.cached_block_hash_to_block)

    def holds(self, key: "BlockHashWithGroupId") -> bool:
        """Return whether a block is in host memory."""
        return key in self._found

    def holding(self, keys: "Iterable[BlockHashWithGroupId | None]") -> "list[KVCacheBlock | None]":
        """Return the block that is found by each key; None for one by which none is."""
        return list(map(self._found.get, keys))

    def keys_of(self, request: "Request", group: int) -> BlockKeys:
        """Return the keys of all full blocks of a request's tokens in a cache group."""
        return tuple(map(make_block_hash_with_group_id, self._hashes(request, group), repeat(group)))

    def key_at(self, request: "Request", group: int, tokens: int) -> "BlockHashWithGroupId | None":
        """Return the key of the block behind so many tokens of a request; None if it is not full."""
        hashes, number = self._hashes(request, group), tokens // self.block_tokens[group]
        return make_block_hash_with_group_id(hashes[number], group) if number < len(hashes) else None

    def take_news(self) -> "list[BlockHashWithGroupId]":
        """Return the keys by which blocks have come to be found since the last call; the first returns none."""
        news, self._news = self._news or [], []
        return news

    def find(self, request: "Request", first_token: int, end_token: int | None = None) -> HostHit | None:
        """Return the longest run of a request's tokens from ``first_token``, a block boundary, that host memory holds.

        It ends at ``end_token`` at the latest. At least one token is left to compute, because its output is the next
        token.
        """
        hashes = request.block_hashes[first_token // self._pool.hash_block_size :]
        end = request.num_tokens - 1 if end_token is None else min(end_token, request.num_tokens - 1)
        # vLLM counts chunks from the first hash that it is given: a hit leaves no chunk that ``first_token`` cuts.
        chunks = (chunk - first_token % chunk for chunk in self._chunks if first_token % chunk)
        longest = min((end - first_token, *chunks))
        if longest <= 0 or not hashes or not self.cached or computes_whole_prompt(request):
            return None
        groups, tokens = self._release.longest_hit(self._coordinator, hashes, longest)
        return HostHit(first_token, tokens, tuple(map(tuple, groups))) if tokens else None

    def longest_prefix(self, hashes: "Sequence[BlockHash]") -> "tuple[tuple[Sequence[KVCacheBlock], ...], int]":
        """Return what ``DeviceBlocks.longest_prefix`` does, of host memory."""
        return self._release.longest_hit(self._coordinator, hashes, len(hashes) * self._pool.hash_block_size)

    def may_hold(self, hashes: "Sequence[BlockHash]", tokens: int, groups: Mapping[int, int]) -> bool:
        """Return what ``DeviceBlocks.may_hold`` does, of host memory; a look, on any thread."""
        return may_hold(self._pool, hashes, tokens, groups)

    def holds_next(self, request: "Request", hit: HostHit) -> bool:
        """Return whether host memory holds the blocks right after a hit, in all cache groups."""
        keys = (self.key_at(request, group, hit.first_token + hit.tokens) for group in self.groups)
        return all(key is not None and self.holds(key) for key in keys)

    def pin(self, blocks: HeldBlocks) -> None:
        """Take references, so that the slots are not reused."""
        self._pool.touch(blocks)

    def unpin(self, blocks: HeldBlocks) -> None:
        """Give references back. The first blocks of a prompt are evicted last."""
        self._pool.free_blocks(reversed(blocks))

    def copies_of(self, blocks: HeldBlocks) -> "list[KVCacheBlock | None]":
        """Return the host blocks that hold what device blocks do; None for one of which none can be found."""
        return self.holding(self._keys(blocks))

    def take(self, number: int) -> HeldBlocks:
        """Take slots that nobody uses, with a reference to each; what they hold is evicted.

        Raises:
            ValueError: fewer slots are free.
        """
        if number > self.free:
            raise ValueError(f"{number} host slots are to be taken, and {self.free} are free")
        # vLLM's get_new_blocks does it block by block, in three times as long.
        taken, found = self._pool.free_block_queue.popleft_n(number), self._found
        evicted: list[BlockHashWithGroupId] = []
        for block in taken:
            if (key := block._block_hash) is not None:
                del found[key]
                block._block_hash = None
                evicted.append(key)
            block.ref_cnt = 1
        if self._with_events:
            self._pool.kv_event_queue += self._events.removed(evicted)
        return tuple(taken)

    def publish_copies(self, blocks: HeldBlocks, hosts: HeldBlocks) -> None:
        """Make host blocks findable that hold what device blocks do, each if that one can be found and no copy can."""
        keys = self._keys(blocks)
        if not self._finds_all:
            keys = [key if key is not None and get_group_id(key) in self.groups else None for key in keys]
        published = self._publish(keys, hosts)
        if self._with_events:
            self._pool.kv_event_queue += self._events.stored(self._events.recall(keys[index]) for index in published)

    @property
    def null_block(self) -> "KVCacheBlock":
        """The block that stands for those that nobody needs."""
        return self._pool.null_block

    def publish_landed(self, request: "Request", hit: HostHit, first_token: int) -> None:
        """Make the full blocks of a hit findable that hold tokens from ``first_token`` on.

        Their bytes have arrived, and somebody has references to them until they are published.
        """
        end = hit.first_token + hit.tokens
        for group in self.groups:
            size = self.block_tokens[group]
            first, before = first_token // size, hit.first_token // size
            self.publish_at(request, group, first, hit.groups[group][first - before : end // size - before])

    def publish_at(self, request: "Request", group: int, first: int, hosts: HeldBlocks) -> None:
        """Make host blocks findable as those of a request's table from entry ``first`` on, as far as these are full."""
        hashes = self._hashes(request, group)
        hosts = hosts[: max(len(hashes) - first, 0)]
        keys = map(make_block_hash_with_group_id, hashes[first : first + len(hosts)], repeat(group))
        published = self._publish(keys, hosts)
        if self._with_events:
            told = self._events.of_request(request, group, first, first + len(hosts)) if published else []
            self._pool.kv_event_queue += self._events.stored(told[index] for index in published)

    def evict_all(self) -> None:
        """Make all blocks impossible to find, those in use included."""
        self._pool.evict_blocks({int(block.block_id) for block in self._pool.blocks if block.block_hash is not None})
        if self._cursor is not None:
            self._cursor.reset()
        self._events.forget()

    def take_events(self) -> "list[KVCacheEvent]":
        """Return the KV cache events of host blocks since the last call: stored, removed, cleared."""
        return self._release.take_host_events(self._pool)

    @property
    def remembers_tokens(self) -> bool:
        """Whether requests' blocks are to be remembered, because events are on and stores come after requests."""
        return self._with_events and self._cursor is not None

    def remember_tokens(self, request: "Request", group: int, first: int, end: int) -> None:
        """Keep what the events of a request's full blocks ``first`` to ``end`` (exclusive) need."""
        self._events.remember(request, group, first, end)

    # What is on the device

    def num_full_blocks(self, request: "Request", group: int, scheduled: int) -> int:
        """Return how many blocks of a request's table will be full once ``scheduled`` more tokens are computed."""
        # Tokens that are yet to be sampled have no hash by which their block could be found.
        computed = min(request.num_computed_tokens + scheduled, request.num_tokens)
        return self._release.cacheable_tokens(self._coordinator, computed, group) // self.block_tokens[group]

    def candidates(
        self, request: "Request", group: int, first: int, end: int, blocks: "Sequence[KVCacheBlock]" = ()
    ) -> Iterator[Candidate | None]:
        """Yield a candidate for each of a request's blocks ``first`` to ``end`` (exclusive); None for one not to store.

        In the end, those that host memory holds already become the most recently used. ``blocks``: if not its table's.
        """
        blocks = blocks or self._device.get_blocks(request.request_id).blocks[group][first:end]
        if group in self._states and any(block.is_null for block in blocks):
            blocks = self._pulled_states(request, group, first, blocks)
        held, find = list[Any](), self._found.get
        told: list[BlockOfRun] = []
        for index, (block, key) in enumerate(zip(blocks, self._keys(blocks), strict=True)):
            host = None if key is None else find(key)
            if host is not None:
                held.append(host)
            if block.is_null or key is None or host is not None:
                yield None
            else:
                if self._with_events and not told:
                    told = self._events.of_request(request, group, first, end)
                yield Candidate(block, key, told[index] if told else None)
        self._mark_used(held)

    def block_keys(self, request: "Request") -> BlockKeys:
        """Return the keys of a request's full blocks, also of windows and states that it has passed."""
        tables = self._device.get_blocks(request.request_id).blocks
        return tuple(key for group in self.groups for key in self.keys_of(request, group)[: len(tables[group])])

    def give_back(self, tables: "Sequence[Sequence[KVCacheBlock]]", entries: Iterable[tuple[int, int]]) -> None:
        """Take what nothing fills from a request's tables, by group and entry: vLLM would let others find it."""
        pool = self._device.block_pool
        for group, entry in entries:
            table: Any = tables[group]  # vLLM's own list
            unfilled, table[entry] = table[entry], pool.null_block
            pool.free_blocks([unfilled])

    def touch(self, keys: BlockKeys) -> None:
        """Mark those of the blocks that host memory holds as most recently used; the first of them is evicted last."""
        self._mark_used(host for host in self.holding(keys) if host is not None)

    def eviction_candidates(self) -> list[Candidate]:
        """Return the blocks that vLLM evicts soon and host memory lacks, as far as slots are free, each block once.

        Those that host memory holds already become the most recently used ones.
        """
        assert self._cursor is not None, "the pool was created without lookahead"
        held: list[KVCacheBlock] = []
        candidates: list[Candidate] = []
        find, free = self._found.get, self.free
        for block in self._cursor.advance():
            (key,) = self._keys((block,))
            if key is None or get_group_id(key) not in self.groups:
                continue
            if len(held) + len(candidates) == free:
                break
            if (host := find(key)) is not None:
                held.append(host)
            else:
                told = self._events.recall(key) if self._with_events else None
                candidates.append(Candidate(block, key, told))
        self._mark_used(reversed(held))  # keeps the order of eviction
        return candidates

    def on_allocated(self, blocks: "KVCacheBlocks") -> None:
        """Note that a request was given these device blocks, cached or new ones."""
        if self._cursor is not None:
            self._cursor.remove(chain(*blocks.blocks))

    # Stores from the device to host memory

    def start_stores(self, candidates: Sequence[Candidate]) -> tuple[Store, ...]:
        """Take a slot for each candidate, and a reference to both of its blocks.

        Raises:
            ValueError: fewer slots are free.
        """
        if not candidates:
            return ()
        hosts = self.take(len(candidates))
        blocks = [candidate.block for candidate in candidates]
        self._device.block_pool.touch(blocks)
        if self._cursor is not None:
            self._cursor.remove(blocks)
        return tuple(Store(candidate, host) for candidate, host in zip(candidates, hosts, strict=True))

    def publish(self, stores: Iterable[Store]) -> int:
        """Make host blocks findable, but for those that are not right; return how many. Their bytes have arrived."""
        right = [store for store in stores if store.is_right]
        published = self._publish([store.candidate.key for store in right], [store.host for store in right])
        told = (right[index].candidate.told for index in published)
        self._pool.kv_event_queue += self._events.stored(each for each in told if each is not None)
        return len(published)

    def finish_stores(self, stores: Sequence[Store], *, keep_slots: bool = False) -> None:
        """Give the references to both blocks of each store back, published or not.

        ``keep_slots`` keeps the host blocks, because something may still write to them.
        """
        self.release_device_blocks(stores)
        if not keep_slots:
            self.release_slots(stores)

    def release_device_blocks(self, stores: Sequence[Store], *, retry: bool = False) -> None:
        """Give the references to the device blocks of stores back.

        ``retry`` makes them eviction candidates again; blocks whose store has failed would fail again in every step.
        """
        blocks = [store.candidate.block for store in stores]
        if self._cursor is not None:
            self._cursor.restore(blocks, visited=not retry)
        else:
            self._device.block_pool.free_blocks(reversed(blocks))

    def release_slots(self, stores: Sequence[Store]) -> None:
        """Give the references to the host blocks of stores back."""
        hosts = tuple(store.host for store in stores)
        # In eviction order, the end of a prompt comes first, and is to be evicted first here too.
        self.unpin(hosts if self._cursor is None else hosts[::-1])

    def references(self) -> dict[int, int]:
        """Return the number of references to each slot in use."""
        return {block.block_id - 1: block.ref_cnt for block in self._pool.blocks if block.ref_cnt and not block.is_null}

    def check_integrity(self) -> None:
        """Raise AssertionError unless every block that can be found has its key, and no other block has one."""
        keys = {block.block_id: block.block_hash for block in self._pool.blocks if block.block_hash is not None}
        assert keys == {block.block_id: key for key, block in self._found.items()}, "a block is found by a wrong key"

    def _pulled_states(
        self, request: "Request", group: int, first: int, blocks: "Sequence[KVCacheBlock]"
    ) -> "list[KVCacheBlock]":
        """Return the null ``blocks`` of a request's table, with the states in their places that were pulled for others.

        Without these, host memory would hold all tokens of a pulled prompt, and no prefix of it would be found.
        """
        find = self._device.block_pool.get_cached_block
        found = (find(value, [group]) for value in self._hashes(request, group)[first : first + len(blocks)])
        return [states[0] if own.is_null and states else own for states, own in zip(found, blocks, strict=False)]

    def _hashes(self, request: "Request", group: int) -> "Sequence[BlockHash]":
        """Return the hashes of all full blocks of a request's tokens in a cache group."""
        return self._release.block_hashes(request.block_hashes, self._pool.hash_block_size, self.block_tokens[group])

    def _keys(self, blocks: "Sequence[KVCacheBlock]") -> "list[BlockHashWithGroupId | None]":
        """Return the keys of device blocks that stand for all that they hold.

        Where hashes are of fewer tokens than a block, vLLM names a prompt's last block by a part of its tokens.
        """
        keys = [block._block_hash for block in blocks]
        if not self._names_parts:
            return keys
        sizes, ends = self.block_tokens, map(self._release.named_tokens, blocks)
        return [
            None if key is None or end is None or end % sizes[get_group_id(key)] else key
            for key, end in zip(keys, ends, strict=True)
        ]

    def _publish(self, keys: "Iterable[BlockHashWithGroupId | None]", hosts: "Sequence[KVCacheBlock]") -> list[int]:
        """Let host blocks in use be found that have a key by which none is; return their indices."""
        found, published = self._found, []
        for index, (key, host) in enumerate(zip(keys, hosts, strict=True)):
            if key is not None and key not in found and not host.is_null:
                host._block_hash = key
                found[key] = host
                published.append(index)
                if self._news is not None:
                    self._news.append(key)
        return published

    @property
    def _found(self) -> "dict[Any, KVCacheBlock]":
        """The host blocks that can be found, by key.

        vLLM's own methods look up, add and drop one block at a time: most of a step in which a large lease moves. They
        see to what does not occur here: several blocks of one key, or several keys of one block.
        """
        found: dict[Any, KVCacheBlock] = self._pool.cached_block_hash_to_block._cache
        return found

    def _mark_used(self, held: "Iterable[KVCacheBlock]") -> None:
        """Treat blocks as if they were just loaded: what is in use on the device should not be evicted first here.

        Each once, though the device may hold the same contents twice: vllm-ascend drops the second one of equal blocks
        that are given back together, and its reference would stay.
        """
        blocks = tuple({int(block.block_id): block for block in held}.values())
        self.pin(blocks)
        self.unpin(blocks)


def slot_of(host: "KVCacheBlock") -> int:
    """Return the slot of a host block."""
    return int(host.block_id) - 1


def slots_of(hosts: "Iterable[KVCacheBlock]") -> Int64Array:
    """Return the slots of host blocks."""
    return ids_of(hosts) - 1
