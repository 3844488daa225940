"""Pulls between caches of all forms that are reshaped by the kernel; the caches' own oracles check every byte.

By Triton's interpreter, with the CPU taken for a device, and on a GPU if there is one.
"""

import random
from collections.abc import Iterator
from itertools import product
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.support.releases import INSTALLED, module_needs

if INSTALLED < (0, 30):
    module_needs((0, 30), "states of recurrent layers")

from tests.support.connector.staged_ranks import StagedRanks
from tests.support.connector.state_caches import MODELS, StateLayout
from tests.support.connector.state_pulls import pull_states
from tests.support.devices.kernel_devices import KERNEL_DEVICES, kernel_marks, pulls_by_kernel
from tests.support.layout.layout_pairs import layout_pairs
from tests.support.layout.oracle import LAYOUTS, WHOLE_HEADS, Engine, Model
from tests.support.layout.pulls import plain, pull, pull_rows
from tests.support.layout.strategies import FORMS, PP_SIZES, engines, few, models, requests

pytestmark = kernel_marks

every_layout_pair = pytest.mark.parametrize(("here", "there"), layout_pairs())


@pytest.fixture(params=KERNEL_DEVICES)
def device(request: pytest.FixtureRequest) -> Iterator[torch.device]:
    with pulls_by_kernel(request.param) as device:
        yield device


@pytest.fixture
def staged(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The bytes that were staged for each read."""
    return StagedRanks(device).replace_copies(monkeypatch).sizes


@pytest.mark.thorough
@pytest.mark.parametrize("sizes", [(2, 1), (3, 2)], ids=str)
@pytest.mark.parametrize("name", ["GDN", "Mamba2, one group"])
def test_states_are_in_place(name: str, sizes: tuple[int, int], staged: list[int], monkeypatch: Any) -> None:
    remote, local = sizes
    pull_states(MODELS[name], StateLayout(tp=local), StateLayout(tp=remote), monkeypatch)
    assert min(staged) > 0, staged


@pytest.mark.parametrize("layouts", [("LBNHC", "BLHNC"), ("BHLNC", "LBNHC")], ids="-".join)
def test_both_parts_of_mla_are_in_place(layouts: tuple[str, str], staged: list[int]) -> None:
    remote, local = (Engine(layout, "apart", blocks=12) for layout in layouts)
    pull(Model(1, (8, 1), 2, ((0, 1, 2),), (0,)), local, remote, plain(150, local, remote, "fragmented"))
    assert min(staged) > 0, staged


@pytest.mark.parametrize("remote_tp", [1, 2])
def test_compressed_rows_are_in_place(remote_tp: int, staged: list[int]) -> None:
    remote, local = Engine("LBNHC", tp=remote_tp, blocks=12), Engine("BLHNC", blocks=12)
    pull_rows(Model(2, (3, 5), 2, ((0, 1, 2),), (0,)), (local, remote), plain(150, local, remote, "fragmented"), 4, 3)
    assert min(staged) > 0, staged


@every_layout_pair
def test_blocks_of_unequal_sizes_in_every_pair_of_layouts(here: str, there: str, staged: list[int]) -> None:
    """130 tokens fill no number of blocks of any size."""
    model = Model(2, (2, 1), 2, ((0, 1),), (0,))
    for tokens, others in ((16, 48), (128, 32)):
        local = Engine(here, block_tokens=tokens, blocks=-(-130 // tokens) + 1)
        remote = Engine(there, tp=2, block_tokens=others, blocks=-(-130 // others) + 1)
        pull(model, local, remote, plain(130, local, remote, "fragmented"))
    assert min(staged) > 0, staged


@every_layout_pair
def test_sizes_of_which_neither_divides_the_other_in_every_pair_of_layouts(
    here: str, there: str, staged: list[int]
) -> None:
    model = Model(12, (2, 1), 1, ((0, 1),), (0,))
    for local_tp, remote_tp in ((2, 3), (6, 4)):
        local, remote = Engine(here, tp=local_tp, blocks=3), Engine(there, tp=remote_tp, blocks=3)
        pull(model, local, remote, plain(20, local, remote, "descending"))
    assert min(staged) > 0, staged


@pytest.mark.thorough
@pytest.mark.parametrize("local_pp", PP_SIZES)
@pytest.mark.parametrize("remote_pp", PP_SIZES)
def test_pipeline_stages(local_pp: int, remote_pp: int, staged: list[int]) -> None:
    model = Model(2, (2, 2), 2, ((0, 1, 2, 3),), (0,))
    for number, (here, there) in enumerate(product(("LBNHC", "BHLNC"), repeat=2)):
        local, remote = Engine(here, tp=1 + number % 2, pp=local_pp), Engine(there, tp=2, pp=remote_pp)
        pull(model, local, remote, plain(52, local, remote, "fragmented"))
    assert min(staged) > 0, staged


@pytest.mark.thorough
@pytest.mark.parametrize(("here", "there"), [*product(WHOLE_HEADS, repeat=2)])
def test_packed_heads(here: str, there: str, staged: list[int]) -> None:
    model = Model(4, (2, 2), 2, ((0, 1),), (0,))
    for tp, tokens in product((1, 2), (16, 32)):
        local = Engine(here, "packed", tp=tp, block_tokens=tokens)
        remote = Engine(there, "packed", tp=3 - tp, block_tokens=tokens)
        pull(model, local, remote, plain(50, local, remote, "fragmented"))
    assert min(staged) > 0, staged


@pytest.mark.slow
@pytest.mark.parametrize("layouts", [*product(LAYOUTS, repeat=2)], ids="-".join)
@few
@given(data=st.data())
def test_whatever_both_sides_are(layouts: tuple[str, str], data: st.DataObject, staged: list[int]) -> None:
    """Models, forms, sizes, prefix hits, windows, requests that are read in ranges."""
    model, forms = data.draw(models()), data.draw(st.sampled_from(FORMS))
    local, remote = (data.draw(engines(model, *side)) for side in zip(layouts, forms, strict=True))
    request = data.draw(requests(model, local, remote))
    pull(model, local, remote, request, cuts=random.Random(data.draw(st.integers(0, 99))))
