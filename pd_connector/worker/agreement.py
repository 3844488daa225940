"""Whether two engines computed the same keys and values for the same tokens, up to rounding.

Pure: it is given what both caches hold of the same tokens, and reads no memory.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from layout.geometry import Plane
from transfer.local_copy.values import PlaneValues, UInt8Array

FloatArray = npt.NDArray[np.float64]

#: How a format's items are decoded.
_DTYPES = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float32": torch.float32,
    "fp8_e4m3": torch.float8_e4m3fn,
    "fp8_e5m2": torch.float8_e5m2,
    "int8": torch.int8,
}
#: Opaque planes of this packing hold numbers, K in the first half of a head's block and V in the second.
_CPU_PACKING = "cpu-"


#: Places of a token that are usually smaller than this share of the others are measured by the others: they are noise.
_LEAST_USUAL = 0.1


@dataclass(frozen=True, slots=True)
class _Tolerance:
    """The largest relative errors that rounding explains."""

    first: float  # median over the tokens of the first layer
    first_most: float  # of nine in ten tokens of the first layer
    deeper: float  # median over the tokens of any other layer


_TOLERANCES = {
    "float32": _Tolerance(0.02, 0.06, 0.25),
    "float16": _Tolerance(0.02, 0.06, 0.25),
    "bfloat16": _Tolerance(0.05, 0.15, 0.25),
    "fp8_e4m3": _Tolerance(0.1, 0.2, 0.3),
    "fp8_e5m2": _Tolerance(0.15, 0.3, 0.35),
    "int8": _Tolerance(0.1, 0.2, 0.3),
    "bytes": _Tolerance(0.6, 0.8, 0.85),
}


@dataclass(frozen=True, slots=True, eq=False)
class Sample:
    """What one layer's cache on this rank holds of the same tokens, computed here and pulled."""

    layer: str  # name
    depth: int  # place of the layer among the model's attention layers, 0 is the first
    part: str  # "k", "v", or as ``Plane.part``
    format: str  # as ``cache_format`` says
    computed: UInt8Array  # [tokens, heads, bytes of a (head, token)]
    pulled: UInt8Array  # the same shape


@dataclass(frozen=True, slots=True)
class Difference:
    """Where what two engines computed differs by more than rounding explains."""

    layer: str
    part: str
    error: float  # relative, 0 (equal) to 2 (opposite); in bytes, the share of those that differ
    allowed: float
    tokens: int  # compared
    format: str
    factor: float | None = None  # computed here is so many times what was pulled; None if it is no such multiple

    def __str__(self) -> str:
        if self.format == "bytes":
            found = (
                f"{self.error:.0%} of the bytes differ in {self.tokens} tokens, rounding explains {self.allowed:.0%}"
            )
        else:
            found = f"relative error {self.error:.3g} over {self.tokens} tokens, rounding explains {self.allowed:.3g}"
        times = (
            f"; what was computed here is {self.factor:.4g} times what was pulled" if self.factor is not None else ""
        )
        return f"layer {self.layer!r}, part {self.part!r} ({self.format}): {found}{times}"


def cache_format(tensor_dtype: torch.dtype, cache_dtype: str, packing: str = "") -> str:
    """Return the format of a layer's cache: a key of the tolerances, "bytes" if its items are not single numbers.

    Args:
        tensor_dtype: of the layer's tensor.
        cache_dtype: vLLM's setting, as ``CacheConfig.cache_dtype``; it says what is in a tensor of bytes.
        packing: as ``Plane.packing``.
    """
    if packing and not packing.startswith(_CPU_PACKING):
        return "bytes"
    for name, dtype in _DTYPES.items():
        if dtype == tensor_dtype and (name != "int8" or cache_dtype in {"auto", "int8"}):
            return name
    if tensor_dtype == torch.uint8:
        return {"fp8": "fp8_e4m3", "fp8_e4m3": "fp8_e4m3", "fp8_e5m2": "fp8_e5m2"}.get(cache_dtype, "bytes")
    return "bytes"


def plane_samples(
    plane: Plane, form: str, depths: Mapping[str, int], computed: PlaneValues, pulled: PlaneValues
) -> Iterator[Sample]:
    """Yield a sample for each layer of ``plane`` and part in it, of the tokens that both sides hold.

    Args:
        plane: of which ``computed`` and ``pulled`` were read; their ranges of tokens are equal.
        form: the format of its items.
        depths: place among the model's attention layers, by layer name.
        computed, pulled: what the two caches hold.
    """
    held = computed.held & pulled.held
    for number, layer in enumerate(plane.layers):
        ours, theirs = computed.data[number, held], pulled.data[number, held]
        if plane.packing.startswith(_CPU_PACKING):
            halves = zip("kv", _halves(ours, plane.block_tokens), _halves(theirs, plane.block_tokens), strict=True)
        else:
            halves = zip([plane.part], [ours], [theirs], strict=True)
        for part, here, there in halves:
            yield Sample(layer, depths[layer], part, form, here, there)


