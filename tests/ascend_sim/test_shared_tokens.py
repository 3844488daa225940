"""Attention of ranks that share a request's tokens, and what joins it, each in a process of its own."""

import pytest

from tests.support.ascend.device_process import on_device
from tests.support.ascend.paths import ascend_release

pytestmark = [
    pytest.mark.ascend_short,
    pytest.mark.skipif(ascend_release() == "0.23", reason="vllm-ascend 0.23 calls other operators for it"),
]


def test_what_ranks_have_seen_is_joined_to_attention_over_all() -> None:
    """Heads or tokens are shared out among three ranks, of which one holds no token that the first query sees.

    What all ranks have, the last 30 tokens here, counts once.
    """
    on_device(
        """
import vllm_ascend.ops
from vllm_ascend.ops.triton.dcp.dcp_a2a import fused_dcp_lse_combine, pack_dcp_output_lse
ranks, tokens, heads, size = 3, 6, 3, 16
logits, values = torch.randn(tokens, heads, 120) * 3, torch.randn(heads, 120, size)
logits[0, :, 30:60] = -torch.inf

def attend(seen):
    sums = logits[..., seen].logsumexp(-1, keepdim=True)
    return torch.einsum("ths,hsd->thd", (logits[..., seen] - sums).exp(), values[:, seen]), sums

parts = [attend(slice(30 * number, 30 * number + 30)) for number in range(4)]
assert parts[1][0][0].isnan().all() and not parts[0][0].isnan().any()
for dtype, tolerance in ((torch.float32, 1e-5), (torch.bfloat16, 0.03)):
    for shared in (0, 1):
        sent = [pack_dcp_output_lse(part.to(device, dtype), sums.to(device), ranks, shared).cpu()
                for part, sums in parts[:ranks]]
        for rank in range(ranks):
            received = torch.stack([each[rank] for each in sent]).to(device)
            own, own_sums = (each.chunk(ranks, shared)[rank].to(device) for each in parts[3])
            for more, seen in (((), 90), ((own, own_sums), 120)):
                expected = torch.einsum("ths,hsd->thd", logits[..., :seen].softmax(-1), values[:, :seen])
                joined = fused_dcp_lse_combine(received, size, shared, False, *more).cpu()
                of_rank = expected.chunk(ranks, shared)[rank]
                assert joined.dtype == dtype and joined.shape == of_rank.shape
                torch.testing.assert_close(joined.float(), of_rank, rtol=tolerance, atol=tolerance)
"""
    )


@pytest.mark.parametrize("packed", [False, True], ids=["numbers", "packed"])
def test_sparse_attention_over_a_part_tells_the_sums_by_which_it_is_joined(packed: bool) -> None:
    """Of two requests, whose indices are those of a rank's own tokens, in any order. The second has none here.

    Nothing is hidden that comes behind a query's place. Packed rows are written byte by byte.
    """
    on_device(
        f"""
packed = {packed}
import torch_npu, vllm_ascend.vllm_ascend_C
heads, latent, rotary, held = 4, 512, 64, 200
table, lengths = [[2, 0], [1, 3]], [held, 0]
latents, turned = torch.randn(4, 128, latent) * 0.3, torch.randn(4, 128, rotary).bfloat16()
whole, scales = torch.randint(-127, 128, (4, 128, latent), dtype=torch.int8), torch.rand(4, 128, 4) * 0.005
if packed:
    latents = (whole.float() * scales.repeat_interleave(128, -1)).bfloat16()
    rows = torch.cat((whole.view(torch.uint8), turned.view(torch.uint8), scales.view(torch.uint8)), -1)
query = (torch.randn(2, heads, latent + rotary) * 0.3).to(latents.dtype)
chosen = torch.full((2, 1, 64), -1, dtype=torch.int32)
chosen[0, 0, :50] = torch.randperm(held)[:50]
on = lambda tensor: tensor.to(device)
ints = lambda numbers: on(torch.tensor(numbers, dtype=torch.int32))
where = dict(
    sparse_indices=on(chosen), scale_value=0.2, sparse_block_size=1, block_table=ints(table), layout_query="TND",
    actual_seq_lengths_query=ints([1, 2]), actual_seq_lengths_kv=ints(lengths), layout_kv="PA_BSND", sparse_mode=0,
    attention_mode=2, return_softmax_lse=True)
if packed:
    cache = on(rows.view(torch.int8).unsqueeze(2))
    out, largest, sums = torch.ops._C_ascend.npu_kv_quant_sparse_flash_attention_vllm(
        query=on(query), key=cache, value=cache, quant_scale_repo_mode=1, tile_size=128, key_quant_mode=2,
        value_quant_mode=2, rope_head_dim=rotary, **where)
else:
    key, key_rope = on(latents.unsqueeze(2)), on(turned.float().unsqueeze(2))
    out, largest, sums = torch.ops._C_ascend.npu_sparse_flash_attention(
        query=on(query[..., :latent]), key=key, value=key, query_rope=on(query[..., latent:]), key_rope=key_rope,
        **where)
assert largest.shape == sums.shape == (1, 2, heads) and largest.dtype == sums.dtype == torch.float32
out, lse = out.cpu().double(), (largest + sums.log()).cpu().double()[0]
place = [(table[0][t // 128], t % 128) for t in chosen[0, 0, :50].tolist()]
values = torch.stack([latents[at] for at in place]).double()
keys = torch.cat((values, torch.stack([turned[at] for at in place]).double()), -1)
logits = 0.2 * query[0].double() @ keys.T
assert out.dtype == torch.float64 and out.shape == (2, heads, latent)
torch.testing.assert_close(lse[0], logits.exp().sum(-1).log(), rtol=1e-4, atol=1e-4)
tolerance = 0.01 if packed else 1e-4
torch.testing.assert_close(out[0], logits.softmax(-1) @ values, rtol=tolerance, atol=tolerance / 5)
assert (lse[1] == -torch.inf).all() and (out[1] == 0).all()
"""
    )
