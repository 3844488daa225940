"""Triton kernels that vllm-ascend launches in eager mode, in torch: there is no Triton for the simulated device."""

import ctypes
import importlib.abc
import importlib.util
import math
import sys
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.machinery import ModuleSpec
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from tests.support.ascend.host_kernels import block_sparse_triton, kda, ngram_tables, pooled_indexer, ring_compressor
from tests.support.ascend.host_kernels.context_parallel import join_ranks, pack_for_ranks
from tests.support.ascend.host_kernels.dispatch import host
from tests.support.ascend.host_kernels.norms import scaled_norm
from tests.support.ascend.host_kernels.rotary import only_into_fp8, rotate_into_fp8


class HostTritonKernel:
    """Launched like a Triton kernel: ``kernel[grid](...)``."""

    def __init__(self, function: Callable[..., None]) -> None:
        self._function = function

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return partial(self._function, grid)


@dataclass(frozen=True)
class _Batch:
    """What all cache groups of a step share; CPU tensors over device memory."""

    requests: int
    tokens: int
    max_tokens: int
    query_start: Tensor  # [requests + 1]
    positions: Tensor  # [tokens]
    padding: int

    def map_slots(self, table: Tensor, block_size: int, slots: Tensor, *, circular: bool) -> None:
        """Write ``slots`` [max_tokens] from the block table [requests, blocks]."""
        slots[self.tokens : self.max_tokens] = self.padding
        bounds = self.query_start[: self.requests + 1].tolist()
        for request in range(self.requests):
            start, end = bounds[request], bounds[request + 1]
            if end > start:
                position = self.positions[start:end].long()
                block = torch.zeros_like(position) if circular else position // block_size
                mapped = table[request].long()[block] * block_size + position % block_size
                if circular:
                    mapped = torch.where(position < 0, self.padding, mapped)
                slots[start:end] = mapped.to(slots.dtype)


def _slot_mapping(
    grid: tuple[int, ...], num_tokens: int, max_tokens: int, query_start: Tensor, positions: Tensor, table: Tensor,
    _stride: int, block_size: int, slots: Tensor,
    *, TOTAL_CP_WORLD_SIZE: int, PAD_ID: int, IS_CIRCULAR: bool = False, **_others: Any,  # noqa: N803  Triton's
) -> None:  # fmt: skip
    assert TOTAL_CP_WORLD_SIZE == 1, "no context parallelism here"
    view = host.view
    batch = _Batch(grid[0] - 1, num_tokens, max_tokens, view(query_start), view(positions), PAD_ID)
    table, slots = view(table), view(slots)
    host.launch(lambda: batch.map_slots(table, block_size, slots, circular=IS_CIRCULAR))


def _slot_mapping_of_groups(
    grid: tuple[int, ...], num_tokens: int, max_tokens: int, query_start: Tensor, positions: Tensor,
    table_addresses: Tensor, slot_addresses: Tensor, strides: Tensor, block_sizes: Tensor, circular: Tensor | None,
    *, PAD_ID: int, PARALLEL_TILES: int = 1, **_others: Any,  # noqa: N803  Triton's
) -> None:  # fmt: skip
    """All KV cache groups at once; block tables and slots are given by their addresses."""
    view = host.view
    groups, requests = grid[0], (grid[1] - 1) // PARALLEL_TILES
    batch = _Batch(requests, num_tokens, max_tokens, view(query_start), view(positions), PAD_ID)
    columns = [view(column) for column in (table_addresses, slot_addresses, strides, block_sizes)]
    rings = view(circular) if circular is not None else torch.zeros(groups)

    def map_all() -> None:
        for group in range(groups):
            table, slots, stride, block_size = (int(column[group]) for column in columns)
            batch.map_slots(
                _int32_at(table, (requests, stride)), block_size, _int32_at(slots, (max_tokens,)),
                circular=bool(rings[group]),
            )  # fmt: skip

    host.launch(map_all)


def _int32_at(address: int, shape: tuple[int, ...]) -> Tensor:
    """A CPU tensor over device memory."""
    count = math.prod(shape)
    memory = (ctypes.c_int32 * count).from_address(host.reach(address, 4 * count))
    return torch.frombuffer(memory, dtype=torch.int32).view(shape)


def _unit_lengths(_grid: tuple[int, ...], x: Tensor, y: Tensor, epsilon: float, *_sizes: int) -> None:
    """Rows of length one; ``x``, ``y`` [rows, size]."""
    x, y = host.view(x), host.view(y)

    def scale() -> None:
        wide = x.float()
        y.copy_(wide * (wide.square().sum(-1, keepdim=True) + epsilon).rsqrt())

    host.launch(scale)


