"""The role of a decode engine: decides what to pull, keeps the leases that it needs alive, and ends the others.

A request whose prompt a prefill engine holds, or will hold, passes through these states, each at most once:

    announced                                     named by its router: the prefill engine has yet to compute the prompt
       |--- is being computed there -------.      pulled ahead, as far as ``PullsAhead`` allows
       |--- is complete there              |
       v                                   v
    waiting --- blocks allocated ------> pulling --- all ranks have settled ---> (forgotten), or states at borders next
       |                                   ^
       |--- nothing is missing ------------|---> lease cancelled, computed here
       |--- its engine is not proven -------|---> proving: computed here, and pulled as well (see ``canaries``)
       |--- left, or needs all computed ---|---> lease cancelled at once
       |--- params refused ----------------|     reported as failed by the workers
       |--- lease has ended, or was given up ---' the same; an announced one does not come, or takes too long
       '--- lease is another request's ----> waits until that one is settled, then takes what the prefix cache holds

A lease is good for one pull, and so is a transfer's name. Requests that share one (vLLM turns ``n`` choices into ``n``
requests) therefore follow the first of them, even if that has been settled before they arrive. A choice that comes
before the first one of its request is alone: that is at another data-parallel engine. It is computed here.

Everything runs on the scheduler's thread, and nothing blocks: the control client's thread resends messages to prefill
engines until they are answered.
"""

import logging
import uuid
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING

from layout.geometry import layers_by_group
from pd_connector.orders import Cause, Orders, PullOrder, RefuseOrder, Report, WorkerHandshake
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
from pd_connector.scheduler.decode.border_states import BorderStates
from pd_connector.scheduler.decode.canaries import Canaries, Standing
from pd_connector.scheduler.decode.computed_prompts import ComputedPrompts
from pd_connector.scheduler.decode.legs import (
    Announced,
    Bordering,
    Computed,
    Entry,
    Follower,
    Landed,
    Landing,
    Legs,
    Proving,
    Pulling,
    Refused,
    Waiting,
    lease,
)
from pd_connector.scheduler.decode.look_ups import LookUps
from pd_connector.scheduler.decode.needed_blocks import NeededBlocks
from pd_connector.scheduler.decode.pulls_ahead import PullsAhead
from pd_connector.scheduler.decode.renewals import Renewals
from pd_connector.scheduler.decode.single_use import SingleUse, key_of
from pd_connector.scheduler.decode.subscriptions import Subscriptions
from pd_connector.scheduler.scheduler_role import SchedulerRole
from pd_connector.stats import ComputedHere, StatsRecorder
from pd_connector.vllm.cache_specs import Retention
from pd_connector.vllm.prompts import Prompts
from pd_connector.vllm.requests import (
    block_ids_by_group,
    computes_whole_prompt,
    ends_with_media,
    is_later_choice,
    is_placeholder,
    is_told_by_tokens,
    traceparent,
)

if TYPE_CHECKING:
    from pd_connector.vllm.types import KVCacheBlocks, Request

logger = logging.getLogger(__name__)


