"""One pair of engines for the contract tests, of each kind; and a count of what a process holds."""

import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest

from tests.support.in_process_engine import InProcessEngine, InProcessFabric
from tests.transfer.engine.memory import Memory
from transfer.engine.base import TransferEngine
from transfer.engine.mooncake import MooncakeEngine, MooncakeOptions

MEMORY_BYTES = 8 << 20


@dataclass(frozen=True)
class Pair:
    """A reader and a peer, each with memory registered; the peer's is patterned with seed 1."""

    reader: TransferEngine
    peer: TransferEngine
    destination: Memory
    source: Memory


def in_process_engines() -> Iterator[TransferEngine]:
    fabric = InProcessFabric()
    while True:
        yield InProcessEngine(fabric)


def mooncake_engines(engine_per_link: bool | None = None) -> Iterator[TransferEngine]:
    while True:
        yield MooncakeEngine(MooncakeOptions("127.0.0.1", engine_per_link=engine_per_link, progress_timeout_s=1.0))


ENGINES: dict[str, Callable[[], Iterator[TransferEngine]]] = {
    "in_process": in_process_engines,
    "mooncake": mooncake_engines,
    "mooncake_shared": lambda: mooncake_engines(engine_per_link=False),
}


@pytest.fixture(params=ENGINES)
def engines(request: pytest.FixtureRequest) -> Iterator[Iterator[TransferEngine]]:
    """Makes engines of one kind that can reach each other, and closes them."""
    made: list[TransferEngine] = []

    def make() -> Iterator[TransferEngine]:
        for engine in ENGINES[request.param]():
            made.append(engine)
            yield engine

    yield make()
    for engine in made:
        engine.close()


@pytest.fixture
def pair(engines: Iterator[TransferEngine]) -> Pair:
    destination, source = Memory(MEMORY_BYTES), Memory.patterned(MEMORY_BYTES, seed=1)
    reader, peer = next(engines), next(engines)
    reader.register([destination.region])
    peer.register([source.region])
    return Pair(reader, peer, destination, source)


@dataclass(frozen=True)
class Held:
    """Threads and file descriptors of this process."""

    threads: int
    files: int

    @classmethod
    def now(cls) -> "Held":
        return cls(len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd")))

    @property
    def is_all(self) -> bool:
        """Whether no more is held now. It may be less: what an earlier test closed may still have been ending."""
        now = Held.now()
        return now.threads <= self.threads and now.files <= self.files


def until(condition: Callable[[], bool], within_s: float = 20.0) -> bool:
    """Whether ``condition`` comes true in time."""
    deadline = time.monotonic() + within_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.002)
    return True
