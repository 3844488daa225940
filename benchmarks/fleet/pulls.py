"""Bytes and descriptors of a range of a prompt's tokens, planned by the connector's own planner."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from benchmarks.fleet.constants import Cache
from layout.cost import CostModel
from layout.geometry import CacheGroup, Plane, Region, WorkerGeometry
from layout.plan import BlockTable, compile_plans
from layout.regions import RegionTable
from layout.sharding import choose_sources
from layout.staging import schedule_reads

_ADDRESS = 1 << 40
_COST = CostModel.of_protocol("tcp")  # without staging, it decides nothing
_REMEMBERED = 65_536


@dataclass(frozen=True)
class Planned:
    """What a read moves."""

    descriptors: int
    bytes: int


class PullPlanner:
    """Plans pulls between two engines of one rank each, with all layers of a block together (BHLNC)."""

    def __init__(self, cache: Cache, *, scattered: bool = False, seed: int = 0) -> None:
        """Compile the plan.

        Args:
            cache: of both engines.
            scattered: whether a prompt's blocks lie anywhere, as in an engine that has served for long; else they
                lie in a row, as in a fresh one.
            seed: of the places where they lie.
        """
        self._cache = cache
        self._scattered = scattered
        self._seed = seed
        worker = _worker(cache)
        self._regions = RegionTable(worker.regions)
        (self._plan,) = compile_plans(worker, [worker], choose_sources(worker, [worker])).values()
        self.planned = lru_cache(_REMEMBERED)(self._planned)

    def _planned(self, first_token: int, end_token: int) -> Planned:
        """Return what the tokens ``first_token``, at a block's border, to ``end_token`` (exclusive) take."""
        if first_token >= end_token:
            return Planned(0, 0)
        blocks = -(-end_token // self._cache.block_tokens)
        copies = self._plan.instantiate(self._table(blocks, 1), self._table(blocks, 2), first_token, end_token)
        schedule = schedule_reads(copies, _COST, self._regions, self._regions, None)
        return Planned(schedule.descriptors, schedule.read_bytes)

    def _table(self, blocks: int, side: int) -> Sequence[BlockTable]:
        ids = np.arange(1, blocks + 1)
        if self._scattered:
            ids = np.random.default_rng((self._seed, side)).permutation(self._cache.blocks)[:blocks]
        return [BlockTable.of(ids)]


def _worker(cache: Cache) -> WorkerGeometry:
    content = 2 * cache.head_size
    page = cache.block_tokens * content * cache.item_bytes
    blocks = cache.blocks + 1
    plane = Plane(
        part="kv", layers=tuple(f"layers.{number}" for number in range(cache.layers)), head_start=0,
        heads=cache.kv_heads, block_tokens=cache.block_tokens, content=content, item_size=cache.item_bytes,
        blocks=blocks, address=_ADDRESS, layer_stride=page, block_stride=cache.block_bytes,
        head_stride=cache.layers * page, token_stride=content * cache.item_bytes, content_stride=cache.item_bytes,
        total_heads=cache.kv_heads,
    )  # fmt: skip
    regions = (Region(_ADDRESS, blocks * cache.block_bytes),)
    return WorkerGeometry(0, 1, 0, 1, "", (CacheGroup(cache.block_tokens, 0, (plane,)),), regions)
