"""A rank of the oracle with host slots, and the objects of the blocks in them."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from layout.block_objects import object_forms
from layout.geometry import Region
from layout.host_blocks import HostLayout, host_layout
from layout.host_slots import slot_geometry
from tests.support.layout.oracle import Rank, Table
from transfer.copies.reshape.reshape import run_copies
from transfer.store.slot_objects import KEY_BYTES, SlotObjects

OBJECT_SECRET = bytes(range(KEY_BYTES))
_SLOTS = 8
_GUARD_BYTES = 64


class HostSlots:
    """A rank's slots, and the objects of the blocks in them. The block ``entry`` of group g is in slot g + 2 entry."""

    def __init__(self, rank: Rank) -> None:
        self.rank = rank
        self.layout: HostLayout = host_layout(rank.geometry)
        self.memory = np.random.default_rng(3).integers(
            0, 256, _SLOTS * self.layout.slot_bytes + 2 * _GUARD_BYTES, np.uint8
        )
        self.region = Region(self.memory.ctypes.data + _GUARD_BYTES, _SLOTS * self.layout.slot_bytes)
        forms = object_forms(slot_geometry(rank.geometry, self.layout, self.region))
        assert [[form.digest for form in group] for group in forms] == [
            [form.digest for form in group] for group in object_forms(rank.geometry)
        ], "the scheduler side names objects otherwise, which does not know the slots"
        self.forms = forms
        self.objects = [[SlotObjects(form, OBJECT_SECRET) for form in group] for group in forms]

    def slot(self, group: int, entry: int) -> int:
        return group + 2 * entry

    def copy(self, tables: Sequence[Table], *, to_host: bool) -> None:
        """Copy all blocks of the tables between the device and their slots."""
        shift = self.rank.memory.ctypes.data - self.rank.base
        for number, group in enumerate(self.rank.group_order):
            if not self.rank.geometry.groups[number].planes:
                continue
            slots = [self.slot(group, entry) for entry in range(len(tables[group].ids))]
            move = self.layout.stores if to_host else self.layout.loads
            copies = move(self.region, number, np.array(tables[group].ids), np.array(slots))
            if to_host:
                run_copies(replace(copies, sources=copies.sources + shift))
            else:
                run_copies(replace(copies, destinations=copies.destinations + shift))

    def names(self, tables: Sequence[Table]) -> "list[tuple[SlotObjects, int, int, str]]":
        """All objects of all blocks: their form, slot, share and key."""
        return [
            (objects, self.slot(group, entry), share, objects.form.key("ns", share, bytes([group, entry])))
            for number, group in enumerate(self.rank.group_order)
            for objects in self.objects[number]
            for entry in range(len(tables[group].ids))
            for share in objects.form.held
        ]
