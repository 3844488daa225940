"""The prompts of a prefill engine that decode engines follow by name: how far each is computed, and where.

A prompt passes through these states, as ``TransferState`` names them:

    (unknown) --- its request arrives ---> queued --- first step ---> computing --- all is computed ---> complete
                                             ^                           |
                                             '-- preempted: attempt + 1 -'        any --- the request ends ---> ended

Its blocks are announced as steps end, not as they are scheduled: what is announced has been written on every rank. An
attempt ends when the request loses its blocks. Whatever was read of it counts for nothing, which the digest of the next
lease's contents makes sure of.

Names, numbers and answers only: no threads, no sockets, no blocks. Thread-safe: the scheduler's thread announces, the
control channel's thread answers.
"""

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from pd_connector.params import PromptIdentity
from pd_connector.vllm.cache_specs import Retention
from transfer.control.messages import Follow, Followed, SlotRange, TransferState
from transfer.control.waiting_requests import NotYet

#: How many transfers are remembered that were cancelled before their requests arrived, or have ended: 1 KB each.
#: More than end at once when a decode engine does: its thousands must not push out what others are about to ask for.
_MAX_PAST = 16_384

#: How many block ids they have together, which take 8 bytes each: the numbers are those of vLLM's blocks. A prompt of a
#: million tokens may have half a million, with all cache groups.
_MAX_PAST_BLOCKS = 2**22

#: For how long the end of a transfer is remembered: messages about it may be on their way.
_REMEMBERED_S = 60.0

_MAX_REASON_CHARACTERS = 400  # of 512 in the message


@dataclass(frozen=True, slots=True)
class Prompt:
    """What is known of a named prompt when its request arrives."""

    transfer_id: str
    lease_id: str
    identity: PromptIdentity


@dataclass(frozen=True, slots=True)
class Begun:
    """A named prompt that is neither complete nor ended."""

    prompt: Prompt  # its lease grows with it
    attempt: int


@dataclass(slots=True)
class _Transfer:
    prompt: Prompt
    state: TransferState = TransferState.QUEUED
    attempt: int = 0
    tokens: int = 0  # complete
    table: list[list[int]] = field(default_factory=list)  # by cache group: the blocks of the complete tokens
    in_host: SlotRange | None = None  # what is being loaded from host memory, or was in this attempt
    reason: str = ""
    forget_at: float = 0.0  # once it has ended or is complete


