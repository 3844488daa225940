"""GLM-5.3-Flash's pooled indexer on the simulated device: vllm-ascend's own code for it, against what it should select.

And the operators around it, against formulas of vLLM's own. Each case is a process.
"""

import pytest

from tests.support.ascend.device_process import IN_PAGES, on_device
from tests.support.ascend.paths import ascend_release

pytestmark = pytest.mark.skipif(ascend_release() == "0.23", reason="vllm-ascend 0.23 has no GLM-5.3")


@pytest.mark.ascend_short
def test_pools_are_written_as_they_end_and_the_best_of_them_are_selected() -> None:
    """Of two requests, whose tokens come in parts that end in the middle of pools, in pages that are no neighbours."""
    on_device(
        IN_PAGES
        + """
from vllm_ascend.attention.indexer_kpool import AscendIndexerKPoolMetadata, AscendIndexerKPoolTailMetadata
from vllm_ascend.models.glm5next.sparse_attn_indexer_kpool import SparseAttnIndexerKpool
size, heads, pool, capacity, page, count = 32, 3, 4, 5, 8, 16
lengths, tables, own_rings = (75, 5), [[4, 0, 2], [5, 1, 3]], (3, 1)
key, gate = ([torch.randn(length, size) for length in lengths] for _ in range(2))
query = [torch.randn(length, heads, size) for length in lengths]
weight = [torch.randn(length, heads) for length in lengths]
bias = torch.randn(pool, size)
pools = torch.zeros(6, page, 1, size, dtype=torch.bfloat16, device=device)
ring_pages, rings = in_pages(5, 2, capacity, size)
ring_before = ring_pages.cpu()
indexer = SparseAttnIndexerKpool(count, size)

def slot(request, position):
    number = position // pool
    return tables[request][number // page] * page + number % page if (position + 1) % pool == 0 else -1

def step(*parts):
    of = lambda tensors: torch.cat([tensors[r][start:end] for r, start, end in parts]).to(device)
    each = [(r, p) for r, start, end in parts for p in range(start, end)]
    ends = torch.tensor([end - start for _, start, end in parts]).cumsum(0).int().to(device)
    done = [end // pool for _, _, end in parts]
    whole_table = whole([tables[r] for r, _, _ in parts])
    of_pools = AscendIndexerKPoolMetadata(
        block_table=whole_table, slot_mapping=torch.tensor([slot(*at) for at in each]).to(device),
        seq_lens=whole(done), seq_lens_cpu=torch.tensor(done), positions=torch.tensor([p for _, p in each]).to(device),
        block_size=page, compress_ratio=pool, cum_query_lens=ends, raw_seq_lens=whole([end for _, _, end in parts]))
    of_rings = AscendIndexerKPoolTailMetadata(
        block_table=whole([[own_rings[r]] for r, _, _ in parts]),
        slot_mapping=whole([own_rings[r] * capacity + p % capacity for r, p in each]), block_size=capacity)
    buffer = torch.full((len(each) + 2, 128), 7, dtype=torch.int32, device=device)
    found = indexer(
        of(key), of(query), of(weight), of_pools.positions, pools, rings, of_pools, of_rings, gate_score=of(gate),
        compress_ape=bias.to(device), index_kpool=pool, max_pool_seq_len=max(done), compute_topk=True,
        output_buffer=buffer)
    assert found.shape == (len(each), 1, count + pool - 1) and (buffer[len(each):] == 7).all()
    for (request, position), row in zip(each, found[:, 0].tolist()):
        ended = (position + 1) // pool
        keys = torch.stack([pools.cpu().view(-1, size)[slot(request, n * pool + pool - 1)] for n in range(ended)]
                           or [torch.zeros(size)]).float()
        score = (query[request][position] * weight[request][position][:, None]).sum(0) @ keys.T
        best = score.topk(min(count // pool, ended)).indices.tolist() if ended else []
        seen = {n * pool + i for n in best for i in range(pool)} | {*range(ended * pool, position + 1)}
        chosen = row[: len(seen)]
        assert set(chosen) == seen and set(row[len(seen):]) <= {-1}, (position, row, seen)

step((0, 0, 10), (1, 0, 3))
step((0, 10, 11), (1, 3, 4))
step((0, 11, 71), (1, 4, 5))
step((0, 71, 75))
expected = torch.zeros(6 * page, size)
for request, length in enumerate(lengths):
    for start in range(0, length - pool + 1, pool):
        members = slice(start, start + pool)
        shares = (gate[request][members] + bias).softmax(0)
        expected[slot(request, start + pool - 1)] = (shares * key[request][members]).sum(0)
torch.testing.assert_close(pools.cpu().view(-1, size), expected.bfloat16())
last = {}
for request, length in enumerate(lengths):
    ring = last[own_rings[request]] = torch.empty(2, capacity, size)
    for position in range(length - capacity, length):
        ring[:, position % capacity] = torch.stack((key[request][position], gate[request][position]))
assert_rows(ring_pages, rings, last, ring_before)
"""
    )


