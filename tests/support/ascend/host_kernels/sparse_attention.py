"""DeepSeek's sparse attention, in torch for the CPU: an indexer selects the tokens that a query attends to.

As CANN documents its operators LightningIndexer and SparseFlashAttention, and as vllm-ascend calls them: queries of all
requests one after the other (TND), caches in pages [blocks, tokens of a block, 1, size] (PA_BSND), and a causal mask
that ends with each request's last token (sparse mode 3). Lengths of queries are running totals, those of keys are not.
"""

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn.functional import pad

from tests.support.ascend.host_kernels.attention import gather
from tests.support.ascend.host_kernels.dispatch import npu_operator

#: Which sparse mode these operators know: causal, aligned to the last query and the last key.
CAUSAL = 3
#: Fills up a query's indices where it may see fewer tokens than are selected.
NOTHING = -1
#: Attention sums over so many tokens at least, and multiples of them: sums round alike while nearly all lengths grow.
_TOGETHER = 128


def requests_of(queries: Tensor, keys: Tensor) -> Iterator[tuple[int, slice, int]]:
    """Each request that has queries: its number, where they are, and how many tokens its cache holds."""
    start = 0
    for request, (end, length) in enumerate(zip(queries.tolist(), keys.tolist(), strict=True)):
        if end > start:
            yield request, slice(start, end), length
        start = end


def select_tokens(scores: Tensor, count: int) -> Tensor:
    """Indices [queries, count] of the tokens that score highest, those first, of a request's last ``queries`` tokens.

    ``scores`` [queries, tokens]. No query sees what follows its own token. Of equals, the earlier one is selected.
    """
    new, total = scores.shape
    hidden = torch.arange(total)[None] > torch.arange(new)[:, None] + (total - new)
    values, indices = scores.masked_fill(hidden, float("-inf")).sort(stable=True, dim=-1, descending=True)
    selected = indices.masked_fill(values == float("-inf"), NOTHING)[:, :count]
    return pad(selected, (0, count - selected.shape[1]), value=NOTHING).int()


@npu_operator
def npu_lightning_indexer(
    query: Tensor, key: Tensor, weights: Tensor,
    *, actual_seq_lengths_query: Tensor, actual_seq_lengths_key: Tensor, block_table: Tensor,
    layout_query: str = "BSND", layout_key: str = "BSND", sparse_count: int = 2048, sparse_mode: int = CAUSAL,
    pre_tokens: int = 0, next_tokens: int = 0, return_value: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The indices of each query's tokens, [tokens, 1, selected]: sums of ``weights * relu(query @ key)`` over heads.

    ``query`` [tokens, heads, size], ``weights`` [tokens, heads], ``key`` a paged cache.
    """
    assert (layout_query, layout_key, sparse_mode) == ("TND", "PA_BSND", CAUSAL)
    assert not return_value
    indices = torch.full((query.shape[0], 1, sparse_count), NOTHING, dtype=torch.int32)
    for request, rows, length in requests_of(actual_seq_lengths_query, actual_seq_lengths_key):
        k = gather(key, block_table[request], length, 1)[:, 0].float()
        scores = torch.zeros(rows.stop - rows.start, length)
        for head in range(query.shape[1]):
            scores += (query[rows, head].float() @ k.t()).relu_() * weights[rows, head, None].float()
        indices[rows, 0] = select_tokens(scores, sparse_count)
    return indices, query.new_zeros(0)


def npu_sparse_flash_attention(
    query: Tensor, key: Tensor, value: Tensor, sparse_indices: Tensor, scale_value: float,
    *, block_table: Tensor, actual_seq_lengths_query: Tensor, actual_seq_lengths_kv: Tensor, query_rope: Tensor,
    key_rope: Tensor, sparse_block_size: int = 1, layout_query: str = "BSND", layout_kv: str = "BSND",
    sparse_mode: int = CAUSAL, pre_tokens: int = 0, next_tokens: int = 0, attention_mode: int = 2,
    return_softmax_lse: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Attention over latent vectors (attention mode 2), of which each query sees the tokens of its indices only.

    ``query`` [tokens, heads, latent], ``query_rope`` [tokens, heads, rotary size], ``sparse_indices``
    [tokens, 1, selected], ``key`` and ``key_rope`` paged caches; returns what ``query`` has the shape of.
    """
    assert (layout_query, layout_kv, sparse_mode) == ("TND", "PA_BSND", CAUSAL)
    assert (sparse_block_size, attention_mode, return_softmax_lse) == (1, 2, False)
    out = torch.zeros_like(query)
    for request, rows, length in requests_of(actual_seq_lengths_query, actual_seq_lengths_kv):
        latents, turned = (gather(c, block_table[request], length, 1)[:, 0].float() for c in (key, key_rope))
        seen = seen_tokens(sparse_indices[rows, 0], length)
        out[rows] = attend_to_selected(query[rows], query_rope[rows], latents, turned, seen, scale_value)
    return out, torch.zeros(0), torch.zeros(0)


def attend_to_selected(
    query: Tensor, query_rope: Tensor, latents: Tensor, turned: Tensor, seen: Tensor, scale: float
) -> Tensor:
    """Attention of a request's queries over latent vectors, in the type of ``query`` [queries, heads, latent].

    ``query_rope`` [queries, heads, rotary size], ``latents`` [tokens, latent] and ``turned`` [tokens, rotary size] in
    float32, ``seen`` [queries, tokens].
    """
    out = torch.empty_like(query)
    rest = -latents.shape[0] % _TOGETHER
    latents, turned = (pad(part, (0, 0, 0, rest)) for part in (latents, turned))
    seen = pad(seen, (0, rest))
    for head in range(query.shape[1]):
        scores = query[:, head].float() @ latents.t() + query_rope[:, head].float() @ turned.t()
        scores = (scores * scale).masked_fill_(~seen, float("-inf"))
        out[:, head] = (scores.softmax(-1) @ latents).to(out.dtype)
    return out


def shapes_of_sparse_flash_attention(query: Tensor, *_args: object, **_others: object) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(query), query.new_empty(0, dtype=torch.float32), query.new_empty(0, dtype=torch.float32)


def seen_tokens(indices: Tensor, length: int) -> Tensor:
    """What the queries see of a request's tokens, [queries, length]: what is selected, but nothing that follows."""
    new = indices.shape[0]
    seen = torch.zeros(new, length + 1, dtype=torch.bool)
    seen.scatter_(1, indices.long().masked_fill(indices < 0, length), value=True)
    return seen[:, :length].tril_(length - new)
