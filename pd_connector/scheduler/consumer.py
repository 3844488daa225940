"""The role of a decode engine: decides what to pull, keeps the leases that it needs alive, and ends the others.

A request whose prompt a prefill engine holds passes through these states, each at most once:

    waiting --- blocks allocated ---> pulling --- all ranks have settled ---> (forgotten)
       |                                 ^
       |--- nothing is missing ----------|-----> lease cancelled, computed here
       |--- left before allocation ------|-----> lease cancelled
       |--- params refused --------------|       reported as failed by the workers
       |--- lease has ended, or was given up --'  the same
       '--- lease is another request's ----> waits until that one is settled, then takes what the prefix cache holds

A lease is good for one pull. Requests that share a lease (vLLM turns ``n`` choices into ``n`` requests) therefore
follow the first of them, even if that has been settled before they arrive.

Everything runs on the scheduler's thread, and nothing blocks: the control client's thread resends messages to prefill
engines until they are answered.
"""

import logging
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pd_connector.orders import Cause, Orders, PullOrder, RefuseOrder, Report
from pd_connector.params import (
    ParamsError,
    RemotePrefill,
    check_prompt,
    is_decode_leg,
    is_malformed,
    parse_remote_prefill,
    prompt_digest,
)
from pd_connector.scheduler.renewals import Renewals
from pd_connector.scheduler.roles import SchedulerRole
from pd_connector.vllm.cache_specs import Retention
from pd_connector.vllm.requests import block_ids_by_group, is_placeholder, prompt_shape

if TYPE_CHECKING:
    from pd_connector.vllm.types import KVCacheBlocks, Request

logger = logging.getLogger(__name__)

#: How many spent leases are remembered: more than there are requests on the way to this engine at any time.
_MAX_SPENT_LEASES = 8192


@dataclass(frozen=True, slots=True)
class _Refused:
    """A decode leg whose params cannot be used."""

    reason: str


@dataclass(frozen=True, slots=True)
class _Follower:
    """A decode leg whose lease another request uses or has used."""

    lease_id: str


_Entry = RemotePrefill | _Refused | _Follower


