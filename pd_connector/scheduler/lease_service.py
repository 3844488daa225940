"""What a prefill engine promises to decode engines, and what it answers when they come back to it.

Leases, ids and answers only: no thread, no socket, no blocks. ``Producer`` puts it on the network.
"""

import uuid
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Generic

from layout.geometry import ModelIdentity, WorkerGeometry
from pd_connector.metadata import HashOrder
from pd_connector.params import RemotePrefill, contents_digest, prompt_digest
from pd_connector.scheduler.checksum_book import ChecksumBook
from pd_connector.scheduler.leases import Held, LeaseTable
from pd_connector.vllm_compat import prompt_shape
from transfer.control.messages import (
    Cancel,
    Cancelled,
    Checksummed,
    Checksums,
    Error,
    ErrorCode,
    Hello,
    NoChecksums,
    Release,
    Renew,
    Renewed,
    Reply,
    Request,
    Welcome,
)

if TYPE_CHECKING:
    from vllm.v1.request import Request as VllmRequest


class LeaseService(Generic[Held]):
    """Grants leases and answers for them. Thread-safe where ``LeaseTable`` is: ``answer`` may run on any thread."""

    def __init__(
        self,
        lease_ttl_s: float,
        model: ModelIdentity,
        tp_size: int,
        clock: Callable[[], float],
        *,
        verify: bool = False,
    ) -> None:
        """``clock`` is a monotonic clock in seconds. ``verify``: keep checksums of what is leased."""
        # A new process is a new engine, whatever the user called it: its memory has other contents.
        self.engine_id = uuid.uuid4().hex
        self.leases: LeaseTable[Held] = LeaseTable(lease_ttl_s, clock)
        self._model = model
        self._tp_size = tp_size
        self._workers: tuple[WorkerGeometry, ...] = ()
        self.checksums = ChecksumBook(self.leases.still_valid) if verify else None

    def set_workers(self, workers: tuple[WorkerGeometry, ...]) -> None:
        """Make the workers' caches known; until then peers are told to ask again."""
        self._workers = workers
        if self.checksums is not None:
            self.checksums.set_workers(len(workers))

    def grant(
        self, request: "VllmRequest", block_ids: tuple[list[int], ...], blocks: Held, host: str, port: int
    ) -> dict[str, Any]:
        """Grant a lease over a finished prompt's blocks.

        Returns the ``kv_transfer_params`` of the response: ``host`` and ``port`` are where the lease is answered for.
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
        if self.checksums is not None:
            # The last prompt token is computed by whoever decodes.
            self.checksums.order(HashOrder(remote.lease_id, remote.remote_block_ids, remote.remote_num_tokens - 1))
        return remote.to_params()

    def answer(self, request: Request) -> Reply:
        """Answer one message of the control protocol. Repeating a message changes nothing more."""
        if request.engine_id != self.engine_id:
            return Error(
                ErrorCode.UNKNOWN_ENGINE,
                f"engine {request.engine_id} is not here: this is engine {self.engine_id}. It has restarted since, or "
                "the address is wrong",
            )
        match request:
            case Hello():
                return self._answer_hello()
            case Renew(lease_ids=lease_ids):
                return Renewed(self.leases.renew(lease_ids))
            case Release():
                return self.leases.release(
                    request.lease_id, request.reader, request.readers, request.pull_id, request.contents
                )
            case Cancel(lease_ids=lease_ids):
                self.leases.cancel(lease_ids)
                return Cancelled()
            case Checksums():
                return self._answer_checksums(request)

    def _answer_hello(self) -> Welcome | Error:
        if not self._workers:
            return Error(ErrorCode.NOT_READY, "the engine is still starting")
        return Welcome(self.engine_id, self._model, self._workers, verify=self.checksums is not None)

    def _answer_checksums(self, asked: Checksums) -> Checksummed:
        return self.checksums.answer(asked) if self.checksums is not None else Checksummed(reason=NoChecksums.OFF)

    def check_integrity(self) -> None:
        """Raise AssertionError unless the books balance."""
        self.leases.check_integrity()
        if self.checksums is not None:
            self.checksums.check_integrity()
