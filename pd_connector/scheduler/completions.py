"""Asks prefill engines to say when prompts that are pulled ahead are complete, so that this engine can rest until then.

vLLM steps an engine whose requests all wait about a thousand times a second, to ask its workers whether a pull has
ended. None can end before its prompt is complete. So each prompt is asked about once here, beside the workers, who
follow it range by range: the prefill engine keeps that question until the prompt is complete, ends, or starts over.

What is not known costs steps, never time: a prompt about which no answer is expected any more is not waited for.
"""

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial

from pd_connector.params import RemotePrefill, RemoteTransfer
from pd_connector.vllm.engine_core import EngineLoop
from transfer.control.client import ControlClient
from transfer.control.messages import Follow, Followed, Reply, TransferState

logger = logging.getLogger(__name__)

_WAIT_S = 5.0  # for which a prefill engine may keep a question
_SOON_S = 0.5  # an answer without news that comes sooner is not followed by another question


@dataclass(slots=True, eq=False)
class _Expected:
    """A prompt that is not complete, as far as is known."""

    request_id: str
    transfer: RemoteTransfer
    tokens: int  # of the prompt
    engine_id: str
    attempt: int
    state: str
    asked_at: float = 0.0
    asked: Future[Reply] | None = None


class Completions:
    """Owns what is asked about the prompts that are pulled ahead. Thread-safe; no method waits for a peer."""

    def __init__(
        self, client: ControlClient, message_s: float, engine: EngineLoop, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Expect nothing yet.

        Args:
            client: sends the questions; closed by its owner.
            message_s: how long an answer may take, in seconds, beyond the time for which it is kept.
            engine: woken by news. If it cannot be, nothing is asked.
            clock: a monotonic clock, in seconds.
        """
        self._client = client
        self._message_s = message_s
        self._engine = engine
        self._clock = clock
        self._lock = threading.Lock()
        self._expected: dict[str, _Expected] = {}  # by request

    def expect(self, request_id: str, transfer: RemoteTransfer, remote: RemotePrefill) -> None:
        """Ask about a request's prompt that is being computed."""
        if not self._engine.can_be_woken:
            return
        expected = _Expected(
            request_id, transfer, remote.remote_num_tokens, remote.remote_engine_id, remote.remote_attempt,
            TransferState.COMPUTING,
        )  # fmt: skip
        with self._lock:
            self._expected[request_id] = expected
        self._ask(expected)

    def forget(self, request_id: str) -> None:
        """Expect a request's prompt no longer. Those that are not expected are ignored."""
        with self._lock:
            expected = self._expected.pop(request_id, None)
        if expected is not None and expected.asked is not None:
            expected.asked.cancel()

    def __len__(self) -> int:
        with self._lock:
            return len(self._expected)

    def _ask(self, expected: _Expected) -> None:
        transfer, attempt = expected.transfer, expected.attempt
        question = Follow(
            expected.engine_id, transfer.transfer_id, attempt, expected.tokens, expected.state, _WAIT_S
        )  # fmt: skip
        expected.asked_at = self._clock()
        timeout_s = _WAIT_S + self._message_s
        future = self._client.request(transfer.remote_host, transfer.remote_port, question, timeout_s)
        with self._lock:
            expected.asked = future
            is_wanted = self._expected.get(expected.request_id) is expected
        if not is_wanted:
            future.cancel()
        future.add_done_callback(partial(self._take_answer, expected))

    def _take_answer(self, expected: _Expected, future: Future[Reply]) -> None:
        """Ask again if the prompt is still being computed; wake the engine if not. On the control client's thread."""
        if future.cancelled():
            return
        if self._goes_on(expected, future):
            self._ask(expected)
            return
        with self._lock:
            if self._expected.get(expected.request_id) is not expected:
                return
            del self._expected[expected.request_id]
        self._engine.wake()

    def _goes_on(self, expected: _Expected, future: Future[Reply]) -> bool:
        """Note an answer; return whether to expect another one."""
        if (error := future.exception()) is not None:
            logger.debug("PDConnector: %s is not waited for: %s", expected.transfer.label, error)
            return False
        reply = future.result()
        if not isinstance(reply, Followed) or reply.state not in {TransferState.QUEUED, TransferState.COMPUTING}:
            return False
        is_news = (reply.state, reply.attempt) != (expected.state, expected.attempt)
        expected.state, expected.attempt = reply.state, reply.attempt
        return is_news or self._clock() >= expected.asked_at + _SOON_S
