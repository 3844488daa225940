"""What a lease holds of a prompt's states: that after all tokens but the last, and those that a prefix hit would find.

Whoever decodes computes the last token, so the state before it is needed, and a state cannot be taken back by a token.
So the prompt was cut when its request came. One that was not cut, or whose request went on, has no such state, unless
it is that of a border. States behind it are not leased: a reader would take them for it.

Belongs to the scheduler's thread.
"""

from collections.abc import Callable, Container, Sequence
from typing import TYPE_CHECKING

from layout.states import running_entry
from pd_connector.vllm.cache_specs import Retention
from pd_connector.vllm.device_blocks import DeviceBlocks, HeldBlocks
from pd_connector.vllm.prompts import Prompts

if TYPE_CHECKING:
    from pd_connector.vllm.types import KVCacheBlock, Request

BlockTables = Sequence[Sequence[int]]


class LeasedStates:
    """Makes the block tables of leases, of a model with states or without."""

    def __init__(self, blocks: DeviceBlocks, groups: Sequence[Retention], prompts: Prompts) -> None:
        """``groups``: what vLLM keeps of a request in every cache group."""
        self._blocks = blocks
        self._groups = groups
        self._prompts = prompts

    def hold(
        self, request: "Request", block_ids: BlockTables, unfinished: Callable[[], Container[int] | None] = tuple
    ) -> tuple[BlockTables, HeldBlocks]:
        """Take references to what is leased of a request that has computed its prompt.

        Args:
            request: the request.
            block_ids: of the request, by cache group.
            unfinished: returns the blocks that steps under way may write for other requests, and that vLLM lets
                everyone find; None if nobody knows which. Asked only of a model with states.

        Returns:
            The block tables of the lease, and the blocks. Entry i of a table of states holds the state after the tokens
            of i + 1 blocks, the last one that after all tokens; 0 marks one that is not held.
        """
        states = [group for group, kept in enumerate(self._groups) if kept.states]
        tables = list(block_ids)
        found: list[KVCacheBlock] = []
        left_out = unfinished() if states else ()
        for group in states:
            in_group = self._states(request, group, left_out)
            last = running_entry(request.num_prompt_tokens, self._groups[group].block_tokens)
            tables[group] = [in_group[entry].block_id if entry in in_group else 0 for entry in range(last + 1)]
            found += in_group.values()
        return tables, self._blocks.hold(request.request_id, states, tuple(found))

    def _states(self, request: "Request", group: int, left_out: Container[int] | None) -> "dict[int, KVCacheBlock]":
        """Return the blocks with a request's states, by entry. Others of its own may be on their way to be reused."""
        tokens, size = request.num_prompt_tokens, self._groups[group].block_tokens
        is_cut = self._prompts.is_cut(request.request_id)
        borders = (tokens if is_cut else tokens - 1) // size
        states: dict[int, KVCacheBlock] = {}
        if left_out is not None:
            found = self._blocks.found_states(request, group, size)
            states = {
                entry: block for entry, block in found.items() if entry < borders and block.block_id not in left_out
            }
        if is_cut and request.num_computed_tokens == tokens:
            entry = running_entry(tokens, size)
            states[entry] = self._blocks.table(request.request_id)[group][entry]
        return states
