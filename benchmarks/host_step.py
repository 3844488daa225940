"""What the host tier adds to a step, on the threads that vLLM waits for: ``python -m benchmarks.host_step``.

Scheduler's thread: a step of vLLM's own KV cache manager and requests, without a model. Timed is what the connector's
scheduler half does for the tier in every step: to choose what is stored and make the order, and to take in what the
workers have reported (here: the store of the step before). Host memory is full, so that every store evicts a block, as
it is after a while. Beside it stands what vLLM's manager takes in the same steps to allocate and hash blocks, a part of
what vLLM's scheduler does. The same is timed of leases that move there, none of whose blocks host memory holds, begun
and ended a share a step; and of prompts that are pulled there, none of which it holds.

Model's thread: a store as the worker half starts it, descriptors and hand-over, while the copier's thread is busy with
earlier stores; and the look at what has ended.

Timed is the wall clock, one step a sample, so the worst sample includes what the machine did to this process; or,
with ``--clock thread``, the processor time of the calling thread, which other processes on the machine disturb less.
"""

import argparse
import ctypes
import gc
import itertools
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.request import Request

from layout.geometry import CacheGroup, Plane, Region, WorkerGeometry
from layout.host_blocks import host_layout
from pd_connector.orders import BlockMoves, RankEnds, Report, StoreEnds, StoreOrder
from pd_connector.scheduler.block_demand import BlockDemand
from pd_connector.scheduler.decode.landings import Landings
from pd_connector.scheduler.host.tier import HostTier, StoreMode
from pd_connector.scheduler.prefill.checksum_table import ChecksumTable
from pd_connector.scheduler.prefill.lease_moves import LeaseMoves
from pd_connector.scheduler.prefill.leases import LeaseTable
from pd_connector.vllm.block_pools import HostBlockPool, Leased
from pd_connector.vllm.cache_specs import Retention
from pd_connector.vllm.device_blocks import DeviceBlocks
from pd_connector.vllm.engine_config import max_blocks_per_step
from pd_connector.worker.host.device_copies import HostCopies
from transfer.copies.batch.backends import Backend, open_copier, pinned_memory
from transfer.copies.batch.base import Direction

BLOCK_TOKENS, STEP_TOKENS, MAX_REQUESTS = 16, 8192, 256
BLOCKS, SLOTS = 24_576, 16_384  # of the device and of host memory
MODEL_TOKENS = 8192  # its longest prompt and answer, as far as lazy stores look ahead
PROMPT_TOKENS = 1024  # of the requests that decode
PREFILL_TOKENS = 8 * STEP_TOKENS  # a prompt of 512 blocks a step
RUNNING = (1, 8, 32, 64, 128, 256)
DECODE_MS, HAND_OVER_MS, DESCRIPTORS = 0.3, 1.0, 10_240
MODES: tuple[StoreMode, ...] = ("eager", "lazy")
MOVED_BLOCKS = (256, 8192)  # of a lease that moves, and of a prompt that lands
Clock = Callable[[], float]  # seconds

LAYERS, RUN_BYTES = 32, 8 << 10  # a layer's block of 16 tokens, one KV head of 128, K and V in bfloat16


@dataclass
class Samples:
    """Milliseconds of each measured step, by part, and the blocks that it stored."""

    allocate: list[float] = field(default_factory=list)  # vLLM's own
    choose: list[float] = field(default_factory=list)
    settle: list[float] = field(default_factory=list)
    blocks: list[int] = field(default_factory=list)

    @property
    def together(self) -> list[float]:
        return [sum(parts) for parts in zip(self.choose, self.settle, strict=True)]


