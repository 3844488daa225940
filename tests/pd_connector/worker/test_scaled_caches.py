"""Caches with a scale for each token are compared as the numbers that they hold.

Packed as vLLM's kernels pack them, into tensors of the form that vLLM's specifications state, and described as those
that a worker serves.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from tests.support.releases import INSTALLED, module_needs

if INSTALLED < (0, 30):
    module_needs((0, 30), "scales in the rows of a cache")
import torch
from vllm.v1.kv_cache_interface import FullAttentionSpec, MLAAttentionSpec, SparseCacheRole

from layout.geometry import Plane
from layout.plan import BlockTable
from pd_connector.vllm.cache_groups import Ranks
from pd_connector.worker.agreement import Disagreement, compare, plane_samples
from pd_connector.worker.caches import describe_caches
from pd_connector.worker.canary import plane_formats
from tests.support.connector.stated import model_config, stated_groups
from transfer.copies.checksums.values import PlaneValues, read_values

Numbers = npt.NDArray[np.float64]
Bytes = npt.NDArray[np.uint8]
LAYERS, TOKENS, BLOCK = 6, 192, 64
NAMES = [f"layers.{number}" for number in range(LAYERS)]
#: Relative errors by layer, as far as sound engines go: rounding before the first, an fp8 cache and experts behind it.
ROUNDING = (0.004, *np.linspace(0.15, 0.55, LAYERS - 1))
HEADS = 2


def scaled(numbers: Numbers, largest: int) -> tuple[Bytes, Bytes]:
    """Numbers as codes and a scale for each row of the last axis. 127: int8, 448: fp8_e4m3."""
    scales = np.maximum(np.abs(numbers).max(axis=-1, keepdims=True) / largest, 1e-6).astype(np.float32)
    units = torch.tensor(numbers / scales)
    codes = units.round().to(torch.int8) if largest == 127 else units.to(torch.float8_e4m3fn)
    return np.asarray(codes.view(torch.uint8).numpy(), np.uint8), scales.view(np.uint8)


def per_token_head(numbers: Numbers, largest: int) -> Bytes:
    """K, its scale, V, its scale: ``TritonAttentionImpl._ensure_scale_caches``."""
    return np.concatenate([part for half in np.split(numbers, 2, axis=-1) for part in scaled(half, largest)], axis=-1)


def ds_mla(numbers: Numbers) -> Bytes:
    """The format of FlashMLA's sparse attention: its docstring."""
    tiles = numbers[..., :512].reshape(*numbers.shape[:-1], 4, 128)
    rope = torch.tensor(numbers[..., 512:]).to(torch.bfloat16).view(torch.uint8).numpy()
    parts = [part.reshape(*numbers.shape[:-1], -1) for part in scaled(tiles, 448)]
    return np.concatenate([*parts, rope], axis=-1)


def indexer(numbers: Numbers) -> Bytes:
    """All codes of a block, then its scales, which are powers of two: ``indexer_k_quant_and_cache``."""
    largest = np.maximum(np.abs(numbers).max(axis=-1, keepdims=True), 1e-4)
    scales = np.exp2(np.ceil(np.log2(largest / 448))).astype(np.float32)
    codes = torch.tensor(numbers / scales).to(torch.float8_e4m3fn).view(torch.uint8).numpy()
    by_block = [part.reshape(-1, BLOCK * part.shape[-1]) for part in (codes, scales.view(np.uint8))]
    return np.asarray(np.concatenate(by_block, axis=-1).reshape(*numbers.shape[:-1], -1), np.uint8)


@dataclass(frozen=True)
class Form:
    """A form of caches, and which of a row's numbers a rotary embedding turns."""

    setting: str
    spec: Any
    items: int
    pack: Callable[[Numbers], Bytes]
    rotated: slice
    rotated_part: str
    heads: int = 1
    coded: int | None = None  # the first so many have scales; None: all


def of_heads(setting: str, dtype: torch.dtype, largest: int) -> Form:
    spec = FullAttentionSpec(
        block_size=BLOCK, num_kv_heads=HEADS, head_size=64, dtype=dtype, state_content_bytes=2 * (64 + 4)
    )
    return Form(setting, spec, 128, lambda numbers: per_token_head(numbers, largest), slice(64), "k", HEADS)


def latent(head_size: int, dtype: torch.dtype = torch.uint8, **values: Any) -> Any:
    return MLAAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=head_size, dtype=dtype, **values)


FORMS = {
    "int8_per_token_head": of_heads("int8_per_token_head", torch.int8, 127),
    "fp8_per_token_head": of_heads("fp8_per_token_head", torch.uint8, 448),
    "fp8_ds_mla": Form(
        "fp8_ds_mla", latent(576, cache_dtype_str="fp8_ds_mla", state_content_bytes=656), 576, ds_mla,
        slice(512, 576), "mla_rope", coded=512,
    ),
    "indexer": Form("auto", latent(132, cache_role=SparseCacheRole.INDEXER), 128, indexer, slice(64), "kv"),
}  # fmt: skip


