"""Grants a prefill engine's leases and answers decode engines' messages about them.

Leases, ids and answers only: no threads, no sockets, no blocks. ``Producer`` puts a service on the network.
"""

import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Generic

from layout.geometry import CacheGroup, ModelIdentity, WorkerGeometry, layers_by_group
from pd_connector.orders import ChecksumOrder, LeaseEnd
from pd_connector.params import RemotePrefill, contents_digest
from pd_connector.scheduler.prefill.checksum_table import ChecksumTable
from pd_connector.scheduler.prefill.leases import Held, LeaseTable, Tables
from pd_connector.scheduler.prefill.prefix_service import PrefixService
from pd_connector.scheduler.prefill.transfers import Prompt, Transfers
from pd_connector.scheduler.readers import Readers
from pd_connector.vllm.cache_specs import retention_in
from pd_connector.vllm.prompts import Prompts
from pd_connector.vllm.requests import traceparent
from pd_connector.vllm.tracing import LeaseSpans
from transfer.control.messages import (
    Cancel,
    Cancelled,
    Checksums,
    Error,
    ErrorCode,
    Find,
    Follow,
    Found,
    Hello,
    Locate,
    Release,
    Renew,
    Renewed,
    Reply,
    Request,
    Welcome,
)
from transfer.control.waiting_requests import NotYet

if TYPE_CHECKING:
    from pd_connector.vllm.types import Request as VllmRequest


