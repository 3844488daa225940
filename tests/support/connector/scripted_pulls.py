"""A session with a prefill engine whose pulls do what the test says: scripted pulls, and handshakes made by hand."""

import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any, cast

import pytest

from pd_connector.orders import Cause, PullOrder
from pd_connector.params import EngineAddress
from pd_connector.worker import session as module
from pd_connector.worker.peer import Peer
from pd_connector.worker.pull import AnyEnd
from pd_connector.worker.pull_end import PullEnd, PullFailed
from pd_connector.worker.quarantine import LostPull
from pd_connector.worker.session import PeerSession
from tests.support.connector.requests import a_prompt, a_remote
from tests.support.waiting import WAIT_S, until
from transfer.engine.interface import ReadFailed

REMOTE = a_remote(a_prompt(70))
ADDRESS = EngineAddress("engine-p", "10.0.0.5", 8998)

#: Returns what the pull waits for, if it has not ended.
PullScript = Callable[["ScriptedPull"], "Future[Any] | None"]


class ScriptedPull:
    """Does what the test says for its request, else shakes hands and ends well."""

    def __init__(
        self, world: "ScriptedSession", order: PullOrder, report: Callable[[AnyEnd], None], closing: Any
    ) -> None:
        self.world, self.order, self.report, self.closing = world, order, report, closing
        self.is_ahead = False
        self.answers: list[Future[Any]] = []  # that it has waited for

    @property
    def tokens_left(self) -> int:
        return self.order.end_token - self.order.first_token

    def run(self, meet: Callable[[float], Peer]) -> "Future[Any] | None":
        self.world.began.append(self.order.request_id)
        self.meet = meet
        return self.world.scripts.get(self.order.request_id, ScriptedPull.end_well)(self)

    def end_well(self) -> None:
        self.meet(5.0)
        self.report(PullEnd(self.order.request_id))

    def park(self) -> "Future[Any]":
        """Wait for an answer, which the test gives."""
        self.meet(5.0)
        self.answers.append(Future())
        self.world.questions.append(self.answers[-1])
        return self.answers[-1]

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
        self.let_go_of = 0  # times
        self.opened: list[int] = []  # ranks
        self.stale: list[int] = []  # of them, those whose links are

    @property
    def is_linked(self) -> bool:
        return sorted(self.opened) == [0, 1]

    def with_own_links(self) -> "ScriptedPeer":
        self.world.others.append(ScriptedPeer(self.world))
        return self.world.others[-1]

    def open_links(self, ranks: Iterable[int]) -> None:
        for rank in ranks:
            if rank not in self.opened:
                self.world.opening(rank)
                self.opened.append(rank)

    @property
    def has_stale_links(self) -> bool:
        return bool(self.stale)

    def drop_stale_links(self) -> None:
        while self.stale:
            self.drop_link(self.stale.pop())

    def let_go(self) -> None:
        self.let_go_of += 1

    def drop_link(self, rank: int) -> None:
        self.opened.remove(rank)

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
        self.questions: list[Future[Any]] = []  # of parked pulls
        self.failed: list[PullFailed] = []
        self.failing: Callable[[PullFailed], None] = lambda error: None
        context: Any = None
        self.session = PeerSession(context, self.ends.append, ADDRESS)

    def connect_peer(self, *_: object) -> ScriptedPeer:
        self.peers.append(ScriptedPeer(self))
        self.peers[-1].opened = [0, 1]
        return self.peers[-1]

    def submit(self, *request_ids: str, tokens: int = 32) -> None:
        for request_id in request_ids:
            self.session.submit(PullOrder(request_id, REMOTE, ((1, 2),), 0, tokens, f"pull of {request_id}"))

    def wait(self, pull: ScriptedPull) -> None:
        """A script: stand still until the test goes on."""
        assert self.go_on.wait(WAIT_S)
        pull.end_well()

    def ended(self) -> list[tuple[str, Cause]]:
        """How all that was submitted has ended, awaited; all lanes are free again."""
        until(lambda: self.session.idle)
        self.session.check_integrity()
        return [(end.request_id, end.cause) for end in self.ends if isinstance(end, PullEnd)]

    @property
    def lost(self) -> list[LostPull]:
        """Those whose clean-up failed."""
        return [end for end in self.ends if isinstance(end, LostPull)]

    def reasons(self) -> list[str]:
        return [end.reason for end in self.ends if isinstance(end, PullEnd)]


def losing_a_link(pull: ScriptedPull) -> None:
    """Fail with a read, as a pull does whose read has broken its link."""
    pull.meet(5.0).drop_link(1)
    raise PullFailed(Cause.READ, "a read failed")


def leaving_a_stale_link(pull: ScriptedPull) -> None:
    """End well, with links of which one is too old when the next pull comes."""
    peer = cast("ScriptedPeer", pull.meet(5.0))
    peer.stale = peer.opened[:1]
    pull.report(PullEnd(pull.order.request_id))


def needing_links(pull: ScriptedPull) -> None:
    """Fail if a link is missing and cannot be opened, as a pull does."""
    peer = pull.meet(5.0)
    try:
        peer.open_links(peer.plans)
    except ReadFailed as error:
        raise PullFailed(Cause.UNREACHABLE, str(error)) from error
    pull.report(PullEnd(pull.order.request_id))


def parking(times: int = 1, *, is_ahead: bool = True) -> PullScript:
    """A script: wait for so many answers. ``is_ahead``: whether the prompt is not complete even then."""

    def script(pull: ScriptedPull) -> Future[Any] | None:
        pull.is_ahead = is_ahead
        if len(pull.answers) < times:
            return pull.park()
        pull.end_well()
        return None

    return script


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
