"""The connector's workers on the real caches of a recipe's engines: started on every rank, and what they do with them.

The control channel, leases and checksums are real; the transfer engine is the in-process one.
"""

import logging
import pickle
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from vllm.config import set_current_vllm_config

from layout.copies import Int64Array
from layout.geometry import WorkerGeometry
from layout.host_blocks import host_layout
from layout.plan import BlockTable
from layout.regions import RegionTable
from pd_connector.config import ConfigError, parse_config
from pd_connector.orders import (
    BlockMoves,
    CanaryEnds,
    CanaryReference,
    ChecksumReport,
    LoadOrder,
    Orders,
    PullOrder,
    Report,
    StoreOrder,
    WorkerHandshake,
    block_table,
)
from pd_connector.params import RemotePrefill, parse_remote_prefill
from pd_connector.scheduler.prefill.lease_service import LeaseService
from pd_connector.scheduler.prefill.leases import LeaseTable
from pd_connector.stats import StatsRecorder
from pd_connector.vllm.model_identity import of_engine
from pd_connector.worker.worker import ConnectorWorker
from tests.support.ascend.recipe_books import Books
from tests.support.ascend.recipe_memory import RankMemory, differences, tensors_of
from tests.support.ascend.recipe_oracle import RecipePrompt, prompt_tokens
from tests.support.ascend.recipe_pulls import describe
from tests.support.ascend.recipe_ranks import RankCaches, make_ranks, our_config
from tests.support.ascend.recipes import EngineSide, Recipe, our_settings
from tests.support.connector.requests import FakeRequest
from tests.support.engine.in_process import InProcessEngine, InProcessFabric
from tests.support.memory import Bytes
from tests.support.waiting import until
from transfer.control.server import ControlServer
from transfer.engine.mooncake_limits import LIMITS

_WAIT_S, _LEASE_S = 120.0, 3600.0
#: Forms of caches that no transfer finds in host memory: their blocks are of several kernel blocks each.
_NOT_FOUND_ON_HOST = ["G", "S"]
_MOVED_BLOCKS = 2  # of each cache group, through host memory


@dataclass(frozen=True)
class Worked:
    """What was done, for those who read it."""

    p_ranks: int
    d_ranks: int
    tokens: int
    compared: int  # layers' parts in canaries
    moved: int  # blocks through host memory


def run_prompt(recipe: Recipe, directory: Path) -> Worked:
    """Start all workers of both engines; have D's pull a prompt of P's, prove P, and keep blocks in host memory.

    Asserts that all of that is right, and that what is wrong is noticed.
    """
    prefill: _Prefill | None = None
    compared = moved = d_ranks = 0
    with ExitStack() as opened:
        fabric = InProcessFabric()
        senders = opened.enter_context(_Sender.all_started(recipe, directory, fabric))
        for reader in make_ranks(recipe, "D", directory):
            if prefill is None:
                prefill = opened.enter_context(_Prefill.serving(senders, prompt_tokens([senders[0].rank, reader])))
                moved += sum(
                    _check_host_memory(each.rank, each.worker, each.memory, prefill.prompt, prefill.layers)
                    for each in senders
                )
            # Canaries are pulled to device memory over the one, and host memory is readable over the other.
            for protocol in ("ascend", "tcp") if reader.tp_rank == 0 else ("ascend",):
                with _started(reader, recipe, "D", fabric, protocol) as worker:
                    receiver = _Receiver(reader, worker, prefill)
                    receiver.check_pull()
                    receiver.check_wrong_byte()
                    compared += receiver.check_canary()
                    moved += receiver.check_host_memory()
            d_ranks += 1
    assert prefill is not None, "D has no ranks"
    return Worked(len(senders), d_ranks, prefill.tokens, compared, moved)


