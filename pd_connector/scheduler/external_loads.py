"""The role that watches what other connectors of a MultiConnector load for requests while a step computes.

vLLM counts such tokens as computed when it schedules the step, and lets other requests find their blocks at once:

    scheduled --- the step has ended ---> there
        '-------- it has failed --------> vLLM takes back what it has counted: the tokens are computed again, or the
                                          requests fail

Until the step has ended, the blocks are *unproven*. After a failure, those of every request that has computed from them
hold anything. vLLM still lets others find them where the tokens are to be computed again, or where the request has left
before the step ended; a request that has found them while the next step was scheduled goes on; and one of which tokens
were taken back may end with a token of that step. So the blocks are made impossible to find here. Such a request is
*spoilt*: what it computes cannot be found either, and is not leased.

What this connector itself brings is there before the step. Everything runs on the scheduler's thread.
"""

import logging
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from itertools import chain, dropwhile
from typing import TYPE_CHECKING

from pd_connector.orders import Orders, Report
from pd_connector.scheduler.scheduler_role import SchedulerRole
from pd_connector.vllm.device_blocks import DeviceBlocks
from pd_connector.vllm.requests import prefill_is_complete, tokens_under_way

if TYPE_CHECKING:
    from pd_connector.vllm.types import KVCacheBlock, KVCacheBlocks, Request

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Counted:
    """What vLLM has counted of a request, with the last step that works on it."""

    request: "Request"
    preemptions: int
    tokens: int

    @property
    def has_its_blocks(self) -> bool:
        """Whether the request has not been preempted since."""
        return bool(self.request.num_preemptions == self.preemptions)

    @property
    def is_taken_back(self) -> bool:
        """Whether vLLM counts less now, and the request has kept its blocks."""
        return self.has_its_blocks and bool(self.request.num_computed_tokens < self.tokens)