class Consumer(SchedulerRole):
    """Owns the state of a decode engine's pulls, the renewal of leases, and what is followed at prefill engines."""

    def __init__(
        self,
        renewals: Renewals,
        subscriptions: Subscriptions,
        ahead: PullsAhead,
        retentions: Sequence[Retention],
        layers: Sequence[Collection[str]],
        canaries: Canaries,
        prompts: Prompts,
        borders: BorderStates,
    ) -> None:
        """``retentions`` and ``layers``: of every cache group, in vLLM's order. Until ``set_workers``, layers of a
        pipeline stage are enough. ``canaries`` is a role of its own, asked before. ``prompts`` knows media, adapters.
        """
        self._borders = borders
        self._prompts = prompts
        self._needed = NeededBlocks(retentions, layers)
        self._canaries = canaries
        self._renewals = renewals
        self._subscriptions = subscriptions
        self._ahead = ahead
        self._legs = Legs()
        self.look_ups = LookUps(self._legs, subscriptions, canaries)
        self._used = SingleUse()  # by the legs that need a lease or are announced
        self._pulls: list[PullOrder] = []
        self._border_orders: list[PullOrder] = []
        self._refusals: list[RefuseOrder] = []
        self._computed = ComputedPrompts(self._needed, retentions, self._is_untried)

    def set_workers(self, handshakes: Sequence[WorkerHandshake]) -> None:
        """Learn the layers of all pipeline stages."""
        self._needed.set_layers(layers_by_group([handshake.geometry for handshake in handshakes]))

    def add(self, request: "Request") -> None:
        """Take up a request whose prompt a prefill engine holds. A second request with the same id is ignored.

        One with malformed params is taken up too, and fails: somebody meant it to be pulled. The prefill engine of one
        whose whole prompt must be computed here is told at once that nobody will read.
        """
        if not (is_decode_leg(request.kv_transfer_params) or is_malformed(request.kv_transfer_params)):
            return
        if request.request_id in self._legs:
            logger.error("PDConnector: request %s came twice; the second one is ignored", request.request_id)
            return
        prompt = None if is_placeholder(request) else self._prompts.identify(request)
        try:
            asked = parse_decode_leg(request.kv_transfer_params)
            if self._prompts.continues(request, earlier := self._used.spent_by(asked)):
                prompt = earlier  # vLLM calls a tool of its own, and asks anew with the same params: nothing is pulled
            if isinstance(asked, RemotePrefill) and prompt is not None:
                check_prompt(asked, prompt)
            self._take_up(request.request_id, asked, prompt)
        except ParamsError as error:
            self._refuse(request.request_id, Refused(Cause.PARAMS, str(error)))
        if computes_whole_prompt(request):
            entry = self._give_up(request.request_id)
            cause = entry.cause if isinstance(entry, Refused) else ComputedHere.PROMPT
            self._legs.put(request.request_id, Computed(cause))

    def must_wait(self, request: "Request", computed_tokens: int) -> bool:
        """Return whether a prefill engine or another request has to go on first with what this one needs."""
        match self._legs.get(request.request_id):
            case Waiting(Follower(key)):
                return self._used.is_in_use(key)
            case Waiting(RemotePrefill() as remote):
                return self._must_wait_for_verdict(request, remote)
            case Announced() as leg:
                return self._must_wait_for_other_leg(request, leg)
        return False

    def is_waiting(self, request: "Request") -> bool:
        """Return whether a prefill engine has yet to begin with a prompt, or another request uses what it needs."""
        match self._legs.get(request.request_id):
            case Waiting(Follower(key)):
                return self._used.is_in_use(key)
        return self.look_ups.awaits_prefill(request)

    def missing_tokens(self, request: "Request", computed_tokens: int) -> int:
        """Return how many prompt tokens to pull beyond the ``computed_tokens`` that are here already.

        The last prompt token is always computed here, because its output is the first token to sample.
        """
        leg = self._legs.get(request.request_id)
        if not isinstance(leg, Announced | Landed | Waiting):
            return 0
        leg.computed_tokens = computed_tokens
        match leg:
            case Landed() | Waiting(Follower()):
                return 0
            case Waiting(RemotePrefill() as remote) if self._is_useless(request, remote, computed_tokens):
                return 0
        wanted: int = request.num_prompt_tokens - 1
        return max(wanted - computed_tokens, 0)

    def allocated(self, request: "Request", blocks: "KVCacheBlocks", external_tokens: int) -> int:
        """Order the pull of ``external_tokens`` tokens into the request's blocks, or cancel the lease if it is 0."""
        leg = self._legs.get(request.request_id)
        match leg:
            case Computed():
                self._count_computed(leg.cause)
                self._legs.drop(request.request_id)
            case Landed():
                self._count_computed(self._computed.cause(request, leg, leg.computed_tokens))
                self._legs.drop(request.request_id)
        if not isinstance(leg, Announced | Waiting):
            return 0
        first = leg.computed_tokens
        if external_tokens:
            self._start_pull(request, leg, block_ids_by_group(blocks), range(first, first + external_tokens))
        elif not self._is_canary(request, leg):
            self._count_computed(self._computed.cause(request, self._give_up(request.request_id), first))
        return external_tokens

    def step_orders(self, scheduled: Mapping[str, int]) -> Orders:
        """Return the pulls and refusals since the last step."""
        self._subscriptions.ask_due()
        orders = Orders(tuple(self._pulls), tuple(self._border_orders), refusals=tuple(self._refusals))
        self._pulls, self._border_orders, self._refusals = [], [], []
        return orders

    def may_land(self, request: "Request") -> RemotePrefill | None:
        """Return the lease of a request's prompt if that can be pulled now without blocks of the device."""
        match self._legs.get(request.request_id):
            case Waiting(RemotePrefill() as remote) if self._renewals.lost(request.request_id) is None:
                return None if self._is_useless(request, remote) else remote
        return None

    def borders(
        self, request: "Request", remote: RemotePrefill, tokens: range, *, is_complete: bool = True
    ) -> tuple[int, ...]:
        """Return after how many tokens states are pulled beside ``tokens``. ``is_complete``: whether the prompt is."""
        if not self._canaries.proves_states(request, remote):
            return ()
        return self._borders.choose(tokens, self._needed.held_states(remote) if is_complete else None)

    def start_landing(self, request: "Request", block_ids: tuple[tuple[int, ...], ...], tokens: range) -> PullOrder:
        """Return the order to pull a request's ``tokens`` to host memory. The request may land, see ``may_land``."""
        leg = self._legs.get(request.request_id)
        remote = leg.entry if isinstance(leg, Waiting) else None
        assert isinstance(remote, RemotePrefill), "only what is leased can land"
        self._legs.put(request.request_id, Landing(remote))
        self._renewals.start_reading(request.request_id)
        return PullOrder(
            request.request_id, remote, block_ids, tokens.start, tokens.stop, uuid.uuid4().hex,
            traceparent=traceparent(request),
        )  # fmt: skip

    def end_landing(self, request_id: str, *, failed: bool) -> None:
        """Note that all ranks have ended a pull to host memory. The request of one that has failed is refused."""
        landing = self._legs.get(request_id)
        assert isinstance(landing, Landing), "a pull that is not under way has ended"
        self._let_go(request_id)
        if landing.has_left:
            return
        if failed:
            self._refuse(request_id, Refused(Cause.LANDING, "it could not be brought to host memory"))
        else:
            self._legs.put(request_id, Landed())

    @property
    def landing(self) -> set[str]:
        """The requests whose prompts are being pulled to host memory, those that have left included."""
        return self._requests(Landing)

    def _requests(self, kind: type) -> set[str]:
        return {request_id for request_id, leg in self._legs.items() if isinstance(leg, kind)}

    def settled(self, request_ids: set[str], failed: set[str], report: Report) -> None:
        """Forget the pulls that all ranks have reported. The ranks have released the leases."""
        for request_id in (*self._canaries.take_ended(), *self._borders.settled(report.borders)):
            self._let_go(request_id)
        for request_id in request_ids:
            pull = self._legs.get(request_id)
            if not isinstance(pull, Pulling):
                continue
            self._ahead.end(request_id)
            self._subscriptions.forget(request_id)
            self._pull_borders(request_id, is_right=request_id not in failed and not pull.has_left)
            self._let_go(request_id)
            if request_id in failed and not pull.has_left:
                self._legs.put(request_id, Computed(pull.refused_for or ComputedHere.PULL))

    def finish(self, request: "Request", block_ids: Sequence[Sequence[int]]) -> None:
        """Forget a request that has not started to pull, and cancel its lease. Workers release the leases of pulls.

        The lease of a prompt that is still being computed is cancelled nevertheless: workers that follow it then learn
        at once that nothing more will come, and its blocks are free soon.
        """
        request_id = request.request_id
        match self._legs.get(request_id):
            case Announced() | Waiting():
                self._give_up(request_id)
            case Computed() | Landed():
                self._legs.drop(request_id)
            case Landing() as landing:
                landing.has_left = True
            case Pulling() as pull:
                pull.has_left = True
                if request_id in self._ahead and isinstance(pull.entry, RemotePrefill):
                    self._renewals.cancel(pull.entry)

    def awaits_blocks(self, request: "Request") -> bool:
        """Return whether a request has yet to be given blocks for what it pulls."""
        return isinstance(self._legs.get(request.request_id), Announced | Waiting | Landing)

    @property
    def waiting(self) -> int:
        """Number of requests that only wait for blocks for what they pull, not for a prefill engine or a verdict."""
        for_verdicts = (self._legs.get(request_id) for request_id in self._canaries.waiting)
        return self._legs.number(Waiting) - sum(isinstance(leg, Waiting) for leg in for_verdicts)

    @property
    def waiting_for_prefill(self) -> int:
        """Number of requests, if each of them waits for a prefill engine whose news wake this one; else 0.

        One that waits for a verdict counts: the canary's steps wake this engine.
        """
        if self._legs.number(Waiting, Landing) or self._legs.number(Pulling) != len(self._subscriptions.pulled):
            return 0
        return self._legs.number(Announced, Pulling)

    def update_stats(self, stats: StatsRecorder) -> None:
        """Record how many requests wait for prefill engines, and which prompts were computed here."""
        super().update_stats(stats)
        stats.gauge("transfers_waiting", self._legs.number(Announced))
        stats.gauge("prompts_ahead", len(self._ahead))

    @property
    def wants_step(self) -> bool:
        """Whether the engine must step even without requests, to learn that states at borders are here."""
        return self._legs.number(Bordering) > 0

    def reset(self) -> bool:
        """Let nobody find states at borders that are being pulled: they are no longer valid."""
        self._borders.forget()
        return True

    def close(self) -> None:
        """Stop following transfers and renewing leases."""
        self._subscriptions.close()
        self._renewals.close()

    def check_integrity(self) -> None:
        """Raise AssertionError unless the books balance."""
        announced = self._requests(Announced)
        leased = {request_id for request_id, leg in self._legs.items() if lease(leg) is not None}
        held = {request_id for request_id, leg in self._legs.items() if not isinstance(leg, Computed)}
        assert self._requests(Proving) == self._canaries.request_ids, "the canaries under way are not those of requests"
        renewed = self._renewals.request_ids
        assert leased <= renewed <= leased | announced, "leases are renewed for requests that need none"
        assert announced == self._subscriptions.request_ids, "other transfers are followed than those announced"
        assert leased | announced <= self._used.request_ids <= held, "a lease in use is nobody's"
        assert self._borders.request_ids <= self._requests(Pulling), "blocks for states are lost"
        assert self._borders.pull_ids == self._requests(Bordering), "a lease is kept for states that nobody pulls"
        self._used.check_integrity()
        self._ahead.check_integrity()
        self._subscriptions.check_integrity()
        self._renewals.check_integrity()

    def _take_up(self, request_id: str, asked: RemotePrefill | RemoteTransfer, prompt: PromptIdentity | None) -> None:
        """Note a decode leg with good params.

        Raises:
            ParamsError: its transfer is that of another prompt.
        """
        key = key_of(asked)
        if self._used.is_known(key) or is_later_choice(request_id):
            self._used.check_prompt(asked, prompt)
            self._legs.put(request_id, Waiting(Follower(key)))
            return
        self._used.take(request_id, key, prompt)
        if isinstance(asked, RemotePrefill):
            self._legs.put(request_id, Waiting(asked))
            self._renewals.keep(request_id, asked)
        else:
            self._legs.put(request_id, Announced(asked, prompt))
            self._subscriptions.follow(request_id, asked)

    def _must_wait_for_other_leg(self, request: "Request", announced: Announced) -> bool:
        """Return whether a request cannot be pulled yet, or not ahead. It may become one that waits for blocks only."""
        request_id = request.request_id
        found = self._subscriptions.look(request_id)
        if found is None:
            return True
        if isinstance(found, Progress) and not announced.is_checked:
            announced.is_checked = True
            if reason := announced.mismatch(found.remote):
                found = Refused(Cause.PARAMS, reason)
        if isinstance(found, Refused):
            self._subscriptions.forget(request_id)
            self._renewals.drop(request_id)
            self._refuse(request_id, found)
            return False
        if found.is_complete:
            self._subscriptions.take(request_id)
            self._legs.put(request_id, Waiting(found.remote))
            return self._must_wait_for_verdict(request, found.remote)
        if (standing := self._canaries.look(request, found.remote)) is not Standing.PROVEN:
            if isinstance(standing, Refused):
                self._subscriptions.abandon(request_id)
                self._refuse(request_id, standing)
            return not isinstance(standing, Refused)  # a canary is of a prompt that is complete
        # What will be of no use is not pulled ahead: it shows whether it is once the prompt is complete.
        will_lack = self._needed.will_lack(found.remote, found.first_tokens, is_cut=not ends_with_media(request))
        return will_lack or not self._ahead.has_room(request)

    def _must_wait_for_verdict(self, request: "Request", remote: RemotePrefill) -> bool:
        """Return whether a request waits until its prefill engine is proven. If it is not to be used, refuse it."""
        standing = self._canaries.look(request, remote)
        if isinstance(standing, Refused):
            if self._renewals.lost(request.request_id) is None:
                self._renewals.cancel(remote)
            self._renewals.drop(request.request_id)
            self._refuse(request.request_id, standing)
        return standing is Standing.AWAITED

    def _is_useless(self, request: "Request", remote: RemotePrefill, computed_tokens: int = 0) -> bool:
        """Return whether nothing is to be pulled for a request: P lacks blocks, or has yet to be proven."""
        return self._needed.lacking(remote, computed_tokens) is not None or self._is_untried(request, remote)

    def _is_untried(self, request: "Request", remote: RemotePrefill) -> bool:
        lost = self._renewals.lost(request.request_id) is not None
        return not lost and self._canaries.look(request, remote) is Standing.UNTRIED

    def _is_canary(self, request: "Request", leg: Announced | Waiting) -> bool:
        """Return whether a request that is computed here proves its prefill engine; begin that."""
        remote, computed_tokens = lease(leg), leg.computed_tokens
        if remote is None or not self._is_untried(request, remote) or self._needed.lacking(remote, computed_tokens):
            return False
        is_same, held = is_told_by_tokens(request), self._needed.held_states(remote)
        if not self._canaries.begin(request, remote, computed_tokens, is_same_prompt=is_same, held_states=held):
            return False
        self._legs.put(request.request_id, Proving(remote))
        self._renewals.start_reading(request.request_id)
        return True

    def _refuse(self, request_id: str, refused: Refused) -> None:
        level = logging.INFO if refused.cause.comes_of_leaving else logging.ERROR  # a worker's line tells who stayed
        logger.log(level, "PDConnector: request %s cannot pull its prompt: %s", request_id, refused.reason)
        self._legs.put(request_id, Waiting(refused))

    def _start_pull(
        self, request: "Request", leg: Announced | Waiting, block_ids: tuple[tuple[int, ...], ...], tokens: range
    ) -> None:
        request_id = request.request_id
        transfer_id, complete_tokens = "", 0
        if isinstance(leg, Announced):
            found = self._subscriptions.take(request_id)
            entry: Entry = found if isinstance(found, Refused) else found.remote
            if isinstance(found, Progress) and not found.is_complete:
                transfer_id, complete_tokens = leg.transfer.transfer_id, found.tokens
                self._renewals.keep(request_id, found.remote)
                self._ahead.start(request)
        else:
            entry = leg.entry
        assert not isinstance(entry, Follower), "a follower pulls nothing"
        refusal = entry if isinstance(entry, Refused) else self._renewals.lost(request_id)
        self._legs.put(request_id, Pulling(entry, refusal.cause if refusal is not None else Cause.NONE))
        if refusal is not None:
            self._refusals.append(RefuseOrder(request_id, refusal.cause, refusal.reason, traceparent(request)))
            return
        assert isinstance(entry, RemotePrefill)
        self._renewals.start_reading(request_id)
        order = PullOrder(
            request_id, entry, block_ids, tokens.start, tokens.stop, uuid.uuid4().hex, transfer_id, complete_tokens,
            traceparent(request),
        )  # fmt: skip
        wanted = self._borders.from_state(request, tokens)
        borders = self.borders(request, entry, wanted, is_complete=not transfer_id)
        self._pulls.append(self._borders.add(request, order, borders))

    def _pull_borders(self, request_id: str, *, is_right: bool) -> None:
        """Go on with the states at borders behind a request's pull, under its lease: they follow nobody else's.

        Whoever follows the request waits for them, because without them nothing of the prompt is found.
        """
        order, goes_on = self._borders.go_on(request_id, is_right=is_right) or (None, False)
        if order is not None and goes_on:
            self._legs.put(order.request_id, Bordering(order.remote))
            self._used.pass_on(request_id, order.request_id)
            self._renewals.keep(order.request_id, order.remote)
            self._renewals.start_reading(order.request_id)
            self._border_orders.append(order)
        elif order is not None:
            self._renewals.cancel(order.remote)

    def _count_computed(self, cause: str) -> None:
        if cause:
            self.counts["prompts_computed", cause] += 1

    def _give_up(self, request_id: str) -> "Entry | Announced":
        """Forget what a request has not started to pull, and tell the prefill engine; return what it was."""
        leg = self._legs.get(request_id)
        assert isinstance(leg, Announced | Waiting), "what is being pulled cannot be given up"
        if isinstance(leg, Announced):
            self._subscriptions.abandon(request_id)
            self._let_go(request_id)
            return leg
        lost = self._renewals.lost(request_id)
        self._let_go(request_id)
        if isinstance(leg.entry, RemotePrefill) and lost is None:
            self._renewals.cancel(leg.entry)
        return leg.entry

    def _let_go(self, request_id: str) -> None:
        """Forget a leg and its lease. A request that arrives with it, or its name, from now on is too late."""
        self._legs.drop(request_id)
        self._renewals.drop(request_id)
        self._used.let_go(request_id)