def refusal(recipe: Recipe, directory: Path) -> str:
    """Why the first worker of D does not pull from P, as its log has it; empty if it does."""
    with ExitStack() as opened:
        fabric = InProcessFabric()
        senders = opened.enter_context(_Sender.all_started(recipe, directory, fabric))
        reader = next(make_ranks(recipe, "D", directory))
        prefill = opened.enter_context(_Prefill.serving(senders, prompt_tokens([senders[0].rank, reader])))
        with _started(reader, recipe, "D", fabric, "ascend") as worker:
            return _Receiver(reader, worker, prefill)._pull()


@contextmanager
def _started(
    rank: RankCaches, recipe: Recipe, side: EngineSide, fabric: InProcessFabric, protocol: str
) -> Iterator[ConnectorWorker]:
    """A rank's worker that has registered its caches; the process must still be that rank."""
    parallel = rank.vllm_config.parallel_config
    workers = parallel.tensor_parallel_size * parallel.pipeline_parallel_size
    slots = _MOVED_BLOCKS * len(rank.kv_cache_config.kv_cache_groups)
    settings: dict[str, Any] = our_settings(recipe.side(side)) | {
        "host": "127.0.0.1", "protocol": protocol, "verify": True, "canary": "refuse", "host_transfers": "off",
        "model_check": "config",  # there are no weights
        "cpu_bytes_to_use": host_layout(describe(rank)).slot_bytes * workers * slots,
    }  # fmt: skip
    if protocol != "ascend":
        with_transfers = settings | {"host_transfers": "auto" if side == "P" else "always"}
        if recipe.forms[side] != _NOT_FOUND_ON_HOST:
            settings = with_transfers
        else:
            _check_refused(rank, with_transfers, fabric)
    worker = _worker(rank, settings, fabric)
    try:
        with set_current_vllm_config(rank.vllm_config):
            worker.register_caches(rank.kv_caches)
        shake = _handshake(worker)
        assert bool(shake.host) is (side == "P" and settings["host_transfers"] != "off")
        assert shake.host_slots == slots
        _check_places(shake.geometry)
        assert pickle.loads(pickle.dumps(shake)) == shake
        yield worker
        worker.check_integrity()
    finally:
        worker.shutdown()


def _check_refused(rank: RankCaches, settings: dict[str, Any], fabric: InProcessFabric) -> None:
    worker = _worker(rank, settings, fabric)
    with set_current_vllm_config(rank.vllm_config), pytest.raises(ConfigError, match="kernel blocks"):
        worker.register_caches(rank.kv_caches)
    worker.shutdown()


def _worker(rank: RankCaches, settings: dict[str, Any], fabric: InProcessFabric) -> ConnectorWorker:
    config, kept = our_config(rank.vllm_config), rank.kv_cache_config
    return ConnectorWorker(config, kept, parse_config(settings), StatsRecorder(), lambda _: InProcessEngine(fabric))


def _check_places(geometry: WorkerGeometry) -> None:
    """Every byte of every plane is in memory that is registered, which the transport for Ascend can register."""
    table = RegionTable(geometry.regions)
    limits = LIMITS["ascend"]
    assert limits.most_regions is not None
    assert len(geometry.regions) < limits.most_regions  # another one holds the identities
    assert not any(region.address % limits.alignment for region in geometry.regions), geometry.regions
    for plane in (plane for group in geometry.groups for plane in group.planes):
        steps = (
            (plane.blocks, plane.block_stride), (plane.heads, plane.head_stride),
            (plane.block_tokens, plane.token_stride), (plane.content, plane.content_stride),
        )  # fmt: skip
        size = sum((number - 1) * stride for number, stride in steps) + plane.item_size
        starts = plane.address + plane.layer_stride * np.arange(len(plane.layers), dtype=np.int64)
        assert not table.outside(starts, np.full_like(starts, size)).any(), f"{plane} is not in {geometry.regions}"


