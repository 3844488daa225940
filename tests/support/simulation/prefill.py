"""A simulated prefill engine: a block pool with stamps for contents, and what its leases promise, kept apart."""

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from layout.geometry import CacheGroup, WorkerGeometry
from pd_connector.params import contents_digest, parse_remote_prefill
from pd_connector.scheduler.prefill.lease_service import LeaseService
from pd_connector.scheduler.prefill.leases import LeaseTable
from pd_connector.scheduler.prefill.transfers import Transfers
from tests.support.connector.engines import IDENTITY
from tests.support.connector.requests import FakeRequest, a_prompt
from tests.support.simulation.network import HOST, PORT
from tests.support.waiting import ManualClock
from transfer.control.messages import (
    Cancel,
    Error,
    Follow,
    Followed,
    Release,
    Released,
    Renew,
    Renewed,
    Reply,
    Request,
)
from transfer.control.waiting_requests import NotYet

TOKENS_PER_BLOCK = 4
TTL_S = 30.0
REMEMBERED_S = 60.0  # for which the name of a complete prompt is known
WORKER = WorkerGeometry(0, 1, 0, 1, "10.0.0.5:15000", (CacheGroup(TOKENS_PER_BLOCK, 0, ()),), ())


@dataclass(frozen=True)
class Prompt:
    """What a client asks."""

    seed: int
    tokens: int

    @property
    def token_ids(self) -> list[int]:
        return a_prompt(self.tokens, self.seed)

    @property
    def blocks(self) -> int:
        return math.ceil(self.tokens / TOKENS_PER_BLOCK)

    def stamp(self, block: int) -> "Stamp":
        return self, block


Stamp = tuple[Prompt | str, int]  # of which prompt, which of its blocks; junk for a prompt: none of those asked for


@dataclass(eq=False)
class Promise:
    """A lease, as whoever reads the protocol understands it. Also what the lease holds: nothing while it grows."""

    blocks: tuple[int, ...]
    contents: str  # empty while it grows
    expires_at: float
    ended_at: float | None = None
    readers: int = 0
    done: set[int] = field(default_factory=set)
    valid: set[tuple[int, int, str]] = field(default_factory=set)  # reader, readers and pull id of valid releases
    freed: bool = False
    granted_at: float = math.inf

    @property
    def grows(self) -> bool:
        return not self.contents

    def end(self, now: float) -> None:
        if self.ended_at is None:
            self.ended_at, self.freed = now, self.grows


