"""States at the borders of blocks, which are pulled so that a longer prompt finds its beginning here.

vLLM gives a request whose prompt is pulled a block for the state after all of its tokens. A prefix is found only where
a state is, and only at the border of a block. So the last border before that has its state pulled as well, if the
prefill engine has it, into a block of its own:

    taken --- all ranks have pulled it ---> found by prefix hits, in nobody's use
       '------ a rank has not -------------> given back

Everything runs on the scheduler's thread.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pd_connector.vllm.cache_specs import Retention
from pd_connector.vllm.device_blocks import DeviceBlocks

if TYPE_CHECKING:
    from pd_connector.vllm.types import KVCacheBlock, Request

BlockTables = tuple[tuple[int, ...], ...]


@dataclass(slots=True)
class _Border:
    """Where the states of a request's last border are being pulled to, by cache group."""

    request: "Request"
    entries: "dict[int, tuple[int, KVCacheBlock]]"
    is_right: bool = True


class BorderStates:
    """Owns the blocks to which border states are being pulled."""

    def __init__(self, blocks: DeviceBlocks, groups: Sequence[Retention]) -> None:
        """``groups``: what vLLM keeps of a request in every cache group."""
        self._blocks = blocks
        self._groups = {number: kept for number, kept in enumerate(groups) if kept.states}
        self._pulled: dict[str, _Border] = {}  # by request

    def add(self, request: "Request", block_ids: BlockTables, tokens: range) -> BlockTables:
        """Return the block tables of a request that pulls ``tokens``, with blocks for its border states.

        Not if there is no room, if this engine finds no prefixes, or if it has the states.
        """
        wanted = {}
        for group, kept in self._groups.items():
            entry = kept.border_entry(tokens)
            if entry is None or block_ids[group][entry]:
                continue
            if self._blocks.found_state(request, group, entry, kept.block_tokens) is None:
                wanted[group] = entry
        if not wanted or not self._blocks.finds_prefixes or not self._blocks.has_spare(len(wanted)):
            return block_ids
        taken = self._blocks.take(len(wanted))
        border = _Border(request, dict(zip(wanted, zip(wanted.values(), taken, strict=True), strict=True)))
        self._pulled[request.request_id] = border
        tables = [list(ids) for ids in block_ids]
        for group, (entry, block) in border.entries.items():
            tables[group][entry] = int(block.block_id)
        return tuple(map(tuple, tables))

    def lack(self, request_ids: Collection[str]) -> None:
        """Note that a rank has not pulled the border states of these requests."""
        for request_id in request_ids:
            if (border := self._pulled.get(request_id)) is not None:
                border.is_right = False

    def end(self, request_id: str, *, is_right: bool) -> None:
        """Let others find the border states of a request whose pull has ended on all ranks, if all have them."""
        border = self._pulled.pop(request_id, None)
        if border is None:
            return
        for group, (entry, block) in border.entries.items():
            if is_right and border.is_right:
                self._blocks.publish_state(border.request, group, entry, self._groups[group].block_tokens, block)
        self._blocks.give_back(tuple(block for _, block in border.entries.values()))

    def forget_model(self) -> None:
        """Publish nothing of what is under way: another model has computed it."""
        for border in self._pulled.values():
            border.is_right = False

    @property
    def request_ids(self) -> set[str]:
        """The requests whose border states are being pulled."""
        return set(self._pulled)
