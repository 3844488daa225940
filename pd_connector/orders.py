"""What the scheduler side orders of the workers in one step, and what workers report. Imports no vLLM.

The two sides share nothing else. Everything here is plain frozen data that survives the way between processes.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from enum import StrEnum

import numpy as np

from layout.checksums import PlaneSums
from layout.copies import Int64Array
from layout.geometry import WorkerGeometry
from layout.plan import BlockTable
from pd_connector.params import RemotePrefill


def block_table(block_ids: Sequence[int]) -> BlockTable:
    """Return a request's block table as plans take it: vLLM's null block, id 0, is a hole."""
    ids = np.array(block_ids, np.int64)
    return BlockTable.of(np.where(ids == 0, -1, ids))


class LeaseEnd(StrEnum):
    """How a lease ended: the label of the metric."""

    RELEASED = "released"
    CANCELLED = "cancelled"
    EXPIRED = "expired"


class Cause(StrEnum):
    """Why a pull failed: the label of the metric."""

    NONE = ""  # it did not
    PARAMS = "params"  # kv_transfer_params do not fit the request or the prefill engine
    UNREACHABLE = "unreachable"  # the prefill engine, or its transfer engine, does not answer
    DENIED = "denied"  # the two engines hold other secrets, or this one may not contact that address
    REFUSED = "refused"  # another engine answers at its address: it has restarted
    INCOMPATIBLE = "incompatible"  # its caches cannot be used here
    READ = "read"  # the transfer engine did not bring all bytes
    TIMEOUT = "timeout"  # the pull timeout was over before the read
    CHECKSUM = "checksum"  # what has arrived is not what was leased, or it could not be compared
    LEASE = "lease"  # the lease had ended before the read, or when it was done
    UNCONFIRMED = "unconfirmed"  # whether it had ended could not be learnt
    INTERNAL = "internal"  # a fault of this code; the log has the traceback

    @property
    def cuts_off(self) -> bool:
        """Whether nothing can be read from the prefill engine, so that its other pulls have failed as well."""
        return self in {Cause.UNREACHABLE, Cause.DENIED}


@dataclass(frozen=True)
class PullOrder:
    """Read a request's prompt tokens ``first_token`` to ``end_token`` (exclusive) from a prefill engine."""

    request_id: str
    remote: RemotePrefill
    local_block_ids: tuple[tuple[int, ...], ...]  # per cache group, the whole block table; 0 marks a hole
    first_token: int
    end_token: int
    pull_id: str  # the same on all ranks, of this pull only


@dataclass(frozen=True)
class RefuseOrder:
    """Report a request as failed: it cannot be pulled, and the scheduler half knows why."""

    request_id: str
    cause: Cause
    reason: str  # a sentence for people


@dataclass(frozen=True, eq=False)
class BlockMoves:
    """Whole blocks between the device and host memory: block ``blocks[i]`` of its cache group and slot ``slots[i]``.

    Arrays of shape [n], int64.
    """

    groups: Int64Array  # number of each block's cache group
    blocks: Int64Array  # device block ids
    slots: Int64Array  # of the host pool

    @classmethod
    def of(cls, triples: Sequence[tuple[int, int, int]]) -> "BlockMoves":
        """Moves from (group, block, slot) triples."""
        groups, blocks, slots = np.array(triples, np.int64).reshape(-1, 3).T.copy()
        return cls(groups, blocks, slots)

    def __len__(self) -> int:
        return len(self.slots)


@dataclass(frozen=True)
class LoadOrder:
    """Copy a request's blocks from host memory to the device."""

    request_id: str
    moves: BlockMoves
    tokens: int


@dataclass(frozen=True)
class StoreOrder:
    """Copy blocks, which earlier steps have computed, from the device to host memory."""

    store_id: int
    moves: BlockMoves


@dataclass(frozen=True)
class StoreEnds:
    """How a store has ended on the ranks that have reported it."""

    ranks: int
    failed: bool = False
    #: The device may still write to the slots.
    unsettled: bool = False

    def __add__(self, other: "StoreEnds") -> "StoreEnds":
        return StoreEnds(self.ranks + other.ranks, self.failed or other.failed, self.unsettled or other.unsettled)


@dataclass(frozen=True)
class ChecksumOrder:
    """Take checksums of a leased prompt's tokens before ``end_token``."""

    lease_id: str
    block_ids: tuple[tuple[int, ...], ...]  # per cache group, the whole block table; 0 marks a hole
    end_token: int


@dataclass(frozen=True, eq=False)
class ChecksumReport:
    """A worker's checksums of a leased prompt."""

    lease_id: str
    worker: int  # its number among the workers of the engine
    groups: tuple[tuple[PlaneSums, ...], ...] | None  # by cache group and plane; None: they could not be taken


@dataclass(frozen=True)
class Orders:
    """All orders of one scheduler step, or those of one role."""

    pulls: tuple[PullOrder, ...] = ()
    refusals: tuple[RefuseOrder, ...] = ()
    loads: tuple[LoadOrder, ...] = ()
    stores: tuple[StoreOrder, ...] = ()
    checksums: tuple[ChecksumOrder, ...] = ()

    def __add__(self, other: "Orders") -> "Orders":
        return Orders(*(getattr(self, each.name) + getattr(other, each.name) for each in fields(Orders)))


@dataclass(frozen=True, eq=False)
class Report:
    """What workers tell the scheduler side in one step, beside the requests that vLLM waits for."""

    stores: Mapping[int, StoreEnds] = field(default_factory=dict)  # by store id
    checksums: tuple[ChecksumReport, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.stores or self.checksums)

    def __add__(self, other: "Report") -> "Report":
        stores = dict(self.stores)
        for store_id, ends in other.stores.items():
            stores[store_id] = stores[store_id] + ends if store_id in stores else ends
        return Report(stores, self.checksums + other.checksums)


@dataclass(frozen=True)
class WorkerHandshake:
    """A worker's caches, for the scheduler side, which describes them to decode engines."""

    geometry: WorkerGeometry
    host_slots: int = 0  # blocks that this worker's host pool has room for; 0: it has none
