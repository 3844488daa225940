"""States that are pulled to host memory, that of a border and that after all tokens, and loaded from there."""

from typing import Any

import numpy as np
import pytest

from tests.support.releases import INSTALLED, module_needs

if INSTALLED < (0, 30):
    module_needs((0, 30), "states of recurrent layers")

from layout.geometry import Region
from layout.host_blocks import host_layout
from layout.host_slots import host_block_geometry
from layout.plan import compile_plans
from layout.sharding import choose_sources
from tests.support.connector.state_caches import GDN, MAMBA2, SHORT_CONV, StateLayout, StateModel, fill, ranks
from tests.support.connector.state_pulls import STATE_TOKENS, state_table
from transfer.copies.reshape.reshape import run_copies

BORDER = STATE_TOKENS // 32 * 32
THEIRS = {BORDER: 1, STATE_TOKENS: 4}
LANDED = {BORDER: 3, STATE_TOKENS: 2}  # blocks of the host pool, of which block 0 is none
SLOTS = 4


@pytest.mark.parametrize("model", [GDN, MAMBA2, SHORT_CONV], ids=["GDN", "Mamba2", "short convolution"])
@pytest.mark.parametrize("sizes", [(1, 1), (2, 3), (3, 2)], ids=str)
@pytest.mark.parametrize("is_together", [False, True])
def test_both_states_land_and_come_to_the_device(
    model: StateModel, sizes: tuple[int, int], is_together: bool, monkeypatch: Any
) -> None:
    here = StateLayout(tp=sizes[0], blocks_outermost=is_together, padding=32)
    there = StateLayout(tp=sizes[1], is_column_first=True)
    senders = ranks(model, there, monkeypatch)
    fill(senders, THEIRS, model)
    theirs = [sender.geometry for sender in senders]
    for reader in ranks(model, here, monkeypatch):
        before, layout = reader.memory.copy(), host_layout(reader.geometry)
        pool = np.zeros(SLOTS * layout.slot_bytes, np.uint8)
        region = Region(pool.ctypes.data, pool.nbytes)
        local = host_block_geometry(reader.geometry, layout, region)
        for plan in compile_plans(local, theirs, choose_sources(local, theirs)).values():
            tables = [state_table(LANDED, here)], [state_table(THEIRS, there)]
            assert not plan.lacking_states(*tables, STATE_TOKENS)
            run_copies(plan.instantiate_states(*tables, STATE_TOKENS))
        assert np.array_equal(reader.memory, before), "a landing writes to the device"
        unused = {*range(SLOTS)} - {block - 1 for block in LANDED.values()}
        assert not pool.reshape(SLOTS, -1)[sorted(unused)].any(), "a landing writes outside its slots"
        for tokens, block in LANDED.items():
            run_copies(layout.loads(region, 0, [5], [block - 1]))
            places, values = reader.bytes_of(5, model.state(tokens))
            assert np.array_equal(reader.memory[places], values)
