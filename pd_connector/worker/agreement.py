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
#: What is in a tensor of integers, by vLLM's setting, if these are not the numbers. Scaled: behind the codes of each
#: token and head follows their scale, a float32. There, a row has K and its scale, then V and its scale.
_FORMATS_OF_INTEGERS = {
    (torch.uint8, "fp8"): "fp8_e4m3",
    (torch.uint8, "fp8_e4m3"): "fp8_e4m3",
    (torch.uint8, "fp8_e5m2"): "fp8_e5m2",
    (torch.uint8, "fp8_per_token_head"): "fp8_e4m3_scaled",
    (torch.int8, "int8_per_token_head"): "int8_scaled",
}
_SCALE_BYTES = 4
#: Opaque planes of this packing hold numbers, K in the first half of a head's block and V in the second.
_CPU_PACKING = "cpu-"
#: A block of this packing has the codes of all tokens, and then their scales, if its rows have so many bytes.
_INDEXER_PACKING, _INDEXER_BYTES = "sparse_indexer", 128 + _SCALE_BYTES
#: MLA with so many bytes a row: the latent vector in tiles of 128 codes, the scales of the tiles, the rotary key in
#: bfloat16. Source: ``vllm.v1.attention.backends.mla.flashmla_sparse``.
_DS_MLA, _DS_MLA_BYTES, _LATENT, _TILE = "fp8_ds_mla", 656, 512, 128


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
    fp8, and so is what attention has computed from an fp8 cache, though it be kept in bfloat16 there. Scales of each
    token leave the errors of their numbers as they are. Bytes that nobody decodes are equal where both sides round to
    the same value, and else by chance only: ten times the rounding of a first layer changes 0.55 of them, the 0.65 that
    fp8 may grow to 0.91 (8 bits) to 0.96 (two numbers of 4 bits a byte), where unrelated values differ in 0.95 and more
    to 0.99. So behind the first layer, bytes of 8 bits tell only what did not arrive.

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
    "fp8_e4m3_scaled": _Tolerance(0.1, 0.2, 0.35, 0.65),
    "int8_scaled": _Tolerance(0.1, 0.2, 0.35, 0.65),
    "bfloat16_beside_fp8": _Tolerance(0.06, 0.15, 0.35, 0.65),
    "bytes": _Tolerance(0.6, 0.8, 0.975, 0.975),
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


def cache_format(tensor_dtype: torch.dtype, cache_dtype: str, plane: Plane) -> str:
    """Return the format of a layer's cache: a key of the tolerances or ``_DS_MLA``; "bytes" if its form is not known.

    Args:
        tensor_dtype: of the layer's tensor.
        cache_dtype: vLLM's setting, as ``CacheConfig.cache_dtype``; it says what is in a tensor of bytes.
        plane: with the layer.
    """
    row_bytes = plane.content * plane.item_size
    if plane.packing == _INDEXER_PACKING and tensor_dtype == torch.uint8:
        # A block of compressed rows has several pages, each with its scales, and only the kernel knows how many.
        return "fp8_e4m3_scaled" if row_bytes == _INDEXER_BYTES and plane.tokens_per_row == 1 else "bytes"
    if plane.packing and not plane.packing.startswith((_CPU_PACKING, _INDEXER_PACKING)):
        return "bytes"
    if (tensor_dtype, cache_dtype, row_bytes) == (torch.uint8, _DS_MLA, _DS_MLA_BYTES):
        return _DS_MLA
    return _FORMATS_OF_INTEGERS.get((tensor_dtype, cache_dtype)) or _FORMATS.get(tensor_dtype, "bytes")


def plane_samples(
    plane: Plane, form: str, depths: Mapping[str, int], computed: PlaneValues, pulled: PlaneValues
) -> Iterator[Sample]:
    """Yield a sample for each layer of ``plane`` and part in it, of the tokens that both sides hold.

    Args:
        plane: of which ``computed`` and ``pulled`` were read; their ranges of tokens are equal.
        form: as ``cache_format`` says.
        depths: place among the model's attention layers, by layer name.
        computed, pulled: what the two caches hold.
    """
    held = computed.held & pulled.held
    for number, layer in enumerate(plane.layers):
        sides = (_parts(plane, form, side.data[number, held]) for side in (computed, pulled))
        for (part, of_part, here), (_, _, there) in zip(*sides, strict=True):
            yield Sample(layer, depths[layer], part, of_part, here, there)


