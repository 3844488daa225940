"""States of recurrent layers as objects, between engines of other sizes: every byte, by a second opinion."""

from typing import Any

import numpy as np
import pytest

from tests.support.releases import INSTALLED, module_needs

if INSTALLED < (0, 30):
    module_needs((0, 30), "states of recurrent layers")

from layout.block_objects import object_forms
from layout.geometry import Region
from layout.host_blocks import host_layout
from layout.host_slots import slot_geometry
from tests.support.connector.state_caches import MODELS, StateLayout, StateModel, StateRank, ranks
from transfer.copies.reshape.reshape import run_copies
from transfer.store.slot_objects import KEY_BYTES, SlotObjects

SECRET = bytes(range(KEY_BYTES))
TOKENS, THERE, HERE = 64, 1, 4  # of the state; the blocks that it lies in
SLOT, SLOTS = 2, 4


class Slots:
    """A rank's host slots, and the objects of its states in one of them."""

    def __init__(self, rank: StateRank) -> None:
        self.layout = host_layout(rank.geometry)
        self.memory = np.zeros(SLOTS * self.layout.slot_bytes, np.uint8)
        self.region = Region(self.memory.ctypes.data, self.memory.nbytes)
        ((*forms,),) = object_forms(slot_geometry(rank.geometry, self.layout, self.region))
        self.objects = [SlotObjects(form, SECRET) for form in forms]
        self.names = [
            (objects, share, objects.form.key("ns", share, b"a block"))
            for objects in self.objects
            for share in objects.form.held
        ]


def put(sender: StateRank, kept: dict[str, np.ndarray]) -> None:
    slots = Slots(sender)
    run_copies(slots.layout.stores(slots.region, 0, [THERE], [SLOT]))
    for objects, share, key in slots.names:
        sealed = np.zeros(objects.sealed_bytes, np.uint8)
        objects.seal(SLOT, share, key, sealed)
        kept.setdefault(key, sealed)


def fetch(reader: StateRank, kept: dict[str, np.ndarray]) -> None:
    slots = Slots(reader)
    for objects, share, key in slots.names:
        assert objects.is_sealed(key, kept[key])
        objects.unpack(kept[key], SLOT, share)
    assert not np.delete(slots.memory.reshape(SLOTS, -1), SLOT, 0).any(), "an object was written outside its slot"
    run_copies(slots.layout.loads(slots.region, 0, [HERE], [SLOT]))


@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS.keys())
@pytest.mark.parametrize(("writers", "readers"), [(1, 1), (4, 1), (1, 4), (2, 3), (3, 2), (8, 6)])
@pytest.mark.parametrize("is_together", [False, True])
def test_a_state_arrives_with_every_byte_in_its_place(
    model: StateModel, writers: int, readers: int, is_together: bool, monkeypatch: Any
) -> None:
    there = StateLayout(tp=writers, padding=32 * is_together)
    here = StateLayout(tp=readers, blocks_outermost=is_together)
    kept: dict[str, np.ndarray] = {}
    for sender in ranks(model, there, monkeypatch):
        sender.fill(THERE, model.state(TOKENS))
        put(sender, kept)
    for reader in ranks(model, here, monkeypatch):
        places, values = reader.bytes_of(HERE, model.state(TOKENS))
        expected = reader.memory.copy()
        expected[places] = values
        fetch(reader, kept)
        assert np.array_equal(reader.memory, expected)
