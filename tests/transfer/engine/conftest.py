"""One pair of engines for the contract tests, of each kind; memory, and peers in processes of their own."""

from collections.abc import Iterator

import pytest

from tests.support.engine.pairs import ENGINES, MEMORY_BYTES, EnginePair
from tests.support.engine.peer_process import SIZE, PeerProcess
from tests.support.memory import Memory
from transfer.engine.interface import TransferEngine


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
def pair(engines: Iterator[TransferEngine]) -> EnginePair:
    destination, source = Memory(MEMORY_BYTES), Memory.of_noise(MEMORY_BYTES, seed=1)
    reader, peer = next(engines), next(engines)
    reader.register([destination.region])
    peer.register([source.region])
    return EnginePair(reader, peer, destination, source)


@pytest.fixture(scope="module")
def destination() -> Memory:
    return Memory(SIZE)


@pytest.fixture(scope="module")
def peer() -> Iterator[PeerProcess]:
    """A peer that stays healthy."""
    with PeerProcess(SIZE, seed=5) as peer:
        yield peer


@pytest.fixture
def victim() -> Iterator[PeerProcess]:
    """A peer to be stopped or killed."""
    with PeerProcess(SIZE, seed=5) as peer:
        yield peer
