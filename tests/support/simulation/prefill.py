"""A simulated prefill engine: a block pool with stamps for contents, and what its leases promise, kept apart."""

import math
from collections import deque
from dataclasses import dataclass, field
from typing import Any

from layout.geometry import WorkerGeometry
from pd_connector.params import contents_digest, parse_remote_prefill
from pd_connector.scheduler.lease_service import LeaseService
from pd_connector.scheduler.leases import LeaseTable
from tests.support.connector.engines import IDENTITY
from tests.support.connector.requests import FakeRequest, a_prompt
from tests.support.simulation.network import HOST, PORT
from tests.support.waiting import ManualClock
from transfer.control.messages import Cancel, Error, Release, Released, Renew, Renewed, Reply, Request

TOKENS_PER_BLOCK = 4
TTL_S = 30.0
WORKER = WorkerGeometry(0, 1, 0, 1, "10.0.0.5:15000", (), ())


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
    """A lease, as whoever reads the protocol understands it. Also what the lease holds."""

    blocks: tuple[int, ...]
    contents: str
    expires_at: float
    ended_at: float | None = None
    readers: int = 0
    done: set[int] = field(default_factory=set)
    valid: set[tuple[int, int, str]] = field(default_factory=set)  # reader, readers and pull id of valid releases
    freed: bool = False


class PrefillSim:
    """One life of a prefill engine."""

    def __init__(self, clock: ManualClock, blocks: int = 10) -> None:
        self.clock = clock
        leases: LeaseTable[Promise] = LeaseTable(TTL_S, clock)
        self.service = LeaseService(leases, IDENTITY, 1)
        self.service.set_workers((WORKER,))
        self.memory: list[Stamp] = [("nothing", block) for block in range(blocks + 1)]
        self.free = deque(range(1, blocks + 1))
        self.references = [0] * (blocks + 1)
        self.promises: dict[str, Promise] = {}
        self._writes = 0

    def prefill(self, prompt: Prompt) -> dict[str, Any] | None:
        """Compute a prompt, or take what another request has of it in use; the params of the response."""
        blocks = self._in_use(prompt) or self._compute(prompt)
        if not blocks:
            return None
        request = FakeRequest("at p", prompt.token_ids)
        promise = Promise(blocks, "", self.clock.now + TTL_S)
        for block in blocks:
            self.references[block] += 1
        params = self.service.grant(request, (list(blocks),), promise, HOST, PORT)
        remote = parse_remote_prefill(params)
        promise.contents = contents_digest(remote)
        self.promises[remote.lease_id] = promise
        return params

    def overwrite_free_blocks(self, number: int) -> None:
        """Other requests come and go."""
        for _ in range(min(number, len(self.free))):
            block = self.free.popleft()
            self._write(block, ("junk", self._writes))
            self.free.append(block)

    def free_ended(self) -> None:
        """What the scheduler does in every step."""
        self._expire()
        for promise in self.service.leases.collect():
            assert promise.ended_at is not None, "I1: blocks under a valid lease are freed"
            assert not promise.freed, "I6: blocks are freed twice"
            promise.freed = True
            for block in promise.blocks:
                self.references[block] -= 1
                if not self.references[block]:
                    self.free.append(block)
        assert all(promise.freed == (promise.ended_at is not None) for promise in self.promises.values()), "I3"

    def reset(self) -> None:
        """The model's weights have changed."""
        self._expire()
        for promise in self.promises.values():
            promise.ended_at = self.clock.now if promise.ended_at is None else promise.ended_at
        self.service.leases.cancel_all()

    def serve(self, request: Request) -> Reply:
        """Answer a message, and check the answer against the promises."""
        reply = self.service.handle(request)
        if request.engine_id == self.service.engine_id:
            self._expire()
            self._check(request, reply)
        else:
            assert isinstance(reply, Error), "an engine answers for the one that was at its address before"
        return reply

    def _check(self, request: Request, reply: Reply) -> None:
        match request:
            case Renew(lease_ids=lease_ids):
                held = tuple(lease for lease in lease_ids if self._is_held(lease))
                assert isinstance(reply, Renewed)
                assert reply.valid == held, "I3: an ended lease was renewed, or a valid one was not"
                for lease_id in held:
                    self.promises[lease_id].expires_at = self.clock.now + TTL_S
            case Cancel(lease_ids=lease_ids):
                for lease_id in filter(self._is_held, lease_ids):
                    self.promises[lease_id].ended_at = self.clock.now
            case Release():
                assert isinstance(reply, Released)
                if (promise := self.promises.get(request.lease_id)) is None:
                    assert not reply.valid, "I2: a lease that never was is said to be valid"
                else:
                    self._check_release(promise, request, reply.valid)

    def _check_release(self, promise: Promise, release: Release, valid: bool) -> None:
        key = release.reader, release.readers, release.pull_id
        right = release.contents == promise.contents
        if promise.ended_at is None:
            promise.readers = promise.readers or release.readers
            if promise.readers == release.readers and right:
                promise.valid.add(key)
            promise.done.add(release.reader)
            if len(promise.done) == promise.readers:
                promise.ended_at = self.clock.now
        allowed = right and key in promise.valid
        if valid or self.clock.now < (promise.ended_at or self.clock.now) + 2 * TTL_S:
            assert valid == allowed, "I2: the answer to a release is wrong"

    def _is_held(self, lease_id: str) -> bool:
        return lease_id in self.promises and self.promises[lease_id].ended_at is None

    def _expire(self) -> None:
        for promise in self.promises.values():
            if promise.ended_at is None and promise.expires_at <= self.clock.now:
                promise.ended_at = self.clock.now

    def _in_use(self, prompt: Prompt) -> tuple[int, ...]:
        stamps = {stamp: block for block, stamp in enumerate(self.memory) if self.references[block]}
        found = tuple(stamps.get(prompt.stamp(block), 0) for block in range(prompt.blocks))
        return found if all(found) else ()

    def _compute(self, prompt: Prompt) -> tuple[int, ...]:
        if len(self.free) < prompt.blocks:
            return ()
        blocks = tuple(self.free.popleft() for _ in range(prompt.blocks))
        for number, block in enumerate(blocks):
            self._write(block, prompt.stamp(number))
        return blocks

    def _write(self, block: int, stamp: Stamp) -> None:
        self._expire()
        assert not any(block in promise.blocks for promise in self.promises.values() if promise.ended_at is None), (
            "I1: a block under a valid lease is overwritten"
        )
        self._writes += 1
        self.memory[block] = stamp
