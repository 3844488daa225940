"""Kimi delta attention on the simulated device: vllm-ascend's own calls of operators, against other forms of the same.

States lie as vllm-ascend's model runner lays them: in pages that are larger than they are, in any order. Each case is a
process.
"""

import pytest

from tests.support.ascend.device_process import IN_PAGES, ONE_BY_ONE, on_device
from tests.support.ascend.paths import ascend_release

pytestmark = pytest.mark.skipif(ascend_release() == "0.23", reason="hybrids are refused on vLLM 0.23")


@pytest.mark.ascend_short
def test_a_prompts_states_and_those_of_its_tokens_are_what_the_closed_form_gives() -> None:
    """Two prompts at once, of which one goes on; and the same tokens one by one, of both in each step."""
    on_device(
        IN_PAGES
        + """
from types import SimpleNamespace
from vllm_ascend.models.glm5next.ops.kda import chunk_kda, recurrent_kda
heads, size, bound, starts = 2, 24, -5.0, (0, 70, 140)
tokens = starts[-1]
q, k, v, gate = (torch.randn(tokens, heads, size) for _ in range(4))
beta, a_log, bias = torch.randn(tokens, heads), 0.3 * torch.randn(heads), torch.randn(heads, size) - 3
first = torch.randn(2, heads, size, size)
first[1] = 0

def closed_form(request, head):
    rows = slice(starts[request], starts[request + 1])
    Q, K = (functional.normalize(x[rows, head].double(), dim=-1) for x in (q, k))
    V, B = v[rows, head].double(), beta[rows, head].double().sigmoid()
    G = (bound * (a_log[head].exp() * (gate[rows, head] + bias[head])).double().sigmoid()).cumsum(0)
    S, decay = first[request, head].double(), (G[:, None] - G[None]).clamp(max=0).exp()
    among = lambda left: torch.einsum("ic,jc,ijc->ij", left, K, decay)
    written = torch.linalg.solve_triangular(
        (B[:, None] * among(K)).tril(-1), B[:, None] * (V - (G.exp() * K) @ S.T), upper=False, unitriangular=True)
    read = size**-0.5 * ((G.exp() * Q) @ S.T + among(Q).tril() @ written)
    return read, G[-1].exp() * S + written.T @ ((G[-1] - G).exp() * K)

forms = [[closed_form(request, head) for head in range(heads)] for request in range(2)]
read = torch.cat([torch.stack([read for read, _ in form], 1) for form in forms]).float()
last = torch.stack([torch.stack([state for _, state in form]) for form in forms]).float()

pages, states = in_pages(6, heads, size, size)
states[4] = first[0].to(device)
before, own = pages.cpu(), on(a_log.view(1, 1, heads, 1), bias.flatten())
metadata = SimpleNamespace(
    keep_meta=None, cu_seqlens_kern=None, cu_seqlens_host=starts, chunk_indices_chunk64_host=(0, 0, 0, 1, 1, 0, 1, 1))
out = chunk_kda(
    *(x[None] for x in on(q, k, v, gate, beta)), states, whole([4, 1]), torch.tensor([True, False]).to(device),
    metadata, *own, bound)
torch.testing.assert_close(out[0].cpu(), read, rtol=1e-4, atol=1e-5)
assert_rows(pages, states, {4: last[0], 1: last[1]}, before)

for row, state in zip((4, 1), first):
    states[row] = state.to(device)
before, place = pages.cpu(), torch.ones(1, 3, heads, size, device=device)
for token in range(70):
    at = [token, 70 + token]
    out = recurrent_kda(
        *(x[at][None] for x in on(q, k, v, gate, beta)), states, whole([0, 1, 2]), whole([4, 1, 0]), *own, bound,
        output_buffer=place if token % 2 else None)
    torch.testing.assert_close(out[0, :2].cpu(), read[at], rtol=1e-4, atol=1e-5)
assert out.data_ptr() == place.data_ptr() and not place[0, 2].any()
assert_rows(pages, states, {4: last[0], 1: last[1]}, before)
"""
    )