class PrefillSim:
    """One life of a prefill engine."""

    def __init__(self, clock: ManualClock, blocks: int = 10) -> None:
        self.clock = clock
        leases: LeaseTable[Promise] = LeaseTable(TTL_S, clock)
        self.service = LeaseService(leases, IDENTITY, 1)
        self.service.transfers = Transfers(TTL_S, clock)
        self.service.set_workers((WORKER,))
        self.memory: list[Stamp] = [("nothing", block) for block in range(blocks + 1)]
        self.free = deque(range(1, blocks + 1))
        self.references = [0] * (blocks + 1)
        self.promises: dict[str, Promise] = {}  # by lease
        self.hashes: dict[Stamp, int] = {}  # the prefix cache: blocks that have been filled, or are about to be
        self._named: dict[str, str] = {}  # leases, by transfer
        self._writes = 0

    def prefill(self, prompt: Prompt) -> dict[str, Any] | None:
        """Compute a prompt at once, or take what another request has of it in use; the params of the response."""
        blocks = self._in_use(prompt) or self._compute(prompt)
        return self.promise(FakeRequest("at p", prompt.token_ids), blocks) if blocks else None

    def promise(self, request: Any, blocks: tuple[int, ...], transfer_id: str = "", lease_id: str = "") -> Any:
        """Grant the lease of a prompt that is computed; the params of the response.

        ``transfer_id`` and ``lease_id``: of a prompt with a name.
        """
        promise = self.promises.get(lease_id) or Promise((), "", math.inf)
        if promise.ended_at is not None:
            promise = Promise((), "", math.inf, ended_at=self.clock.now)
        promise.blocks, promise.granted_at, promise.expires_at = blocks, self.clock.now, self.clock.now + TTL_S
        for block in blocks:
            self.take(block)
        params = self.service.grant(request, (list(blocks),), promise, (HOST, PORT), transfer_id)
        remote = parse_remote_prefill(params)
        assert remote.lease_id == (lease_id or remote.lease_id), "the lease that has begun is not the one granted"
        promise.contents = contents_digest(remote)
        self.promises[remote.lease_id if promise.ended_at is None else f"{lease_id}, too late"] = promise
        return params

    def promise_begins(self, transfer_id: str, lease_id: str) -> None:
        """A prompt with a name has arrived, and its lease grows."""
        self._named[transfer_id] = lease_id
        self.promises[lease_id] = Promise((), "", math.inf)

    def promise_ends(self, lease_id: str) -> None:
        """A prompt with a name will not be complete."""
        self.promises[lease_id].end(self.clock.now)

    def told(self, transfer_id: str) -> Followed:
        """What somebody is told who knows nothing of a transfer yet."""
        reply = self.service.handle(Follow("", transfer_id))
        reply = reply.reply if isinstance(reply, NotYet) else reply
        assert isinstance(reply, Followed)
        return reply

    # Blocks

    def allocate(self) -> int:
        """Take a free block, whose contents are forgotten."""
        block = self.free[0]
        self.take(block)
        self.hashes = {stamp: held for stamp, held in self.hashes.items() if held != block}
        return block

    def take(self, block: int) -> None:
        """Use a block, or use it as well."""
        if not self.references[block]:
            self.free.remove(block)
        self.references[block] += 1

    def give_back(self, blocks: Sequence[int]) -> None:
        """Use blocks no longer."""
        for block in blocks:
            self.references[block] -= 1
            if not self.references[block]:
                self.free.append(block)

    def write(self, block: int, stamp: Stamp) -> None:
        """A step writes to a block."""
        self._expire()
        assert not any(block in promise.blocks for promise in self.promises.values() if promise.ended_at is None), (
            "I1: a block under a valid lease is overwritten"
        )
        self._writes += 1
        self.memory[block] = stamp

    def overwrite_free_blocks(self, number: int) -> None:
        """Other requests come and go."""
        for _ in range(min(number, len(self.free))):
            block = self.allocate()
            self.write(block, ("junk", self._writes))
            self.give_back([block])

    def free_ended(self) -> None:
        """What the scheduler does in every step."""
        self._expire()
        for promise in self.service.leases.collect():
            assert promise is not None, "I3: a lease that grew has ended with something to free"
            assert promise.ended_at is not None, "I1: blocks under a valid lease are freed"
            assert not promise.freed, "I6: blocks are freed twice"
            promise.freed = True
            self.give_back(promise.blocks)
        assert all(promise.freed == (promise.ended_at is not None) for promise in self.promises.values()), "I3"

    def reset(self) -> None:
        """The model's weights have changed."""
        self._expire()
        for promise in self.promises.values():
            if not promise.grows:
                promise.end(self.clock.now)
        self.service.leases.cancel_all()

    def serve(self, request: Request) -> Reply | NotYet:
        """Answer a message, and check the answer against the promises."""
        is_by_name = isinstance(request, Follow) or (isinstance(request, Cancel) and not request.lease_ids)
        reply = self.service.handle(request)
        if request.engine_id == self.service.engine_id or (is_by_name and not request.engine_id):
            self._expire()
            self._check(request, reply)
        else:
            assert isinstance(reply, Error), "an engine answers for the one that was at its address before"
        return reply

    def _check(self, request: Request, reply: Reply | NotYet) -> None:
        match request:
            case Renew(lease_ids=lease_ids):
                held = tuple(lease for lease in lease_ids if self._is_held(lease))
                assert isinstance(reply, Renewed)
                assert reply.valid == held, "I3: an ended lease was renewed, or a valid one was not"
                for renewed in (self.promises[lease_id] for lease_id in held):
                    renewed.expires_at = self.clock.now + TTL_S if not renewed.grows else math.inf
            case Cancel(lease_ids=lease_ids, transfer_ids=transfer_ids):
                for lease_id in filter(self._is_held, (*lease_ids, *self._known_by(transfer_ids))):
                    self.promises[lease_id].end(self.clock.now)
            case Release():
                assert isinstance(reply, Released)
                if (promise := self.promises.get(request.lease_id)) is None:
                    assert not reply.valid, "I2: a lease that never was is said to be valid"
                else:
                    self._check_release(promise, request, reply.valid)

    def _known_by(self, transfer_ids: Sequence[str]) -> list[str]:
        """The leases of these transfers, whose names are forgotten some time after their prompts are complete."""
        leases = [self._named[each] for each in transfer_ids if each in self._named]
        return [each for each in leases if self.clock.now < self.promises[each].granted_at + REMEMBERED_S]

    def _check_release(self, promise: Promise, release: Release, valid: bool) -> None:
        key = release.reader, release.readers, release.pull_id
        right = release.contents == promise.contents
        if promise.ended_at is None:
            promise.readers = promise.readers or release.readers
            if promise.readers == release.readers and right:
                promise.valid.add(key)
            promise.done.add(release.reader)
            if len(promise.done) == promise.readers:
                promise.end(self.clock.now)
        allowed = right and key in promise.valid
        if valid or self.clock.now < (promise.ended_at or self.clock.now) + 2 * TTL_S:
            assert valid == allowed, "I2: the answer to a release is wrong"

    def _is_held(self, lease_id: str) -> bool:
        return lease_id in self.promises and self.promises[lease_id].ended_at is None

    def _expire(self) -> None:
        for promise in self.promises.values():
            if promise.expires_at <= self.clock.now:
                promise.end(self.clock.now)

    def _in_use(self, prompt: Prompt) -> tuple[int, ...]:
        stamps = {stamp: block for block, stamp in enumerate(self.memory) if self.references[block]}
        found = tuple(stamps.get(prompt.stamp(block), 0) for block in range(prompt.blocks))
        return found if all(found) else ()

    def _compute(self, prompt: Prompt) -> tuple[int, ...]:
        if len(self.free) < prompt.blocks:
            return ()
        blocks = tuple(self.allocate() for _ in range(prompt.blocks))
        for number, block in enumerate(blocks):
            self.write(block, prompt.stamp(number))
            if (number + 1) * TOKENS_PER_BLOCK <= prompt.tokens:
                self.hashes.setdefault(prompt.stamp(number), block)
        self.give_back(blocks)  # the request has ended: its lease holds them from here on
        return blocks
