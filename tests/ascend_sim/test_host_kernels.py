"""The simulated device itself: what its kernels compute, and when. Each case is a process of its own."""

import pytest

from tests.support.ascend.device_process import on_device
from tests.support.ascend.paths import ascend_release

pytestmark = pytest.mark.ascend_short


@pytest.mark.parametrize("queued", ["0", "1"])
def test_operators_compute_what_they_compute_on_the_cpu(queued: str) -> None:
    on_device(
        """
a, b = torch.randn(64, 32), torch.randn(32, 48)
x, y = a.to(device), b.to(device)
assert torch.equal((x @ y).softmax(-1).cpu(), (a @ b).softmax(-1))
assert torch.equal(x[::2, 3:9].t().contiguous().cpu(), a[::2, 3:9].t())
assert torch.equal(torch.cat((x, x.flip(0)))[x[:, 0].argsort()].cpu(), torch.cat((a, a.flip(0)))[a[:, 0].argsort()])
assert x.sum().item() == a.sum().item()
x.index_copy_(0, torch.tensor([3, 1], device=device), y[:2, :32])
a.index_copy_(0, torch.tensor([3, 1]), b[:2, :32])
assert torch.equal(x.cpu(), a)
""",
        SIMACL_QUEUED=queued,
    )


@pytest.mark.skipif(ascend_release() == "0.23", reason="vllm-ascend 0.23 calls another operator for it")
def test_decoding_of_several_tokens_is_that_of_each_of_them() -> None:
    """Over latent vectors, of requests with one to three tokens, and padding behind them."""
    on_device(
        """
heads, latent, rotary, counts, held = 3, 32, 8, (3, 1, 2), (200, 7, 130)
key, key_rope = (torch.randn(9, 1, 128, size).to(device) for size in (latent, rotary))
query, query_rope = (torch.randn(7, heads, size).to(device) for size in (latent, rotary))
table = torch.tensor([[4, 1], [2, 0], [8, 5]], dtype=torch.int32).to(device)

def attend(layout, query, query_rope, table, held, **more):
    return torch.ops.npu.npu_fused_infer_attention_score_v2(
        query, key, key, query_rope=query_rope, key_rope=key_rope, actual_seq_kvlen=held, block_table=table,
        num_query_heads=heads, num_key_value_heads=1, softmax_scale=0.2, input_layout=layout, block_size=128, **more)[0]

out = attend("TND_NTD", query, query_rope, table, held, actual_seq_qlen=[3, 4, 6], sparse_mode=3)
assert out.shape == (heads, 7, latent)
requests = [request for request, count in enumerate(counts) for _ in range(count)]
lengths = [held[request] - count + 1 + token for request, count in enumerate(counts) for token in range(count)]
alone = attend("BNSD_NBSD", query[:6].unsqueeze(2), query_rope[:6].unsqueeze(2), table[requests], lengths)
torch.testing.assert_close(out[:, :6].cpu(), alone[:, :, 0].cpu())
""",
    )


def test_a_stream_that_does_not_wait_reads_what_was_there_before() -> None:
    on_device(
        """
x = torch.zeros(16, device=device)
here.synchronize()
pause()
x.fill_(7)
written = here.record_event()
assert not written.query()
assert read_on(there, x).eq(0).all()
there.wait_event(written)
assert read_on(there, x).eq(7).all()
"""
    )


def test_the_launching_thread_goes_on_and_results_can_be_passed_on() -> None:
    on_device(
        """
x = torch.ones(1000, device=device)
here.synchronize()
pause()
began = time.monotonic()
y = (x * 3 + 1).cumsum(0)
y[::2].neg_()
assert time.monotonic() - began < 0.4
assert not here.query()
assert y.cpu()[-1] == 4000
"""
    )


def test_what_the_host_passes_is_taken_as_it_is_at_the_launch() -> None:
    on_device(
        """
x, indices = torch.arange(10, device=device), torch.tensor([4, 5])
pause()
y = x[indices]
indices.fill_(9)
assert y.cpu().tolist() == [4, 5]
"""
    )


