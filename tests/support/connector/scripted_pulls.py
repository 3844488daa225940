"""A session with a prefill engine whose pulls do what the test says: scripted pulls, and handshakes made by hand."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from pd_connector.orders import Cause, PullOrder
from pd_connector.worker import session as module
from pd_connector.worker.peer import Peer, PeerAddress
from pd_connector.worker.pull import AnyEnd
from pd_connector.worker.pull_end import PullEnd, PullFailed
from pd_connector.worker.quarantine import LostPull
from pd_connector.worker.session import PeerSession
from tests.support.connector.requests import a_prompt, a_remote
from tests.support.waiting import WAIT_S, until

REMOTE = a_remote(a_prompt(70))
ADDRESS = PeerAddress("engine-p", "10.0.0.5", 8998)

PullScript = Callable[["ScriptedPull"], None]


class ScriptedPull:
    """Does what the test says for its request, else shakes hands and ends well."""

    def __init__(
        self, world: "ScriptedSession", order: PullOrder, report: Callable[[AnyEnd], None], closing: Any
    ) -> None:
        self.world, self.order, self.report, self.closing = world, order, report, closing

    def run(self, meet: Callable[[float], Peer]) -> None:
        self.world.began.append(self.order.request_id)
        self.meet = meet
        self.world.scripts.get(self.order.request_id, ScriptedPull.end_well)(self)

    def end_well(self) -> None:
        self.meet(5.0)
        self.report(PullEnd(self.order.request_id))

    def fail(self, error: PullFailed) -> None:
        self.world.failing(error)
        self.report(PullEnd(self.order.request_id, error.cause, str(error)))

    def lose(self, error: BaseException) -> None:
        self.report(LostPull(self.order.request_id, str(error)))


class ScriptedPeer:
    """What a handshake returns, and the same engine with links for another lane."""

    plans = (0, 1)

    def __init__(self, world: "ScriptedSession") -> None:
        self.world = world
        self.closed = False
        self.opened: list[int] = []  # ranks

    def with_own_links(self) -> "ScriptedPeer":
        self.world.others.append(ScriptedPeer(self.world))
        return self.world.others[-1]

    def link(self, rank: int) -> None:
        self.world.opening(rank)
        self.opened.append(rank)

    def close(self) -> None:
        self.closed = True


class ScriptedSession:
    """A session, what its pulls are to do, and what they did."""

    def __init__(self) -> None:
        self.scripts: dict[str, PullScript] = {}
        self.began: list[str] = []
        self.ends: list[AnyEnd] = []
        self.peers: list[ScriptedPeer] = []
        self.others: list[ScriptedPeer] = []  # with links of lanes other than the first
        self.opening: Callable[[int], object] = lambda rank: None
        self.go_on = threading.Event()
        self.failed: list[PullFailed] = []
        self.failing: Callable[[PullFailed], None] = lambda error: None
        context: Any = None
        self.session = PeerSession(context, self.ends.append, ADDRESS)

    def connect_peer(self, *_: object) -> ScriptedPeer:
        self.peers.append(ScriptedPeer(self))
        return self.peers[-1]

    def submit(self, *request_ids: str) -> None:
        for request_id in request_ids:
            self.session.submit(PullOrder(request_id, REMOTE, ((1, 2),), 0, 32, f"pull of {request_id}"))

    def wait(self, pull: ScriptedPull) -> None:
        """A script: stand still until the test goes on."""
        assert self.go_on.wait(WAIT_S)
        pull.end_well()

    def ended(self) -> list[tuple[str, Cause]]:
        """How all that was submitted has ended, awaited."""
        until(lambda: self.session.idle)
        self.session.check_integrity()
        return [(end.request_id, end.cause) for end in self.ends if isinstance(end, PullEnd)]

    @property
    def lost(self) -> list[LostPull]:
        """Those whose clean-up failed."""
        return [end for end in self.ends if isinstance(end, LostPull)]

    def reasons(self) -> list[str]:
        return [end.reason for end in self.ends if isinstance(end, PullEnd)]


def raising(error: BaseException) -> PullScript:
    def script(pull: ScriptedPull) -> None:
        pull.meet(5.0)
        raise error

    return script


@contextmanager
def scripted_session(monkeypatch: pytest.MonkeyPatch, lanes: int) -> Iterator[ScriptedSession]:
    """A session that runs at most so many pulls at once; closed at the end."""
    monkeypatch.setattr(module, "LANES", lanes)
    world = ScriptedSession()
    monkeypatch.setattr(module, "Pull", lambda _, *rest: ScriptedPull(world, *rest))
    monkeypatch.setattr(module, "connect_peer", world.connect_peer)
    yield world
    world.go_on.set()
    world.session.close()
    assert world.session.join(WAIT_S)
