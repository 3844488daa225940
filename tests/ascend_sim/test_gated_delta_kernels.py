"""Operators of gated delta net on the simulated device, against other forms of the same. Each case is a process.

States lie as vllm-ascend's model runner lays them: in pages that are larger than they are, in any order.
"""

import pytest

from tests.support.ascend.device_process import IN_PAGES, ONE_BY_ONE, on_device
from tests.support.ascend.paths import ascend_release

pytestmark = [
    pytest.mark.ascend_short,
    pytest.mark.skipif(ascend_release() == "0.23", reason="hybrids are refused on vLLM 0.23"),
]


def test_a_prompts_states_and_those_of_its_tokens_are_what_the_closed_form_gives() -> None:
    """Two prompts at once; and the same tokens one by one, of both requests in each step, into their rows."""
    on_device(
        IN_PAGES
        + """
from fla_npu.ops.ascendc import chunk_gated_delta_rule_fwd, recurrent_gated_delta_rule
heads, groups, key_size, value_size, scale, lengths = 4, 2, 24, 16, 0.3, (70, 70)
tokens, starts = sum(lengths), (0, 70, 140)
q, k = (functional.normalize(torch.randn(tokens, groups, key_size), dim=-1) for _ in range(2))
v, g, beta = torch.randn(tokens, heads, value_size), -torch.rand(tokens, heads), torch.rand(tokens, heads)
first = torch.randn(2, heads, value_size, key_size)

def closed_form(request, head):
    rows = slice(starts[request], starts[request + 1])
    Q, K = (x[rows, head // (heads // groups)].double() for x in (q, k))
    V, B, G = v[rows, head].double(), beta[rows, head].double(), g[rows, head].double().cumsum(0)
    S, decay = first[request, head].double(), (G[:, None] - G[None]).exp()
    written = torch.linalg.solve_triangular(
        (B[:, None] * (K @ K.T) * decay).tril(-1), B[:, None] * (V - G.exp()[:, None] * (K @ S.T)),
        upper=False, unitriangular=True)
    read = scale * (G.exp()[:, None] * (Q @ S.T) + (Q @ K.T * decay).tril() @ written)
    return read, G[-1].exp() * S + written.T @ ((G[-1] - G).exp()[:, None] * K)

forms = [[closed_form(request, head) for head in range(heads)] for request in range(2)]
read = torch.cat([torch.stack([read for read, _ in form], 1) for form in forms]).float()
last = torch.stack([torch.stack([state for _, state in form]) for form in forms]).float()

out, final = chunk_gated_delta_rule_fwd(
    *(x.transpose(0, 1).contiguous()[None].to(device) for x in (q, k, v)), *on(g[None], beta[None]),
    initial_state=first.transpose(-1, -2).contiguous().to(device), output_final_state=True, chunk_size=64,
    cu_seqlens=starts, chunk_indices=(0, 0, 0, 1, 1, 0, 1, 1), scale=scale, layout="BNSD", use_exp2=False,
    use_qk_l2norm_in_kernel=False, allow_neg_eigval=False, disable_recompute=True, state_v_first=False)
torch.testing.assert_close(out[0].cpu(), read, rtol=1e-4, atol=1e-5)
torch.testing.assert_close(final.transpose(-1, -2).cpu(), last, rtol=1e-4, atol=1e-5)

pages, states = in_pages(6, heads, value_size, key_size)
for row, state in zip((4, 1), first):
    states[row] = state.to(device)
before = pages.cpu()
for token in range(70):
    at = [token, 70 + token]
    out = recurrent_gated_delta_rule(
        *on(q[at], k[at], v[at]), states, **dict(zip(("g", "beta"), on(g[at], beta[at]))), scale=scale,
        actual_seq_lengths=whole([0, 1, 1]), ssm_state_indices=whole([4, 1]))
    torch.testing.assert_close(out.cpu(), read[at], rtol=1e-4, atol=1e-5)
assert_rows(pages, states, {4: last[0], 1: last[1]}, before)
"""
    )


