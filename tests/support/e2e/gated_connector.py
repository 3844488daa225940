"""PDConnector whose workers stop where a test has closed a gate, for vLLM's ``kv_connector_module_path``."""

import os
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from layout.copies import Copies
from layout.geometry import Region
from pd_connector import PDConnector as Connector
from pd_connector.orders import LoadOrder, StoreOrder
from pd_connector.worker.host.device_copies import HostCopies
from pd_connector.worker.worker import ConnectorWorker
from tests.support.e2e.gates import DIRECTORY_VARIABLE, Gates, Place
from transfer.engine.interface import GivenUp, Link, TransferEngine, never


class PDConnector(Connector):
    """The connector, with gates in its worker."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._gates = Gates(Path(os.environ[DIRECTORY_VARIABLE]))
        worker = self._worker_side
        if isinstance(worker, ConnectorWorker):
            worker._make_engine = partial(_gated_engine, worker._make_engine, self._gates, worker)

    def register_kv_caches(self, kv_caches: Any) -> None:
        super().register_kv_caches(kv_caches)
        if self._worker._host is not None:
            _gate_copies(self._worker._host.copies, self._gates)

    def bind_connector_metadata(self, connector_metadata: Any) -> None:
        self._gates.pass_through("step")
        super().bind_connector_metadata(connector_metadata)


class _GatedLink:
    """A link that stops in the middle of its reads, and of those to host memory at their end. All else is its own."""

    def __init__(self, link: Link, gates: Gates, lands: Callable[[Copies], bool]) -> None:
        self._link, self._gates, self._lands = link, gates, lands

    def read(self, copies: Copies, timeout_s: float, later_bytes: int = 0, given_up: GivenUp = never) -> None:
        lands = self._lands(copies)
        half = -(-len(copies) // 2)
        self._link.read(copies[:half], timeout_s, later_bytes, given_up)
        self._gates.pass_through("landing" if lands else "pulling")
        if half < len(copies):
            self._link.read(copies[half:], timeout_s, later_bytes, given_up)
        if lands:
            self._gates.pass_through("unconfirmed")

    def __getattr__(self, name: str) -> Any:
        return getattr(self._link, name)


class _GatedEngine:
    """An engine whose links have gates. All else is the engine's own."""

    def __init__(self, engine: TransferEngine, gates: Gates, lands: Callable[[Copies], bool]) -> None:
        self._engine, self._gates, self._lands = engine, gates, lands

    def open(self, address: str, regions: Sequence[Region], identity: Any, given_up: Any) -> Any:
        return _GatedLink(self._engine.open(address, tuple(regions), identity, given_up), self._gates, self._lands)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)


def _gated_engine(make: Any, gates: Gates, worker: ConnectorWorker, config: Any) -> Any:
    return _GatedEngine(make(config), gates, partial(_lands, worker))


def _lands(worker: ConnectorWorker, copies: Copies) -> bool:
    """Return whether bytes arrive in host memory, or in the buffer through which they get there."""
    if worker._host is None or worker._landing_reads is None:
        return False
    regions = (worker._host.region, *worker._landing_reads.regions)
    address = int(copies.destinations[0])
    return any(region.address <= address < region.address + region.size for region in regions)


class _GateEvent:
    """Stands for the work of the device behind which a copy begins: it is done when the gate is open."""

    def __init__(self, gates: Gates, place: Place) -> None:
        self._gates, self._place = gates, place

    def query(self) -> bool:
        raise AssertionError("the copier of the CPU waits for events")

    def synchronize(self) -> None:
        self._gates.pass_through(self._place)


def _gate_copies(copies: HostCopies, gates: Gates) -> None:
    """Let loads, and stores of leases that move, wait at their gates on the copier's thread."""
    submit = copies._submit

    def submit_behind_gate(describe: Any, copier: Any, order: LoadOrder | StoreOrder) -> Any:
        place: Place | None = None
        if isinstance(order, LoadOrder):
            place = "loading"
        elif order.store_id < 0:  # of a lease
            place = "moving"
        copies._record_event = lambda: None if place is None else _GateEvent(gates, place)
        return submit(describe, copier, order)

    setattr(copies, "_submit", submit_behind_gate)  # noqa: B010  mypy lets no method be assigned
