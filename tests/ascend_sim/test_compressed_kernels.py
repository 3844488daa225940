"""Operators of DeepSeek-V4 and V4.1 on the simulated device, token by token. Each case is a process.

Caches lie as vllm-ascend's model runner lays them: in pages that are larger than they are, in any order.
"""

import pytest

from tests.support.ascend.device_process import on_device
from tests.support.ascend.paths import ascend_release

pytestmark = pytest.mark.skipif(ascend_release() == "0.23", reason="vllm-ascend 0.23 calls other operators for it")

_PAGES = """
import torch_npu, vllm_ascend.vllm_ascend_C
own = torch.ops._C_ascend

def in_pages(contents):
    pages = torch.randn(contents.shape[0], 3 * contents[0].numel()).to(contents.dtype).to(device)
    cache = pages.as_strided(contents.shape, (pages.stride(0), *contents[0].stride()))
    cache.copy_(contents)
    return pages, cache

def whole(numbers):
    return torch.tensor(numbers, dtype=torch.int32).to(device)

def on(*tensors):
    return [tensor.to(device) for tensor in tensors]

def turned(x, cos, sin):
    out = x.clone()
    for i in range(0, x.shape[-1], 2):
        a, b = x[..., i], x[..., i + 1]
        out[..., i] = a * cos[..., i] - b * sin[..., i]
        out[..., i + 1] = b * cos[..., i + 1] + a * sin[..., i + 1]
    return out
"""


@pytest.mark.parametrize(("ratio", "block"), [(4, 8), (128, 32)])
def test_compressors_join_what_was_kept_with_new_tokens(ratio: int, block: int) -> None:
    """Of a request that goes on in the middle of a row, and of a new one; then the positions and slots of their rows.

    Blocks that a window has passed are holes. Nothing but the new tokens' states changes.
    """
    on_device(
        _PAGES
        + f"ratio, rows_of_block = {ratio}, {block}"
        + """
halves, size, hidden, rotary = (2 if ratio == 4 else 1), 16, 24, 6
width = halves * size
starts, new = (2 * ratio + 3, 0), (2 * ratio + 1, ratio - 1)
x = [torch.randn(start + count, hidden) for start, count in zip(starts, new)]
wkv, wgate, ape = torch.randn(width, hidden), torch.randn(width, hidden), torch.randn(ratio, width)
norm, table_cos, table_sin = torch.randn(size), torch.randn(8 * ratio, rotary), torch.randn(8 * ratio, rotary)

def state(request, token):
    return torch.cat((wkv @ x[request][token], wgate @ x[request][token] + ape[token % ratio]))

held = [range((start // ratio + 1 - halves) * ratio if start else 0, len(x[i])) for i, start in enumerate(starts)]
free, tables = iter(torch.randperm(60).add(1).tolist()), []
for tokens in held:
    entries = range(-(-tokens.stop // rows_of_block))
    tables.append([next(free) if entry >= tokens.start // rows_of_block else 0 for entry in entries])
tables[1] += [0] * (len(tables[0]) - len(tables[1]))
contents = torch.randn(61, rows_of_block, 2 * width)
for token in range(held[0].start, starts[0]):
    contents[tables[0][token // rows_of_block], token % rows_of_block] = state(0, token)
pages, cache = in_pages(contents)
before = pages.cpu()

tokens = torch.cat([each[start:] for each, start in zip(x, starts)])
where = (whole([0, new[0], sum(new)]), whole(starts))
main_table = whole([[5, 3], [7, 2]])
most = min(len(tokens), len(tokens) // ratio + 2)
cos, sin, slots = own.compressor_metadata(*on(table_cos, table_sin), *where, main_table, 3, 2, ratio, most, 2)
outs = [torch.full_like(each, 7) for each in (cos, sin, slots)]
own.compressor_metadata_out(*on(table_cos, table_sin), *where, main_table, 3, 2, ratio, 2, *outs)
assert all(torch.equal(a.cpu(), b.cpu()) for a, b in zip(outs, (cos, sin, slots)))
out = own.compressor(
    *on(tokens, wkv, wgate), cache, *on(ape, norm), sin.view(-1, rotary), cos.view(-1, rotary), whole(tables),
    where[0], None, where[1], rotary, ratio, halves, 1e-6, 2, 1).cpu()
assert out.shape == (most, size) and cos.shape == sin.shape == (most, 1, 1, rotary) and slots.shape == (most, 2)

row = 0
for request, start in enumerate(starts):
    for number in range(start // ratio, len(x[request]) // ratio):
        parts = [(half, number - halves + 1 + half) for half in range(halves)]
        states = torch.stack(
            [state(request, group * ratio + i).view(2, halves, size)[:, half]
             for half, group in parts if group >= 0 for i in range(ratio)]).double()
        joined = (states[:, 0] * states[:, 1].softmax(0)).sum(0)
        joined = (joined / (joined.square().mean() + 1e-6).sqrt() * norm.double()).float()
        angles = [table[number * ratio] for table in (table_cos, table_sin)]
        expected = torch.cat((joined[:-rotary], turned(joined[-rotary:], *angles)))
        torch.testing.assert_close(out[row], expected, rtol=1e-4, atol=1e-4)
        assert torch.equal(cos[row, 0, 0].cpu(), angles[0]) and torch.equal(sin[row, 0, 0].cpu(), angles[1])
        assert slots[row].tolist() == [[[5, 3], [7, 2]][request][number // 3], number % 3]
        row += 1
assert 2 <= row < most
assert (slots[row:].cpu() == torch.tensor([-1, 2])).all() and (cos[row:] == 1).all() and (sin[row:] == 0).all()

kept = before.clone()
for request, tokens in enumerate(held):
    for token in range(starts[request], tokens.stop):
        page, at = tables[request][token // rows_of_block], token % rows_of_block * 2 * width
        if page:
            kept[page, at : at + 2 * width] = cache[page, token % rows_of_block].cpu()
            torch.testing.assert_close(kept[page, at : at + 2 * width], state(request, token), rtol=1e-4, atol=1e-4)
assert torch.equal(pages.cpu(), kept)
"""
    )


