"""What a prefill engine answers about named prompts, over the real control channel where it matters.

Covers: pd_connector.scheduler.prefill.lease_service.
"""

from collections.abc import Iterator
from contextlib import closing
from typing import Any
from unittest.mock import patch

import pytest

from layout.geometry import CacheGroup, WorkerGeometry
from pd_connector.params import contents_digest, parse_remote_prefill
from pd_connector.scheduler.prefill.lease_service import LeaseService
from pd_connector.scheduler.prefill.leases import LeaseTable
from pd_connector.scheduler.prefill.transfers import Transfers
from tests.support.connector.engines import IDENTITY
from tests.support.connector.requests import FakeRequest, a_prompt
from tests.support.waiting import ManualClock, until
from transfer.control.client import ControlClient
from transfer.control.failures import PeerRefused
from transfer.control.messages import (
    Cancel,
    Cancelled,
    Error,
    ErrorCode,
    Follow,
    Followed,
    Hello,
    Locate,
    Located,
    Place,
    Release,
    Released,
    Renew,
    Renewed,
    Reply,
    Request,
    TransferState,
    Welcome,
)
from transfer.control.server import ControlServer
from transfer.control.waiting_requests import NotYet

TTL_S = 30.0
WORKER = WorkerGeometry(0, 1, 0, 1, "10.0.0.5:15000", (CacheGroup(16, 0, ()),), ())


class Named:
    """A lease service with named prompts."""

    def __init__(self) -> None:
        self.clock = ManualClock()
        self.leases: LeaseTable[str] = LeaseTable(TTL_S, self.clock)
        self.service = LeaseService(self.leases, IDENTITY, 1)
        self.service.set_workers((WORKER,))
        self.notified: list[str] = []
        self.service.notify = lambda *names: self.notified.extend(names)

    def begin(self, transfer_id: str = "t") -> FakeRequest:
        request = FakeRequest(f"request of {transfer_id}", a_prompt(70))
        assert self.service.begin(request, transfer_id)
        return request

    def ask(self, message: Request) -> Reply:
        reply = self.service.handle(message)
        self.service.check_integrity()
        return reply.reply if isinstance(reply, NotYet) else reply

    def told(self, transfer_id: str = "t", engine_id: str = "") -> Followed:
        reply = self.ask(Follow(engine_id, transfer_id))
        assert isinstance(reply, Followed)
        return reply

    def grant(self, request: FakeRequest, transfer_id: str = "t") -> dict[str, object]:
        return self.service.grant(request, ([1, 2, 3, 4, 5],), "blocks", ("p", 1), transfer_id)


@pytest.fixture
def named() -> Named:
    return Named()


def test_the_lease_of_a_named_prompt_is_the_one_that_began_with_it(named: Named) -> None:
    request = named.begin()
    named.service.transfers.announce("t", 16, [[1]])
    begun = named.told()
    assert named.ask(Renew(named.service.engine_id, (begun.lease_id,))) == Renewed((begun.lease_id,))
    remote = parse_remote_prefill(named.grant(request))
    assert remote.lease_id == begun.lease_id == named.told().lease_id
    assert remote.prompt_digest == begun.prompt_digest == named.told().prompt_digest
    assert named.told().state == TransferState.COMPLETE
    assert named.told().block_ids == remote.remote_block_ids
    contents = contents_digest(remote)
    release = Release(named.service.engine_id, remote.lease_id, 0, 1, "pull", contents)
    assert named.ask(release) == Released(True)
    assert named.leases.collect() == ("blocks",)


def test_the_lease_of_a_later_attempt_says_which(named: Named) -> None:
    request = named.begin()
    for _ in range(2):
        named.service.transfers.start_over("t")
    remote = parse_remote_prefill(named.grant(request))
    assert remote.remote_attempt == 2
    assert named.told().attempt == 2


def movable(named: Named) -> list[str]:
    return [lease.lease_id for lease in named.leases.movable(0.0, 9)]


