"""Covers: the order of names. Forms are tested with the bytes of objects, in ``transfer/store/test_slot_objects``."""

from layout.block_objects import _natural


def test_numbers_in_names_are_in_order_of_their_value() -> None:
    names = ["model.layers.10.attn", "model.layers.9.attn", "model.layers.9.mamba", "model.layers.100.attn"]
    assert sorted(names, key=_natural) == [names[1], names[2], names[0], names[3]]
