"""What hot paths take that have no benchmark of their own: ``python -m benchmarks.micro [CASE ...]``.

On the threads that vLLM waits for, each with a target:

- ``announcing``: a step of P with 16 prompts that are followed by name, beside 16 that are not. Blocks are those of
  vLLM's own manager; the control server is the real one, and nobody asks it.
- ``expiring``: P's look for expired leases among 10,000, of which some are found.
- ``renewing``: D's calls for a request that waits, while its renewal thread keeps 10,000 others; beside them, the
  processor time of one renewal of all, of which there are three in a lease's time to live.
- ``asking``: D's answer about a prompt of 120,000 tokens that host memory holds; vLLM asks again in every step.
- ``finding``: a prefix of 1,024 blocks that another engine holds, from the question to its blocks here, over the real
  control channel. Nothing is transferred.

Of two servers that are started for it, ``answering``: how long an idle engine, which sleeps, takes to answer a question
for a prefix that it holds.

Off these threads, as shares of memcpy's rate for the same bytes, in turns: ``reshaping``, the last step of a staged
pull (tokens and heads change places, or the heads of two ranks are put together), and ``copying``, a batch of blocks
of 32 KiB at random places, as host memory stores and loads them.

Times are by the wall clock, so that the longest includes what the machine did to this process.
"""

import argparse
import ctypes
import gc
import statistics
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from msgspec import structs
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256, sha256_cbor
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.request import Request

from benchmarks import pair
from benchmarks.fleet.control import HOST, lease_id, serving
from examples.quickstart.servers import free_ports
from layout.copies import Copies
from layout.geometry import CacheGroup, ModelIdentity, WorkerGeometry
from pd_connector.orders import RankEnds, Report, StoreEnds
from pd_connector.params import RemotePrefill
from pd_connector.scheduler.compute_rate import ComputeRate
from pd_connector.scheduler.decode.canaries import Canaries
from pd_connector.scheduler.decode.peer_prefixes import PeerPrefixes
from pd_connector.scheduler.decode.renewals import Renewals
from pd_connector.scheduler.host.tier import HostTier
from pd_connector.scheduler.prefill.announcer import Announcer
from pd_connector.scheduler.prefill.lease_service import LeaseService
from pd_connector.scheduler.prefill.leases import LeaseTable
from pd_connector.scheduler.prefill.prefix_service import PrefixService
from pd_connector.vllm.block_hashes import BlockHashes
from pd_connector.vllm.block_pools import HostBlockPool, Leased
from pd_connector.vllm.cache_specs import Retention
from pd_connector.vllm.device_blocks import DeviceBlocks, HeldBlocks
from transfer.control.client import ControlClient
from transfer.control.messages import Cancel, Find
from transfer.control.server import ControlServer
from transfer.copies.batch.backends import Backend, open_copier, pinned_memory
from transfer.copies.batch.base import Direction
from transfer.copies.reshape.reshape import run_copies, warm_up
from transfer.peers import Address

BLOCK_TOKENS = 16
NAMED, CHUNK_TOKENS, STEPS = 16, 512, 16  # prompts, and the chunks of each
LEASES, TTL_S = 10_000, 3.0
ASKED_TOKENS = 120_000
FOUND_BLOCKS = 1024
IDLE_S = 0.1  # before a question
WORKER = WorkerGeometry(0, 1, 0, 1, "", (CacheGroup(BLOCK_TOKENS, 0, ()),), ())
HEADS, HEAD_BYTES, LOCAL_BLOCK_TOKENS = 8, 256, 32
COPIED_BYTES, COPIED_BLOCK = 256 << 20, 32 << 10
Figures = dict[str, Any]


def timed(action: Callable[[], object]) -> float:
    """Return the seconds of one call."""
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


def times(name: str, seconds: Sequence[float], target_ms: float) -> Figures:
    """Print and return median and longest, in milliseconds."""
    median, longest = 1e3 * statistics.median(seconds), 1e3 * max(seconds)
    verdict = "reached" if median < target_ms else "MISSED"
    print(f"  {name:42} {median:8.4f} ms, longest {longest:7.3f} ms   target {target_ms:g} ms: {verdict}")
    return {"median_ms": median, "longest_ms": longest}


def shares(ways: Mapping[str, Callable[[], object]], rounds: int, target: float) -> Figures:
    """Print and return how fast each way is beside the first; all take turns, and the first two rounds do not count."""
    spent = [[timed(way) for way in ways.values()] for _ in range(rounds + 2)][2:]
    reference, *medians = (statistics.median(each) for each in zip(*spent, strict=True))
    found = dict(zip(list(ways)[1:], (reference / median for median in medians), strict=True))
    for name, share in found.items():
        verdict = "reached" if share >= target else "MISSED"
        print(f"  {name:42} {share:8.0%} of memcpy's rate   target {target:.0%}: {verdict}")
    return found


