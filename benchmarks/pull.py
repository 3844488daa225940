"""How fast a pull is, against one contiguous read of the same bytes: ``python -m benchmarks.pull``.

A prefill engine's worker (its memory, transfer engine and control endpoint, without a model) runs in a process of
its own; this process pulls 1,500 tokens of a SmolLM2-135M cache in BHLNC from it, through everything that a decode
worker uses. In one run, in turn: the pull as a whole, its read alone, one contiguous read through our engine, and
one contiguous blocking read through Mooncake's own call. Medians over the rounds.

With ``--verify``, pulls take turns with verified ones (setting ``verify``): the prefill process sums the blocks when it
has granted the lease, this one compares. The cache is then described as CPUs without AMX keep it, K transposed beside
V; else as those with AMX do, packed.
"""

import argparse
import os
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from multiprocessing.connection import Connection
from typing import Any, cast

import msgspec
import numpy as np
import numpy.typing as npt

from benchmarks.apart import start_apart
from layout.copies import Copies
from layout.cost import CostModel
from layout.geometry import CacheGroup, ModelIdentity, Plane, Region, WorkerGeometry
from pd_connector.orders import ChecksumReport, Orders, PullOrder
from pd_connector.params import RemotePrefill
from pd_connector.scheduler.prefill.lease_service import LeaseService
from pd_connector.scheduler.prefill.leases import LeaseTable
from pd_connector.worker.lease_checksums import CacheChecksums
from pd_connector.worker.peer import PullContext
from pd_connector.worker.pull_end import PullEnd
from pd_connector.worker.pulls import Pulls
from pd_connector.worker.remote_reader import RemoteReader
from pd_connector.worker.verification import Verifier
from transfer.control.client import ControlClient
from transfer.control.server import ControlServer
from transfer.engine.mooncake import MooncakeEngine, MooncakeOptions
from transfer.peers import AllowedPeers

LAYERS, HEADS, HEAD_SIZE, ITEM, BLOCK_TOKENS = 30, 3, 64, 2, 32  # SmolLM2-135M in bfloat16
MODEL = ModelIdentity("LlamaForCausalLM", "", "", LAYERS, HEADS, HEAD_SIZE, "bfloat16", "bfloat16")
HOST = "127.0.0.1"
CONTIGUOUS = "one contiguous read, our engine"


def geometry(memory: npt.NDArray[np.uint8], blocks: int, address: str, packed: bool = True) -> WorkerGeometry:
    """One worker's cache in BHLNC over ``memory``; a head's block is opaque, or K transposed and V."""
    page = BLOCK_TOKENS * 2 * HEAD_SIZE * ITEM
    plane = Plane(
        part="kv", layers=tuple(f"layers.{i}" for i in range(LAYERS)), head_start=0, heads=HEADS,
        block_tokens=BLOCK_TOKENS, content=2 * HEAD_SIZE, item_size=ITEM, blocks=blocks, address=memory.ctypes.data,
        layer_stride=page, block_stride=HEADS * LAYERS * page, head_stride=LAYERS * page,
        token_stride=2 * HEAD_SIZE * ITEM, content_stride=ITEM, packing="cpu",
    )  # fmt: skip
    planes = (plane,) if packed else _transposed(plane)
    regions = (Region(memory.ctypes.data, memory.nbytes),)
    return WorkerGeometry(0, 1, 0, 1, address, (CacheGroup(BLOCK_TOKENS, 0, planes),), regions)


def _transposed(plane: Plane) -> tuple[Plane, Plane]:
    half = replace(plane, content=HEAD_SIZE, packing="")
    key = replace(half, part="k", token_stride=ITEM, content_stride=BLOCK_TOKENS * ITEM)
    offset = BLOCK_TOKENS * HEAD_SIZE * ITEM
    return key, replace(half, part="v", address=plane.address + offset, token_stride=HEAD_SIZE * ITEM)


class Request:
    """What the producer looks at in a vLLM request."""

    prompt_embeds = None
    lora_request = None
    mm_features: tuple[()] = ()

    def __init__(self, request_id: str, tokens: int) -> None:
        self.request_id, self.num_prompt_tokens, self.prompt_token_ids = request_id, tokens, None