class Model:
    """What every layer's cache holds of a prompt's tokens."""

    def __init__(self, form: str) -> None:
        self.form = FORMS[form]
        self.random = np.random.default_rng(0)
        self.values = self.other(LAYERS, TOKENS, self.form.heads, self.form.items)
        self.values *= np.exp(self.random.normal(0, 0.5, (LAYERS, 1, 1, self.form.items)))  # usual, by place

    def other(self, *shape: int) -> Numbers:
        return np.asarray(self.random.standard_normal(shape or self.values.shape[1:]))

    def rounded(self) -> Numbers:
        usual = np.sqrt((self.values**2).mean(axis=1, keepdims=True))
        sizes = np.array(ROUNDING)[:, None, None, None]
        return np.asarray(self.values + sizes * usual * self.other(*self.values.shape))

    def compare(self, pulled: Numbers) -> Disagreement | None:
        (plane, form, ours), (_, _, theirs) = self._held(self.values, [3, 1, 4]), self._held(pulled, [0, 2, 1])
        depths = {name: depth for depth, name in enumerate(NAMES)}
        return compare(list(plane_samples(plane, form, depths, ours, theirs)), "bfloat16")

    def _held(self, numbers: Numbers, table: list[int]) -> tuple[Plane, str, PlaneValues]:
        """The plane and format of caches with ``numbers`` in the blocks of ``table``, and what is found there."""
        rows = torch.tensor(self.form.pack(numbers)).unflatten(1, (-1, BLOCK)).transpose(2, 3)
        cache = torch.zeros((LAYERS, 5, *rows.shape[2:]), dtype=torch.uint8, device="cpu")
        cache[:, table] = rows
        caches = dict(zip(NAMES, cache.view(self.form.spec.dtype), strict=True))
        groups = stated_groups((NAMES, self.form.spec), blocks=5, config=model_config(kv_heads=self.form.heads))
        geometry = describe_caches(caches, groups, Ranks(0, 1, 0, 1), "")
        ((plane, form),) = plane_formats(geometry, caches, self.form.setting).items()
        return plane, form, read_values(plane, BLOCK, BlockTable.of(table), 0, TOKENS)


def found(difference: Disagreement | None) -> Disagreement:
    assert difference is not None
    return difference


def rotated(form: Form, numbers: Numbers, base: float) -> Numbers:
    """With a rotary embedding of ``base`` over what the form has of it, pairs as neighbours."""
    turned = numbers.copy()
    part = turned[..., form.rotated]
    size = part.shape[-1]
    angles = np.arange(TOKENS)[:, None, None] * base ** (-np.arange(0, size, 2) / size)
    pairs = (part[..., ::2] + 1j * part[..., 1::2]) * np.exp(1j * angles)
    part[..., ::2], part[..., 1::2] = pairs.real, pairs.imag
    return turned


@pytest.mark.parametrize("form", FORMS)
def test_rounding_is_no_difference_however_many_codes_it_changes(form: str) -> None:
    model = Model(form)
    assert model.compare(model.rounded()) is None


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("layer", [0, LAYERS - 1])
def test_other_weights_in_one_layer_are_noticed(form: str, layer: int) -> None:
    model = Model(form)
    pulled = model.rounded()
    pulled[layer] = model.other() * np.sqrt((model.values[layer] ** 2).mean(axis=0))
    assert found(model.compare(pulled)).layer == NAMES[layer]


@pytest.mark.parametrize("form", FORMS)
def test_another_base_of_the_rotary_embedding_is_noticed_in_the_part_that_has_it(form: str) -> None:
    model = Model(form)
    pulled = rotated(model.form, model.rounded(), 1e6)
    model.values = rotated(model.form, model.values, 1e4)
    difference = found(model.compare(pulled))
    assert (difference.layer, difference.part) == (NAMES[0], model.form.rotated_part)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("scale", [0.8, 1.25])
def test_other_scales_are_noticed_and_named(form: str, scale: float) -> None:
    """The codes are the same: only the scales differ, but for those of an indexer, which are powers of two."""
    model = Model(form)
    pulled = model.values.copy()
    pulled[0, ..., : model.form.coded] /= scale
    difference = found(model.compare(pulled))
    assert difference.layer == NAMES[0]
    assert difference.factor == pytest.approx(scale, rel=0.02)


@pytest.mark.parametrize("form", FORMS)
def test_what_did_not_arrive_is_noticed(form: str) -> None:
    model = Model(form)
    pulled = model.rounded()
    pulled[3, BLOCK:] = 0.0
    assert found(model.compare(pulled)).layer == NAMES[3]
