"""The transfer engine between processes of one host with CUDA: a reader maps its peer's memory and copies from it.

The peer takes no part. Its address has a handle for each of its allocations; that is a capability to read and write
them, so the address goes to authenticated peers only, and is never logged: ``ExportedMemory.name`` is.

What a reader has mapped stays taken also when its owner dies, and whoever starts again on that GPU lacks it. So a link
must be closed as soon as its peer is known to have ended: ``CudaIpcLink.abandon``. The number of a dead peer can still
be read, so ``prove`` tells who wrote what was read, and not that he lives.

Tested against a simulated driver, not on a GPU. ``cuda_ipc_address`` has the address.
"""

import ctypes
import logging
import mmap
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from layout.copies import Copies, Int64Array
from layout.cost import ReadCost
from layout.geometry import Identity, Region
from layout.regions import RegionTable, describe_region
from transfer.copies.batch.base import CopierStartError, CopyFailed, DeviceEvent, Direction, Pauses
from transfer.copies.batch.cuda import CudaRuntime, IpcRefused
from transfer.copies.batch.device import DeviceBackend
from transfer.copies.batch.streams import DeviceStream
from transfer.engine.batches import RegisteredMemory, check_copies
from transfer.engine.cuda_ipc_address import Allocation, ExportedMemory, ProcessPlace, check_shares_host
from transfer.engine.cuda_ipc_copies import MappedCopies, MappedMemory, PlacedCopies, warm_up
from transfer.engine.identity import (
    NONCE_BYTES,
    HostIdentityMemory,
    IdentityMemory,
    OwnIdentity,
    check_identity,
    wrong_identity,
)
from transfer.engine.interface import EngineStartError, GivenUp, Link, ReadFailed, TransferEngine, never
from transfer.memory import PinnedMemory

if TYPE_CHECKING:
    from transfer.copies.reshape.reshape_kernel import RunKernel  # which needs torch

logger = logging.getLogger(__name__)

#: How long a read that fails, and a link that closes, wait for copies in flight: on one host, copies take milliseconds.
_PATIENCE_S = 1.0

#: For the peer's number, when a link is opened.
_OPEN_S = 5.0