def serve(pipe: Connection, blocks: int, tokens: int, packed: bool) -> None:
    """The prefill engine: grants a lease of up to ``tokens`` for every table of block ids that comes through the pipe.

    With each comes whether its checksums are wanted.
    """
    memory = np.random.default_rng(1).integers(0, 256, blocks * block_bytes(), np.uint8)
    engine = MooncakeEngine(MooncakeOptions(HOST))
    worker = replace(geometry(memory, blocks, engine.address, packed), identity=engine.identity)
    engine.register(worker.regions)
    leases: LeaseTable[None] = LeaseTable(30.0, time.monotonic)
    service = LeaseService(leases, MODEL, 1, verify=True)
    service.set_workers((worker,))
    server = ControlServer(service, HOST)
    server.start()
    checksums = CacheChecksums(worker)
    pipe.send((engine.address, memory.ctypes.data, memory.nbytes))
    number = 0
    while (asked := pipe.recv()) is not None:
        block_ids, verify = asked
        leases.collect()
        request = Request(f"r{number}", min(tokens, len(block_ids) * BLOCK_TOKENS))
        pipe.send(service.grant(cast("Any", request), (block_ids,), None, (HOST, server.port)))
        for order in service.checksums.take_orders():
            if verify:
                sums = checksums.sums(order.block_ids, 0, order.end_token, threading.Event())
                service.checksums.add(ChecksumReport(order.lease_id, 0, sums))
        number += 1
    server.close()
    engine.close()


def block_bytes() -> int:
    """Bytes of one block over all layers and heads."""
    return LAYERS * HEADS * BLOCK_TOKENS * 2 * HEAD_SIZE * ITEM


class Puller:
    """The decode worker."""

    def __init__(self, blocks: int, packed: bool) -> None:
        self.memory = np.zeros(blocks * block_bytes(), np.uint8)
        self.engine = MooncakeEngine(MooncakeOptions(HOST))
        self.client = ControlClient()
        local = geometry(self.memory, blocks, self.engine.address, packed)
        self.engine.register(local.regions)

        reads = RemoteReader(CostModel.of_protocol("tcp"), local.regions)
        context = PullContext(local, MODEL, self.engine, self.client, AllowedPeers(), 0, 1, reads, 10.0, 60.0)
        verifier = Verifier(CacheChecksums(local), self.client)
        self.pulls = {
            False: Pulls(context, 600.0),
            True: Pulls(replace(context, verifier=verifier), 600.0),
        }

    def pull(self, params: dict[str, object], block_ids: list[int], tokens: int, verify: bool) -> PullEnd:
        """One pull, waited for as the model runner does: by looking in again and again."""
        remote = msgspec.convert(params, RemotePrefill)
        pulls = self.pulls[verify]
        order = PullOrder(remote.remote_request_id, remote, (tuple(block_ids),), 0, tokens - 1, remote.lease_id)
        pulls.execute(Orders(pulls=(order,)))
        while not (ends := pulls.take_ends()):
            time.sleep(1e-4)
        assert not ends[0].cause, ends[0].reason
        return ends[0]

    def close(self) -> None:
        """End all threads."""
        for pulls in self.pulls.values():
            pulls.close()
        self.engine.close()
        self.client.close()
        for pulls in self.pulls.values():
            pulls.join()


class Measured:
    """Seconds by name, over the rounds."""

    def __init__(self) -> None:
        self.seconds: dict[str, list[float]] = {}

    def add(self, name: str, seconds: float) -> None:
        """One more round."""
        self.seconds.setdefault(name, []).append(seconds)

    def time(self, name: str, action: Callable[[], object]) -> None:
        """Measure one call."""
        start = time.perf_counter()
        action()
        self.add(name, time.perf_counter() - start)

    def report(self, size: int, base: str) -> None:
        """A line a name: median, rate, and the rate as a share of that of ``base``."""
        reference = statistics.median(self.seconds[base])
        for name, values in self.seconds.items():
            median = statistics.median(values)
            rate = f"{size / median / 1e9:6.2f} GB/s {reference / median:6.0%}"
            rate = "" if "its release" in name or "its verif" in name else rate
            print(f"  {name:44s} {1e3 * median:8.2f} ms {rate}")