def test_convolutions_go_on_from_the_last_inputs() -> None:
    """Of a new prompt, of one that goes on, and of padding; then of one token of each."""
    on_device(
        IN_PAGES
        + """
from vllm_ascend.models.glm5next.ops.causal_conv1d import causal_conv1d
kernel, channels = 4, 12
weight, x = torch.randn(kernel, channels), torch.randn(14, channels)
pages, states = in_pages(7, kernel - 1, channels)
old, before = states[5].cpu(), pages.cpu()
inputs = [torch.cat((start, part)) for start, part in zip((torch.zeros_like(old), old), x.split((2, 9, 3)))]

def convolved(inputs, new):
    whole = functional.conv1d(inputs.T[None].double(), weight.T[:, None].double(), groups=channels)
    return functional.silu(whole)[0].T[-new:].float()

out = causal_conv1d(
    *on(x, weight), states, whole([0, 2, 11, 14]), whole([[3], [5], [-1]]), run_mode=0,
    initial_state_mode=torch.tensor([False, True, True]).to(device)).cpu()
torch.testing.assert_close(out[:11], torch.cat([convolved(inputs[0], 2), convolved(inputs[1], 9)]))
assert not out[11:].any()
assert_rows(pages, states, {3: inputs[0][-3:], 5: inputs[1][-3:]}, before)

new, before = torch.randn(2, channels), pages.cpu()
out = causal_conv1d(*on(new, weight), states, whole([0, 1, 2]), whole([5, 3]), run_mode=1).cpu()
inputs = [torch.cat((inputs[1], new[:1])), torch.cat((inputs[0], new[1:]))]
torch.testing.assert_close(out, torch.cat([convolved(each, 1) for each in inputs]))
assert_rows(pages, states, {5: inputs[0][-3:], 3: inputs[1][-3:]}, before)

from vllm_ascend.ops.triton.kda.kda import rms_norm_gated
x, gate, weight = torch.randn(1, 50, 2, 16), torch.randn(50, 2, 16), torch.randn(16)
out = rms_norm_gated(*on(x, gate, weight), None, "sigmoid", eps=1e-5)
torch.testing.assert_close(out.cpu(), functional.rms_norm(x, (16,), weight, 1e-5) * gate.sigmoid())

from vllm_ascend.ops.triton.linearnorm.fused_eh_norm import fused_eh_norm
positions, (x, before), weights = torch.tensor([5, 0, 1]), torch.randn(2, 3, 16), torch.randn(2, 16)
out = fused_eh_norm(*on(positions, x, before, *weights), 1e-5).cpu()
x[1] = 0
parts = [functional.rms_norm(each, (16,), own, 1e-5) for each, own in zip((x, before), weights)]
torch.testing.assert_close(out, torch.cat(parts, 1))
"""
    )


def test_drafts_that_are_not_accepted_leave_no_trace() -> None:
    on_device(
        IN_PAGES
        + """
from vllm_ascend.models.glm5next.ops.causal_conv1d import causal_conv1d
from vllm_ascend.models.glm5next.ops.kda import recurrent_kda
kernel, channels, heads, size = 4, 12, 2, 8
weight, x, beta = torch.randn(kernel, channels), torch.randn(27, channels), torch.randn(27, heads)
q, k, v, gate = (torch.randn(27, heads, size) for _ in range(4))
own = on(0.3 * torch.randn(1, 1, heads, 1), torch.randn(heads * size) - 3)
_, inputs = in_pages(7, kernel - 1 + 2, channels)
_, states = in_pages(12, heads, size, size)

def go_on(tokens, accepted, rows, places):
    lengths, chosen = [len(each) for each in tokens], torch.cat(tokens)
    starts = whole([sum(lengths[:end]) for end in range(len(lengths) + 1)])
    told = None if accepted is None else whole(accepted)
    out = causal_conv1d(
        *on(x[chosen], weight), inputs, starts, whole([[row] for row in rows]), run_mode=1, num_accepted_tokens=told)
    read = recurrent_kda(
        *(each[chosen][None].to(device) for each in (q, k, v, gate, beta)), states, starts, whole(places), *own, -5.0,
        told)
    return torch.cat((out.cpu(), read[0].flatten(1).cpu()), 1).split(lengths)
"""
        + ONE_BY_ONE
    )
