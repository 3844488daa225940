"""The check of a layout at start, on the real kernels: they pass it, and kernels that do not keep to it are caught."""

import warnings
from typing import Any

import pytest

from tests.support.releases import INSTALLED, module_needs

if INSTALLED < (0, 30):
    module_needs((0, 30), "layouts, for which its kernels are checked,")

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # what torch and vLLM deprecate of each other is not ours
    import torch
    import vllm._custom_ops as ops
    from vllm.v1.attention.backends import cpu_attn

from pd_connector.vllm.cpu import layout_check
from tests.support.connector.cpu_layers import OUR_CONNECTOR, Layer, a_shape, asked, cpu_only, layers_config

pytestmark = [cpu_only, pytest.mark.usefixtures("hooked")]


@pytest.mark.parametrize(
    "shape",
    [
        a_shape(),
        a_shape(heads=7, kv_heads=1, head_size=128, dtype=torch.bfloat16),
        a_shape(heads=4, kv_heads=4, head_size=80, dtype=torch.float16),
        a_shape(block_tokens=128, head_size=64, dtype=torch.bfloat16),
    ],
    ids=str,
)
def test_the_real_kernels_work_in_block_outer_layouts(shape: layout_check.CacheShape) -> None:
    assert asked(layers_config(OUR_CONNECTOR, shape=shape))[:2] == ["BHLNC", "BLHNC"]


def test_layers_of_different_shapes_and_windows_are_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    checked = []
    difference = layout_check.difference

    def record(kernels: Any, shape: layout_check.CacheShape, order: tuple[int, ...]) -> str:
        checked.append(shape)
        return difference(kernels, shape, order)

    monkeypatch.setattr(layout_check, "difference", record)
    shapes = [a_shape(), a_shape(head_size=64)]
    layers = [Layer(shape, cpu_attn.CPUAttentionBackend, window=40) for shape in (*shapes, *shapes)]
    assert asked(layers_config(OUR_CONNECTOR, *layers))[0] == "BHLNC"
    assert checked == shapes * 2  # each shape once a layout


def ignore_stride(cache: Any, axis: int) -> Any:
    """The cache as a kernel sees it that takes block (0) or head (1) to be dense."""
    _, heads, rows, columns = cache.shape  # K or V alone: its rows are half of the page
    strides = list(cache.stride())
    strides[axis] = (heads if axis == 0 else 1) * 2 * rows * columns
    return cache.as_strided(cache.shape, strides)


def sabotage(monkeypatch: pytest.MonkeyPatch, axis: int, *, writing: bool, attention: bool) -> None:
    write, attend = ops.cpu_attn_reshape_and_cache, ops.cpu_attention_with_kv_cache

    def bad_write(key: Any, value: Any, key_cache: Any, value_cache: Any, *rest: Any, **more: Any) -> None:
        write(key, value, ignore_stride(key_cache, axis), ignore_stride(value_cache, axis), *rest, **more)

    def bad_attend(*, key_cache: Any, value_cache: Any, **more: Any) -> None:
        attend(key_cache=ignore_stride(key_cache, axis), value_cache=ignore_stride(value_cache, axis), **more)

    if writing:
        monkeypatch.setattr(ops, "cpu_attn_reshape_and_cache", bad_write)
    if attention:
        monkeypatch.setattr(ops, "cpu_attention_with_kv_cache", bad_attend)


@pytest.mark.parametrize(
    ("writing", "attention", "found"),
    [
        (True, False, "after writing in step 0"),
        (False, True, "the attention output of layer 0 in step 0"),
        (True, True, "after writing in step 0"),
    ],
)
def test_a_kernel_that_ignores_the_block_stride_is_caught(
    monkeypatch: pytest.MonkeyPatch, log: pytest.LogCaptureFixture, writing: bool, attention: bool, found: str
) -> None:
    sabotage(monkeypatch, 0, writing=writing, attention=attention)
    assert asked(layers_config(OUR_CONNECTOR)) == ["LBHNC"]
    left_out = [record.getMessage() for record in log.records if "left out" in record.getMessage()]
    assert [line.split()[4] for line in left_out] == ["BHLNC", "BLHNC"]
    assert all(found in line and "head size 32" in line and "Using LBHNC instead" in line for line in left_out)


def test_only_the_layout_that_fails_is_left_out(monkeypatch: pytest.MonkeyPatch, log: pytest.LogCaptureFixture) -> None:
    sabotage(monkeypatch, 1, writing=True, attention=True)  # heads are dense in BLHNC, not in BHLNC
    assert asked(layers_config(OUR_CONNECTOR)) == ["BLHNC", "LBHNC"]
    assert "KV cache layout BHLNC is left out" in log.text
    assert "Using BLHNC instead" in log.text


def test_a_kernel_that_refuses_the_view_is_left_out(
    monkeypatch: pytest.MonkeyPatch, log: pytest.LogCaptureFixture
) -> None:
    write = ops.cpu_attn_reshape_and_cache

    def picky(key: Any, value: Any, key_cache: Any, *rest: Any, **more: Any) -> None:
        if key_cache.stride(0) != 2 * key_cache.shape[1] * key_cache[0, 0].numel():
            raise RuntimeError("view size is not compatible")
        write(key, value, key_cache, *rest, **more)

    monkeypatch.setattr(ops, "cpu_attn_reshape_and_cache", picky)
    assert asked(layers_config(OUR_CONNECTOR)) == ["LBHNC"]
    assert "writing raises RuntimeError: view size is not compatible" in log.text


def test_attention_that_writes_to_the_cache_is_caught(
    monkeypatch: pytest.MonkeyPatch, log: pytest.LogCaptureFixture
) -> None:
    attend = ops.cpu_attention_with_kv_cache

    def scribbling(*, query: Any, key_cache: Any, **more: Any) -> None:
        attend(query=query, key_cache=key_cache, **more)
        dense = key_cache.stride(0) == 2 * key_cache.shape[1] * key_cache[0, 0].numel()
        if len(query) == 2 and not dense:  # in the last step, where no later check can notice
            key_cache[4] = 0  # a block of nobody

    monkeypatch.setattr(ops, "cpu_attention_with_kv_cache", scribbling)
    assert asked(layers_config(OUR_CONNECTOR)) == ["LBHNC"]
    assert "attention changed the cache" in log.text