def test_sparse_attention_without_rotary_keys_is_attention_to_latent_vectors() -> None:
    on_device(
        """
import vllm_ascend.vllm_ascend_C
latents, query = torch.randn(3 * 128, 512), torch.randn(20, 4, 512) / 4
pages = torch.zeros(3, 128, 1, 512)
pages[[2, 0]] = latents[:256].view(2, 128, 1, 512)
selected = torch.full((20, 1, 200), -1, dtype=torch.int32)
for row in range(20):
    selected[row, 0, : 181 + row] = torch.arange(181 + row)
whole = lambda numbers: torch.tensor(numbers, dtype=torch.int32).to(device)
cache = pages.to(device)
out, _, _ = torch.ops._C_ascend.npu_sparse_flash_attention(
    query=query.to(device), key=cache, value=cache, sparse_indices=selected.to(device), scale_value=0.3,
    sparse_block_size=1, block_table=whole([[2, 0]]), actual_seq_lengths_query=whole([20]),
    actual_seq_lengths_kv=whole([200]), query_rope=None, key_rope=None, layout_query="TND", layout_kv="PA_BSND",
    sparse_mode=3, attention_mode=2, return_softmax_lse=False)
expected = torch.nn.functional.scaled_dot_product_attention(
    query.transpose(0, 1), *[latents[:200].expand(4, 200, 512)] * 2, scale=0.3,
    attn_mask=torch.ones(20, 200).tril(180).bool())
torch.testing.assert_close(out.cpu(), expected.transpose(0, 1), rtol=1e-4, atol=1e-5)
"""
    )


def test_streams_are_mixed_as_vllm_does() -> None:
    on_device(
        """
import vllm_ascend.vllm_ascend_C
from vllm.model_executor.kernels.mhc.torch import mhc_post_torch, mhc_pre_torch
streams, size = 4, 48
x, out = torch.randn(30, streams, size).bfloat16(), torch.randn(30, size).bfloat16()
weights = torch.randn(24, streams * size) / 4, torch.randn(3), torch.randn(24)
pre, post, mix = torch.ops._C_ascend.npu_hc_pre_v2(
    x.to(device), *(weight.to(device) for weight in weights), streams, 20, 1e-5, 1e-6)
expected = mhc_pre_torch(x, *weights, 1e-5, 1e-6, 1e-6, 2.0, 20)
for mine, own in zip((post.unsqueeze(-1), mix, pre), expected):
    torch.testing.assert_close(mine.cpu(), own)
assert (mix.sum(-2) - 1).abs().max() < 1e-3 and mix.std() > 0.1
behind = torch.ops._C_ascend.npu_hc_post(*(part.unsqueeze(0) for part in (out.to(device), x.to(device), post, mix)))
torch.testing.assert_close(behind[0].cpu(), mhc_post_torch(out, x, expected[0], expected[1]))
"""
    )