def test_numbers_do_not_change_the_type_of_a_result() -> None:
    on_device(
        """
x = torch.tensor(3.0, device=device)
assert (x / 2).dtype == (x * 2.5).dtype == torch.float32
assert (x / 2).item() == 1.5
"""
    )


def test_device_memory_is_out_of_reach_of_the_host() -> None:
    with pytest.raises(AssertionError):
        on_device("import ctypes; ctypes.string_at(torch.zeros(4, device=device).data_ptr(), 1)")


def test_a_copy_to_the_host_that_does_not_block_returns_at_once() -> None:
    on_device(
        """
x = torch.zeros(16, device=device)
here.synchronize()
pause()
x.fill_(7)
began = time.monotonic()
y = x.to("cpu", non_blocking=True)
assert time.monotonic() - began < 0.4
here.synchronize()
assert y.eq(7).all()
"""
    )


@pytest.mark.skipif(ascend_release() == "0.23", reason="vllm-ascend 0.23 has no caches with heads before tokens")
def test_caches_with_heads_first_hold_and_give_what_others_do() -> None:
    on_device(
        """
import torch_npu, vllm_ascend.vllm_ascend_C
tokens, heads, size = 128, 4, 32
key, value, query = (torch.randn(count, heads, size).to(device) for count in (300, 300, 2))
table = torch.tensor([[2, 0, 3]], dtype=torch.int32)
place = torch.arange(300)
slots = (table[0][place // tokens] * tokens + place % tokens).int().to(device)
plain = [torch.zeros(4, tokens, heads, size, device=device) for _ in range(2)]
heads_first = [torch.zeros(4, heads, tokens, size, device=device) for _ in range(2)]
torch_npu.npu_scatter_pa_kv_cache(
    key=key, value=value, key_cache=plain[0], value_cache=plain[1], slot_mapping=slots, cache_mode="Norm")
torch.ops._C_ascend.npu_scatter_pa_kv_cache(
    key, value, *heads_first, slots, cache_mode="Norm", scatter_mode="NHSD")
assert all(torch.equal(a.cpu(), b.cpu().transpose(1, 2)) for a, b in zip(plain, heads_first))
assert plain[0].cpu()[2, 5].equal(key.cpu()[5])

def attend(key, value):
    return torch_npu.npu_fused_infer_attention_score(
        query=query, key=key, value=value, block_table=table.to(device), input_layout="TND", block_size=tokens,
        actual_seq_lengths=[2], actual_seq_lengths_kv=[300], num_key_value_heads=heads, num_heads=heads, scale=0.2,
        sparse_mode=3, atten_mask=torch.ones(2048, 2048, dtype=torch.bool).triu(1).to(device))[0].cpu()

expected = attend(*(part.flatten(2) for part in plain))
assert expected.abs().sum() > 0
assert torch.equal(attend(*heads_first), expected)
"""
    )


def test_tokens_of_several_requests_are_read_from_their_blocks() -> None:
    """By vllm-ascend 0.23 with the second operator, by 0.30 with the first."""
    on_device(
        """
import torch_npu
caches = [torch.randn(4, 128, 1, size) for size in (64, 16)]
parts = [cache.to(device) for cache in caches]
table, lengths, starts = (
    torch.tensor(numbers, dtype=torch.int32).to(device) for numbers in ([[2, 0], [3, 1]], [150, 40], [6, 0]))
gather, load = torch_npu.npu_gather_pa_kv_cache, torch_npu.atb.npu_paged_cache_load
for read, name in ((gather, "seq_offset"), (load, "seq_starts")):
    outs = [torch.full((190, 1, size), 5.0, device=device) for size in (64, 16)]
    read(*parts, table, lengths, key=outs[0], value=outs[1], **{name: starts})
    for cache, out in zip(caches, outs):
        assert torch.equal(out.cpu(), torch.cat((cache[2, 6:], cache[0, :28], cache[3, :40])))
"""
    )


