"""Writing to and reading from paged KV caches [blocks, tokens of a block, heads, head size]: operators in torch."""

import torch
from torch import Tensor

from tests.support.ascend.host_kernels.dispatch import ATB, NPU, OperatorLibrary, atb_operator, npu_operator
from tests.support.ascend.host_kernels.norms import scaled_norm
from tests.support.ascend.host_kernels.rotary import rotate_pairs


def write_slots(slots: Tensor, pairs: tuple[tuple[Tensor, Tensor], ...]) -> None:
    """Write the first rows of each pair's first tensor into its cache, at ``slots``; a negative slot is none."""
    slots = slots.flatten().long()
    valid = slots >= 0
    for new, cache in pairs:
        tokens = cache.shape[1]
        block, offset = slots[valid] // tokens, slots[valid] % tokens
        cache[block, offset] = new[: slots.numel()][valid].view(-1, *cache.shape[2:]).to(cache.dtype)


@atb_operator
def _npu_reshape_and_cache(key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slots: Tensor) -> None:
    write_slots(slots, ((key, key_cache), (value, value_cache)))


@npu_operator
def npu_scatter_pa_kv_cache(
    key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slots: Tensor,
    *, compress_lens: Tensor | None = None, compress_seq_offsets: Tensor | None = None,
    seq_lens: Tensor | None = None, cache_mode: str = "PA_NZ",
) -> None:  # fmt: skip
    assert cache_mode == "Norm", cache_mode
    write_slots(slots, ((key, key_cache), (value, value_cache)))


def npu_scatter_pa_cache(
    key: Tensor, slots: Tensor,
    *, compress_lens: Tensor | None = None, compress_seq_offsets: Tensor | None = None,
    seq_lens: Tensor | None = None, key_cache: Tensor,
) -> Tensor:  # fmt: skip
    """``key`` [tokens, heads, size] into a cache [blocks, tokens of a block, heads, size], which is returned."""
    write_slots(slots, ((key, key_cache),))
    return key_cache


NPU.define(npu_scatter_pa_cache, name="npu_scatter_pa_cache.value")


@npu_operator
def npu_scatter_nd_update_(rows: Tensor, indices: Tensor, updates: Tensor) -> Tensor:
    """Write ``updates`` [tokens, ...] to those rows of a cache that ``indices`` [tokens, 1] say; a negative is none."""
    write_rows(rows, indices, updates)
    return rows


def _index_copy_(rows: Tensor, dim: int, indices: Tensor, source: Tensor) -> Tensor:
    """PyTorch's own, by indices of any integer type, as the device has it."""
    return torch.ops.aten.index_copy.out(rows, dim, indices.long(), source, out=rows)


PYTORCH = OperatorLibrary("aten")
PYTORCH.define(_index_copy_, name="index_copy_")


def write_rows(rows: Tensor, indices: Tensor, updates: Tensor) -> None:
    """The same, returning nothing, as vllm-ascend's own operator for it does.

    An index may be several numbers, [tokens, numbers]: of a block and of a row in it.
    """
    valid = (indices >= 0).all(1)
    place = indices[valid].long().unbind(1)
    rows[place] = updates[valid].view(-1, *rows.shape[len(place) :]).to(rows.dtype)


def read_tokens(
    pairs: tuple[tuple[Tensor, Tensor], ...], block_tables: Tensor, lengths: Tensor, starts: Tensor | None
) -> None:
    """Copy the cached tokens of all requests, one after the other, from each pair's cache into its second tensor."""
    at = 0
    firsts = starts.tolist() if starts is not None else [0] * len(lengths)
    for request, (start, length) in enumerate(zip(firsts, lengths.tolist(), strict=False)):
        position = torch.arange(start, start + length)
        for cache, out in pairs:
            tokens = cache.shape[1]
            block, offset = block_tables[request].long()[position // tokens], position % tokens
            out[at : at + length] = cache[block, offset].view(length, *out.shape[1:])
        at += length


@npu_operator
def npu_gather_pa_kv_cache(
    key_cache: Tensor, value_cache: Tensor, block_tables: Tensor, seq_lens: Tensor, key: Tensor, value: Tensor,
    *, seq_offset: Tensor | None = None, is_seq_lens_cumsum: bool = False,
) -> None:  # fmt: skip
    assert not is_seq_lens_cumsum
    read_tokens(((key_cache, key), (value_cache, value)), block_tables, seq_lens, seq_offset)


def npu_paged_cache_load(
    key_cache: Tensor, value_cache: Tensor, block_table: Tensor, context_lens: Tensor,
    *, seq_starts: Tensor | None = None, cumsum: bool = False, key: Tensor, value: Tensor,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    assert not cumsum
    read_tokens(((key_cache, key), (value_cache, value)), block_table, context_lens, seq_starts)
    return key, value


# What vllm-ascend 0.23 calls for it.
ATB.define(npu_paged_cache_load, name="npu_paged_cache_load.out")


def npu_kv_rmsnorm_rope_cache(
    kv: Tensor, gamma: Tensor, cos: Tensor, sin: Tensor, index: Tensor, k_cache: Tensor, ckv_cache: Tensor,
    *, k_rope_scale: Tensor | None = None, c_kv_scale: Tensor | None = None, k_rope_offset: Tensor | None = None,
    c_kv_offset: Tensor | None = None, v: Tensor | None = None, epsilon: float = 1e-5, cache_mode: str = "Norm",
    is_output_kv: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """kv [tokens, 1, 1, latent + rotary size]: the normalised latent and the turned rest go into their caches."""
    assert cache_mode == "PA", cache_mode
    assert c_kv_scale is None
    latent, _ = scaled_norm(kv[..., : gamma.shape[0]], gamma, epsilon)
    turned = rotate_pairs(kv[..., gamma.shape[0] :], cos, sin)
    write_slots(index, ((turned, k_cache), (latent, ckv_cache)))
    return k_cache, ckv_cache, turned, latent


# Its schema says neither that it writes the caches nor that it returns them.
NPU.define(npu_kv_rmsnorm_rope_cache, aliases={0: 5, 1: 6})
