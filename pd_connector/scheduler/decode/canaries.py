"""Canaries: prompts that prove a prefill engine, because they are computed here and pulled from it as well.

Engines declare what they serve, and may still compute different keys and values: by other rotary tables, weights,
scales or adapters. So the first prompt of enough tokens that is to be pulled from a prefill engine, or with an adapter,
that has not been tried is computed here, and its last tokens are pulled into scratch memory. What the workers say of
the two decides whether anything of that engine is ever used:

    untried --- a prompt is computed here, and pulled ---> awaited --- they agree ---> proven
       ^                                                      |------- they differ --> refused, as long as it lives
       |--- the request leaves, or its lease is lost ---------|
       '--- some seconds later ------------------- out of reach, or of no use here

States are compared at a border of blocks: the running one is after all but the last token there, and after later ones
here. So a prompt that ends before its first border shows nothing of them, and proves an engine for such prompts only;
the first longer one is tried as if none had been.

Requests that meet an engine whose verdict is awaited wait for it, a while, without blocks. What two engines declare is
compared at every handshake, by ``layout.compatibility``.

Everything runs on the scheduler's thread.
"""

import enum
import logging
import math
import time
import uuid
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from layout.scratch import STATES, blocks_holding
from layout.states import running_entry
from pd_connector.orders import CanaryEnds, CanaryReference, CanaryRoom, Cause, Orders, PullOrder, Report
from pd_connector.params import EngineAddress, RemotePrefill
from pd_connector.scheduler.decode.border_states import hit_unit, reached
from pd_connector.scheduler.decode.legs import Refused
from pd_connector.scheduler.scheduler_role import SchedulerRole, ended
from pd_connector.stats import OF_READS, StatsRecorder
from pd_connector.vllm.cache_specs import Retention
from pd_connector.vllm.device_blocks import DeviceBlocks
from pd_connector.vllm.requests import adapter
from transfer.control.limits import LastFew

if TYPE_CHECKING:
    from pd_connector.orders import WorkerHandshake
    from pd_connector.vllm.types import KVCacheBlock, Request

logger = logging.getLogger(__name__)

#: How long a request waits for a verdict.
_PATIENCE_S = 10.0

#: How long nothing is pulled from an engine of which no canary could be pulled, before the next one tries.
_RETRY_S = 10.0

#: How many verdicts are remembered: more than prefill engines times adapters, for who is forgotten is proven anew, by a
#: prompt that is computed here. What was asked for longest ago is forgotten.
_MAX_VERDICTS = 65_536

#: Failures of a canary's pull that say something of the prefill engine, and not of the request alone.
_OF_THE_ENGINE = frozenset({Cause.UNREACHABLE, Cause.DENIED, Cause.REFUSED, Cause.INCOMPATIBLE})

#: Those that may take long, and come again with the next request: nobody is to wait for one such canary after another.
_SLOW = OF_READS | {Cause.INTERNAL}


@dataclass(frozen=True, slots=True)
class _Key:
    """What a verdict is of. Params come from clients: a wrong address decides nothing about who is at the right one."""

    engine: EngineAddress
    adapter: str  # empty for the model itself

    def __str__(self) -> str:
        return f"prefill {self.engine}" + (f" with adapter {self.adapter}" if self.adapter else "")


class Standing(enum.Enum):
    """What is known of a prefill engine from which nothing is refused."""

    PROVEN = enum.auto()
    AWAITED = enum.auto()  # wait: it is being proven
    UNTRIED = enum.auto()


@dataclass(slots=True)
class _Canary:
    """A canary under way. ``held`` are references to what was computed; None as long as it has not been."""

    request: "Request"
    key: _Key
    tokens: range
    found: int  # tokens at the begin of the prompt that were here already
    area: int
    preemptions: int  # of the request, when it began
    ends: CanaryEnds
    border: int  # tokens after which the state is compared; 0: none
    is_whole: bool  # what it proves holds for prompts with a state at a border, too
    is_same_prompt: bool
    is_decode_leg: bool
    held: "tuple[KVCacheBlock, ...] | None" = None
    has_left: bool = False  # what was computed here is lost, so nothing is proven


