"""The calls that vLLM makes to a connector in a step, in the form that the installed release has for them."""

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

import msgspec
from vllm.v1.outputs import KVConnectorOutput

from pd_connector.orders import Report
from pd_connector.vllm.metadata import ReportMetadata
from pd_connector.vllm.releases import release_023
from tests.support.releases import INSTALLED

#: Whether vLLM is told which requests have failed; until 0.30 it is told which blocks have.
NAMES_FAILED_REQUESTS = INSTALLED >= (0, 30)


@dataclass
class Results:
    """The requests whose wait has ended, and those of them that have failed."""

    finished_recving: set[str] = field(default_factory=set)
    failed_recving: set[str] = field(default_factory=set)


def bind_cache_manager(connector: Any, manager: Any) -> None:
    """Hand over the manager of the blocks, or the pool that it has made."""
    if NAMES_FAILED_REQUESTS:
        connector.bind_kv_cache_manager(manager)
        return
    release_023.remember_manager(manager)  # as when a real one is made
    connector.bind_gpu_block_pool(manager.block_pool)


def as_sent(stats: Any) -> Any:
    """Statistics in the form in which they travel between processes."""
    return stats.to_dict() if hasattr(stats, "to_dict") else msgspec.to_builtins(stats.data)


def wants_step(connector: Any) -> bool:
    """Whether vLLM's engine steps without requests."""
    if INSTALLED >= (0, 30):
        return bool(connector.has_pending_push_work())
    return release_023.wants_step(connector)


def take_output(worker: Any, left: Collection[str] = ()) -> KVConnectorOutput:
    """What the model runner takes from a connector at the end of a step; ``left`` are requests that have ended."""
    output = KVConnectorOutput()
    if NAMES_FAILED_REQUESTS:
        results = worker.get_transfer_results(set(left))
        assert not results.finished_sending
        output.finished_recving, output.failed_recving = results.finished_recving, results.failed_recving
    else:
        sent, output.finished_recving = worker.get_finished(set(left))
        assert not sent
    output.invalid_block_ids = worker.get_block_ids_with_load_errors()
    assert not (NAMES_FAILED_REQUESTS and output.invalid_block_ids), "a failure is told twice"
    output.kv_connector_worker_meta = worker.build_connector_worker_meta()
    return output


def all_failed(request_ids: set[str]) -> KVConnectorOutput:
    """What the scheduler side is told when these requests have ended their wait on every rank, in failure."""
    if NAMES_FAILED_REQUESTS:
        return KVConnectorOutput(finished_recving=request_ids, failed_recving=request_ids)
    report = ReportMetadata(Report(failed=frozenset(request_ids)))
    return KVConnectorOutput(finished_recving=request_ids, kv_connector_worker_meta=report)


def results_of(output: KVConnectorOutput, tables: dict[str, list[int]]) -> Results:
    """What vLLM's scheduler understands of an output; ``tables`` are the blocks of the requests that wait."""
    finished = set(output.finished_recving or ())
    if NAMES_FAILED_REQUESTS:
        return Results(finished, set(output.failed_recving or ()))
    failed = {request_id for request_id in finished if output.invalid_block_ids & set(tables[request_id])}
    told = {block for request_id in failed for block in tables[request_id]}
    assert output.invalid_block_ids <= told, "blocks of other requests are reported as invalid"
    return Results(finished, failed)