class CudaIpcEngine(TransferEngine):
    """Owns the handles of a worker's device memory, its mappings of other processes' memory, and the links over them.

    Safe to use from any thread: one lock guards the links, another the mappings.
    """

    def __init__(
        self,
        runtime: CudaRuntime,
        open_stream: Callable[[], DeviceStream],
        identities: IdentityMemory | None = None,
        here: ProcessPlace | None = None,
        kernel: "RunKernel | None" = None,
    ) -> None:
        """Find out where this process runs, and on which device.

        Args:
            runtime: the driver.
            open_stream: returns a new stream of the device whose memory is registered.
            identities: a page of device memory, where peers find this engine's number; None: peers read nothing here.
            here: None for what the system says.
            kernel: of the device, to copy what the driver copies slowly; None: the driver copies everything.

        Raises:
            EngineStartError: the driver does not name the device.
        """
        self.runtime = runtime
        self.here = here or ProcessPlace.here()
        self.kernel = kernel
        self.memory = RegisteredMemory()
        self.on_device = RegionTable(())  # what of it is device memory
        self.refusal = "" if identities is not None else "nobody reads this engine"
        self._open_stream = open_stream
        self.exports = identities is not None  # whether peers read this engine
        self._identities = identities or HostIdentityMemory(mmap.PAGESIZE)
        self._own = OwnIdentity(self._identities)
        self._allocations: dict[int, Allocation] = {}  # by address
        self._lock = threading.Lock()
        self._links: set[CudaIpcLink] = set()
        #: Of links that have settled. torch takes streams from a pool of 32, in turn: were each link to take one, some
        #: would be the model's, and its copies wait for all that the model was given.
        self._idle_streams = [open_stream()]
        self._closed = False
        self._mapping = threading.Lock()
        self._mapped: dict[bytes, Region] = {}  # where it is here, by handle
        self._users: Counter[bytes] = Counter()  # links, by handle
        self._abandoned = ThreadPoolExecutor(1, "pd-unmap")
        # Compile, so that no read does.
        warm_up()
        DeviceBackend(runtime, self._idle_streams[0], Direction.PEER_TO_DEVICE).enter_thread()
        try:
            self.device = runtime.device_uuid()
        except IpcRefused as error:
            raise EngineStartError(f"the GPU of this process is not known: {error}") from error
        if self.exports:
            self._export([self._own.region])

    @property
    def address(self) -> str:
        """See the contract. A secret. Empty if peers cannot map all that is registered: ``refusal`` says why."""
        if self.refusal:
            return ""
        with self._lock:
            allocations = tuple(self._allocations.values())
        return ExportedMemory(self.here, self.device, self._own.identity, allocations).encode()

    @property
    def identity(self) -> Identity:
        """See the contract."""
        return self._own.identity

    def register(self, regions: Sequence[Region]) -> None:
        """See the contract. Host memory is registered for this engine's reads only. Call it with the device set."""
        self.memory.add(regions, self._take)

    def _take(self, regions: Sequence[Region]) -> None:
        of_device = [region for region in regions if self.runtime.is_device(region.address)]
        self.on_device = RegionTable((*self.on_device.regions, *of_device))
        if self.exports:
            self._export(of_device)

    def _export(self, regions: Sequence[Region]) -> None:
        """Get the handles of the allocations in which ``regions`` of device memory lie."""
        for region in regions:
            try:
                at = self.runtime.allocation(region.address)
                if region.end > at.end:
                    self.refusal = f"the {describe_region(region)} lies in several allocations"
                elif at.address not in self._allocations:
                    handle = self.runtime.handle(at.address)
                    with self._lock:
                        self._allocations[at.address] = Allocation(at.address, at.size, handle)
            except IpcRefused as error:
                self.refusal = str(error)

    def open(
        self, address: str, regions: Sequence[Region], identity: Identity | None = None, given_up: GivenUp = never
    ) -> "CudaIpcLink":
        """See the contract. Maps the peer's memory and reads its number, which always proves who it is."""
        exported = ExportedMemory.decode(address)
        check_identity(identity or exported.identity, exported.name)
        check_shares_host(self.here, exported)
        try:
            peer, allocations = RegionTable(regions), RegionTable([each.region for each in exported.allocations])
        except ValueError as error:
            raise ReadFailed(f"cannot open a link to {exported.name}: {error}", settled=True) from error
        with self._lock:
            if self._closed:
                raise ReadFailed("this engine for peers on the same host is closed", settled=True)
            try:
                stream = self._idle_streams.pop() if self._idle_streams else self._open_stream()
            except CopierStartError as error:
                raise ReadFailed(f"cannot open a link to {exported.name}: {error}", settled=True) from error
            link = CudaIpcLink(self, exported, peer, allocations, identity or exported.identity, stream)
            self._links.add(link)
        try:
            link.connect()
        except BaseException:
            link.close()
            raise
        with self._lock:
            ended = [each for each in self._links if each.is_of_earlier_life(link)]
        for each in ended:
            each.abandon()
        return link

    def map_memory(self, allocations: Sequence[Allocation]) -> Int64Array:
        """Return where each allocation begins here. Shape [n]. Each is mapped once, whatever number of links has it.

        Raises:
            IpcRefused: the driver does not map one, or not as much as is announced; then none is held.
        """
        held: list[Allocation] = []
        try:
            with self._mapping:
                for each in allocations:
                    if each.handle not in self._mapped:
                        self._mapped[each.handle] = self._map(each)
                    self._users[each.handle] += 1
                    held.append(each)
                    if each.size > (size := self._mapped[each.handle].size):  # else what lies behind could be read
                        raise IpcRefused(
                            f"it announces an allocation of {each.size} bytes, and the driver has mapped {size}; its "
                            "connector is of another version, or broken: restart it"
                        )
                return np.array([self._mapped[each.handle].address for each in allocations], np.int64)
        except BaseException:
            self.unmap(held)
            raise

    def _map(self, announced: Allocation) -> Region:
        """Map an allocation; return where it is here, and as much of it as the driver says, if it does."""
        address = self.runtime.map_handle(announced.handle)
        try:
            return Region(address, self.runtime.allocation(address).end - address)
        except IpcRefused as error:
            logger.debug("the driver does not say how large what it has mapped is: %s", error)
            return Region(address, announced.size)

    def unmap(self, allocations: Sequence[Allocation]) -> None:
        """Let go of what ``map_memory`` has returned: with the last link, the mapping ends."""
        with self._mapping:
            for each in allocations:
                self._users[each.handle] -= 1
                if self._users[each.handle] > 0:
                    continue
                del self._users[each.handle]
                try:
                    self.runtime.unmap(self._mapped.pop(each.handle).address)
                except IpcRefused as error:
                    logger.warning("a peer's memory may stay taken until this process ends: %s", error)

    def close_soon(self, link: "CudaIpcLink") -> None:
        """Close a link on another thread, as soon as possible."""
        with self._lock:
            if self._closed:
                return
            try:
                closing = self._abandoned.submit(link.close)
            except RuntimeError as error:  # no thread can be started: the link is stale, and its owner closes it
                logger.warning("the memory of %s stays taken until its link is closed: %s", link.name, error)
                return
        closing.add_done_callback(partial(_log_failure, link.name))

    def forget(self, link: "CudaIpcLink") -> None:
        """Remove a link that has closed and settled, and keep its stream for the next one. Idempotent."""
        with self._lock:
            if link in self._links:
                self._links.remove(link)
                self._idle_streams.append(link.stream)

    def check_settled(self) -> None:
        """See the contract."""
        with self._lock:
            links = list(self._links)
        busy = sorted(link.name for link in links if not link.settled)  # which lets go of one that has
        if busy:
            raise RuntimeError(f"copies from {', '.join(busy)} have not ended, and may still write to the caches")

    def check_integrity(self) -> None:
        """Raise AssertionError unless every mapping has links, as many as are counted."""
        with self._mapping:
            assert self._users.keys() == self._mapped.keys(), "a mapping has no link, or a link no mapping"
            assert all(number > 0 for number in self._users.values()), "a mapping is counted for no link"

    def close(self) -> None:
        """See the contract. Takes back this engine's number, so that nobody is taken for it any more.

        If the device does not end a copy within a second, its link has not settled, and only the device can tell when.
        """
        with self._lock:
            if self._closed:
                return
            self._closed = True
            links = list(self._links)
        self._abandoned.shutdown(cancel_futures=True)
        for link in links:
            link.close()
        self.memory.close()
        try:
            self._identities.write(self._own.region.address, bytes(NONCE_BYTES))
        except RuntimeError as error:  # of the device
            logger.warning("this engine's number stays in its memory: %s", error)


