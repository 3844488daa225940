"""Operators of MiniMax-M3's sparse attention on the simulated device, token by token."""

import pytest

from tests.support.ascend.device_process import on_device
from tests.support.ascend.paths import ascend_release

pytestmark = pytest.mark.skipif(ascend_release() == "0.23", reason="vllm-ascend 0.23 has no MiniMax-M3")


#: Code for the beginning of another: a generation of devices, and how it rounds what is attended to.
_AS_ON = """
from tests.support.ascend.device_generation import build_for
build_for("{generation}")
def rounded(tensor):
    return tensor.to(torch.{dtype})
"""
IN_FLOAT32 = _AS_ON.format(generation="A2", dtype="float32")
IN_FP8 = _AS_ON.format(generation="A5", dtype="float8_e4m3fn")


@pytest.mark.ascend_short
@pytest.mark.parametrize("generation", [IN_FLOAT32, IN_FP8], ids=["float32", "fp8"])
def test_queries_attend_to_their_best_blocks_and_to_their_own(generation: str) -> None:
    """Of two requests in pages that are no neighbours, one of which has fewer blocks than are selected.

    In fp8, what is selected for the last token of each is what another kernel selects where it follows alone.
    """
    on_device(
        generation
        + """
import torch_npu, vllm_ascend.ops, vllm_ascend.vllm_ascend_C
from vllm_ascend.models.minimax_m3.ops.msa_m3_npu import (
    minimax_m3_index_prefill, minimax_m3_sparse_attn, minimax_m3_sparse_attn_decode)
heads, shared, size, block, count = 2, 2, 16, 128, 3
table, before, lengths = [[4, 0, 2, 0, 0], [5, 1, 3, 6, 7]], (290, 500), (300, 560)
tokens, starts = 70, (0, 10, 70)
index, keys, values = map(
    rounded, (torch.randn(8, block, size), *(torch.randn(8, block, heads, size) for _ in range(2))))
query, index_query = torch.randn(tokens, heads * shared, size), rounded(torch.randn(tokens, heads, size))
on = lambda tensor: tensor.to(device)
whole = lambda numbers: on(torch.tensor(numbers, dtype=torch.int32))
where = (whole(table), whole(starts), whole(lengths), whole(before))
chosen = minimax_m3_index_prefill(
    on(index_query), (on(index),), *where, whole([2, 3]), on(torch.ones(8, 8)), max_query_len=60, max_seq_len=560,
    topk=count, init_blocks=0, local_blocks=1)
out = torch.empty_like(on(query))
minimax_m3_sparse_attn(
    on(query), (on(keys), on(values)), chosen, *where, 60, heads, 0.3, out, block_size=block)
alone = torch.empty_like(on(query[:2]))
last = [9, 69]
minimax_m3_sparse_attn_decode(
    on(query[last]), (on(keys), on(values)), chosen[:, last].contiguous(), where[0], where[2], heads, 0.3, alone, 1,
    block_size=block)
chosen, out = chosen.cpu(), out.cpu()
close = 1e-4 if rounded(query).dtype == torch.float32 else 2 ** -8  # bfloat16
torch.testing.assert_close(alone.cpu(), out[last], rtol=close, atol=close / 10)
if index.dtype == torch.float8_e4m3fn:
    from vllm_ascend.models.minimax_m3.ops.msa_m3_triton_a5 import minimax_m3_index_decode
    also, counts = (each.cpu() for each in minimax_m3_index_decode(
        on(index_query[last]), (on(index),), where[0], where[2], 560, count, 0, 1, heads, 1))
    assert torch.equal(also.sort().values, chosen[:, last].sort().values) and counts.tolist() == [[3, 3], [3, 3]]
index, keys, values, query, index_query = (
    each.float() for each in (index, keys, values, rounded(query), index_query))

row = 0
for request, (start, length) in enumerate(zip(before, lengths)):
    seen = [cache[table[request]].flatten(0, 1) for cache in (index, keys, values)]
    for position in range(start, length):
        own = position // block
        for head in range(heads):
            score = index_query[row, head] @ seen[0][: position + 1].T
            best = torch.stack([part.max() for part in score.split(block)])
            best[own] = float("inf")
            expected = set(best.topk(min(count, own + 1)).indices.tolist())
            got = [each for each in chosen[head, row].tolist() if each >= 0]
            assert set(got) == expected and len(got) == len(expected), (row, head, got, expected)
            of = [at for at in range(position + 1) if at // block in expected]
            for sharer in range(head * shared, (head + 1) * shared):
                weights = (0.3 * query[row, sharer] @ seen[1][of, head].T).softmax(-1)
                attended = weights @ seen[2][of, head]
                torch.testing.assert_close(out[row, sharer], attended, rtol=close, atol=close / 10)
        row += 1
assert row == tokens

x = 9 * torch.randn(5, 32)
gate, up = x[:, :16].minimum(torch.tensor(7.0)), x[:, 16:].maximum(torch.tensor(-7.0)).minimum(torch.tensor(7.0))
torch.testing.assert_close(
    torch.ops.npu.npu_clipped_swiglu(on(x), dim=-1, alpha=1.7, limit=7.0, bias=1.0, interleaved=False).cpu(),
    gate / (1 + (-1.7 * gate).exp()) * (up + 1))
"""
    )