#: After so long, a decode engine that waits for a lease to be written is told to ask again.
_WRITTEN_WAIT_S = 1.0
_NOT_WRITTEN = Error(ErrorCode.NOT_READY, "the engine's device is still writing the draft layers of the prompt")
_STARTING = Error(ErrorCode.NOT_READY, "the engine is still starting")


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
        max_model_len: int = 0,
        spans: LeaseSpans | None = None,
        writes_late: bool = False,
        prompts: Prompts | None = None,
        readers: Readers | None = None,
    ) -> None:
        """Create the service of an engine whose workers are not known yet.

        Args:
            leases: owned by the caller, who collects what ended leases held.
            model: that this engine serves, as far as it is known before the workers are.
            tp_size: of this engine.
            leases_ended: called on any thread, possibly repeatedly, when ``leases.collect`` would return something.
            verify: whether to take checksums of what is leased.
            max_model_len: that this engine serves, for those that read; 0: unknown.
            spans: is told of every lease that is granted, and that ends; None if tracing is off.
            writes_late: whether leases may be granted before all that they hold is written.
            prompts: knows their media and adapters; None if these are not to be compared.
            readers: remember who has read what; None if nobody asks them.
        """
        self._writes_late = writes_late
        self._readers = readers
        #: Of the scheduler's thread, by lease: what was granted, and the transfer by which somebody may follow it.
        self._unwritten: dict[str, tuple[RemotePrefill, str]] = {}
        # A new process is a new engine whatever its configured name, because its memory has other contents.
        self.engine_id = uuid.uuid4().hex
        self.leases = leases
        self.checksums = ChecksumTable(leases.still_valid, enabled=verify)
        leases.on_end.append(self.checksums.ended)
        if spans is not None:
            leases.on_end.append(spans.ended)
        self.transfers = Transfers(leases.ttl_s, remembered_s=leases.unclaimed_s)
        #: Called on any thread with the ids of transfers of which there is news.
        self.notify: Callable[..., None] = lambda *transfer_ids: None
        #: Answers questions for prefixes; None if this engine serves none.
        self.prefixes: PrefixService | None = None
        self._leases_ended = leases_ended
        self._spans = spans
        self._prompts = prompts or Prompts()
        self._model = model
        self._model_has_changed = False  # so that its files do not describe it any more
        self._tp_size = tp_size
        self._max_model_len = max_model_len
        self._workers: tuple[WorkerGeometry, ...] = ()
        self._groups: tuple[CacheGroup, ...] = ()  # of the first of them
        #: Names of each cache group's layers, over all workers; empty if one holds all and keeps every token.
        self.layers: tuple[tuple[str, ...], ...] = ()
        self._host_workers: tuple[WorkerGeometry, ...] = ()

    def set_workers(
        self,
        workers: tuple[WorkerGeometry, ...],
        host: tuple[WorkerGeometry, ...] = (),
        model: ModelIdentity | None = None,
    ) -> None:
        """Set the workers' caches, and their host memory if leases may move there. Until then, peers are to ask again.

        ``model`` is what they have loaded, None if that is not known.

        If they are set again, the caches have been registered anew and their contents are gone. That makes this another
        engine: all leases end, and peers that know the old one are refused.
        """
        if self._workers:
            self._begin_anew("the prefill engine has registered its caches anew")
        self._model = model or self._model
        if self._model_has_changed:  # which workers that were asleep have not heard yet
            self._model = self._model.with_other_weights()
        self._workers, self._host_workers = workers, host
        self._groups = workers[0].groups if workers else ()
        has_one_for_all = len(self._groups) == 1 and not (self._groups[0].window or self._groups[0].chunk)
        self.layers = () if has_one_for_all else tuple(tuple(sorted(each)) for each in layers_by_group(workers))
        self.checksums.set_workers(len(workers))
        self.transfers.set_groups([retention_in(group) for group in self._groups], self.layers)

    def model_changed(self) -> None:
        """Become another engine, whose weights are not known: what leases hold, another model has computed."""
        self._begin_anew("the prefill engine's model has changed")
        self._model = self._model.with_other_weights()
        self._model_has_changed = True

    def begin(self, request: "VllmRequest", transfer_id: str) -> bool:
        """Take up a prompt that decode engines may follow by name; return False if nobody wants it any longer.

        Raises:
            ValueError: another request has the transfer id, or had it.
        """
        lease_id = uuid.uuid4().hex
        prompt = Prompt(transfer_id, lease_id, self._prompts.identify(request))
        self.leases.begin(lease_id)  # first, so that whoever ends the transfer ends the lease
        is_open = False
        try:
            is_open = self.transfers.open(prompt)
        finally:
            if not is_open:
                self.leases.withdraw(lease_id)
        return is_open

    def prompt_tokens(self, request: "VllmRequest") -> int:
        """Return the number of tokens of a request's prompt, the last one included if it is left to another engine."""
        return int(request.num_prompt_tokens) + self._prompts.is_cut(request.request_id)

    def grant(
        self,
        request: "VllmRequest",
        block_ids: Sequence[Sequence[int]],
        blocks: Held,
        address: tuple[str, int],
        transfer_id: str = "",
        *,
        is_written: bool = True,
    ) -> dict[str, Any]:
        """Grant a lease over a finished prompt's blocks, and return the ``kv_transfer_params`` of the response.

        Args:
            request: whose prompt it is.
            block_ids: its block table, by cache group.
            blocks: what the lease holds.
            address: host and port for messages about the lease.
            transfer_id: of a prompt that ``begin`` has taken up, and nobody has ended since.
            is_written: whether the device has written all of the blocks. If not, nobody is told that they can be read
                before ``written``.
        """
        host, port = address
        begun = self.transfers.begun(transfer_id)
        # Of a long prompt, the digest takes a millisecond, so what is known is not made again.
        prompt = begun.prompt.identity if begun is not None else self._prompts.identify(request)
        remote = RemotePrefill(
            remote_engine_id=self.engine_id,
            remote_request_id=request.request_id,
            remote_host=host,
            remote_port=port,
            remote_block_ids=tuple(tuple(ids) for ids in block_ids),
            remote_num_tokens=prompt.tokens,
            remote_block_sizes=self.block_tokens,
            remote_layers=self.layers,
            remote_attempt=begun.attempt if begun is not None else 0,
            tp_size=self._tp_size,
            prompt_is_cut=self._prompts.is_cut(request.request_id),
            lease_id=begun.prompt.lease_id if begun is not None else uuid.uuid4().hex,
            lease_ttl_s=self.leases.ttl_s,
            prompt_digest=prompt.digest,
            adapter_digest=prompt.adapter_digest,
            media_digest=prompt.media_digest,
        )
        if self._spans is not None:
            self._spans.granted(remote.lease_id, traceparent(request), request.request_id, prompt.tokens)
        if self._readers is not None:
            self._readers.leased(remote.lease_id, request.block_hashes)
        tables = remote.remote_block_ids if self._host_workers else ()
        is_valid = self.leases.grant(remote.lease_id, blocks, contents_digest(remote), tables, is_written=is_written)
        if begun is not None and not is_valid:
            if self._spans is not None:
                self._spans.ended(remote.lease_id, LeaseEnd.CANCELLED)
            self.transfers.end(transfer_id, "its readers have released it before it was complete")
        followed = transfer_id if begun is not None and is_valid else ""
        if is_written:
            self._complete(remote, followed)
        else:
            self._unwritten[remote.lease_id] = remote, followed
        return remote.to_params()

    def lend(
        self,
        blocks: Held,
        block_ids: Tables,
        tokens: int,
        address: tuple[str, int],
        slots: Mapping[int, int] | None = None,
        *,
        is_written: bool,
    ) -> RemotePrefill:
        """Grant a lease over the first ``tokens`` tokens of a prompt that another engine has found in the caches here.

        For that engine, they are a prompt of one more, which it computes. The lease lies in the ``slots`` of host
        memory, by ``block_ids``, or on the device if there are none, and stays there. No checksums are taken of slots.
        The other arguments are those of ``grant``.
        """
        host, port = address
        remote = RemotePrefill(
            remote_engine_id=self.engine_id, remote_host=host, remote_port=port, remote_block_ids=block_ids,
            remote_num_tokens=tokens + 1, lease_id=uuid.uuid4().hex, lease_ttl_s=self.leases.ttl_s, prompt_digest="",
            remote_block_sizes=self.block_tokens, remote_layers=self.layers,
        )  # fmt: skip
        tables = block_ids if slots is not None else ()
        self.leases.grant(remote.lease_id, blocks, contents_digest(remote), tables, slots, is_written=is_written)
        self.leases.renew((remote.lease_id,))  # whoever found it reads at once: no router is on its way
        if not is_written:
            self._unwritten[remote.lease_id] = remote, ""
        elif slots is None:
            self._complete(remote, "")
        return remote

    def written(self, lease_id: str) -> None:
        """Let a lease be read that was granted before all of it was written. On the scheduler's thread."""
        remote, followed = self._unwritten.pop(lease_id)
        self.leases.written(lease_id)
        self._complete(remote, followed)
        self.notify(lease_id, *([followed] if followed else []))

    def _complete(self, remote: RemotePrefill, transfer_id: str) -> None:
        """Have a prompt's checksums taken, and tell those who follow it that it is complete: they ask for both."""
        # The last prompt token is computed by whoever decodes.
        self.checksums.order(ChecksumOrder(remote.lease_id, remote.remote_block_ids, remote.remote_num_tokens - 1))
        if transfer_id:
            self.transfers.complete(transfer_id, remote.remote_block_ids)

    def end_transfers(self, lease_ids: Sequence[str], reason: str) -> None:
        """End the transfers of these leases, unless they are complete, and tell those who follow."""
        for transfer_id in self.transfers.end_of(lease_ids, reason):
            self.notify(transfer_id)
        for lease_id in lease_ids:
            self.leases.withdraw(lease_id)

    def handle(self, request: Request) -> Reply | NotYet:
        """Return the answer to a message of the control protocol. A repeated message has no further effect."""
        reply = self._answer(request)
        if self.leases.has_ended:
            self._leases_ended()
        return reply

    @property
    def block_tokens(self) -> tuple[int, ...]:
        """Block size of each cache group, in tokens; empty until the workers are known."""
        return tuple(group.block_tokens for group in self._groups)

    def check_integrity(self) -> None:
        """Raise AssertionError unless the books balance."""
        self.leases.check_integrity()
        self.transfers.check_integrity()
        self.checksums.check_integrity()

    def _begin_anew(self, reason: str) -> None:
        self.engine_id = uuid.uuid4().hex  # first, so that nobody gets what is new by the old id
        self.leases.cancel_all()
        if self.prefixes is not None:
            self.prefixes.forget()
        self.end_transfers(self.transfers.open_leases, reason)

    def _answer(self, request: Request) -> Reply | NotYet:
        is_by_name = isinstance(request, Follow | Find) or (isinstance(request, Cancel) and not request.lease_ids)
        if request.engine_id != self.engine_id and not (is_by_name and not request.engine_id):
            return Error(
                ErrorCode.UNKNOWN_ENGINE,
                f"engine {request.engine_id} is not here: this is engine {self.engine_id}. The engine has restarted, "
                "or the address is wrong",
            )
        match request:
            case Hello():
                return self._answer_hello()
            case Follow() | Find():
                return self._answer_by_name(request) if self._workers else _STARTING
            case Checksums():
                return self.checksums.answer(request)
            case Locate():
                return self._locate(request.lease_id)
        return self._answer_about_leases(request)

    def _answer_by_name(self, request: Follow | Find) -> Reply | NotYet:
        if isinstance(request, Follow):
            return self.transfers.answer(self.engine_id, request)
        if self.prefixes is None:
            return Found(self.engine_id, reason="serve_prefixes is not set there")
        return self.prefixes.ask(request, self.engine_id)

    def _locate(self, lease_id: str) -> Reply | NotYet:
        if self.leases.is_unwritten(lease_id):
            return NotYet(lease_id, _WRITTEN_WAIT_S, _NOT_WRITTEN)
        return self.leases.locate(lease_id)

    def _answer_about_leases(self, request: Renew | Release | Cancel) -> Reply:
        match request:
            case Renew(lease_ids=lease_ids, reading=reading):
                return Renewed(self.leases.renew(lease_ids, reading))
            case Release():
                if self._readers is not None and request.prefixes_at:
                    self._readers.read(request.lease_id, request.prefixes_at)
                return self.leases.release(request)
            case Cancel(lease_ids=lease_ids, transfer_ids=transfer_ids):
                lease_ids = (*lease_ids, *self.transfers.cancel(transfer_ids))
                self.leases.cancel(lease_ids)
                self.end_transfers(lease_ids, "it was cancelled by the decode engine")
                return Cancelled()

    def _answer_hello(self) -> Welcome | Error:
        if not self._workers:
            return _STARTING
        return Welcome(
            self.engine_id,
            self._model,
            self._workers,
            self.checksums.enabled,
            self._host_workers,
            self._writes_late,
            self._max_model_len,
        )
