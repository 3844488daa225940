"""Links over Mooncake: how a peer is met and read, and when what a failed read has left behind is settled.

There are two kinds, by whose engine they read with. ``mooncake`` says which protocol has which, and why.
"""

import threading
import time
from abc import abstractmethod
from collections import deque
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from layout.copies import Copies
from layout.geometry import Identity
from layout.regions import RegionTable
from transfer.engine.ascend_environment import TRANSFER_TIMEOUT
from transfer.engine.batches import check_copies, split_large
from transfer.engine.identity import NONCE_BYTES, wrong_identity
from transfer.engine.interface import EngineStartError, GivenUp, Link, ReadFailed, never
from transfer.engine.mooncake_batches import State, submit
from transfer.engine.mooncake_native import NativeEngine, check_link_threads, check_open_files
from transfer.engine.mooncake_ports import closed_port
from transfer.engine.mooncake_read import MooncakeRead
from transfer.engine.mooncake_settling import Leftover
from transfer.engine.window import Window

if TYPE_CHECKING:
    from transfer.engine.mooncake import MooncakeEngine

_ANOTHER = "another process answers"
_TWO_PORTS = " (two, each from 15000 to 17000, or from MC_MIN_RPC_PORT to MC_MAX_RPC_PORT)"

#: How long a failed read waits for what it has in flight before it counts as unsettled: a peer that refuses a
#: descriptor, or has just died, lets the others end within that time.
_PATIENCE_S = 1.0

#: For how long a TCP connection may be idle. Firewalls and load balancers between machines forget one after 4 minutes
#: or more, some without a word, and Mooncake keeps none alive: a read over such a connection only times out.
_MOST_IDLE_S = 180.0


