"""The transfer engine over Mooncake: which engine a link uses, how a batch is submitted, and when it has settled.

On TCP the engine that peers reach is passive: it holds the registered memory and reads nothing. Every link has its own
Mooncake engine, with no memory registered. A peer that hangs, breaks its connection or restarts then harms only its own
link, and deleting that engine is the only way with Mooncake to be sure that no more bytes arrive. On RDMA and Ascend,
memory must be registered with the engine that reads into it, and connections are expensive. There all links share one
engine, and a failed read has settled once its time has passed.

``mooncake_read`` runs one read, ``mooncake_native`` holds the calls into the library, ``batches`` checks a batch.
"""

import ctypes
import difflib
import math
import threading
import time
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from layout.copies import Copies
from layout.geometry import Region
from layout.regions import RegionTable
from transfer.engine.base import EngineStartError, Link, ReadFailed, TransferEngine
from transfer.engine.batches import RegisteredMemory, Window, check_copies, split_large
from transfer.engine.mooncake_native import NativeEngine, NativeOptions, split_address
from transfer.engine.mooncake_read import SHORTEST_POLL_S, MooncakeRead

PROTOCOLS = ("tcp", "rdma", "ascend")
INFINIBAND_DEVICES = Path("/sys/class/infiniband")

#: Larger descriptors are split on TCP. This bounds what may still be in progress when the last descriptor of a call is
#: done, and so how far a read can overrun its timeout. Speed hardly changes (medians on loopback, in turns): one run of
#: 34 MB took 17.0 ms whole, 21.5 in pieces of 4 MiB, 20.2 in pieces of 1 MiB; eight runs took 103, 104 and 133.
TCP_PIECE_BYTES = 4 * 1024 * 1024

_TCP_CONNECTIONS_PER_PEER = 4  # Mooncake's default; each processes its descriptors one by one
_PROBE_BYTES = 64
_SETTLE_MARGIN_S = 1.0


@dataclass(frozen=True, slots=True)
class MooncakeOptions:
    """Options of a Mooncake engine and its reads.

    Raises:
        EngineStartError: a value is out of range or unknown.
    """

    host: str  # this machine's address as peers reach it, without port
    protocol: str = "tcp"  # one of PROTOCOLS
    devices: str = ""  # comma-separated network devices, "" for all
    descriptors_per_call: int = 256
    max_descriptors_in_flight: int = 1024  # to one peer, over all threads
    progress_timeout_s: float = 10.0  # a transfer that moves no byte for this long has failed
    connect_timeout_s: float = 5.0  # for a peer's first answer
    engine_per_link: bool | None = None  # whether each link has its own engine; None: only on TCP

    def __post_init__(self) -> None:
        if self.protocol not in PROTOCOLS:
            near = difflib.get_close_matches(self.protocol.lower(), PROTOCOLS, n=1, cutoff=0.4)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise EngineStartError(f"unknown protocol {self.protocol!r}; it must be {' or '.join(PROTOCOLS)}{hint}")
        self._check_host()
        if not 0 < self.descriptors_per_call <= self.max_descriptors_in_flight:
            raise EngineStartError(
                f"descriptors_per_call {self.descriptors_per_call} must be from 1 to max_descriptors_in_flight "
                f"{self.max_descriptors_in_flight}"
            )
        if self.progress_timeout_s <= 0 or self.connect_timeout_s <= 0:
            raise EngineStartError(
                f"progress_timeout_s {self.progress_timeout_s} and connect_timeout_s {self.connect_timeout_s} must be "
                "above 0 seconds"
            )

    def _check_host(self) -> None:
        if not self.host or self.host in ("0.0.0.0", "::"):  # noqa: S104  refused, not bound
            raise EngineStartError(
                f"host {self.host!r} is not an address that a peer can reach: use an address of this machine"
            )
        if self.host.startswith("[") or self.host.count(":") == 1:
            raise EngineStartError(f"host {self.host!r} must be without port and brackets: the OS chooses the port")

    @property
    def isolated(self) -> bool:
        """Whether each link has its own engine."""
        return self.protocol == "tcp" if self.engine_per_link is None else self.engine_per_link

    @property
    def native(self) -> NativeOptions:
        """The options that start the library."""
        return NativeOptions(self.host, self.protocol, self.devices, self.progress_timeout_s, self.connect_timeout_s)


