"""The scheduler half of a prefill engine: a lease service on the network."""

import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from layout.geometry import ModelIdentity
from pd_connector.scheduler.lease_service import LeaseService
from pd_connector.scheduler.leases import Held
from pd_connector.vllm_compat import init_logger
from transfer.control.keys import ControlKeys
from transfer.control.messages import Reply, Request
from transfer.control.server import ControlServer

if TYPE_CHECKING:
    from vllm.v1.request import Request as VllmRequest

logger = init_logger(__name__)

#: How often leases are looked through for expired ones, beside every message.
_EXPIRY_INTERVAL_S = 0.5
_CLOSE_TIMEOUT_S = 2.0


class Producer(LeaseService[Held]):
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
        keys: ControlKeys | None = None,
        *,
        verify: bool = False,
    ) -> None:
        """``leases_ended`` is called on any thread, once or more, when ``leases.collect`` has something to give.

        ``keys`` are those of the control channel; None serves whoever can connect. ``verify``: keep checksums.

        Raises:
            ControlStartError: host and port cannot be bound.
        """
        super().__init__(lease_ttl_s, model, tp_size, time.monotonic, verify=verify)
        self._leases_ended = leases_ended
        self._host = host
        self._server = ControlServer(self, host, port, keys=keys)
        self._server.start()
        self._refusals_taken: Counter[str] = Counter()
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

    def finish_prefill(self, request: "VllmRequest", block_ids: tuple[list[int], ...], blocks: Held) -> dict[str, Any]:
        """Grant a lease over a finished prompt's blocks; returns the ``kv_transfer_params`` of the response."""
        return self.grant(request, block_ids, blocks, self._host, self.port)

    def handle(self, request: Request) -> Reply:
        """Answer one message of the control protocol."""
        reply = self.answer(request)
        if self.leases.has_ended:
            self._leases_ended()
        return reply

    def take_refusals(self) -> dict[str, int]:
        """What the control channel has refused since the last call, by cause."""
        refusals = Counter(self._server.counters.refusals)
        new = refusals - self._refusals_taken
        self._refusals_taken = refusals
        return dict(new)

    def close(self) -> None:
        """Stop answering. Leases end with the process."""
        if outstanding := self.leases.active:
            logger.warning("PDConnector: shutting down with %d leases that were not released", outstanding)
        self._closing.set()
        self._server.close()
        self._expiry.join(_CLOSE_TIMEOUT_S)

    def check_integrity(self) -> None:
        """Raise AssertionError unless the books balance and, until ``close``, both threads run."""
        super().check_integrity()
        assert self._closing.is_set() or self._expiry.is_alive(), "nobody looks for leases that have expired"

    def _watch_expiry(self) -> None:
        while not self._closing.wait(min(_EXPIRY_INTERVAL_S, self.leases.ttl_s / 4)):
            if self.leases.has_ended:
                self._leases_ended()
