"""The second way to a prefill engine: where both run on one host with CUDA, its device memory is mapped here.

The worker's own transfer engine stays the first way: whatever does not work here goes there, and the answers are the
same. Tested against a simulated driver, not on a GPU.
"""

import logging
import mmap
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from copy import copy
from dataclasses import dataclass, field
from functools import partial

import torch

from layout.cost import ReadCost
from layout.geometry import Identity, Region, WorkerGeometry
from pd_connector.worker.device_memory import DeviceIdentityMemory
from transfer.copies.batch.base import CopierStartError
from transfer.copies.batch.cuda import CudaRuntime
from transfer.copies.batch.streams import DeviceStream
from transfer.copies.reshape.reshape_kernel import KernelUnusable, RunKernel
from transfer.engine.cuda_ipc import CudaIpcEngine, CudaIpcLink
from transfer.engine.interface import EngineStartError, GivenUp, Link, ReadFailed, TransferEngine, never

logger = logging.getLogger(__name__)

#: How long a rank is read the first way after the second has failed.
_RETRY_S = 60.0


class TwoWayEngine(TransferEngine):
    """A worker's transfer engine, and beside it the one for peers on the same host, which ``SameHostLinks`` uses."""

    def __init__(self, first: TransferEngine, second: CudaIpcEngine) -> None:
        self.first = first
        self.second = second

    @property
    def address(self) -> str:
        """See the contract. Of the first way."""
        return self.first.address

    @property
    def identity(self) -> Identity:
        """See the contract. Of the first way."""
        return self.first.identity

    def register(self, regions: Sequence[Region]) -> None:
        """See the contract."""
        self.first.register(regions)
        self.second.register(regions)

    def open(
        self, address: str, regions: Sequence[Region], identity: Identity | None = None, given_up: GivenUp = never
    ) -> Link:
        """See the contract. The first way."""
        return self.first.open(address, regions, identity, given_up)

    def close(self) -> None:
        """See the contract."""
        try:
            self.second.close()
        finally:
            self.first.close()

    def check_settled(self) -> None:
        """See the contract."""
        self.first.check_settled()
        self.second.check_settled()


def first_way(engine: TransferEngine) -> TransferEngine:
    """Return what reads the first way only."""
    return engine.first if isinstance(engine, TwoWayEngine) else engine


def same_host_address(engine: TransferEngine | None) -> str:
    """Return what peers on the same host need to map this worker's memory; empty if they cannot, and log why."""
    if not isinstance(engine, TwoWayEngine):
        return ""
    address = engine.second.address
    if not address and engine.second.exports:
        logger.info(
            "PDConnector: decode engines on this host cannot map this worker's KV caches (CUDA IPC), and read them as "
            "others do: %s", engine.second.refusal,
        )  # fmt: skip
    return address


def second_way(*, is_read: bool, reads: bool) -> CudaIpcEngine:
    """Return the engine for peers on this host, on the CUDA device of the calling thread.

    ``is_read``: they read this worker's memory; ``reads``: it reads theirs.

    Raises:
        CopierStartError, EngineStartError, MemoryError: it cannot be used here.
    """
    device = torch.device("cuda", torch.cuda.current_device())
    identities = DeviceIdentityMemory(mmap.PAGESIZE, device) if is_read else None
    open_stream = partial(DeviceStream, "cuda", device.index)
    return CudaIpcEngine(CudaRuntime.load(), open_stream, identities, kernel=_kernel(device) if reads else None)


def with_second_way(engine: TransferEngine, *, is_read: bool, reads: bool = True) -> TransferEngine:
    """Return an engine for peers on this host, too, on the CUDA device of the calling thread.

    The arguments are those of ``second_way``. Returns ``engine`` itself, and logs why, if that cannot be.
    """
    try:
        second = second_way(is_read=is_read, reads=reads)
    except (CopierStartError, EngineStartError, MemoryError, OSError) as error:  # OSError: /proc does not tell
        logger.warning("PDConnector: peers on this host are read as others are, not over CUDA IPC: %s", error)
        return engine
    return TwoWayEngine(engine, second)


def _kernel(device: torch.device) -> RunKernel | None:
    try:
        return RunKernel(device)
    except KernelUnusable as error:
        logger.warning("PDConnector: the driver copies over CUDA IPC, which is slower than by a kernel: %s", error)
        return None