class MooncakeEngine(TransferEngine):
    """Owns a worker's memory as registered with Mooncake, and its links to peers.

    Safe to use from any thread: one lock guards the set of open links and the windows.

    Raises:
        EngineStartError: Mooncake is not installed, or does not start with these options.
    """

    def __init__(self, options: MooncakeOptions) -> None:
        if options.protocol == "rdma" and not (INFINIBAND_DEVICES.is_dir() and any(INFINIBAND_DEVICES.iterdir())):
            raise EngineStartError(
                f"protocol is 'rdma', but this machine has no RDMA device in {INFINIBAND_DEVICES}: pass the devices "
                "into the container, or use protocol 'tcp'"
            )
        self._options = options
        self._lock = threading.Lock()
        self.memory = RegisteredMemory()
        self._links: set[MooncakeLink] = set()
        self._windows: weakref.WeakValueDictionary[str, Window] = weakref.WeakValueDictionary()
        self._closed = False
        self._native = NativeEngine(options.native)
        self._address = self._native.address

    @property
    def address(self) -> str:
        """Where peers reach this engine."""
        return self._address

    def register(self, regions: Sequence[Region]) -> None:
        """See the contract. Registers all ``regions`` or none. Holds the GIL, so use it at start-up only."""
        self.memory.add(regions, self._native.register)

    def open(self, address: str, regions: Sequence[Region]) -> "MooncakeLink":
        """See the contract. On TCP, connects and reads a few bytes, so that the first real read finds a warm link."""
        try:
            split_address(address)
            peer = RegionTable(regions)
        except ValueError as error:
            raise ReadFailed(f"cannot open a link to {address}: {error}", settled=True) from error
        with self._lock:
            if self._closed:
                raise ReadFailed(f"transfer engine {self._address} is closed", settled=True)
            window = self._windows.setdefault(address, Window(self._options.max_descriptors_in_flight))
        try:
            native = NativeEngine(self._options.native) if self._options.isolated else self._native
        except EngineStartError as error:
            raise ReadFailed(f"cannot open a link to {address}: {error}", settled=True) from error
        link = MooncakeLink(self, self._options, native, address, peer, window)
        try:
            link.connect()
        except BaseException:
            link.close()
            raise
        with self._lock:
            if not self._closed:
                self._links.add(link)
                return link
        link.close()
        raise ReadFailed(f"transfer engine {self._address} was closed while it opened {address}", settled=True)

    def forget(self, link: "MooncakeLink") -> None:
        """Remove a link that has closed."""
        with self._lock:
            self._links.discard(link)

    def check_integrity(self) -> None:
        """Raise AssertionError unless each open link uses its peer's one window, and the windows' counts are right."""
        with self._lock:
            for link in self._links:
                assert self._windows.get(link.address) is link.window, f"{link.address} has two windows"
            for window in self._windows.values():
                window.check_integrity()

    def close(self) -> None:
        """See the contract."""
        with self._lock:
            self._closed = True
            links = list(self._links)
        for link in links:
            link.close()
        self.memory.close()
        with self._lock:
            self._native.delete()