def _parts(plane: Plane, form: str, rows: UInt8Array) -> list[tuple[str, str, UInt8Array]]:
    """Return what ``rows`` [tokens, heads, bytes] have of each part: name, format, and rows of it."""
    if plane.packing.startswith(_CPU_PACKING):
        return [(part, form, half) for part, half in zip("kv", _halves(rows, plane.block_tokens), strict=True)]
    if form == _DS_MLA:
        tiles, of_token = _LATENT // _TILE, (len(rows), _LATENT // _TILE * rows.shape[1])
        codes, scales, rope = np.split(rows, [_LATENT, _LATENT + tiles * _SCALE_BYTES], axis=2)
        latent = np.concatenate([codes.reshape(*of_token, _TILE), scales.reshape(*of_token, _SCALE_BYTES)], axis=2)
        return [("mla_latent", "fp8_e4m3_scaled", latent), ("mla_rope", "bfloat16_beside_fp8", rope)]
    if form not in _SCALED:
        return [(plane.part, form, rows)]
    if plane.packing == _INDEXER_PACKING:
        return [(plane.part, form, _scales_in_rows(rows, plane.block_tokens))]
    return [(part, form, half) for part, half in zip("kv", np.split(rows, 2, axis=2), strict=True)]


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
    blocks = _blocks(rows, block_tokens).reshape(-1, heads, 2, block_tokens, size // 2)
    first, second = (blocks[:, :, half].transpose(0, 2, 1, 3).reshape(-1, heads, size // 2) for half in (0, 1))
    return first, second


def _scales_in_rows(rows: UInt8Array, block_tokens: int) -> UInt8Array:
    """Return ``rows`` [tokens, heads, bytes], of blocks with all codes before all scales, with each token's own."""
    _, heads, size = rows.shape
    codes, scales = np.split(_blocks(rows, block_tokens), [block_tokens * (size - _SCALE_BYTES)], axis=2)
    by_token = [part.reshape(-1, heads, block_tokens, part.shape[2] // block_tokens) for part in (codes, scales)]
    return np.concatenate(by_token, axis=3).transpose(0, 2, 1, 3).reshape(-1, heads, size)


def _blocks(rows: UInt8Array, block_tokens: int) -> UInt8Array:
    """Return whole blocks in ``rows`` [tokens, heads, bytes] in the order of memory: [blocks, heads, bytes]."""
    _, heads, size = rows.shape
    by_block = rows.reshape(-1, block_tokens, heads, size).transpose(0, 2, 1, 3)
    return by_block.reshape(-1, heads, block_tokens * size)


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


def _bfloat16(data: UInt8Array) -> FloatArray:
    return (data.view(np.uint16).astype(np.uint32) << 16).view(np.float32).astype(np.float64)


#: How a format's items are decoded. By numpy: torch would take the threads that the model computes with.
_DECODE: Mapping[str, Callable[[UInt8Array], FloatArray]] = {
    "bfloat16": _bfloat16,
    "bfloat16_beside_fp8": _bfloat16,
    "float16": lambda data: data.view(np.float16).astype(np.float64),
    "float32": lambda data: data.view(np.float32).astype(np.float64),
    "int8": lambda data: data.view(np.int8).astype(np.float64),
    **{
        name: partial(np.take, _numbers_of_bytes(dtype))
        for name, dtype in (("fp8_e4m3", torch.float8_e4m3fn), ("fp8_e5m2", torch.float8_e5m2))
    },
}
#: Formats in which a scale follows the codes of a token and head, and that of the codes.
_SCALED = {"fp8_e4m3_scaled": "fp8_e4m3", "int8_scaled": "int8"}


def _values(sample: Sample) -> tuple[FloatArray, FloatArray]:
    """Return both sides as numbers: [tokens, heads * items]."""
    with np.errstate(invalid="ignore"):  # what is not a number stays none
        ours, theirs = (
            _decoded(np.ascontiguousarray(side), sample.format).reshape(len(side), -1)
            for side in (sample.computed, sample.pulled)
        )
    return ours, theirs


def _decoded(rows: UInt8Array, form: str) -> FloatArray:
    """Return the numbers in ``rows`` [tokens, heads, bytes]: [tokens, heads, items]."""
    if form not in _SCALED:
        return _DECODE[form](rows)
    codes, scales = np.split(rows, [-_SCALE_BYTES], axis=2)
    return _DECODE[_SCALED[form]](codes) * scales.view(np.float32).astype(np.float64)


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
