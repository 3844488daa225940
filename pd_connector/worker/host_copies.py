"""The copies between the device and this rank's part of every host block.

An order is submitted once, when it comes, and what it was for is kept beside its handle until the handle has ended,
however many steps that takes. Everything runs on the model's thread, which never waits here; the bytes are moved by the
copiers' threads, and only their handles pass between the threads.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass

from layout.copies import Copies
from layout.geometry import Region
from layout.host_blocks import HostLayout
from pd_connector.orders import LoadOrder, StoreEnds, StoreOrder
from transfer.batch_copy.base import BatchCopier, CopyFailed, DeviceEvent, Handle


class DeviceLostError(RuntimeError):
    """The device failed while it was writing KV blocks and may go on writing them: no block can be trusted."""


@dataclass(frozen=True, slots=True)
class CopyEnd:
    """How a load or a store has ended on this rank."""

    blocks: int
    copied_bytes: int
    seconds: float  # from the order to its end, or until a device was asked after that, which each step does
    failure: str = ""  # a sentence for people; empty if every byte has landed


@dataclass(frozen=True, slots=True)
class _UnderWay:
    handle: Handle
    blocks: int
    copied_bytes: int
    started: float


class HostCopies:
    """Owns what is under way between the device and this rank's slots of host memory."""

    def __init__(
        self,
        layout: HostLayout,
        pool: Region,
        stores: BatchCopier,
        loads: BatchCopier,
        mark: Callable[[], DeviceEvent | None],
    ) -> None:
        """``mark`` records an event behind all that the model's stream was given so far; None if it has done all of it.

        ``pool`` is used until ``close`` has returned.
        """
        self._layout = layout
        self._pool = pool
        self._store_copier = stores
        self._load_copier = loads
        self._mark = mark
        self._loads: dict[str, _UnderWay] = {}
        self._stores: dict[int, _UnderWay] = {}
        self._ended_loads: dict[str, CopyEnd] = {}
        self._ended_stores: dict[int, tuple[CopyEnd, StoreEnds]] = {}

    def load(self, order: LoadOrder) -> None:
        """Start a load; ``take_loads`` reports its end. Its destinations may have been used until now."""
        assert order.request_id not in self._loads, f"request {order.request_id} is being loaded"
        begun = self._begin(self._layout.loads, self._load_copier, order)
        if isinstance(begun, CopyEnd):
            self._ended_loads[order.request_id] = begun
        else:
            self._loads[order.request_id] = begun

    def store(self, order: StoreOrder) -> None:
        """Start a store of blocks that steps before this one have computed; ``take_stores`` reports its end."""
        assert order.store_id not in self._stores, f"store {order.store_id} is under way"
        begun = self._begin(self._layout.stores, self._store_copier, order)
        if isinstance(begun, CopyEnd):
            self._ended_stores[order.store_id] = begun, StoreEnds(1, failed=True)
        else:
            self._stores[order.store_id] = begun

    def take_loads(self) -> dict[str, CopyEnd]:
        """The loads that have ended since the last call, by request id.

        Raises:
            DeviceLostError: a load has failed and the device may still write.
        """
        ended, self._ended_loads = self._ended_loads, {}
        for request_id, copy in list(self._loads.items()):
            end, settled = _look_at(copy)
            if end is not None:
                if not settled:
                    raise DeviceLostError(f"blocks of request {request_id} could not be loaded: {end.failure}")
                ended[request_id] = end
                del self._loads[request_id]
        return ended

    def take_stores(self) -> dict[int, tuple[CopyEnd, StoreEnds]]:
        """The stores that have ended since the last call, by their ids."""
        ended, self._ended_stores = self._ended_stores, {}
        for store_id, copy in list(self._stores.items()):
            end, settled = _look_at(copy)
            if end is not None:
                ended[store_id] = end, StoreEnds(1, failed=bool(end.failure), unsettled=not settled)
                del self._stores[store_id]
        return ended

    def close(self) -> None:
        """End the copiers' threads, after the copies under way; nothing is reported any more."""
        self._load_copier.close()
        self._store_copier.close()

    def check_integrity(self) -> None:
        """Raise AssertionError unless the books balance."""
        assert not self._loads.keys() & self._ended_loads.keys(), "a load is under way and ended at once"
        assert not self._stores.keys() & self._ended_stores.keys(), "a store is under way and ended at once"

    def _begin(
        self, describe: Callable[..., Copies], copier: BatchCopier, order: LoadOrder | StoreOrder
    ) -> _UnderWay | CopyEnd:
        started, moves = time.monotonic(), order.moves
        try:
            copies = describe(self._pool, moves.groups, moves.blocks, moves.slots)
            handle = copier.submit(copies, self._mark())
        except (CopyFailed, IndexError, ValueError) as error:
            return CopyEnd(len(moves), 0, 0.0, f"the copy could not be started: {error}")
        return _UnderWay(handle, len(moves), copies.total_bytes, started)


def _look_at(copy: _UnderWay) -> tuple[CopyEnd | None, bool]:
    """How a copy has ended, None if it has not, and whether it is settled: nothing is written any more."""
    try:
        if not copy.handle.query():
            return None, False
    except CopyFailed as failure:
        return CopyEnd(copy.blocks, 0, time.monotonic() - copy.started, str(failure)), failure.settled
    assert copy.handle.ended_at is not None
    return CopyEnd(copy.blocks, copy.copied_bytes, copy.handle.ended_at - copy.started), True