class ExternalLoads(SchedulerRole):
    """Knows which blocks hold what vLLM counts as computed, and no step has proven. The first of the roles."""

    def __init__(self, blocks: DeviceBlocks, block_tokens: Sequence[int], steps_in_flight: int) -> None:
        """Start without requests.

        Args:
            blocks: of the device.
            block_tokens: block size of each cache group, in tokens.
            steps_in_flight: how many steps vLLM schedules at most before the first of them has ended.
        """
        self._blocks = blocks
        self._block_tokens = block_tokens
        self._requests: dict[str, Request] = {}
        self._there: dict[str, int] = {}  # tokens that the device holds of a request which begins, or begins anew
        self._given: list[str] = []  # requests that vLLM has given blocks since the last step
        #: What steps load that may be under way, oldest first: blocks by request.
        self._loads: deque[dict[str, frozenset[int]]] = deque(maxlen=steps_in_flight)
        self._counted: dict[str, _Counted] = {}  # of the requests in those steps
        self._spoilt: dict[str, frozenset[int]] = {}  # blocks, by request: what is behind them is wrong
        self._again: dict[str, int] = {}  # how many tokens of a request are wrong until they are computed again

    def add(self, request: "Request") -> None:
        """Take up a request."""
        self._requests[request.request_id] = request

    def unproven(self) -> frozenset[int]:
        """Return the ids of the blocks whose loads may be under way, and of those that are filled behind them."""
        return frozenset(chain.from_iterable(chain.from_iterable(step.values()) for step in self._loads))

    def is_spoilt(self, request: "Request") -> bool:
        """Return whether what a request has computed comes from what a failed load has left."""
        again = self._again.get(request.request_id, 0)
        if not again:
            return request.request_id in self._spoilt
        under_way = tokens_under_way(request)  # where vLLM does not count, nobody knows when it is right again
        return under_way is None or bool(request.num_computed_tokens - under_way < again)

    def missing_tokens(self, request: "Request", computed_tokens: int) -> int:
        """Bring nothing; note what the device holds of a request, which begins or begins anew."""
        self._there[request.request_id] = computed_tokens
        self._spoilt.pop(request.request_id, None)
        self._again.pop(request.request_id, None)
        return 0

    def allocated(self, request: "Request", blocks: "KVCacheBlocks", external_tokens: int) -> int:
        """Bring nothing; note that a request was given blocks."""
        self._given.append(request.request_id)
        return 0

    def step_orders(self, scheduled: Mapping[str, int]) -> Orders:
        """Note what the step loads. Returns no orders."""
        self._look()
        self._forget_spoilt()
        given, self._given = self._given, []
        loads: dict[str, frozenset[int]] = {}
        for request in (self._requests[each] for each in given if each in self._requests):
            # vLLM also gives blocks to one that goes on: what it had waited for is there, or a session's next chunk.
            there = self._there.pop(request.request_id, request.num_computed_tokens)
            if request.request_id in scheduled and request.num_computed_tokens > there:
                loads[request.request_id] = self._from_token(request, there)
        if scheduled and (loads or self._loads):
            self._loads.append(loads)
        if any(self._loads):
            for request in (self._requests[each] for each in scheduled if each in self._requests):
                # Drafts that are rejected are taken back as well: they are beyond the tokens that the request has.
                tokens = min(request.num_computed_tokens + scheduled[request.request_id], request.num_tokens)
                self._counted[request.request_id] = _Counted(request, request.num_preemptions, tokens)
        else:
            self._loads.clear()
            self._counted.clear()
        return Orders()

    def settled(self, request_ids: set[str], failed: set[str], report: Report) -> None:
        """See whether vLLM has taken something back, which it does before it tells of a step's reports."""
        self._look()

    def finish(self, request: "Request", block_ids: Sequence[Sequence[int]]) -> None:
        """Forget a request. What it leaves unproven cannot be found any more."""
        request_id = request.request_id
        self._there.pop(request_id, None)
        self._requests.pop(request_id, None)
        counted = self._counted.pop(request_id, None)
        lost: AbstractSet[int] = self._spoilt.get(request_id, frozenset())
        if counted is not None and not prefill_is_complete(request):
            lost |= self.unproven()
        if lost:
            self._blocks.forget(self._from_block(request, lost))

    def check_integrity(self) -> None:
        """Raise AssertionError unless the books balance."""
        known = self._requests.keys()
        assert self._there.keys() <= known, "what is there of a request is remembered, and the request has left"
        assert self._counted.keys() <= known, "a request is watched that has left"
        assert bool(self._counted) <= any(self._loads), "requests are watched, and nothing is loaded"

    def _look(self) -> None:
        """Make impossible to find what a failed load has spoilt, and what is unproven of preempted requests."""
        taken_back = [each for each in self._counted.values() if each.is_taken_back]
        preempted = [each for each in self._counted.values() if not each.has_its_blocks]
        if not (taken_back or preempted):
            return
        lost: set[int] = set()
        unproven = self.unproven()
        for each in taken_back:
            request = each.request
            self._again[request.request_id] = each.tokens
            lost |= self._from_token(request, request.num_computed_tokens) | self._from_block(request, unproven)
        for each in (*taken_back, *preempted):
            del self._counted[each.request.request_id]
        if taken_back:
            logger.warning(
                "PDConnector: a load of another connector has failed: %d requests compute again what %d blocks were to "
                "hold", len(taken_back), len(lost),
            )  # fmt: skip
        for each in self._counted.values() if lost else ():
            if spoilt := self._from_block(each.request, lost):
                self._spoilt[each.request.request_id] = spoilt
                lost |= spoilt
        for each in preempted:
            lost |= frozenset().union(*(step.get(each.request.request_id, frozenset()) for step in self._loads))
        self._blocks.forget(lost)

    def _forget_spoilt(self) -> None:
        """Make impossible to find what requests go on to compute behind what is wrong."""
        self._spoilt = {each: ids for each, ids in self._spoilt.items() if each in self._requests}
        self._again = {each: tokens for each, tokens in self._again.items() if each in self._requests}
        for request_id, ids in self._spoilt.items():
            self._blocks.forget(self._from_block(self._requests[request_id], ids))

    def _from_token(self, request: "Request", token: int) -> frozenset[int]:
        """Return the ids of a request's blocks from the one of a token on."""
        table = self._blocks.table(request.request_id)
        return _ids(blocks[token // size :] for size, blocks in zip(self._block_tokens, table, strict=True))

    def _from_block(self, request: "Request", ids: AbstractSet[int]) -> frozenset[int]:
        """Return the ids of a request's blocks from the first one of ``ids`` on."""
        table = self._blocks.table(request.request_id)
        return _ids(dropwhile(lambda block: block.block_id not in ids, blocks) for blocks in table)


def _ids(groups: "Iterable[Iterable[KVCacheBlock]]") -> frozenset[int]:
    return frozenset(int(block.block_id) for blocks in groups for block in blocks if not block.is_null)
