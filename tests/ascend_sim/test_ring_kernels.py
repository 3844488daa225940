"""Triton kernels that vllm-ascend launches for DeepSeek-V4.1, on the simulated device. Each case is a process.

Its own functions launch them.
"""

import pytest

from tests.support.ascend.device_process import IN_PAGES, on_device
from tests.support.ascend.paths import ascend_release

pytestmark = pytest.mark.skipif(ascend_release() == "0.23", reason="vllm-ascend 0.23 has no DeepSeek-V4.1")


def test_rings_join_what_was_kept_with_new_tokens() -> None:
    """Of requests that go on in a row and behind one, of one with more new tokens than a ring has rows; without one."""
    on_device(
        IN_PAGES
        + """
from vllm_ascend.ops.triton.compressor.compressor_triton import _cube_core_num, compressor_from_projected
width, rows = 8, 32
starts, new, rings = (33, 6, 30, 0), (4, 1, 35, 3), (5, 2, 7, 0)
states = [torch.randn(start + count, 2 * width) for start, count in zip(starts, new)]
pages = torch.randn(9, rows, 2 * width)
for start, own, ring in zip(starts, states, rings):
    for token in range(max(start - rows, 0), start):
        pages[ring, token % rows] = own[token]
expected = pages.clone()
firsts = [sum(new[:i]) for i in range(4)]
tokens = torch.cat([own[start:] for own, start in zip(states, starts)])
values, scores = tokens.chunk(2, -1)
cache, out = pages.to(device), torch.full((len(tokens), width), 7.0, dtype=torch.bfloat16).to(device)
found = compressor_from_projected(
    *on(values.contiguous(), scores.contiguous()), cache, whole([starts, new, firsts, firsts, rings]), out,
    max_query_len=max(new), num_cores=_cube_core_num()).cpu()
rows_made = 0
for start, count, own, ring, first in zip(starts, new, states, rings, firsts):
    for token in range(start, start + count):
        row = torch.zeros(width)
        if ring and token % 2:
            pair = own[token - 1 : token + 1].double()
            weights = pair[:, width:].exp() / pair[:, width:].exp().sum(0)
            row, rows_made = (weights * pair[:, :width]).sum(0), rows_made + 1
        torch.testing.assert_close(found[first + token - start].double(), row.double(), rtol=1e-2, atol=1e-2)
        if ring:
            expected[ring, token % rows] = own[token]
assert rows_made == 19 and torch.equal(cache.cpu(), expected)
"""
    )


def test_queries_are_quantised_by_head_and_selected_rows_put_in_order() -> None:
    on_device(
        IN_PAGES
        + """
from vllm_ascend.ops.triton.prepare_indexer_indices import prepare_indexer_indices
from vllm_ascend.ops.triton.quantize_indexer_query import quantize_indexer_query
query = torch.randn(3, 5, 128).bfloat16()
query[1, 2] = 0
quantised, scales = (each.cpu() for each in quantize_indexer_query(query.to(device)))
assert quantised.dtype == torch.int8 and scales.dtype == torch.float16 and scales.shape == (3, 5)
assert scales[1, 2] == 2**-24
assert (quantised.abs().amax(-1).flatten().sort().values == torch.tensor([0] + 14 * [127])).all()
torch.testing.assert_close(quantised.float() * scales.unsqueeze(-1).float(), query.float(), rtol=0, atol=2e-2)

selected = [[7, 2, -1, 4], [0, 9, 3, -1], [1, 0, 2, 3]]
for ratio, expected in (
    (1, [[2, 4, 7, -1], [0, 3, -1, -1], [0, -1, -1, -1]]), (2, [[2, -1, -1, -1], [0, -1, -1, -1], [-1] * 4])
):
    out, counts = whole([[9] * 4] * 3), whole([[9]] * 3)
    positions = torch.tensor([7, 3, 0]).to(device)
    prepare_indexer_indices(whole(selected), positions, ratio, indices_output=out, lengths_output=counts)
    assert out.tolist() == expected
    assert counts.flatten().tolist() == [sum(each >= 0 for each in row) for row in expected]
"""
    )