def test_convolutions_go_on_from_the_last_inputs() -> None:
    """Of a new prompt, of one that goes on, and of padding; then of one token of each."""
    on_device(
        IN_PAGES
        + """
from fla_npu.ops.ascendc import causal_conv1d_fn, causal_conv1d_update
kernel, channels, lengths = 4, 12, (2, 9, 3, 1)
weight, x = torch.randn(kernel, channels), torch.randn(sum(lengths), channels)
pages, states = in_pages(7, kernel - 1, channels)
old = states[5].cpu()
inputs = [torch.cat((before, part)) for before, part in zip((torch.zeros_like(old), old), x.split(lengths))]

def convolved(inputs, new):
    whole = functional.conv1d(inputs.T[None].double(), weight.T[:, None].double(), groups=channels)
    return functional.silu(whole)[0].T[-new:].float()

before = pages.cpu()
out = causal_conv1d_fn(
    *on(x, weight), None, conv_states=states, query_start_loc=whole([0, 2, 11, 14, 15]),
    cache_indices=whole([3, 5, 0, -1]), has_initial_state=torch.tensor([False, True, True, True]).to(device),
    activation="silu", pad_slot_id=-1, null_block_id=0).cpu()
torch.testing.assert_close(out[:2], convolved(inputs[0], 2))
torch.testing.assert_close(out[2:11], convolved(inputs[1], 9))
assert_rows(pages, states, {3: inputs[0][-3:], 5: inputs[1][-3:]}, before)

new, before, place = torch.randn(3, channels), pages.cpu(), torch.zeros(3, channels, device=device)
out = causal_conv1d_update(
    new.to(device), states, weight.to(device), bias=None, activation="silu", conv_state_indices=whole([5, 0, 3]),
    query_start_loc=whole([0, 1, 2, 3]), max_query_len=1, null_block_id=0, out=place)
inputs = [torch.cat((inputs[1], new[:1])), torch.cat((inputs[0], new[2:]))]
torch.testing.assert_close(place.cpu()[[0, 2]], torch.cat([convolved(each, 1) for each in inputs]))
assert torch.equal(out.cpu(), place.cpu())
assert_rows(pages, states, {5: inputs[0][-3:], 3: inputs[1][-3:]}, before)
"""
    )


def test_drafts_that_are_not_accepted_leave_no_trace() -> None:
    on_device(
        IN_PAGES
        + """
from fla_npu.ops.ascendc import causal_conv1d_update, recurrent_gated_delta_rule
kernel, channels, heads, size = 4, 12, 2, 8
weight, x = torch.randn(kernel, channels), torch.randn(27, channels)
q, k, v = (functional.normalize(torch.randn(27, heads, size), dim=-1) for _ in range(3))
g, beta = -torch.rand(27, heads), torch.rand(27, heads)
_, inputs = in_pages(7, kernel - 1 + 2, channels)
_, states = in_pages(12, heads, size, size)

def go_on(tokens, accepted, row, places):
    lengths, chosen, told = [len(each) for each in tokens], torch.cat(tokens), {}
    if accepted is not None:
        told = {"num_accepted_tokens": whole(accepted)}
    out = torch.zeros(len(chosen), channels, device=device)
    causal_conv1d_update(
        *on(x[chosen]), inputs, *on(weight), bias=None, activation="silu", conv_state_indices=whole(row),
        query_start_loc=whole([sum(lengths[:end]) for end in range(len(lengths) + 1)]), max_query_len=3,
        null_block_id=0, out=out, **told)
    read = recurrent_gated_delta_rule(
        *on(q[chosen], k[chosen], v[chosen]), states, **dict(zip(("g", "beta"), on(g[chosen], beta[chosen]))),
        scale=1.0, actual_seq_lengths=whole([0, *lengths]), ssm_state_indices=whole(sum(places, [])), **told)
    return torch.cat((out.cpu(), read.flatten(1).cpu()), 1).split(lengths)
"""
        + ONE_BY_ONE
    )