@pytest.mark.ascend_short
def test_queries_attend_to_a_window_and_to_the_rows_that_are_selected_or_to_all() -> None:
    """Of two requests in pages that are no neighbours; a row is seen from its last token on."""
    on_device(
        _PAGES
        + """
from torch.nn.functional import softplus
heads, size, index, window, count, block = 3, 32, 24, 20, 5, 8
lengths, new = (90, 11), (70, 11)
tables = dict(window=([0, 0, 0, 0, 0, 6, 1, 9, 0, 2, 7, 12], [3, 10] + [0] * 10), rows=([4, 0, 2], [5, 0, 0]))
scale, tokens, starts = 0.3, sum(new), (0, new[0], sum(new))
tables["window"][0][:5] = (11, 13, 14, 15, 8)
numbers = torch.randn(16, block, 1, size), torch.randn(6, block, 1, size)
(_, original), (_, compressed) = map(in_pages, numbers)
key = torch.randint(-127, 128, (6, block, 1, index), dtype=torch.int8)
key_scales = torch.rand(6, block, 1, 1).half() / 50
(_, keys), (_, scales) = in_pages(key), in_pages(key_scales)
query = torch.randn(tokens, heads, size)
index_query = torch.randint(-127, 128, (tokens, 2, index), dtype=torch.int8)
query_scales, weights = torch.rand(tokens, 2).half() / 50, torch.randn(tokens, 2).half()
sinks = torch.randn(heads)
where = dict(cu_seqlens_q=whole(starts), layout_q="TND")

plan = own.npu_quant_lightning_indexer_v2_metadata(
    2, 1, index, count, 2, seqused_k=whole([each // 4 for each in lengths]), device="npu:0", **where)
assert plan.shape == (1024,) and plan.dtype == torch.int32
selected, _ = own.npu_quant_lightning_indexer_v2(
    *on(index_query), keys, *on(weights, query_scales), scales.squeeze(-2), count, 2,
    seqused_k=whole([each // 4 for each in lengths]), cmp_residual_k=whole([each % 4 for each in lengths]),
    block_table=whole(tables["rows"]), metadata=plan, layout_k="PA_BBND", mask_mode=3, cmp_ratio=4, **where)
assert selected.shape == (tokens, 1, count) and selected.dtype == torch.int32
common = dict(
    ori_kv=original, ori_block_table=whole(tables["window"]), seqused_kv=whole(lengths), sinks=sinks.to(device),
    softmax_scale=scale, ori_mask_mode=4, ori_win_left=window - 1, ori_win_right=0, layout_kv="PA_ND", **where)
rows = dict(cmp_kv=compressed, cmp_block_table=whole(tables["rows"]), cmp_mask_mode=3)
outs = [
    own.npu_sparse_attn_sharedkv(query.to(device), **common, **more)[0].cpu()
    for more in (dict(cmp_ratio=1), rows | dict(cmp_ratio=10), rows | dict(cmp_ratio=4, cmp_sparse_indices=selected))
]
selected = selected.cpu()

row = 0
for request, (length, count_of_new) in enumerate(zip(lengths, new)):
    at = lambda cache, name, place: cache[tables[name][request][place // block], place % block].flatten()
    for position in range(length - count_of_new, length):
        true_keys = [
            at(key, "rows", i).double() * at(key_scales, "rows", i).double() for i in range((position + 1) // 4)]
        score = torch.tensor([
            sum(w * s * max(float(q.double() @ k), 0) for q, s, w in
                zip(index_query[row], query_scales[row].double(), weights[row].double()))
            for k in true_keys])
        chosen = [each for each in selected[row, 0].tolist() if each >= 0]
        assert len(set(chosen)) == len(chosen) == min(count, len(true_keys))
        assert set(selected[row, 0].tolist()) <= {-1, *range(len(true_keys))}
        torch.testing.assert_close(score[chosen], score.sort(descending=True).values[:count], rtol=1e-4, atol=1e-4)
        near = [at(numbers[0], "window", i) for i in range(max(position + 1 - window, 0), position + 1)]
        far = [[], range((position + 1) // 10), chosen]
        for out, places in zip(outs, far):
            held = torch.stack(near + [at(numbers[1], "rows", i) for i in places]).double()
            for head in range(heads):
                logits = torch.cat((scale * held @ query[row, head].double(), sinks[head, None].double()))
                expected = (logits.softmax(0)[:-1] @ held).float()
                torch.testing.assert_close(out[row, head], expected, rtol=1e-4, atol=1e-4)
        row += 1
assert row == tokens
"""
    )


