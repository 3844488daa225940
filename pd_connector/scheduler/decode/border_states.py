"""States at the borders of blocks, which are pulled so that a longer prompt finds its beginning here.

vLLM gives a request whose prompt is pulled a block for the state after all of its tokens. A prefix is found only where
a state is, and only at the border of a block. So the state of a border before that is pulled as well, if the prefill
engine has it, into a block of its own:

    taken --- all ranks have pulled it ---> found by prefix hits, in nobody's use
       '------ a rank has not -------------> given back

Of which border depends on what vLLM will leave out of a hit (``DeviceBlocks.left_by_hits``). With drafts from hidden
states that is a block, and a longer answer brings a later border within reach than a short one does: two are pulled, if
the prefill engine has both. What it has is known of prompts that are complete there; of others, both are tried.

Everything runs on the scheduler's thread.
"""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from math import lcm
from typing import TYPE_CHECKING

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
    is_right: bool = True
    lacking: set[tuple[int, int]] = field(default_factory=set)  # groups and entries that a rank has not pulled


class BorderStates:
    """Owns the blocks to which border states are being pulled."""

    def __init__(self, blocks: DeviceBlocks, groups: Sequence[Retention]) -> None:
        """``groups``: what vLLM keeps of a request in every cache group."""
        self._blocks = blocks
        self._groups = {number: kept for number, kept in enumerate(groups) if kept.states}
        self._pulled: dict[str, _Border] = {}  # by request

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

    def add(self, request: "Request", block_ids: BlockTables, borders: Sequence[int]) -> BlockTables:
        """Return the block tables of a request that is to be pulled, with blocks for its states at ``borders``.

        Not for those that this engine has. None if there is no room for all.
        """
        wanted = [
            (group, entry, kept.block_tokens)
            for border in borders
            for group, kept in self._groups.items()
            if (entry := border // kept.block_tokens - 1) >= 0 and not block_ids[group][entry]
        ]
        wanted = [each for each in wanted if self._blocks.found_state(request, *each) is None]
        if not wanted or not self._blocks.has_spare(len(wanted)):
            return block_ids
        taken = self._blocks.take(len(wanted))
        places = [(group, entry, block) for (group, entry, _), block in zip(wanted, taken, strict=True)]
        self._pulled[request.request_id] = _Border(request, places)
        tables = [list(ids) for ids in block_ids]
        for group, entry, block in places:
            tables[group][entry] = int(block.block_id)
        return tuple(map(tuple, tables))

    def lack(self, states: Collection[tuple[str, int, int]]) -> None:
        """Note which states a rank has not pulled: requests, cache groups and entries of their tables."""
        for request_id, group, entry in states:
            if (border := self._pulled.get(request_id)) is not None:
                border.lacking.add((group, entry))

    def end(self, request_id: str, *, is_right: bool) -> None:
        """Let others find each border state of a request whose pull has ended on all ranks, if all have it."""
        border = self._pulled.pop(request_id, None)
        if border is None:
            return
        for group, entry, block in border.places:
            if is_right and border.is_right and (group, entry) not in border.lacking:
                self._blocks.publish_state(border.request, group, entry, self._groups[group].block_tokens, block)
        self._blocks.give_back(tuple(block for *_, block in border.places))

    def forget_model(self) -> None:
        """Publish nothing of what is under way: another model has computed it."""
        for border in self._pulled.values():
            border.is_right = False

    @property
    def request_ids(self) -> set[str]:
        """The requests whose border states are being pulled."""
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
