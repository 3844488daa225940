"""How fast a prefix comes from the pool, against one contiguous read of as many bytes: ``python -m benchmarks.pool``.

Mooncake's master and two of its clients run beside this process: the one that holds the objects, as if on another
machine, and that of this machine, which has no room; so every byte crosses TCP. Workers of one engine put 2,000
tokens of a 24-layer cache, those of another fetch them, by the connector's own classes: calls of the store, seals, and
copies to host slots; the look-up before is left out. The contiguous read is one of Mooncake's transfer engine, from a
process of its own. In one run, in turn; medians over the rounds. What was fetched is compared before the first round.
"""

import argparse
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.apart import start_apart
from benchmarks.unequal import BLOCK_TOKENS, HOST, KV_HEADS, LAYERS, PAGE, Memory, by_index, expected, geometry
from examples.quickstart.servers import free_ports
from layout.block_objects import object_forms
from layout.copies import Copies
from layout.geometry import Region
from layout.host_blocks import host_layout
from layout.host_slots import slot_geometry
from layout.sharding import held_heads
from pd_connector.orders import Orders, PoolEnds, PoolOrder
from pd_connector.stats import StatsRecorder
from pd_connector.worker.host.pool_copies import PoolCopies
from transfer.copies.reshape.reshape import run_copies
from transfer.engine.mooncake import MooncakeEngine, MooncakeOptions
from transfer.peers import Address
from transfer.store.mooncake_store import MooncakeStore
from transfer.store.slot_objects import KEY_BYTES

TOKENS = 2000
BLOCKS = -(-TOKENS // BLOCK_TOKENS)
SIZE = LAYERS * KV_HEADS * PAGE * BLOCKS
HASHES = tuple(number.to_bytes(32) for number in range(BLOCKS))
PAIRS = ((1, 1), (2, 1))  # ranks that put, ranks that fetch
BUFFER_BYTES = 64 << 20
START_TIMEOUT_S = 60.0


@contextmanager
def store() -> Iterator[Address]:
    """Run Mooncake's store, and yield the address of this machine's client."""
    master, metrics, holder, here = free_ports(4)
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))

        def start(program: str, port: int, *arguments: str) -> None:
            log = stack.enter_context((directory / f"{program}-{port}.log").open("wb"))
            process = subprocess.Popen(
                [str(Path(sys.executable).with_name(program)), *arguments], stdout=log, stderr=subprocess.STDOUT
            )
            stack.callback(process.wait)
            stack.callback(process.kill)
            ends_at = time.monotonic() + START_TIMEOUT_S
            while not _listens(port):
                if process.poll() is not None or time.monotonic() > ends_at:
                    sys.exit(f"{program} does not listen:\n{Path(log.name).read_text()[-2000:]}")
                time.sleep(0.1)

        def client(port: int, segment: str) -> None:
            start(
                "mooncake_client", port, f"--host={HOST}", f"--port={port}", f"--global_segment_size={segment}",
                f"--master_server_address={HOST}:{master}", "--metadata_server=P2PHANDSHAKE",
                "--local_buffer_size=16MB", "--protocol=tcp",
            )  # fmt: skip

        start("mooncake_master", master, f"--rpc_address={HOST}", f"--rpc_port={master}", f"--metrics_port={metrics}")
        client(holder, f"{16 * SIZE >> 20}MB")
        client(here, "0")
        yield Address(HOST, here)


def _listens(port: int) -> bool:
    with socket.socket() as connection:
        return connection.connect_ex((HOST, port)) == 0