@dataclass
class _Known:
    """What all threads know of the second way to a prefill engine."""

    refused_until: dict[int, float] = field(default_factory=dict)  # monotonic seconds, by rank
    is_said: bool = False  # whether it is used or why it is not


class SameHostLinks:
    """One thread's links to the ranks of a prefill engine whose memory this process maps.

    When the control connection to the engine ends, they are closed: the memory of a dead process stays taken for as
    long as anybody has it mapped.
    """

    def __init__(
        self,
        engine: CudaIpcEngine,
        workers: Sequence[WorkerGeometry],
        name: str,
        until_lost: Callable[[], Future[None]],
    ) -> None:
        """Open no link yet.

        Args:
            engine: the one for peers on this host.
            workers: the prefill engine's ranks.
            name: of the prefill engine, for people.
            until_lost: returns a future that is done when the control connection to it has ended.
        """
        self._engine = engine
        self._workers = workers
        self._name = name
        self._until_lost = until_lost
        self._known = _Known()
        self._links: dict[int, CudaIpcLink] = {}
        self._lost: Future[None] | None = None

    def with_own_links(self) -> "SameHostLinks":
        """Return the same for another thread: no link is open yet."""
        other = copy(self)
        other._links, other._lost = {}, None
        return other

    @property
    def ranks(self) -> frozenset[int]:
        """The ranks to which there are links."""
        return frozenset(self._links)

    @property
    def ranks_on_other_devices(self) -> frozenset[int]:
        """Those of them whose GPU is not this process's."""
        return frozenset(rank for rank, link in self._links.items() if link.is_between_devices)

    def cost(self, rank: int) -> ReadCost | None:
        """Return what reads over the link to a rank cost; None if there is none."""
        link = self._links.get(rank)
        return None if link is None else link.cost

    def link(self, rank: int) -> CudaIpcLink | None:
        """Return the link to a rank, and open it if there is none; None if the rank is to be read the first way."""
        link = self._links.get(rank)
        if link is not None and link.is_stale:
            self._links.pop(rank).close()
            link = None
        if link is None and time.monotonic() >= self._known.refused_until.get(rank, 0.0):
            try:
                link = self._open(rank)
            except ReadFailed as error:
                self._refuse(rank, str(error))
        return link

    def _open(self, rank: int) -> CudaIpcLink:
        worker = self._workers[rank]
        if not worker.same_host_address:
            raise ReadFailed("it shares no memory; its log says why if it is on this host", settled=True)
        if self._lost is None or self._lost.done():
            self._lost = self._until_lost()
            self._lost.add_done_callback(self._end)
        link = self._links[rank] = self._engine.open(worker.same_host_address, worker.regions)
        if self._lost.done():  # too early for ``_end`` to know this link
            self._links.pop(rank).close()
            raise ReadFailed("the control connection to it has ended", settled=True)
        if not self._known.is_said:
            self._known.is_said = True
            logger.info("PDConnector: %s is on this host, and its memory is read over CUDA IPC", self._name)
        return link

    def _refuse(self, rank: int, reason: str) -> None:
        self._known.refused_until[rank] = time.monotonic() + _RETRY_S
        if not self._known.is_said:
            self._known.is_said = True
            logger.info(
                "PDConnector: %s is read by the transfer engine's protocol, not over CUDA IPC: rank %d: %s",
                self._name, rank, reason,
            )  # fmt: skip

    def drop(self, rank: int) -> bool:
        """Close the link to a rank, after which it is read the first way for a while; False if there is none."""
        link = self._links.pop(rank, None)
        if link is None:
            return False
        self._known.is_said = False
        self._refuse(rank, "a read over CUDA IPC has failed, as the log says")
        link.close()
        return True

    def _end(self, lost: "Future[None]") -> None:
        if not lost.cancelled():
            self.abandon()

    def abandon(self) -> None:
        """Close the links soon. Any thread; never waits."""
        for link in list(self._links.values()):
            link.abandon()

    def close(self) -> None:
        """Close the links."""
        if self._lost is not None:
            self._lost.cancel()
        while self._links:
            self._links.popitem()[1].close()
