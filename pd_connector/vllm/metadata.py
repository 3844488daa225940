"""Orders, reports and handshakes in the classes that vLLM carries between its processes."""

from dataclasses import dataclass

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

from pd_connector.orders import Orders, Report, WorkerHandshake


@dataclass(frozen=True)
class StepMetadata(KVConnectorMetadata):
    """The orders of one scheduler step, to all workers."""

    orders: Orders


@dataclass(frozen=True, eq=False)
class ReportMetadata(KVConnectorWorkerMetadata):
    """What workers report in one step; vLLM adds them up."""

    report: Report

    def aggregate(self, other: KVConnectorWorkerMetadata) -> "ReportMetadata":
        """Return both workers' reports as one."""
        assert isinstance(other, ReportMetadata)
        return ReportMetadata(self.report + other.report)


@dataclass(frozen=True)
class HandshakeMetadata(KVConnectorHandshakeMetadata):
    """A worker's caches, on their way to the scheduler process."""

    handshake: WorkerHandshake