@contextmanager
def _as_in_vllm() -> Iterator[None]:
    """Keep the garbage collector from what imports have left, as vLLM's engine does once it has started."""
    init_none_hash(sha256_cbor)
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def _manager(tokens: int, blocks: int, in_flight: int) -> KVCacheManager:
    spec = FullAttentionSpec(block_size=BLOCK_TOKENS, num_kv_heads=1, head_size=128, dtype=torch.bfloat16)
    return KVCacheManager(
        KVCacheConfig(blocks, [], [KVCacheGroupSpec(["layers.0"], spec)]), max_model_len=tokens + 64,
        scheduler_block_size=BLOCK_TOKENS, hash_block_size=BLOCK_TOKENS, max_in_flight_tokens=in_flight,
    )  # fmt: skip


def _request(name: str, tokens: Sequence[int], params: Mapping[str, object] | None = None) -> Request:
    sampling = SamplingParams(max_tokens=1, extra_args={"kv_transfer_params": params} if params else None)
    return Request(name, list(tokens), sampling, None, block_hasher=get_request_block_hasher(BLOCK_TOKENS, sha256_cbor))


def _served() -> tuple[LeaseService[Leased], ControlServer]:
    leases: LeaseTable[Leased] = LeaseTable(30.0, time.monotonic)
    service = LeaseService(leases, ModelIdentity("none", "none", "", 1, 1, 128, "none", "none"), 1)
    service.set_workers((WORKER,))
    server = ControlServer(service, HOST, 0)
    server.start()
    service.notify = server.changed
    return service, server


