"""What host memory costs at either end of a pull: ``python -m benchmarks.host_memory``.

As ``benchmarks.pull``, a prefill worker in a process of its own and a decode worker in this one, 1,500 tokens of
SmolLM2-135M. Pulls take turns: from the prefill worker's device or from its host memory, to the decode worker's device
or to its host memory. On CPU all four are memory, so the ratios show what looking up the place and the other layout
cost. Then the copy by which what has landed is loaded.
"""

import argparse
import statistics
import time
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from multiprocessing.connection import Connection
from typing import Any, cast

import msgspec
import numpy as np

from benchmarks.apart import start_apart
from benchmarks.pull import BLOCK_TOKENS, HOST, MODEL, Measured, Request, block_bytes, geometry
from layout.cost import CostModel
from layout.geometry import Region, WorkerGeometry
from layout.host_blocks import HostLayout, host_layout
from layout.host_slots import host_block_geometry, slot_geometry
from pd_connector.orders import Orders, PullOrder
from pd_connector.params import RemotePrefill
from pd_connector.scheduler.prefill.lease_service import LeaseService
from pd_connector.scheduler.prefill.leases import LeaseTable
from pd_connector.worker.peer import PullContext
from pd_connector.worker.pulls import Pulls
from pd_connector.worker.remote_reader import RemoteReader
from transfer.control.client import ControlClient
from transfer.control.server import ControlServer
from transfer.copies.reshape.reshape import run_copies
from transfer.engine.mooncake import MooncakeEngine, MooncakeOptions
from transfer.memory import HostMemory
from transfer.peers import AllowedPeers


class _Memory:
    """A worker's device, which is memory here, and its host memory of as many blocks."""

    def __init__(self, blocks: int, engine: MooncakeEngine) -> None:
        self.device = np.random.default_rng(1).integers(0, 256, blocks * block_bytes(), np.uint8)
        self.caches = replace(geometry(self.device, blocks, engine.address), identity=engine.identity)
        self.layout: HostLayout = host_layout(self.caches)
        self._pages = HostMemory(blocks * self.layout.slot_bytes)
        self._pages.allocate()
        self.pool: Region = self._pages.region
        engine.register((*self.caches.regions, self.pool))


def serve(pipe: Connection, blocks: int, tokens: int) -> None:
    """The prefill engine: grants a lease for every table of block ids, and moves it to host memory if it is to."""
    engine = MooncakeEngine(MooncakeOptions(HOST))
    memory = _Memory(blocks, engine)
    leases: LeaseTable[str] = LeaseTable(30.0, time.monotonic)
    service = LeaseService(leases, MODEL, 1)
    service.set_workers((memory.caches,), (slot_geometry(memory.caches, memory.layout, memory.pool),))
    server = ControlServer(service, HOST)
    server.start()
    pipe.send(None)
    number = 0
    while (asked := pipe.recv()) is not None:
        block_ids, moves = asked
        leases.collect()
        params = service.grant(cast("Any", Request(f"r{number}", tokens)), (block_ids,), "blocks", (HOST, server.port))
        number += 1
        if moves:
            slots = [block - 1 for block in block_ids]
            run_copies(memory.layout.stores(memory.pool, 0, block_ids, slots))
            assert leases.move(str(params["lease_id"]), "slots", dict(zip(block_ids, slots, strict=True))) == "blocks"
        pipe.send(params)
    server.close()
    engine.close()


class Bench:
    """A prefill process and a decode worker."""

    def __init__(self, tokens: int) -> None:
        self.tokens, self._needed = tokens, -(-tokens // BLOCK_TOKENS)
        self.bytes = self._needed * block_bytes()
        self._blocks = 3 * self._needed
        self._pipe, self._process = start_apart(serve, self._blocks, tokens)
        self._pipe.recv()
        self._engine, self._client = MooncakeEngine(MooncakeOptions(HOST)), ControlClient()
        self._memory = _Memory(self._blocks, self._engine)
        memory = self._memory
        slots = host_block_geometry(memory.caches, memory.layout, memory.pool)
        self._pulls = {False: self._pulls_to(memory.caches), True: self._pulls_to(slots)}
        self._random = np.random.default_rng(2)

    def _pulls_to(self, local: WorkerGeometry) -> Pulls:
        reads = RemoteReader(CostModel.of_protocol("tcp"), local.regions)
        context = PullContext(local, MODEL, self._engine, self._client, AllowedPeers(), 0, 1, reads, 10.0, 60.0)
        return Pulls(context, 600.0)

    def pull(self, measured: Measured, *, from_host: bool, to_host: bool) -> None:
        """One pull of a prompt whose blocks lie anywhere, waited for as the model runner does."""
        theirs, ours = self._ids(), self._ids()
        self._pipe.send((theirs, from_host))
        remote = msgspec.convert(self._pipe.recv(), RemotePrefill)
        order = PullOrder(remote.remote_request_id, remote, (tuple(ours),), 0, self.tokens - 1, remote.lease_id)
        pulls, start = self._pulls[to_host], time.perf_counter()
        pulls.execute(Orders(pulls=(order,)))
        while not (ends := pulls.take_ends()):
            time.sleep(1e-4)
        ends_named = " to ".join("host memory" if host else "device" for host in (from_host, to_host))
        measured.add(ends_named, time.perf_counter() - start)
        assert not ends[0].cause, ends[0].reason
        assert bool(ends[0].host_bytes) == from_host
        if to_host:
            load = self._memory.layout.loads(self._memory.pool, 0, ours, [block - 1 for block in ours])
            measured.time("load of what has landed", lambda: run_copies(load))

    def close(self) -> None:
        """End everything."""
        for pulls in self._pulls.values():
            pulls.close()
        self._engine.close()
        self._client.close()
        for pulls in self._pulls.values():
            pulls.join()
        self._pipe.send(None)
        self._process.join(10)

    def _ids(self) -> list[int]:
        return [int(block) + 1 for block in self._random.permutation(self._blocks - 1)[: self._needed]]


def main(words: Sequence[str] | None = None) -> dict[str, Any]:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=1500)
    parser.add_argument("--rounds", type=int, default=100)
    arguments = parser.parse_args(words)
    bench, warm_up, measured = Bench(arguments.tokens), Measured(), Measured()
    for number in range(-3, arguments.rounds):
        for from_host, to_host in product((False, True), repeat=2):
            bench.pull(measured if number >= 0 else warm_up, from_host=from_host, to_host=to_host)
    bench.close()
    print(f"\n{bench.tokens} tokens of SmolLM2-135M, {bench.bytes / 1e6:.1f} MB, median of {arguments.rounds}")
    print("the last column is the rate as a share of that of a pull from device to device")
    measured.report(bench.bytes, "device to device")
    medians = {name: 1e3 * statistics.median(seconds) for name, seconds in measured.seconds.items()}
    landed = medians["device to host memory"] + medians["load of what has landed"]
    ratio = landed / medians["device to device"]
    return {"megabytes": bench.bytes / 1e6, "ms": medians, "landed_and_loaded": {"ratio": ratio}}


if __name__ == "__main__":
    main()
