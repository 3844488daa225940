"""What a lease holds of a prompt's states: that after all tokens but the last, and those that a prefix hit would find.

Whoever decodes computes the last token, so the state before it is needed, and a state cannot be taken back by a token.
So the prompt was cut when its request came. One that was not cut, or whose request went on, has no such state.

Belongs to the scheduler's thread.
"""

from collections.abc import Sequence
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

    def tables(self, request: "Request", block_ids: BlockTables) -> tuple[BlockTables, HeldBlocks]:
        """Return the block tables of a request that has computed its prompt, and the blocks that are not among its own.

        Entry i of a table of states holds the state after the tokens of i + 1 blocks, the last one that after all
        tokens; 0 marks one that is not held.

        ``block_ids``: of the request, by cache group.
        """
        if not any(kept.states for kept in self._groups):
            return block_ids, ()
        tokens = request.num_prompt_tokens
        has_state = self._prompts.is_cut(request.request_id) and request.num_computed_tokens == tokens
        tables, found = [], dict[int, "KVCacheBlock"]()
        for group, (kept, ids) in enumerate(zip(self._groups, block_ids, strict=True)):
            if not kept.states:
                tables.append(ids)
                continue
            last = running_entry(tokens, kept.block_tokens)
            table = [0] * last + [ids[last] if has_state else 0]  # other entries may be on their way to be reused
            for entry, block in self._blocks.found_states(request, group, kept.block_tokens).items():
                if not table[entry]:
                    table[entry], found[block.block_id] = block.block_id, block
            tables.append(table)
        own = {block_id for ids in block_ids for block_id in ids}
        return tables, tuple(block for block_id, block in found.items() if block_id not in own)
