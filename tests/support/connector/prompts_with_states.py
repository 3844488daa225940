"""An engine of a model with states, as far as vLLM's scheduler keeps books of blocks: prompts that it computes."""

from collections.abc import Sequence
from typing import Any

import torch
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, MambaSpec
from vllm.v1.request import Request

from pd_connector.vllm.cache_groups import retentions
from pd_connector.vllm.cache_specs import Retention
from pd_connector.vllm.device_blocks import DeviceBlocks
from pd_connector.vllm.prompts import Prompts
from tests.support.connector.stated import model_config
from tests.support.host_tier.setup import MAX_TOKENS, Setup, make_request

BLOCK = 4


class StateEngine:
    """Blocks of one group with keys and values and two with states, in vLLM's mode "none" or "align", or with rings."""

    def __init__(
        self, mode: str = "align", blocks: int = 40, *, drafts: bool = False, larger: int = 1, **stated: int
    ) -> None:
        """``drafts``: from hidden states. ``larger``: how many times, blocks of keys. ``stated``: what else vLLM states
        of the states: blocks for drafts and checkpoints.
        """
        size = MAX_TOKENS if mode == "none" else BLOCK
        full = FullAttentionSpec(block_size=larger * BLOCK, num_kv_heads=1, head_size=8, dtype=torch.float32)
        if mode == "ring":
            from vllm.v1.kv_cache_interface import CircularBufferSpec  # noqa: PLC0415  vLLM 0.23 has none

            state: Any = CircularBufferSpec(block_size=BLOCK, num_kv_heads=1, head_size=4, dtype=torch.float32)
        else:
            state = MambaSpec(
                block_size=size, shapes=((3, 8), (2, 4, 2)), dtypes=(torch.float32,) * 2, mamba_cache_mode=mode,
                page_size_padded=full.page_size_bytes, **stated,
            )  # fmt: skip
        groups = [KVCacheGroupSpec([f"layer {number}"], spec) for number, spec in enumerate((full, state, state))]
        config = KVCacheConfig(blocks, [], groups)
        self.manager = KVCacheManager(
            config, max_model_len=MAX_TOKENS, scheduler_block_size=larger * size, hash_block_size=size,
            max_in_flight_tokens=MAX_TOKENS, enable_caching=mode != "none", use_eagle=drafts,
        )  # fmt: skip
        self._setup = Setup(groups=((size, 0),))
        self.retentions: tuple[Retention, ...] = retentions(model_config(), config)
        self.blocks, self.prompts = DeviceBlocks(), Prompts()
        self.blocks.bind(self.manager)

    def request(
        self, name: str, tokens: int, *, is_cut: bool = False, differs: tuple[int, int] | None = None
    ) -> Request:
        """A request for a prompt that every longer one begins with.

        ``differs``: after how many tokens the prompt is another one, and its number.
        """
        shared, number = differs or (tokens, 0)
        prompt = [each if each <= shared else each + 1000 * number for each in range(1, tokens + 1)]
        request = make_request(self._setup, name, prompt)
        if is_cut:
            self.prompts.cut(request, self.blocks.hash_tokens)
        return request

    def compute(self, request: Request, *, until: Sequence[int] = ()) -> None:
        """Compute a request's prompt, in steps that end after ``until`` tokens, and at the last border of a block."""
        blocks, found, *_ = self.manager.get_computed_blocks(request)
        tokens = request.num_prompt_tokens
        last_border = (tokens - 1) // BLOCK * BLOCK
        ends = sorted({end for end in (*until, last_border, tokens) if end > found})
        new: dict[str, Any] = {"num_new_computed_tokens": found, "new_computed_blocks": blocks} if found else {}
        request.num_computed_tokens = found
        for end in ends:
            self.manager.new_step_starts()
            assert self.manager.allocate_slots(request, end - request.num_computed_tokens, **new) is not None
            new, request.num_computed_tokens = {}, end

    def pull(self, request: Request) -> tuple[tuple[int, ...], ...]:
        """Give a request blocks for all tokens but the last, as vLLM does before they are pulled; return its tables."""
        self.manager.new_step_starts()
        _, found, *_ = self.manager.get_computed_blocks(request)
        assert not found
        tokens = request.num_prompt_tokens - 1
        given = self.manager.allocate_slots(request, 0, num_external_computed_tokens=tokens, delay_cache_blocks=True)
        assert given is not None
        return self.tables(request)

    def arrived(self, request: Request) -> None:
        """Count a pulled prompt as computed, as vLLM does."""
        request.num_computed_tokens = request.num_prompt_tokens - 1
        self.manager.cache_blocks(request, request.num_computed_tokens)

    def answer(self, request: Request, tokens: Sequence[int]) -> None:
        """Compute the last token of a prompt that has arrived, and of its answer all but the last."""
        for token in tokens:
            self.manager.new_step_starts()
            assert self.manager.allocate_slots(request, 1) is not None
            request.num_computed_tokens += 1
            request.append_output_token_ids(token)

    def tables(self, request: Request) -> tuple[tuple[int, ...], ...]:
        """A request's block tables, 0 for vLLM's null block."""
        return tuple(map(tuple, self.manager.get_block_ids(request.request_id)))

    def found(self, request: Request) -> int:
        """Tokens that are found of a request's prompt."""
        self.manager.new_step_starts()
        return int(self.manager.get_computed_blocks(request)[1])