@pytest.mark.parametrize("ratio", [1, 2])
def test_an_indexer_finds_blocks_of_rows_in_which_others_select(ratio: int) -> None:
    """Those with the best rows, and that of the newest row. Rows of no such block fill up what is selected."""
    on_device(
        _PAGES
        + f"ratio = {ratio}"
        + """
heads, size, index, window, count, block, group, kept = 3, 32, 24, 20, 11, 8, 4, 3
lengths, new = (46, 5), (31, 5)
tables = dict(window=([0, 6, 1, 9, 2, 7], [3, 10, 0, 0, 0, 0]), rows=([4, 0, 2, 7, 1, 3], [5, 0, 0, 0, 0, 0]))
tokens, starts, scale = sum(new), (0, new[0], sum(new)), 0.3
numbers = torch.randn(12, block, 1, size), torch.randn(8, block, 1, size)
(_, original), (_, compressed) = map(in_pages, numbers)
key = torch.randint(-127, 128, (8, block, 1, index), dtype=torch.int8)
key_scales = torch.rand(8, block, 1, 1).half() / 50
(_, keys), (_, scales) = in_pages(key), in_pages(key_scales)
query_scales, weights = torch.rand(tokens, 2).half() / 50, torch.randn(tokens, 2).half()
where = dict(cu_seqlens_q=whole(starts), layout_q="TND", max_seqlen_q=31)
rows, residual = (whole([each(length, ratio) for length in lengths]) for each in (int.__floordiv__, int.__mod__))
residual = residual if ratio == 2 else None
plan = own.npu_quant_lightning_indexer_v2_metadata(
    2, 1, index, count, 2, seqused_k=rows, cmp_residual_k=residual, cmp_ratio=ratio, **where)

def select(query, mode, found=None):
    outs = own.npu_quant_lightning_indexer_v3(
        query.to(device), keys, *on(weights, query_scales), scales.squeeze(-1), count, 2, seqused_k=rows,
        block_table=whole(tables["rows"]), cmp_residual_k=residual, metadata=plan, candidate_topk_index=found,
        candidate_mode=mode, candidate_topk_blocks=kept, candidate_block_size=group, layout_k="PA_BBND", mask_mode=3,
        cmp_ratio=ratio, **where)
    assert outs[0].shape == (tokens, 1, count) and outs[0].dtype == outs[2].dtype == torch.int32
    return outs[0], outs[2]

def at(cache, name, request, place):
    return cache[tables[name][request][place // block], place % block].flatten()

def scores_of(query, row, request, seen):
    return [
        sum(w * s * max(float(q.double() @ at(key, "rows", request, i).double()), 0)
            * float(at(key_scales, "rows", request, i))
            for q, s, w in zip(query[row], query_scales[row].double(), weights[row].double()))
        for i in range(seen)]

def best(numbers, limit):
    return set(sorted(range(len(numbers)), key=lambda i: -numbers[i])[:limit])

queries = [torch.randint(-127, 128, (tokens, 2, index), dtype=torch.int8) for _ in range(2)]
(selected, found), (alone, nothing) = select(queries[0], 1), select(queries[0], 3)
preferred, none = select(queries[1], 2, found)
assert found.shape == (tokens, 1, kept) and nothing.numel() == none.numel() == 0
assert torch.equal(selected.cpu(), alone.cpu())
out, _ = own.npu_sparse_flash_mla(
    (query := torch.randn(tokens, heads, size)).to(device), ori_kv=original, cmp_kv=compressed,
    cmp_sparse_indices=preferred, ori_block_table=whole(tables["window"]), cmp_block_table=whole(tables["rows"]),
    cu_seqlens_q=where["cu_seqlens_q"], seqused_ori_kv=whole(lengths), seqused_cmp_kv=rows, cmp_residual_kv=residual,
    sinks=(sinks := torch.randn(heads)).to(device),
    metadata=own.npu_sparse_flash_mla_metadata(heads, 1, size, cu_seqlens_q=where["cu_seqlens_q"]),
    softmax_scale=scale, cmp_ratio=ratio, ori_mask_mode=4, cmp_mask_mode=3, ori_win_left=window - 1, ori_win_right=0,
    layout_q="TND", layout_kv="PA_BBND")
selected, found, preferred, out = (each.cpu() for each in (selected, found, preferred, out))

row, fillers = 0, 0
for request, (length, count_of_new) in enumerate(zip(lengths, new)):
    for position in range(length - count_of_new, length):
        seen = (position + 1) // ratio
        score = scores_of(queries[0], row, request, seen)
        chosen = [each for each in selected[row, 0].tolist() if each >= 0]
        assert set(chosen) == best(score, count) and len(chosen) == min(count, seen)
        blocks = [max(score[start : start + group]) for start in range(0, seen, group)]
        if seen:
            blocks[-1] = float("inf")
        given = [each for each in found[row, 0].tolist() if each >= 0]
        assert set(given) == best(blocks, kept) and len(given) == min(kept, len(blocks))
        score = scores_of(queries[1], row, request, seen)
        score = [each if i // group in given else -1e9 for i, each in enumerate(score)]
        chosen = [each for each in preferred[row, 0].tolist() if each >= 0]
        inside = [each for each in chosen if each // group in given]
        assert set(inside) == best(score, min(count, sum(each > -1e9 for each in score)))
        assert len(chosen) == min(count, seen)
        assert chosen[: len(inside)] == inside and set(chosen) <= set(range(seen))
        fillers += len(chosen) - len(inside)
        near = [at(numbers[0], "window", request, i) for i in range(max(position + 1 - window, 0), position + 1)]
        held = torch.stack(near + [at(numbers[1], "rows", request, i) for i in chosen]).double()
        for head in range(heads):
            logits = torch.cat((scale * held @ query[row, head].double(), sinks[head, None].double()))
            torch.testing.assert_close(out[row, head], (logits.softmax(0)[:-1] @ held).float(), rtol=1e-4, atol=1e-4)
        row += 1
assert row == tokens and fillers
"""
    )


