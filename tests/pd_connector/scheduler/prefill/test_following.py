"""Decode engines that follow prompts through lost, repeated and late messages, preemptions, aborts and moving windows.

Blocks are reused as soon as they may be: what is confirmed was right, and a complete prompt is known exactly.

Covers: pd_connector.scheduler.prefill.transfers, pd_connector.scheduler.prefill.leases,
pd_connector.scheduler.prefill.lease_service.
"""

import itertools
from dataclasses import dataclass, field

import msgspec
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from layout.geometry import CacheGroup, WorkerGeometry
from pd_connector.params import RemotePrefill, contents_digest
from pd_connector.scheduler.prefill.lease_service import LeaseService
from pd_connector.scheduler.prefill.leases import LeaseTable
from pd_connector.scheduler.prefill.transfers import Transfers
from tests.support.connector.engines import IDENTITY
from tests.support.connector.requests import FakeRequest, a_prompt
from tests.support.waiting import ManualClock
from transfer.control.messages import Cancel, Follow, Followed, Release, Released, TransferState
from transfer.control.waiting_requests import NotYet

QUEUED, COMPUTING, COMPLETE, ENDED = (
    TransferState.QUEUED, TransferState.COMPUTING, TransferState.COMPLETE, TransferState.ENDED,
)  # fmt: skip

TTL_S = 30.0
SIZES = (4, 8)  # tokens in a block of each cache group


class Stamped:
    """Blocks with stamps for contents: whoever takes a block writes it, so that nobody reads it unnoticed."""

    def __init__(self, blocks: int) -> None:
        self.free = list(range(1, blocks + 1))
        self.contents: dict[int, object] = {}
        self._numbers = itertools.count()

    def take(self, contents: object) -> int:
        block = self.free.pop()
        self.contents[block] = contents
        return block

    def give_back(self, block: int) -> None:
        """Somebody else writes to it at once."""
        self.contents[block] = f"somebody else's, {next(self._numbers)}"
        self.free.insert(0, block)


@dataclass
class Computing:
    """A prompt on the prefill engine."""

    name: str
    request: FakeRequest
    tables: list[list[int]] = field(default_factory=lambda: [[] for _ in SIZES])
    tokens: int = 0
    attempt: int = 0

    def right(self, group: int, number: int) -> object:
        return self.name, self.attempt, group, number


@dataclass
class Follower:
    """A decode engine, as far as it follows one prompt: what it was told, and what it has read."""

    name: str
    attempt: int = -1
    tokens: int = 0
    state: str = TransferState.UNKNOWN
    table: list[list[int]] = field(default_factory=lambda: [[] for _ in SIZES])
    lease_id: str = ""
    digest: str = ""
    prompt_tokens: int = 0
    read: dict[tuple[int, int, int], object] = field(default_factory=dict)  # contents by group, place and block
    replies: list[Followed] = field(default_factory=list)  # under way
    releases: list[Release] = field(default_factory=list)  # under way
    is_over: bool = False

    def take(self, reply: Followed) -> None:
        """Take an answer, which may be old, or come again."""
        if reply.state == TransferState.UNKNOWN or reply.attempt < self.attempt:
            return
        if reply.state == ENDED:
            self.is_over = True
            return
        if reply.attempt > self.attempt:
            self.attempt, self.tokens, self.table, self.read = reply.attempt, 0, [[] for _ in SIZES], {}
            self.state = TransferState.UNKNOWN
        order = (QUEUED, COMPUTING, COMPLETE)
        known = order.index(TransferState(self.state)) if self.state in order else -1
        if order.index(TransferState(reply.state)) < known or reply.tokens < self.tokens:
            return
        self.state = reply.state
        if reply.state == QUEUED:
            return
        self.tokens, self.lease_id, self.digest = reply.tokens, reply.lease_id, reply.prompt_digest
        self.prompt_tokens = reply.prompt_tokens
        for ids, new, first in zip(self.table, reply.block_ids, reply.first_blocks, strict=True):
            assert first <= len(ids), "something between what is known and what is told is missing"
            ids[first:] = new

    def remote(self, engine_id: str) -> RemotePrefill:
        return RemotePrefill(
            remote_engine_id=engine_id,
            remote_host="p",
            remote_port=1,
            remote_block_ids=tuple(map(tuple, self.table)),
            remote_num_tokens=self.prompt_tokens,
            lease_id=self.lease_id,
            lease_ttl_s=TTL_S,
            prompt_digest=self.digest,
            remote_attempt=self.attempt,
        )