def _input_of_draft(
    _grid: tuple[int, ...], positions: Tensor, embeddings: Tensor, _stride: int, before: Tensor, _before_stride: int,
    weight: Tensor, weight_before: Tensor, epsilon: float, out: Tensor, *_sizes: int,
) -> None:  # fmt: skip
    """Norms of tokens' embeddings, of the first token zeros, and of the hidden states before them; side by side."""
    positions, embeddings, before, out = map(host.view, (positions, embeddings, before, out))
    weight, weight_before = host.view(weight), host.view(weight_before)

    def normalise() -> None:
        own = embeddings.float() * (positions != 0).unsqueeze(-1)
        parts = (scaled_norm(own, weight, epsilon)[0], scaled_norm(before.float(), weight_before, epsilon)[0])
        out.copy_(torch.cat(parts, -1))

    host.launch(normalise)


def _gates(
    _grid: tuple[int, ...], g: Tensor, strength: Tensor, a_log: Tensor, a: Tensor, b: Tensor, bias: Tensor,
    _seq_len: int, _heads: int, _tokens: int, beta: float, threshold: float, **_others: Any,
) -> None:  # fmt: skip
    """Of gated delta net: the logarithm of what a token leaves of a state, and how strongly it writes there."""
    g, strength, a_log, a, b, bias = map(host.view, (g, strength, a_log, a, b, bias))

    def compute() -> None:
        steps = functional.softplus(a.float() + bias.float(), beta=beta, threshold=threshold)
        g.copy_(-a_log.float().exp() * steps)
        strength.copy_(b.float().sigmoid())

    host.launch(compute)


def _gated_norm(
    grid: tuple[int, ...], x: Tensor, y: Tensor, weight: Tensor, bias: Tensor | None, gate: Tensor, _mean: None,
    reciprocal: Tensor, _x_stride: int, _y_stride: int, _gate_stride: int, _rows: int, _size: int, epsilon: float,
    *, NORM_BEFORE_GATE: bool, IS_RMS_NORM: bool, **_others: Any,  # noqa: N803  Triton's
) -> None:  # fmt: skip
    """The norm of whole rows, times SiLU of a gate."""
    assert bias is None
    assert grid[1] == 1
    assert NORM_BEFORE_GATE
    assert IS_RMS_NORM
    x, y, weight, gate, reciprocal = map(host.view, (x, y, weight, gate, reciprocal))

    def normalise() -> None:
        normalised, over = scaled_norm(x.float(), weight, epsilon)
        y.copy_(normalised * functional.silu(gate.float()))
        reciprocal.copy_(over.flatten())

    host.launch(normalise)


def _read_states(
    _grid: tuple[int, ...], states: Tensor, indices: Tensor, exists: Tensor, out: Tensor, *_strides: int, **_others: Any
) -> None:
    """Requests' states, out of all; zeros for who has none yet."""
    states, indices, exists, out = map(host.view, (states, indices, exists, out))

    def read() -> None:
        for row, (index, is_there) in enumerate(zip(indices.tolist(), exists.tolist(), strict=True)):
            out[row] = states[index] if is_there else 0

    host.launch(read)


def _read_first_states(
    grid: tuple[int, ...], states: Tensor, out: Tensor, indices: Tensor, exists: Tensor, *_strides: int
) -> None:
    """The same, of KDA."""
    _read_states(grid, states, indices, exists, out)


def _write_states(
    _grid: tuple[int, ...], states: Tensor, indices: Tensor, new: Tensor, *_strides: int, **_others: Any
) -> None:
    states, indices, new = map(host.view, (states, indices, new))

    def write() -> None:
        for row, index in enumerate(indices.tolist()):
            states[index] = new[row]

    host.launch(write)


def _copy_memory(_grid: tuple[int, ...], sources: Tensor, targets: Tensor, sizes: Tensor, **_others: Any) -> None:
    """Runs of bytes between device addresses."""
    columns = [host.view(column) for column in (sources, targets, sizes)]

    def copy() -> None:
        for source, target, size in zip(*(column.tolist() for column in columns), strict=True):
            ctypes.memmove(host.reach(target, size), host.reach(source, size), size)

    host.launch(copy)


