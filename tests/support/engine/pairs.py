"""Transfer engines of every kind, and a reader and a peer of one kind, with memory."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from tests.support.engine.in_process import InProcessEngine, InProcessFabric
from tests.support.engine.ipc_engines import ipc_engines, kernel_or_skip
from tests.support.memory import Memory
from transfer.engine.interface import TransferEngine
from transfer.engine.mooncake import MooncakeEngine, MooncakeOptions

MEMORY_BYTES = 8 << 20


@dataclass(frozen=True)
class EnginePair:
    """A reader and a peer, each with memory registered; the peer's is noise of seed 1."""

    reader: TransferEngine
    peer: TransferEngine
    destination: Memory
    source: Memory


def in_process_engines() -> Iterator[TransferEngine]:
    fabric = InProcessFabric()
    while True:
        yield InProcessEngine(fabric)


def mooncake_engines(engine_per_link: bool | None = None, counts: bool | None = None) -> Iterator[TransferEngine]:
    """``counts``: whether batches are told by their counters; None lets the first one show."""
    while True:
        engine = MooncakeEngine(MooncakeOptions("127.0.0.1", engine_per_link=engine_per_link, progress_timeout_s=1.0))
        engine.native.counts = counts
        yield engine


ENGINES: dict[str, Callable[[], Iterator[TransferEngine]]] = {
    "in_process": in_process_engines,
    "cuda_ipc": ipc_engines,
    "cuda_ipc_kernel": lambda: ipc_engines(kernel_or_skip()),
    "mooncake": mooncake_engines,
    "mooncake_shared": lambda: mooncake_engines(engine_per_link=False),
    "mooncake_shared_uncounted": lambda: mooncake_engines(engine_per_link=False, counts=False),
}
