"""Ends of prefill chunks in hybrid models, where vllm-ascend 0.30 lets them be anywhere.

vLLM names a state by the border that its block ends at, when a chunk has passed it. So a chunk that begins inside a
block must not run past the block's border: the state left in it is that of fewer tokens, and others would find it.
vllm-ascend takes vLLM's care of that away from all engines that may pull, but for the first chunk of a prompt, and from
models with pooled indexers. Must not import vllm_ascend.
"""

import sys
from typing import Any

_PATCH = "vllm_ascend.patch.platform.patch_mamba_block_aligned_split"


def align_chunks() -> None:
    """Let vLLM's schedulers of this process end chunks by ``chunk_end`` where vllm-ascend does not. Idempotent."""
    scheduler: Any = getattr(sys.modules.get(_PATCH), "Scheduler", None)
    if scheduler is None or scheduler._mamba_block_aligned_split.__module__ == __name__:
        return
    split = scheduler._mamba_block_aligned_split

    def aligned(
        self: Any,
        request: Any,
        num_new_tokens: int,
        num_new_local_computed_tokens: int = 0,
        num_external_computed_tokens: int = 0,
    ) -> int:
        found = num_new_local_computed_tokens, num_external_computed_tokens
        tokens = int(split(self, request, num_new_tokens, *found))
        start = int(request.num_computed_tokens) + sum(found)
        if request.num_tokens - start <= 1:  # it decodes, perhaps with drafts, whose states the worker sorts out
            return tokens
        return chunk_end(start, start + tokens, _state_tokens(self.kv_cache_config)) - start

    scheduler._mamba_block_aligned_split = aligned


def chunk_end(start: int, end: int, block_tokens: int) -> int:
    """Return where a chunk of a prompt ends at the latest, so that all states at borders are what they are named.

    A chunk that passes a border ends at one, so that there is a state to find.

    Args:
        start: the first token of the chunk.
        end: behind its last, as it would be.
        block_tokens: tokens of a block of states.
    """
    if start % block_tokens:
        return min(end, (start // block_tokens + 1) * block_tokens)
    border = end // block_tokens * block_tokens
    return border if border > start else end


def _state_tokens(kv_cache_config: Any) -> int:
    """Return the block size of the states, which all groups of them share, in tokens."""
    specs = (group.kv_cache_spec for group in kv_cache_config.kv_cache_groups)
    return next(int(spec.block_size) for spec in specs if hasattr(spec, "mamba_cache_mode"))