class Canaries(SchedulerRole):
    """Owns the verdicts on prefill engines, and the canaries under way."""

    def __init__(
        self,
        blocks: DeviceBlocks,
        groups: Sequence[Retention],
        is_spoilt: "Callable[[Request], bool]" = lambda request: False,
        *,
        tries: bool = True,
        refuses: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Start without verdicts.

        Args:
            blocks: of the device.
            groups: what each cache group keeps.
            is_spoilt: whether what a request has computed comes of what another connector failed to load.
            tries: every engine is taken for proven if this is False.
            refuses: nothing is pulled from engines that differ; they are only warned of if this is False.
            clock: in seconds.
        """
        self.tries = tries
        self._blocks = blocks
        self._is_spoilt = is_spoilt
        self._groups = groups
        self._refuses = refuses
        self._clock = clock
        self._room: CanaryRoom | None = None  # None until workers are known
        self._ranks = 0
        self._free: list[int] = []  # areas of the scratch memory
        #: Whether it is proven for all prompts, or only for those that end before a border of states.
        self._verdicts: LastFew[_Key, Refused | bool] = LastFew(_MAX_VERDICTS)
        #: Until when no canary is begun: whoever could be one is computed here, and nobody waits for it.
        self._rests: LastFew[_Key, float] = LastFew(_MAX_VERDICTS)
        self._under_way: dict[str, _Canary] = {}  # by request
        #: By request that waits for a verdict: since when nothing was computed of its canary, and of how many tokens.
        self._waits: dict[str, tuple[float, int]] = {}
        self._orders: list[PullOrder] = []
        self._references: list[CanaryReference] = []
        self._ended: list[str] = []
        self._tells = False  # in the next step, how one has ended

    def set_workers(self, handshakes: "Sequence[WorkerHandshake]") -> None:
        """Take what all workers have room for. Called again when the caches are registered anew."""
        rooms = [each.canary for each in handshakes if each.canary is not None]
        assert len(rooms) == len(handshakes), "a worker takes no canaries, and the scheduler side gives them"
        self._ranks = len(handshakes)
        if self._room is None:
            tokens, prompts = min(room.tokens for room in rooms), min(room.prompts for room in rooms)
            border, least = math.lcm(*(room.border for room in rooms)), max(room.least for room in rooms)
            self._room = CanaryRoom(tokens, prompts, border, least)
            self._free = list(range(self._room.prompts))[::-1]

    def look(self, request: "Request", remote: RemotePrefill) -> Standing | Refused:
        """Return what is known of the prefill engine that holds a request's prompt.

        A request that has waited for a verdict long enough, while its canary made no progress, is refused.
        """
        if not self.tries:
            return Standing.PROVEN
        now, key = self._clock(), _key(request, remote)
        standing = self._standing(request, remote, now)
        if standing is not Standing.AWAITED:
            self._waits.pop(request.request_id, None)
            return standing
        proving = next((each for each in self._under_way.values() if each.key == key), None)
        # Behind its prompt, a request goes on whatever becomes of its pull.
        computed = min(proving.request.num_computed_tokens, proving.tokens.stop) if proving is not None else 0
        since, known = self._waits.get(request.request_id, (now, computed))
        since = since if known == computed else now  # a long prompt takes long
        self._waits[request.request_id] = since, computed
        if now - since < _PATIENCE_S:
            return standing
        del self._waits[request.request_id]
        name = proving.request.request_id if proving is not None else "of before"
        return Refused(
            Cause.CANARY,
            f"{key} is not proven yet: request {name} is computed here and pulled from there as well, and for "
            f"{_PATIENCE_S:.0f} s nothing was computed of it, and there was no verdict. Send the request again; what "
            f"has become of {name} is in this log",
        )

    def is_proven(self, request: "Request", remote: RemotePrefill) -> bool:
        """Return whether the prefill engine that holds a request's prompt is proven. The request waits for nothing."""
        return not self.tries or self._standing(request, remote, self._clock()) is Standing.PROVEN

    def proves_states(self, request: "Request", remote: RemotePrefill) -> bool:
        """Return whether states at borders are taken from a proven engine: not if prompts without one have proven it.

        An engine that drafts keeps no state at the last border of a prompt, and others do.
        """
        return not self.tries or self._verdicts.get(_key(request, remote)) is not False

    def begin(
        self,
        request: "Request",
        remote: RemotePrefill,
        computed_tokens: int,
        *,
        is_same_prompt: bool,
        is_decode_leg: bool = True,
        held_states: Collection[int] | None = None,
    ) -> bool:
        """Make a request the canary of an untried engine, if it can be one; return whether it is.

        The pull of the last tokens that it computes here is ordered, into scratch memory. It cannot be one if they are
        too few, if its last state at a border is here already, or if other engines are being proven in all of that
        memory.

        Args:
            request: it was given its first blocks, and will be computed here.
            remote: what the engine holds of its prompt.
            computed_tokens: at the begin of its prompt, which are here already.
            is_same_prompt: whether it is known that the engine has computed the same prompt, images included.
            is_decode_leg: whether somebody keeps its lease alive until ``take_ended`` returns it.
            held_states: after how many tokens the engine has all states, that after the last left out; None: unknown.
        """
        key, tokens = _key(request, remote), self._tokens(request, remote, computed_tokens)
        assert self._standing(request, remote, self._clock()) is Standing.UNTRIED, "the engine is tried"
        last = self._last_border(request, remote)
        if tokens is None or 0 < last <= computed_tokens or not self._free or self._clock() < self._rests.get(key, 0.0):
            return False
        is_whole = last > 0 or not any(kept.earlier_states for kept in self._groups)
        if held_states is not None and last not in held_states and last != tokens.stop:
            # vLLM keeps another one if a step has ended there.
            unit = hit_unit(self._blocks, self._groups, tokens.stop)
            last = max((each for each in held_states if computed_tokens < each < last and not each % unit), default=0)
        area = self._free.pop()
        canary = _Canary(
            request, key, tokens, computed_tokens, area, request.num_preemptions, CanaryEnds(0), last, is_whole,
            is_same_prompt, is_decode_leg,
        )  # fmt: skip
        self._under_way[request.request_id] = canary
        block_ids = tuple(self._area(kept, canary) for kept in self._groups)
        self._orders.append(
            PullOrder(request.request_id, remote, block_ids, tokens.start, tokens.stop, uuid.uuid4().hex)
        )
        logger.info(
            "PDConnector: %s is not proven yet: request %s is computed here, and tokens %d to %d of it are pulled as "
            "well, to be compared", key, request.request_id, tokens.start, tokens.stop - 1,
        )  # fmt: skip
        return True

    def take_ended(self) -> list[str]:
        """Return the decode legs whose canaries have ended since the last call: their leases are not needed."""
        ended, self._ended = self._ended, []
        return ended

    @property
    def request_ids(self) -> frozenset[str]:
        """The decode legs that are canaries, until ``take_ended`` returns them."""
        legs = (request_id for request_id, canary in self._under_way.items() if canary.is_decode_leg)
        return frozenset(legs) | frozenset(self._ended)

    @property
    def waiting(self) -> Collection[str]:
        """The requests that wait for a verdict."""
        return self._waits.keys()

    def step_orders(self, scheduled: Mapping[str, int]) -> Orders:
        """Return the canaries since the last step, and what has been computed of earlier ones."""
        new = {order.request_id for order in self._orders}
        for request_id, canary in self._under_way.items():
            if not self._is_open(canary):
                continue
            # What another connector brings was not computed here, and may even come from the engine in question.
            is_brought = request_id in new and canary.request.num_computed_tokens > canary.found
            if is_brought or not self._is_sound(canary):
                self._leave(canary)
            elif canary.request.num_output_tokens:
                self._refer(canary)
        orders = Orders(canaries=tuple(self._orders), references=tuple(self._references))
        self._orders, self._references, self._tells = [], [], False
        return orders

    def settled(self, request_ids: set[str], failed: set[str], report: Report) -> None:
        """End the canaries that all ranks have reported."""
        for canary in ended(self._under_way, report.canaries, self._ranks, "canary"):
            self._end(canary)
        for request_id, ends in report.canaries.items():
            still_open = self._under_way.get(request_id)
            if ends.failure and still_open is not None and self._is_open(still_open):
                self._leave(still_open)  # ranks whose pull has not failed wait for what is computed here

    def finish(self, request: "Request", block_ids: Sequence[Sequence[int]]) -> None:
        """Forget a request that has ended. What was computed of a canary is kept until it has been compared."""
        self._waits.pop(request.request_id, None)
        canary = self._under_way.get(request.request_id)
        if canary is None or not self._is_open(canary):
            return
        if request.num_output_tokens and self._is_sound(canary):
            self._refer(canary)
        else:
            self._leave(canary)

    @property
    def wants_step(self) -> bool:
        """Whether the engine must step even without requests, to learn and tell how canaries end.

        Not as long as one is computed, which is up to vLLM: an engine that pauses keeps its request, and waits for
        whatever wants steps.
        """
        return self._tells or not all(map(self._is_open, self._under_way.values()))

    def device_references(self) -> "Counter[int]":
        """Return the number of references to each device block that is to be compared, by block id."""
        held = (block for canary in self._under_way.values() for block in canary.held or ())
        return Counter(int(block.block_id) for block in held)

    def release_device_blocks(self) -> None:
        """Give back all device blocks, whose contents are no longer valid: nothing under way proves anything."""
        for canary in self._under_way.values():
            if self._is_open(canary):
                self._leave(canary)
            canary.has_left = True
            self._release(canary)

    def reset(self) -> bool:
        """Forget all verdicts: this engine computes something else from now on, for example with new weights."""
        self.release_device_blocks()
        self._verdicts.clear()
        self._rests.clear()
        return True

    def update_stats(self, stats: StatsRecorder) -> None:
        """Record how canaries have ended, and how many engines are refused."""
        may_differ = bool(self.counts) or not self._verdicts  # a verdict comes with a count; they may be thousands
        super().update_stats(stats)
        if may_differ:
            verdicts = (each for each in self._verdicts.values() if isinstance(each, Refused))
            refused = sum(verdict.cause is Cause.CANARY for verdict in verdicts)
            stats.gauge("peers_refused", refused)

    def check_integrity(self) -> None:
        """Raise AssertionError unless the books balance."""
        areas = [*self._free, *(canary.area for canary in self._under_way.values())]
        assert sorted(areas) == list(range(self._room.prompts if self._room is not None else 0)), "an area is lost"
        keys = [canary.key for canary in self._under_way.values()]
        assert len(set(keys)) == len(keys), "an engine is being proven twice"
        assert not any(map(self._verdicts.get, keys)), "an engine is being proven that has its verdict"
        assert all(canary.ends.ranks < self._ranks for canary in self._under_way.values()), "one should have ended"

    def _standing(self, request: "Request", remote: RemotePrefill, now: float) -> Standing | Refused:
        key = _key(request, remote)
        verdict = self._verdicts.get(key)
        if verdict is not None:
            self._verdicts.move_to_end(key)  # those of engines that have ended are forgotten first
            if isinstance(verdict, Refused):
                if now < verdict.until:
                    return verdict
                del self._verdicts[key]
            elif verdict or not self._last_border(request, remote):
                return Standing.PROVEN
        is_tried = any(canary.key == key for canary in self._under_way.values())
        return Standing.AWAITED if is_tried else Standing.UNTRIED

    def _tokens(self, request: "Request", remote: RemotePrefill, computed_tokens: int) -> range | None:
        """Return the last tokens of a prompt that both compute, from the begin of a block on; None if too few."""
        if self._room is None:
            return None
        end, border = _end(request, remote), self._room.border
        first = -(-max(computed_tokens, end - self._room.tokens) // border) * border
        return range(first, end) if end - first >= self._room.least else None

    def _area(self, kept: Retention, canary: _Canary) -> tuple[int, ...]:
        """Return the block table of a cache group in a canary's scratch memory, as far as its tokens are kept."""
        assert self._room is not None, "no worker is known"
        size, area, tokens = kept.block_tokens, canary.area, canary.tokens
        if kept.states:
            running, border = running_entry(tokens.stop, size), canary.border // size - 1
            ids = dict.fromkeys((border,), 2 + area * STATES) | {running: 1 + area * STATES}
            return tuple(ids.get(entry, 0) for entry in range(running + 1))
        of_area = blocks_holding(min(self._room.tokens, kept.window or self._room.tokens), size)
        first, end = tokens.start // size, -(-tokens.stop // size)
        needed = max(first, kept.first_needed(tokens.stop + 1) // size)
        base = 1 + area * of_area
        return (*[0] * needed, *range(base, base + end - needed))

    def _last_border(self, request: "Request", remote: RemotePrefill) -> int:
        """Return after how many tokens vLLM keeps the last state of what both compute, if that is here; 0: none."""
        tokens = _end(request, remote)
        return reached(self._blocks, hit_unit(self._blocks, self._groups, tokens), tokens + 1)

    @staticmethod
    def _is_open(canary: _Canary) -> bool:
        """Return whether the workers have not been told yet what is to be compared."""
        return canary.held is None and not canary.has_left

    def _is_sound(self, canary: _Canary) -> bool:
        """Return whether what the request has computed so far is there, and right."""
        return canary.request.num_preemptions == canary.preemptions and not self._is_spoilt(canary.request)

    def _refer(self, canary: _Canary) -> None:
        """Have what was computed compared: a token was sampled, so the whole prompt is in its blocks, on every rank."""
        request_id, tokens = canary.request.request_id, canary.tokens
        table, held = list[tuple[int, ...]](), []
        for group, (kept, blocks) in enumerate(zip(self._groups, self._blocks.table(request_id), strict=True)):
            if kept.states:  # the running one goes on with every token
                border = canary.border // kept.block_tokens - 1
                state = self._blocks.found_state(canary.request, group, border, kept.block_tokens)
                table.append(() if state is None else (*[0] * border, int(state.block_id)))
                held += [] if state is None else [state]
                continue
            first, end = tokens.start // kept.block_tokens, -(-tokens.stop // kept.block_tokens)
            table.append((*[0] * first, *(int(block.block_id) for block in blocks[first:end])))
            held += [block for block in blocks[first:end] if not block.is_null]
        canary.held = tuple(held)
        self._blocks.pin(canary.held)
        self._references.append(CanaryReference(request_id, tuple(table)))

    def _leave(self, canary: _Canary) -> None:
        canary.has_left = True
        self._references.append(CanaryReference(canary.request.request_id))

    def _release(self, canary: _Canary) -> None:
        if canary.held:
            self._blocks.give_back(canary.held)
            canary.held = ()

    def _end(self, canary: _Canary) -> None:
        request_id, ends, name = canary.request.request_id, canary.ends, canary.key
        self._references = [each for each in self._references if each.request_id != request_id]
        self._free.append(canary.area)
        self._ended += [request_id] if canary.is_decode_leg else []
        self._tells = True
        self._release(canary)
        if ends.difference and not canary.has_left and not canary.is_same_prompt and self._refuses:
            self.counts["canaries", "failed"] += 1
            self._rests[canary.key] = self._clock() + _RETRY_S  # the next ones may differ as well
            logger.warning(
                "PDConnector: %s is not proven: what was pulled of request %s differs from what was computed here "
                "(%s), and its images or embeddings may differ as well. A prompt from there tries again in %d s", name,
                request_id, ends.difference, _RETRY_S,
            )  # fmt: skip
        elif ends.difference and not canary.has_left:  # of any rank: one whose pull has failed proves nothing
            self.counts["canaries", "differs"] += 1
            self._verdicts[canary.key] = self._refuse(name, request_id, ends.difference)
        elif ends.failure:
            self.counts["canaries", "failed"] += 1
            logger.error(
                "PDConnector: %s is not proven: request %s could not be pulled beside being computed here, on which "
                "its answer does not depend: %s", name, request_id, ends.failure,
            )  # fmt: skip
            if ends.cause in _OF_THE_ENGINE:
                until = math.inf if ends.cause is Cause.INCOMPATIBLE else self._clock() + _RETRY_S
                self._verdicts[canary.key] = Refused(ends.cause, ends.failure, until)
            elif ends.cause in _SLOW:
                self._rests[canary.key] = self._clock() + _RETRY_S
        elif canary.has_left:
            self.counts["canaries", "left"] += 1
        elif not ends.samples:
            self.counts["canaries", "failed"] += 1
            logger.info(
                "PDConnector: %s is not proven: of request %s, no token that is here was pulled from there. The next "
                "prompt from there tries again", name, request_id,
            )  # fmt: skip
        else:
            self.counts["canaries", "proven"] += 1
            self._verdicts[canary.key] = canary.is_whole
            logger.info(
                "PDConnector: %s is proven%s: %d tokens of request %s, pulled from there, agree with what was computed "
                "here, in %d parts of layers", name, "" if canary.is_whole else " for prompts that end before a state "
                "at a border", len(canary.tokens), request_id, ends.samples,
            )  # fmt: skip

    def _refuse(self, name: _Key, request_id: str, difference: str) -> Refused | bool:
        """Return the verdict on an engine that differs."""
        found = f"{name} computes other keys and values than this engine: {difference}"
        way_out = "serve the same weights, adapters, --max-model-len and vLLM release on both sides"
        if not self._refuses:
            logger.warning(
                "PDConnector: %s (request %s). They are used all the same (canary = warn)", found, request_id
            )
            return True
        logger.error(
            "PDConnector: %s (request %s). Nothing is pulled from there for as long as it lives; %s, or set canary to "
            "warn or off", found, request_id, way_out,
        )  # fmt: skip
        return Refused(Cause.CANARY, f"{found}; {way_out}")


def _key(request: "Request", remote: RemotePrefill) -> _Key:
    return _Key(remote.engine, adapter(request))


def _end(request: "Request", remote: RemotePrefill) -> int:
    """Return how many tokens of a prompt both compute; the last one is computed by whoever decodes."""
    return min(int(request.num_prompt_tokens), remote.remote_num_tokens) - 1
