"""A pull as a worker makes it, in steps: it reads a prompt, perhaps while that is computed, and releases its lease."""

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field

import numpy as np

from pd_connector.orders import PullOrder
from pd_connector.params import contents_digest
from pd_connector.worker.followed_prompt import FOLLOW_WAIT_S, FollowedPrompt, TransferEnded
from transfer.control.messages import Followed, Release, Released, Reply, Request

_MESSAGE_TIMEOUT_S = 5.0

Send = Callable[[Request, float], Future[Reply]]
BlockStamps = dict[tuple[int, int], int]  # by block and offset: the hash of the prompt up to the token that is there
FAILED = -1  # no prompt's hash, for practical purposes


@dataclass(eq=False)
class ScheduledPull:
    """One rank's pull. ``send`` sends a message to its prefill engine."""

    order: PullOrder
    block_tokens: int
    ends_at: float  # not before then
    fails_at: float  # at the latest
    send: Send
    prompt: FollowedPrompt = field(init=False)
    read: BlockStamps = field(default_factory=dict)  # by place on this engine
    has_ended: bool = False
    has_succeeded: bool = False
    was_ahead: bool = False  # it has read something before the prompt was complete
    _question: Future[Reply] | None = None
    _release: Future[Reply] | None = None

    def __post_init__(self) -> None:
        self.prompt = FollowedPrompt(self.order)

    def step(self, now: float, source: BlockStamps) -> None:
        """Take what has been answered, read what can be read, and ask for more, or for the lease in the end."""
        try:
            self._take_answer()
        except TransferEnded:
            self._end(succeeded=False)
        if self.has_ended:
            return
        while (tokens := self.prompt.next_range(self.block_tokens)) is not None:
            self._read_tokens(tokens, source)
        self.prompt.check_integrity()
        if now >= self.fails_at:
            self._end(succeeded=False)
        elif self.prompt.is_complete and now >= self.ends_at and self._release is None:
            remote, order = self.prompt.remote, self.order
            release = Release(remote.remote_engine_id, remote.lease_id, 0, 1, order.pull_id, contents_digest(remote))
            self._release = self.send(release, _MESSAGE_TIMEOUT_S)
        elif not self.prompt.is_complete and self._question is None:
            self._question = self.send(self.prompt.question(FOLLOW_WAIT_S), FOLLOW_WAIT_S + _MESSAGE_TIMEOUT_S)

    def _take_answer(self) -> None:
        if self._question is not None and self._question.done():
            question, self._question = self._question, None
            reply = question.result() if question.exception() is None else None
            if not isinstance(reply, Followed):
                raise TransferEnded(str(question.exception()))
            self.prompt.take(reply)
        if self._release is not None and self._release.done():
            reply = self._release.result() if self._release.exception() is None else None
            self._end(succeeded=isinstance(reply, Released) and reply.valid)

    def _read_tokens(self, tokens: range, source: BlockStamps) -> None:
        for token in tokens:
            block, offset = divmod(token, self.block_tokens)
            stamp = source.get((int(self.prompt.tables[0].block_ids[block]), offset), FAILED)
            self.read[self.order.local_block_ids[0][block], offset] = stamp
        self.was_ahead |= not self.prompt.is_complete
        first, last = tokens.start // self.block_tokens, (tokens.stop - 1) // self.block_tokens
        self.prompt.has_read(tokens, [(0, np.arange(first, last + 1))])

    def _end(self, *, succeeded: bool) -> None:
        self.has_ended, self.has_succeeded = True, succeeded
        if not succeeded:
            self.read = dict.fromkeys(self.read, FAILED)
