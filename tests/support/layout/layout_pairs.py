"""Pairs of layouts for tests of every pair: some in every run, the others slow."""

from itertools import product

import pytest
from _pytest.mark.structures import ParameterSet

from tests.support.layout.oracle import LAYOUTS

#: Each layout on either side, and with each other those that vLLM chooses by itself.
_ALWAYS = {
    *zip(LAYOUTS, (*LAYOUTS[1:], LAYOUTS[0]), strict=True),
    *(("LBHNC", "LBHNC"), ("BHLNC", "BHLNC"), ("LBHNC", "BHLNC")),
    *(("LBNHC", "BHLNC"), ("BLHNC", "LHBNC"), ("BLNHC", "LBNHC")),
}


def layout_pairs() -> list[ParameterSet]:
    """All pairs of layouts, as parameters."""
    return [
        pytest.param(*pair, marks=() if pair in _ALWAYS else pytest.mark.slow) for pair in product(LAYOUTS, repeat=2)
    ]