def test_what_vllm_ascend_launches_around_them() -> None:
    on_device(
        IN_PAGES
        + """
from vllm.third_party.flash_linear_attention.ops.l2norm import l2norm_fwd
from vllm_ascend.ops.triton.batch_memcpy import batch_memcpy_kernel
from vllm_ascend.ops.triton.fused_gdn_gating import fused_gdn_gating_patch
from vllm_ascend.ops.triton.layernorm_gated import layer_norm_fwd_npu
from vllm_ascend.ops.triton.mamba.state_index import gather_ssm_states, scatter_ssm_states_
x, z, weight = torch.randn(150, 16), torch.randn(150, 16), torch.randn(16)
torch.testing.assert_close(l2norm_fwd(x.to(device)).cpu(), functional.normalize(x, dim=-1))
out, _, reciprocal = layer_norm_fwd_npu(*on(x, weight), None, 1e-6, z=z.to(device), is_rms_norm=True)
torch.testing.assert_close(out.cpu(), functional.rms_norm(x, (16,), weight, 1e-6) * z * z.sigmoid())
torch.testing.assert_close(reciprocal.cpu(), 1 / (x.square().mean(-1) + 1e-6).sqrt())

a_log, a, b, bias = torch.randn(16), 30 * torch.randn(150, 16), torch.randn(150, 16), torch.randn(16)
g, beta = fused_gdn_gating_patch(*on(a_log, a, b, bias))
torch.testing.assert_close(g[0].cpu(), (-a_log.exp() * torch.logaddexp(a + bias, torch.zeros(()))).float())
torch.testing.assert_close(beta[0].cpu(), 1 / (1 + (-b).exp()))

pages, states = in_pages(6, 2, 3, 5)
before = pages.cpu()
read = gather_ssm_states(states, whole([4, 2, 1]), torch.tensor([True, False, True]).to(device))
assert torch.equal(read.cpu(), torch.stack((states[4].cpu(), torch.zeros(2, 3, 5), states[1].cpu())))
new = torch.randn(2, 2, 3, 5)
scatter_ssm_states_(states, whole([5, 0]), new.to(device))
assert_rows(pages, states, {5: new[0], 0: new[1]}, before)

before, at = pages.cpu(), [states[row].data_ptr() for row in (5, 1)]
runs = torch.tensor([at[:1], at[1:], [12]]).to(device)
batch_memcpy_kernel[(1,)](*runs, BLOCK_SIZE=8)
before[1, :3] = before[5, :3]
assert torch.equal(pages.cpu(), before)
"""
    )


def test_a_state_is_kept_where_accepted_drafts_pass_the_border_of_a_block() -> None:
    """Of three requests, the first into the block before, the second not at all, the third inside its block."""
    on_device(
        IN_PAGES
        + """
from vllm_ascend.ops.triton.mamba.postprocess import postprocess_mamba_fused_kernel
(rows, inputs), (pages, states) = in_pages(20, 5, 6), in_pages(20, 2, 3)
before, old = (rows.cpu(), pages.cpu()), (inputs.cpu(), states.cpu())
table, accepted, out = whole([[*range(start, start + 6)] for start in (1, 7, 13)]), whole([2, 2, 3]), whole([2, 2, 3])
scheduled, computed, drafted = whole([3, 3, 3]), whole([6, 4, 5]), whole([2, 2, 2])
addresses, strides = torch.tensor([[each.data_ptr(), 4 * each.stride(0)] for each in (inputs, states)]).to(device).T
postprocess_mamba_fused_kernel[3, 2, 1](
    accepted, whole([2, 1, 1]), scheduled, computed, drafted, torch.tensor([table.data_ptr()]).to(device), 6,
    addresses, strides, whole([4, 4]), whole([6, 6]), whole([5, 0]), whole([0, 0]), None, None, out, None, 3,
    block_size=4, COPY_BLOCK_SIZE=8, CONV_STATE_DIM_FIRST=False)
assert out.tolist() == [2, 2, 1]
last = {2: torch.cat((old[0][3, 1:], old[0][2, 4:])), 14: torch.cat((old[0][14, 2:], old[0][14, 3:]))}
assert_rows(rows, inputs, last, before[0])
assert_rows(pages, states, {2: old[1][4], 14: old[1][16]}, before[1])
"""
    )