def _log_failure(name: str, closed: "Future[None]") -> None:
    if not closed.cancelled() and (error := closed.exception()) is not None:
        logger.error("the memory of %s may stay taken: its link could not be closed", name, exc_info=error)


class CudaIpcLink(Link):
    """A link to one peer: its mapped memory, a stream, and what failed reads have left on that.

    One thread at a time may read; any may ``close`` or ``abandon``, which ends a read.
    """

    lands = True  # reads are polled until the device is done

    def __init__(
        self,
        engine: CudaIpcEngine,
        exported: ExportedMemory,
        peer: RegionTable,
        allocations: RegionTable,
        identity: Identity,
        stream: DeviceStream,
    ) -> None:
        self.name = exported.name
        self.is_between_devices = exported.device != engine.device
        self._engine = engine
        self._peer = peer
        self._table = allocations
        self._allocations = sorted(exported.allocations, key=lambda each: each.address)  # as the table's starts
        self._place = exported.place
        self._identity = identity
        self.stream = stream
        batches = DeviceBackend(engine.runtime, stream, Direction.PEER_TO_DEVICE)
        self._copies = MappedCopies(batches, engine.kernel, stream, is_between_devices=self.is_between_devices)
        self._mapped_at: Int64Array | None = None  # shape [allocations]; None: nothing is mapped
        self._scratch: PinnedMemory | None = None  # for the peer's number
        self._busy = threading.Lock()  # held while it reads, and by ``close``
        self._settling = threading.Lock()  # guards what becomes of copies in flight
        self._closing = threading.Event()
        self._is_closed = False  # nothing but what is in flight uses the mapping
        self._broken = ""  # why reads are refused, "" if they are not
        self._in_flight: list[DeviceEvent] = []  # the ends of reads that have failed
        self._never_settles = False  # after an error of the device

    @property
    def cost(self) -> ReadCost:
        """See the contract."""
        return self._copies.cost

    def connect(self) -> None:
        """Map the peer's memory, and find out whether it is the right peer.

        Raises:
            ReadFailed: the driver does not map it, or its owner has ended or is another (always settled).
        """
        self.stream.enter_thread()
        try:
            self._scratch = self._engine.runtime.pinned(mmap.PAGESIZE)
            self._mapped_at = self._engine.map_memory(self._allocations)
        except (IpcRefused, CopierStartError) as error:
            raise ReadFailed(f"cannot reach the transfer engine at {self.name}: {error}", settled=True) from error
        self.prove(_OPEN_S)

    def read(self, copies: Copies, timeout_s: float, later_bytes: int = 0, given_up: GivenUp = never) -> None:
        """See the contract. After an unsettled failure the link refuses to read."""
        with self._busy:
            self._check_usable()
            if len(copies):
                tables = self._engine.memory.table, self._engine.on_device, self._peer
                self._copy(self._placed(copies, tables), timeout_s, given_up)

    def prove(self, timeout_s: float) -> None:
        """See the contract. Afterwards, a link that was not proven refuses to read. A peer that was killed is proven.

        A peer that has closed its engine is not.
        """
        with self._busy:
            self._check_usable()
            assert self._scratch is not None, "a link is proven before it is connected"
            scratch, number = self._scratch.region, Region(self._identity.address, NONCE_BYTES)
            columns = (np.array([each], np.int64) for each in (scratch.address, number.address, NONCE_BYTES))
            tables = RegionTable((scratch,)), RegionTable(()), RegionTable((number,))
            try:
                self._copy(self._placed(Copies(*columns), tables), timeout_s, never)
            except ReadFailed as error:  # which may still write, but to the scratch memory only
                raise ReadFailed(f"{self.name} did not prove who it is: {error}", settled=True) from error
            nonce = ctypes.string_at(scratch.address, NONCE_BYTES)
            if nonce == self._identity.nonce:
                return
            self._broken = "broken: its peer could not be proven to be the right one"
            if any(nonce):
                raise wrong_identity(self.name)
            raise ReadFailed(f"cannot reach the transfer engine at {self.name}: it has been closed", settled=True)

    def _placed(self, copies: Copies, tables: tuple[RegionTable, RegionTable, RegionTable]) -> PlacedCopies:
        """Return the copies with where their sources are mapped. ``tables``: the first ones of ``MappedMemory``.

        Raises:
            ReadFailed: one is not in the peer's allocations (settled).
            ValueError: see the contract.
        """
        at = self._mapped_at
        placed = self._copies.place(copies, MappedMemory(*tables, self._table, at)) if at is not None else None
        if placed is None:
            check_copies(copies, tables[0], tables[2], self.name)
            outside = self._table.outside(copies.sources, copies.sizes)
            raise ReadFailed(
                f"read from {self.name} failed: {int(outside.sum())} of {len(copies)} sources are outside the "
                "allocations that it shares; nothing was read",
                settled=True,
            )
        return placed

    def _copy(self, placed: PlacedCopies, timeout_s: float, given_up: GivenUp) -> None:
        """Copy on this link's stream; return when all bytes have landed. Fails as ``Link.read`` does."""
        self._copies.enter_thread()
        deadline = time.monotonic() + timeout_s
        try:
            end = self._copies.start(placed)
        except CopyFailed as failure:
            if not failure.settled:
                self._leave(None)
            raise ReadFailed(f"read from {self.name} failed: {failure}", settled=failure.settled) from failure
        reason, patience_ends, pauses = "", deadline, Pauses()
        while not self._has_ended(end):
            now = time.monotonic()
            if not reason:
                reason = "the link was closed" if self._closing.is_set() else given_up()
                reason = reason or (f"it did not finish within {timeout_s:.3f} s" if now >= deadline else "")
                patience_ends = now + _PATIENCE_S
            elif now >= patience_ends:
                self._leave(end)
                raise self._failed(reason, placed.copies, settled=False)
            time.sleep(pauses.next_s())
        if reason:
            raise self._failed(reason, placed.copies, settled=True)

    def _has_ended(self, end: DeviceEvent) -> bool:
        try:
            return end.query()
        except Exception as error:  # of the device: torch raises RuntimeError
            self._leave(None)
            raise ReadFailed(f"read from {self.name} failed: the device failed: {error}", settled=False) from error

    def _leave(self, end: DeviceEvent | None) -> None:
        """Remember what a failed read leaves in flight; None: nothing will tell when that ends."""
        self._broken = "broken by a read that failed and must be closed first"
        with self._settling:
            if end is None:
                self._never_settles = True
            else:
                self._in_flight.append(end)

    def _failed(self, reason: str, copies: Copies, *, settled: bool) -> ReadFailed:
        return ReadFailed(
            f"read from {self.name} failed: {reason}; the whole read is {len(copies)} descriptors, "
            f"{copies.total_bytes} bytes",
            settled=settled,
        )

    def _check_usable(self) -> None:
        if self._closing.is_set() or self._broken:
            raise ReadFailed(f"the link to {self.name} is {self._broken or 'closed'}", settled=True)

    def is_of_earlier_life(self, other: "CudaIpcLink") -> bool:
        """Return whether ``other`` is of the same process, and its engine of another life: this one has ended."""
        return self._place == other._place and self._identity != other._identity

    def abandon(self) -> None:
        """Close the link soon, because its peer has ended: read no more of its memory, and let go of it. Any thread."""
        self._closing.set()
        self._engine.close_soon(self)

    @property
    def is_stale(self) -> bool:
        """See the contract: it has been abandoned."""
        return self._closing.is_set()

    def close(self) -> None:
        """See the contract. Waits for the device, a second at most; when all copies have ended, so does the mapping."""
        self._closing.set()
        with self._busy:
            self._is_closed = True
            until, pauses = time.monotonic() + _PATIENCE_S, Pauses()
            while not self.settled and not self._never_settles and time.monotonic() < until:
                time.sleep(pauses.next_s())
        if not (self.settled or self._never_settles):
            self._engine.close_soon(self)

    @property
    def settled(self) -> bool:
        """See the contract. What finds a closed link settled ends its mappings, which may take milliseconds.

        After an error of the device, nothing settles: it ends with the process.
        """
        with self._settling:
            if self._in_flight or self._is_closed:
                self.stream.enter_thread()
            try:
                self._in_flight = [end for end in self._in_flight if not end.query()]
            except Exception:
                logger.exception("the copies from %s may never be known to have ended", self.name)
                self._in_flight, self._never_settles = [], True
            if self._in_flight or self._never_settles:
                return False
            if self._is_closed:
                self._let_go()
            return True

    def _let_go(self) -> None:
        if self._mapped_at is not None:
            self._mapped_at = None
            self._engine.unmap(self._allocations)
        if self._scratch is not None:
            self._scratch.close()
            self._scratch = None
        self._engine.forget(self)