@dataclass(frozen=True)
class _Sender:
    """A rank of P."""

    rank: RankCaches
    worker: ConnectorWorker
    memory: RankMemory

    @classmethod
    @contextmanager
    def all_started(cls, recipe: Recipe, directory: Path, fabric: InProcessFabric) -> "Iterator[list[_Sender]]":
        with ExitStack() as opened:
            ranks = make_ranks(recipe, "P", directory)
            yield [opened.enter_context(cls._started(rank, recipe, fabric)) for rank in ranks]

    @classmethod
    @contextmanager
    def _started(cls, rank: RankCaches, recipe: Recipe, fabric: InProcessFabric) -> "Iterator[_Sender]":
        with _started(rank, recipe, "P", fabric, "tcp") as worker:
            yield cls(rank, worker, RankMemory(rank.kv_caches))


@dataclass(frozen=True)
class _Prefill:
    """P with a prompt, of which any number of leases can be had."""

    senders: list[_Sender]
    service: LeaseService[str]
    port: int
    tokens: int
    tables: tuple[tuple[int, ...], ...]
    sums: list[Any]

    @classmethod
    @contextmanager
    def serving(cls, senders: list[_Sender], tokens: int) -> "Iterator[_Prefill]":
        """Fill P with noise and a prompt, and have its workers take the checksums of the first lease."""
        shakes = [_handshake(sender.worker) for sender in senders]
        identity = of_engine([shake.model for shake in shakes if shake.model is not None])
        tp = senders[0].rank.vllm_config.parallel_config.tensor_parallel_size
        service: LeaseService[str] = LeaseService(LeaseTable(_LEASE_S, time.monotonic), identity, tp, verify=True)
        # Some of D's workers read over another transport than the others.
        service.set_workers(tuple(replace(shake.geometry, transport="") for shake in shakes))
        tables = Books(senders[0].rank, tokens + 1).lease()
        sent = RecipePrompt(tokens, [block_table(ids) for ids in tables])
        for number, sender in enumerate(senders):
            sender.memory.fill_with_noise(number)
            _write(sent, sender.rank, sender.memory)
        server = ControlServer(service, "127.0.0.1", 0)
        service.notify = server.changed
        server.start()
        try:
            prefill = cls(senders, service, server.port, tokens, tables, [])
            prefill._sum_first()
            yield prefill
        finally:
            server.close()

    @property
    def layers(self) -> frozenset[str]:
        return frozenset(layer for sender in self.senders for layer in sender.rank.kv_caches)

    def lease(self) -> RemotePrefill:
        """Lease the prompt once more; its checksums are those that the workers took of the same blocks."""
        remote = self._grant()
        for order in self.service.checksums.take_orders():
            for worker, groups in enumerate(self.sums):
                self.service.checksums.add(ChecksumReport(order.lease_id, worker, groups))
        return remote

    @contextmanager
    def changed(self, layer: str, bits: int, change: Callable[[Any], Any]) -> Iterator[None]:
        """Other contents in what ``change`` returns of each place of a layer, wherever P has that layer."""

        def flip() -> None:
            for sender in self.senders:
                for place, _ in self.prompt.places(sender.rank, sender.memory, frozenset({layer})):
                    changed = change(place)
                    changed ^= np.uint8(bits)

        flip()
        yield
        flip()

    @property
    def prompt(self) -> RecipePrompt:
        return RecipePrompt(self.tokens, [block_table(ids) for ids in self.tables])

    def _grant(self) -> RemotePrefill:
        request = FakeRequest("r", list(range(1, self.tokens + 2)))
        return parse_remote_prefill(self.service.grant(request, self.tables, "r", ("127.0.0.1", self.port)))

    def _sum_first(self) -> None:
        self._grant()
        orders = self.service.checksums.take_orders()
        for sender in self.senders:
            sender.worker.execute(Orders(checksums=orders))
            (report,) = _reported(sender.worker, lambda report: report.checksums)
            assert report.groups is not None, "there are no checksums"
            self.sums.append(report.groups)


