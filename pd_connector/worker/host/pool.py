"""A worker's part of the host blocks: checks that it fits, pins its memory, copies to and from it."""

import logging
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import numpy as np
import torch

from layout.copies import Copies
from layout.geometry import Region, WorkerGeometry
from layout.host_blocks import HostLayout, host_layout
from layout.host_slots import slot_geometry
from pd_connector.config import ConfigError
from pd_connector.orders import Orders, Report
from pd_connector.stats import StatsRecorder
from pd_connector.vllm.model_stream import event_after_steps
from pd_connector.worker.host.device_copies import CopyEnd, HostCopies
from pd_connector.worker.host.machine_memory import MachineMemory, machine_memory
from pd_connector.worker.host.placement import log_placement, near_node
from pd_connector.worker.worker_role import WorkerRole
from transfer.control.limits import ThrottledWarnings
from transfer.copies.batch.backends import Backend, open_copier, pinned_memory
from transfer.copies.batch.base import CopierStartError, CopyFailed, DeviceEvent, Direction
from transfer.copies.batch.copier import BatchCopier
from transfer.memory import PinnedMemory

logger = logging.getLogger(__name__)

_TRIED_BYTES, _TRIED_S = 64, 60.0  # copied at start, and how long that may take
_LOG_INTERVAL_S = 10.0  # each step may store

_BACKENDS = {"cpu": Backend.HOST, "cuda": Backend.CUDA, "npu": Backend.ACL}


@dataclass(frozen=True)
class HostQuota:
    """A worker's share of ``cpu_bytes_to_use``."""

    total: int  # bytes, for all workers of the engine
    workers: int  # of the engine
    workers_here: int  # those of them on this machine

    @property
    def bytes(self) -> int:
        """Bytes for this worker."""
        return self.total // self.workers

    def slots(self, layout: HostLayout) -> int:
        """Return how many blocks this worker's share holds.

        Raises:
            ConfigError: not even one.
        """
        slots = layout.slots_in(self.bytes)
        if slots < 1:
            raise ConfigError(
                f"cpu_bytes_to_use = {self.total}: {self.bytes} bytes for each of {self.workers} workers do not hold "
                f"one block of {layout.slot_bytes} bytes; set it to {self.workers * layout.slot_bytes} or more"
            )
        return slots

    def check_fits(self, memory: MachineMemory, *, at_once: bool) -> None:
        """Raise unless this machine has enough memory for its workers.

        ``at_once``: memory is taken when it is pinned, so what is available may already lack what other workers took.
        This check then refuses only what cannot fit in any case, and leaves the rest to the driver that pins it.

        Raises:
            ConfigError: naming both sizes and one that fits.
        """
        together = self.bytes * self.workers_here
        fits = together <= memory.total and self.bytes <= memory.available if at_once else together <= memory.available
        if not fits:
            fitting = min(memory.available, memory.total) // self.workers_here * self.workers
            others = f" (others of the {self.workers_here} workers may have taken theirs already)" if at_once else ""
            raise ConfigError(
                f"cpu_bytes_to_use = {self.total}: {together} bytes would be taken from this machine's memory, and "
                f"{memory.available} are available{others}; set it to {fitting} or less"
            )


@dataclass(frozen=True, slots=True)
class LoadEnd:
    """How a load ended on this rank, see ``PartEnd``."""

    request_id: str
    copied: CopyEnd
    is_told: bool = False
    comes_of_leaving: bool = False

    @property
    def failure(self) -> str:
        """Why the load failed; empty if it did not."""
        failure = self.copied.failure
        return failure and f"{self.copied.blocks} blocks could not be loaded from host memory: {failure}"

    def count(self, stats: StatsRecorder) -> None:
        """Record the load in the statistics."""
        if self.copied.failure:
            stats.count("host_failures", label="load")
            return
        stats.count("host_bytes", self.copied.copied_bytes, "loaded")
        stats.observe("load", self.copied.seconds)


