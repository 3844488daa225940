"""The role of a decode engine: decides what to pull, keeps the leases that it needs alive, and ends the others.

A request whose prompt a prefill engine holds, or will hold, passes through these states, each at most once:

    announced                                     named by its router: the prefill engine has yet to compute the prompt
       |--- is being computed there -------.      pulled ahead, as far as ``PullsAhead`` allows
       |--- is complete there              |
       v                                   v
    waiting --- blocks allocated ------> pulling --- all ranks have settled ---> (forgotten)
       |                                   ^
       |--- nothing is missing ------------|---> lease cancelled, computed here
       |--- left before allocation --------|---> lease cancelled
       |--- params refused ----------------|     reported as failed by the workers
       |--- lease has ended, or was given up ---' the same; an announced one does not come, or takes too long
       '--- lease is another request's ----> waits until that one is settled, then takes what the prefix cache holds

A lease is good for one pull, and so is a transfer's name. Requests that share one (vLLM turns ``n`` choices into ``n``
requests) therefore follow the first of them, even if that has been settled before they arrive.

Everything runs on the scheduler's thread, and nothing blocks: the control client's thread resends messages to prefill
engines until they are answered.
"""

import logging
import uuid
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pd_connector.orders import Cause, Orders, PullOrder, RefuseOrder, Report
from pd_connector.params import (
    ParamsError,
    PromptIdentity,
    RemotePrefill,
    RemoteTransfer,
    check_prompt,
    is_decode_leg,
    is_malformed,
    parse_decode_leg,
)
from pd_connector.progress import Progress
from pd_connector.scheduler.completions import Completions
from pd_connector.scheduler.pulls_ahead import PullsAhead
from pd_connector.scheduler.renewals import Renewals
from pd_connector.scheduler.roles import SchedulerRole
from pd_connector.scheduler.subscriptions import Subscriptions, TransferFailed
from pd_connector.stats import ComputedHere, StatsRecorder
from pd_connector.vllm.cache_specs import Retention
from pd_connector.vllm.prompts import Prompts
from pd_connector.vllm.requests import block_ids_by_group, is_placeholder, traceparent

if TYPE_CHECKING:
    from pd_connector.vllm.types import KVCacheBlocks, Request

logger = logging.getLogger(__name__)

#: How many spent leases and transfers are remembered: more than there are requests on the way to this engine.
_MAX_SPENT = 8192

#: What is good for one pull: ("lease", its id), or ("transfer", host, port, its name).
_Key = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _Refused:
    """A decode leg that cannot be pulled."""

    reason: str
    cause: Cause = Cause.PARAMS


@dataclass(frozen=True, slots=True)
class _Follower:
    """A decode leg whose lease or transfer another request uses or has used."""

    key: _Key


@dataclass(slots=True)
class _Announced:
    """A decode leg whose prompt a prefill engine has yet to compute."""

    transfer: RemoteTransfer
    prompt: PromptIdentity | None  # None if it need not be compared
    is_checked: bool = False  # the prompt is that of the other leg


@dataclass(slots=True)
class _Pulling:
    entry: RemotePrefill | _Refused
    refused_for: Cause = Cause.NONE  # known here, so that nothing is read
    has_left: bool = False  # nobody waits for it any longer


_Entry = RemotePrefill | _Refused | _Follower


