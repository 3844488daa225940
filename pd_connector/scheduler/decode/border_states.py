"""States at the borders of blocks, which are pulled so that a longer prompt finds its beginning here.

vLLM gives a request whose prompt is pulled a block for the state after all of its tokens. A prefix is found only where
a state is, and only at the border of a block. So the state of a border before that is pulled as well, if the prefill
engine has it, into a block of its own. The request does not need it: it is pulled when the request can go on, by
another pull under the same lease.

    taken --- the request's pull ends ---> being pulled --- all ranks have it ---> found by prefix hits, in nobody's use
       '------ it fails, or nobody waits ---------'-------- a rank has not ------> given back

Of which border depends on what vLLM will leave out of a hit (``DeviceBlocks.left_by_hits``). With drafts from hidden
states that is a block, and a longer answer brings a later border within reach than a short one does: two are pulled, if
the prefill engine has both. What it has is known of prompts that are complete there; of others, both are tried.

Everything runs on the scheduler's thread.
"""

import uuid
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import lcm
from typing import TYPE_CHECKING

from pd_connector.orders import PullOrder, RankEnds
from pd_connector.scheduler.scheduler_role import ended
from pd_connector.vllm.cache_specs import Retention
from pd_connector.vllm.device_blocks import DeviceBlocks

if TYPE_CHECKING:
    from pd_connector.vllm.types import KVCacheBlock, Request

BlockTables = tuple[tuple[int, ...], ...]


@dataclass(slots=True)
class _Border:
    """Where the states of a request's borders are being pulled to."""

    request: "Request"
    places: "list[tuple[int, int, KVCacheBlock]]"  # cache group, entry of its table, block
    order: PullOrder
    is_right: bool = True
    ends: RankEnds = field(default_factory=lambda: RankEnds(0))