def test_streams_are_mixed_by_matrices_whose_rows_and_columns_sum_up_to_one() -> None:
    on_device(
        _PAGES
        + """
tokens, streams, hidden = 5, 4, 24
x, fn, factors = torch.randn(tokens, streams, hidden), torch.randn(24, streams * hidden) / 10, torch.rand(3)
base = torch.randn(24)
y, post, among = (each.cpu() for each in own.npu_hc_pre_v2(*on(x, fn, factors, base), streams, 20, 1e-6, 1e-6))
given = torch.rand(tokens, streams)
sums, *others, weights = (each.cpu() for each in own.npu_hc_pre_v3(*on(x, fn, factors, base, given)))
torch.testing.assert_close(sums, (given.unsqueeze(-1) * x).sum(1))
assert torch.equal(others[0], post) and torch.equal(others[1], among)
assert y.shape == (tokens, hidden) and post.shape == (tokens, streams)
torch.testing.assert_close(among.sum(-1), torch.ones(tokens, streams), rtol=1e-3, atol=1e-3)
torch.testing.assert_close(among.sum(-2), torch.ones(tokens, streams), rtol=1e-3, atol=1e-3)
output = torch.randn(1, tokens, hidden)
mixed = own.npu_hc_post(*on(output, x[None], post[None], among[None])).cpu()[0]
for token in range(tokens):
    flat = x[token].flatten().double()
    mix = (fn.double() @ flat) / (flat.square().mean() + 1e-6).sqrt()
    reads = 1 / (1 + (-(mix[:4] * factors[0] + base[:4])).exp()) + 1e-6
    torch.testing.assert_close(y[token], (reads[:, None] * x[token]).sum(0).float(), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(weights[token], reads.float(), rtol=1e-4, atol=1e-4)
    writes = 2 / (1 + (-(mix[4:8] * factors[1] + base[4:8])).exp())
    torch.testing.assert_close(post[token], writes.float(), rtol=1e-4, atol=1e-4)
    # What Sinkhorn's iteration has made of a matrix has its cross ratios.
    logits = (mix[8:] * factors[2] + base[8:]).view(4, 4)
    cross = lambda m: m[1:, 1:] + m[:1, :1] - m[1:, :1] - m[:1, 1:]
    torch.testing.assert_close(cross(among[token].double().log()), cross(logits), rtol=1e-2, atol=1e-2)
    for stream in range(streams):
        expected = post[token, stream] * output[0, token]
        expected = expected + sum(among[token, other, stream] * x[token, other] for other in range(streams))
        torch.testing.assert_close(mixed[token, stream], expected, rtol=1e-4, atol=1e-4)

heads = torch.randn(tokens, 1, 3, 20)
cos, sin = torch.randn(tokens, 1, 1, 6), torch.randn(tokens, 1, 1, 6)
for negated in (False, True):
    device_heads = heads.to(device)
    own.inplace_partial_rotary_mul(device_heads, *on(cos, sin), "interleave", [14, 20], negated)
    expected = torch.cat((heads[..., :14], turned(heads[..., 14:], cos, -sin if negated else sin)), -1)
    torch.testing.assert_close(device_heads.cpu(), expected)

pages, cache = in_pages(torch.zeros(3, 4, 1, 8))
before, updates = pages.cpu(), torch.randn(3, 8)
own.npu_scatter_nd_update_sk(cache, whole([[2, 1], [-1, 3], [0, 3]]), updates.to(device))
before[2, 8:16], before[0, 24:32] = updates[0], updates[2]
assert torch.equal(pages.cpu(), before)
"""
    )


