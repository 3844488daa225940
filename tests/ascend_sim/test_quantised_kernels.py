"""What the kernels for quantised caches compute and write, each in a process of its own."""

import pytest

from tests.support.ascend.device_process import on_device
from tests.support.ascend.paths import ascend_release

pytestmark = pytest.mark.skipif(ascend_release() == "0.23", reason="vllm-ascend 0.23 calls other operators for it")


def test_a_row_or_a_tile_of_it_is_scaled_by_its_largest_item() -> None:
    on_device(
        """
import torch_npu
x = torch.randn(9, 1, 512).to(torch.bfloat16)
x[4] = 0
rows, row_scales = torch_npu.npu_dynamic_quant(x.to(device), dst_type=torch.int8)
tiles, tile_scales = torch_npu.npu_dynamic_block_quant(
    x.to(device), dst_type=torch.int8, row_block_size=1, col_block_size=128)
assert rows.dtype == tiles.dtype == torch.int8 and row_scales.dtype == tile_scales.dtype == torch.float32
assert rows.shape == tiles.shape == x.shape and row_scales.shape == (9, 1) and tile_scales.shape == (9, 1, 4)
for values, scales, size in ((rows, row_scales, 512), (tiles, tile_scales, 128)):
    values, scales = values.cpu().double().reshape(-1, size), scales.cpu().double().reshape(-1, 1)
    items = x.double().reshape(-1, size)
    torch.testing.assert_close(scales, items.abs().amax(1, keepdim=True) / 127)
    assert ((values * scales - items).abs() <= scales * 0.5001).all()
    assert (values.abs().amax(1) == 127).sum() == len(values) * 8 // 9
"""
    )


def test_runs_of_slots_are_stored_where_single_rows_would_be() -> None:
    """A run ends at the end of a block, before a gap, and before a slot that is none."""
    on_device(
        """
import torch_npu, vllm_ascend.vllm_ascend_C
own = torch.ops._C_ascend
slots = torch.tensor([126, 127, 128, 129, -1, 130, 400, 402, 401], dtype=torch.int32).to(device)
runs = [torch.full((9,), 7, dtype=torch.int32, device=device) for _ in range(3)]
own.store_kv_block_metadata(slots, *runs, 128)
assert [run.cpu().tolist() for run in runs] == [
    [2, 2, 1, 1, 1, 1, 0, 0, 0], [0, 2, 5, 6, 7, 8, 0, 0, 0], [126, 128, 130, 400, 402, 401, 0, 0, 0]]
for key in (torch.randint(-127, 128, (9, 128), dtype=torch.int8), torch.randn(9, 1).half()):
    caches = [torch.zeros(4, 128, 1, key.shape[1], dtype=key.dtype, device=device) for _ in range(2)]
    own.store_kv_block(key.to(device), caches[0], *runs, 128)
    torch_npu.npu_scatter_nd_update_(caches[1].view(512, -1), slots.view(-1, 1), key.to(device))
    assert torch.equal(*(cache.cpu() for cache in caches))
    assert torch.equal(caches[0].cpu()[3, 17, 0], key[8])
"""
    )


@pytest.mark.ascend_short
def test_quantised_sparse_attention_is_that_over_what_the_bytes_stand_for() -> None:
    """Of two requests in pages that are no neighbours, one of which has fewer tokens than are selected.

    A row of the main cache is written here byte by byte: a latent vector, a rotary key in bfloat16, and the scales.
    """
    on_device(
        """
import numpy as np, torch_npu, vllm_ascend.vllm_ascend_C
heads, latent, rotary, index, count = 4, 512, 64, 128, 64
generator = np.random.default_rng(5)
pages = 6 * 128
whole = lambda *shape: generator.integers(-127, 128, shape, dtype=np.int8)
values, scales = whole(pages, latent), generator.uniform(0.002, 0.02, (pages, 4)).astype(np.float32)
turned = torch.randn(pages, rotary).bfloat16()
rows = np.concatenate([values.view(np.uint8), turned.view(torch.uint8).numpy(), scales.view(np.uint8)], axis=1)
assert rows.shape == (pages, 656)
rows = torch.from_numpy(rows.view(np.int8)).view(6, 128, 1, 656)
latents = torch.from_numpy(values * scales.repeat(128, 1)).bfloat16().double()
keys, key_scales = whole(pages, index), generator.uniform(0.01, 0.03, pages).astype(np.float16)

table, before, lengths = [[4, 0, 2], [5, 1, 3]], (290, 10), (300, 50)
new = [length - start for length, start in zip(lengths, before)]
tokens = sum(new)
query = (torch.randn(tokens, heads, latent + rotary) * 0.3).bfloat16()
index_query, query_scales = whole(tokens, 3, index), generator.uniform(0.01, 0.03, (tokens, 3)).astype(np.float32)
weights = torch.randn(tokens, 3).half()
on = lambda array: torch.as_tensor(array).to(device)
ints = lambda numbers: torch.tensor(numbers, dtype=torch.int32).to(device)
where = dict(block_table=ints(table), actual_seq_lengths_query=ints([new[0], tokens]), layout_query="TND")

selected = torch.ops._C_ascend.npu_lightning_indexer_quant(
    query=on(index_query), key=on(keys).view(6, 128, 1, index), weights=on(weights),
    query_dequant_scale=on(query_scales), key_dequant_scale=on(key_scales).view(6, 128, 1),
    actual_seq_lengths_key=ints(lengths), query_quant_mode=0, key_quant_mode=0, layout_key="PA_BSND",
    sparse_count=count, sparse_mode=3, **where)
out, _, _ = torch.ops._C_ascend.npu_kv_quant_sparse_flash_attention_vllm(
    query=on(query), key=on(rows), value=on(rows), sparse_indices=selected, scale_value=0.3, sparse_block_size=1,
    actual_seq_lengths_kv=ints(lengths), layout_kv="PA_BSND", sparse_mode=3, attention_mode=2,
    quant_scale_repo_mode=1, tile_size=128, key_quant_mode=2, value_quant_mode=2, rope_head_dim=rotary, **where)
assert selected.shape == (tokens, 1, count) and selected.dtype == torch.int32
assert out.shape == (tokens, heads, latent) and out.dtype == torch.bfloat16
selected, out = selected.cpu(), out.cpu().double()

row = 0
for request, (start, length) in enumerate(zip(before, lengths)):
    place = [page * 128 + slot for page in table[request] for slot in range(128)][:length]
    for position in range(start, length):
        seen = place[: position + 1]
        true_keys = torch.from_numpy(keys[seen].astype(float) * key_scales[seen, None].astype(float))
        true_query = torch.from_numpy(index_query[row].astype(float) * query_scales[row, :, None].astype(float))
        score = sum(w * (true_keys @ q).relu() for q, w in zip(true_query, weights[row].double()))
        chosen = [t for t in selected[row, 0].tolist() if t >= 0]
        assert len(set(chosen)) == min(count, len(seen)) and set(selected[row, 0].tolist()) <= {-1, *range(len(seen))}
        torch.testing.assert_close(score[chosen], score.sort(descending=True).values[:count], rtol=1e-4, atol=1e-4)
        at = [place[t] for t in chosen]
        key = torch.cat((latents[at], turned[at].double()), 1)
        expected = (0.3 * query[row].double() @ key.T).softmax(-1) @ latents[at]
        torch.testing.assert_close(out[row], expected, rtol=0.01, atol=0.002)
        row += 1
assert row == tokens
"""
    )