def test_rotary_embeddings_into_fp8_round_once_and_end_at_its_largest_number() -> None:
    """Half of each head is rotated, by its token's position."""
    on_device(
        """
import vllm_ascend.ops
from vllm_ascend.ops.triton.rope import rope_forward_triton
tokens, size, rotated = 7, 32, 16
angles = torch.arange(100)[:, None] / 10 ** torch.arange(rotated // 2)
table = torch.cat((angles.cos(), angles.sin()), 1)
query, key = 200 * torch.randn(tokens, 3, size), 200 * torch.randn(tokens, 1, size)
positions = torch.tensor([90, 3, 4, 5, 0, 1, 50])
found = rope_forward_triton(
    query.to(device), key.to(device), cos_sin_cache=table.to(device), positions=positions.to(device), rope_dim=rotated,
    out_dtype=torch.float8_e4m3fn)
for x, out in zip((query, key), found):
    assert out.dtype == torch.float8_e4m3fn and out.shape == x.shape
    a, b, rest = x.split((rotated // 2, rotated // 2, size - rotated), -1)
    turned = torch.view_as_real(torch.complex(a, b) * torch.polar(torch.ones(()), angles[positions])[:, None])
    expected = torch.cat((turned[..., 0], turned[..., 1], rest), -1).clamp(-448, 448)
    exact = (out.cpu().float() - expected).abs() <= expected.abs() / 16 + 2 ** -10
    assert exact.all() and (expected.abs() == 448).any()
"""
    )


def test_what_is_cached_is_normalised_rotated_and_written_to_its_slots() -> None:
    """Keys, values and the indexer's key, in bfloat16 and in fp8. A negative slot is none, and padding stays out."""
    on_device(
        """
import vllm_ascend.ops
from vllm_ascend.ops.triton.msa.minimax_qknorm_rope_cache import minimax_qknorm_rope_cache
tokens, written, size, rotated = 6, 5, 64, 32
packed = torch.randn(tokens, 11 * size).bfloat16()
packed[0, 6 * size : 8 * size] *= 900
weights = [torch.randn(size).bfloat16() / 4 for _ in range(4)]
angles = torch.arange(100)[:, None] / 10 ** torch.arange(rotated // 2)
table, positions = torch.cat((angles.cos(), angles.sin()), 1), torch.tensor([90, 3, 4, 5, 0, 1])
slots, index_slots = torch.tensor([5, -1, 128, 383, 7, 9]), torch.tensor([6, 127, -1, 300, 8, 10])

def prepared(heads, weight):
    x = heads.double()
    x = (x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * (1 + weight.double())).bfloat16().double()
    a, b, rest = x.split((rotated // 2, rotated // 2, size - rotated), -1)
    turned = torch.complex(a, b) * torch.polar(torch.ones(()), angles[positions])[:, None]
    return torch.cat((turned.real, turned.imag, rest), -1)

q, k, v, index_q, index_k = packed.unflatten(-1, (11, size)).split((4, 2, 2, 2, 1), 1)
q, k, index_q, index_k = map(prepared, (q, k, index_q, index_k), weights)
for dtype, digits in ((torch.bfloat16, 8), (torch.float8_e4m3fn, 4)):
    close = dict(rtol=1.1 * 2 ** -digits, atol=0.02)
    caches = [torch.zeros(3, 128, 2, size, dtype=dtype).to(device) for _ in range(2)]
    caches.append(torch.zeros(3, 128, size, dtype=dtype).to(device))
    queries, index_queries = minimax_qknorm_rope_cache(
        packed.to(device), table.to(device), positions.to(device), *(weight.to(device) for weight in weights), *caches,
        slots.to(device), index_slots.to(device), written, 4, 2, 2, 1e-6)
    assert queries.dtype == torch.bfloat16 and index_queries.dtype == dtype
    torch.testing.assert_close(queries.cpu().double(), q.flatten(1), rtol=2 ** -7, atol=0.02)
    torch.testing.assert_close(index_queries.cpu().double(), index_q.flatten(1), **close)
    for cache, numbers, places in zip(caches, (k, v.double(), index_k), (slots, slots, index_slots)):
        rows = cache.cpu().double().view(384, -1)
        stored = places[:written] >= 0
        expected = torch.zeros_like(rows)
        expected[places[:written][stored]] = numbers.flatten(1)[:written][stored]
        torch.testing.assert_close(rows, expected.clamp(-torch.finfo(dtype).max, torch.finfo(dtype).max), **close)
"""
    )