class BorderStates:
    """Owns the blocks to which border states are being pulled."""

    def __init__(
        self,
        blocks: DeviceBlocks,
        groups: Sequence[Retention],
        ranks: int = 1,
        note: "Callable[[Request, int, int, KVCacheBlock], None]" = lambda *_: None,
    ) -> None:
        """``groups``: what vLLM keeps of a request in every cache group. ``ranks``: of the engine.

        ``note`` is called with every state that can be found from now on: request, cache group, entry, block.
        """
        self._blocks = blocks
        self._ranks = ranks
        self._note = note
        self._groups = {number: kept for number, kept in enumerate(groups) if kept.states}
        self._taken: dict[str, _Border] = {}  # by request, whose pull is under way
        self._pulled: dict[str, _Border] = {}  # by the id of their own pull

    def choose(self, tokens: range, held: Collection[int] | None) -> tuple[int, ...]:
        """Return after how many tokens the states are to be pulled beside those of a request that pulls ``tokens``.

        Args:
            tokens: all of the prompt but the last, from the last state on that is here.
            held: after how many tokens the prefill engine has all states; None if that is not known yet.
        """
        unit = hit_unit(self._blocks, self._groups.values(), tokens.stop)
        if not unit or not self._blocks.finds_prefixes:
            return ()
        chosen = {reached(self._blocks, unit, tokens.stop + 1), tokens.stop // unit * unit}
        if held is not None:
            usable = [border for border in held if not border % unit]
            chosen = {max((border for border in usable if border <= end), default=0) for end in chosen}
        return tuple(sorted(border for border in chosen if border > tokens.start))

    def from_state(self, request: "Request", tokens: range) -> range:
        """Return the ``tokens`` that a request pulls, with those before them of which no state is here."""
        if not (unit := hit_unit(self._blocks, self._groups.values(), tokens.stop)):
            return tokens
        sizes = {group: kept.block_tokens for group, kept in self._groups.items() if kept.block_tokens <= tokens.stop}
        for border in range(tokens.start // unit * unit, 0, -unit):
            if all(self._blocks.found_state(request, group, border // size - 1, size) for group, size in sizes.items()):
                return range(border, tokens.stop)
        return range(tokens.stop)

    def add(self, request: "Request", order: PullOrder, borders: Sequence[int]) -> PullOrder:
        """Take blocks for a request's states at ``borders``; return the order of its pull, as the first part of two.

        Not for those that this engine has. If there are none, or no room for all, the order stays as it is.
        """
        wanted = [
            (group, entry, kept.block_tokens)
            for border in borders
            for group, kept in self._groups.items()
            if (entry := border // kept.block_tokens - 1) >= 0 and not order.local_block_ids[group][entry]
        ]
        wanted = [each for each in wanted if self._blocks.found_state(request, *each) is None]
        if not wanted or not self._blocks.has_spare(len(wanted)):
            return order
        taken = self._blocks.take(len(wanted))
        places = [(group, entry, block) for (group, entry, _), block in zip(wanted, taken, strict=True)]
        tables = [[0] * len(ids) for ids in order.local_block_ids]
        for group, entry, block in places:
            tables[group][entry] = int(block.block_id)
        pull_id = uuid.uuid4().hex
        second = replace(
            order, request_id=pull_id, pull_id=pull_id, local_block_ids=tuple(map(tuple, tables)),
            first_token=order.end_token, part=1, parts=2, traceparent="",
        )  # fmt: skip
        self._taken[request.request_id] = _Border(request, places, second)
        return replace(order, parts=2)

    def go_on(self, request_id: str, *, is_right: bool) -> tuple[PullOrder, bool] | None:
        """Return the order for the border states of a request whose pull has ended on all ranks; None if it has none.

        Returns:
            The order, and whether it is to be carried out. If not, as what was pulled is not right, or no longer, the
            blocks are given back, and nobody will release the lease for this part.
        """
        border = self._taken.pop(request_id, None)
        if border is None:
            return None
        is_right = is_right and border.is_right
        if is_right:
            self._pulled[border.order.request_id] = border
        else:
            self._give_back(border)
        return border.order, is_right

    def settled(self, ends: Mapping[str, RankEnds]) -> list[str]:
        """Let others find each state that all ranks have pulled; return the pulls that have ended."""
        done = ended(self._pulled, ends, self._ranks, "the pull of borders")
        for border in done:
            for group, entry, block in border.places:
                is_here = not border.ends.failed and (group, entry) not in border.ends.lacking_states
                if is_here and border.is_right:
                    self._blocks.publish_state(border.request, group, entry, self._groups[group].block_tokens, block)
                    self._note(border.request, group, entry, block)
            self._give_back(border)
        return [border.order.request_id for border in done]

    def forget(self) -> None:
        """Publish nothing of what is under way: it is no longer valid."""
        for border in (*self._taken.values(), *self._pulled.values()):
            border.is_right = False

    def _give_back(self, border: _Border) -> None:
        self._blocks.give_back(tuple(block for *_, block in border.places))

    @property
    def request_ids(self) -> set[str]:
        """The requests whose pulls are under way, and that have blocks for states at borders."""
        return set(self._taken)

    @property
    def pull_ids(self) -> set[str]:
        """The pulls of such states that are under way."""
        return set(self._pulled)


def hit_unit(blocks: DeviceBlocks, groups: Iterable[Retention], tokens: int) -> int:
    """Return of how many tokens the borders are multiples where a hit may end; 0 if none is within ``tokens``.

    Those of ``groups`` that keep states have one there, and vLLM finds no other: blocks of keys may be larger.
    """
    sizes = {kept.block_tokens for kept in groups if kept.states and kept.block_tokens <= tokens}
    return lcm(*sizes, blocks.hit_tokens) if sizes else 0


def reached(blocks: DeviceBlocks, unit: int, tokens: int) -> int:
    """Return after how many of a prompt's ``tokens`` tokens its longest hit ends, once they are computed here.

    So vLLM keeps its last state there. ``unit``: see ``hit_unit``.
    """
    return max(tokens - blocks.left_by_hits, 0) // unit * unit if unit else 0