class MooncakeLink(Link):
    """A link to one peer. One thread at a time may ``connect`` or ``read``; any may ``close``, which ends both."""

    #: Whether links read with the engine that peers reach, so that what they write to must be registered with it.
    reads_with_shared: ClassVar[bool]

    _native: NativeEngine  # to read with, once it is connected

    def __init__(
        self, engine: "MooncakeEngine", address: str, peer: RegionTable, identity: Identity | None, window: Window
    ) -> None:
        self.address = address  # of the peer
        self.window = window  # what is in flight to the peer
        self._engine = engine
        self._options = engine.options
        self._limits = engine.options.limits
        self._peer = peer
        self._identity = identity
        self._busy = threading.Lock()  # held while it connects or reads, and by close when it ends the engine
        self._closing = threading.Event()
        self._answered = threading.Event()  # set once only its identity is waited for
        self._used_at = time.monotonic()  # when the peer was last waited for
        self._broken = ""  # why reads are refused, "" if they are not
        self._leftovers: list[Leftover] = []  # of failed reads
        self._at_end: deque[Callable[[], None]] = deque()  # called by ``close``, in that order

    @abstractmethod
    def _start(self) -> NativeEngine:
        """Return the engine to read with.

        Raises:
            EngineStartError: it cannot be started.
        """

    @abstractmethod
    def _settles(self, reading: MooncakeRead) -> bool:
        """Return whether a read that has failed settles by itself. May wait for that."""

    @abstractmethod
    def _watch(self, leftover: Leftover) -> None:
        """End ``leftover`` once it is final, or no later than with the engine."""

    @abstractmethod
    def _interrupt(self) -> None:
        """End a call to the peer, which ``close`` waits for, unless it ends with the engine."""

    def connect(self, given_up: GivenUp = never) -> None:
        """Wait for the peer's first answer, up to the connect timeout, and find out whether it is the right one.

        On Ascend, the link is made after that answer, for which there is as much time as CANN has. ``given_up``: see
        ``Link.read``.

        Raises:
            ReadFailed: the peer did not answer, or is another (always settled: only scratch memory was written).
        """
        with self._busy:
            if self._closing.is_set():
                raise ReadFailed(f"the transfer engine was closed while it opened {self.address}", settled=True)
            try:
                self._native = native = self._start()
            except EngineStartError as error:
                raise ReadFailed(f"cannot open a link to {self.address}: {error}", settled=True) from error
            if refusal := native.refusal(self.address):
                raise ReadFailed(f"cannot open a link to {self.address}: {refusal}", settled=True)
            self._await_answer(native, given_up)

    def _await_answer(self, native: NativeEngine, given_up: GivenUp) -> None:
        """Return once the peer has answered and is the right one. However this ends, so has the thread that asks it."""
        started = time.monotonic()
        answers: list[str] = []
        # Mooncake's first calls to a peer take no timeout, so another thread makes them.
        thread = threading.Thread(target=lambda: answers.append(self._meet(native)), name="pd-connect", daemon=True)
        try:
            thread.start()
        except RuntimeError as error:  # the system has no thread left
            raise ReadFailed(f"cannot open a link to {self.address}: {error}", settled=True) from error
        lost = ""
        while thread.is_alive() and (left_s := self._left_s(native, started)) > 0 and not self._closing.is_set():
            if lost := given_up():
                break
            thread.join(min(0.05, left_s))
        is_asking = thread.is_alive()
        if answers:
            reason = answers[0]
            thread.join()  # it was the last that the thread had to do
        else:
            reason = "accepts connections but does not answer" if is_asking else "the call to it failed"
        if reason not in ("", _ANOTHER):
            # Before the thread is ended: that closes the link, which would look like the reason.
            reason = self._why_unreachable(reason, (lambda: lost) if lost else given_up)
        while thread.is_alive():
            self._closing.set()
            native.interrupt(self.address)
            thread.join(0.05)
        if reason == _ANOTHER:
            raise wrong_identity(self.address)
        if reason:
            raise ReadFailed(
                f"cannot reach the transfer engine at {self.address} ({time.monotonic() - started:.3f} s): {reason}; "
                "check that its process is running and that no firewall blocks its ports for this machine"
                f"{_TWO_PORTS if self._options.protocol == 'tcp' else ''}{native.other_family(self.address)}",
                settled=True,
            )

    def _why_unreachable(self, reason: str, given_up: GivenUp) -> str:
        """Return ``reason``, or a better one: closing may be why the peer refused, or another link that gives it up."""
        is_unwanted: Callable[[], bool] = lambda: self._closing.is_set() or bool(given_up())  # noqa: E731
        moves_data = self._options.protocol == "tcp"
        found = "" if is_unwanted() else closed_port(self.address, moves_data=moves_data, unwanted=is_unwanted)
        return "closed here" if self._closing.is_set() else given_up() or found or reason

    def _left_s(self, native: NativeEngine, started: float) -> float:
        """Return for how long the peer's first answer, and then the link, is still waited for."""
        link_s = native.link_s if self._answered.is_set() else 0.0
        return started + self._options.connect_timeout_s + link_s - time.monotonic()

    def _meet(self, native: NativeEngine) -> str:
        """Make the first calls to the peer. Returns why it cannot be read, empty if it can."""
        if self.reads_with_shared or self._identity is None:
            if not (native.probe(self.address) and native.exchange_metadata(self.address)):
                return "it refused the connection"
            if self._identity is None:
                return ""
        self._answered.set()
        nonce = self._read_nonce(native, self._identity, native.link_s or self._options.connect_timeout_s)
        if nonce is None and native.link_s and self._broken and not self._closing.is_set():
            return f"CANN did not make the link within {native.link_s:g} s ({TRANSFER_TIMEOUT}), and is still trying"
        if nonce is None:
            return "it refused the connection or the read"
        return "" if nonce == self._identity.nonce else _ANOTHER

    def _read_nonce(self, native: NativeEngine, identity: Identity, timeout_s: float) -> bytes | None:
        """Read the peer's number where ``identity`` says that it lies; None if that fails."""
        deadline = time.monotonic() + timeout_s
        with ExitStack() as borrowing:
            scratch = borrowing.enter_context(self._engine.scratch.borrow())
            if scratch is None:
                return None
            descriptor = (np.array([value], np.int64) for value in (scratch, identity.address, NONCE_BYTES))
            batch = submit(native, self.address, Copies(*descriptor))
            if batch is None:
                return None
            while not (state := batch.look()).is_final and not self._closing.is_set() and time.monotonic() < deadline:
                time.sleep(self._limits.shortest_pause_s)
            if not state.is_final:
                self._broken = "broken by an identity that could not be read"
                self._watch(Leftover(self.address, [batch], borrowing.pop_all().close))
            return self._engine.identities.read(scratch, NONCE_BYTES) if state is State.DONE else None

    def prove(self, timeout_s: float) -> None:
        """See the contract. Afterwards, a link that was not proven refuses to read."""
        if self._identity is None:
            return
        with self._busy:
            self._check_usable()
            nonce = self._read_nonce(self._native, self._identity, timeout_s)
            self._used_at = time.monotonic()
            if nonce == self._identity.nonce:
                return
            self._broken = "broken: its peer could not be proven to be the right one"
            if nonce is not None:
                raise wrong_identity(self.address)
            raise ReadFailed(
                f"the transfer engine at {self.address} did not say within {timeout_s:.1f} s who it is, after it had "
                "been read",
                settled=True,
            )

    def read(self, copies: Copies, timeout_s: float, later_bytes: int = 0, given_up: GivenUp = never) -> None:
        """See the contract. After an unsettled failure the link refuses to read."""
        with self._busy:
            self._check_usable()
            self._engine.settling.check(self.address)
            check_copies(copies, self._engine.memory.table, self._peer, self.address)
            copies = split_large(copies, self._limits.piece_bytes)
            costs = self._options.costs
            reading = MooncakeRead(self._native, self.address, copies, self._limits, costs, self.window, later_bytes)
            try:
                reading.run(timeout_s, lambda: "the link was closed" if self._closing.is_set() else given_up())
            except ReadFailed as error:
                if error.settled or not self._settles(reading):
                    raise
                raise ReadFailed(str(error), settled=True) from error
            finally:
                self._used_at = time.monotonic()
                if reading.in_flight:
                    self._broken = "broken by a read that failed and must be closed first"
                    count = sum(batch.descriptors for batch in reading.in_flight)  # which they still occupy
                    release = partial(self.window.release_abandoned, len(reading.in_flight), count)
                    self._leftovers.append(Leftover(self.address, reading.in_flight, release))
                    self._watch(self._leftovers[-1])

    def _check_usable(self) -> None:
        if self._closing.is_set() or self._broken:
            raise ReadFailed(f"the link to {self.address} is {self._broken or 'closed'}", settled=True)

    def close(self) -> None:
        """See the contract. Takes milliseconds."""
        self._closing.set()
        while not self._busy.acquire(timeout=0.05):
            self._interrupt()
        try:
            while self._at_end:
                self._at_end.popleft()()
        finally:
            self._busy.release()
        self._engine.forget(self)

    @property
    def settled(self) -> bool:
        """See the contract."""
        return all(leftover.settled for leftover in self._leftovers)


