"""Whether two engines computed the same keys and values for the same tokens, up to rounding.

Pure: it is given what both caches hold of the same tokens, and reads no memory.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby

import numpy as np
import numpy.typing as npt
import torch

from layout.geometry import Plane
from transfer.copies.checksums.values import PlaneValues, UInt8Array

FloatArray = npt.NDArray[np.float64]

#: The dtypes of tensors whose items are numbers, and how the format is called.
_FORMATS = {
    torch.bfloat16: "bfloat16",
    torch.float16: "float16",
    torch.float32: "float32",
    torch.float8_e4m3fn: "fp8_e4m3",
    torch.float8_e4m3fnuz: "fp8_e4m3",
    torch.float8_e5m2: "fp8_e5m2",
    torch.int8: "int8",
}
#: What is in a tensor of bytes, by vLLM's setting.
_FORMATS_IN_BYTES = {"fp8": "fp8_e4m3", "fp8_e4m3": "fp8_e4m3", "fp8_e5m2": "fp8_e5m2"}
#: Settings with which integers are not numbers of one unit: each token has a scale of its own.
_OWN_SCALES = "_per_token_head"
#: Opaque planes of this packing hold numbers, K in the first half of a head's block and V in the second.
_CPU_PACKING = "cpu-"


#: Places of a token that are usually smaller than this share of the others are measured by the others: they are noise.
_LEAST_USUAL = 0.1
#: What is usual at a place counts the median place as so many tokens more: one or two tokens, or the heads of a state
#: that a rank has, may be near zero there by chance, where rounding would be a large share of them.
_MEDIAN_TOKENS = 2


@dataclass(frozen=True, slots=True)
class _Tolerance:
    """The largest relative errors that rounding explains.

    Measured with vLLM 0.32 on a CPU, sound engines that compute with other kernels, other chunks and other dtypes:

        first layer     bfloat16 0.004, nine in ten tokens 0.005. No attention and no expert comes before its K and V:
                        what differs is the rounding of a norm, a product and a rotation
        second layer    bfloat16 0.020, fp8 cache 0.10 (its attention reads K and V that the cache has rounded)
        deeper          bfloat16 0.023 in 30 dense layers; 0.041 in the last of 12 with random weights, between tensor
                        parallel sizes 1 and 2 (the first is equal to the bit); 0.25 in 12 layers of 16 experts with
                        wide, random weights, of which rounding chooses others, up to 0.47 in nine of ten tokens; fp8
                        cache 0.21
        states          bfloat16, gated delta net between tensor parallel sizes 1 and 2: 0 in the first layer, 0.027 in
                        the second, 0.050 in the third, there 0.10 in nine of ten heads
        faults          K or V of other weights in one deep layer 1.1, heads in another order 0.92, LongRoPE 0.47 and
                        YaRN's magnitude 0.20 in the first layer

    The first layer's limits are at least ten times what was measured, because the first layer of a prompt with images
    has all of an encoder's rounding. From layer to layer, rounding grows slowly (at most twice, or by less than a tenth
    in bfloat16), so a layer that differs much more than all before it computes something else. ``deeper`` bounds what
    may grow so. float16 and float32 round less than bfloat16, except for what a GPU's TF32 does (as float16) and for
    what experts do, which rounding of any size flips. An fp8 cache rounds by steps of 1/8 (e5m2: 1/4) of a value, so an
    error of 0.004 before it moves some items by such a step: the square root of their product, 0.02. int8 is taken as
    fp8. Bytes that nobody decodes are equal where both sides round to the same value, and else by chance only.

    Not told from rounding: a change of less than ``first`` in the first layer and of less than ``step`` added in any
    other, as by an adapter that changes K and V by less.
    """

    first: float  # median over the tokens of the first layer
    first_most: float  # of nine in ten tokens of the first layer
    step: float  # median of any other layer, however little the layers before it differ
    deeper: float  # median of any other layer, however much they differ


_TOLERANCES = {
    "float32": _Tolerance(0.02, 0.06, 0.1, 0.6),
    "float16": _Tolerance(0.02, 0.06, 0.1, 0.6),
    "bfloat16": _Tolerance(0.06, 0.15, 0.1, 0.6),
    "fp8_e4m3": _Tolerance(0.1, 0.2, 0.35, 0.65),
    "fp8_e5m2": _Tolerance(0.15, 0.3, 0.35, 0.65),
    "int8": _Tolerance(0.1, 0.2, 0.35, 0.65),
    "bytes": _Tolerance(0.6, 0.8, 0.85, 0.85),
}
#: By how much more a layer may differ than nine in ten tokens of any layer before it.
_GROWTH = 3.0


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
class Disagreement:
    """Where what two engines computed differs by more than rounding explains."""

    layer: str
    part: str
    error: float  # relative, 0 (equal) to 2 (opposite); in bytes, the share of those that differ
    allowed: float
    tokens: int  # compared
    format: str  # of the cache, and of the model if that decides
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
    if (packing and not packing.startswith(_CPU_PACKING)) or cache_dtype.endswith(_OWN_SCALES):
        return "bytes"
    if tensor_dtype == torch.uint8:
        return _FORMATS_IN_BYTES.get(cache_dtype, "bytes")
    return _FORMATS.get(tensor_dtype, "bytes")


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


def state_samples(
    plane: Plane, depths: Mapping[str, int], computed: PlaneValues, pulled: PlaneValues
) -> Iterator[Sample]:
    """Yield a sample for each layer of a plane of states, of one state: each head of each row counts as a token.

    The arguments are those of ``plane_samples``. The format is that of the plane.
    """
    form = _FORMATS.get(getattr(torch, plane.dtype, None), "bytes")
    for number, layer in enumerate(plane.layers):
        ours, theirs = (each.data[number] for each in (computed, pulled))
        shape = (-1, 1, ours.shape[-1])
        yield Sample(layer, depths[layer], plane.part, form, ours.reshape(shape), theirs.reshape(shape))


def _halves(rows: UInt8Array, block_tokens: int) -> tuple[UInt8Array, UInt8Array]:
    """Return the first and the second half of each whole block of each head in ``rows`` [tokens, heads, bytes]."""
    _, heads, size = rows.shape
    blocks = (
        rows.reshape(-1, block_tokens, heads, size).transpose(0, 2, 1, 3).reshape(-1, heads, 2, block_tokens, size // 2)
    )
    first, second = (blocks[:, :, half].transpose(0, 2, 1, 3).reshape(-1, heads, size // 2) for half in (0, 1))
    return first, second


def compare(samples: Sequence[Sample], model_dtype: str) -> Disagreement | None:
    """Return the difference of the lowest layer that differs by more than rounding explains; None if there is none.

    Samples without tokens or heads prove nothing and are passed over.

    Args:
        samples: in any order.
        model_dtype: in which the model computes: what is kept with more digits, as states are, is rounded like that.
    """
    before: float | None = None  # error of nine in ten tokens of the layers before this one, None if there is none
    for _, layer in groupby(sorted(samples, key=_depth), key=_depth):
        most = [before or 0.0]
        for sample in layer:
            if not sample.computed.size:
                continue
            errors = _Errors(sample)
            if difference := _difference(sample, errors, before, model_dtype):
                return difference
            most.append(errors.of(0.9))
        before = max(most) if len(most) > 1 else before
    return None


def _depth(sample: Sample) -> int:
    return sample.depth


class _Errors:
    """By how much what a sample holds of each token differs."""

    def __init__(self, sample: Sample) -> None:
        self._scaled = None if sample.format == "bytes" else _scaled(*_values(sample))
        self._errors = _byte_errors(sample) if self._scaled is None else _value_errors(*self._scaled)

    def of(self, share: float) -> float:
        """Return what so large a share of the tokens does not exceed."""
        return float(np.quantile(self._errors, share))

    def factor(self) -> float | None:
        """Return by which factor what was computed is a multiple of what was pulled, if that explains the errors."""
        return None if self._scaled is None else _factor(*self._scaled, self.of(0.5))


def _difference(sample: Sample, errors: _Errors, before: float | None, model_dtype: str) -> Disagreement | None:
    kept = _TOLERANCES[sample.format]
    allowed = max(kept, _TOLERANCES.get(model_dtype, kept), key=lambda tolerance: tolerance.first)
    if sample.depth == 0:
        checks = [(0.5, allowed.first), (0.9, allowed.first_most)]
    elif before is None:
        checks = [(0.5, allowed.deeper)]
    else:
        checks = [(0.5, min(allowed.deeper, max(allowed.step, _GROWTH * before)))]
    for share, limit in checks:
        if (error := errors.of(share)) > limit:
            tokens, form = len(sample.computed), sample.format
            if allowed is not kept:
                form += f", computed in {model_dtype}"
            return Disagreement(sample.layer, sample.part, error, limit, tokens, form, errors.factor())
    return None


def _numbers_of_bytes(dtype: torch.dtype) -> FloatArray:
    """Return the number that each byte is in ``dtype``: [256]."""
    return np.asarray(torch.arange(256, dtype=torch.uint8, device="cpu").view(dtype).to(torch.float64).numpy())


#: How a format's items are decoded. By numpy: torch would take the threads that the model computes with.
_DECODE: Mapping[str, Callable[[UInt8Array], FloatArray]] = {
    "bfloat16": lambda data: (data.view(np.uint16).astype(np.uint32) << 16).view(np.float32).astype(np.float64),
    "float16": lambda data: data.view(np.float16).astype(np.float64),
    "float32": lambda data: data.view(np.float32).astype(np.float64),
    "int8": lambda data: data.view(np.int8).astype(np.float64),
    **{
        name: partial(np.take, _numbers_of_bytes(dtype))
        for name, dtype in (("fp8_e4m3", torch.float8_e4m3fn), ("fp8_e5m2", torch.float8_e5m2))
    },
}


def _values(sample: Sample) -> tuple[FloatArray, FloatArray]:
    """Return both sides as numbers: [tokens, heads * items]."""
    decode = _DECODE[sample.format]
    with np.errstate(invalid="ignore"):  # what is not a number stays none
        ours, theirs = (
            decode(np.ascontiguousarray(side.reshape(len(side), -1))) for side in (sample.computed, sample.pulled)
        )
    return ours, theirs


def _scaled(computed: FloatArray, pulled: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Return both sides in units of what is usual at each place of a token: about its root mean square over the tokens.

    A few places are often a hundred times larger than all others, because K has a bias there. They say nothing of the
    weights, and would hide what the others say. What is not a number on both sides is 0, on one side NaN.
    """
    odd = ~np.isfinite(computed), ~np.isfinite(pulled)
    sides = tuple(np.where(odd[0] & odd[1], 0.0, side) for side in (computed, pulled))
    squares = np.maximum(*((np.where(odd[0] | odd[1], 0.0, side) ** 2).sum(axis=0) for side in sides))
    tokens = len(computed)
    squares += _MEDIAN_TOKENS / tokens * np.median(squares)
    usual = np.sqrt(squares / (tokens + _MEDIAN_TOKENS))
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
    return factor if rest < error / 2 else None