class _Prefill:
    """A prefill engine's blocks and requests, without a model: ``step`` computes a chunk of each."""

    def __init__(self) -> None:
        tokens = STEPS * CHUNK_TOKENS
        self._manager = _manager(tokens, 2 * NAMED * tokens // BLOCK_TOKENS + 16, 2 * NAMED * CHUNK_TOKENS)
        device = DeviceBlocks()
        device.bind(self._manager)
        service, self._server = _served()
        self._announcer = Announcer(service, device, Counter())
        self._requests: list[Request] = []

    def run(self, turn: int, named: int) -> list[float]:
        """Return the seconds of each step of prompts of which so many have names, and that no other has."""
        for number in range(NAMED + named):
            params = {"do_remote_decode": True} | ({"transfer_id": f"{turn}-{number}"} if number < named else {})
            tokens = [turn * 2 * NAMED + number, *range(1, STEPS * CHUNK_TOKENS)]
            request = _request(f"{turn}-{number}", tokens, params)
            self._announcer.add(request)
            self._requests.append(request)
        gc.collect()
        gc.disable()  # whatever allocates may set it off, and it then looks at all tokens of all requests
        seconds = [self._step() for _ in range(STEPS)]
        gc.enable()
        for request in self._requests:
            request.status = SimpleNamespace(name="FINISHED_ABORTED")
            self._announcer.finish(request, is_granted=False)
            self._manager.free(request)
        self._requests.clear()
        return seconds

    def _step(self) -> float:
        for request in self._requests:
            assert self._manager.allocate_slots(request, CHUNK_TOKENS) is not None, "blocks are short"
        scheduled = {request.request_id: CHUNK_TOKENS for request in self._requests}
        start = time.perf_counter()
        reported = self._announcer.schedule(scheduled)
        noted_s = time.perf_counter() - start
        for request in self._requests:
            request.num_computed_tokens += CHUNK_TOKENS
        return noted_s + timed(lambda: self._announcer.computed(dict.fromkeys(reported, 1), 1))

    def close(self) -> None:
        """Stop the control server."""
        self._server.close()


def announcing(rounds: int) -> Figures:
    """A step of P, to note what it computes and to announce what it has computed."""
    engine = _Prefill()
    taken: dict[int, list[float]] = {0: [], NAMED: []}
    with _as_in_vllm():
        for turn in range(2 * (rounds + 1)):
            named = NAMED * (turn % 2)
            seconds = engine.run(turn, named)
            taken[named] += seconds if turn > 1 else []
    engine.close()
    each_us = 1e6 * (statistics.median(taken[NAMED]) - statistics.median(taken[0])) / NAMED
    found = times(f"a step with {NAMED} prompts followed by name", taken[NAMED], 0.8)
    return found | {"each_us": each_us}


def expiring(rounds: int) -> Figures:
    """P's look for expired leases, a step of 20 ms after the other."""
    now = 0.0
    table: LeaseTable[None] = LeaseTable(30.0, lambda: now)
    for number in range(LEASES):
        now = number * 30.0 / LEASES
        table.grant(lease_id(number), None, "contents")
    seconds = []
    for step in range(10 * rounds):
        now = 30.0 + step * 0.02
        seconds.append(timed(table.collect))
    return times(f"expired ones among {LEASES:,} leases", seconds, 1.0)


def renewing(rounds: int) -> Figures:
    """D's calls for a request that waits, and the processor time of the renewal of all the others."""
    seconds: list[float] = []
    with serving(LEASES) as (_, port, engine_id), _as_in_vllm():
        remote = RemotePrefill(engine_id, HOST, port, ((1,),), 1, "lease", TTL_S, "")
        renewals = Renewals(ControlClient(), 10.0, 600.0)
        renewals.start()
        for number in range(LEASES):
            renewals.keep(str(number), structs.replace(remote, lease_id=lease_id(number)))

        def call() -> None:
            renewals.keep("new", structs.replace(remote, lease_id="new"))
            renewals.lost("0")
            renewals.drop("new")

        busy, start = time.process_time(), time.monotonic()
        for _ in range(max(1, rounds // 5) * round(TTL_S / 0.02)):
            time.sleep(0.02)  # a step
            seconds.append(timed(call))
        used_s, renewed = time.process_time() - busy, (time.monotonic() - start) / (TTL_S / 3)
        assert all(renewals.lost(str(number)) is None for number in range(LEASES)), "a lease was lost"
        renewals.close()
    found = times(f"calls beside {LEASES:,} leases that are kept", seconds, 1.0)
    print(f"  {'processor time of a renewal of all':42} {1e3 * used_s / renewed:8.2f} ms")
    return found | {"renewal_ms": 1e3 * used_s / renewed}


def asking(rounds: int) -> Figures:
    """D's answers about a prompt that host memory holds, but for the first one."""
    blocks = ASKED_TOKENS // BLOCK_TOKENS + 16
    manager = _manager(ASKED_TOKENS, blocks, ASKED_TOKENS + 64)
    config: Any = SimpleNamespace(max_in_flight_tokens=ASKED_TOKENS + 64, num_prefill_lookahead_tokens=0)
    tier = HostTier(HostBlockPool(config, manager, blocks), 1)
    with _as_in_vllm():
        first, second = (_request(name, range(ASKED_TOKENS)) for name in ("first", "second"))
        tier.add(first)
        tier.allocated(first, manager.allocate_slots(first, ASKED_TOKENS), 0)
        for _ in range(2):
            for order in tier.step_orders({"first": ASKED_TOKENS}).stores:
                tier.settled(set(), set(), Report(stores={order.store_id: StoreEnds(1)}))
            first.num_computed_tokens = ASKED_TOKENS
        tier.finish(first, ())
        manager.free(first)
        manager.reset_prefix_cache()
        tier.add(second)
        found = tier.missing_tokens(second, 0)
        assert found > ASKED_TOKENS - 2 * BLOCK_TOKENS, f"only {found} tokens were found"
        seconds = [timed(lambda: tier.missing_tokens(second, 0)) for _ in range(10 * rounds)]
    return times(f"answers about {ASKED_TOKENS:,} tokens", seconds, 0.1)


class _Holder:
    """An engine that holds a prompt, and lends it as a prefill engine does."""

    def __init__(self, tokens: int, hashes: BlockHashes) -> None:
        manager = _manager(tokens, 2 * tokens // BLOCK_TOKENS, tokens + 64)
        request = _request("held", range(tokens))
        assert manager.allocate_slots(request, tokens) is not None, "blocks are short"
        manager.free(request)
        self._blocks = DeviceBlocks()
        self._blocks.bind(manager)
        self._service, self._server = _served()
        announcer = Announcer(self._service, self._blocks, Counter())
        self._prefixes = self._service.prefixes = PrefixService(
            self._blocks, hashes, (Retention(BLOCK_TOKENS),), announcer.being_written, self._lend, lambda: None,
            self._server.changed, Counter(), wants_blocks=lambda: False,
        )  # fmt: skip

    @property
    def address(self) -> Address:
        """Of the control channel."""
        return Address(HOST, self._server.port)

    def answer(self) -> float:
        """Return the seconds that the answer to the question under way takes."""
        _wait_until(lambda: self._prefixes.is_asked)
        return timed(lambda: self._prefixes.serve(self._service.engine_id))

    def take_back(self) -> None:
        """End all leases."""
        self._service.leases.cancel_all()
        for held in self._service.leases.collect():
            self._blocks.release(held.blocks)

    def close(self) -> None:
        """Stop the control server."""
        self._server.close()

    def _lend(self, held: HeldBlocks, block_ids: tuple[tuple[int, ...], ...], tokens: int) -> RemotePrefill:
        self._blocks.keep(held)
        return self._service.lend(Leased(held), block_ids, tokens, (HOST, self._server.port), is_written=True)


def _wait_until(condition: Callable[[], bool]) -> None:
    ends_at = time.monotonic() + 10.0
    while not condition():
        assert time.monotonic() < ends_at, "there is no answer"
        time.sleep(1e-4)


def _hashes(algorithm: str) -> BlockHashes:
    config: Any = SimpleNamespace(cache_config=SimpleNamespace(prefix_caching_hash_algo=algorithm))
    return BlockHashes(config)


def finding(rounds: int) -> Figures:
    """The scheduler's calls of the engine that holds a prefix, and of the one that asks for it and has it pulled."""
    tokens, groups, blocks = FOUND_BLOCKS * BLOCK_TOKENS, (Retention(BLOCK_TOKENS),), DeviceBlocks()
    client = ControlClient()
    seconds: list[tuple[float, ...]] = []
    with _as_in_vllm():
        manager, hashes = _manager(tokens, 3 * FOUND_BLOCKS, tokens + 64), _hashes("sha256_cbor")
        blocks.bind(manager)
        holder = _Holder(tokens, hashes)
        peers = PeerPrefixes(
            [holder.address], client, Renewals(client, 10.0, 600.0), blocks, groups, hashes,
            Canaries(blocks, groups, tries=False), ComputeRate(),
        )  # fmt: skip
        worker: Any = SimpleNamespace(geometry=WORKER)
        peers.set_workers((worker,))
        for number in range(rounds + 2):
            request = _request(str(number), range(tokens + 1))

            def ask(request: Request = request) -> None:
                assert peers.must_wait(request, 0), "nobody is asked, or nothing is found"

            asked_s, answered_s = timed(ask), holder.answer()
            _wait_until(lambda request=request: not peers.is_waiting(request))  # type: ignore[misc]
            taken_s = timed(ask)
            (pull,) = peers.step_orders({}).prefixes
            report = Report(prefixes={pull.request_id: RankEnds(1)})
            seconds.append((asked_s, answered_s, taken_s, timed(lambda: peers.settled(set(), set(), report))))  # noqa: B023
            found = len(blocks.longest_prefix(request.block_hashes)[0][0])
            assert found == FOUND_BLOCKS, f"only {found} blocks were found"
            peers.finish(request, ())
            manager.reset_prefix_cache()
            holder.take_back()
        peers.close()
        holder.close()
    names = ("to ask", "to answer", "to take the answer", "to let it be found")
    return {
        name: times(f"{FOUND_BLOCKS:,} blocks, {name}", each, 1.0)
        for name, each in zip(names, zip(*seconds[2:], strict=True), strict=True)
    }


def answering(rounds: int) -> Figures:
    """An idle engine's answers over its control channel, as whoever asks waits for them."""
    (port,) = free_ports(1, HOST)
    serves = pair.Side(options={"serve_prefixes": True, "port": port})
    prompt, client, seconds = pair.a_prompt(pair.LONGEST // 2), ControlClient(), []
    init_none_hash(sha256)  # vLLM's default
    hasher = get_request_block_hasher(pair.BLOCK_TOKENS, sha256)
    hashes = Request("asked", prompt, SamplingParams(max_tokens=1), None, block_hasher=hasher).block_hashes
    find = Find("", "", _hashes("sha256").hashing, pair.BLOCK_TOKENS, tuple(map(bytes, hashes)))
    with pair.running(pair.Side(), serves) as (servers,):
        servers.complete(servers.decode, prompt, 1, None)
        for _ in range(2 * rounds):
            time.sleep(IDLE_S)
            question = structs.replace(find, find_id=uuid.uuid4().hex)
            start = time.perf_counter()
            found = client.request(HOST, port, question, 10.0).result()
            seconds.append(time.perf_counter() - start)
            assert found.tokens == len(prompt), f"{found.tokens} tokens were found: {found.reason}"
            client.request(HOST, port, Cancel(found.engine_id, (found.lease_id,)), 10.0).result()
    client.close()
    return times(f"an idle engine's answer about {len(hashes)} blocks", seconds, 5.0)


def _transpose(tokens: int) -> list[Copies]:
    """Head runs of NHD blocks in the order of the source, to HND blocks."""
    runs = np.arange(tokens * HEADS, dtype=np.int64)
    token, head = np.divmod(runs, HEADS)
    block, token = np.divmod(token, LOCAL_BLOCK_TOKENS)
    to = ((block * HEADS + head) * LOCAL_BLOCK_TOKENS + token) * HEAD_BYTES
    return [Copies(to, runs * HEAD_BYTES, np.full(len(runs), HEAD_BYTES, np.int64))]


def _merge(tokens: int, ranks: int = 2) -> list[Copies]:
    """One batch a rank: its share of the heads of every token, to the cache that has them all."""
    run = HEADS // ranks * HEAD_BYTES
    token = np.arange(tokens, dtype=np.int64)
    return [
        Copies((token * ranks + rank) * run, (rank * tokens + token) * run, np.full(tokens, run, np.int64))
        for rank in range(ranks)
    ]


def _page_aligned(size: int) -> Any:
    """Return memory as KV caches and staging buffers have it, written once so that its pages exist."""
    memory = np.ones(size + 4096, np.uint8)
    start = -memory.ctypes.data % 4096
    return memory[start : start + size]


def reshaping(rounds: int) -> Figures:
    """Local copies of 4 MiB, which the processor's caches hold, and of 64 MiB."""
    warm_up()
    found: Figures = {}
    for megabytes in (4, 64):
        tokens = (megabytes << 20) // (HEADS * HEAD_BYTES)
        source, target = (_page_aligned(megabytes << 20) for _ in range(2))
        here, there = target.ctypes.data, source.ctypes.data

        def placed(parts: list[Copies], to: int = here, at: int = there) -> Callable[[], None]:
            batches = [Copies(part.destinations + to, part.sources + at, part.sizes) for part in parts]

            def run() -> None:
                for batch in batches:
                    run_copies(batch)

            return run

        ways: dict[str, Callable[[], object]] = {
            "memcpy": lambda to=here, at=there, size=source.nbytes: ctypes.memmove(to, at, size),  # type: ignore[misc]
            f"NHD to HND, {megabytes} MiB": placed(_transpose(tokens)),
            f"heads of two ranks together, {megabytes} MiB": placed(_merge(tokens)),
        }
        found |= shares(ways, rounds, 0.6)
    return found


def copying(rounds: int) -> Figures:
    """A batch of blocks at random places, from ``submit`` to the end of its handle."""
    target, source = (pinned_memory(Backend.HOST, COPIED_BYTES) for _ in range(2))
    for value, memory in enumerate((target, source)):
        ctypes.memset(memory.region.address, value, COPIED_BYTES)
    count, random = COPIED_BYTES // COPIED_BLOCK, np.random.default_rng(0)
    to, at = (random.permutation(count) * COPIED_BLOCK for _ in range(2))
    copies = Copies(target.region.address + to, source.region.address + at, np.full(count, COPIED_BLOCK, np.int64))
    with open_copier(Backend.HOST, Direction.DEVICE_TO_HOST) as copier:
        found = shares(
            {
                "memcpy": lambda: ctypes.memmove(target.region.address, source.region.address, COPIED_BYTES),
                "a batch of blocks of 32 KiB": lambda: copier.submit(copies).wait(),
            },
            rounds, 0.85,
        )  # fmt: skip
    target.close()
    source.close()
    return found


CASES: tuple[Callable[[int], Figures], ...] = (
    announcing, expiring, renewing, asking, finding, answering, reshaping, copying,
)  # fmt: skip


def main(words: Sequence[str] | None = None) -> Figures:
    """Run all cases, or those that are named; print, and return the figures by case."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    cases = {case.__name__: case for case in CASES}
    parser.add_argument("cases", nargs="*", metavar="CASE", help=f"of {', '.join(cases)}; all if none")
    parser.add_argument("--rounds", type=int, default=25)
    arguments = parser.parse_args(words)
    if unknown := [name for name in arguments.cases if name not in cases]:
        parser.error(f"there is no case {unknown[0]!r}; there are {', '.join(cases)}")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as all copies here
    figures = {}
    for name in arguments.cases or cases:
        print(name)
        figures[name] = cases[name](arguments.rounds)
    torch.set_num_threads(threads)
    return figures


if __name__ == "__main__":
    main()