def _halves(rows: UInt8Array, block_tokens: int) -> tuple[UInt8Array, UInt8Array]:
    """Return the first and the second half of each whole block of each head in ``rows`` [tokens, heads, bytes]."""
    _, heads, size = rows.shape
    blocks = (
        rows.reshape(-1, block_tokens, heads, size).transpose(0, 2, 1, 3).reshape(-1, heads, 2, block_tokens, size // 2)
    )
    first, second = (blocks[:, :, half].transpose(0, 2, 1, 3).reshape(-1, heads, size // 2) for half in (0, 1))
    return first, second


def compare(samples: Sequence[Sample]) -> Difference | None:
    """Return the difference of the lowest layer that differs by more than rounding explains; None if there is none.

    Samples without tokens or heads prove nothing and are passed over.
    """
    for sample in sorted(samples, key=lambda sample: sample.depth):
        if sample.computed.size and (difference := _difference(sample)):
            return difference
    return None


def _difference(sample: Sample) -> Difference | None:
    allowed = _TOLERANCES[sample.format]
    scaled = None if sample.format == "bytes" else _scaled(*_values(sample))
    errors = _byte_errors(sample) if scaled is None else _value_errors(*scaled)
    checks = [(0.5, allowed.deeper)] if sample.depth else [(0.5, allowed.first), (0.9, allowed.first_most)]
    for share, limit in checks:
        error = float(np.quantile(errors, share))
        if error > limit:
            factor = None if scaled is None else _factor(*scaled, error)
            return Difference(sample.layer, sample.part, error, limit, len(errors), sample.format, factor)
    return None


def _values(sample: Sample) -> tuple[FloatArray, FloatArray]:
    """Return both sides as numbers: [tokens, heads * items]."""
    dtype = _DTYPES[sample.format]
    computed, pulled = (
        torch.tensor(side.reshape(len(side), -1)).view(dtype).to(torch.float64).numpy()
        for side in (sample.computed, sample.pulled)
    )
    return computed, pulled


def _scaled(computed: FloatArray, pulled: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Return both sides in units of what is usual at each place of a token (its root mean square over the tokens).

    A few places are often a hundred times larger than all others, because K has a bias there. They say nothing of the
    weights, and would hide what the others say. What is not a number on both sides is 0, on one side NaN.
    """
    odd = ~np.isfinite(computed), ~np.isfinite(pulled)
    sides = tuple(np.where(odd[0] & odd[1], 0.0, side) for side in (computed, pulled))
    usual = np.maximum(*(np.sqrt(np.nanmean(np.where(odd[0] | odd[1], 0.0, side) ** 2, axis=0)) for side in sides))
    usual = np.maximum(usual, _LEAST_USUAL * np.median(usual))
    usual[usual == 0] = 1.0
    ours, theirs = (np.where(odd[0] ^ odd[1], np.nan, side) / usual for side in sides)
    return ours, theirs


def _value_errors(computed: FloatArray, pulled: FloatArray) -> FloatArray:
    """Return the root mean square of the differences of each token, 2 where a value is a number on one side only."""
    live = max(1, int(((computed != 0) | (pulled != 0)).any(axis=0).sum()))
    errors = np.sqrt((np.clip(computed - pulled, -2.0, 2.0) ** 2).sum(axis=1) / live)
    return np.asarray(np.nan_to_num(errors, nan=2.0), np.float64)


def _byte_errors(sample: Sample) -> FloatArray:
    """Return the share of bytes that differ, of each token."""
    return np.asarray((sample.computed != sample.pulled).reshape(len(sample.computed), -1).mean(axis=1), np.float64)


def _factor(computed: FloatArray, pulled: FloatArray, error: float) -> float | None:
    """Return by which factor ``computed`` is a multiple of ``pulled``, if that explains most of ``error``."""
    power = float(np.nansum(pulled * pulled))
    if not power:
        return None
    factor = float(np.nansum(computed * pulled)) / power
    rest = float(np.median(_value_errors(computed, factor * pulled)))
    return factor if rest < error / 3 else None