def test_the_lease_of_a_prompt_that_nobody_has_followed_moves_and_who_follows_later_learns_where_it_is(
    named: Named,
) -> None:
    named.service.set_workers((WORKER,), (WORKER,))
    request = named.begin()
    named.service.transfers.announce("t", 16, [[1]])
    remote = parse_remote_prefill(named.grant(request))
    assert movable(named) == [remote.lease_id]
    slots = {block: 7 + number for number, block in enumerate(remote.remote_block_ids[0])}
    assert named.leases.move(remote.lease_id, "slots", slots) == "blocks"
    told = named.told()
    assert (told.state, told.block_ids) == (TransferState.COMPLETE, remote.remote_block_ids)
    engine_id = named.service.engine_id
    assert named.ask(Locate(engine_id, told.lease_id)) == Located(Place.HOST, ((7, 8, 9, 10, 11),))
    contents = contents_digest(remote)
    for place, is_valid in ((Place.DEVICE, False), (Place.HOST, True)):
        released = named.ask(Release(engine_id, told.lease_id, 0, 2, f"in {place}", contents, place))
        assert isinstance(released, Released)
        assert released.valid == is_valid


@pytest.mark.parametrize("reads", [False, True])
def test_the_lease_of_a_prompt_that_is_followed_while_it_is_computed_moves_unless_it_is_being_read(
    named: Named, reads: bool
) -> None:
    """A decode engine follows every prompt that it has been asked for, also those that it has no blocks for."""
    named.service.set_workers((WORKER,), (WORKER,))
    request = named.begin()
    named.service.transfers.announce("t", 16, [[1]])
    told = named.told()
    assert told.state == TransferState.COMPUTING
    named.ask(Renew(told.engine_id, (told.lease_id,), (told.lease_id,) if reads else ()))
    named.grant(request)
    assert movable(named) == ([] if reads else [told.lease_id])


def test_a_reader_that_asks_where_it_lies_as_the_prompt_completes_keeps_it_there(named: Named) -> None:
    named.service.set_workers((WORKER,), (WORKER,))
    request = named.begin()
    complete = named.service.transfers.complete

    def read_at_once(transfer_id: str, table: Any) -> None:
        complete(transfer_id, table)
        assert named.ask(Locate(named.service.engine_id, named.told().lease_id)) == Located(Place.DEVICE)

    named.service.transfers.complete = read_at_once  # type: ignore[method-assign]
    named.grant(request)
    assert movable(named) == []


def test_a_prompt_without_a_name_has_a_lease_of_its_own(named: Named) -> None:
    named.begin()
    remote = parse_remote_prefill(named.grant(FakeRequest("other", a_prompt(70)), ""))
    assert (remote.remote_attempt, named.told().state) == (0, TransferState.QUEUED)


def test_whoever_follows_by_name_need_not_know_the_engine(named: Named) -> None:
    named.begin()
    assert named.told().engine_id == named.told(engine_id=named.service.engine_id).engine_id
    assert named.told().engine_id == named.service.engine_id
    assert named.ask(Cancel("", (), ("t",))) == Cancelled()


@pytest.mark.parametrize(
    "message", [Follow("old", "t"), Cancel("old", (), ("t",)), Cancel("", ("L",), ("t",)), Hello("")]
)
def test_another_engine_is_refused_and_none_is_named_only_by_who_asks_by_name(named: Named, message: Request) -> None:
    named.begin()
    reply = named.ask(message)
    assert isinstance(reply, Error)
    assert reply.code is ErrorCode.UNKNOWN_ENGINE
    assert named.told().state == TransferState.QUEUED


def test_an_engine_that_is_still_starting_is_followed_later() -> None:
    service: LeaseService[str] = LeaseService(LeaseTable(TTL_S, ManualClock()), IDENTITY, 1)
    reply = service.handle(Follow("", "t"))
    assert isinstance(reply, Error)
    assert reply.code is ErrorCode.NOT_READY