class MooncakeLink(Link):
    """A link to one peer. One thread at a time may ``read``; any thread may ``close``, which ends a read."""

    def __init__(
        self,
        engine: MooncakeEngine,
        options: MooncakeOptions,
        native: NativeEngine,
        address: str,
        peer: RegionTable,
        window: Window,
    ) -> None:
        self.address = address  # of the peer
        self.window = window  # the descriptors in flight to the peer
        self._engine = engine
        self._options = options
        self._native = native
        self._peer = peer
        self._busy = threading.Lock()  # held by a read, and by close when it ends the engine
        self._closing = threading.Event()
        self._closed = False
        self._broken = ""  # why reads are refused, "" if they are not
        self._unsettled = 0  # descriptors of failed reads that still occupy the window
        self._settled_at = 0.0  # monotonic; used if the engine is shared

    def connect(self) -> None:
        """Wait for the peer's first answer, up to the connect timeout: on TCP, read a few bytes of its first region.

        Raises:
            ReadFailed: the peer did not answer (always settled: only the link's own scratch memory was written).
        """
        started = time.monotonic()
        answers: list[bool] = []
        attempt = self._probe_by_reading if self._options.isolated and self._peer.regions else self._probe
        # Mooncake's first call to a peer takes no timeout, so another thread makes it.
        thread = threading.Thread(target=lambda: answers.append(attempt()), name="pd-connect", daemon=True)
        thread.start()
        thread.join(self._options.connect_timeout_s)
        late = thread.is_alive()
        while thread.is_alive():
            self._closing.set()
            self._native.interrupt(self.address)
            thread.join(0.05)
        if late or answers != [True]:
            took = f"{time.monotonic() - started:.3f} s"
            reason = "it accepts connections but does not answer" if late else "it refused the connection or the read"
            raise ReadFailed(
                f"cannot reach the transfer engine at {self.address} ({took}): {reason}; check that its process is "
                "running and that no firewall blocks its ports for this machine",
                settled=True,
            )

    def _probe(self) -> bool:
        return self._native.probe(self.address)

    def _probe_by_reading(self) -> bool:
        region = self._peer.regions[0]
        size = min(_PROBE_BYTES, region.size)
        scratch = (ctypes.c_char * size)()
        batch = self._native.submit(self.address, [ctypes.addressof(scratch)], [region.address], [size])
        if not batch:
            return False
        while (state := self._native.poll(batch)) == 0 and not self._closing.is_set():
            time.sleep(SHORTEST_POLL_S)
        if state != 1:
            self._native.delete()  # before the scratch memory is freed
        return state == 1

    def read(self, copies: Copies, timeout_s: float) -> None:
        """See the contract. After an unsettled failure the link refuses to read until it is closed."""
        with self._busy:
            if self._closed or self._broken:
                raise ReadFailed(f"the link to {self.address} is {self._broken or 'closed'}", settled=True)
            check_copies(copies, self._engine.memory.table, self._peer, self.address)
            if self._options.protocol == "tcp":
                copies = split_large(copies, TCP_PIECE_BYTES)
            reading = MooncakeRead(self._native, self.address, copies, self._options.descriptors_per_call, self.window)
            try:
                reading.run(timeout_s, self._closing.is_set)
            finally:
                if reading.in_flight:
                    self._unsettled = reading.in_flight
                    self._settled_at = time.monotonic() + self._settle_s(reading.in_flight)
                    self._broken = "broken by a read that failed and must be closed first"

    def _settle_s(self, in_flight: int) -> float:
        rounds = math.ceil(in_flight / _TCP_CONNECTIONS_PER_PEER) if self._options.protocol == "tcp" else 1
        return rounds * self._options.progress_timeout_s + _SETTLE_MARGIN_S

    def close(self) -> None:
        """See the contract. Takes milliseconds if the link has its own engine.

        With a shared engine, a failed read may write until everything it had in flight has run into Mooncake's progress
        timeout; this waits for that.
        """
        self._closing.set()
        with self._busy:
            if self._closed:
                return
            if self._options.isolated:
                self._native.delete()
            else:
                time.sleep(max(0.0, self._settled_at - time.monotonic()))
            self._closed = True
            self.window.release(self._unsettled)
        self._engine.forget(self)
