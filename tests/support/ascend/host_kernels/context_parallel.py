"""Attention of ranks that share a request's tokens, joined: vllm-ascend's Triton kernels for it, in torch.

Each rank attends with all heads to its own tokens, and sends the other ranks their heads, or their tokens, of what it
has got: the rows of the output with the logarithm of the sum of exponentials that each was divided by.
"""

from typing import Any

import torch
from torch import Tensor

from tests.support.ascend.host_kernels.dispatch import host


def pack_for_ranks(
    _grid: tuple[int, ...], output: Tensor, sums: Tensor, send: Tensor, *_sizes: int,
    SCATTER_TOKENS: bool, **_others: Any,  # noqa: N803  Triton's
) -> None:  # fmt: skip
    """Write what every rank is sent, ``send`` [ranks, shared out, others, size and a sum].

    Of ``output`` [tokens, heads, size], tokens or heads are shared out; ``sums`` [tokens, heads, 1] in float32.
    """
    output, sums, send = map(host.view, (output, sums, send))
    size = output.shape[-1]

    def pack() -> None:
        for source, place in ((output, send[..., :size]), (sums, send[..., size:])):
            rows = source if SCATTER_TOKENS else source.transpose(0, 1)
            numbers = rows.contiguous().view(send.dtype)  # a sum takes as many of these as it has bytes for
            place[..., : numbers.shape[-1]] = numbers.unflatten(0, (send.shape[0], -1))

    host.launch(pack)


def join_ranks(
    _grid: tuple[int, ...], received: Tensor, output: Tensor, own: Tensor, own_sums: Tensor, *_sizes: int,
    SCATTER_TOKENS: bool, HAS_LOCAL: bool, RETURN_LSE: bool, **_others: Any,  # noqa: N803  Triton's
) -> None:  # fmt: skip
    """Write ``output`` [tokens, heads, size] of what ``pack_for_ranks`` made on each rank, and of what all ranks have.

    A part without a finite sum is of no tokens, whatever its rows hold. ``own`` and ``own_sums``, if there are any, are
    as ``output``.
    """
    assert not RETURN_LSE
    received, output, own, own_sums = map(host.view, (received, output, own, own_sums))
    size = output.shape[-1]

    def join() -> None:
        rows = received[..., :size].float()
        sums = received[..., size : size + 4 // received.itemsize].contiguous().view(torch.float32)
        if HAS_LOCAL:
            rows, sums = (
                torch.cat((parts, (part if SCATTER_TOKENS else part.transpose(0, 1)).unsqueeze(0).float()))
                for parts, part in ((rows, own), (sums, own_sums))
            )
        is_part = sums.isfinite()
        shares = sums.masked_fill(~is_part, float("-inf")).softmax(0).nan_to_num()
        joined = (rows.masked_fill(~is_part, 0.0) * shares).sum(0)
        output.copy_(joined if SCATTER_TOKENS else joined.transpose(0, 1))

    host.launch(join)
