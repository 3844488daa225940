"""What the scheduler half tells the worker half in one step, and what workers say about themselves at start-up.

The two halves share nothing else. Everything here is plain frozen data that survives the way between processes.
Orders for host memory come from ``host_orders``, which can be imported without vLLM.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from layout.checksums import PlaneSums
from layout.geometry import WorkerGeometry
from pd_connector.host_orders import BlockMoves, LoadOrder, StoreEnds, StoreOrder
from pd_connector.params import RemotePrefill
from pd_connector.vllm_compat import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

__all__ = [
    "BlockMoves",
    "Cause",
    "LoadOrder",
    "PullOrder",
    "RefuseOrder",
    "StepOrders",
    "StoreEnds",
    "StoreOrder",
    "WorkerHandshake",
    "WorkerReport",
]


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


@dataclass(frozen=True)
class HashOrder:
    """Take checksums of a leased prompt's tokens before ``end_token``."""

    lease_id: str
    block_ids: tuple[tuple[int, ...], ...]  # per cache group, the whole block table; 0 marks a hole
    end_token: int


@dataclass(frozen=True)
class StepOrders(KVConnectorMetadata):
    """All orders of one scheduler step."""

    pulls: tuple[PullOrder, ...] = field(default=())
    refusals: tuple[RefuseOrder, ...] = field(default=())
    loads: tuple[LoadOrder, ...] = field(default=())
    stores: tuple[StoreOrder, ...] = field(default=())
    hashes: tuple[HashOrder, ...] = field(default=())


@dataclass(frozen=True, eq=False)
class Hashed:
    """A worker's checksums of a leased prompt."""

    lease_id: str
    worker: int  # its number among the workers of the engine
    groups: tuple[tuple[PlaneSums, ...], ...] | None  # by cache group and plane; None: they could not be taken


@dataclass(frozen=True, eq=False)
class WorkerReport(KVConnectorWorkerMetadata):
    """What workers tell the scheduler half in one step, beside the requests that vLLM waits for."""

    stores: Mapping[int, StoreEnds] = field(default_factory=dict)  # by store id
    checksums: tuple[Hashed, ...] = field(default=())

    def aggregate(self, other: KVConnectorWorkerMetadata) -> "WorkerReport":
        """Both workers' reports as one."""
        assert isinstance(other, WorkerReport)
        stores = dict(self.stores)
        for store_id, ends in other.stores.items():
            stores[store_id] = stores[store_id] + ends if store_id in stores else ends
        return WorkerReport(stores, self.checksums + other.checksums)


@dataclass(frozen=True)
class WorkerHandshake(KVConnectorHandshakeMetadata):
    """A worker's caches, handed to the scheduler process, which describes them to decode engines."""

    geometry: WorkerGeometry
    host_slots: int = 0  # blocks that this worker's host pool has room for; 0: it has none
