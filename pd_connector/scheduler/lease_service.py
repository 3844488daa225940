"""Grants a prefill engine's leases and answers decode engines' messages about them.

Leases, ids and answers only: no threads, no sockets, no blocks. ``Producer`` puts a service on the network.
"""

import uuid
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Generic

from layout.geometry import ModelIdentity, WorkerGeometry
from pd_connector.orders import ChecksumOrder
from pd_connector.params import RemotePrefill, contents_digest, prompt_digest
from pd_connector.scheduler.checksum_table import ChecksumTable
from pd_connector.scheduler.leases import Held, LeaseTable
from pd_connector.vllm.requests import prompt_shape
from transfer.control.messages import (
    Cancel,
    Cancelled,
    Checksums,
    Error,
    ErrorCode,
    Hello,
    Release,
    Renew,
    Renewed,
    Reply,
    Request,
    Welcome,
)

if TYPE_CHECKING:
    from pd_connector.vllm.types import Request as VllmRequest


class LeaseService(Generic[Held]):
    """Grants leases and answers messages about them. ``handle`` may run on any thread, as ``LeaseTable`` allows."""

    def __init__(
        self,
        leases: LeaseTable[Held],
        model: ModelIdentity,
        tp_size: int,
        leases_ended: Callable[[], None] = lambda: None,
        *,
        verify: bool = False,
    ) -> None:
        """Create the service of an engine whose workers are not known yet.

        Args:
            leases: owned by the caller, who collects what ended leases held.
            model: that this engine serves.
            tp_size: of this engine.
            leases_ended: called on any thread, possibly repeatedly, when ``leases.collect`` would return something.
            verify: whether to take checksums of what is leased.
        """
        # A new process is a new engine whatever its configured name, because its memory has other contents.
        self.engine_id = uuid.uuid4().hex
        self.leases = leases
        self.checksums = ChecksumTable(leases.still_valid, enabled=verify)
        self._leases_ended = leases_ended
        self._model = model
        self._tp_size = tp_size
        self._workers: tuple[WorkerGeometry, ...] = ()

    def set_workers(self, workers: tuple[WorkerGeometry, ...]) -> None:
        """Set the workers' caches. Until then, peers are told to ask again.

        If they are set again, the caches have been registered anew and their contents are gone. That makes this another
        engine: all leases end, and peers that know the old one are refused.
        """
        if self._workers:
            self.engine_id = uuid.uuid4().hex  # first, so that nobody gets the new workers by the old id
            self.leases.cancel_all()
        self._workers = workers
        self.checksums.set_workers(len(workers))

    def grant(
        self, request: "VllmRequest", block_ids: Sequence[Sequence[int]], blocks: Held, host: str, port: int
    ) -> dict[str, Any]:
        """Grant a lease over a finished prompt's blocks, and return the ``kv_transfer_params`` of the response.

        ``host`` and ``port`` are the address for messages about the lease.
        """
        remote = RemotePrefill(
            remote_engine_id=self.engine_id,
            remote_request_id=request.request_id,
            remote_host=host,
            remote_port=port,
            remote_block_ids=tuple(tuple(ids) for ids in block_ids),
            remote_num_tokens=request.num_prompt_tokens,
            remote_block_sizes=tuple(group.block_tokens for worker in self._workers[:1] for group in worker.groups),
            tp_size=self._tp_size,
            lease_id=uuid.uuid4().hex,
            lease_ttl_s=self.leases.ttl_s,
            prompt_digest=prompt_digest(*prompt_shape(request)),
        )
        self.leases.grant(remote.lease_id, blocks, contents_digest(remote))
        # The last prompt token is computed by whoever decodes.
        self.checksums.order(ChecksumOrder(remote.lease_id, remote.remote_block_ids, remote.remote_num_tokens - 1))
        return remote.to_params()

    def handle(self, request: Request) -> Reply:
        """Return the answer to a message of the control protocol. A repeated message has no further effect."""
        reply = self._answer(request)
        if self.leases.has_ended:
            self._leases_ended()
        return reply

    def check_integrity(self) -> None:
        """Raise AssertionError unless the books balance."""
        self.leases.check_integrity()
        self.checksums.check_integrity()

    def _answer(self, request: Request) -> Reply:
        if request.engine_id != self.engine_id:
            return Error(
                ErrorCode.UNKNOWN_ENGINE,
                f"engine {request.engine_id} is not here: this is engine {self.engine_id}. The engine has restarted, "
                "or the address is wrong",
            )
        match request:
            case Hello():
                return self._answer_hello()
            case Renew(lease_ids=lease_ids, reading=reading):
                return Renewed(self.leases.renew(lease_ids, reading))
            case Release():
                return self.leases.release(
                    request.lease_id, request.reader, request.readers, request.pull_id, request.contents
                )
            case Cancel(lease_ids=lease_ids):
                self.leases.cancel(lease_ids)
                return Cancelled()
            case Checksums():
                return self.checksums.answer(request)

    def _answer_hello(self) -> Welcome | Error:
        if not self._workers:
            return Error(ErrorCode.NOT_READY, "the engine is still starting")
        return Welcome(self.engine_id, self._model, self._workers, verify=self.checksums.enabled)