def test_tables_are_read_by_the_last_tokens_of_a_request() -> None:
    """They are new ones, the prompt's, or those that were kept by slots; what follows an image begins anew."""
    on_device(
        IN_PAGES
        + """
from types import SimpleNamespace
from vllm_ascend.models.deepseek_v41.engram.hash_state import AscendNgramHashState
from vllm_ascend.models.deepseek_v41.engram.npu import gather_dequantize_engram_int8
page, depth, layers, heads, image = 4, 3, 2, 2, 19
names = torch.randperm(20)
texts = [torch.randint(0, 19, (13,)).tolist(), torch.randint(0, 19, (6,)).tolist()]
texts[1][4] = image
starts, prompts = (9, 0), (8, 6)  # of the first, token 8 was generated
tables = [[3, 1, 6, 2], [5, 4, 0, 0]]
state = AscendNgramHashState.__new__(AscendNgramHashState)
torch.nn.Module.__init__(state)
state.use_slot_cache, state.block_size, state.pad_id = True, page, 11
state.token_map = names.int().to(device)
state.multipliers = (torch.randint(0, 2**40, (layers, depth + 1)) * 2 + 1).to(device)
primes = torch.tensor([[[7, 11], [13, 17], [19, 23]], [[29, 31], [37, 41], [43, 47]]])
state.primes, state.offsets = primes.to(device), torch.arange(12).view(2, 6).mul(5).to(device)
kept = torch.randint(0, 20, (8 * page,)).int()
slot = lambda request, token: tables[request][token // page] * page + token % page
kept[slot(0, 8)] = names[texts[0][8]]
state._cache = kept.to(device)
tokens = [text[start:] for text, start in zip(texts, starts)]
positions = [list(range(start, len(text))) for text, start in zip(texts, starts)]
before = [
    [text[start - 1 - i] if 0 <= start - 1 - i < prompt else -1 for i in range(depth)]
    for text, start, prompt in zip(texts, starts, prompts)]
slots = [slot(i, token) for i in range(2) for token in positions[i]] + [-1] * 3
ids = whole(sum(tokens, []))
hashes = state(
    ids, torch.tensor(sum(positions, [])).to(device), whole([0, len(tokens[0]), len(ids)]), ids == image,
    whole(before), whole(before) == image, torch.tensor(slots).to(device), whole(tables)).cpu()
assert hashes.shape == (10, layers, 6) and hashes.dtype == torch.int32

row, read = 0, kept.tolist()
for request, text in enumerate(texts):
    for token in positions[request]:
        read[slot(request, token)] = -1 if text[token] == image else int(names[text[token]])
        grams, over = [], False
        for back in range(depth + 1):
            over = over or token < back or text[token - back] == image
            grams.append(11 if over else int(names[text[token - back]]))
        for layer in range(layers):
            for size in range(2, depth + 2):
                mixed = 0
                for gram, factor in zip(grams[:size], state.multipliers[layer].tolist()):
                    mixed ^= gram * factor
                for head in range(heads):
                    column = (size - 2) * heads + head
                    expected = mixed % int(primes[layer, size - 2, head]) + int(state.offsets[layer, column])
                    assert int(hashes[row, layer, column]) == expected
        row += 1
assert row == 10 and state._cache.tolist() == read

codes, factors = torch.randint(-127, 128, (50, 64), dtype=torch.int8), torch.rand(50, 2)
rows = torch.randint(0, 200, (7, 5)).int()
rows[3, 2], rows[4, 3] = 120, 149
found = gather_dequantize_engram_int8(
    *on(codes, factors, rows), 64, head_start=2, local_heads=2, vocab_start=100, vocab_end=150).cpu()
for token in range(7):
    for head in range(2):
        place = int(rows[token, 2 + head]) - 100
        own = codes[place].float() * factors[place].repeat_interleave(32) if 0 <= place < 50 else torch.zeros(64)
        torch.testing.assert_close(found[2 * token + head].float(), own, rtol=1e-2, atol=1e-2)
"""
    )
