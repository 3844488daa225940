"""Copies between the device and this rank's part of every host block.

An order is submitted once, when it arrives, and kept with its handle until the copy ends, however many steps that
takes. Everything here runs on the model's thread; only ``settle`` and ``close`` block. The copiers' threads make the
descriptors, which takes long for many, and move the bytes; only handles pass between threads.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from layout.copies import Copies
from layout.geometry import Region
from layout.host_blocks import HostLayout
from layout.regions import RegionTable
from pd_connector.orders import LoadOrder, StoreEnds, StoreOrder
from transfer.copies.batch.base import CopyBounds, CopyFailed, DeviceEvent, Handle
from transfer.copies.batch.copier import BatchCopier


class UnsettledLoadError(RuntimeError):
    """A load failed, but the device may still be writing to KV blocks: none of them can be trusted any longer."""


@dataclass(frozen=True, slots=True)
class CopyEnd:
    """How a load or a store ended on this rank."""

    blocks: int
    copied_bytes: int
    seconds: float  # from the order to its end; on a device, to the step that noticed it
    failure: str = ""  # for people; empty if every byte was copied


@dataclass(frozen=True, slots=True)
class _InFlight:
    handle: Handle
    blocks: int
    started: float


class HostCopies:
    """Owns the copies in flight between the device and this rank's slots of host memory."""

    def __init__(
        self,
        layout: HostLayout,
        pool: Region,
        stores: BatchCopier,
        loads: BatchCopier,
        record_event: Callable[[], DeviceEvent | None],
    ) -> None:
        """``record_event`` records an event after all work of steps; None if that is done already.

        ``pool`` is the memory of the slots, in use until ``close`` has returned.
        """
        self.layout = layout  # where a block lies in a slot
        self._pool = pool
        self._store_copier = stores
        self._load_copier = loads
        self._record_event = record_event
        caches, slots = RegionTable(layout.regions), RegionTable([pool])
        self._load_bounds, self._store_bounds = CopyBounds(caches, slots), CopyBounds(slots, caches)
        self._loads: dict[str, _InFlight] = {}
        self._stores: dict[int, _InFlight] = {}

    def load(self, order: LoadOrder) -> None:
        """Start a load; ``take_loads`` reports its end. The model may have used the destinations until now."""
        assert order.request_id not in self._loads, f"request {order.request_id} is being loaded"
        self._loads[order.request_id] = self._submit(self.layout.loads, self._load_copier, order)

    def store(self, order: StoreOrder) -> None:
        """Start a store of blocks that earlier steps have computed; ``take_stores`` reports its end."""
        assert order.store_id not in self._stores, f"store {order.store_id} is under way"
        self._stores[order.store_id] = self._submit(self.layout.stores, self._store_copier, order)

    def take_loads(self) -> dict[str, CopyEnd]:
        """Return the loads that have ended since the last call, by request id.

        Raises:
            UnsettledLoadError: a load has failed, but the device may still be writing.
        """
        ended = {}
        for request_id, copy in list(self._loads.items()):
            end, settled = _poll(copy)
            if end is not None:
                if not settled:
                    raise UnsettledLoadError(f"blocks of request {request_id} could not be loaded: {end.failure}")
                ended[request_id] = end
                del self._loads[request_id]
        return ended

    def take_stores(self) -> dict[int, tuple[CopyEnd, StoreEnds]]:
        """Return the stores that have ended since the last call, by store id."""
        ended = {}
        for store_id, copy in list(self._stores.items()):
            end, settled = _poll(copy)
            if end is not None:
                ended[store_id] = end, StoreEnds(1, failed=bool(end.failure), unsettled=not settled)
                del self._stores[store_id]
        return ended

    def settle(self) -> None:
        """Block until the copies in flight have ended. ``take_loads`` and ``take_stores`` report how.

        Raises:
            CopyFailed: one has failed, and the device may still be copying.
        """
        for copy in (*self._loads.values(), *self._stores.values()):
            try:
                copy.handle.wait()
            except CopyFailed as failure:
                if not failure.settled:
                    raise

    def close(self) -> None:
        """Wait for the copies in flight and stop the copiers' threads. Their ends are not reported."""
        self._load_copier.close()
        self._store_copier.close()

    def _submit(self, describe: Callable[..., Copies], copier: BatchCopier, order: LoadOrder | StoreOrder) -> _InFlight:
        started, moves = time.monotonic(), order.moves
        bounds = self._load_bounds if isinstance(order, LoadOrder) else self._store_bounds
        copies = partial(describe, self._pool, moves.groups, moves.blocks, moves.slots)
        try:
            handle = copier.submit(copies, self._record_event(), bounds)
        except CopyFailed as failure:
            handle = Handle()
            handle.failed(failure)
        return _InFlight(handle, len(moves), started)


def _poll(copy: _InFlight) -> tuple[CopyEnd | None, bool]:
    """Return how a copy has ended, None if it has not, and whether it is settled: nothing is written any longer."""
    try:
        if not copy.handle.query():
            return None, False
    except CopyFailed as failure:
        return CopyEnd(copy.blocks, 0, time.monotonic() - copy.started, str(failure)), failure.settled
    assert copy.handle.ended_at is not None
    return CopyEnd(copy.blocks, copy.handle.copied_bytes, copy.handle.ended_at - copy.started), True
