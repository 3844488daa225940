"""What is compared of two loaded models: values with a tolerance, where both sides have them."""

import math
from collections.abc import Callable

import pytest

from layout.layer_numbers import ROTARY, ROTARY_POSITIONS, LayerNumbers, differences, merged

WIDTH = 8
FREQUENCIES = (1.0, 0.1, 0.01, 0.001)


def table(factor: float = 1.0, stretch: float = 1.0, rows: int = len(ROTARY_POSITIONS)) -> LayerNumbers:
    """A rotary table whose values are multiplied by ``factor``, and its frequencies by ``stretch``."""
    numbers = [
        factor * function(position * frequency * stretch)
        for position in ROTARY_POSITIONS[:rows]
        for function in (math.cos, math.sin)
        for frequency in FREQUENCIES
    ]
    return LayerNumbers(f"{ROTARY} rotary_emb", ("l0", "l1"), tuple(numbers), WIDTH)


def texts(ours: LayerNumbers, theirs: LayerNumbers) -> list[str]:
    return [difference.text for difference in differences((ours,), (theirs,))]


def test_what_differs_is_named_once_with_its_layer_and_both_values() -> None:
    (text,) = texts(LayerNumbers("k_scale", ("l0", "l1"), (0.5,)), LayerNumbers("k_scale", ("l1", "l0"), (0.25,)))
    assert text == "the k_scale of layer 'l0' has 0.5 here and 0.25 there"


def test_of_a_rotary_table_the_place_that_differs_most_is_named() -> None:
    (text,) = texts(table(), table(factor=1.2773))
    assert text.startswith("the rotary table rotary_emb of layer 'l0' has cos ")
    assert "of 4 at position" in text
    (text,) = texts(table(), table(stretch=1.01))
    assert "has sin 0 of 4 at position 256 = -0.999208 here and 0.813068 there" in text


@pytest.mark.parametrize("round_", [lambda value: value, lambda value: round(value * 256) / 256])
@pytest.mark.parametrize("stretch", [1.0, 1 + 1e-5])
@pytest.mark.parametrize("factor", [1.0, 1.2773])
def test_rounding_and_a_frequency_computed_otherwise_are_no_difference(
    factor: float, stretch: float, round_: Callable[[float], float]
) -> None:
    """bfloat16 has steps of 1/256 below 1; frequencies come from a power in float32."""
    rounded = tuple(round_(value) for value in table(factor, stretch).numbers)
    assert texts(table(factor), LayerNumbers(f"{ROTARY} rotary_emb", ("l0",), rounded, WIDTH)) == []


@pytest.mark.parametrize("factor", [1.03, 1.1386, 1.2773])
@pytest.mark.parametrize("rows", [1, 5])
def test_another_factor_is_seen_in_short_tables_too(factor: float, rows: int) -> None:
    assert texts(table(rows=rows), table(factor))
    assert texts(table(), table(factor, rows=rows))


def test_rows_that_one_side_does_not_have_are_not_compared() -> None:
    """A table is as long as the model's positions, of which one side may have fewer."""
    assert texts(table(rows=3), table()) == []
    assert texts(table(), table(rows=3)) == []
    assert texts(table(rows=0), table(2.0)) == []


def test_tables_of_other_widths_differ() -> None:
    (text,) = texts(table(), LayerNumbers(f"{ROTARY} rotary_emb", ("l0",), (1.0,) * 4, 4))
    assert "has 8 values a position here and 4 there" in text


def test_what_only_one_side_knows_is_not_compared() -> None:
    assert texts(table(), LayerNumbers("k_scale", ("l0",), (0.5,))) == []
    assert texts(LayerNumbers("k_scale", ("l7",), (1.0,)), LayerNumbers("k_scale", ("l0",), (0.5,))) == []


@pytest.mark.parametrize(("other", "differs"), [(0.5, 0), (0.50001, 0), (0.502, 1), (-0.5, 1), (0.0, 1), (math.nan, 1)])
def test_a_scale_is_compared_in_proportion(other: float, differs: int) -> None:
    assert len(texts(LayerNumbers("k_scale", ("l0",), (0.5,)), LayerNumbers("k_scale", ("l0",), (other,)))) == differs


@pytest.mark.parametrize("theirs", [(), (1.0, 2.0, 3.0)])
def test_another_number_of_values_is_a_difference(theirs: tuple[float, ...]) -> None:
    (text,) = texts(LayerNumbers("k_scale", ("l0",), (1.0, 2.0)), LayerNumbers("k_scale", ("l0",), theirs))
    assert text.endswith(f"has 2 values here and {len(theirs)} there")


def test_more_rows_than_there_are_positions_are_not_looked_at() -> None:
    """A peer says what it likes."""
    far = LayerNumbers(f"{ROTARY} rotary_emb", ("l0",), table().numbers * 3, WIDTH)
    assert texts(table(), far) == []


def test_what_workers_have_in_common_stands_once() -> None:
    ranks = [LayerNumbers("k_scale", ("l0", "l1"), (0.5,)), LayerNumbers("k_scale", ("l1", "l2"), (0.5,))]
    other = LayerNumbers("k_scale", ("l3",), (0.7,))
    assert merged([*ranks, other]) == (LayerNumbers("k_scale", ("l0", "l1", "l2"), (0.5,)), other)