def test_tokens_go_to_the_experts_of_their_id_or_to_the_best() -> None:
    on_device(
        _PAGES
        + """
experts, k, tokens, hidden, inner = 6, 2, 9, 12, 10
logits, bias, x = torch.randn(tokens, experts), 3 * torch.randn(experts), torch.randn(tokens, hidden)
ids, by_id = torch.randint(0, 7, (tokens,)), torch.stack([torch.randperm(experts)[:k] for _ in range(7)]).int()
weight = torch.randn(experts, hidden, inner)
score = (1 + logits.exp()).log().sqrt()
gate = lambda **more: own.moe_gating_top_k_hash(
    logits.to(device), k, k_group=1, group_count=1, routed_scaling_factor=1.5, eps=1e-20, group_select_mode=1, renorm=0,
    norm_type=2, out_flag=False, **more)[:2]
for more, expected in (
    (dict(input_ids=ids.to(device), tid2eid=by_id.to(device)), by_id[ids]),
    (dict(bias=bias.to(device)), (score + bias).topk(k).indices),
):
    weights, chosen = gate(**more)
    assert chosen.cpu().sort(1).values.tolist() == expected.sort(1).values.tolist()
    of = score.gather(1, chosen.cpu().long())
    torch.testing.assert_close(weights.cpu(), 1.5 * of / of.sum(1, keepdim=True))
    rows, place, counts, _ = torch_npu.npu_moe_init_routing_v2(
        x.to(device), chosen, active_num=tokens * k, expert_num=experts, expert_tokens_num_type=1,
        expert_tokens_num_flag=True, active_expert_range=[0, experts], quant_mode=-1)
    made, = torch_npu.npu_grouped_matmul(
        x=[rows], weight=[weight.to(device)], split_item=2, group_list_type=1, group_type=0, group_list=counts)
    out = torch_npu.npu_moe_token_unpermute(permuted_tokens=made, sorted_indices=place, probs=weights)
    for token in range(tokens):
        sums = sum(weights[token, i].cpu() * (x[token] @ weight[int(chosen[token, i])]) for i in range(k))
        torch.testing.assert_close(out[token].cpu(), sums, rtol=1e-4, atol=1e-4)
weights, chosen, _ = own.moe_gating_top_k(
    logits.to(device), k=k, k_group=1, group_count=1, group_select_mode=1, renorm=0, norm_type=1, out_flag=False,
    routed_scaling_factor=1.5, eps=1e-20, bias_opt=bias.to(device))
score = 1 / (1 + (-logits).exp())
assert chosen.cpu().sort(1).values.tolist() == (score + bias).topk(k).indices.sort(1).values.tolist()
of = score.gather(1, chosen.cpu().long())
torch.testing.assert_close(weights.cpu(), 1.5 * of / of.sum(1, keepdim=True))
"""
    )
