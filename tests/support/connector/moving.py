"""A prefill engine whose leases lie in host memory, byte by byte."""

from typing import Any

import numpy as np

from layout.geometry import Region
from layout.host_blocks import HostLayout, host_layout
from layout.host_slots import slot_geometry
from pd_connector.params import RemotePrefill
from pd_connector.scheduler.prefill.leases import Tables
from tests.support.connector.engines import MODEL, PREFILL, PrefillEngine, Site
from tests.support.layout.oracle import Engine, Model
from tests.support.memory import Bytes
from transfer.copies.reshape.reshape import run_copies

HOST_SLOTS = 9
#: Slots for the blocks of ``THEIRS``.
IN_HOST: Tables = ((7, 0, 4, 8, 1),)


class MovingEngine:
    """A prefill engine with host memory that decode engines may read."""

    def __init__(self, site: Site, engine: Engine = PREFILL, model: Model = MODEL, **options: Any) -> None:
        self.prefill: PrefillEngine = site.prefill(engine, model=model, **options)
        self.pools: list[tuple[HostLayout, Bytes]] = []
        host = []
        for rank, transfer in zip(self.prefill.ranks, self.prefill.engines, strict=True):
            layout = host_layout(rank.geometry)
            memory = np.full(HOST_SLOTS * layout.slot_bytes, 0xEE, np.uint8)
            pool = Region(memory.ctypes.data, memory.nbytes)
            transfer.register((pool,))
            host.append(slot_geometry(rank.geometry, layout, pool))
            self.pools.append((layout, memory))
        service = self.prefill.service
        service._workers = ()  # as before they were set
        service.set_workers(tuple(rank.geometry for rank in self.prefill.ranks), tuple(host))

    def copy(self, blocks: Tables, slots: Tables) -> None:
        """Copy blocks to slots on every rank, and overwrite the blocks, as those who get them do."""
        for rank, (layout, memory) in zip(self.prefill.ranks, self.pools, strict=True):
            pool = Region(memory.ctypes.data, memory.nbytes)
            for group, (ids, places) in enumerate(zip(blocks, slots, strict=True)):
                held = [(block, slot) for block, slot in zip(ids, places, strict=True) if block]
                run_copies(layout.stores(pool, group, [block for block, _ in held], [slot for _, slot in held]))
            rank.memory[:] = 0xAA

    def move(self, remote: RemotePrefill, blocks: Tables, slots: Tables) -> str | None:
        """Copy a lease and let it point there; what it held."""
        self.copy(blocks, slots)
        places = [
            pair for ids, held in zip(blocks, slots, strict=True) for pair in zip(ids, held, strict=True) if pair[0]
        ]
        assert len(dict(places)) == len(places), "cache groups share a block"
        return self.prefill.leases.move(remote.lease_id, "slots", dict(places))
