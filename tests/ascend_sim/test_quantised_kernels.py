"""What the kernels for quantised caches compute and write, each in a process of its own."""

import pytest

from tests.support.ascend.device_process import on_device
from tests.support.ascend.paths import ascend_release

pytestmark = pytest.mark.skipif(ascend_release() == "0.23", reason="vllm-ascend 0.23 calls other operators for it")


#: Code for the beginning of another: a type, its largest number, and numbers of that type.
_NUMBERS = """
dtype, largest = torch.{dtype}, {largest}
def numbers(*shape):
    return (torch.randn(shape) * largest / 4).clamp(-largest, largest).to(dtype)
"""
INT8, FP8 = (
    _NUMBERS.format(dtype=dtype, largest=largest) for dtype, largest in (("int8", 127), ("float8_e4m3fn", 448))
)
in_both = pytest.mark.parametrize("numbers", [INT8, FP8], ids=["int8", "fp8"])


@in_both
def test_a_row_or_a_tile_of_it_is_scaled_by_its_largest_item(numbers: str) -> None:
    """And then rounded to the nearest number: in fp8, with three digits, or to a multiple of 2 ** -9."""
    on_device(
        numbers
        + """
import torch_npu
x = torch.randn(9, 1, 512).to(torch.bfloat16)
x[4] = 0
rows, row_scales = torch_npu.npu_dynamic_quant(x.to(device), dst_type=dtype)
tiles, tile_scales = torch_npu.npu_dynamic_block_quant(
    x.to(device), dst_type=dtype, row_block_size=1, col_block_size=128)
assert rows.dtype == tiles.dtype == dtype and row_scales.dtype == tile_scales.dtype == torch.float32
assert rows.shape == tiles.shape == x.shape and row_scales.shape == (9, 1) and tile_scales.shape == (9, 1, 4)
for values, scales, size in ((rows, row_scales, 512), (tiles, tile_scales, 128)):
    values, scales = values.cpu().double().reshape(-1, size), scales.cpu().double().reshape(-1, 1)
    items = x.double().reshape(-1, size)
    torch.testing.assert_close(scales, items.abs().amax(1, keepdim=True) / largest)
    halves = scales / 2 if dtype == torch.int8 else (items.abs() / 16).maximum(scales / 1024)
    assert ((values * scales - items).abs() <= halves * 1.0002).all()
    assert (values.abs().amax(1) == largest).sum() == len(values) * 8 // 9
"""
    )


@in_both
def test_runs_of_slots_are_stored_where_single_rows_would_be(numbers: str) -> None:
    """A run ends at the end of a block, before a gap, and before a slot that is none."""
    on_device(
        numbers
        + """
import torch_npu, vllm_ascend.vllm_ascend_C
own = torch.ops._C_ascend
slots = torch.tensor([126, 127, 128, 129, -1, 130, 400, 402, 401], dtype=torch.int32).to(device)
runs = [torch.full((9,), 7, dtype=torch.int32, device=device) for _ in range(3)]
own.store_kv_block_metadata(slots, *runs, 128)
assert [run.cpu().tolist() for run in runs] == [
    [2, 2, 1, 1, 1, 1, 0, 0, 0], [0, 2, 5, 6, 7, 8, 0, 0, 0], [126, 128, 130, 400, 402, 401, 0, 0, 0]]
for key in (numbers(9, 128), torch.randn(9, 1).half(), torch.randn(9, 1)):
    caches = [torch.zeros(4, 128, 1, key.shape[1], dtype=key.dtype, device=device) for _ in range(3)]
    own.store_kv_block(key.to(device), caches[0], *runs, 128)
    torch_npu.npu_scatter_nd_update_(caches[1].view(512, -1), slots.view(-1, 1), key.to(device))
    torch_npu.npu_scatter_pa_cache(key.view(9, 1, -1).to(device), slots, key_cache=caches[2].view(512, 1, 1, -1))
    one, *others = (cache.cpu().float() for cache in caches)
    assert all(torch.equal(one, other) for other in others)
    stored = key[slots.cpu() >= 0].float()
    assert torch.equal(one[3, 17, 0], key[8].float()) and one.count_nonzero() == stored.count_nonzero()
"""
    )


