"""The scheduler half of a prefill engine: grants leases and answers for them on the control channel."""

import threading
import time
import uuid
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Generic

from layout.geometry import ModelIdentity, WorkerGeometry
from pd_connector.params import RemotePrefill, prompt_digest
from pd_connector.scheduler.leases import Held, LeaseTable
from pd_connector.vllm_compat import init_logger, prompt_shape
from transfer.control.messages import (
    Cancel,
    Cancelled,
    Error,
    ErrorCode,
    Hello,
    Release,
    Released,
    Renew,
    Renewed,
    Reply,
    Request,
    Welcome,
)
from transfer.control.server import ControlServer

if TYPE_CHECKING:
    from vllm.v1.request import Request as VllmRequest

logger = init_logger(__name__)

#: How often leases are looked through for expired ones, beside every message.
_EXPIRY_INTERVAL_S = 0.5
_CLOSE_TIMEOUT_S = 2.0


class Producer(Generic[Held]):
    """Owns the leases and the control endpoint of one prefill engine; each lease holds a request's blocks.

    ``handle`` runs on the control channel's thread, everything public beside it on the scheduler's. A thread of its
    own sees to it that leases end in time though no message comes and the scheduler sleeps.
    """

    def __init__(
        self,
        host: str,
        port: int,
        lease_ttl_s: float,
        model: ModelIdentity,
        tp_size: int,
        leases_ended: Callable[[], None] = lambda: None,
    ) -> None:
        """``leases_ended`` is called on any thread, once or more, when ``leases.collect`` has something to give."""
        # A new process is a new engine, whatever the user called it: its memory has other contents.
        self.engine_id = uuid.uuid4().hex
        self.leases: LeaseTable[Held] = LeaseTable(lease_ttl_s, time.monotonic)
        self._leases_ended = leases_ended
        self._host = host
        self._model = model
        self._tp_size = tp_size
        self._workers: tuple[WorkerGeometry, ...] = ()
        self._server = ControlServer(self, host, port)
        self._server.start()
        self._closing = threading.Event()
        self._expiry = threading.Thread(target=self._watch_expiry, name="pd-lease-expiry", daemon=True)
        self._expiry.start()
        logger.info(
            "PDConnector: prefill engine %s answers on the control channel at %s:%d", self.engine_id, host, self.port
        )

    @property
    def port(self) -> int:
        """Port of the control channel."""
        return self._server.port

    def set_workers(self, workers: tuple[WorkerGeometry, ...]) -> None:
        """Make the workers' caches known; until then peers are told to ask again."""
        self._workers = workers

    def finish_prefill(self, request: "VllmRequest", block_ids: tuple[list[int], ...], blocks: Held) -> dict[str, Any]:
        """Grant a lease over a finished prompt's blocks; returns the ``kv_transfer_params`` of the response."""
        lease_id = uuid.uuid4().hex
        self.leases.grant(lease_id, blocks)
        return RemotePrefill(
            remote_engine_id=self.engine_id,
            remote_request_id=request.request_id,
            remote_host=self._host,
            remote_port=self.port,
            remote_block_ids=tuple(tuple(ids) for ids in block_ids),
            remote_num_tokens=request.num_prompt_tokens,
            tp_size=self._tp_size,
            lease_id=lease_id,
            lease_ttl_s=self.leases.ttl_s,
            prompt_digest=prompt_digest(*prompt_shape(request)),
        ).to_params()

    def handle(self, request: Request) -> Reply:
        """Answer one message of the control protocol."""
        reply = self._answer(request)
        if self.leases.has_ended:
            self._leases_ended()
        return reply

    def close(self) -> None:
        """Stop answering. Leases end with the process."""
        if outstanding := self.leases.active:
            logger.warning("PDConnector: shutting down with %d leases that were not released", outstanding)
        self._closing.set()
        self._server.close()
        self._expiry.join(_CLOSE_TIMEOUT_S)

    def _answer(self, request: Request) -> Reply:
        if request.engine_id != self.engine_id:
            return Error(
                ErrorCode.UNKNOWN_ENGINE,
                f"engine {request.engine_id} is not here: {self._host}:{self.port} is engine {self.engine_id}. It has "
                "restarted since, or the address is wrong",
            )
        match request:
            case Hello():
                if not self._workers:
                    return Error(ErrorCode.NOT_READY, "the engine is still starting")
                return Welcome(self.engine_id, self._model, self._workers)
            case Renew(lease_ids=lease_ids):
                return Renewed(self.leases.renew(lease_ids), self.leases.ttl_s)
            case Release(lease_id=lease_id, reader=reader, readers=readers, pull_id=pull_id):
                return Released(self.leases.release(lease_id, reader, readers, pull_id))
            case Cancel(lease_ids=lease_ids):
                self.leases.cancel(lease_ids)
                return Cancelled()

    def _watch_expiry(self) -> None:
        while not self._closing.wait(min(_EXPIRY_INTERVAL_S, self.leases.ttl_s / 4)):
            if self.leases.has_ended:
                self._leases_ended()
