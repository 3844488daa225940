"""Operators of MiniMax-M3's sparse attention on the simulated device, token by token."""

import pytest

from tests.support.ascend.device_process import on_device
from tests.support.ascend.paths import ascend_release

pytestmark = [
    pytest.mark.ascend_short,
    pytest.mark.skipif(ascend_release() == "0.23", reason="vllm-ascend 0.23 has no MiniMax-M3"),
]


def test_queries_attend_to_their_best_blocks_and_to_their_own() -> None:
    """Of two requests in pages that are no neighbours, one of which has fewer blocks than are selected."""
    on_device(
        """
import torch_npu, vllm_ascend.ops, vllm_ascend.vllm_ascend_C
from vllm_ascend.models.minimax_m3.ops.msa_m3_npu import minimax_m3_index_prefill, minimax_m3_sparse_attn
heads, shared, size, block, count = 2, 2, 16, 128, 3
table, before, lengths = [[4, 0, 2, 0, 0], [5, 1, 3, 6, 7]], (290, 500), (300, 560)
tokens, starts = 70, (0, 10, 70)
index, keys, values = torch.randn(8, block, size), *(torch.randn(8, block, heads, size) for _ in range(2))
query, index_query = torch.randn(tokens, heads * shared, size), torch.randn(tokens, heads, size)
on = lambda tensor: tensor.to(device)
whole = lambda numbers: on(torch.tensor(numbers, dtype=torch.int32))
where = (whole(table), whole(starts), whole(lengths), whole(before))
chosen = minimax_m3_index_prefill(
    on(index_query), (on(index),), *where, whole([2, 3]), on(torch.ones(8, 8)), max_query_len=60, max_seq_len=560,
    topk=count, init_blocks=0, local_blocks=1)
out = torch.empty_like(on(query))
minimax_m3_sparse_attn(
    on(query), (on(keys), on(values)), chosen, *where, 60, heads, 0.3, out, block_size=block)
chosen, out = chosen.cpu(), out.cpu()

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
                torch.testing.assert_close(out[row, sharer], weights @ seen[2][of, head], rtol=1e-4, atol=1e-5)
        row += 1
assert row == tokens

x = 9 * torch.randn(5, 32)
gate, up = x[:, :16].minimum(torch.tensor(7.0)), x[:, 16:].maximum(torch.tensor(-7.0)).minimum(torch.tensor(7.0))
torch.testing.assert_close(
    torch.ops.npu.npu_clipped_swiglu(on(x), dim=-1, alpha=1.7, limit=7.0, bias=1.0, interleaved=False).cpu(),
    gate / (1 + (-1.7 * gate).exp()) * (up + 1))
"""
    )