class Engine:
    """vLLM's scheduler as far as blocks are concerned, with a host tier; one worker that stores within a step."""

    def __init__(self, mode: StoreMode, clock: Clock) -> None:
        self._clock = clock
        spec = FullAttentionSpec(block_size=BLOCK_TOKENS, num_kv_heads=1, head_size=128, dtype=torch.bfloat16)
        groups = [KVCacheGroupSpec(["layers.0"], spec)]
        self.manager = KVCacheManager(
            KVCacheConfig(BLOCKS, [], groups), 2 * PREFILL_TOKENS, BLOCK_TOKENS, BLOCK_TOKENS, STEP_TOKENS
        )
        config: Any = SimpleNamespace(
            max_in_flight_tokens=STEP_TOKENS,
            num_prefill_lookahead_tokens=0,
            scheduler_config=SimpleNamespace(max_num_batched_tokens=STEP_TOKENS, max_num_seqs=MAX_REQUESTS),
            model_config=SimpleNamespace(max_model_len=MODEL_TOKENS),
        )
        lookahead = max_blocks_per_step(config, [BLOCK_TOKENS]) if mode == "lazy" else 0
        self._pool = HostBlockPool(config, self.manager, SLOTS, lookahead)
        self.blocks = DeviceBlocks()
        self.blocks.bind(self.manager)
        self.tier = HostTier(self._pool, 1, mode)
        self.samples = Samples()
        self._hasher = get_request_block_hasher(BLOCK_TOKENS, sha256)
        self._numbers = itertools.count()
        self._random = np.random.default_rng(5)
        self._ended: dict[int, StoreEnds] = {}

    def new_request(self, tokens: int) -> Request:
        """A request whose prompt no other has, and of which the tier does not know yet."""
        prompt = self._random.integers(0, 32_000, tokens).tolist()
        sampling = SamplingParams(max_tokens=PREFILL_TOKENS)
        return Request(f"r{next(self._numbers)}", prompt, sampling, None, block_hasher=self._hasher)

    def add_request(self, tokens: int) -> Request:
        """A new request whose blocks are stored."""
        request = self.new_request(tokens)
        self.tier.add(request)
        return request

    def finish(self, request: Request) -> None:
        self.tier.finish(request, ())
        self.manager.free(request)

    def step(self, scheduled: Sequence[tuple[Request, int]]) -> None:
        """One step over some tokens of each request."""
        asked = self._clock()
        granted = [self.manager.allocate_slots(request, tokens) for request, tokens in scheduled]
        allocated = self._clock()
        assert None not in granted, f"the device's {BLOCKS} blocks are too few for this benchmark"
        counts = {request.request_id: tokens for request, tokens in scheduled}
        begun = self._clock()
        stores = self.tier.step_orders(counts).stores
        chosen = self._clock()
        self.tier.settled(set(), set(), Report(self._ended))
        settled = self._clock()
        self.samples.allocate.append(1e3 * (allocated - asked))
        self.samples.choose.append(1e3 * (chosen - begun))
        self.samples.settle.append(1e3 * (settled - chosen))
        self.samples.blocks.append(sum(len(store.moves) for store in stores))
        self._ended = {store.store_id: StoreEnds(1) for store in stores}
        for request, tokens in scheduled:
            request.num_computed_tokens += tokens
            if request.num_computed_tokens >= request.num_tokens:
                request.append_output_token_ids(7)

    def settle(self) -> None:
        """Steps without tokens until nothing is stored any more."""
        while self.tier.wants_step:
            self.step([])

    def prefill(self, request: Request) -> None:
        """All steps of a prompt."""
        while (left := request.num_tokens - request.num_computed_tokens) > 1:
            self.step([(request, min(left, STEP_TOKENS))])

    def fill_memory(self) -> None:
        """Prompts that come and go until the device and host memory have held other blocks in all of theirs."""
        for _ in range((BLOCKS + SLOTS) * BLOCK_TOKENS // PREFILL_TOKENS + 1):
            request = self.add_request(PREFILL_TOKENS)
            self.prefill(request)
            self.finish(request)
        assert self._pool.cached > SLOTS // 2, "host memory should be full by now"


def decode_steps(clock: Clock, mode: StoreMode, running: int, steps: int, *, in_phase: bool = False) -> Samples:
    """Steps of so many requests that all decode. ``in_phase``: their blocks are all full in the same steps."""
    engine = Engine(mode, clock)
    engine.fill_memory()
    requests = [engine.add_request(PROMPT_TOKENS + (0 if in_phase else n % BLOCK_TOKENS)) for n in range(running)]
    for request in requests:
        engine.prefill(request)
    for warm_up in (True, False):
        engine.samples = Samples()
        for _ in range(2 * BLOCK_TOKENS if warm_up else steps):
            engine.step([(request, 1) for request in requests])
    return engine.samples


def prefill_steps(clock: Clock, mode: StoreMode, steps: int) -> Samples:
    """Steps of 8,192 tokens of prompts, one request after another."""
    engine = Engine(mode, clock)
    engine.fill_memory()
    engine.samples = Samples()
    while len(engine.samples.choose) < steps:
        request = engine.add_request(PREFILL_TOKENS)
        engine.prefill(request)
        engine.finish(request)
    return engine.samples


def leaving(clock: Clock, blocks: int, requests: int = 16) -> tuple[list[float], list[float]]:
    """Milliseconds that the tier takes when a request of so many blocks leaves, all stored; and vLLM's manager."""
    engine = Engine("eager", clock)
    engine.fill_memory()
    tier, vllm = [], []
    for _ in range(requests):
        request = engine.add_request(blocks * BLOCK_TOKENS)
        engine.prefill(request)
        for _ in range(2):  # orders the last store, and reports it
            engine.step([(request, 1)])
        begun = clock()
        engine.tier.finish(request, ())
        left = clock()
        engine.manager.free(request)
        tier.append(1e3 * (left - begun))
        vllm.append(1e3 * (clock() - left))
    return tier, vllm


def moving(clock: Clock, blocks: int, rounds: int = 16) -> tuple[list[float], list[float]]:
    """Milliseconds of every step that begins the move of a lease of so many blocks, and of every one that ends one."""
    engine = Engine("eager", clock)
    engine.fill_memory()
    seconds = itertools.count()
    table: LeaseTable[Leased] = LeaseTable(1e9, lambda: float(next(seconds)))  # no lease is too young to move
    checksums = ChecksumTable(table.still_valid, enabled=False)
    moves = LeaseMoves(table, checksums, engine.blocks, lambda: False, 0.0)
    moves.use(engine.tier, 1)
    order, end = [], []
    for number in range(rounds):
        request = engine.new_request(blocks * BLOCK_TOKENS - 1)
        assert engine.manager.allocate_slots(request, request.num_tokens) is not None, "the device is full"
        held = engine.blocks.hold(request.request_id)
        engine.manager.free(request)
        table.grant(request.request_id, Leased(held), "", (tuple(block.block_id for block in held),))
        begun = clock()
        (store,) = moves.step_orders({}).stores
        order.append(1e3 * (clock() - begun))
        assert len(store.moves) == blocks
        begun = clock()
        moves.settled(set(), set(), Report({store.store_id: StoreEnds(1)}))
        end.append(1e3 * (clock() - begun))
        assert table.in_host_memory == 1, f"the lease of round {number} stays"
        table.cancel_all()
        for each in table.collect():
            assert not each.blocks, f"the lease of round {number} has not moved"
            engine.tier.loans.take_back(each.hosts)
    return order, end


def landing(clock: Clock, blocks: int, prompts: int = 16) -> tuple[list[float], ...]:
    """Milliseconds of every step that begins a landing of a prompt, publishes it, and gives its slots back."""
    engine = Engine("eager", clock)
    engine.fill_memory()
    engine.settle()
    consumer: Any = SimpleNamespace(
        may_land=lambda request: True,
        start_landing=lambda request, block_ids, wanted: None,
        end_landing=lambda request_id, failed: None,
    )
    demand = BlockDemand(engine.blocks, [Retention(BLOCK_TOKENS)])
    landings = Landings("always", engine.tier, consumer, demand, 1)
    begin: list[float] = []
    end: list[float] = []
    leave: list[float] = []

    def timed(samples: list[float], work: Callable[[], object]) -> None:
        begun = clock()
        work()
        samples.append(1e3 * (clock() - begun))

    for _ in range(prompts):
        request = engine.new_request(blocks * BLOCK_TOKENS - 1)
        engine.tier.add(request)
        timed(begin, partial(landings.must_wait, request, 0))
        assert landings.under_way
        landings.step_orders({})
        ended = Report(landings={request.request_id: RankEnds(1)})
        timed(end, partial(landings.settled, set(), set(), ended))
        timed(leave, partial(engine.tier.finish, request, ()))
    return begin, end, leave


def transfers(clock: Clock) -> dict[str, Any]:
    """Print what moves and landings take of a step, and return medians in milliseconds."""
    figures: dict[str, Any] = {"moves": {}, "landings": {}}
    print(
        "\nscheduler's thread, ms of a step with a lease that moves to host memory: to order copies, and to let go of"
    )
    print("the device's blocks, median and worst; and with a prompt that is pulled there: to lend it slots, to publish")
    print("it, and to give its slots back")
    for blocks in MOVED_BLOCKS:
        order, ended = moving(clock, blocks)
        print(f"  a lease of {blocks:5,} blocks    {spread(order)}   {spread(ended)}")
        figures["moves"][str(blocks)] = {"order_ms": statistics.median(order), "end_ms": statistics.median(ended)}
        parts = landing(clock, blocks)
        print(f"  a prompt of {blocks:5,} blocks   {'   '.join(map(spread, parts))}")
        names = ("begin_ms", "publish_ms", "give_back_ms")
        figures["landings"][str(blocks)] = dict(zip(names, map(statistics.median, parts), strict=True))
    return figures


def spread(values: Sequence[float]) -> str:
    """Median and worst."""
    return f"{statistics.median(values):7.3f} {max(values):7.3f}"


def line(name: str, samples: Samples, target_ms: float | None = None) -> str:
    together = samples.together
    median, p99 = statistics.median(together), statistics.quantiles(together, n=100)[-1]
    mean = statistics.mean(together)  # lazy stores look at many blocks in few steps: the median does not show it
    verdict = "" if target_ms is None else "reached" if max(median, mean) < target_ms else "MISSED"
    return (
        f"  {name:30} {statistics.mean(samples.blocks):6.1f} {max(samples.blocks):5}   {spread(samples.choose)}   "
        f"{spread(samples.settle)}   {median:7.3f} {mean:7.3f} {p99:7.3f}   "
        f"{statistics.median(samples.allocate):7.3f}   {verdict}"
    )


def scheduler_side(clock: Clock, steps: int) -> dict[str, Any]:
    """Print both tables, and return medians in milliseconds."""
    together: dict[str, float] = {}
    vllm_ms: dict[str, float] = {}
    left: dict[str, Any] = {}
    init_none_hash(sha256)
    gc.collect()
    gc.freeze()  # what was imported is not looked through again and again: as vLLM's engine core does
    print(f"scheduler's thread, ms a step; {steps} steps, host memory of {SLOTS:,} blocks is full")
    print(f"target for steps that decode: median and mean of less than {DECODE_MS} ms")
    print(f"  {'':30} {'blocks':>12}   {'choose, order':>15}   {'settle':>15}   {'together':>23}   {'vLLM':>7}")
    print(f"  {'':30} {'mean':>6} {'most':>5}" + 2 * f"   {'median':>7} {'worst':>7}"
          + f"   {'median':>7} {'mean':>7} {'p99':>7}   {'median':>7}")  # fmt: skip
    for mode in MODES:
        for running in RUNNING:
            samples = decode_steps(clock, mode, running, steps)
            print(line(f"{mode}, {running} decode", samples, DECODE_MS))
            keep(samples, f"{mode}, {running}", together, vllm_ms)
        samples = decode_steps(clock, mode, MAX_REQUESTS, steps, in_phase=True)
        print(line(f"{mode}, {MAX_REQUESTS} decode in phase", samples, DECODE_MS))
        samples = prefill_steps(clock, mode, steps)
        print(line(f"{mode}, {STEP_TOKENS:,} tokens of a prompt", samples))
        keep(samples, f"{mode}, prompt", together, vllm_ms)
    print("\nscheduler's thread, ms when a request leaves; median and worst, and what vLLM takes to free its blocks")
    for blocks in (64, 512, 4096):
        tier, vllm = leaving(clock, blocks)
        print(f"  eager, {blocks:5,} blocks   {spread(tier)}   {spread(vllm)}")
        left[str(blocks)] = {"tier_ms": statistics.median(tier), "vllm_ms": statistics.median(vllm)}
    moved = transfers(clock)
    gc.unfreeze()
    return {"step_ms": together, "vllm_step_ms": vllm_ms, "leaving": left, **moved}


def keep(samples: Samples, name: str, together: dict[str, float], vllm_ms: dict[str, float]) -> None:
    """Add a row's medians to the figures."""
    together[name], vllm_ms[name] = statistics.median(samples.together), statistics.median(samples.allocate)


@dataclass(frozen=True)
class Case:
    """One line of the table of stores."""

    layers: int  # that lie apart, so that a block has a run for each; 1: all layers of a block lie together
    blocks: int

    @property
    def descriptors(self) -> int:
        return self.layers * self.blocks


CASES = (
    *(Case(LAYERS, blocks) for blocks in (1, 16, DESCRIPTORS // LAYERS)),
    *(Case(1, blocks) for blocks in (1, 16, STEP_TOKENS // BLOCK_TOKENS, DESCRIPTORS)),
)


def worker_geometry(memory: Region, layers: int) -> WorkerGeometry:
    """A rank's cache, layer after layer; with one layer it stands for one of which all layers lie together."""
    blocks = memory.size // (layers * RUN_BYTES)
    item, content = 2, 256
    plane = Plane(
        part="kv", layers=tuple(f"layers.{n}" for n in range(layers)), head_start=0, heads=1,
        block_tokens=BLOCK_TOKENS, content=content, item_size=item, blocks=blocks, address=memory.address,
        layer_stride=blocks * RUN_BYTES, block_stride=RUN_BYTES, head_stride=RUN_BYTES,
        token_stride=content * item, content_stride=item, packing="",
    )  # fmt: skip
    return WorkerGeometry(0, 1, 0, 1, "", (CacheGroup(BLOCK_TOKENS, 0, (plane,)),), (memory,))


class Worker:
    """A rank's stores: real memory, the host backend, and a copier's thread that has work for a while."""

    def __init__(self, device: Region, host: Region, layers: int, clock: Clock) -> None:
        self._clock = clock
        layout = host_layout(worker_geometry(device, layers))
        stores, loads = (open_copier(Backend.HOST, way) for way in (Direction.DEVICE_TO_HOST, Direction.HOST_TO_DEVICE))
        self._copies = HostCopies(layout, host, stores, loads, lambda: None)
        self._blocks = layout.groups[0].blocks
        self._random = np.random.default_rng(3)
        self._numbers = itertools.count()

    def order(self, blocks: int) -> StoreOrder:
        """A store of blocks at random places into slots at random places."""
        places = (self._random.permutation(self._blocks)[:blocks] for _ in range(2))
        return StoreOrder(next(self._numbers), BlockMoves(np.zeros(blocks, np.int64), *places))

    def measure(self, blocks: int) -> tuple[float, float, bool]:
        """Milliseconds of a store and of the look at what has ended; whether the copier was busy all the while."""
        for _ in range(2):
            self._copies.store(self.order(self._blocks))
        order = self.order(blocks)
        begun = self._clock()
        self._copies.store(order)
        handed_over = self._clock()
        ended = len(self._copies.take_stores())
        looked = self._clock()
        pending = 3 - ended
        while pending:
            time.sleep(1e-3)
            pending -= len(self._copies.take_stores())
        return 1e3 * (handed_over - begun), 1e3 * (looked - handed_over), ended < 2

    def close(self) -> None:
        self._copies.close()


def worker_side(clock: Clock, rounds: int) -> dict[str, float]:
    """Print the table, and return the medians of stores in milliseconds, by layers apart and blocks."""
    figures = {}
    print(f"\nmodel's thread, ms a store; median and worst of {rounds}, while the copier's thread is busy")
    print(f"blocks at random places; target for {DESCRIPTORS:,} descriptors: a median of less than {HAND_OVER_MS} ms")
    print(f"  {'runs a block':>12} {'blocks':>6} {'descriptors':>11}   {'store':>15}   {'look':>15}   busy")
    device, host = (pinned_memory(Backend.HOST, 2 * DESCRIPTORS * RUN_BYTES) for _ in range(2))
    for memory in (device, host):
        ctypes.memset(memory.region.address, 1, memory.region.size)
    for case in CASES:
        worker = Worker(device.region, host.region, case.layers, clock)
        store, look, busy = zip(*[worker.measure(case.blocks) for _ in range(rounds + 1)][1:], strict=True)
        worker.close()
        figures[f"{case.layers}x{case.blocks}"] = statistics.median(store)
        verdict = "reached" if statistics.median(store) < HAND_OVER_MS else "MISSED"
        print(
            f"  {case.layers:12} {case.blocks:6,} {case.descriptors:11,}   {spread(store)}   {spread(look)}   "
            f"{sum(busy)}/{rounds}   {verdict if case.descriptors == DESCRIPTORS else ''}"
        )
    device.close()
    host.close()
    return figures


def main(words: Sequence[str] | None = None) -> dict[str, Any]:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--clock", choices=("wall", "thread"), default="wall")
    arguments = parser.parse_args(words)
    clock = time.thread_time if arguments.clock == "thread" else time.perf_counter
    return {"scheduler": scheduler_side(clock, arguments.steps), "store_ms": worker_side(clock, arguments.rounds)}


if __name__ == "__main__":
    main()
