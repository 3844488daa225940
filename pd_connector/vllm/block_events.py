"""The KV cache events that tell routers what is in host memory, with the tokens by which they index it.

An event needs the tokens of its blocks and the block before them, which the request knows. A lazy store comes when the
request may have left long ago, so what it knew is remembered for as long as the device may hold the block. As vLLM does
for the device, one event tells neighbouring blocks of a request.
"""

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from vllm.v1.core.kv_cache_utils import (
    generate_block_hash_extra_keys,
    get_block_hash,
    get_group_id,
    make_block_hash_with_group_id,
    maybe_convert_block_hash,
)

from pd_connector.vllm.releases.newest import VllmRelease

if TYPE_CHECKING:
    from vllm.distributed.kv_events import KVCacheEvent
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.core.kv_cache_utils import BlockHash, BlockHashWithGroupId, ExternalBlockHash
    from vllm.v1.request import Request


@dataclass(frozen=True, slots=True)
class _Run:
    """Neighbouring blocks of one request in a cache group."""

    group: int
    hashes: "Sequence[BlockHash | None]"  # of the block before the first, None if it begins the prompt, then of each
    tokens: "array[int]"  # empty if they are not known
    extra_keys: tuple[tuple[Any, ...] | None, ...] = (None,)  # of each block
    lora_request: Any = None
    session_id: str | None = None


class BlockOfRun(NamedTuple):
    """A block, and what its event tells."""

    run: _Run
    number: int  # in the run


class BlockEvents:
    """Makes the events of host blocks, some of them from what it remembers.

    It remembers at most twice as many blocks as the device has, and those of one request.
    """

    def __init__(
        self, device: "KVCacheManager", host: "BlockPool", release: VllmRelease, block_tokens: Sequence[int]
    ) -> None:
        """``block_tokens``: block size of each cache group, in tokens."""
        self._device = device
        self._host = host
        self._release = release
        self._block_tokens = block_tokens
        self._most = 2 * int(device.kv_cache_config.num_blocks)
        self._remembered: dict[BlockHashWithGroupId, BlockOfRun] = {}

    def of_request(self, request: "Request", group: int, first: int, end: int) -> list[BlockOfRun]:
        """Return what is told of a request's full blocks ``first`` to ``end`` (exclusive) of a cache group.

        Fewer if not all of them have a hash.
        """
        run = self._run(request, group, first, end)
        return [BlockOfRun(run, number) for number in range(len(run.hashes) - 1)]

    def remember(self, request: "Request", group: int, first: int, end: int) -> None:
        """Keep what is told of a request's full blocks ``first`` to ``end`` (exclusive)."""
        if len(self._remembered) + end - first > self._most:
            self._forget_evicted()
        for block in self.of_request(request, group, first, end):
            self._remembered[make_block_hash_with_group_id(block.run.hashes[block.number + 1], group)] = block

    def recall(self, key: "BlockHashWithGroupId") -> BlockOfRun:
        """Return what is told of a block by its key: no tokens and no parent if it was not remembered."""
        if (block := self._remembered.get(key)) is not None:
            return block
        return BlockOfRun(_Run(int(get_group_id(key)), (None, get_block_hash(key)), array("q")), 0)

    def stored(self, blocks: Iterable[BlockOfRun]) -> "list[KVCacheEvent]":
        """Return the events of blocks that were stored: one where neighbours follow each other, either way."""
        merged: list[tuple[_Run, int, int]] = []
        for run, number in blocks:
            before, first, end = merged[-1] if merged else (None, 0, 0)
            if before is run and number in {first - 1, end}:
                merged[-1] = run, min(first, number), max(end, number + 1)
            else:
                merged.append((run, number, number + 1))
        return [self._event(*each) for each in merged]

    def removed(self, keys: "Iterable[BlockHashWithGroupId]") -> "list[KVCacheEvent]":
        """Return the events of blocks that were evicted, one for each cache group."""
        by_group: dict[int, list[ExternalBlockHash]] = {}
        for key in keys:
            by_group.setdefault(get_group_id(key), []).append(maybe_convert_block_hash(get_block_hash(key)))
        return [self._release.removed_event(hashes, group) for group, hashes in by_group.items()]

    def forget(self) -> None:
        """Forget all blocks: what the caches hold is no longer valid."""
        self._remembered.clear()

    def _forget_evicted(self) -> None:
        """Forget the blocks that the device does not hold any longer; it holds no more than it has."""
        held = self._device.block_pool.cached_block_hash_to_block.get_one_block
        self._remembered = {key: kept for key, kept in self._remembered.items() if held(key) is not None}

    def _run(self, request: "Request", group: int, first: int, end: int) -> _Run:
        size = self._block_tokens[group]
        hashes = self._release.block_hashes(request.block_hashes, self._host.hash_block_size, size)
        is_plain = request.prompt_embeds is None and not (
            request.mm_features or request.lora_request or request.cache_salt
        )
        end = min(end, len(hashes))
        return _Run(
            group,
            [hashes[first - 1] if first else None, *(hashes[number] for number in range(first, end))],
            array("q", request.all_token_ids[first * size : end * size]),
            (None,) * (end - first) if is_plain else tuple(_extra_keys(request, size, first, end)),
            request.lora_request,
            self._release.session_id(request),
        )

    def _event(self, run: _Run, first: int, end: int) -> "KVCacheEvent":
        size, parent, adapter = self._block_tokens[run.group], run.hashes[first], run.lora_request
        kind, window = self._device.kv_cache_event_metadata[run.group]
        return self._release.stored_event(
            block_hashes=list(map(maybe_convert_block_hash, run.hashes[first + 1 : end + 1])),
            parent_block_hash=None if parent is None else maybe_convert_block_hash(parent),
            token_ids=run.tokens[first * size : end * size].tolist(),
            block_size=size,
            lora_id=adapter.adapter_id if adapter else None,
            lora_name=adapter.name if adapter else None,
            extra_keys=self._release.event_extra_keys(list(run.extra_keys[first:end])) if run.tokens else None,
            group_idx=run.group,
            kv_cache_spec_kind=kind,
            kv_cache_spec_sliding_window=window,
            session_id=run.session_id,
        )


def _extra_keys(request: "Request", size: int, first: int, end: int) -> "list[tuple[Any, ...] | None]":
    """Return what besides its tokens shapes each block: images, adapters, salts."""
    return [generate_block_hash_extra_keys(request, n * size, (n + 1) * size, 0)[0] for n in range(first, end)]


def group_and_hash(key: "BlockHashWithGroupId") -> tuple[int, bytes]:
    """Return the cache group of a block, and its hash."""
    return int(get_group_id(key)), bytes(get_block_hash(key))