class Consumer(SchedulerRole):
    """Owns the state of a decode engine's pulls, the renewal of leases, and what is followed at prefill engines."""

    def __init__(
        self,
        renewals: Renewals,
        subscriptions: Subscriptions,
        ahead: PullsAhead,
        completions: Completions,
        retentions: Sequence[Retention] = (),
        prompts: Prompts | None = None,
    ) -> None:
        """``retentions``: of every cache group, in vLLM's order. ``prompts``: knows their media and adapters."""
        self._prompts = prompts or Prompts()
        self._retentions = retentions
        self._renewals = renewals
        self._subscriptions = subscriptions
        self._ahead = ahead
        self._completions = completions
        self._announced: dict[str, _Announced] = {}
        self._waiting: dict[str, _Entry] = {}
        self._pulling: dict[str, _Pulling] = {}
        self._landing: dict[str, _Pulling] = {}  # pulls to host memory: their requests wait, without blocks
        self._keys: dict[str, _Key] = {}  # of the requests that are announced, wait or pull, except followers
        self._in_use: dict[_Key, PromptIdentity | None] = {}  # whose prompts they are
        self._spent: dict[_Key, PromptIdentity | None] = {}  # no longer in use, oldest first
        self._failed: dict[str, str] = {}  # requests whose pulls have failed; why they will compute their prompts
        self._computed: dict[str, int] = {}  # tokens held here when vLLM last asked, by request
        self._computed_here: Counter[str] = Counter()  # prompts, by cause, since the last update of the statistics
        self._pulls: list[PullOrder] = []
        self._refusals: list[RefuseOrder] = []

    def add(self, request: "Request") -> None:
        """Take up a request whose prompt a prefill engine holds. A second request with the same id is ignored.

        One with malformed params is taken up too, and fails: somebody meant it to be pulled.
        """
        if not (is_decode_leg(request.kv_transfer_params) or is_malformed(request.kv_transfer_params)):
            return
        if any(request.request_id in known for known in self._known):
            logger.error("PDConnector: request %s came twice; the second one is ignored", request.request_id)
            return
        prompt = None
        if not is_placeholder(request):
            prompt = self._prompts.identify(request)
        try:
            asked = parse_decode_leg(request.kv_transfer_params)
            if isinstance(asked, RemotePrefill) and prompt is not None:
                check_prompt(asked, prompt)
            self._take_up(request.request_id, asked, prompt)
        except ParamsError as error:
            self._refuse(request.request_id, _Refused(str(error)))

    def must_wait(self, request: "Request") -> bool:
        """Return whether a prefill engine or another request has to go on first with what this one needs."""
        entry = self._waiting.get(request.request_id)
        if isinstance(entry, _Follower):
            return entry.key in self._in_use
        announced = self._announced.get(request.request_id)
        return announced is not None and self._must_wait_for_other_leg(request, announced)

    def missing_tokens(self, request: "Request", computed_tokens: int) -> int:
        """Return how many prompt tokens to pull beyond the ``computed_tokens`` that are here already.

        The last prompt token is always computed here, because its output is the first token to sample.
        """
        self._ahead.asked(request)
        entry = self._waiting.get(request.request_id)
        if entry is None and request.request_id not in self._announced:
            return 0
        self._computed[request.request_id] = computed_tokens
        if isinstance(entry, _Follower) or (isinstance(entry, RemotePrefill) and self._lacks_blocks(entry)):
            return 0
        wanted: int = request.num_prompt_tokens - 1
        return max(wanted - computed_tokens, 0)

    def allocated(self, request: "Request", blocks: "KVCacheBlocks", external_tokens: int) -> int:
        """Order the pull of ``external_tokens`` tokens into the request's blocks, or cancel the lease if it is 0."""
        self._ahead.given()
        request_id = request.request_id
        if (why := self._failed.pop(request_id, None)) is not None:
            self._computed_here[why] += 1
        if request_id not in self._waiting and request_id not in self._announced:
            return 0
        first = self._computed.pop(request_id, 0)
        if external_tokens:
            self._start_pull(request, block_ids_by_group(blocks), range(first, first + external_tokens))
        else:
            self._compute_here(request, first)
        return external_tokens

    def step_orders(self, scheduled: Mapping[str, int]) -> Orders:
        """Return the pulls and refusals since the last step."""
        self._ahead.next_step()
        self._subscriptions.ask_due()
        orders = Orders(pulls=tuple(self._pulls), refusals=tuple(self._refusals))
        self._pulls, self._refusals = [], []
        return orders

    def may_land(self, request: "Request") -> bool:
        """Return whether a request's prompt can be pulled now without blocks of the device."""
        entry = self._waiting.get(request.request_id)
        is_leased = isinstance(entry, RemotePrefill) and self._renewals.lost(request.request_id) is None
        return is_leased and not self._lacks_blocks(entry)  # type: ignore[arg-type]

    def start_landing(self, request: "Request", block_ids: tuple[tuple[int, ...], ...], tokens: range) -> PullOrder:
        """Return the order to pull a request's ``tokens`` to host memory. The request may land, see ``may_land``."""
        entry = self._waiting.pop(request.request_id)
        assert isinstance(entry, RemotePrefill), "only what is leased can land"
        self._computed.pop(request.request_id, None)
        self._landing[request.request_id] = _Pulling(entry)
        self._renewals.start_reading(request.request_id)
        return PullOrder(
            request.request_id, entry, block_ids, tokens.start, tokens.stop, uuid.uuid4().hex,
            traceparent=traceparent(request),
        )  # fmt: skip

    def end_landing(self, request_id: str, *, failed: bool) -> None:
        """Forget a pull to host memory that all ranks have ended. The request of one that has failed is refused."""
        landing = self._landing.pop(request_id)
        self._let_go(request_id)
        if failed and not landing.has_left:
            self._refuse(request_id, _Refused("it could not be brought to host memory", Cause.LANDING))

    @property
    def landing(self) -> set[str]:
        """The requests whose prompts are being pulled to host memory, those that have left included."""
        return set(self._landing)

    def settled(self, request_ids: set[str], failed: set[str], report: Report) -> None:
        """Forget the pulls that all ranks have reported. The ranks have released the leases."""
        for request_id in request_ids & self._pulling.keys():
            pull = self._pulling.pop(request_id)
            self._ahead.end(request_id)
            self._completions.forget(request_id)
            self._let_go(request_id)
            if request_id in failed and not pull.has_left:
                self._failed[request_id] = pull.refused_for or ComputedHere.PULL

    def finish(self, request: "Request", block_ids: Sequence[Sequence[int]]) -> None:
        """Forget a request that has not started to pull, and cancel its lease. Workers release the leases of pulls.

        The lease of a prompt that is still being computed is cancelled nevertheless: workers that follow it then learn
        at once that nothing more will come, and its blocks are free soon.
        """
        request_id = request.request_id
        self._failed.pop(request_id, None)
        self._computed.pop(request_id, None)
        if request_id in self._announced:
            self._abandon(request_id)
        elif (entry := self._waiting.pop(request_id, None)) is not None:
            self._cancel(request_id, entry)
        elif (landing := self._landing.get(request_id)) is not None:
            landing.has_left = True
        elif (pull := self._pulling.get(request_id)) is not None:
            pull.has_left = True
            if request_id in self._ahead and isinstance(pull.entry, RemotePrefill):
                self._renewals.cancel(pull.entry)

    def awaits_blocks(self, request: "Request") -> bool:
        """Return whether a request has yet to be given blocks for what it pulls."""
        return any(request.request_id in known for known in (self._waiting, self._announced, self._landing))

    @property
    def waiting(self) -> int:
        """Number of requests that only wait for blocks for what they pull, not for a prefill engine."""
        return len(self._waiting)

    @property
    def waiting_for_prefill(self) -> int:
        """Number of requests, if each of them waits for a prefill engine whose news wake this one; else 0."""
        if self._waiting or self._landing or len(self._pulling) != len(self._completions):
            return 0
        return len(self._announced) + len(self._pulling)

    def update_stats(self, stats: StatsRecorder) -> None:
        """Record how many requests wait for prefill engines, and which prompts were computed here."""
        stats.gauge("transfers_waiting", len(self._announced))
        stats.gauge("prompts_ahead", len(self._ahead))
        for cause, number in self._computed_here.items():
            stats.count("prompts_computed", number, cause)
        self._computed_here.clear()

    def close(self) -> None:
        """Stop following transfers and renewing leases."""
        self._subscriptions.close()
        self._renewals.close()

    def check_integrity(self) -> None:
        """Raise AssertionError unless the books balance."""
        announced, waiting = self._announced.keys(), self._waiting.keys()
        assert len(frozenset[str]().union(*self._known)) == sum(map(len, self._known)), "one is in two states"
        pulls = self._pulling | self._landing
        entries = self._waiting | {request_id: pull.entry for request_id, pull in pulls.items()}
        leased = {request_id for request_id, entry in entries.items() if isinstance(entry, RemotePrefill)}
        renewed = self._renewals.request_ids
        assert leased <= renewed <= leased | announced, (
            "leases are renewed for other requests than those that need them"
        )
        assert announced == self._subscriptions.request_ids, (
            "other transfers are followed than those that are announced"
        )
        assert self._computed.keys() <= waiting | announced, "a request that was asked about does not wait any longer"
        assert leased | announced <= self._keys.keys() <= entries.keys() | announced, "a lease in use is nobody's"
        assert set(self._keys.values()) == self._in_use.keys(), "what is in use is not what the requests hold"
        assert len(self._keys) == len(self._in_use), "two requests use the same lease or transfer"
        assert not self._in_use.keys() & self._spent.keys(), "a lease or transfer is in use and spent at once"
        assert len(self._spent) <= _MAX_SPENT, "what is spent is never forgotten"
        self._ahead.check_integrity()
        self._subscriptions.check_integrity()
        self._renewals.check_integrity()

    @property
    def _known(self) -> tuple[Mapping[str, object], ...]:
        return self._announced, self._waiting, self._landing, self._pulling

    def _take_up(self, request_id: str, asked: RemotePrefill | RemoteTransfer, prompt: PromptIdentity | None) -> None:
        """Note a decode leg with good params.

        Raises:
            ParamsError: its transfer is that of another prompt.
        """
        if isinstance(asked, RemotePrefill):
            key: _Key = ("lease", asked.lease_id)
        else:
            key = ("transfer", asked.remote_host, str(asked.remote_port), asked.transfer_id)
        if key in self._in_use or key in self._spent:
            of = self._in_use.get(key) or self._spent.get(key)
            if isinstance(asked, RemoteTransfer) and prompt is not None and of is not None and prompt != of:
                raise ParamsError(
                    f"{asked.label} is that of another request, whose prompt has {of.tokens} tokens (digest "
                    f"{of.digest or 'unknown'}), and this one has {prompt.tokens} ({prompt.digest or 'unknown'}): each "
                    "request needs a transfer_id of its own"
                )
            self._waiting[request_id] = _Follower(key)
            return
        self._keys[request_id] = key
        self._in_use[key] = prompt
        if isinstance(asked, RemotePrefill):
            self._waiting[request_id] = asked
            self._renewals.keep(request_id, asked)
        else:
            self._announced[request_id] = _Announced(asked, prompt)
            self._subscriptions.follow(request_id, asked)

    def _must_wait_for_other_leg(self, request: "Request", announced: _Announced) -> bool:
        """Return whether a request cannot be pulled yet, or not ahead. It may become one that waits for blocks only."""
        request_id = request.request_id
        found = self._subscriptions.look(request_id)
        if found is None:
            return True
        if isinstance(found, Progress) and not announced.is_checked:
            found = self._checked(found, announced)
        if isinstance(found, TransferFailed):
            del self._announced[request_id]
            self._subscriptions.end(request_id)
            self._renewals.drop(request_id)
            self._refuse(request_id, _Refused(found.reason, found.cause))
            return False
        if found.is_complete:
            del self._announced[request_id]
            self._subscriptions.end(request_id)
            self._waiting[request_id] = found.remote
            return False
        return self._will_lack_blocks(found.remote) or not self._ahead.has_room(request)

    @staticmethod
    def _checked(found: Progress, announced: _Announced) -> Progress | TransferFailed:
        if announced.prompt is not None:
            try:
                check_prompt(found.remote, announced.prompt)
            except ParamsError as error:
                return TransferFailed(Cause.PARAMS, f"{announced.transfer.label} is of another prompt: {error}")
        announced.is_checked = True
        return found

    def _refuse(self, request_id: str, refused: _Refused) -> None:
        logger.error("PDConnector: request %s cannot pull its prompt: %s", request_id, refused.reason)
        self._waiting[request_id] = refused

    def _start_pull(self, request: "Request", block_ids: tuple[tuple[int, ...], ...], tokens: range) -> None:
        request_id = request.request_id
        transfer_id, complete_tokens = "", 0
        if (announced := self._announced.pop(request_id, None)) is not None:
            found = self._subscriptions.end(request_id)
            if isinstance(found, TransferFailed):
                entry: _Entry = _Refused(found.reason, found.cause)
            elif found.is_complete:
                entry = found.remote
            else:
                entry = remote = found.remote
                transfer_id, complete_tokens = announced.transfer.transfer_id, found.tokens
                self._renewals.keep(request_id, entry)
                self._ahead.start(request)
                self._completions.expect(request_id, announced.transfer, remote)
        else:
            entry = self._waiting.pop(request_id)
        assert not isinstance(entry, _Follower), "a follower pulls nothing"
        if isinstance(entry, RemotePrefill) and (lost := self._renewals.lost(request_id)) is not None:
            refusal: _Refused | None = _Refused(lost.reason, lost.cause)
        else:
            refusal = entry if isinstance(entry, _Refused) else None
        self._pulling[request_id] = _Pulling(entry, refusal.cause if refusal is not None else Cause.NONE)
        if refusal is not None:
            self._refusals.append(RefuseOrder(request_id, refusal.cause, refusal.reason, traceparent(request)))
            return
        assert isinstance(entry, RemotePrefill)
        self._renewals.start_reading(request_id)
        order = PullOrder(
            request_id, entry, block_ids, tokens.start, tokens.stop, uuid.uuid4().hex, transfer_id, complete_tokens,
            traceparent(request),
        )  # fmt: skip
        self._pulls.append(order)

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

    def _will_lack_blocks(self, remote: RemotePrefill) -> bool:
        """Return whether P will lack such blocks once it has computed the prompt, if its windows are those here.

        Then D waits to see whether it does, instead of pulling what may be of no use.
        """
        theirs = remote.remote_block_sizes or [kept.block_tokens for kept in self._retentions]
        for kept, size in zip(self._retentions, theirs, strict=False):
            first_token = kept.first_token(remote.remote_num_tokens - 1) // kept.block_tokens * kept.block_tokens
            if first_token // size < kept.first_token(remote.remote_num_tokens) // size:
                return True
        return False

    def _compute_here(self, request: "Request", computed_tokens: int) -> None:
        """Let go of what a request does not pull after all; count its prompt if more than its last token is missing."""
        request_id = request.request_id
        entry: _Entry | _Announced
        if (announced := self._announced.get(request_id)) is not None:
            entry = announced
            self._abandon(request_id)
        else:
            entry = self._waiting.pop(request_id)
            self._cancel(request_id, entry)
        missing = request.num_prompt_tokens - 1 - computed_tokens
        if isinstance(entry, _Follower):  # the last block, which is not full, is in nobody's prefix cache
            missing -= max((kept.block_tokens for kept in self._retentions), default=1) - 1
        if missing <= 0:
            return
        why = self._why_computed(entry)
        self._computed_here[why] += 1
        if why == ComputedHere.WINDOW:
            logger.info(
                "PDConnector: request %s is computed here: the prefill engine no longer has the first block that "
                "attention to a window or chunk needs", request_id,
            )  # fmt: skip

    def _why_computed(self, entry: "_Entry | _Announced") -> str:
        match entry:
            case _Refused():
                return entry.cause
            case _Follower():
                return ComputedHere.SHARED
            case RemotePrefill() if self._lacks_blocks(entry):
                return ComputedHere.WINDOW
        return ComputedHere.DECLINED

    def _abandon(self, request_id: str) -> None:
        """Forget a request whose prompt is still to be computed, and tell the prefill engine."""
        del self._announced[request_id]
        self._subscriptions.abandon(request_id)
        self._let_go(request_id)

    def _cancel(self, request_id: str, entry: _Entry) -> None:
        lost = self._renewals.lost(request_id)
        self._let_go(request_id)
        if isinstance(entry, RemotePrefill) and lost is None:
            self._renewals.cancel(entry)

    def _let_go(self, request_id: str) -> None:
        """Stop renewing a request's lease. A request that arrives with it, or its name, from now on is too late."""
        self._renewals.drop(request_id)
        if (key := self._keys.pop(request_id, None)) is not None:
            self._spent[key] = self._in_use.pop(key)
            if len(self._spent) > _MAX_SPENT:
                del self._spent[next(iter(self._spent))]