class Transfers:
    """Owns what is announced of every named prompt."""

    def __init__(
        self, lease_ttl_s: float, clock: Callable[[], float] = time.monotonic, remembered_s: float = 0.0
    ) -> None:
        """Start without transfers.

        Args:
            lease_ttl_s: of the leases, told to those who follow.
            clock: a monotonic clock, in seconds.
            remembered_s: for which the end of a transfer is remembered at least.
        """
        self._remembered_s = max(_REMEMBERED_S, 2 * lease_ttl_s, remembered_s)
        self._lease_ttl_s = lease_ttl_s
        self._clock = clock
        self._lock = threading.Lock()
        self._groups: tuple[Retention, ...] = ()
        self._layers: tuple[tuple[str, ...], ...] = ()
        self._block_tokens: tuple[int, ...] = ()
        self._open: dict[str, _Transfer] = {}
        self._of_lease: dict[str, str] = {}  # the names of those that are open
        self._past: dict[str, _Transfer] = {}  # complete or ended, in that order
        self._past_blocks = 0  # in their tables
        self._cancelled: dict[str, float] = {}  # before their requests came: when to forget them

    def set_groups(self, groups: Sequence[Retention], layers: tuple[tuple[str, ...], ...] = ()) -> None:
        """Set what each cache group keeps of a request, and the names of its layers. Nothing is announced before.

        ``layers`` is empty if one group holds all and keeps every token.
        """
        with self._lock:
            self._groups, self._layers = tuple(groups), layers
            self._block_tokens = tuple(group.block_tokens for group in groups)
            for transfer in self._open.values():
                transfer.table = [[] for _ in groups]

    def open(self, prompt: Prompt) -> bool:
        """Take up a named prompt whose request has arrived.

        Returns:
            False if nobody wants it any longer: its transfer was cancelled before.

        Raises:
            ValueError: another request has the transfer id, or had it.
        """
        with self._lock:
            self._forget_old()
            if prompt.transfer_id in self._open or prompt.transfer_id in self._past:
                raise ValueError(f"transfer id {prompt.transfer_id} belongs to another request: each needs its own")
            if self._cancelled.pop(prompt.transfer_id, None) is not None:
                return False
            self._open[prompt.transfer_id] = _Transfer(prompt, table=[[] for _ in self._block_tokens])
            self._of_lease[prompt.lease_id] = prompt.transfer_id
            return True

    def announce(self, transfer_id: str, tokens: int, new_blocks: Sequence[Sequence[int]]) -> bool:
        """Say that the first ``tokens`` tokens are complete; return whether that is news.

        ``new_blocks``: by cache group, the ids of the blocks that ``blocks_known`` does not count, as far as they
        hold complete tokens; 0 marks one that is not held.
        """
        with self._lock:
            transfer = self._open.get(transfer_id)
            if transfer is None:
                return False
            is_news = transfer.state is TransferState.QUEUED or tokens > transfer.tokens
            transfer.state = TransferState.COMPUTING
            transfer.tokens = max(tokens, transfer.tokens)
            for ids, new in zip(transfer.table, new_blocks, strict=True):
                ids.extend(new)
            return is_news

    def announce_slots(self, transfer_id: str, in_host: SlotRange) -> bool:
        """Say which tokens can be read in host memory until the attempt ends; return whether that is news.

        The prompt is being computed: ``announce`` has said what the device holds.
        """
        with self._lock:
            transfer = self._open.get(transfer_id)
            if transfer is None or transfer.state is not TransferState.COMPUTING:
                return False
            is_news, transfer.in_host = transfer.in_host != in_host, in_host
            return is_news

    def blocks_known(self, transfer_id: str) -> tuple[int, ...] | None:
        """Return how many blocks of each cache group have been announced; None if the prompt is complete or ended."""
        with self._lock:
            transfer = self._open.get(transfer_id)
            return tuple(map(len, transfer.table)) if transfer is not None else None

    def start_over(self, transfer_id: str) -> None:
        """Begin another attempt: the request has lost its blocks."""
        with self._lock:
            transfer = self._open.get(transfer_id)
            if transfer is not None:
                transfer.state, transfer.attempt = TransferState.QUEUED, transfer.attempt + 1
                transfer.tokens, transfer.table = 0, [[] for _ in self._block_tokens]
                transfer.in_host = None

    def begun(self, transfer_id: str) -> Begun | None:
        """Return what a prompt has begun with that is neither complete nor ended; None for all others."""
        with self._lock:
            transfer = self._open.get(transfer_id)
            if transfer is None:
                return None
            return Begun(transfer.prompt, transfer.attempt)

    def complete(self, transfer_id: str, table: Sequence[Sequence[int]]) -> None:
        """Say that the whole prompt is complete, and its blocks are leased: those of ``table``, 0 marks holes.

        If the lease may move, whoever is told of this asks where it lies, also if they have read something before.
        """
        with self._lock:
            transfer = self._open.get(transfer_id)
            if transfer is not None:
                transfer.tokens = transfer.prompt.identity.tokens
                self._close(transfer_id, TransferState.COMPLETE, "", table)

    def end(self, transfer_id: str, reason: str) -> None:
        """Say that the prompt will not be complete, and why, for people. Idempotent."""
        with self._lock:
            self._close(transfer_id, TransferState.ENDED, reason)

    def cancel(self, transfer_ids: Sequence[str]) -> list[str]:
        """End transfers that nobody wants; return the ids of their leases.

        Those whose requests have not arrived are remembered for a while.
        """
        with self._lock:
            self._forget_old()
            leases = []
            for transfer_id in transfer_ids:
                transfer = self._open.get(transfer_id) or self._past.get(transfer_id)
                if transfer is not None:
                    leases.append(transfer.prompt.lease_id)
                elif self._cancelled.pop(transfer_id, None) is not None or len(self._cancelled) < _MAX_PAST:
                    self._cancelled[transfer_id] = self._clock() + _REMEMBERED_S  # last, as it is forgotten last
            return leases

    def end_of(self, lease_ids: Sequence[str], reason: str) -> list[str]:
        """End the transfers of these leases, unless they are complete; return the ids of those that were not."""
        with self._lock:
            ended = [self._of_lease[each] for each in dict.fromkeys(lease_ids) if each in self._of_lease]
            for transfer_id in ended:
                self._close(transfer_id, TransferState.ENDED, reason)
            return ended

    def answer(self, engine_id: str, asked: Follow) -> Followed | NotYet:
        """Return what is new to who asks, or what to answer if nothing is until it has waited long enough."""
        with self._lock:
            transfer = self._open.get(asked.transfer_id) or self._past.get(asked.transfer_id)
            if transfer is None:
                unknown = Followed(engine_id, TransferState.UNKNOWN)
                is_news = asked.state != TransferState.UNKNOWN  # it has been forgotten
                return unknown if is_news else NotYet(asked.transfer_id, asked.wait_s, unknown)
            is_current = asked.attempt == transfer.attempt
            known = asked.tokens if is_current else 0
            in_host = transfer.in_host if asked.host_tokens >= 0 else None
            if in_host is not None and is_current and asked.host_tokens >= in_host.end_token:
                in_host = None
            reply = self._followed(engine_id, transfer, known, in_host)
            if transfer.state.value == asked.state and is_current and transfer.tokens <= known and in_host is None:
                return NotYet(asked.transfer_id, asked.wait_s, reply)
            return reply

    @property
    def open_leases(self) -> tuple[str, ...]:
        """The leases of the prompts that are neither complete nor ended."""
        with self._lock:
            return tuple(transfer.prompt.lease_id for transfer in self._open.values())

    def check_integrity(self) -> None:
        """Raise AssertionError unless the books balance."""
        with self._lock:
            assert not self._open.keys() & self._past.keys(), "a transfer is open and past at once"
            assert not self._open.keys() & self._cancelled.keys(), "a transfer is open that was cancelled before"
            leases = {transfer.prompt.lease_id: each for each, transfer in self._open.items()}
            assert self._of_lease == leases, "a transfer is not found by its lease"
            for transfer in self._open.values():
                assert transfer.state in {TransferState.QUEUED, TransferState.COMPUTING}, "an open transfer has ended"
                assert transfer.tokens <= transfer.prompt.identity.tokens, (
                    "more tokens are complete than the prompt has"
                )
                is_queued = transfer.state is TransferState.QUEUED
                assert not (is_queued and transfer.in_host), "slots are announced of a prompt that is queued"
                for ids, size in zip(transfer.table, self._block_tokens, strict=True):
                    assert len(ids) == -(-transfer.tokens // size), "the table is not that of the complete tokens"
            assert self._past_blocks == sum(map(_blocks_in, self._past.values())), "blocks are miscounted"
            assert len(self._past) <= max(_MAX_PAST, 1), "what has ended is never forgotten"

    def _followed(self, engine_id: str, transfer: _Transfer, known_tokens: int, in_host: SlotRange | None) -> Followed:
        prompt, reason = transfer.prompt, transfer.reason
        if transfer.state is TransferState.ENDED:
            return Followed(engine_id, transfer.state, prompt.lease_id, attempt=transfer.attempt, reason=reason)
        if transfer.state is TransferState.QUEUED:
            return Followed(engine_id, transfer.state, attempt=transfer.attempt)
        # Windows move, so a complete prompt is told whole.
        known = 0 if transfer.state is TransferState.COMPLETE else known_tokens
        first_blocks = tuple(known // size for size in self._block_tokens)
        return Followed(
            engine_id=engine_id,
            state=transfer.state,
            lease_id=prompt.lease_id,
            lease_ttl_s=self._lease_ttl_s,
            attempt=transfer.attempt,
            prompt_tokens=prompt.identity.tokens,
            prompt_digest=prompt.identity.digest,
            block_sizes=self._block_tokens,
            layers=self._layers,
            first_tokens=tuple(group.first_needed(prompt.identity.tokens) for group in self._groups),
            tokens=transfer.tokens,
            block_ids=tuple(tuple(ids[first:]) for ids, first in zip(transfer.table, first_blocks, strict=True)),
            first_blocks=first_blocks,
            in_host=in_host,
            adapter_digest=prompt.identity.adapter_digest,
            media_digest=prompt.identity.media_digest,
        )

    def _close(self, transfer_id: str, state: TransferState, reason: str, table: Sequence[Sequence[int]] = ()) -> None:
        transfer = self._open.pop(transfer_id, None)
        if transfer is not None:
            del self._of_lease[transfer.prompt.lease_id]
            transfer.state, transfer.reason = state, reason[:_MAX_REASON_CHARACTERS]
            transfer.table = [list(ids) for ids in table]
            transfer.in_host = None
            self._past_blocks += _blocks_in(transfer)
            transfer.forget_at = self._clock() + self._remembered_s
            self._past[transfer_id] = transfer
            self._forget_old()

    def _forget_old(self) -> None:
        """Forget what ended long ago, and the oldest of too much. The newest stays: somebody is about to ask for it."""
        now = self._clock()
        while self._past:
            oldest = next(iter(self._past.values()))
            is_too_much = len(self._past) > _MAX_PAST or (self._past_blocks > _MAX_PAST_BLOCKS and len(self._past) > 1)
            if oldest.forget_at > now and not is_too_much:
                break
            del self._past[oldest.prompt.transfer_id]
            self._past_blocks -= _blocks_in(oldest)
        while self._cancelled and next(iter(self._cancelled.values())) <= now:
            del self._cancelled[next(iter(self._cancelled))]


def _blocks_in(transfer: _Transfer) -> int:
    return sum(map(len, transfer.table))