@pytest.mark.parametrize("by_name", [False, True])
def test_a_cancel_ends_a_prompt_that_is_being_computed_and_its_lease(named: Named, by_name: bool) -> None:
    named.begin()
    named.service.transfers.announce("t", 16, [[1]])
    lease = named.told().lease_id
    message = Cancel("", (), ("t",)) if by_name else Cancel(named.service.engine_id, (lease,))
    assert named.ask(message) == Cancelled()
    told = named.told()
    assert (told.state, told.reason) == (TransferState.ENDED, "it was cancelled by the decode engine")
    assert named.notified == ["t"]
    assert named.leases.still_valid([lease]) == frozenset()
    assert named.ask(message) == Cancelled()
    assert named.notified == ["t"]


def test_a_cancel_by_name_ends_the_lease_of_a_complete_prompt(named: Named) -> None:
    named.grant(named.begin())
    named.ask(Cancel("", (), ("t",)))
    assert named.leases.collect() == ("blocks",)


def test_a_cancel_just_as_the_prompt_begins_leaves_no_lease(named: Named) -> None:
    """The request arrives on the scheduler's thread, the cancel on the control channel's."""
    taken_up = Transfers.open

    def cancelled(transfers: Transfers, *arguments: object) -> bool:
        is_open = taken_up(transfers, *arguments)  # type: ignore[arg-type]
        named.service.handle(Cancel("", (), ("t",)))
        return is_open

    with patch.object(Transfers, "open", cancelled):
        named.begin()
    assert not named.leases._growing
    assert named.told().state == TransferState.ENDED


@pytest.mark.parametrize("why", ["cancelled", "in use"])
def test_a_prompt_that_is_not_taken_up_leaves_no_lease(named: Named, why: str) -> None:
    request = FakeRequest("r", a_prompt(70))
    if why == "cancelled":
        named.ask(Cancel("", (), ("t",)))
        assert not named.service.begin(request, "t")
    else:
        named.begin()
        with pytest.raises(ValueError, match="transfer id t belongs to another request"):
            named.service.begin(request, "t")
    assert len(named.leases._growing) == len(named.service.transfers.open_leases)


def test_a_lease_that_has_ended_before_its_grant_makes_no_prompt_complete(named: Named) -> None:
    request = named.begin()
    named.service.transfers.announce("t", 16, [[1]])
    lease = named.told().lease_id
    named.ask(Release(named.service.engine_id, lease, 0, 1, "pull", "nothing"))
    named.grant(request)
    told = named.told()
    assert told.state == TransferState.ENDED
    assert "released" in told.reason
    assert named.leases.collect() == ("blocks",)


def test_caches_that_are_registered_anew_end_the_prompts_that_were_computed_into_them(named: Named) -> None:
    named.begin()
    old = named.service.engine_id
    named.service.set_workers((WORKER,))
    told = named.told()
    assert told.engine_id == named.service.engine_id != old
    assert (told.state, told.reason) == (TransferState.ENDED, "the prefill engine has registered its caches anew")
    assert named.notified == ["t"]
    assert not named.leases._growing


@pytest.fixture
def client() -> Iterator[ControlClient]:
    with closing(ControlClient()) as client:
        yield client


def test_a_follower_on_the_network_is_answered_as_soon_as_there_is_news(named: Named, client: ControlClient) -> None:
    server = ControlServer(named.service, "127.0.0.1")
    named.service.notify = server.changed
    server.start()
    with closing(server):
        answer = client.request("127.0.0.1", server.port, Follow("", "t", wait_s=30.0), 60)
        until(lambda: server.counters.requests == 1)
        assert not answer.done()
        request = named.begin()
        server.changed("t")  # as the announcer says
        told = answer.result(20)
        assert isinstance(told, Followed)
        assert told.state == TransferState.QUEUED
        answer = client.request("127.0.0.1", server.port, Follow("", "t", 0, 0, told.state, 30.0), 60)
        until(lambda: server.counters.requests == 2)
        named.grant(request)
        server.changed("t")
        told = answer.result(20)
        assert isinstance(told, Followed)
        assert told.state == TransferState.COMPLETE
        assert isinstance(client.request("127.0.0.1", server.port, Hello(told.engine_id), 60).result(20), Welcome)
        with pytest.raises(PeerRefused, match="restarted"):
            client.request("127.0.0.1", server.port, Follow("old", "t"), 60).result(20)
    server.check_integrity()