class Consumer(SchedulerRole):
    """Owns the state of a decode engine's pulls, and the renewal of leases."""

    def __init__(self, renewals: Renewals, retentions: Sequence[Retention] = ()) -> None:
        """``retentions``: of every cache group, in vLLM's order."""
        self._retentions = retentions
        self._renewals = renewals
        self._waiting: dict[str, _Entry] = {}
        self._pulling: dict[str, _Entry] = {}
        self._lease_ids: set[str] = set()  # of the requests that wait or pull, except followers
        self._spent: dict[str, None] = {}  # leases released or cancelled here, oldest first; an ordered set
        self._computed: dict[str, int] = {}  # tokens held here when vLLM last asked, by request
        self._pulls: list[PullOrder] = []
        self._refusals: list[RefuseOrder] = []

    def add(self, request: "Request") -> None:
        """Take up a request whose prompt a prefill engine holds. A second request with the same id is ignored.

        One with malformed params is taken up too, and fails: somebody meant it to be pulled.
        """
        if not (is_decode_leg(request.kv_transfer_params) or is_malformed(request.kv_transfer_params)):
            return
        if request.request_id in self._waiting or request.request_id in self._pulling:
            logger.error("PDConnector: request %s came twice; the second one is ignored", request.request_id)
            return
        try:
            remote = parse_remote_prefill(request.kv_transfer_params)
            if not is_placeholder(request):
                check_prompt(remote, request.num_prompt_tokens, prompt_digest(*prompt_shape(request)))
        except ParamsError as error:
            logger.error("PDConnector: request %s cannot pull its prompt: %s", request.request_id, error)
            self._waiting[request.request_id] = _Refused(str(error))
            return
        if remote.lease_id in self._lease_ids or remote.lease_id in self._spent:
            self._waiting[request.request_id] = _Follower(remote.lease_id)
            return
        self._waiting[request.request_id] = remote
        self._lease_ids.add(remote.lease_id)
        self._renewals.keep(request.request_id, remote)

    def must_wait(self, request: "Request") -> bool:
        """Return whether another request is to pull, or pulls, what this one needs."""
        entry = self._waiting.get(request.request_id)
        return isinstance(entry, _Follower) and entry.lease_id in self._lease_ids

    def missing_tokens(self, request: "Request", computed_tokens: int) -> int:
        """Return how many prompt tokens to pull beyond the ``computed_tokens`` that are here already.

        The last prompt token is always computed here, because its output is the first token to sample.
        """
        entry = self._waiting.get(request.request_id)
        if entry is None or isinstance(entry, _Follower):
            return 0
        if isinstance(entry, RemotePrefill) and self._lacks_blocks(entry):
            return 0
        self._computed[request.request_id] = computed_tokens
        wanted: int = request.num_prompt_tokens - 1
        return max(wanted - computed_tokens, 0)

    def allocated(self, request: "Request", blocks: "KVCacheBlocks", external_tokens: int) -> int:
        """Order the pull of ``external_tokens`` tokens into the request's blocks, or cancel the lease if it is 0."""
        if request.request_id not in self._waiting:
            return 0
        self._start_pull(request, block_ids_by_group(blocks), external_tokens)
        return external_tokens

    def step_orders(self, scheduled: Mapping[str, int]) -> Orders:
        """Return the pulls and refusals since the last step."""
        orders = Orders(pulls=tuple(self._pulls), refusals=tuple(self._refusals))
        self._pulls, self._refusals = [], []
        return orders

    def settled(self, request_ids: set[str], failed: set[str], report: Report) -> None:
        """Forget the pulls that all ranks have reported. The ranks have released the leases."""
        for request_id in request_ids:
            self._forget_lease(request_id, self._pulling.pop(request_id, None))

    def finish(self, request: "Request", block_ids: Sequence[Sequence[int]]) -> None:
        """Forget a request that has not started to pull, and cancel its lease. Workers release the leases of pulls."""
        entry = self._waiting.pop(request.request_id, None)
        self._computed.pop(request.request_id, None)
        if entry is not None:
            self._cancel(request.request_id, entry)

    def awaits_blocks(self, request: "Request") -> bool:
        """Return whether a request has yet to be given blocks for what it pulls."""
        return request.request_id in self._waiting

    @property
    def waiting(self) -> int:
        """Number of requests that have yet to be given blocks for what they pull."""
        return len(self._waiting)

    def close(self) -> None:
        """Stop renewing leases."""
        self._renewals.close()

    def check_integrity(self) -> None:
        """Raise AssertionError unless the books balance."""
        assert not self._waiting.keys() & self._pulling.keys(), "a request waits and pulls at once"
        entries = self._waiting | self._pulling
        leased = {request_id for request_id, entry in entries.items() if isinstance(entry, RemotePrefill)}
        assert leased == self._renewals.request_ids, "leases are renewed for other requests than those that need them"
        assert self._computed.keys() <= self._waiting.keys(), "a request that was asked about does not wait any longer"
        assert len(leased) == len(self._lease_ids), "leases in use are not those of the requests that hold one"
        assert not self._lease_ids & self._spent.keys(), "a lease is in use and spent at once"
        assert len(self._spent) <= _MAX_SPENT_LEASES, "spent leases are never forgotten"
        self._renewals.check_integrity()

    def _start_pull(self, request: "Request", block_ids: tuple[tuple[int, ...], ...], external_tokens: int) -> None:
        entry = self._waiting.pop(request.request_id)
        first = self._computed.pop(request.request_id, 0)
        if external_tokens == 0:
            if isinstance(entry, RemotePrefill) and self._lacks_blocks(entry):
                logger.info(
                    "PDConnector: request %s is computed here: the prefill engine no longer has the first block that "
                    "attention to a window or chunk needs", request.request_id,
                )  # fmt: skip
            self._cancel(request.request_id, entry)
            return
        assert not isinstance(entry, _Follower), "a follower pulls nothing"
        self._pulling[request.request_id] = entry
        if isinstance(entry, _Refused):
            self._refusals.append(RefuseOrder(request.request_id, Cause.PARAMS, entry.reason))
            return
        if (lost := self._renewals.lost(request.request_id)) is not None:
            self._refusals.append(RefuseOrder(request.request_id, lost.cause, lost.reason))
            return
        self._renewals.start_reading(request.request_id)
        end = first + external_tokens
        self._pulls.append(PullOrder(request.request_id, entry, block_ids, first, end, uuid.uuid4().hex))

    def _lacks_blocks(self, remote: RemotePrefill) -> bool:
        """Return whether P no longer has blocks that are needed here: of a sliding window, or of the last chunk.

        P keeps what the token after the prompt attends to, in whole blocks of its own size. The last prompt token,
        which is computed here, attends to one token more of a window, and to a whole chunk more where the prompt ends
        with one. Blocks here are filled from their first token. A prompt that needs tokens before P's first block must
        be computed here.
        """
        theirs = remote.remote_block_sizes or [kept.block_tokens for kept in self._retentions]
        for kept, size, block_ids in zip(self._retentions, theirs, remote.remote_block_ids, strict=False):
            first_token = kept.first_token(remote.remote_num_tokens - 1) // kept.block_tokens * kept.block_tokens
            block = first_token // size
            if block < len(block_ids) and block_ids[block] == 0:
                return True
        return False

    def _cancel(self, request_id: str, entry: _Entry) -> None:
        lost = self._renewals.lost(request_id)
        self._forget_lease(request_id, entry)
        if isinstance(entry, RemotePrefill) and lost is None:
            self._renewals.cancel(entry)

    def _forget_lease(self, request_id: str, entry: _Entry | None) -> None:
        """Stop renewing a request's lease. A request that arrives with the lease from now on is too late to pull."""
        self._renewals.drop(request_id)
        if not isinstance(entry, RemotePrefill):
            return
        self._lease_ids.discard(entry.lease_id)
        self._spent[entry.lease_id] = None
        if len(self._spent) > _MAX_SPENT_LEASES:
            del self._spent[next(iter(self._spent))]
