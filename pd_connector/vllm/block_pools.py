"""vLLM's block pools, as the connector uses them: references to the device's blocks, and a pool of host blocks.

Reaches into vLLM's objects for what it does not offer to connectors. All methods belong to the scheduler's thread.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, TypeAlias

import msgspec
from vllm.distributed.kv_events import BlockStored
from vllm.v1.core.kv_cache_utils import (
    generate_block_hash_extra_keys,
    get_block_hash,
    get_group_id,
    maybe_convert_block_hash,
)

from pd_connector.vllm.free_queue import FreeQueueCursor
from pd_connector.vllm.release import current

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.distributed.kv_events import KVCacheEvent
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
    from vllm.v1.core.kv_cache_utils import BlockHashWithGroupId, KVCacheBlock
    from vllm.v1.request import Request

#: Blocks of one request that are kept in use, in the order of their block tables.
HeldBlocks: TypeAlias = "tuple[KVCacheBlock, ...]"

#: By what blocks are found, in the order of a request's block tables.
BlockKeys: TypeAlias = "tuple[BlockHashWithGroupId, ...]"


class DeviceBlocks:
    """The device's blocks, of which those of finished requests can be kept in use by references of our own.

    vLLM's own way, a request whose blocks are freed later, keeps the engine stepping a thousand times a second until
    then, with all its workers, and dies of an id that is freed twice.
    """

    def __init__(self) -> None:
        self._manager: KVCacheManager | None = None

    def bind(self, kv_cache_manager: "KVCacheManager") -> None:
        """Take vLLM's manager of the blocks."""
        self._manager = kv_cache_manager

    @property
    def manager(self) -> "KVCacheManager":
        """vLLM's manager of the blocks."""
        assert self._manager is not None, "vLLM has not handed over its cache manager"
        return self._manager

    def hold(self, request_id: str) -> HeldBlocks:
        """Take references to all blocks that a request has now."""
        groups = self.manager.get_blocks(request_id).blocks
        held = tuple(block for blocks in groups for block in blocks if not block.is_null)
        self.manager.block_pool.touch(held)
        return held

    def let_go(self, held: HeldBlocks) -> None:
        """Give the references back; the last blocks of a prompt are the first to be reused."""
        self.manager.block_pool.free_blocks(reversed(held))


@dataclass(frozen=True, slots=True)
class HostHit:
    """The tokens of a request behind those that the device holds, as far as host blocks hold them."""

    first_token: int
    tokens: int
    #: Per cache group the blocks from ``first_token`` on; null blocks where a sliding window has passed.
    groups: "tuple[tuple[KVCacheBlock, ...], ...]"

    @property
    def blocks(self) -> HeldBlocks:
        """All host blocks of the hit."""
        return tuple(block for blocks in self.groups for block in blocks if not block.is_null)


class Candidate(msgspec.Struct, frozen=True, gc=False):
    """A device block that is computed to its end, to be stored in host memory."""

    block: "KVCacheBlock"
    key: "BlockHashWithGroupId"
    prefix_tokens: int | None  # that the key stands for
    event: "KVCacheEvent | None"  # to be published when it is stored

    @property
    def group(self) -> int:
        """Its cache group."""
        return int(get_group_id(self.key))


class Store(msgspec.Struct, frozen=True, gc=False):
    """A device block and the host block that it is being copied to; both are in use until ``HostBlockPool`` ends it."""

    candidate: Candidate
    host: "KVCacheBlock"