@pytest.mark.skipif(ascend_release() == "0.23", reason="vllm-ascend 0.23 calls other operators for it")
def test_sparse_attention_is_that_over_each_querys_best_tokens() -> None:
    """Of two requests in pages that are no neighbours, one of which has fewer tokens than are selected."""
    on_device(
        """
import torch_npu, vllm_ascend.vllm_ascend_C
heads, latent, rotary, index, count = 4, 32, 16, 24, 64
caches = [torch.randn(6, 128, 1, size) for size in (latent, rotary, index)]
table, before, lengths = [[4, 0, 2], [5, 1, 3]], (290, 10), (300, 50)
new = [length - start for length, start in zip(lengths, before)]
tokens = sum(new)
query, rope = torch.randn(tokens, heads, latent), torch.randn(tokens, heads, rotary)
index_query, weights = torch.randn(tokens, 3, index), torch.randn(tokens, 3)
on = lambda tensor: tensor.to(device)
whole = lambda numbers: torch.tensor(numbers, dtype=torch.int32).to(device)
where = dict(block_table=whole(table), actual_seq_lengths_query=whole([new[0], tokens]), layout_query="TND")

selected, _ = torch_npu.npu_lightning_indexer(
    query=on(index_query), key=on(caches[2]), weights=on(weights), actual_seq_lengths_key=whole(lengths),
    layout_key="PA_BSND", sparse_count=count, sparse_mode=3, **where)
out, _, _ = torch.ops._C_ascend.npu_sparse_flash_attention(
    query=on(query), key=on(caches[0]), value=on(caches[0]), sparse_indices=selected, scale_value=0.3,
    sparse_block_size=1, actual_seq_lengths_kv=whole(lengths), query_rope=on(rope), key_rope=on(caches[1]),
    layout_kv="PA_BSND", sparse_mode=3, attention_mode=2, **where)
assert selected.shape == (tokens, 1, count) and selected.dtype == torch.int32
selected, out = selected.cpu(), out.cpu()

row = 0
for request, (start, length) in enumerate(zip(before, lengths)):
    latents, turned, keys = (cache[table[request]].flatten(0, 2)[:length] for cache in caches)
    for position in range(start, length):
        seen = range(position + 1)
        score = sum(w * (keys[: position + 1] @ q).relu() for q, w in zip(index_query[row], weights[row]))
        chosen = [t for t in selected[row, 0].tolist() if t >= 0]
        assert len(set(chosen)) == min(count, len(seen)) and set(selected[row, 0].tolist()) <= {-1, *seen}
        torch.testing.assert_close(score[chosen], score.sort(descending=True).values[:count])
        logits = 0.3 * (query[row] @ latents[chosen].T + rope[row] @ turned[chosen].T)
        torch.testing.assert_close(out[row], logits.softmax(-1) @ latents[chosen], rtol=1e-4, atol=1e-5)
        row += 1
assert row == tokens
"""
    )


def test_rows_of_a_cache_are_written_where_their_indices_are_not_negative() -> None:
    on_device(
        """
import torch_npu, vllm_ascend.vllm_ascend_C
updates, indices = torch.randn(3, 8), torch.tensor([[5], [-1], [2]], dtype=torch.int32)
expected = torch.zeros(7, 8)
expected[[5, 2]] = updates[[0, 2]]
writes = [torch_npu.npu_scatter_nd_update_, getattr(torch.ops._C_ascend, "npu_scatter_nd_update_sk", None)]
for write in filter(None, writes):
    rows = torch.zeros(7, 8, device=device)
    write(rows, indices.to(device), updates.to(device))
    assert torch.equal(rows.cpu(), expected)
for kind in (torch.int32, torch.int64):
    rows = torch.zeros(7, 8, device=device)
    rows.index_copy_(0, torch.tensor([5, 2], dtype=kind).to(device), updates[[0, 2]].to(device))
    assert torch.equal(rows.cpu(), expected)
"""
    )