@pytest.mark.ascend_short
@in_both
def test_quantised_sparse_attention_is_that_over_what_the_bytes_stand_for(numbers: str) -> None:
    """Of two requests in pages that are no neighbours, one of which has fewer tokens than are selected.

    A row of the main cache is written here byte by byte: a latent vector, a rotary key in bfloat16, and the scales.
    vllm-ascend calls operators of its own, and those of torch_npu on devices that know fp8.
    """
    on_device(
        numbers
        + """
import torch_npu, vllm_ascend.vllm_ascend_C
heads, latent, rotary, index, count = 4, 512, 64, 128, 64
pages = 6 * 128
uniform = lambda *shape: (1 + 9 * torch.rand(shape)) * 0.25 / largest
values, scales = numbers(pages, latent), uniform(pages, 4)
turned = torch.randn(pages, rotary).bfloat16()
rows = torch.cat([each.view(torch.uint8) for each in (values, turned, scales)], 1)
assert rows.shape == (pages, 656)
rows = rows.view(dtype).view(6, 128, 1, 656)
latents = (values.double() * scales.double().repeat_interleave(128, 1)).bfloat16().double()
keys, key_scales = numbers(pages, index), uniform(pages).to(torch.float16 if dtype == torch.int8 else torch.float32)

table, before, lengths = [[4, 0, 2], [5, 1, 3]], (290, 10), (300, 50)
new = [length - start for length, start in zip(lengths, before)]
tokens = sum(new)
query = (torch.randn(tokens, heads, latent + rotary) * 0.3).bfloat16()
index_query, query_scales = numbers(tokens, 3, index), uniform(tokens, 3)
weights = torch.randn(tokens, 3).half()
on = lambda tensor: tensor.to(device)
ints = lambda numbers: torch.tensor(numbers, dtype=torch.int32).to(device)
where = dict(block_table=ints(table), actual_seq_lengths_query=ints([new[0], tokens]), layout_query="TND")

own = torch.ops._C_ascend
select, attend = (
    (own.npu_lightning_indexer_quant, own.npu_kv_quant_sparse_flash_attention_vllm) if dtype == torch.int8
    else (torch_npu.npu_quant_lightning_indexer, torch_npu.npu_kv_quant_sparse_flash_attention))
selected = select(
    query=on(index_query), key=on(keys).view(6, 128, 1, index), weights=on(weights),
    query_dequant_scale=on(query_scales), key_dequant_scale=on(key_scales).view(6, 128, 1),
    actual_seq_lengths_key=ints(lengths), query_quant_mode=0, key_quant_mode=0, layout_key="PA_BSND",
    sparse_count=count, sparse_mode=3, **where)
out = attend(
    query=on(query), key=on(rows), value=on(rows), sparse_indices=selected, scale_value=0.3, sparse_block_size=1,
    actual_seq_lengths_kv=ints(lengths), layout_kv="PA_BSND", sparse_mode=3, attention_mode=2,
    quant_scale_repo_mode=1, tile_size=128, key_quant_mode=2, value_quant_mode=2, rope_head_dim=rotary, **where)
out = out[0] if dtype == torch.int8 else out
assert selected.shape == (tokens, 1, count) and selected.dtype == torch.int32
assert out.shape == (tokens, heads, latent) and out.dtype == torch.bfloat16
selected, out = selected.cpu(), out.cpu().double()

row = 0
for request, (start, length) in enumerate(zip(before, lengths)):
    place = [page * 128 + slot for page in table[request] for slot in range(128)][:length]
    for position in range(start, length):
        seen = place[: position + 1]
        true_keys = keys[seen].double() * key_scales[seen, None].double()
        true_query = index_query[row].double() * query_scales[row, :, None].double()
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