class HostBlockPool:
    """vLLM's own block pool and coordinator over slots of host memory: prefix hits, reference counts, LRU, events.

    Slots are numbered from 0. vLLM keeps its block 0 as the null block, so slot s is block s + 1.
    """

    def __init__(self, vllm_config: "VllmConfig", device: "KVCacheManager", slots: int, lookahead: int = 0) -> None:
        """A pool of ``slots`` host blocks, all empty, beside the blocks that ``device`` manages.

        Args:
            vllm_config: the engine's.
            device: the manager of its device's blocks.
            slots: how many.
            lookahead: how many of the blocks that vLLM evicts next are stored before it does; 0: those that are
                computed are stored.

        Raises:
            ValueError: vLLM's prefix caching is off.
        """
        if not device.enable_caching:
            raise ValueError("vLLM's prefix caching is off, by which blocks in host memory are found")
        self._device = device
        self._release = current()
        self._coordinator = self._release.host_coordinator(vllm_config, device, slots)
        self._pool = self._coordinator.block_pool
        self._pool.medium = self._release.host_medium
        self._with_events: bool = device.enable_kv_cache_events
        # No more than fit, or what is stored for the ones would be forgotten for the others, and so on for ever.
        self._cursor = FreeQueueCursor(device.block_pool, min(lookahead, slots)) if lookahead else None
        self.slots = slots
        #: Numbers of the cache groups whose blocks can be found again.
        self.groups: tuple[int, ...] = self._release.cacheable_groups(device)
        self.block_tokens: tuple[int, ...] = self._release.block_tokens(self._coordinator)

    # What is in host memory

    @property
    def free(self) -> int:
        """Slots that can be taken; what they hold is forgotten then, the least recently used first."""
        return int(self._pool.get_num_free_blocks())

    @property
    def cached(self) -> int:
        """Slots whose contents can be found."""
        return len(self._pool.cached_block_hash_to_block)

    def holds(self, key: "BlockHashWithGroupId") -> bool:
        """Whether a block is in host memory."""
        return self._pool.cached_block_hash_to_block.get_one_block(key) is not None

    def find(self, request: "Request", first_token: int) -> HostHit | None:
        """The longest run of a request's tokens from ``first_token``, a block boundary, that host memory holds.

        At least one token is left to compute, as its output is the next token.
        """
        hashes = request.block_hashes[first_token // self._pool.hash_block_size :]
        longest = request.num_tokens - 1 - first_token
        if longest <= 0 or not hashes or not self.cached or request.skip_reading_prefix_cache:
            return None
        groups, tokens, _ = self._coordinator.find_longest_cache_hit(hashes, longest)
        return HostHit(first_token, tokens, tuple(map(tuple, groups))) if tokens else None

    def pin(self, blocks: HeldBlocks) -> None:
        """Take references: the slots are not taken for something else."""
        self._pool.touch(blocks)

    def unpin(self, blocks: HeldBlocks) -> None:
        """Give references back; the first blocks of a prompt are the last to be forgotten."""
        self._pool.free_blocks(reversed(blocks))

    def forget_all(self) -> None:
        """Nothing is found any more, blocks in use included."""
        self._pool.evict_blocks({int(block.block_id) for block in self._pool.blocks if block.block_hash is not None})
        if self._cursor is not None:
            self._cursor.forget()

    def take_events(self) -> "list[KVCacheEvent]":
        """KV cache events of host blocks since the last call: stored, removed, cleared."""
        events: list[KVCacheEvent] = self._pool.take_events()
        return events

    # What is on the device

    def full_blocks(self, request: "Request", group: int, scheduled: int) -> int:
        """How many blocks of a request's table are computed to their end when ``scheduled`` tokens more have been."""
        # What the model is yet to say has no hash by which it could be found.
        computed = min(request.num_computed_tokens + scheduled, request.num_tokens)
        return self._release.cacheable_tokens(self._coordinator, computed, group) // self.block_tokens[group]

    def candidates(self, request: "Request", group: int, first: int, end: int) -> Iterator[Candidate | None]:
        """Blocks number ``first`` to ``end`` of a request's table; None for one that need not or cannot be stored.

        Those that are stored already count as used, when all have been taken from this iterator.
        """
        blocks = self._device.get_blocks(request.request_id).blocks[group][first:end]
        held = []
        for number, block in enumerate(blocks, start=first):
            key = block.block_hash
            host = None if key is None else self._pool.cached_block_hash_to_block.get_one_block(key)
            if block.is_null or key is None:
                yield None
            elif host is not None:
                held.append(host)
                yield None
            else:
                event = self._stored_event(request, group, number) if self._with_events else None
                yield Candidate(block, key, block.block_hash_num_tokens, event)
        self._use(held)

    def keys_of(self, request: "Request") -> BlockKeys:
        """By what a request's blocks can be found, those that have contents."""
        tables = self._device.get_blocks(request.request_id).blocks
        return tuple(key for group in self.groups for block in tables[group] if (key := block.block_hash) is not None)

    def count_as_used(self, keys: BlockKeys) -> None:
        """What is here of these blocks is the last to be forgotten, and of that the first of them."""
        find = self._pool.cached_block_hash_to_block.get_one_block
        self._use([host for key in keys if (host := find(key)) is not None])

    def next_to_be_evicted(self) -> list[Candidate]:
        """Blocks that vLLM evicts soon and that are not here yet, as far as there are slots; none is named again.

        Those that are here already count as used.
        """
        assert self._cursor is not None, "nothing is stored by the order of eviction"
        held: list[KVCacheBlock] = []
        candidates: list[Candidate] = []
        find, free = self._pool.cached_block_hash_to_block.get_one_block, self.free
        for block in self._cursor.look():
            key = block.block_hash
            if key is None or get_group_id(key) not in self.groups:
                continue
            if len(held) + len(candidates) == free:
                break
            if (host := find(key)) is not None:
                held.append(host)
            else:
                event = self._stored_without_request(key) if self._with_events else None
                candidates.append(Candidate(block, key, block.block_hash_num_tokens, event))
        self._use(reversed(held))  # they stand in the order in which they are to be forgotten
        return candidates

    def taken(self, blocks: "KVCacheBlocks") -> None:
        """A request has been given these device blocks: cached ones, new ones or both."""
        if self._cursor is not None:
            self._cursor.take_out(chain(*blocks.blocks))

    # From there to here

    def begin(self, candidates: Sequence[Candidate]) -> tuple[Store, ...]:
        """Take a slot for each, and references to both ends.

        Raises:
            ValueError: there are fewer free slots.
        """
        if not candidates:
            return ()
        hosts = self._pool.get_new_blocks(len(candidates))
        blocks = [candidate.block for candidate in candidates]
        self._device.block_pool.touch(blocks)
        if self._cursor is not None:
            self._cursor.take_out(blocks)
        return tuple(Store(candidate, host) for candidate, host in zip(candidates, hosts, strict=True))

    def publish(self, stores: Iterable[Store]) -> None:
        """The bytes have arrived on every rank: the host blocks can be found from now on."""
        for store in stores:
            candidate = store.candidate
            self._pool._insert_block_hash(candidate.key, store.host, num_tokens=candidate.prefix_tokens)
            if candidate.event is not None:
                self._pool.kv_event_queue.append(candidate.event)

    def end(self, stores: Sequence[Store], *, look_again: bool = False, keep_slots: bool = False) -> None:
        """Give the references to both ends back.

        ``look_again``: what vLLM evicts next may be named again; what could not be stored should not, or it would fail
        again in every step.
        ``keep_slots``: the host blocks are not given back, as something may still write to them.
        """
        blocks = [store.candidate.block for store in stores]
        if self._cursor is not None:
            self._cursor.put_back(blocks, looked_at=not look_again)
        else:
            self._device.block_pool.free_blocks(reversed(blocks))
        if not keep_slots:
            hosts = tuple(store.host for store in stores)
            # By the order of eviction the end of a prompt is stored first, and to be forgotten first.
            self.unpin(hosts if self._cursor is None else hosts[::-1])

    def references(self) -> dict[int, int]:
        """Slots in use and the references to each."""
        return {block.block_id - 1: block.ref_cnt for block in self._pool.blocks if block.ref_cnt and not block.is_null}

    def _use(self, held: "Iterable[KVCacheBlock]") -> None:
        """As if these had been loaded: what is in use on the device is not the first to be forgotten here."""
        blocks = tuple(held)
        self.pin(blocks)
        self.unpin(blocks)

    def _stored_event(self, request: "Request", group: int, number: int) -> "KVCacheEvent":
        size = self.block_tokens[group]
        hashes = self._release.block_hashes(request.block_hashes, self._pool.hash_block_size, size)
        extra_keys, _ = generate_block_hash_extra_keys(request, number * size, (number + 1) * size, 0)
        event = self._pool._build_block_stored_event(
            request,
            block_hashes=[maybe_convert_block_hash(hashes[number])],
            parent_block_hash=maybe_convert_block_hash(hashes[number - 1]) if number else None,
            start_token_idx=number * size,
            end_token_idx=(number + 1) * size,
            block_size=size,
            kv_cache_group_id=group,
            extra_keys_list=[extra_keys],
        )
        return self._of_group(event, group)

    def _stored_without_request(self, key: "BlockHashWithGroupId") -> "KVCacheEvent":
        """What is known of a block whose request has left."""
        group = int(get_group_id(key))
        event = BlockStored(
            block_hashes=[maybe_convert_block_hash(get_block_hash(key))],
            parent_block_hash=None,
            token_ids=[],
            block_size=self.block_tokens[group],
            lora_id=None,
            medium=self._release.host_medium,
            lora_name=None,
            group_idx=group,
        )
        return self._of_group(event, group)

    def _of_group(self, event: BlockStored, group: int) -> "KVCacheEvent":
        event.kv_cache_spec_kind, event.kv_cache_spec_sliding_window = self._device.kv_cache_event_metadata[group]
        return event


def slot_of(host: "KVCacheBlock") -> int:
    """The slot of a host block."""
    return int(host.block_id) - 1


def request_blocks(blocks: "KVCacheBlocks") -> "tuple[Sequence[KVCacheBlock], ...]":
    """A request's blocks per cache group, in the order of its block table."""
    return tuple(blocks.blocks)