class Bench:
    """One prefill process, one puller, and Mooncake's own call for comparison."""

    def __init__(self, tokens: int, packed: bool) -> None:
        self.tokens = tokens
        self.needed = -(-tokens // BLOCK_TOKENS)
        self.size = self.needed * block_bytes()
        self._blocks = 3 * self.needed
        self._pipe, self._process = start_apart(serve, self._blocks, tokens, packed)
        self._address, self._remote, remote_size = self._pipe.recv()
        self._puller = Puller(self._blocks, packed)
        self._link = self._puller.engine.open(self._address, [Region(self._remote, remote_size)])
        self._mooncake = _plain_mooncake()
        self._random = np.random.default_rng(2)

    def pull(self, measured: Measured, scattered: bool, verify: bool = False) -> None:
        """One pull of a prompt whose blocks lie side by side or anywhere, on both sides."""
        ours, theirs = (self._block_ids(scattered) for _ in range(2))
        self._pipe.send((theirs, verify))
        params = self._pipe.recv()
        name = f"{'scattered' if scattered else 'adjacent'} blocks{', verified' if verify else ''}"
        start = time.perf_counter()
        settled = self._puller.pull(params, ours, self.tokens, verify)
        measured.add(f"pull, {name}", time.perf_counter() - start)
        measured.add(f"  its read, {name}", settled.seconds["read"])
        if verify:
            measured.add(f"  its verification, {name}", settled.seconds["verify"])
        measured.add(f"  its release, {name}", settled.seconds["release"])

    def contiguous(self) -> None:
        """One descriptor through our engine."""
        here = self._puller.memory.ctypes.data
        self._link.read(Copies(np.array([here]), np.array([self._remote]), np.array([self.size])), 60.0)

    def plain(self) -> None:
        """One descriptor through Mooncake's blocking call."""
        here = self._puller.memory.ctypes.data
        assert self._mooncake.batch_transfer_sync_read(self._address, [here], [self._remote], [self.size]) == 0

    def close(self) -> None:
        """End everything."""
        self._link.close()
        self._puller.close()
        self._pipe.send(None)
        self._process.join(10)

    def _block_ids(self, scattered: bool) -> list[int]:
        if not scattered:
            return list(range(1, self.needed + 1))
        return [int(block) + 1 for block in self._random.permutation(self._blocks - 1)[: self.needed]]


def _plain_mooncake() -> Any:
    from mooncake.engine import TransferEngine  # noqa: PLC0415  after our engine has set its environment

    engine = TransferEngine()
    engine.initialize(HOST, "P2PHANDSHAKE", "tcp", "")
    return engine


def main(words: Sequence[str] | None = None) -> dict[str, Any]:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=1500)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--verify", action="store_true", help="pulls with and without checksums, in turn")
    arguments = parser.parse_args(words)
    os.environ.setdefault("MC_USE_IPV6", "0")  # with IPv6, Mooncake's own call does not resolve IPv4 addresses
    bench = Bench(arguments.tokens, packed=not arguments.verify)
    warm_up, measured = Measured(), Measured()
    for round_number in range(-3, arguments.rounds):
        into = measured if round_number >= 0 else warm_up
        for scattered in (False, True):
            bench.pull(into, scattered)
            if arguments.verify:
                bench.pull(into, scattered, verify=True)
        into.time(CONTIGUOUS, bench.contiguous)
        into.time("one contiguous read, Mooncake's blocking call", bench.plain)
    print(f"\n{bench.tokens} tokens of SmolLM2-135M, {bench.size / 1e6:.1f} MB, median of {arguments.rounds}")
    print("the last column is the rate as a share of one contiguous read through our engine; target 85%")
    measured.report(bench.size, CONTIGUOUS)
    bench.close()
    seconds = {name.strip(): statistics.median(values) for name, values in measured.seconds.items()}
    return {"megabytes": bench.size / 1e6, "ms": {name: 1e3 * median for name, median in seconds.items()}}


if __name__ == "__main__":
    main()
