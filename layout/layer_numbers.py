"""Numbers that the layers of a loaded model compute with, and how two engines' numbers are compared.

Equal configuration files may be built into models that compute something else: a rotary table depends on options of the
engine and on the release. So each engine reads such numbers off the model that it has loaded. They are compared with a
tolerance, because data types, devices and releases round otherwise.
"""

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

#: Begins the names of rotary tables, which have a row for each of ``ROTARY_POSITIONS`` that the table has.
ROTARY = "rotary table"
#: Whether a layer scales its queries by their positions, beyond a length: 1 or 0. Llama 4 does.
TEMPERATURE = "attention temperature tuning"
#: Positions in a prompt. Tables differ in length, so only the rows that both have are compared. Small positions show a
#: factor on the whole table and the high frequencies, large ones the low frequencies.
ROTARY_POSITIONS = (1, 4, 16, 64, 256, 1024, 4096)

# Of a value in a table of factor 1: twice the rounding of bfloat16, and an angle of a frequency computed otherwise.
_ROTARY_ROUNDING = 0.01
_ROTARY_ANGLE = 2e-5  # for each position
_RELATIVE = 1e-3  # of all other numbers


@dataclass(frozen=True, slots=True)
class LayerNumbers:
    """Numbers of one kind that some layers have in common."""

    name: str  # what they are, in words: "k_scale", or "rotary table rotary_emb"
    layers: tuple[str, ...]
    numbers: tuple[float, ...]
    width: int = 0  # of a row: cosines, then as many sines. 0 if these are no rows


@dataclass(frozen=True, slots=True)
class Difference:
    """A number that two engines do not agree on."""

    name: str
    text: str  # which number of which layer, and both values


def merged(parts: Iterable[LayerNumbers]) -> tuple[LayerNumbers, ...]:
    """Return the numbers of several workers as those of their engine; what layers have in common stands once."""
    layers: dict[tuple[str, tuple[float, ...], int], dict[str, None]] = {}
    for part in parts:
        layers.setdefault((part.name, part.numbers, part.width), {}).update(dict.fromkeys(part.layers))
    return tuple(LayerNumbers(name, tuple(held), numbers, width) for (name, numbers, width), held in layers.items())


def differences(local: Iterable[LayerNumbers], remote: Iterable[LayerNumbers]) -> Iterator[Difference]:
    """Return what differs, once for each name and pair of values. What only one side knows of is not compared."""
    theirs = _by_layer(remote)
    told: set[tuple[int, int]] = set()
    for part in local:
        for layer in part.layers:
            other = theirs.get((part.name, layer))
            if other is None or (id(part), id(other)) in told:
                continue
            told.add((id(part), id(other)))
            if (text := _difference(part, other)) is not None:
                yield Difference(part.name, f"the {part.name} of layer {layer!r} {text}")


def _by_layer(parts: Iterable[LayerNumbers]) -> Mapping[tuple[str, str], LayerNumbers]:
    return {(part.name, layer): part for part in parts for layer in part.layers}


def _difference(ours: LayerNumbers, theirs: LayerNumbers) -> str | None:
    """Say how the numbers differ; None if they do not."""
    if ours.width != theirs.width:
        return f"has {ours.width} values a position here and {theirs.width} there"
    if not ours.width and len(ours.numbers) != len(theirs.numbers):
        return f"has {len(ours.numbers)} values here and {len(theirs.numbers)} there"
    worst, text = 1.0, None
    for index, (one, other) in enumerate(zip(ours.numbers, theirs.numbers, strict=False)):
        excess = abs(one - other) / _tolerance(index, one, other, ours.width)
        if not excess <= worst:  # NaN included
            worst = math.inf if math.isnan(excess) else excess
            text = f"has {_place(index, ours)}{one:g} here and {other:g} there"
    return text


def _tolerance(index: int, one: float, other: float, width: int) -> float:
    largest = max(abs(one), abs(other))
    if not width:
        return max(_RELATIVE * largest, math.ulp(0.0))
    return _ROTARY_ROUNDING * max(1.0, largest) + _ROTARY_ANGLE * ROTARY_POSITIONS[index // width]


def _place(index: int, part: LayerNumbers) -> str:
    """Return what a number is, in words, before its value."""
    if not part.width:
        return ""
    row, column = divmod(index, part.width)
    function, pair = ("cos", column) if column < part.width // 2 else ("sin", column - part.width // 2)
    return f"{function} {pair} of {part.width // 2} at position {ROTARY_POSITIONS[row]} = "
