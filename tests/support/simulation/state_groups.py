"""States of recurrent layers in ``vllm_schedulers``: cache groups of vLLM's own, and what each block of them must hold.

A state is the hash of its cache group and of the prompt up to the token after which it is, where the first token of its
block would be. A step goes on from the state after the tokens before to that after its own last token, and also hands
out the state of a checkpoint, if vLLM has a block for it.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
from vllm.config import SpeculativeConfig
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import get_block_hash, get_group_id
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, MambaSpec
from vllm.v1.request import Request

from layout.geometry import CacheGroup, Plane, WorkerGeometry
from pd_connector.orders import Orders
from tests.support.simulation.scheduler_pulls import BlockStamps, state_stamp

#: vLLM's ways to keep states: one of each request, or also those at borders of blocks. Empty: the model has none.
StateMode = Literal["", "none", "align"]

_GROUPS = 2  # with states


#: What vLLM 0.32 states of every Mamba2 layer: a step hands out the state of a border within it.
CHECKPOINTS = {"num_prefill_checkpoint_blocks": 1, "prefill_checkpoint_alignment": 1}
#: Of an engine that drafts one token.
DRAFTS = {"num_speculative_blocks": 1}


def caches(
    block_tokens: int, longest: int, blocks: int, mode: StateMode, stated: Mapping[str, int] | None = None
) -> KVCacheConfig:
    """A group with keys and values and, in a ``mode``, further ones with states, of requests of ``longest`` tokens.

    ``stated``: what else is stated of them, such as ``CHECKPOINTS`` and ``DRAFTS``.
    """
    full = FullAttentionSpec(block_size=block_tokens, num_kv_heads=4, head_size=16, dtype=torch.float32)
    groups = [KVCacheGroupSpec(["layer"], full)]
    if mode:
        shapes: dict[str, Any] = {"shapes": ((3, 8), (2, 4, 2)), "dtypes": (torch.float32,) * 2}
        state = MambaSpec(
            block_size=block_tokens if mode == "align" else longest, mamba_cache_mode=mode,
            page_size_padded=full.page_size_bytes, **shapes, **(stated or {}),
        )  # fmt: skip
        groups += [KVCacheGroupSpec([f"state{number}"], state) for number in range(_GROUPS)]
    return KVCacheConfig(blocks, [], groups)


def drafts(config: KVCacheConfig) -> SpeculativeConfig | None:
    """How an engine with these caches drafts: from the model's hidden states, if states have blocks for drafts."""
    specs = [group.kv_cache_spec for group in config.kv_cache_groups]
    if not (number := max(getattr(spec, "num_speculative_blocks", 0) for spec in specs)):
        return None
    made = SpeculativeConfig(method="ngram", num_speculative_tokens=number, prompt_lookup_max=1)
    made.method = "eagle"  # of which vLLM's scheduler knows no model
    return made


def worker_with(config: KVCacheConfig) -> WorkerGeometry:
    """What the only worker of an engine with these caches tells of them."""
    groups = []
    for group in config.kv_cache_groups:
        plane = Plane("kv", tuple(group.layer_names), 0, 1, 1, 1, 1, config.num_blocks, 0, 1, 1, 1, 1, 1)
        holds_states = isinstance(group.kv_cache_spec, MambaSpec)
        groups.append(CacheGroup(int(group.kv_cache_spec.block_size), 0, (plane,), states=holds_states))
    return WorkerGeometry(0, 1, 0, 1, "127.0.0.1:15000", tuple(groups), ())


class States:
    """Steps that compute states, and checks of whatever is to hold one. For one engine."""

    def __init__(self, config: KVCacheConfig) -> None:
        specs = [group.kv_cache_spec for group in config.kv_cache_groups]
        self._sizes = {number: int(spec.block_size) for number, spec in enumerate(specs) if isinstance(spec, MambaSpec)}
        self._has_checkpoints = any(getattr(spec, "num_prefill_checkpoint_blocks", 0) for spec in specs)
        self._drafts = drafts(config) is not None
        self.checkpoints = 0  # that steps have handed out
        self._hashed: dict[bytes, int] = {}  # by hash of a block, the prompt up to its last token

    def note(self, request: Request, stamps: Sequence[int], hash_tokens: int) -> None:
        """Note what the blocks of a request are found by. ``stamps``: of its prompt up to each token."""
        for number, value in enumerate(request.block_hashes if self._sizes else ()):
            self._hashed[bytes(value)] = stamps[(number + 1) * hash_tokens - 1]

    def compute(
        self, memory: BlockStamps, tables: Sequence[Sequence[int]], stamps: Sequence[int], first: int, end: int
    ) -> None:
        """Go on from the state after ``first`` tokens, which must be there, to that after ``end``."""
        for group, size in self._sizes.items():
            if first:
                held = memory.get((tables[group][(first - 1) // size], 0))
                right = state_stamp(group, stamps[first - 1])
                assert held == right, f"a step begins with another state of cache group {group} than after {first}"
            memory[tables[group][(end - 1) // size], 0] = state_stamp(group, stamps[end - 1])
            tokens = _checkpoint(first, end, size, self._drafts) if self._has_checkpoints else 0
            if tokens and (block := tables[group][-(-end // size) - 2]):
                self.checkpoints += 1
                memory[block, 0] = state_stamp(group, stamps[tokens - 1])

    def check_found(self, pool: BlockPool, memory: BlockStamps, in_slots: bool = False) -> None:
        """Raise AssertionError if a block can be found as a state that it does not hold."""
        for block in pool.blocks if self._sizes else ():
            key = block.block_hash
            if key is None or get_group_id(key) not in self._sizes:
                continue
            place = block.block_id - 1 if in_slots else block.block_id
            right = state_stamp(get_group_id(key), self._hashed[bytes(get_block_hash(key))])
            assert memory.get((place, 0)) == right, f"block {block.block_id} is found as a state that it does not hold"

    def check_destinations(self, pool: BlockPool, orders: Orders) -> None:
        """Raise AssertionError if a pull of states is to write where others may read, or to nobody's block."""
        for order in (*orders.pulls, *orders.borders):
            for group in self._sizes:
                for number in filter(None, order.local_block_ids[group]):
                    block = pool.blocks[number]
                    is_its_own = block.ref_cnt == 1 and block.block_hash is None
                    assert is_its_own, f"I5: the state of {order.request_id} is pulled into block {number}, not its own"


def _checkpoint(first: int, end: int, size: int, drafts: bool) -> int:
    """The tokens after which a step from ``first`` to ``end`` hands out a state, beside the one at its end; 0: none."""
    from vllm.v1.kv_cache_interface import (  # noqa: PLC0415  since 0.32
        get_mamba_prefill_checkpoint_position,
        is_mamba_prefill_checkpoint_valid,
    )

    tokens = int(get_mamba_prefill_checkpoint_position(end, size, drafts))
    return tokens if is_mamba_prefill_checkpoint_valid(first, end, tokens, size, size, 1) else 0
