"""A pull as a worker makes it, in steps: it reads a prompt, perhaps while that is computed, and releases its lease."""

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field, replace

import numpy as np

from layout.plan import BlockTable
from layout.states import state_entries
from pd_connector.orders import PullOrder, block_table
from pd_connector.progress import TransferEnded
from pd_connector.worker.followed_prompt import FOLLOW_WAIT_S, FollowedPrompt
from pd_connector.worker.pull_end import release_message
from transfer.control.messages import Followed, Locate, Located, Place, Released, Reply, Request

_MESSAGE_TIMEOUT_S = 5.0

Send = Callable[[Request, float], Future[Reply]]
BlockStamps = dict[tuple[int, int], int]  # by block and offset: the hash of the prompt up to the token that is there
FAILED = -1  # no prompt's hash, for practical purposes


def state_stamp(group: int, prompt: int) -> int:
    """What a cache group holds as a state of a prompt, whose hash up to a token is given."""
    return hash((group, prompt))


@dataclass(frozen=True, slots=True)
class Memories:
    """What an engine holds."""

    device: BlockStamps
    host: BlockStamps  # by slot and offset


@dataclass(frozen=True, slots=True)
class Peer:
    """A prefill engine as who pulls from it knows it."""

    send: Send
    memories: Memories
    reads_host: bool  # whether its host memory can be read


@dataclass(eq=False)
class ScheduledPull:
    """One rank's pull."""

    order: PullOrder
    block_tokens: int
    state_tokens: int  # of a block with a state, on this engine
    ends_at: float  # not before then
    fails_at: float  # at the latest
    peer: Peer
    prompt: FollowedPrompt = field(init=False)
    read: BlockStamps = field(default_factory=dict)  # by place on this engine
    has_ended: bool = False
    has_succeeded: bool = False
    was_ahead: bool = False  # it has read something before the prompt was complete
    was_in_host: bool = False  # it has read something in the prefill engine's host memory
    lacking_states: set[tuple[int, int]] = field(default_factory=set)  # groups and entries: not at the prefill engine
    _place: Place | None = None  # where the lease lies; None if that is to be asked
    _slots: list[BlockTable] = field(default_factory=list)
    _question: Future[Reply] | None = None
    _release: Future[Reply] | None = None

    def __post_init__(self) -> None:
        self.prompt = FollowedPrompt(self.order)
        if self.order.transfer_id or not self.peer.reads_host:
            self._place = Place.DEVICE

    def step(self, now: float) -> None:
        """Take what has been answered, read what can be read, and ask for more, or for the lease in the end."""
        try:
            self._take_answer()
        except TransferEnded:
            self._end(succeeded=False)
        if self.has_ended:
            return
        if self._place is not None:
            self._read_all(self._place)
        self.prompt.check_integrity()
        if now >= self.fails_at:
            self._end(succeeded=False)
        elif self._place is None:
            if self._question is None:
                remote = self.prompt.progress.remote
                self._question = self.peer.send(Locate(remote.remote_engine_id, remote.lease_id), _MESSAGE_TIMEOUT_S)
        elif self.prompt.is_complete and now >= self.ends_at and self._release is None:
            if not self._read_states(self._place):
                self._end(succeeded=False)
                return
            order = replace(self.order, remote=self.prompt.progress.remote)
            self._release = self.peer.send(release_message(order, 0, 1, self._place), _MESSAGE_TIMEOUT_S)
        elif not self.prompt.is_complete and self._question is None:
            question = self.prompt.progress.question(FOLLOW_WAIT_S, reads_host=self.peer.reads_host)
            self._question = self.peer.send(question, FOLLOW_WAIT_S + _MESSAGE_TIMEOUT_S)

    def _take_answer(self) -> None:
        if self._question is not None and self._question.done():
            question, self._question = self._question, None
            reply = question.result() if question.exception() is None else None
            if isinstance(reply, Located) and reply.place:
                self._place = Place(reply.place)
                self._slots = [BlockTable.of(slots) for slots in reply.slots]
                if self._place is Place.HOST and self.prompt.read_until > self.order.first_token:
                    self.prompt.read_again()
            elif isinstance(reply, Followed):
                self.prompt.take(reply)
                if self.prompt.is_complete and self.peer.reads_host:
                    self._place = None
            else:
                raise TransferEnded(str(reply or question.exception()))
        if self._release is not None and self._release.done():
            reply = self._release.result() if self._release.exception() is None else None
            self._end(succeeded=isinstance(reply, Released) and reply.valid)

    def _read_all(self, place: Place) -> None:
        """Read the ranges that can be read now."""
        while True:
            if (tokens := self.prompt.next_range(self.block_tokens)) is not None:
                in_host = place is Place.HOST
                table = (self._slots if in_host else self.prompt.progress.tables)[0]
            elif self.peer.reads_host and (tokens := self.prompt.next_in_host(self.block_tokens)) is not None:
                in_host, table = True, self.prompt.progress.host_tables[0]
            else:
                return
            self.was_in_host |= in_host
            self._read_tokens(tokens, table, self.peer.memories.host if in_host else self.peer.memories.device)
            first, last = tokens.start // self.block_tokens, (tokens.stop - 1) // self.block_tokens
            self.prompt.has_read(tokens, () if in_host else [(0, np.arange(first, last + 1))])

    def _read_tokens(self, tokens: range, table: BlockTable, source: BlockStamps) -> None:
        for token in tokens:
            block, offset = divmod(token, self.block_tokens)
            stamp = source.get((int(table.block_ids[block - table.first_block]), offset), FAILED)
            self.read[self.order.local_block_ids[0][block], offset] = stamp
        self.was_ahead |= not self.prompt.is_complete

    def _read_states(self, place: Place) -> bool:
        """Read the states that both sides' tables have, as late as may be; return whether the last is among them.

        Or was, in the first part of two.
        """
        in_host, remote = place is Place.HOST, self.prompt.progress.remote
        source = self.peer.memories.host if in_host else self.peer.memories.device
        tables = self._slots if in_host else self.prompt.progress.tables
        for group, size in enumerate(remote.remote_block_sizes):
            if not group:
                continue  # keys and values
            local = block_table(self.order.local_block_ids[group]).block_ids
            ours = state_entries(local, self.state_tokens, self.order.end_token)
            theirs = state_entries(tables[group].block_ids, size, self.order.end_token)
            if not self.order.part and self.order.end_token not in ours.keys() & theirs.keys():
                return False
            self.lacking_states |= {(group, ours[after]) for after in ours.keys() - theirs.keys()}
            for tokens in ours.keys() & theirs.keys():
                stamp = source.get((int(tables[group].block_ids[theirs[tokens]]), 0), FAILED)
                self.read[int(local[ours[tokens]]), 0] = stamp
        return True

    def _end(self, *, succeeded: bool) -> None:
        self.has_ended, self.has_succeeded = True, succeeded
        if not succeeded:
            self.read = dict.fromkeys(self.read, FAILED)