class HostPool(WorkerRole):
    """Owns a worker's part of the host blocks: its memory, and the copies to and from it."""

    def __init__(self, copies: HostCopies, memory: PinnedMemory, slots: int, stats: StatsRecorder) -> None:
        """Take over ``memory``."""
        self.copies = copies
        self.slots = slots
        self._memory = memory
        self._stats = stats
        self._warnings = ThrottledWarnings(logger, _LOG_INTERVAL_S)

    @classmethod
    def open(
        cls, quota: HostQuota, geometry: WorkerGeometry, tensors: Sequence[torch.Tensor], stats: StatsRecorder
    ) -> "HostPool":
        """Pin a worker's memory and start its copiers. ``tensors`` are the worker's caches, all on one device.

        Raises:
            ConfigError: the quota is too small or too large, the caches cannot be kept in host memory, or the device
                refuses copies.
        """
        device = tensors[0].device
        if device.type not in _BACKENDS:
            raise ConfigError(f"cpu_bytes_to_use: KV caches on {device} cannot be kept in host memory; set it to 0")
        backend, number = _BACKENDS[device.type], device.index or 0
        try:
            layout = host_layout(geometry)
        except ValueError as error:
            raise ConfigError(f"cpu_bytes_to_use: {error}; set it to 0") from error
        slots = quota.slots(layout)
        quota.check_fits(machine_memory(), at_once=backend is not Backend.HOST)
        near, record_event = near_node(device), _event_recorder(device)
        try:
            with ExitStack() as opened:
                memory = pinned_memory(backend, slots * layout.slot_bytes, number, near.node)
                opened.callback(memory.close)
                stores = opened.enter_context(open_copier(backend, Direction.DEVICE_TO_HOST, number))
                loads = opened.enter_context(open_copier(backend, Direction.HOST_TO_DEVICE, number))
                if backend is not Backend.HOST:
                    _try_copies(memory.region, device, stores, loads, record_event())
                opened.pop_all()
        except (CopierStartError, CopyFailed, OSError, MemoryError) as error:
            raise ConfigError(f"cpu_bytes_to_use = {quota.total}: {error}") from error
        logger.info(
            "PDConnector: %d host blocks of %d bytes (%.2f GiB) on this worker, copied by the %s backend in %s",
            slots, layout.slot_bytes, memory.region.size / 2**30, backend.value,
            ", ".join(f"{len(runs)} runs" for runs in layout.groups),
        )  # fmt: skip
        log_placement(memory.region, near)
        copies = HostCopies(layout, memory.region, stores, loads, record_event)
        return cls(copies, memory, slots, stats)

    @property
    def region(self) -> Region:
        """The memory of the slots, and no other."""
        return Region(self._memory.region.address, self.slots * self.copies.layout.slot_bytes)

    def geometry(self, device: WorkerGeometry) -> WorkerGeometry:
        """Return the slots as a cache whose block ids are slot numbers, given the caches on the device.

        Raises:
            ValueError: the slots cannot be described as a cache.
        """
        return slot_geometry(device, self.copies.layout, self.region)

    def execute(self, orders: Orders) -> list[str]:
        """Start the stores and loads; return the request ids of the loads."""
        for store in orders.stores:
            self.copies.store(store)
        for load in orders.loads:
            self.copies.load(load)
        return [load.request_id for load in orders.loads]

    def take_ends(self) -> list[LoadEnd]:
        """Return the loads that have ended since the last call.

        Raises:
            UnsettledLoadError: a load failed, but the device may still be writing to KV blocks.
        """
        return [LoadEnd(request_id, copied) for request_id, copied in self.copies.take_loads().items()]

    def take_report(self) -> Report:
        """Return the stores that have ended since the last call."""
        ended = self.copies.take_stores()
        for copied, _ in ended.values():
            self._count_store(copied)
        return Report({store_id: ends for store_id, (_, ends) in ended.items()})

    def settle(self) -> None:
        """Wait until no copy touches the caches. Their ends are reported as usual, and the memory is kept.

        Raises:
            CopyFailed: the device may still be reading or writing KV blocks.
        """
        self.copies.settle()

    def join(self) -> None:
        """Wait for the copies in flight and free the memory."""
        self.copies.close()
        self._memory.close()

    def _count_store(self, copied: CopyEnd) -> None:
        if copied.failure:
            self._stats.count("host_failures", label="store")
            self._warnings.warn(
                "store",
                f"PDConnector: {copied.blocks} blocks could not be stored in host memory and will be computed again "
                f"when needed: {copied.failure}",
            )
            return
        self._stats.count("host_bytes", copied.copied_bytes, "stored")
        self._stats.observe("store", copied.seconds)


def _try_copies(
    unused: Region, device: torch.device, stores: BatchCopier, loads: BatchCopier, after: DeviceEvent | None
) -> None:
    """Copy a few bytes of ``unused`` to the device and back, so that what its driver cannot do is known at start.

    ``after``: an event after all work that the model's stream has, whose memory the scratch tensor may be.

    Raises:
        CopyFailed: the device refuses copies.
        TimeoutError: they take forever.
    """
    scratch = torch.empty(_TRIED_BYTES, dtype=torch.uint8, device=device)
    there, here, size = (np.array([value], np.int64) for value in (scratch.data_ptr(), unused.address, _TRIED_BYTES))
    loads.submit(Copies(there, here, size), after).wait(_TRIED_S)
    stores.submit(Copies(here, there, size)).wait(_TRIED_S)


def _event_recorder(device: torch.device) -> Callable[[], DeviceEvent | None]:
    """Return a function that records an event after all work that steps have been given."""
    if device.type == "cpu":
        return lambda: None  # a CPU kernel is done when its call returns
    return lambda: event_after_steps(device)