class Ranks:
    """The workers of an engine: their caches, host slots with all blocks, and the threads that put and fetch."""

    def __init__(self, address: Address, tp_size: int) -> None:
        self._heads = [held_heads(KV_HEADS, tp_size, rank) for rank in range(tp_size)]
        self._slots: list[Memory] = []
        self._copies: list[PoolCopies] = []
        self._store = partial(MooncakeStore, address, BUFFER_BYTES)
        for rank, (start, end) in enumerate(self._heads):
            caches = np.empty(LAYERS * BLOCKS * (end - start) * PAGE, np.uint8)
            by_index(caches, "BHLNC", end - start)[:] = expected(np.arange(BLOCKS), start, end)
            worker = geometry(caches, "BHLNC", rank, tp_size, "")
            layout = host_layout(worker)
            slots = np.zeros(BLOCKS * layout.slot_bytes, np.uint8)
            region = Region(slots.ctypes.data, slots.nbytes)
            run_copies(layout.stores(region, 0, np.arange(BLOCKS), np.arange(BLOCKS)))
            forms = object_forms(slot_geometry(worker, layout, region))
            self._slots.append(slots)
            self._copies.append(PoolCopies(forms, bytes(KEY_BYTES), self._store, StatsRecorder()))

    def put(self, namespace: str) -> None:
        """Put all blocks."""
        self._execute("puts", namespace)

    def fetch(self, namespace: str) -> None:
        """Fetch all blocks, all ranks at once."""
        self._execute("fetches", namespace)

    def forget(self) -> None:
        """Overwrite what the slots hold."""
        for slots in self._slots:
            slots[:] = 0xFF

    def check(self) -> None:
        """Stop unless every slot has its block."""
        for (start, end), slots in zip(self._heads, self._slots, strict=True):
            if not (by_index(slots, "BHLNC", end - start) == expected(np.arange(BLOCKS), start, end)).all():
                sys.exit("what was fetched is not what was put")

    def close(self) -> None:
        """End the threads."""
        for copies in self._copies:
            copies.close()
        for copies in self._copies:
            copies.join()

    def _execute(self, kind: str, namespace: str) -> None:
        order = PoolOrder(1, namespace, np.zeros(BLOCKS, np.int64), np.arange(BLOCKS), HASHES, 60.0)
        orders: dict[str, Any] = {kind: (order,)}
        for copies in self._copies:
            copies.execute(Orders(**orders))
        for copies in self._copies:
            while not (ends := getattr(copies.take_report(), kind)):
                time.sleep(1e-4)
            if ends[1] != PoolEnds(1):
                sys.exit(f"the pool has failed: {ends[1]}")


def serve(pipe: Connection) -> None:
    """Hold as many bytes as all blocks have, for the contiguous read."""
    memory = np.full(SIZE, 1, np.uint8)
    engine = MooncakeEngine(MooncakeOptions(HOST))
    engine.register((Region(memory.ctypes.data, SIZE),))
    pipe.send((engine.address, memory.ctypes.data))
    pipe.recv()
    engine.close()


class Contiguous:
    """One read of as many bytes, through the transfer engine that pulls take."""

    def __init__(self) -> None:
        self._pipe, self._process = start_apart(serve)
        address, self._remote = self._pipe.recv()
        self._memory = np.zeros(SIZE, np.uint8)
        self._engine = MooncakeEngine(MooncakeOptions(HOST))
        self._engine.register((Region(self._memory.ctypes.data, SIZE),))
        self._link = self._engine.open(address, (Region(self._remote, SIZE),))

    def read(self) -> None:
        """Read all."""
        here = self._memory.ctypes.data
        self._link.read(Copies(np.array([here]), np.array([self._remote]), np.array([SIZE])), 60.0)

    def close(self) -> None:
        """End both processes' engines."""
        self._link.close()
        self._engine.close()
        self._pipe.send(None)
        self._process.join(10)


def measure(address: Address, contiguous: Contiguous, rounds: int) -> Mapping[str, list[float]]:
    """Return seconds by name, over the rounds."""
    engines = {tp_size: Ranks(address, tp_size) for tp_size in (1, 2)}
    ways: dict[str, Callable[[], None]] = {"contiguous": contiguous.read}
    for putting, fetching in PAIRS:
        ways[f"TP {putting} to {fetching}"] = partial(engines[fetching].fetch, f"tp{putting}")
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    try:
        for tp_size in (1, 2):
            engines[tp_size].put(f"tp{tp_size}")
        for putting, fetching in PAIRS:
            engines[fetching].forget()
            engines[fetching].fetch(f"tp{putting}")
            engines[fetching].check()
        contiguous.read()
        for _ in range(rounds):
            for name, action in ways.items():
                start = time.perf_counter()
                action()
                seconds[name].append(time.perf_counter() - start)
    finally:
        for ranks in engines.values():
            ranks.close()
    return seconds


def main(words: Sequence[str] | None = None) -> dict[str, Any]:
    """Print the table, and return the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20)
    arguments = parser.parse_args(words)
    with store() as address, ExitStack() as stack:
        contiguous = Contiguous()
        stack.callback(contiguous.close)
        seconds = measure(address, contiguous, arguments.rounds)
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    print(f"\n{TOKENS} tokens, {SIZE / 2**20:.0f} MiB in {BLOCKS * KV_HEADS} objects, median of {arguments.rounds}")
    for name, median in medians.items():
        print(f"  {name:12s} {1e3 * median:8.1f} ms   {median / medians['contiguous']:5.2f} times")
    return {
        "mebibytes": SIZE / 2**20, "objects": BLOCKS * KV_HEADS, "ms": {name: 1e3 * s for name, s in medians.items()},
        "ratio": {name: median / medians["contiguous"] for name, median in medians.items()},
    }  # fmt: skip


if __name__ == "__main__":
    main()