class OwnEngineLink(MooncakeLink):
    """A link with an engine of its own. ``close`` deletes that, and with it all that failed reads have left in flight.

    Its first read connects it, which no other link waits for.
    """

    reads_with_shared = False

    @property
    def is_stale(self) -> bool:
        """See the contract."""
        return time.monotonic() - self._used_at > _MOST_IDLE_S

    def _start(self) -> NativeEngine:
        check_open_files()
        check_link_threads()
        native = NativeEngine(self._options)
        self._at_end.append(native.delete)
        return native

    def _settles(self, reading: MooncakeRead) -> bool:
        return False

    def _watch(self, leftover: Leftover) -> None:
        self._at_end.append(leftover.end)

    def _interrupt(self) -> None:
        """Do nothing: it would end the calls of other links to the same peer."""


class SharedEngineLink(MooncakeLink):
    """A link that reads with the engine that peers reach, whose ``Settling`` watches what failed reads leave behind."""

    reads_with_shared = True

    def _start(self) -> NativeEngine:
        return self._engine.native

    def _settles(self, reading: MooncakeRead) -> bool:
        return reading.settle(_PATIENCE_S, self._closing.is_set)

    def _watch(self, leftover: Leftover) -> None:
        self._engine.settling.add(leftover)

    def _interrupt(self) -> None:
        self._engine.native.interrupt(self.address)
