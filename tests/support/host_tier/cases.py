"""Short cuts of the tests of the host tier: an engine, and what is in its host memory and under way."""

from collections.abc import Iterable, Iterator

import msgspec
from vllm.distributed.kv_events import BlockStored, KVCacheEvent

from pd_connector.orders import LoadOrder, StoreOrder
from tests.support.host_tier.engine import HostTierEngine
from tests.support.host_tier.setup import Setup

WINDOWED = ((4, 0), (4, 6))
EVERYTHING = 99  # blocks, more than there are


def said(tokens: int, seed: int = 0) -> tuple[int, ...]:
    return tuple(seed + position for position in range(tokens))


def engine_of(**options: object) -> HostTierEngine:
    return HostTierEngine(Setup(**{"device_blocks": 17, "slots": 16, **options}))  # type: ignore[arg-type]  # of any field


def with_memory_of(tokens: int, **options: object) -> HostTierEngine:
    """An engine that has served a prompt of one token less, has stored it, and has something else on the device."""
    engine = engine_of(**options)
    engine.serve("first", said(tokens))
    engine.other_requests_come(EVERYTHING)
    return engine


def under_way(engine: HostTierEngine, kind: type[LoadOrder] | type[StoreOrder]) -> int:
    return sum(isinstance(copy.order, kind) for rank in engine.ranks for copy in rank.under_way)


def stores(engine: HostTierEngine) -> int:
    """Blocks that are being stored."""
    return sum(len(copy.slots) for copy in engine.ranks[0].under_way if isinstance(copy.order, StoreOrder))


def steps(engine: HostTierEngine, count: int) -> None:
    for _ in range(count):
        engine.step(4)


def tokens_loading(engine: HostTierEngine, request_id: str) -> int:
    """Tokens of a request that are on their way from host memory."""
    (job,) = (job for job in engine.jobs if job.request_id == request_id)
    return engine.tier.loaded_tokens(job.request)


def told_apart(events: Iterable[KVCacheEvent]) -> Iterator[KVCacheEvent]:
    """The events, with one for each stored block: whoever reads them knows no more, and no less."""
    for event in events:
        if not isinstance(event, BlockStored):
            yield event
            continue
        parent, size = event.parent_block_hash, event.block_size
        assert len(event.token_ids) in {0, size * len(event.block_hashes)}
        for number, block_hash in enumerate(event.block_hashes):
            extra = event.extra_keys
            yield msgspec.structs.replace(
                event,
                block_hashes=[block_hash],
                parent_block_hash=parent,
                token_ids=event.token_ids[number * size : (number + 1) * size],
                extra_keys=None if extra is None else [extra[number]],
            )
            parent = block_hash
