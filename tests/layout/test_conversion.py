"""The line about what is converted says what differs, and nothing that does not."""

from dataclasses import replace

import pytest

from layout.conversion import describe_conversion, physical_order
from tests.support.layout.oracle import LAYOUTS, Engine, Model, build
from tests.support.layout.pulls import LOCAL_BASE, REMOTE_BASE, plans_of

MODEL = Model(4, (2, 2), 2, ((0, 1),), (0,))


def described(local: Engine, remote: Engine) -> str:
    ours = build(MODEL, local, 1, LOCAL_BASE)[0].geometry
    theirs = [rank.geometry for rank in build(MODEL, remote, 1, REMOTE_BASE)]
    return describe_conversion(ours, theirs, plans_of(ours, theirs))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_physical_order_is_the_layouts_name(layout: str) -> None:
    (plane,) = build(MODEL, Engine(layout), 1, LOCAL_BASE)[0].geometry.groups[0].planes
    assert physical_order(plane) == layout


def test_equal_engines_convert_nothing() -> None:
    # 2 layers, 4 heads, 16 tokens, 4 items of 2 bytes
    expected = "the same geometry; 1024 bytes in 1 runs for each 16 tokens, before neighbours are joined"
    assert described(Engine("BHLNC"), Engine("BHLNC")) == expected


def test_what_differs_is_named_with_both_values_remote_first() -> None:
    local, remote = Engine("LBHNC", block_tokens=32), Engine("BHLNC", tp=2, pp=2)
    line = described(local, remote)
    assert line.startswith("TP 2 to 1, PP 2 to 1, block size 16 to 32; 1024 bytes in 8 runs")  # a stage has one layer
    assert described(Engine("LBHNC"), Engine("BHLNC", tp=2)).startswith("TP 2 to 1, order BHLNC to LBHNC;")


def test_draft_layers_that_are_not_there_are_named_with_what_follows() -> None:
    engine = Engine("BHLNC")
    ours = build(replace(MODEL, drafts=(1,)), engine, 1, LOCAL_BASE)[0].geometry
    (theirs,) = (rank.geometry for rank in build(replace(MODEL, groups=((0,),)), engine, 1, REMOTE_BASE))
    line = describe_conversion(ours, [theirs], plans_of(ours, [theirs]))
    assert line.startswith("the same geometry; 512 bytes in 1 runs")
    assert "layers model.layers.1 draft tokens and are not there" in line


def test_k_transposed_shows_in_the_order() -> None:
    assert "order LBHCN/LBHNC to LBHNC;" in described(Engine("LBHNC", "views"), Engine("LBHNC", "transposed"))
