"""Orders, reports and handshakes in classes that vLLM carries between its processes."""

from dataclasses import dataclass

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

from pd_connector.orders import Orders, Report, WorkerHandshake


@dataclass(frozen=True)
class StepMetadata(KVConnectorMetadata):
    """The orders of a scheduler step, for all workers."""

    orders: Orders


@dataclass(frozen=True, eq=False)
class ReportMetadata(KVConnectorWorkerMetadata):
    """What a worker reports in a step; vLLM aggregates all workers' reports."""

    report: Report

    def aggregate(self, other: KVConnectorWorkerMetadata) -> "ReportMetadata":
        """Return both reports as one."""
        assert isinstance(other, ReportMetadata)
        return ReportMetadata(self.report + other.report)


@dataclass(frozen=True)
class HandshakeMetadata(KVConnectorHandshakeMetadata):
    """A worker's handshake, for the scheduler process."""

    handshake: WorkerHandshake