def _keep_border_states(
    grid: tuple[int, ...], accepted: Tensor, places: Tensor, scheduled: Tensor, computed: Tensor, drafted: Tensor,
    tables: Tensor, table_stride: int, bases: Tensor, strides: Tensor, item_sizes: Tensor, sizes: Tensor,
    widths: Tensor, groups: Tensor, _rows: Tensor, _row_strides: Tensor, out: Tensor, mapping: None, requests: int,
    *, block_size: int, CONV_STATE_DIM_FIRST: bool, **_others: Any,  # noqa: N803  Triton's
) -> None:  # fmt: skip
    """Copy the state at a border that accepted tokens have passed to the block that ends there.

    The states after each of a step's tokens are in the blocks from the running one on; of convolutions, the inputs
    follow each other in the running block. ``out``: behind which accepted token the next step finds its state.
    """
    assert mapping is None
    assert not CONV_STATE_DIM_FIRST
    of_requests = [host.view(each) for each in (accepted, places, scheduled, computed, drafted)]
    of_states = [host.view(each) for each in (bases, strides, item_sizes, sizes, widths, groups)]
    tables, out = host.view(tables), host.view(out)

    def keep(request: int) -> None:
        number, place, new, old, drafts = (int(each[request]) for each in of_requests)
        first = old + new - drafts  # tokens of the state in the running block
        border = (first + number - 1) // block_size * block_size
        behind, to = border - first, border // block_size - 1
        if behind < 0:
            return
        if place == to:
            out[request] = 1
        for state in range(grid[1] if behind or place != to else 0):
            base, stride, item, size, width, group = (int(each[state]) for each in of_states)
            row = int(tables[group]) + 4 * table_stride * request
            blocks = _int32_at(row, (table_stride,)).tolist()
            source, count = (blocks[place], width - behind) if width else (blocks[place + behind], 1)
            address, length = base + source * stride + (behind * size * item if width else 0), count * size * item
            ctypes.memmove(host.reach(base + blocks[to] * stride, length), host.reach(address, length), length)

    def keep_all() -> None:
        for request in range(requests):
            keep(request)

    host.launch(keep_all)


#: Module: its kernels.
_KERNELS: Mapping[str, Mapping[str, Callable[..., None]]] = {
    "vllm.v1.worker.block_table": {"_compute_slot_mapping_kernel": _slot_mapping},
    "vllm_ascend.worker.block_table": {"_compute_slot_mapping_kernel": _slot_mapping},
    "vllm_ascend.ops.triton.compute_slot_mapping": {
        "_compute_slot_mapping_kernel": _slot_mapping,
        "_compute_slot_mapping_fused_groups_kernel": _slot_mapping_of_groups,
        "_compute_slot_mapping_fused_groups_adaptive_kernel": _slot_mapping_of_groups,
    },
    "vllm.third_party.flash_linear_attention.ops.l2norm": {"l2norm_fwd_kernel2": _unit_lengths},
    "vllm_ascend.ops.triton.linearnorm.fused_eh_norm": {"_fused_eh_norm_kernel": _input_of_draft},
    "vllm_ascend.ops.triton.fused_gdn_gating": {"fused_gdn_gating_kernel": _gates},
    "vllm_ascend.ops.triton.layernorm_gated": {"_layer_norm_fwd_1pass_kernel_npu": _gated_norm},
    "vllm_ascend.ops.triton.mamba.state_index": {
        "_gather_ssm_states_kernel": _read_states,
        "_scatter_ssm_states_kernel": _write_states,
    },
    "vllm_ascend.ops.triton.mamba.state_ops": {"_gather_initial_states_kernel": _read_first_states},
    "vllm_ascend.ops.triton.kda.conv_state": {"_copy_conv_state_kernel": kda.copy_conv_states},
    "vllm_ascend.ops.triton.kda.output_writeback": {"_write_output": kda.write_output},
    "vllm_ascend.ops.triton.kda.kda": {"layer_norm_gated_fwd_kernel": kda.norm_times_gate},
    "vllm_ascend.ops.triton.glm5_next_kpool_tail_compress": {
        "_glm5_next_kpool_tail_compress_kernel": pooled_indexer.compress_pools,
        "_store_kpool_tail_kernel": pooled_indexer.store_tail,
    },
    "vllm_ascend.ops.triton.glm5_next_lightning_indexer": {
        "_gather_pool_cache": pooled_indexer.gather_pools,
        "_glm5_next_lightning_indexer_score_kernel": pooled_indexer.score_pools,
        "_expand_pool_indices": pooled_indexer.expand_pools,
    },
    "vllm_ascend.ops.triton.compressor.compressor_triton": {
        "_pool_kernel": ring_compressor.pool_tokens,
        "_cache_update_kernel": ring_compressor.keep_states,
    },
    "vllm_ascend.ops.triton.quantize_indexer_query": {
        "_quantize_indexer_query_kernel": ring_compressor.quantise_queries,
    },
    "vllm_ascend.ops.triton.prepare_indexer_indices": {"_prepare_indexer_indices_kernel": ring_compressor.order_rows},
    "vllm.models.deepseek_v41.common.engram": {"_write_hash_cache_kernel": ngram_tables.remember_tokens},
    "vllm_ascend.ops.triton.engram_hash": {
        "_engram_req_index_kernel": ngram_tables.find_requests,
        "_hash_ids_kernel": ngram_tables.hash_ngrams,
    },
    "vllm_ascend.ops.triton.engram_lookup": {"_engram_int8_gather_dequant_kernel": ngram_tables.read_rows},
    "vllm_ascend.ops.triton.mamba.postprocess": {"postprocess_mamba_fused_kernel": _keep_border_states},
    "vllm_ascend.ops.triton.batch_memcpy": {"batch_memcpy_kernel": _copy_memory},
    "vllm_ascend.ops.triton.dcp.dcp_a2a": {
        "_pack_dcp_output_lse_kernel": pack_for_ranks,
        "_fused_dcp_lse_combine_kernel": join_ranks,
    },
    "vllm_ascend.models.minimax_m3.ops.msa_m3_triton": {
        "_prepare_prefill_topk_scores_kernel": block_sparse_triton.prefer_blocks,
        "_mask_prefill_topk_indices_kernel": block_sparse_triton.drop_unseen_blocks,
    },
    "vllm_ascend.models.minimax_m3.ops.msa_m3_triton_a5": {
        "_prefill_index_score_prepare_for_topk_kernel": block_sparse_triton.prefer_seen_blocks,
        "_topk_index_mask_invalid_prefill_kernel": block_sparse_triton.keep_seen_blocks,
        "_decode_qk_score_kernel": block_sparse_triton.score_blocks,
        "_index_topk_postprocess_kernel": block_sparse_triton.keep_and_count_seen_blocks,
    },
    "vllm_ascend.ops.triton.rope": {"_triton_rope_fp8": rotate_into_fp8},
    "vllm_ascend.ops.triton.msa.minimax_qknorm_rope_cache": {
        "_minimax_qknorm_rope_cache_kernel": block_sparse_triton.prepare_and_write,
    },
}


