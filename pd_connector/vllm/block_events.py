"""The KV cache events that tell routers what is in host memory, with the tokens by which they index it.

An event needs the tokens of its block and the block before it, which the request knows. A lazy store comes when the
request may have left long ago, so what it knew is remembered for as long as the device may hold the block.
"""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

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
    from vllm.v1.core.kv_cache_utils import BlockHash, BlockHashWithGroupId
    from vllm.v1.request import Request


@dataclass(frozen=True, slots=True)
class _Run:
    """Neighbouring blocks of one request."""

    hashes: "Sequence[BlockHash | None]"  # of the block before the first, None if it begins the prompt, then of each
    tokens: "array[int]"  # empty if they are not known
    extra_keys: tuple[tuple[Any, ...] | None, ...] = (None,)  # of each block
    lora_request: Any = None
    session_id: str | None = None


class BlockEvents:
    """Makes the "stored" events of host blocks, some of them from what it remembers.

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
        self._remembered: dict[BlockHashWithGroupId, tuple[_Run, int]] = {}  # a run, and the number of a block in it

    def stored(self, request: "Request", group: int, number: int) -> "KVCacheEvent":
        """Return the event of a request's full block ``number`` of a cache group."""
        return self._event(self._run(request, group, number, number + 1), group, 0)

    def remember(self, request: "Request", group: int, first: int, end: int) -> None:
        """Keep what events of a request's full blocks ``first`` to ``end`` (exclusive) will tell."""
        if len(self._remembered) + end - first > self._most:
            self._forget_evicted()
        run = self._run(request, group, first, end)
        for number, block_hash in enumerate(run.hashes[1:]):
            self._remembered[make_block_hash_with_group_id(block_hash, group)] = run, number

    def recall(self, key: "BlockHashWithGroupId") -> "KVCacheEvent":
        """Return the event of a block by its key. Without tokens and parent if the block was not remembered."""
        run, number = self._remembered.get(key) or (_Run((None, get_block_hash(key)), array("q")), 0)
        return self._event(run, int(get_group_id(key)), number)

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
        return _Run(
            hashes=[hashes[first - 1] if first else None, *(hashes[number] for number in range(first, end))],
            tokens=array("q", request.all_token_ids[first * size : end * size]),
            extra_keys=(None,) * (end - first) if is_plain else tuple(_extra_keys(request, size, first, end)),
            lora_request=request.lora_request,
            session_id=self._release.session_id(request),
        )

    def _event(self, run: _Run, group: int, number: int) -> "KVCacheEvent":
        size, parent, adapter = self._block_tokens[group], run.hashes[number], run.lora_request
        kind, window = self._device.kv_cache_event_metadata[group]
        return self._release.stored_event(
            block_hashes=[maybe_convert_block_hash(run.hashes[number + 1])],
            parent_block_hash=None if parent is None else maybe_convert_block_hash(parent),
            token_ids=run.tokens[number * size : (number + 1) * size].tolist(),
            block_size=size,
            lora_id=adapter.adapter_id if adapter else None,
            lora_name=adapter.name if adapter else None,
            extra_keys=self._release.event_extra_keys([run.extra_keys[number]]) if run.tokens else None,
            group_idx=group,
            kv_cache_spec_kind=kind,
            kv_cache_spec_sliding_window=window,
            session_id=run.session_id,
        )


def _extra_keys(request: "Request", size: int, first: int, end: int) -> "list[tuple[Any, ...] | None]":
    """Return what besides its tokens shapes each block: images, adapters, salts."""
    return [generate_block_hash_extra_keys(request, n * size, (n + 1) * size, 0)[0] for n in range(first, end)]
