"""DeepSeek's sparse attention, in torch for the CPU: an indexer selects the tokens that a query attends to.

As CANN documents its operators LightningIndexer and SparseFlashAttention, and as vllm-ascend calls them: queries of all
requests one after the other (TND), caches in pages [blocks, tokens of a block, 1, size] (PA_BSND), and a causal mask
that ends with each request's last token (sparse mode 3), or none (0). Lengths of queries are running totals, those of
keys are not.
"""

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn.functional import pad

from tests.support.ascend.host_kernels.attention import gather
from tests.support.ascend.host_kernels.dispatch import npu_operator

#: Which sparse modes these operators know: causal, aligned to the last query and the last key, and no mask, for caches
#: that hold some of a request's tokens only.
CAUSAL, UNMASKED = 3, 0
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
    return best_of(scores.masked_fill(hidden, float("-inf")), count)


def best_of(scores: Tensor, count: int) -> Tensor:
    """Indices [queries, count] of the highest scores, those first, but for what is minus infinity."""
    values, indices = scores.sort(stable=True, dim=-1, descending=True)
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
    *, block_table: Tensor, actual_seq_lengths_query: Tensor, actual_seq_lengths_kv: Tensor,
    query_rope: Tensor | None = None, key_rope: Tensor | None = None, sparse_block_size: int = 1,
    layout_query: str = "BSND", layout_kv: str = "BSND", sparse_mode: int = CAUSAL, pre_tokens: int = 0,
    next_tokens: int = 0, attention_mode: int = 2, return_softmax_lse: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Attention over latent vectors (attention mode 2), of which each query sees the tokens of its indices only.

    ``query`` [tokens, heads, latent], ``query_rope`` [tokens, heads, rotary size] if there is one, ``sparse_indices``
    [tokens, 1, selected], ``key`` and ``key_rope`` paged caches; returns what ``query`` has the shape of, and, if
    ``return_softmax_lse``, two numbers of each query and head [1, tokens, heads]: see ``Attended``.
    """
    assert (layout_query, layout_kv, sparse_block_size, attention_mode) == ("TND", "PA_BSND", 1, 2)
    attended = Attended(query)
    query_rope = query[..., :0] if query_rope is None else query_rope
    for request, rows, length in requests_of(actual_seq_lengths_query, actual_seq_lengths_kv):
        latents = gather(key, block_table[request], length, 1)[:, 0].float()
        turned = latents[:, :0]
        if key_rope is not None:
            turned = gather(key_rope, block_table[request], length, 1)[:, 0].float()
        seen = seen_tokens(sparse_indices[rows, 0], length, sparse_mode)
        attended.attend(rows, query[rows], query_rope[rows], latents, turned, seen, scale_value)
    return attended.results(with_sums=return_softmax_lse)


class Attended:
    """What attention makes of ``query`` [tokens, heads, latent], a request at a time.

    Beside it, for who joins attention over parts of the tokens: each query's largest score, and the sum of exponentials
    of all scores less that one. A query that sees nothing has zeros, minus infinity, and a sum of zero.
    """

    def __init__(self, query: Tensor) -> None:
        self._out = torch.zeros_like(query)
        self._largest = torch.full(query.shape[:2], float("-inf"))
        self._sums = torch.zeros(query.shape[:2])

    def attend(
        self, rows: slice, query: Tensor, query_rope: Tensor, latents: Tensor, turned: Tensor, seen: Tensor,
        scale: float,
    ) -> None:  # fmt: skip
        """Attention of one request's queries over latent vectors.

        ``query`` [queries, heads, latent], ``query_rope`` [queries, heads, rotary size], ``latents`` [tokens, latent]
        and ``turned`` [tokens, rotary size] in float32, ``seen`` [queries, tokens].
        """
        if not latents.shape[0]:
            return
        latents, turned = pad_together(latents), pad_together(turned)
        hidden = ~pad(seen, (0, latents.shape[0] - seen.shape[1]))
        for head in range(query.shape[1]):
            scores = query[:, head].float() @ latents.t() + query_rope[:, head].float() @ turned.t()
            scores = (scores * scale).masked_fill_(hidden, float("-inf"))
            largest = scores.amax(-1)
            shares = (scores - largest.nan_to_num(neginf=0.0).unsqueeze(-1)).exp_()
            total = shares.sum(-1)
            self._largest[rows, head], self._sums[rows, head] = largest, total
            self._out[rows, head] = (shares @ latents / total.clamp_min(1.0).unsqueeze(-1)).to(self._out.dtype)

    def results(self, *, with_sums: bool) -> tuple[Tensor, Tensor, Tensor]:
        """As the operators return them."""
        if not with_sums:
            return self._out, torch.zeros(0), torch.zeros(0)
        return self._out, self._largest.unsqueeze(0), self._sums.unsqueeze(0)


def pad_together(rows: Tensor) -> Tensor:
    """Zeros behind ``rows`` [rows, size], up to as many as sums are made over."""
    return pad(rows, (0, 0, 0, -rows.shape[0] % _TOGETHER))


def shapes_of_attended(out: Tensor, *, with_sums: bool) -> tuple[Tensor, Tensor, Tensor]:
    """The same, as meta tensors, of what ``out`` is like."""
    sums = out.new_empty((1, *out.shape[:2]) if with_sums else 0, dtype=torch.float32)
    return out, sums, torch.empty_like(sums)


def shapes_of_sparse_flash_attention(
    query: Tensor, *_args: object, return_softmax_lse: bool = False, **_others: object
) -> tuple[Tensor, Tensor, Tensor]:
    return shapes_of_attended(torch.empty_like(query), with_sums=return_softmax_lse)


def seen_tokens(indices: Tensor, length: int, mode: int) -> Tensor:
    """What the queries see of a request's tokens, [queries, length]: what is selected, and, if causal, nothing that
    follows.
    """
    assert mode in (CAUSAL, UNMASKED), mode
    new = indices.shape[0]
    seen = torch.zeros(new, length + 1, dtype=torch.bool)
    seen.scatter_(1, indices.long().masked_fill(indices < 0, length), value=True)
    return seen[:, :length].tril_(length - new) if mode == CAUSAL else seen[:, :length]