def _complete_placeholder(module: types.ModuleType) -> None:
    """What launches ask of Triton besides what vLLM's own placeholder for it has."""
    module.TritonPlaceholder.next_power_of_2 = staticmethod(lambda number: 1 << (number - 1).bit_length())


def _tell_cores(*names: str) -> Callable[[types.ModuleType], None]:
    """Numbers of cores, by which launches choose their grids; Triton would tell."""
    return lambda module: vars(module).update(dict.fromkeys(names, 1))


def _launch(module: types.ModuleType) -> None:
    """Kernels that it launches with Triton only."""
    vars(module)["HAS_TRITON"] = True


#: Module: what else it lacks without Triton.
_LACKING: Mapping[str, Callable[[types.ModuleType], None]] = {
    "vllm.triton_utils.importing": _complete_placeholder,
    "vllm_ascend.ops.triton.triton_utils": _tell_cores("_NUM_AICORE", "_NUM_VECTORCORE"),
    "vllm_ascend.ops.rotary_embedding": only_into_fp8,
    "vllm_ascend.models.minimax_m3.minimax_m3": _launch,
    "vllm_ascend.ops.triton.compressor.compressor_triton": _tell_cores("_CUBE_CORE_NUM"),
}
_PATCHED = (*_KERNELS, *_LACKING)


def _patch(module: types.ModuleType) -> None:
    for name, function in _KERNELS.get(module.__name__, {}).items():
        if hasattr(module, name):
            setattr(module, name, HostTritonKernel(function))
    if module.__name__ in _LACKING:
        _LACKING[module.__name__](module)


class _KernelFinder(importlib.abc.MetaPathFinder):
    """Patches a module once it has been imported."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in _PATCHED:
            return None
        sys.meta_path.remove(self)
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            sys.meta_path.insert(0, self)
        if spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def exec_module(module: types.ModuleType) -> None:
            execute(module)
            _patch(module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def install_triton_kernels() -> None:
    """Replace the kernels, also of modules that are imported later."""
    for name in _PATCHED:
        if name in sys.modules:
            _patch(sys.modules[name])
    sys.meta_path.insert(0, _KernelFinder())
