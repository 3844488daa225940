"""The block tables of a recipe's engines, as vLLM's cache manager keeps them with vllm-ascend's managers in its places.

P computes a prompt in steps and leases it; D is given blocks for what it is to pull.
"""

from collections.abc import Iterator
from typing import Any

from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256_cbor
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import (
    generate_scheduler_kv_cache_config,
    get_request_block_hasher,
    init_none_hash,
    resolve_kv_cache_block_sizes,
)
from vllm.v1.request import Request

from layout.plan import BlockTable
from layout.states import running_entry
from pd_connector.params import RemotePrefill
from pd_connector.scheduler.decode.needed_blocks import NeededBlocks
from pd_connector.scheduler.prefill.leased_states import LeasedStates
from pd_connector.vllm.cache_groups import retentions
from pd_connector.vllm.device_blocks import DeviceBlocks
from pd_connector.vllm.prompts import Prompts
from tests.support.ascend.recipe_ranks import RankCaches

_STEP = 32  # tokens: the pools are small


class Books:
    """One engine's cache manager, and one request of so many tokens."""

    def __init__(self, rank: RankCaches, tokens: int) -> None:
        """``rank``: any of the first pipeline stage."""
        config, plan = rank.vllm_config, generate_scheduler_kv_cache_config([rank.kv_cache_config])
        block, hashed = resolve_kv_cache_block_sizes(plan, config)
        self.layers = [frozenset(group.layer_names) for group in plan.kv_cache_groups]
        self.retentions = retentions(config, plan)
        self._tokens = tokens
        self._prefixes = bool(config.cache_config.enable_prefix_caching)
        self._manager = KVCacheManager(
            plan, config.model_config.max_model_len, block, hashed, _STEP, enable_caching=self._prefixes,
            dcp_world_size=config.parallel_config.decode_context_parallel_size,
        )  # fmt: skip
        self._blocks, self._prompts = DeviceBlocks(), Prompts()
        self._blocks.bind(self._manager, tokens_to_pull=lambda _: tokens - 1)
        init_none_hash(sha256_cbor)
        hasher = get_request_block_hasher(hashed, sha256_cbor)
        prompt = list(range(1, tokens + 1))
        self._request = Request("r", prompt, SamplingParams(max_tokens=1), None, block_hasher=hasher)
        self._request.num_in_flight_tokens = 0
        self._hashed = hashed

    def lease(self) -> tuple[tuple[int, ...], ...]:
        """Compute the prompt, less its last token if there are states, end the request; return the lease's tables."""
        request, manager = self._request, self._manager
        if any(kept.states for kept in self.retentions):
            self._prompts.cut(request, self._hashed)
        for end in self._ends(request.num_prompt_tokens):
            manager.new_step_starts()
            given = manager.allocate_slots(request, end - request.num_computed_tokens)
            assert given is not None, f"the pool is too small for {end} tokens"
            request.num_computed_tokens = end
        manager.coordinator.remove_skipped_blocks(request.request_id, request.num_computed_tokens)
        own = manager.get_block_ids(request.request_id)
        tables, held = LeasedStates(self._blocks, self.retentions, self._prompts).hold(request, own)
        manager.free(request)
        leased = {block for table in tables for block in table if block}
        assert leased == {block.block_id for block in held}
        assert all(manager.block_pool.blocks[block].ref_cnt == 1 for block in leased)
        return tuple(map(tuple, tables))

    def receive(self, remote: RemotePrefill) -> list[BlockTable]:
        """Give the request blocks for all tokens but the last, all of which the lease must have."""
        manager, tokens = self._manager, self._tokens - 1
        assert (lacking := NeededBlocks(self.retentions, self.layers).lacking(remote)) is None, lacking
        manager.new_step_starts()
        given = manager.allocate_slots(self._request, 0, num_external_computed_tokens=tokens, delay_cache_blocks=True)
        assert given is not None, f"the pool is too small for {tokens} tokens"
        return list(self._tables(manager.get_block_ids("r"), tokens))

    def _ends(self, tokens: int) -> Iterator[int]:
        """Where steps end: with states at borders of blocks, also at those."""
        step = _STEP
        if self._prefixes and (sizes := [kept.block_tokens for kept in self.retentions if kept.states]):
            step = min(sizes)
        yield from range(step, tokens, step)
        yield tokens

    def _tables(self, tables: Any, tokens: int) -> Iterator[BlockTable]:
        for kept, table in zip(self.retentions, tables, strict=True):
            entries = running_entry(tokens, kept.block_tokens) + 1  # behind are those of drafts
            yield BlockTable.of([block or -1 for block in table[:entries]])
