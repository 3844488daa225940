"""Both kinds of links over Mooncake: when what a failed read or proof leaves behind ends. No byte is moved."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from unittest.mock import MagicMock, create_autospec

import pytest

from layout.copies import Copies
from layout.geometry import Identity, Region
from tests.support.memory import Memory, even_copies
from tests.support.waiting import until
from transfer.engine import mooncake, mooncake_links, mooncake_read
from transfer.engine.interface import ReadFailed
from transfer.engine.mooncake import MooncakeEngine, MooncakeOptions
from transfer.engine.mooncake_batches import ReadBatch, State
from transfer.engine.mooncake_links import MooncakeLink
from transfer.engine.mooncake_native import NativeEngine

PEER, THEIRS, IDENTITY = "127.0.0.1:15001", Region(1 << 20, 1 << 20), Identity(4096, bytes(16))


class Batch(ReadBatch):
    """Has the state that its world has when it is looked at."""

    def __init__(self, world: "World", descriptors: int) -> None:
        super().__init__(descriptors)
        self._world = world

    def _look(self) -> State:
        return self._world.state


class World:
    """An engine and a link of it. Mooncake does as the test says."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, own: bool) -> None:
        self.state = State.DONE  # of all batches
        self.natives: list[MagicMock] = []
        self.memory = Memory(1 << 16)
        for module in (mooncake, mooncake_links):
            monkeypatch.setattr(module, "NativeEngine", self.start)
        for module in (mooncake_links, mooncake_read):
            monkeypatch.setattr(module, "submit", self.submit)
        monkeypatch.setattr(mooncake_links, "_PATIENCE_S", 0.01)
        self.engine = MooncakeEngine(MooncakeOptions("127.0.0.1", engine_per_link=own))
        self.engine.register([self.memory.region])
        self.link: MooncakeLink = self.engine.open(PEER, [THEIRS], IDENTITY)

    def start(self, options: object, lend: object = None) -> MagicMock:
        native: MagicMock = create_autospec(NativeEngine, instance=True)
        native.address, native.refusal.return_value, native.counts = "127.0.0.1:15000", "", True
        native.link_s = 0.0
        self.natives.append(native)
        return native

    def submit(self, native: NativeEngine, address: str, copies: Copies) -> Batch:
        return Batch(self, len(copies))

    def fail_to_read(self) -> None:
        self.state = State.PENDING
        with pytest.raises(ReadFailed) as failure:
            self.link.read(even_copies(self.memory.region, THEIRS, 4, 4096), 0.01)
        assert not failure.value.settled

    def fail_to_prove(self) -> None:
        self.state = State.PENDING
        with pytest.raises(ReadFailed, match="did not say") as failure:
            self.link.prove(0.01)
        assert failure.value.settled

    @property
    def lent(self) -> int:
        """Slots of the memory for identities."""
        return len(self.engine.scratch._lent)


@pytest.fixture
def own(monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    world = World(monkeypatch, own=True)
    yield world
    world.engine.close()
    world.engine.check_integrity()


@pytest.fixture
def shared(monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    world = World(monkeypatch, own=False)
    yield world
    world.engine.close()
    world.engine.check_integrity()


def test_a_link_has_its_own_engine_or_the_one_that_peers_reach(own: World, shared: World) -> None:
    assert (len(own.natives), len(shared.natives)) == (2, 1)
    own.natives[1].register.assert_not_called()


def test_what_a_link_writes_identities_to_is_registered_if_it_reads_with_the_engine_that_peers_reach(
    own: World, shared: World
) -> None:
    registered = [world.natives[0].register.call_args_list[0].args[0] for world in (own, shared)]
    assert registered == [
        [Region(own.engine.identity.address, 4096)],
        [Region(shared.engine.identity.address, 4096 + shared.engine.scratch.region.size)],
    ]


def test_a_link_with_its_own_engine_is_stale_if_it_was_idle_for_long(
    own: World, shared: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over TCP, that is: no firewall forgets what RDMA and Ascend know of a peer."""
    assert (own.link.is_stale, shared.link.is_stale) == (False, False)
    monkeypatch.setattr(mooncake_links, "_MOST_IDLE_S", 0.01)
    time.sleep(0.02)
    assert (own.link.is_stale, shared.link.is_stale) == (True, False)
    monkeypatch.setattr(mooncake_links, "_MOST_IDLE_S", 30.0)
    uses: list[Callable[[], None]] = [
        lambda: own.link.read(even_copies(own.memory.region, THEIRS, 4, 4096), 1.0),
        lambda: own.link.prove(0.01),
    ]
    for use in uses:
        own.link._used_at -= 60.0
        assert own.link.is_stale
        with suppress(ReadFailed):
            use()
        assert not own.link.is_stale


def test_a_peer_that_answers_at_the_last_moment_has_answered(own: World, monkeypatch: pytest.MonkeyPatch) -> None:
    class StillEnding(threading.Thread):
        """Has done its work, and waits for the interpreter to end."""

        ended = False

        def join(self, timeout: float | None = None) -> None:
            super().join(timeout)
            self.ended = self.ended or timeout is None

        def is_alive(self) -> bool:
            return not self.ended

    monkeypatch.setattr(threading, "Thread", StillEnding)
    monkeypatch.setattr(MooncakeLink, "_meet", lambda *_: "")
    link = own.engine.open("127.0.0.1:15002", [THEIRS], IDENTITY)
    assert not link.is_stale
    own.natives[-1].interrupt.assert_not_called()
    link.read(even_copies(own.memory.region, THEIRS, 4, 4096), 1.0)


def test_a_failed_read_over_an_own_engine_settles_after_that_is_deleted(own: World) -> None:
    own.fail_to_read()
    own.state = State.FAILED
    assert (own.link.settled, own.link.window.in_flight) == (False, 4)
    at_deletion: list[tuple[bool, int]] = []
    own.natives[1].delete.side_effect = lambda: at_deletion.append((own.link.settled, own.link.window.in_flight))
    for _ in range(2):
        own.link.close()
    assert at_deletion == [(False, 4)]
    assert (own.link.settled, own.link.window.in_flight) == (True, 0)
    own.natives[0].delete.assert_not_called()


def test_a_failed_read_over_a_shared_engine_settles_when_it_is_final(shared: World) -> None:
    shared.fail_to_read()
    shared.link.close()
    assert (shared.link.settled, shared.link.window.in_flight) == (False, 4)
    shared.natives[0].delete.assert_not_called()
    shared.state = State.FAILED
    until(lambda: shared.link.settled)
    assert shared.link.window.in_flight == 0


def test_a_proof_over_an_own_engine_lends_its_memory_until_that_is_deleted(own: World) -> None:
    own.fail_to_prove()
    assert (own.link.settled, own.lent) == (True, 1)
    own.natives[1].delete.side_effect = lambda: at_deletion.append(own.lent)
    at_deletion: list[int] = []
    own.link.close()
    assert (at_deletion, own.lent) == ([1], 0)


def test_a_proof_over_a_shared_engine_lends_its_memory_until_it_is_final(shared: World) -> None:
    shared.fail_to_prove()
    shared.link.close()
    assert (shared.link.settled, shared.lent) == (True, 1)
    shared.state = State.DONE
    until(lambda: shared.lent == 0)