class Followed_(RuleBasedStateMachine):  # noqa: N801  "Followed" is the message
    """Prompts on a prefill engine, decode engines that follow them, and a network that loses, repeats and reorders."""

    def __init__(self) -> None:
        super().__init__()
        self.clock = ManualClock()
        leases: LeaseTable[list[int]] = LeaseTable(TTL_S, self.clock)
        self.service: LeaseService[list[int]] = LeaseService(leases, IDENTITY, 1)
        self.service.transfers = Transfers(TTL_S, self.clock)
        groups = tuple(CacheGroup(size, 0, ()) for size in SIZES)
        self.service.set_workers((WorkerGeometry(0, 1, 0, 1, "p:1", groups, ()),))
        self.blocks = Stamped(200)
        self.running: list[Computing] = []
        self.followers: list[Follower] = []
        self.final: dict[str, tuple[tuple[tuple[int, ...], ...], str, Computing]] = {}
        self.confirmed = 0

    @rule(tokens=st.integers(1, 60))
    def arrive(self, tokens: int) -> None:
        if len(self.followers) >= 4:
            return
        name = f"t{len(self.followers)}"
        request = FakeRequest(name, a_prompt(tokens, len(self.followers)))
        self.followers.append(Follower(name))
        if self.service.begin(request, name):
            self.running.append(Computing(name, request))

    @precondition(lambda self: self.running)
    @rule(which=st.integers(0, 3), tokens=st.integers(1, 40))
    def a_step_ends(self, which: int, tokens: int) -> None:
        """Its blocks are written, and announced; the window of the second group moves, and what it passes is reused."""
        prompt = self.running[which % len(self.running)]
        total = prompt.request.num_prompt_tokens
        prompt.tokens = min(prompt.tokens + tokens, total)
        for group, (table, size) in enumerate(zip(prompt.tables, SIZES, strict=True)):
            while len(table) < -(-prompt.tokens // size):
                table.append(self.blocks.take(prompt.right(group, len(table))))
        known = self.service.transfers.blocks_known(prompt.name)
        if known is not None:
            new = [table[first:] for table, first in zip(prompt.tables, known, strict=True)]
            self.service.transfers.announce(prompt.name, prompt.tokens, new)
        windowed = prompt.tables[1]
        for number in range(max(len(windowed) - 2, 0)):
            if windowed[number]:
                self.blocks.give_back(windowed[number])
                windowed[number] = 0
        if prompt.tokens == total:
            self._finish(prompt)

    @precondition(lambda self: self.running)
    @rule(which=st.integers(0, 3))
    def preempt(self, which: int) -> None:
        prompt = self.running[which % len(self.running)]
        self._give_back(prompt)
        prompt.tokens, prompt.tables, prompt.attempt = 0, [[] for _ in SIZES], prompt.attempt + 1
        self.service.transfers.start_over(prompt.name)

    @precondition(lambda self: self.running)
    @rule(which=st.integers(0, 3))
    def abort(self, which: int) -> None:
        prompt = self.running.pop(which % len(self.running))
        self._give_back(prompt)
        begun = self.service.transfers.begun(prompt.name)
        if begun is not None:
            self.service.end_transfers([begun.prompt.lease_id], "aborted")

    @precondition(lambda self: self.followers)
    @rule(which=st.integers(0, 3))
    def follow(self, which: int) -> None:
        follower = self.followers[which % len(self.followers)]
        asked = Follow("", follower.name, follower.attempt, follower.tokens, follower.state, 1.0)
        reply = self.service.handle(asked)
        reply = reply.reply if isinstance(reply, NotYet) else reply
        assert isinstance(reply, Followed)
        follower.replies.append(reply)

    @precondition(lambda self: self.followers)
    @rule(which=st.integers(0, 3), reply=st.integers(0, 5), again=st.booleans())
    def an_answer_arrives(self, which: int, reply: int, again: bool) -> None:
        follower = self.followers[which % len(self.followers)]
        if follower.replies:
            index = reply % len(follower.replies)
            follower.take(follower.replies[index])
            if not again:
                del follower.replies[index]

    @precondition(lambda self: self.followers)
    @rule(which=st.integers(0, 3), reply=st.integers(0, 5))
    def an_answer_is_lost(self, which: int, reply: int) -> None:
        follower = self.followers[which % len(self.followers)]
        if follower.replies:
            del follower.replies[reply % len(follower.replies)]

    @precondition(lambda self: self.followers)
    @rule(which=st.integers(0, 3), most=st.integers(1, 30))
    def read(self, which: int, most: int) -> None:
        follower = self.followers[which % len(self.followers)]
        for place in self._unread(follower)[:most]:
            follower.read[place] = self.blocks.contents[place[2]]

    @precondition(lambda self: self.followers)
    @rule(which=st.integers(0, 3), attempt=st.sampled_from([None, None, 0, 1]))
    def release(self, which: int, attempt: int | None) -> None:
        """Who has read all says so; or says that it was another attempt, as one does who has missed that it ended."""
        follower = self.followers[which % len(self.followers)]
        if follower.state != COMPLETE or follower.is_over or self._unread(follower):
            return
        remote = follower.remote(self.service.engine_id)
        if attempt is not None:
            remote = msgspec.structs.replace(remote, remote_attempt=attempt)
        contents = contents_digest(remote)
        message = Release(self.service.engine_id, follower.lease_id, 0, 1, f"{follower.name} {attempt}", contents)
        reply = self.service.handle(message)
        assert isinstance(reply, Released)
        table, lease_id, prompt = self.final[follower.name]
        if not reply.valid:
            return
        assert remote.remote_attempt == prompt.attempt
        assert (remote.remote_block_ids, remote.lease_id) == (table, lease_id)
        for (group, number, block), contents_read in follower.read.items():
            if number < len(table[group]) and table[group][number] == block:
                assert contents_read == prompt.right(group, number), "what was confirmed is somebody else's"
        follower.is_over = True
        self.confirmed += 1

    @precondition(lambda self: self.followers)
    @rule(which=st.integers(0, 3))
    def cancel(self, which: int) -> None:
        follower = self.followers[which % len(self.followers)]
        self.service.handle(Cancel("", (), (follower.name,)))

    @rule(seconds=st.sampled_from([1.0, TTL_S, 3 * TTL_S]))
    def time_passes(self, seconds: float) -> None:
        self.clock.advance(seconds)

    @rule()
    def free(self) -> None:
        for held in self.service.leases.collect():
            for block in held:
                self.blocks.give_back(block)

    @invariant()
    def books_balance(self) -> None:
        self.service.check_integrity()
        growing = set(self.service.leases._growing)
        assert growing == set(self.service.transfers.open_leases), "a lease grows without its prompt"

    @invariant()
    def a_complete_prompt_is_known_exactly(self) -> None:
        for follower in self.followers:
            if follower.state == COMPLETE:
                table, lease_id, prompt = self.final[follower.name]
                known = tuple(map(tuple, follower.table)), follower.lease_id, follower.attempt
                assert known == (table, lease_id, prompt.attempt)

    def teardown(self) -> None:
        """Once nothing goes wrong any longer, whoever follows a prompt to its end has its release confirmed."""
        while self.running:
            self.a_step_ends(0, 40)
        for index, follower in enumerate(self.followers):
            if follower.is_over or follower.name not in self.final:
                continue
            lease_id = self.final[follower.name][1]
            is_valid = lease_id in self.service.leases.still_valid([lease_id])
            follower.replies.clear()
            for _ in range(2):
                self.follow(index)
                self.an_answer_arrives(index, 0, again=False)
            if follower.state == COMPLETE:
                self.read(index, 10_000)
                before = self.confirmed
                self.release(index, None)
                assert self.confirmed - before == is_valid
            else:
                assert not is_valid, "the prompt is complete and leased, and its follower does not know"
        self.books_balance()

    def _unread(self, follower: Follower) -> list[tuple[int, int, int]]:
        places = [
            (group, number, block)
            for group, ids in enumerate(follower.table)
            for number, block in enumerate(ids)
            if block
        ]
        return [place for place in places if place not in follower.read]

    def _finish(self, prompt: Computing) -> None:
        self.running.remove(prompt)
        begun = self.service.transfers.begun(prompt.name)
        if begun is None:  # cancelled: it is not leased
            self._give_back(prompt)
            return
        held = [block for table in prompt.tables for block in table if block]
        params = self.service.grant(prompt.request, prompt.tables, held, ("p", 1), prompt.name)
        table = tuple(map(tuple, prompt.tables))
        self.final[prompt.name] = table, params["lease_id"], prompt
        assert params["lease_id"] == begun.prompt.lease_id

    def _give_back(self, prompt: Computing) -> None:
        for table in prompt.tables:
            for block in table:
                if block:
                    self.blocks.give_back(block)


TestFollowed = Followed_.TestCase
TestFollowed.settings = settings(max_examples=60, stateful_step_count=50, deadline=None)
