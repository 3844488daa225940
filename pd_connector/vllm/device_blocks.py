"""References to vLLM's device blocks. All methods belong to the scheduler's thread."""

from collections import Counter
from collections.abc import Callable, Container, Iterable, Mapping, Sequence, Set
from itertools import islice
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from layout.copies import Int64Array
from pd_connector.vllm.cache_specs import is_state
from pd_connector.vllm.releases.installed import current

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.core.kv_cache_utils import BlockHash, KVCacheBlock
    from vllm.v1.request import Request

#: Blocks of a request to which references are held, in block table order.
HeldBlocks: TypeAlias = "tuple[KVCacheBlock, ...]"


class DeviceBlocks:
    """The device's blocks. Keeps those of finished requests in use by holding references to them.

    vLLM's own way is to delay freeing a request's blocks. Until they are freed, the engine and all its workers step a
    thousand times a second, and an id that is freed twice crashes the engine.
    """

    def __init__(self) -> None:
        self._manager: KVCacheManager | None = None
        self._held = np.zeros(0, np.int64)  # our references to each block, by block id
        self._leased = 0  # blocks to which there is one

    def bind(
        self,
        kv_cache_manager: "KVCacheManager",
        before_reset: Callable[[], None] = lambda: None,
        tokens_to_pull: Callable[[str], int | None] | None = None,
        after_reset: Callable[[], None] = lambda: None,
        waits: "Callable[[Request], bool]" = lambda _: False,
    ) -> None:
        """Set vLLM's manager of the blocks.

        ``before_reset`` is called whenever vLLM is to reset its prefix cache, before it checks that no block is in use,
        ``after_reset`` if that was so. vLLM itself tells its connector if its user asks for that, also in vain.

        ``tokens_to_pull`` returns how many tokens of a request that has just ended are to be pulled, None if none. It
        is asked for every request in every step; None if vLLM keeps all blocks, or nothing is leased. Before vLLM tells
        its connector of the end, it frees what a window or chunk has passed after the whole prompt. Whoever pulls
        computes the last token of it, which may see a block more.

        ``waits`` returns whether a request will be told to wait. vLLM's own scheduler then looks
        nothing up for it; it would look up the whole prefix before it asks its connector, in every step.

        Blocks of a request that is preempted before a step has filled them are not found any more.
        """
        self._manager = kv_cache_manager
        self._held = np.zeros(kv_cache_manager.block_pool.num_gpu_blocks, np.int64)
        if tokens_to_pull is not None:
            _keep_what_is_pulled(kv_cache_manager.coordinator, tokens_to_pull)
        reset = kv_cache_manager.reset_prefix_cache

        def prepared_reset() -> bool:
            before_reset()
            is_reset = bool(reset())
            if is_reset:
                after_reset()
            return is_reset

        kv_cache_manager.reset_prefix_cache = prepared_reset

        def forgets_the_rest(end: Callable[["Request"], Any]) -> Callable[["Request"], Any]:
            def forget_the_rest_and_end(request: "Request") -> Any:
                # vLLM names blocks when it schedules the step that fills them. By priority, it may preempt a request of
                # that very step, so that nothing fills them: they could be found all the same.
                if request.status.name == "RUNNING":
                    self._forget_behind(request.request_id, request.num_computed_tokens)
                return end(request)

            return forget_the_rest_and_end

        kv_cache_manager.free = forgets_the_rest(kv_cache_manager.free)
        if (pop := getattr(kv_cache_manager, "pop_blocks_for_free", None)) is not None:  # of frees that wait for steps
            kv_cache_manager.pop_blocks_for_free = forgets_the_rest(pop)
        look_up = kv_cache_manager.get_computed_blocks

        def look_up_unless_it_waits(request: "Request", *limit: Any) -> Any:  # from 0.33 on, of the tokens to be found
            if not waits(request):
                return look_up(request, *limit)
            kept, request.skip_reading_prefix_cache = request.skip_reading_prefix_cache, True
            try:
                return look_up(request, *limit)  # nothing, as vLLM's releases say it
            finally:
                request.skip_reading_prefix_cache = kept

        kv_cache_manager.get_computed_blocks = look_up_unless_it_waits

    def find_longer_hits(self, is_pulled: "Callable[[Request], bool]") -> None:
        """Have vLLM find keys behind the last state of a request's prompt if what lies behind them ``is_pulled``."""
        current().find_longer_hits(self.manager, is_pulled)

    def _forget_behind(self, request_id: str, tokens: int) -> None:
        named_tokens = current().named_tokens  # of a block that is not full, too
        named = (
            block.block_id
            for size, blocks in zip(self.block_tokens, self.table(request_id), strict=True)
            for block in blocks[tokens // size :]
            if not block.is_null and block.block_hash is not None and (named_tokens(block) or tokens + 1) > tokens
        )
        self.forget(set(named))

    @property
    def manager(self) -> "KVCacheManager":
        """vLLM's manager of the blocks."""
        assert self._manager is not None, "vLLM has not handed over its cache manager"
        return self._manager

    def found_states(self, request: "Request", group: int, block_tokens: int) -> "dict[int, KVCacheBlock]":
        """Return the blocks with states of a request's prompt that its tokens are found by, by entry."""
        entries = range(request.num_prompt_tokens // block_tokens)
        found = ((entry, self.found_state(request, group, entry, block_tokens)) for entry in entries)
        return {entry: block for entry, block in found if block is not None}

    def found_state(self, request: "Request", group: int, entry: int, block_tokens: int) -> "KVCacheBlock | None":
        """Return the block that the state after the tokens of a prompt's first ``entry`` + 1 blocks is found in.

        None if it is not found, or if the prompt has fewer tokens.
        """
        pool = self.manager.block_pool
        if not (self.manager.enable_caching and 0 <= entry < request.num_prompt_tokens // block_tokens):
            return None
        hashes = current().block_hashes(request.block_hashes, pool.hash_block_size, block_tokens)
        if entry >= len(hashes):
            return None
        blocks = pool.get_cached_block(hashes[entry], [group])
        return blocks[0] if blocks else None

    @property
    def finds_prefixes(self) -> bool:
        """Whether vLLM finds blocks by their contents."""
        return bool(self.manager.enable_caching)

    @property
    def holds_anything(self) -> bool:
        """Whether vLLM may still find or use what has been computed so far."""
        return bool(len(self.manager.block_pool.cached_block_hash_to_block)) or self.free < self.total

    @property
    def left_by_hits(self) -> int:
        """How many tokens at the end of those that are cached of a prompt a hit leaves to be computed, at least.

        The last one, whose output is wanted. For drafts that read hidden states (EAGLE, MTP), vLLM drops the last block
        that it finds of the groups that keep tokens; of states, it drops none.
        """
        coordinator = self.manager.coordinator
        dropped = (
            coordinator.single_type_managers[group.group_ids[0]].block_size
            for group in getattr(coordinator, "attention_groups", ())
            if group.use_eagle and not is_state(group.spec)
        )
        return max(map(int, dropped), default=1)

    @property
    def hit_tokens(self) -> int:
        """Of how many tokens all hits are multiples: of the blocks of all groups, if vLLM hashes no finer ones."""
        return int(self.manager.coordinator.single_type_managers[0].cache_hit_alignment_tokens)

    def has_spare(self, number: int, share: float = 0.05) -> bool:
        """Return whether so many blocks are free, and a ``share`` of all beside them, into which requests grow."""
        return self.free - number >= share * self.total

    def take(self, number: int) -> HeldBlocks:
        """Take blocks that nobody uses, with a reference to each; what they hold is evicted.

        Raises:
            ValueError: fewer are free.
        """
        return tuple(self.manager.block_pool.get_new_blocks(number))

    def pin(self, blocks: HeldBlocks) -> None:
        """Keep blocks that can be found from being evicted until they are given back. None comes twice."""
        self.manager.block_pool.touch(blocks)

    def give_back(self, blocks: HeldBlocks) -> None:
        """Give back blocks that were taken or pinned. If they can be found, the last of them are evicted first."""
        self.manager.block_pool.free_blocks(reversed(blocks))

    def publish_state(
        self, request: "Request", group: int, entry: int, block_tokens: int, block: "KVCacheBlock"
    ) -> None:
        """Let a block be found as the state after the tokens of a request's first ``entry`` + 1 blocks."""
        if self.found_state(request, group, entry, block_tokens) is None:
            self.publish(request, group, entry, (block,), block_tokens)

    def hold(self, request_id: str, without: Container[int] = (), others: HeldBlocks = ()) -> HeldBlocks:
        """Take references to all blocks that a request has now, and return them.

        Not to those of the cache groups ``without``, but to ``others``.
        """
        groups = enumerate(self.manager.get_blocks(request_id).blocks)
        own = (block for group, blocks in groups if group not in without for block in blocks if not block.is_null)
        held = (*own, *others)
        self.keep(held)
        return held

    def keep(self, blocks: HeldBlocks) -> None:
        """Take a reference to each of some blocks, of which none comes twice."""
        self.manager.block_pool.touch(blocks)
        ids = ids_of(blocks)
        self._leased += len(ids) - int(np.count_nonzero(self._held[ids]))
        self._held[ids] += 1

    def longest_prefix(self, hashes: "Sequence[BlockHash]") -> "tuple[tuple[Sequence[KVCacheBlock], ...], int]":
        """Return the blocks that hold the longest prefix of some tokens, by cache group, and its length in tokens.

        Null blocks stand for those that the token behind it does not need. ``hashes``: as vLLM makes them of the
        tokens, one for each ``hash_tokens``.
        """
        return current().longest_hit(self.manager.coordinator, hashes, len(hashes) * self.hash_tokens)

    def may_hold(self, hashes: "Sequence[BlockHash]", tokens: int, groups: Mapping[int, int]) -> bool:
        """Return whether a prefix of ``tokens`` tokens or more may be found; a look, on any thread.

        ``groups``: block sizes, in tokens, of the cache groups that keep every token.
        """
        return may_hold(self.manager.block_pool, hashes, tokens, groups)

    def publish(self, request: "Request", group: int, first: int, blocks: HeldBlocks, block_tokens: int) -> None:
        """Let blocks be found as those of a request's table from entry ``first`` on, whose tokens they hold."""
        pool = self.manager.block_pool
        pool.cache_full_blocks(
            request=request, blocks=[pool.null_block] * first + list(blocks), num_cached_blocks=first,
            num_full_blocks=first + len(blocks), block_size=block_tokens, kv_cache_group_id=group,
        )  # fmt: skip

    def leave_unzeroed(self, request_id: str, groups: Sequence[int]) -> None:
        """Have vLLM not zero what a request was given in ``groups`` in this step: something else writes there."""
        current().leave_unzeroed(self.manager.coordinator, request_id, groups)

    def table(self, request_id: str) -> "tuple[Sequence[KVCacheBlock], ...]":
        """Return the blocks that a request has now, by cache group, in block table order."""
        return tuple(self.manager.get_blocks(request_id).blocks)

    def block_ids(
        self, request_id: str, tokens: int, known: Sequence[int], block_tokens: Sequence[int]
    ) -> tuple[list[int], ...]:
        """Return the ids of the blocks of a request's first ``tokens`` tokens, without the first ``known`` ones.

        By cache group, as are ``known`` and ``block_tokens``, the blocks' sizes. 0 is vLLM's null block.
        """
        return tuple(
            [int(block.block_id) for block in blocks[first : -(-tokens // size)]]
            for blocks, first, size in zip(self.table(request_id), known, block_tokens, strict=True)
        )

    @property
    def block_tokens(self) -> tuple[int, ...]:
        """Block size of each cache group, in tokens."""
        return current().block_tokens(self.manager.coordinator)

    @property
    def hash_tokens(self) -> int:
        """Number of tokens of a block that vLLM hashes."""
        return int(self.manager.block_pool.hash_block_size)

    @property
    def retention_interval(self) -> int | None:
        """Tokens between the windows and states that vLLM keeps for prefixes.

        0: those at the ends of prompts only; None: all, as in releases that have no such option. vllm-ascend's
        coordinator of several cache groups keeps all, whatever the option says.
        """
        interval: int | None = getattr(self.manager.coordinator, "retention_interval", None)
        return interval

    def forget(self, block_ids: Set[int]) -> None:
        """Let no request find these blocks any more, whoever uses them."""
        if block_ids:
            self.manager.block_pool.evict_blocks(set(block_ids))

    def release(self, held: HeldBlocks) -> None:
        """Give the references back. The last blocks of a prompt are evicted first."""
        ids = ids_of(held)
        self._held[ids] -= 1
        self._leased -= len(ids) - int(np.count_nonzero(self._held[ids]))
        self.manager.block_pool.free_blocks(reversed(held))

    @property
    def references(self) -> "Counter[int]":
        """Number of references to each block that is held, by block id."""
        return references(self._held)

    def are_all_in_use(self, references: "Counter[int]") -> bool:
        """Return whether nobody else uses any block, given our ``references`` by block id."""
        pool = self.manager.block_pool
        in_use = int(pool.num_gpu_blocks - pool.get_num_free_blocks()) - 1  # one is vLLM's null block
        ours = sum(int(pool.blocks[block_id].ref_cnt) == number for block_id, number in references.items())
        return in_use == ours

    @property
    def leased(self) -> int:
        """Number of blocks that are held, each counted once."""
        return self._leased

    @property
    def free(self) -> int:
        """Number of blocks that are in nobody's use."""
        return int(self.manager.block_pool.get_num_free_blocks())

    @property
    def total(self) -> int:
        """Number of blocks that requests can use."""
        return int(self.manager.block_pool.num_gpu_blocks) - 1  # block 0 is vLLM's null block


def _keep_what_is_pulled(coordinator: Any, tokens_to_pull: Callable[[str], int | None]) -> None:
    """Have vLLM free no block that the last token to be pulled still sees."""
    remove = coordinator.remove_skipped_blocks

    def remove_unless_needed(request_id: str, computed_tokens: int, *args: Any, **named: Any) -> None:
        wanted = tokens_to_pull(request_id)
        remove(request_id, computed_tokens if wanted is None else min(computed_tokens, wanted), *args, **named)

    coordinator.remove_skipped_blocks = remove_unless_needed


def may_hold(pool: "BlockPool", hashes: "Sequence[BlockHash]", tokens: int, groups: Mapping[int, int]) -> bool:
    """Return whether a prefix of ``tokens`` tokens or more may be found in a pool: see ``DeviceBlocks.may_hold``."""
    for group, size in groups.items():
        wanted = current().block_hashes(hashes, pool.hash_block_size, size)
        entry = -(-tokens // size) - 1
        if not 0 <= entry < len(wanted):
            return False
        try:
            if not pool.get_cached_block(wanted[entry], [group]):
                return False
        except (RuntimeError, StopIteration):  # the scheduler's thread adds or drops a block of that hash
            continue
    return True


def tokens_before(
    table: "Sequence[Sequence[KVCacheBlock]]", block_tokens: Sequence[int], tokens: int, unfinished: Container[int]
) -> int:
    """Return how many of the first ``tokens`` tokens come before any of the ``unfinished`` blocks in a table.

    ``block_tokens``: block size of each of its cache groups, in tokens.
    """
    for size, group in zip(block_tokens, table, strict=True):
        for number, block in enumerate(islice(group, -(-tokens // size))):
            if block.block_id in unfinished and not block.is_null:
                tokens = min(tokens, number * size)
                break
    return tokens


def ids_of(blocks: "Iterable[KVCacheBlock]") -> Int64Array:
    """Return the ids of blocks."""
    return np.array([block.block_id for block in blocks], np.int64)


def references(counts: Int64Array) -> "Counter[int]":
    """Return the numbers that are not 0, by their index."""
    used = np.flatnonzero(counts)
    return Counter(dict(zip(used.tolist(), counts[used].tolist(), strict=True)))
