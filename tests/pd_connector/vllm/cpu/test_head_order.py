"""Orders that kernels may have, found by marks: each found order is the one that the kernel was given."""

import pytest
import torch

from pd_connector.vllm.cpu.head_order import HeadOrder, StridedPart, UnknownOrderError, Write, find_order

TOKENS, HEAD = 32, 16
HALF = TOKENS * HEAD
ITEMS = torch.arange(2 * HALF)


def kernel(places: torch.Tensor, scale: float = 1.0) -> Write:
    """Stores item i (of K, then of V, token by token) at ``places[i]``."""

    def write(key: torch.Tensor, value: torch.Tensor, cache: torch.Tensor) -> None:
        cache.view(-1)[places] = (torch.cat([key.flatten(), value.flatten()]) * scale).to(cache.dtype)

    return write


def transposed_k() -> torch.Tensor:
    token, content = ITEMS[:HALF] // HEAD, ITEMS[:HALF] % HEAD
    return torch.cat([content * TOKENS + token, ITEMS[HALF:]])


def pairs_of_tokens() -> torch.Tensor:
    """As matrix units like it: two tokens' items of one number side by side."""
    token, content = ITEMS[:HALF] // HEAD, ITEMS[:HALF] % HEAD
    return torch.cat([token // 2 * 2 * HEAD + content * 2 + token % 2, ITEMS[HALF:]])


def find(write: Write, cache_dtype: torch.dtype = torch.float32) -> HeadOrder:
    return find_order(write, TOKENS, HEAD, torch.bfloat16, cache_dtype)


@pytest.mark.parametrize(
    "cache_dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float8_e5m2, torch.float8_e4m3fn, torch.uint8]
)
def test_strides_are_found_in_every_cache_dtype(cache_dtype: torch.dtype) -> None:
    order = find(kernel(transposed_k()), cache_dtype)
    assert (order.key, order.value) == (StridedPart(0, 1, TOKENS), StridedPart(HALF, HEAD, 1))


def test_k_and_v_may_lie_between_each_other() -> None:
    token, content, is_value = ITEMS // HEAD % TOKENS, ITEMS % HEAD, ITEMS // HALF
    order = find(kernel(token * 2 * HEAD + is_value * HEAD + content))
    assert (order.key, order.value) == (StridedPart(0, 2 * HEAD, 1), StridedPart(HEAD, 2 * HEAD, 1))


def test_an_order_without_strides_is_opaque() -> None:
    order = find(kernel(pairs_of_tokens()))
    assert (order.key, order.value) == (None, None)


def test_names_are_equal_where_orders_are() -> None:
    names = [find(kernel(places)).packing for places in (transposed_k(), transposed_k(), pairs_of_tokens(), ITEMS)]
    assert names[0] == names[1]
    assert len(set(names)) == 3


def test_a_scaled_cache_shows_its_order_too() -> None:
    assert find(kernel(transposed_k(), scale=0.5)) == find(kernel(transposed_k()))


@pytest.mark.parametrize(
    ("write", "reason"),
    [
        (kernel(ITEMS, scale=0.0), "does not keep the numbers 0 to 7 apart"),
        (kernel(ITEMS // 2), "not keep the numbers|not store each item"),
        (kernel((ITEMS + 1).clamp(max=2 * HALF - 1)), "not keep the numbers|not store each item"),
    ],
)
def test_a_kernel_that_loses_items_is_refused(write: Write, reason: str) -> None:
    with pytest.raises(UnknownOrderError, match=reason):
        find(write)
