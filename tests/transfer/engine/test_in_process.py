"""The faults that the in-process engine plays."""

import threading
from collections.abc import Iterator

import numpy as np
import pytest

from tests.support.engine.in_process import Fault, InProcessEngine, InProcessFabric, InProcessLink
from tests.support.memory import Memory, even_copies
from transfer.engine.interface import ReadFailed

COUNT, SIZE = 8, 16


class World:
    """A fabric with a reader and a peer, and one open link."""

    def __init__(self) -> None:
        self.fabric = InProcessFabric(seed=3)
        self.destination, self.source = Memory(4096), Memory.of_noise(4096, seed=1)
        self.reader, self.peer = InProcessEngine(self.fabric), InProcessEngine(self.fabric)
        self.reader.register([self.destination.region])
        self.peer.register([self.source.region])
        self.link: InProcessLink = self.reader.open(self.peer.address, [self.source.region])

    def read(self, timeout_s: float = 5) -> None:
        self.link.read(even_copies(self.destination.region, self.source.region, COUNT, SIZE), timeout_s)

    @property
    def landed(self) -> int:
        """Descriptors whose bytes are there."""
        blocks = (memory.view[: COUNT * SIZE].reshape(COUNT, SIZE) for memory in (self.destination, self.source))
        return int((next(blocks) == next(blocks)).all(axis=1).sum())


@pytest.fixture
def world() -> Iterator[World]:
    world = World()
    yield world
    world.reader.close()
    world.peer.close()


def test_only_the_chosen_read_fails(world: World) -> None:
    world.fabric.inject(2, Fault())
    world.read()
    with pytest.raises(ReadFailed):
        world.read()
    world.read()
    assert world.fabric.reads == 3


def test_a_settled_failure_leaves_the_link_usable_and_writes_nothing_late(world: World) -> None:
    world.fabric.inject(1, Fault(settled=True, landed=3))
    with pytest.raises(ReadFailed, match="5 descriptors missing") as failure:
        world.read()
    assert failure.value.settled
    assert world.landed == 3
    assert world.fabric.deliver_late_bytes() == 0
    world.read()
    assert world.landed == COUNT


def test_an_unsettled_failure_may_write_late_and_breaks_the_link(world: World) -> None:
    world.fabric.inject(1, Fault(settled=False, landed=2))
    with pytest.raises(ReadFailed) as failure:
        world.read()
    assert not failure.value.settled
    with pytest.raises(ReadFailed, match="must be closed first") as refusal:
        world.read()
    assert refusal.value.settled
    assert world.landed == 2
    assert world.fabric.deliver_late_bytes() == COUNT - 2
    assert world.landed == COUNT


def test_a_closed_link_writes_no_late_bytes(world: World) -> None:
    world.fabric.inject(1, Fault(settled=False, landed=2))
    with pytest.raises(ReadFailed):
        world.read()
    world.link.close()
    assert world.fabric.deliver_late_bytes() == 0
    assert world.landed == 2


def test_bytes_wait_for_an_event(world: World) -> None:
    event = threading.Event()
    world.fabric.inject(1, Fault(fails=False, landed=1, until=event))
    reading = threading.Thread(target=world.read)
    reading.start()
    reading.join(0.05)
    assert reading.is_alive()
    assert world.landed <= 1
    event.set()
    reading.join()
    assert world.landed == COUNT


def test_an_event_that_comes_too_late_fails_the_read_unsettled(world: World) -> None:
    world.fabric.inject(1, Fault(fails=False, until=threading.Event()))
    with pytest.raises(ReadFailed, match=r"within 0\.010 s") as failure:
        world.read(timeout_s=0.01)
    assert not failure.value.settled
    assert world.fabric.deliver_late_bytes() == COUNT


def test_a_link_that_is_closed_during_a_read_fails_it_and_gets_no_more_bytes(world: World) -> None:
    event = threading.Event()
    world.fabric.inject(1, Fault(fails=False, until=event))
    failures: list[ReadFailed] = []

    def read() -> None:
        try:
            world.read()
        except ReadFailed as error:
            failures.append(error)

    reading = threading.Thread(target=read)
    reading.start()
    world.link.close()
    event.set()
    reading.join()
    assert [failure.settled for failure in failures] == [True]
    assert world.landed == 0


def test_a_peer_that_is_removed_fails_the_next_read(world: World) -> None:
    world.fabric.remove(world.peer.address)
    with pytest.raises(ReadFailed, match="peer is gone") as failure:
        world.read()
    assert failure.value.settled
    assert world.landed == 0


def test_descriptors_land_in_an_order_that_differs_between_reads(world: World) -> None:
    seen = set()
    for read in range(1, 6):
        world.destination.view[:] = 0
        world.fabric.inject(read, Fault(landed=1))
        with pytest.raises(ReadFailed):
            world.read()
        seen.add(int(np.flatnonzero(world.destination.view)[0]) // SIZE)
    assert len(seen) > 1
