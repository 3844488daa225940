"""A prompt that a prefill engine computes chunk by chunk under a name, and a decode worker's control client to it.

Questions for the prompt are answered here; all other messages go to the engine over the real control channel. Nothing
that has not been computed is in the blocks, and what is preempted is overwritten: who reads too early reads noise.
"""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any

import msgspec
import numpy as np

from pd_connector.orders import ChecksumOrder, PullOrder
from pd_connector.params import RemotePrefill, contents_digest
from tests.support.connector.engines import Blocks, DecodeWorker, PrefillEngine, tables
from tests.support.connector.requests import a_prompt, a_remote
from transfer.control.client import ControlClient
from transfer.control.messages import Cancel, Follow, Followed, Reply, Request, SlotRange, TransferState

TRANSFER_ID = "transfer-1"


@dataclass(eq=False)
class Question:
    """What a decode worker has asked, and the answer to come."""

    asked: Follow
    future: "Future[Reply]"


class ChunkedPrompt:
    """A prompt on a prefill engine, as far as it has been computed. Safe to use from any thread.

    ``blocks`` are those of the whole prompt; the engine holds those of the tokens that it has computed, and of a
    sliding window only what the window has not passed.
    """

    def __init__(
        self, prefill: PrefillEngine, blocks: Blocks, tokens: int = 70, *, transfer_id: str = TRANSFER_ID
    ) -> None:
        self.prefill = prefill
        self.blocks = blocks
        self.prompt_tokens = tokens
        self.transfer_id = transfer_id
        self.attempt = 0
        self.tokens = 0
        self.state: str = TransferState.COMPUTING
        self.reason = ""
        self.cancelled = False
        self.asked: list[Follow] = []
        self.answers_at_once = False  # though there is nothing new
        self.changes: dict[str, Any] = {}  # to every answer
        self.in_host: SlotRange | None = None  # what the engine's host memory holds of this attempt
        self._lease_id = f"lease-of-{transfer_id}"
        self._waiting: list[Question] = []
        self._lock = threading.RLock()

    def compute(self, tokens: int) -> None:
        """Compute the prompt up to so many tokens."""
        with self._lock:
            self.state = TransferState.COMPUTING
            self._fill(range(self.tokens, tokens))
            self.tokens = tokens
        self.answer_news()

    def complete(self, then: Callable[[RemotePrefill], object] = lambda remote: None) -> None:
        """Compute what is left, and lease the blocks. ``then`` is called before anybody is told."""
        with self._lock:
            self._fill(range(self.tokens, self.prompt_tokens + 512))  # the last block is read whole
            self.tokens, self.state = self.prompt_tokens, TransferState.COMPLETE
            remote, service = self.remote(), self.prefill.service
            service.leases.grant(self._lease_id, self.transfer_id, contents_digest(remote), remote.remote_block_ids)
            service.checksums.order(ChecksumOrder(self._lease_id, remote.remote_block_ids, self.tokens - 1))
            then(remote)
        self.answer_news()

    def preempt(self, blocks: Blocks) -> None:
        """Give the blocks to others, and start over in ``blocks`` when the prompt is computed again."""
        with self._lock:
            self._overwrite(self.blocks)
            self.blocks, self.tokens, self.state = blocks, 0, TransferState.QUEUED
            self.attempt += 1
            self.in_host = None

    def end(self, reason: str = "", state: str = TransferState.ENDED) -> None:
        """End the request without its prompt."""
        with self._lock:
            self.state, self.reason = state, reason
        self.answer_news()

    def remote(self, **changes: Any) -> RemotePrefill:
        """What the lease holds, as far as the prompt has been computed."""
        geometry = self.prefill.ranks[0].geometry
        known = a_remote(
            a_prompt(self.prompt_tokens),
            remote_engine_id=self.prefill.service.engine_id,
            remote_host="127.0.0.1",
            remote_port=self.prefill.port,
            remote_block_ids=self._held(),
            remote_block_sizes=tuple(group.block_tokens for group in geometry.groups),
            remote_attempt=self.attempt,
            lease_id=self._lease_id,
        )
        return msgspec.structs.replace(known, **changes)

    def order(self, request_id: str, local: Blocks, first: int = 0, end: int = 69, **changes: Any) -> PullOrder:
        """The order of a pull, given what is known now; ``changes`` are made to what is known."""
        known = self.remote(**changes)
        order = PullOrder(request_id, known, local, first, end, f"pull of {request_id}")
        return replace(order, transfer_id=self.transfer_id, complete_tokens=self.tokens)

    def ask(self, question: Question) -> None:
        """Take a question: answer it now, or when there is something new."""
        with self._lock:
            self.asked.append(question.asked)
            self._waiting.append(question)
        self.answer_news()

    def answer_news(self) -> None:
        """Answer those to whom there is something new to say."""
        with self._lock:
            news = [each for each in self._waiting if self.answers_at_once or self._is_news(each.asked)]
            self._waiting = [each for each in self._waiting if each not in news]
            answers = [(each.future, self.answer_to(each.asked)) for each in news]
        _answer(answers)

    def answer_all(self) -> None:
        """Answer all questions: P has waited for long enough."""
        with self._lock:
            answers = [(each.future, self.answer_to(each.asked)) for each in self._waiting]
            self._waiting = []
        _answer(answers)

    def fail_all(self, error: Exception) -> None:
        """End all questions without an answer."""
        with self._lock:
            waiting, self._waiting = self._waiting, []
        for each in waiting:
            if each.future.set_running_or_notify_cancel():
                each.future.set_exception(error)

    def handle(self, request: Request) -> Any:
        """The handler of a control server that answers for the engine, and questions at once."""
        if not isinstance(request, Follow) or request.engine_id != self.prefill.service.engine_id:
            return self.prefill.service.handle(request)
        with self._lock:
            self.asked.append(request)
            return self.answer_to(request)

    @property
    def waiting(self) -> int:
        """Questions that have not been answered, nor given up."""
        with self._lock:
            return sum(not each.future.done() for each in self._waiting)

    def answer_to(self, asked: Follow) -> Followed:
        """The answer, given what the asker knows."""
        answer = Followed(self.prefill.service.engine_id, self.state, attempt=self.attempt, reason=self.reason)
        if self.state in {TransferState.COMPUTING, TransferState.COMPLETE}:
            known = self.remote()
            is_whole = self.state == TransferState.COMPLETE or asked.attempt != self.attempt
            sizes = known.remote_block_sizes
            first = tuple(0 if is_whole else asked.tokens // size for size in sizes)
            answer = Followed(
                known.remote_engine_id,
                self.state,
                known.lease_id,
                known.lease_ttl_s,
                self.attempt,
                self.prompt_tokens,
                known.prompt_digest,
                sizes,
                self.tokens,
                tuple(ids[start:] for ids, start in zip(known.remote_block_ids, first, strict=True)),
                first,
                in_host=self.in_host if self._wants_slots(asked) else None,
                layers=self.prefill.service.layers,
            )
        return msgspec.structs.replace(answer, **self.changes)

    def _is_news(self, asked: Follow) -> bool:
        if self.state == TransferState.QUEUED:
            return asked.state != self.state
        is_other = (asked.state, asked.attempt) != (self.state, self.attempt)
        return is_other or asked.tokens < self.tokens or self._wants_slots(asked)

    def _wants_slots(self, asked: Follow) -> bool:
        known = asked.host_tokens if asked.attempt == self.attempt else min(asked.host_tokens, 0)
        return (
            self.state == TransferState.COMPUTING and self.in_host is not None and 0 <= known < self.in_host.end_token
        )

    def _held(self) -> Blocks:
        """The block tables of what has been computed."""
        groups = self.prefill.ranks[0].geometry.groups
        return tuple(
            tuple(
                block if not group.window or (number + 1) * group.block_tokens > self.tokens - group.window else 0
                for number, block in enumerate(ids[: -(-self.tokens // group.block_tokens)])
            )
            for ids, group in zip(self.blocks, groups, strict=True)
        )

    def _fill(self, tokens: range) -> None:
        for rank in self.prefill.ranks:
            for held in rank.planes:
                table, size = tables(self.blocks)[held.group], rank.engine.tokens_of(held.group)
                there = [token for token in tokens if table.id_at(token, size) >= 0]
                rank.memory[rank.positions(held, table, there)] = rank.wanted_values(held, there)

    def _overwrite(self, blocks: Blocks) -> None:
        noise = np.random.default_rng(self.attempt)
        for rank in self.prefill.ranks:
            for held in rank.planes:
                table, size = tables(blocks)[held.group], rank.engine.tokens_of(held.group)
                there = [token for token in range(self.prompt_tokens) if table.id_at(token, size) >= 0]
                positions = rank.positions(held, table, there)
                rank.memory[positions] = noise.integers(0, 256, positions.shape, np.uint8)


def _answer(answers: Sequence[tuple["Future[Reply]", Reply]]) -> None:
    for future, reply in answers:
        if future.set_running_or_notify_cancel():
            future.set_result(reply)


class FollowingClient(ControlClient):
    """A control client whose questions for prompts are answered by ``prompts``; it keeps the cancels that it sends."""

    def __init__(self, inner: ControlClient, prompts: Sequence[ChunkedPrompt]) -> None:  # no thread of its own
        self.inner = inner
        self.prompts = {prompt.transfer_id: prompt for prompt in prompts}
        self.cancels: list[Cancel] = []
        self.timeouts: list[float] = []  # of the questions
        self.asking: Callable[[Follow], object] = lambda question: None

    def request(self, host: str, port: int, message: Any, timeout_s: float) -> "Future[Any]":
        if isinstance(message, Follow):
            self.timeouts.append(timeout_s)
            self.asking(message)
            future: Future[Reply] = Future()
            self.prompts[message.transfer_id].ask(Question(message, future))
            return future
        if isinstance(message, Cancel):
            self.cancels.append(message)
        return self.inner.request(host, port, message, timeout_s)

    def until_lost(self, host: str, port: int) -> "Future[None]":
        return self.inner.until_lost(host, port)

    def close(self) -> None:
        self.inner.close()


def follow(worker: DecodeWorker, *prompts: ChunkedPrompt) -> FollowingClient:
    """Have a worker's questions answered by ``prompts``."""
    worker.client = FollowingClient(worker.client, prompts)
    return worker.client
