"""What the tests of pulls build, and the order in which it is taken down."""

from dataclasses import replace
from typing import Any, TypeVar

from pd_connector.params import RemotePrefill
from pd_connector.worker.peer import PeerAddress, PullContext
from pd_connector.worker.pull_end import PullEnd
from pd_connector.worker.session import PeerSession
from tests.layout.oracle import Engine, Model
from tests.pd_connector.engines import (
    DECODE,
    MODEL,
    PREFILL,
    Blocks,
    DecodeWorker,
    PrefillEngine,
    an_order,
    decode_workers,
)
from tests.support.in_process_engine import InProcessFabric

THEIRS: Blocks = ((5, 6, 3, 9, 2),)  # of a prompt of 70 tokens on the prefill engine
OURS: Blocks = ((1, 2, 8, 3, 11),)

Closable = TypeVar("Closable")


class Site:
    """What a test builds, closed in the right order after it."""

    def __init__(self) -> None:
        self.fabric = InProcessFabric()
        self._open: list[Any] = []
        self._sessions: list[PeerSession] = []

    def add(self, thing: Closable) -> Closable:
        """Close ``thing`` after the test."""
        self._open.append(thing)
        return thing

    def prefill(self, engine: Engine = PREFILL, **options: Any) -> PrefillEngine:
        return self.add(PrefillEngine(self.fabric, engine, **options))

    def decode(self, engine: Engine = DECODE, model: Model = MODEL) -> list[DecodeWorker]:
        return [self.add(worker) for worker in decode_workers(self.fabric, engine, model)]

    def session(self, worker: DecodeWorker, remote: RemotePrefill, **changes: Any) -> PeerSession:
        """A session with the engine that ``remote`` names; ``changes`` are made to its context, or to ``settle``."""
        settle = changes.pop("settle", worker.ends.put)
        context: PullContext = replace(worker.context(), **changes)
        address = PeerAddress(remote.remote_engine_id, remote.remote_host, remote.remote_port)
        session = PeerSession(context, settle, address)
        self._sessions.append(session)
        return session

    def close(self) -> None:
        for session in self._sessions:
            session.check_integrity()
            session.close()
        stuck = [session for session in self._sessions if not session.join(10.0)]
        for thing in reversed(self._open):
            thing.close()
        assert not stuck


def pull_once(site: Site, remote: RemotePrefill, worker: DecodeWorker | None = None, **changes: Any) -> PullEnd:
    """The end of one pull into ``OURS``; ``changes`` are made to what the prefill engine answered."""
    worker = worker or site.decode()[0]
    order = an_order("r", remote, OURS, **changes)
    site.session(worker, order.remote).submit(order)
    end = worker.next_end()
    assert end.request_id == "r"
    return end