def _write(prompt: RecipePrompt, rank: RankCaches, memory: RankMemory, layers: frozenset[str] | None = None) -> None:
    """As ``RecipePrompt.write``, with bytes that are numbers of like size in any dtype, as canaries compare."""
    for place, value in prompt.places(rank, memory, layers):
        place[...] = _numbers(value)


def _numbers(value: Bytes) -> Bytes:
    return value & np.uint8(0x0F) | np.uint8(0x30)


class _Receiver:
    """A rank of D, and its blocks for P's prompt."""

    def __init__(self, rank: RankCaches, worker: ConnectorWorker, prefill: _Prefill) -> None:
        self._rank, self._worker, self._prefill = rank, worker, prefill
        self.memory = RankMemory(rank.kv_caches)
        books = Books(rank, prefill.tokens + 1)
        self._block_tokens = [kept.block_tokens for kept in books.retentions]
        self._wanted = RecipePrompt(prefill.tokens, books.receive(prefill.lease()))
        self._tables = tuple(tuple(np.maximum(table.block_ids, 0).tolist()) for table in self._wanted.tables)
        self._layer = self._kv_layer()

    def check_pull(self) -> None:
        """Pull the prompt. The worker compares the checksums, and the bytes are compared here."""
        self.memory.fill_with_noise(1000 + self._rank.tp_rank)
        expected = self.memory.copy()
        _write(self._wanted, self._rank, expected, self._prefill.layers)
        assert not (failure := self._pull()), failure
        assert not (wrong := differences(self.memory, expected)), f"D's rank {self._rank.tp_rank}: {wrong}"

    def check_wrong_byte(self) -> None:
        """P's blocks differ from what its checksums are of, in a byte of each head of a row of each kernel block."""
        if self._rank.tp_rank:  # where ranks share the tokens of a prompt, others need not have one of these rows
            return
        with self._prefill.changed(self._layer, 1, lambda place: place[(0, slice(None), *[0] * (place.ndim - 2))]):
            failure = self._pull()
        assert f"layer {self._layer!r}" in failure, failure or "a wrong byte was not noticed"
        _write(self._wanted, self._rank, self.memory, self._prefill.layers)

    def check_canary(self) -> int:
        """P is proven by what D's blocks hold, and refused once it has other values in one layer."""
        proven = self._canary()
        assert not proven.failure + proven.difference, proven
        with self._prefill.changed(self._layer, 0x55, lambda place: place):
            refused = self._canary()
        assert self._layer in refused.difference, f"{self._layer} was changed: {refused}"
        return proven.samples

    def check_host_memory(self) -> int:
        """Move blocks of the prompt through host memory; return how many."""
        layers = self._prefill.layers
        return _check_host_memory(self._rank, self._worker, self.memory, self._wanted, layers)

    def _pull(self) -> str:
        """Return why it has failed; empty if it has not."""
        order = PullOrder("r", self._prefill.lease(), self._tables, 0, self._prefill.tokens, "pull")
        with _logged() as failures:
            self._worker.execute(Orders(pulls=(order,)))
            failed = _ended(self._worker)
        torch.npu.synchronize()
        assert failed is bool(failures), failures
        return " ".join(failures)

    def _canary(self) -> CanaryEnds:
        room, end = _handshake(self._worker).canary, self._prefill.tokens
        assert room is not None, "there is no room for canaries"
        first = -(-max(0, end - room.tokens) // room.border) * room.border
        assert end > first
        compared = tuple(
            tuple(block if (entry + 1) * size > first else 0 for entry, block in enumerate(ids))
            for ids, size in zip(self._tables, self._block_tokens, strict=True)
        )
        scratch = tuple(tuple(int(number) for number in np.cumsum(np.sign(ids)) * np.sign(ids)) for ids in compared)
        self._worker.execute(Orders(canaries=(PullOrder("c", self._prefill.lease(), scratch, first, end, "canary"),)))
        self._worker.execute(Orders(references=(CanaryReference("c", compared),)))
        ends: CanaryEnds = _reported(self._worker, lambda report: report.canaries)["c"]
        return ends

    def _kv_layer(self) -> str:
        """The last layer of the first kind of vectors, drafts left out: K, latent vectors or compressed ones."""
        groups = _handshake(self._worker).geometry.groups
        planes = (plane for group in groups if not group.states for plane in group.planes if not plane.optional)
        return next(layer for layer in reversed(next(planes).layers) if layer in self._prefill.layers)


def _check_host_memory(
    rank: RankCaches, worker: ConnectorWorker, memory: RankMemory, prompt: RecipePrompt, layers: frozenset[str]
) -> int:
    """Store a prompt's last blocks of each cache group in slots, and load them into other blocks; return how many.

    ``memory`` has the prompt's bytes of ``layers``. It is left as it was.
    """
    ids = [table.block_ids for table in prompt.tables]
    free = iter(np.setdiff1d(np.arange(1, rank.kv_cache_config.num_blocks), np.concatenate(ids)).tolist())
    others = [np.full_like(each, -1) for each in ids]
    stores, loads = list[tuple[int, int, int]](), list[tuple[int, int, int]]()
    for group, each in enumerate(ids):
        for slot, entry in enumerate(np.flatnonzero(each >= 0)[-_MOVED_BLOCKS:], len(stores)):
            others[group][entry] = next(free)
            stores.append((group, int(each[entry]), slot))
            loads.append((group, int(others[group][entry]), slot))
    before = memory.copy()
    worker.execute(Orders(stores=(StoreOrder(1, BlockMoves.of(stores)),)))
    assert not _reported(worker, lambda report: report.stores)[1].failed, "the store has failed"
    worker.execute(Orders(loads=(LoadOrder("l", BlockMoves.of(loads), 1),)))
    assert not _ended(worker), "the load has failed"
    torch.npu.synchronize()
    for place, value in RecipePrompt(prompt.tokens, list(map(BlockTable.of, others))).places(rank, memory, layers):
        assert np.array_equal(place, _numbers(value)), f"loaded {loads} of {stores}: not what was stored"
    _check_unchanged(rank, memory, before, np.concatenate(others))
    for live, old in zip(memory, before, strict=True):
        live[:] = old
    return len(stores)


def _check_unchanged(rank: RankCaches, memory: RankMemory, before: RankMemory, but: Int64Array) -> None:
    """Nothing has changed in any layer's blocks ``but`` these."""
    blocks = np.setdiff1d(np.arange(rank.kv_cache_config.num_blocks), but)
    for layer, cache in rank.kv_caches.items():
        for tensor in tensors_of(cache):
            parts = np.arange(tensor.shape[0] // rank.kv_cache_config.num_blocks)
            rows = (blocks[:, None] * len(parts) + parts).ravel()  # of kernel blocks
            is_right = np.array_equal(memory.view(tensor)[rows], before.view(tensor)[rows])
            assert is_right, f"{layer} has changed beside the blocks that were loaded"


def _handshake(worker: ConnectorWorker) -> WorkerHandshake:
    shake = worker.handshake()
    assert shake is not None, "the worker has not started"
    return shake


def _reported(worker: ConnectorWorker, part: Callable[[Report], Any]) -> Any:
    return until(lambda: part(worker.take_report()), within_s=_WAIT_S)


def _ended(worker: ConnectorWorker) -> bool:
    """Wait for the one request that waits; return whether that has failed."""
    results: list[tuple[set[str], set[str]]] = []

    def has_ended() -> bool:
        results.append(worker.take_results())
        return bool(results[-1][0])

    until(has_ended, within_s=_WAIT_S)
    return bool(results[-1][1])


@contextmanager
def _logged() -> Iterator[list[str]]:
    """The failures of requests that a worker logs meanwhile."""
    messages: list[str] = []
    handler = logging.Handler(logging.ERROR)
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("pd_connector.worker.worker")
    logger.addHandler(handler)
    try:
        yield messages
    finally:
        logger.removeHandler(handler)
