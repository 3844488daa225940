"""Watches the prompts that are followed by name on their way through a prefill engine, and announces what is complete.

vLLM tells a connector what a step is to compute, not that it has. So each worker returns the number of a step with the
step's results: when all have, every rank has written what the step computed, as far as a sampled token proves it, which
is what leases rest on too. What a prompt finds in the prefix cache is complete at once, but for blocks that steps under
way still write for other requests, or that other connectors load in them. What it finds in host memory that peers can
read is complete there at once, and on the device when it has been loaded.

Everything runs on the scheduler's thread.
"""

import logging
import math
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Set
from dataclasses import dataclass, field
from functools import cache, partial
from itertools import islice
from typing import TYPE_CHECKING

from pd_connector.params import ParamsError, is_decode_leg, is_prefill_leg, prefill_transfer_id
from pd_connector.scheduler.host.prompt_slots import PromptSlots
from pd_connector.scheduler.prefill.lease_service import LeaseService
from pd_connector.vllm.block_pools import Leased
from pd_connector.vllm.cache_specs import RING_TOKENS
from pd_connector.vllm.device_blocks import DeviceBlocks, tokens_before
from pd_connector.vllm.requests import tokens_under_way

if TYPE_CHECKING:
    from pd_connector.vllm.types import Request

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _Named:
    """A named prompt that is queued or being computed."""

    request: "Request"
    transfer_id: str
    preemptions: int  # of the request, when its attempt began
    tokens: int  # of the prompt
    loaded: int = 0  # how far it is loaded before its first step, if followers know the slots
    attempt: int = 0
    end: int = 0  # how far its steps have been scheduled


@dataclass(frozen=True, slots=True)
class _Computed:
    """What a step computes of a named prompt."""

    request_id: str
    attempt: int
    tokens: int  # the prompt's first ones, complete when the step has ended


@dataclass(frozen=True, slots=True)
class _Writers:
    """Who may write blocks in steps under way."""

    request_ids: Set[str]
    blocks: Counter[int]  # for how many, by block id; all of whom nothing is known are one


@dataclass(slots=True)
class _Step:
    """A step that may be under way."""

    scheduled: Mapping[str, int]  # tokens of each request
    preemptions: Mapping[str, int]  # of those of them that had been preempted when it was scheduled
    #: Blocks of requests that have ended since, which it or an older step may still write.
    left: set[int] = field(default_factory=set)
    has_lost: bool = False  # whether there are others of which nobody knows


def _have_lost(steps: "Iterable[_Step]", request: "Request") -> bool:
    """Return whether vLLM has taken the blocks of a request since one of some steps was scheduled to write to them."""
    request_id = request.request_id
    return request.num_preemptions > 0 and any(
        request_id in step.scheduled and step.preemptions.get(request_id, 0) < request.num_preemptions for step in steps
    )


class Announcer:
    """Owns the named prompts of an engine, and the steps that are to be reported."""

    def __init__(
        self,
        service: LeaseService[Leased],
        blocks: DeviceBlocks,
        counts: Counter[tuple[str, str]],
        steps_in_flight: int = 2,
        slots: PromptSlots | None = None,
        unproven: Callable[[], frozenset[int]] = frozenset,
        *,
        drafts_late: bool = False,
    ) -> None:
        """Start without prompts.

        Args:
            service: told what is complete.
            blocks: of the device.
            counts: see ``SchedulerRole.counts``.
            steps_in_flight: how many steps vLLM schedules at most before the first of them has ended.
            slots: of host memory that peers can read; None if they cannot.
            unproven: returns the ids of the blocks into which other connectors load in steps that may be under way.
            drafts_late: whether a step may have ended for vLLM before it has written all layers. Then nothing is
                complete before its step is reported.
        """
        self._drafts_late = drafts_late
        self._last_steps: dict[str, int] = {}  # if so: the number of the last step of each request
        self._unwritten: dict[int, list[str]] = {}  # leases that are complete when a step has been reported
        self._slots = slots or PromptSlots()
        self._unproven = unproven
        self._given: list[str] = []  # requests that vLLM has given blocks since the last step
        self._service, self._transfers = service, service.transfers
        self._blocks = blocks
        self._requests: dict[str, Request] = {}
        self._named: dict[str, _Named] = {}
        self._names: set[str] = set()  # of those
        self._begun: dict[str, _Named] = {}  # those of them that have blocks
        self._unwanted: set[str] = set()  # requests whose transfers were cancelled before they came
        self._recent: deque[_Step] = deque(maxlen=steps_in_flight)  # oldest first
        self._most_under_way = steps_in_flight - 1  # when the oldest of them ends
        self._steps: dict[int, tuple[_Computed, ...]] = {}  # that are to be reported, oldest first
        self._reports: Counter[int] = Counter()  # ranks that have, by step
        self._next_step = 0
        self._counts = counts
        self._news: dict[str, None] = {}  # names, an ordered set: told together, because that wakes another thread

    def add(self, request: "Request") -> None:
        """Take up a new request.

        A wrong transfer id, or one that is in use, is logged and counted: the prompt then has no name.
        """
        self._requests[request.request_id] = request
        if not is_prefill_leg(request.kv_transfer_params) or is_decode_leg(request.kv_transfer_params):
            return
        try:
            transfer_id = prefill_transfer_id(request.kv_transfer_params)
            if not transfer_id:
                return
            # The transfer may be forgotten already: it was cancelled, and its request is still being served.
            if transfer_id in self._names:
                raise ValueError(f"transfer id {transfer_id} belongs to another request: each needs its own")
            is_wanted = self._service.begin(request, transfer_id)
        except (ParamsError, ValueError) as error:
            logger.error("PDConnector: request %s cannot be followed by name: %s", request.request_id, error)
            self._counts["transfers", "refused"] += 1
            return
        if not is_wanted:
            self._unwanted.add(request.request_id)
            return
        named = _Named(request, transfer_id, request.num_preemptions, request.num_prompt_tokens)
        self._named[request.request_id] = named
        self._names.add(transfer_id)
        self._counts["transfers", "begun"] += 1
        self._service.notify(transfer_id)

    def transfer_id(self, request_id: str) -> str:
        """Return the name by which a prompt can be followed; empty if it has none."""
        named = self._named.get(request_id)
        return named.transfer_id if named is not None else ""

    def is_unwanted(self, request_id: str) -> bool:
        """Return whether a prompt's transfer has ended before the prompt is complete: nobody will read it."""
        named = self._named.get(request_id)
        return request_id in self._unwanted or (named is not None and self._transfers.begun(named.transfer_id) is None)

    def allocated(self, request: "Request") -> None:
        """Note that a request was given its blocks, into which it may be loaded before its first step."""
        if request.request_id in self._named:
            self._given.append(request.request_id)

    def schedule(self, scheduled: Mapping[str, int]) -> tuple[int, ...]:
        """Note that a step works on ``scheduled`` tokens of each request; return its number if it is to be reported."""
        for named in list(self._begun.values()):
            self._is_same_attempt(named)
        writers = cache(partial(self._writers, scheduled))  # nothing changes meanwhile
        self._announce_loads(writers)
        begun = (self._named[each] for each in scheduled if each in self._named)
        awaited = tuple(self._schedule(named, scheduled, writers) for named in begun)
        self._tell_news()
        if scheduled:
            self._recent.append(_Step(scheduled, self._preemptions(scheduled)))
        if not (awaited or (self._drafts_late and scheduled)):
            return ()
        self._next_step += 1
        if self._drafts_late:
            self._last_steps |= dict.fromkeys(scheduled, self._next_step)
        self._steps[self._next_step] = awaited
        return (self._next_step,)

    def computed(self, steps: Mapping[int, int], ranks: int) -> None:
        """Announce what steps have computed that all ``ranks`` have reported.

        ``steps``: the number of ranks that have since the last call, by step.
        """
        awaited = {number: reports for number, reports in steps.items() if number in self._steps}
        self._reports.update(awaited)
        for number in [each for each in awaited if self._reports[each] >= ranks]:
            del self._reports[number]
            for computed in self._steps.pop(number):
                named = self._begun.get(computed.request_id)
                if named is not None and self._is_same_attempt(named) and named.attempt == computed.attempt:
                    self._announce(named, computed.tokens)
            for lease_id in self._unwritten.pop(number, ()):
                self._service.written(lease_id)
        self._tell_news()

    def unreported_step(self, request_id: str) -> int | None:
        """Return the last step of a request, if it may still write to the request's blocks after its results."""
        step = self._last_steps.get(request_id)
        return step if step in self._steps else None

    @property
    def newest_unreported(self) -> int | None:
        """The newest step, if steps may still write to blocks after their results; None if none may."""
        return max(self._steps, default=None) if self._drafts_late else None

    def await_step(self, number: int, lease_id: str) -> None:
        """Let a lease be read when a step has been reported, which has not been yet."""
        self._unwritten.setdefault(number, []).append(lease_id)

    @property
    def wants_step(self) -> bool:
        """Whether the engine must step to learn that leases are written."""
        return bool(self._unwritten)

    def being_written(self, *, besides: "Request | None" = None) -> set[int] | None:
        """Return the ids of the blocks that steps under way may write, besides those that a request has now.

        None if nobody knows.
        """
        writers = self._writers(())
        return None if writers is None else self._of_others(writers, besides, writers.blocks)

    def may_lack_tokens(self, request: "Request") -> bool:
        """Return whether steps under way have yet to compute a prompt whose request has ended with a token.

        The token may be of a step that was under way when vLLM preempted the request, which has other blocks since and
        is being computed again. Before 0.30 vLLM takes it, and so does vllm-ascend's balance scheduler.
        """
        if not request.num_preemptions:
            return False
        known = tokens_under_way(request)
        if known is not None:
            return bool(request.num_computed_tokens - known < request.num_prompt_tokens)
        return _have_lost(islice(reversed(self._recent), self._most_under_way), request)

    def finish(self, request: "Request", *, is_granted: bool) -> None:
        """Forget a request. Without a lease, those who follow its prompt are told how it ended."""
        self._leave(request)
        self._slots.end(request.request_id)  # unless its lease has them
        self._last_steps.pop(request.request_id, None)
        self._unwanted.discard(request.request_id)
        self._begun.pop(request.request_id, None)
        named = self._named.pop(request.request_id, None)
        if named is None:
            return
        self._names.remove(named.transfer_id)
        if not (self._named or self._drafts_late):  # nobody waits for the steps under way
            self._steps.clear()
            self._reports.clear()
        self._counts["transfers", "complete" if is_granted else "ended"] += 1
        if is_granted:
            self._service.notify(named.transfer_id)
            return
        begun = self._transfers.begun(named.transfer_id)
        if begun is not None:
            how = request.status.name.removeprefix("FINISHED_").lower()
            self._service.end_transfers([begun.prompt.lease_id], f"the prefill engine's request has ended ({how})")

    def check_integrity(self) -> None:
        """Raise AssertionError unless the books balance."""
        assert self._named.keys() <= self._requests.keys(), "a prompt is announced whose request has ended"
        assert self._begun.items() <= self._named.items(), "a prompt has begun that is not announced"
        names = sorted(named.transfer_id for named in self._named.values())
        assert names == sorted(self._names), "two prompts have one name"
        assert self._reports.keys() <= self._steps.keys(), "a step has been reported that nobody asked for"
        assert self._unwritten.keys() <= self._steps.keys(), "a lease would never be written"
        assert not self._news, "those who wait for news were not told"
        assert self._slots.request_ids <= self._named.keys(), "slots are lent for a prompt that is not announced"
        self._slots.check_integrity()

    def _schedule(
        self, named: _Named, scheduled: Mapping[str, int], writers: Callable[[], _Writers | None]
    ) -> _Computed:
        """Note what a step computes of a named prompt."""
        request = named.request
        if request.request_id not in self._begun:
            if request.num_computed_tokens < named.loaded:
                self._start_over(named)  # the load has failed
            self._begun[request.request_id] = named
            self._announce(named, self._settled_tokens(named, writers, request.num_computed_tokens))
        named.end = min(request.num_computed_tokens + scheduled[request.request_id], named.tokens)
        return _Computed(request.request_id, named.attempt, named.end)

    def _is_same_attempt(self, named: _Named) -> bool:
        """Return whether a prompt that has begun still has what was computed; if not, begin another attempt.

        It has not if vLLM has taken its blocks (preemption), or computes some of them again (a failed load).
        """
        request = named.request
        if request.num_preemptions == named.preemptions and request.num_computed_tokens >= named.end:
            return True
        self._start_over(named)
        return False

    def _start_over(self, named: _Named) -> None:
        """Begin another attempt. Whatever was announced counts for nothing."""
        request_id = named.request.request_id
        named.preemptions, named.attempt = named.request.num_preemptions, named.attempt + 1
        named.end = named.loaded = 0
        self._begun.pop(request_id, None)
        self._slots.end(request_id)
        self._transfers.start_over(named.transfer_id)
        self._counts["transfers", "restarted"] += 1
        self._news[named.transfer_id] = None

    def _announce_loads(self, writers: Callable[[], _Writers | None]) -> None:
        """Announce the prompts that are being loaded from host memory since the last step, and the slots."""
        given, self._given = self._given, []
        for named in [self._named[each] for each in given if each in self._named]:
            request_id = named.request.request_id
            if not self._slots.is_loading(request_id):
                continue
            if named.loaded:
                self._start_over(named)  # it has lost the blocks into which it was loaded before
            in_host = self._slots.lend(request_id, self._service.block_tokens)
            named.loaded = in_host.end_token
            self._announce(named, self._settled_tokens(named, writers, in_host.first_token))
            if self._transfers.announce_slots(named.transfer_id, in_host):
                self._counts["transfers", "in_host"] += 1
                self._news[named.transfer_id] = None

    def _announce(self, named: _Named, tokens: int) -> None:
        known = self._transfers.blocks_known(named.transfer_id)
        if known is None:
            return  # cancelled
        new = self._blocks.block_ids(named.request.request_id, tokens, known, self._service.block_tokens)
        if self._transfers.announce(named.transfer_id, tokens, new):
            self._news[named.transfer_id] = None

    def _tell_news(self) -> None:
        """Have those answered who wait for what a step has changed."""
        news, self._news = self._news, {}
        if news:
            self._service.notify(*news)

    def _settled_tokens(self, named: _Named, writers: Callable[[], _Writers | None], held: int) -> int:
        """Return how many of the first ``held`` tokens of a prompt are complete on the device before its first step.

        Its blocks may be another request's too, and then a step under way may still write the last of them. If what
        vLLM has found ends inside a block, that is a copy of another's, which the step itself is yet to make.
        """
        request = named.request
        if not held or self._drafts_late or (known := writers()) is None:
            return 0
        table = self._blocks.table(request.request_id)
        unfinished = self._of_others(known, request, {block.block_id for group in table for block in group})
        sizes = self._service.block_tokens
        held -= held % math.lcm(*(size for size in sizes if size != RING_TOKENS))
        return tokens_before(table, sizes, held, unfinished)

    def _writers(self, scheduled: Iterable[str]) -> _Writers | None:
        """Return who may write blocks in steps under way, and in that which is being ``scheduled``.

        None if nobody knows which blocks.
        """
        if any(step.has_lost for step in self._recent):
            return None
        of_others = set(self._unproven()).union(*(step.left for step in self._recent))
        steps = {*scheduled, *(each for step in self._recent for each in step.scheduled)}
        writers = _Writers(steps & self._requests.keys(), Counter(of_others))
        for request in map(self._requests.__getitem__, writers.request_ids):
            if _have_lost(self._recent, request) and self._under_way(request):
                return None  # into blocks that others have found, perhaps
            writers.blocks.update(self._unwritten_blocks(request))
        return writers

    def _of_others(self, writers: _Writers, request: "Request | None", block_ids: Iterable[int]) -> set[int]:
        """Return those of some blocks that may be written for other requests than this one."""
        counts = request is not None and request.request_id in writers.request_ids
        own = self._unwritten_blocks(request) if request is not None and counts else ()
        return {block_id for block_id in block_ids if writers.blocks[block_id] > (block_id in own)}

    def _preemptions(self, scheduled: Iterable[str]) -> dict[str, int]:
        """Return how often vLLM has preempted each of the requests of a step, without those that it has not."""
        known = (self._requests.get(request_id) for request_id in scheduled)
        return {each.request_id: each.num_preemptions for each in known if each is not None and each.num_preemptions}

    def _under_way(self, request: "Request") -> int:
        """Return how many tokens of a request steps may be working on, besides the one that is being scheduled."""
        known = tokens_under_way(request)
        return known if known is not None else sum(step.scheduled.get(request.request_id, 0) for step in self._recent)

    def _leave(self, request: "Request") -> None:
        """Forget a request that has ended, but not the blocks that steps under way may still write."""
        known = self._requests.pop(request.request_id, None)
        if known is None or not self._recent or not self._under_way(request):
            return
        newest = self._recent[-1]  # the last to be forgotten
        newest.has_lost |= _have_lost(self._recent, request)
        newest.left |= self._unwritten_blocks(request)

    def _unwritten_blocks(self, request: "Request") -> set[int]:
        """Return the ids of the blocks that steps under way may write for a request."""
        written = max(request.num_computed_tokens - self._under_way(request), 0)
        tables = zip(self._service.block_tokens, self._blocks.table(request.request_id), strict=True)
        return {block.block_id for size, blocks in tables for block in blocks[written // size :]}
