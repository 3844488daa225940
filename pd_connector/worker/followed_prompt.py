"""What a decode worker knows of a prompt that a prefill engine may still be computing, and what of it to read next.

    first_token           read_until              tokens             end_token
        |---- has been read ----|---- can be read ----|---- is computed ----|

Bookkeeping only: no threads, no memory, and nothing is sent. A prompt that is complete from the start is the case in
which nothing is left to be asked.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

import msgspec
import numpy as np

from layout.copies import Int64Array
from layout.plan import BlockTable
from pd_connector.orders import PullOrder, block_table
from transfer.control.messages import Follow, Followed, Reply, SlotRange, TransferState

#: How long a prefill engine may wait for something new before it answers. A question that waits costs an answer
#: without news that often; and that often, there is a sign of life.
FOLLOW_WAIT_S = 2.0

_MAX_BLOCK_ID = 2**31 - 1

#: Block numbers of a cache group of the prefill engine, which have been read from.
BlocksRead = tuple[int, Int64Array]


@dataclass(frozen=True, slots=True)
class InHost:
    """Tokens that can be read in P's host memory, and the slots, by cache group."""

    tokens: range
    tables: tuple[BlockTable, ...]


class TransferEnded(Exception):  # noqa: N818
    """The prompt will not be complete, or what is computed under its name is another one. The message says why."""


def is_complete(answer: Reply) -> bool:
    """Return whether an answer says that a prompt is complete."""
    return isinstance(answer, Followed) and answer.state == TransferState.COMPLETE


class FollowedPrompt:
    """Takes the answers about one prompt, and says which tokens can be read. Belongs to one thread at a time.

    Answers may be repeated, late or out of order: what is older than what is known changes nothing. Only the final
    block table is trusted. If a block that was read earlier is not in its place there, everything is read again.
    """

    def __init__(self, order: PullOrder) -> None:
        self.remote = order.remote  # with the final block table once the prompt is complete
        self.attempt = order.remote.remote_attempt
        self.state: str = TransferState.COMPUTING if order.transfer_id else TransferState.COMPLETE
        self.tokens = order.complete_tokens if order.transfer_id else order.remote.remote_num_tokens
        self.read_until = order.first_token
        self.restarts = 0  # how many times all that was read came to nothing
        self._first_token = order.first_token
        self._end_token = order.end_token
        self._transfer_id = order.transfer_id
        self._waits_for_end = False  # nothing is read before the prompt is complete
        self.in_host: InHost | None = None  # in this attempt
        self._host_tokens = 0  # up to which slots have been announced, of use or not
        self._blocks_read: list[tuple[int, Int64Array, Int64Array]] = []  # group, block numbers, block ids

    @cached_property
    def tables(self) -> list[BlockTable]:
        """The block tables of P's cache groups, from block 0 on, as far as they are known."""
        return [block_table(ids) for ids in self.remote.remote_block_ids]

    @property
    def is_complete(self) -> bool:
        """Whether the whole prompt can be read, with the final block table."""
        return self.state == TransferState.COMPLETE

    def question(self, wait_s: float, *, reads_host: bool = False) -> Follow:
        """Return the message that asks for more, which P answers after ``wait_s`` seconds at the latest.

        ``reads_host``: whether P's host memory can be read.
        """
        known = self._host_tokens if reads_host else -1
        return Follow(
            self.remote.remote_engine_id,
            self._transfer_id,
            self.attempt,
            self.tokens,
            self.state,
            max(wait_s, 0.0),
            known,
        )

    def take(self, answer: Followed) -> bool:
        """Learn from an answer. Return whether it says anything new.

        Raises:
            TransferEnded: the prompt will not be complete, or the answer is not about this prompt.
        """
        if self.is_complete:
            return False
        if answer.state == TransferState.QUEUED:  # again, if it was being computed: its blocks may be others' by now
            return self._change_state(answer.state)
        if answer.state not in {TransferState.COMPUTING, TransferState.COMPLETE}:
            raise TransferEnded(self._end_reason(answer))
        self._check_prompt(answer)
        self._check_tables(answer)
        if answer.attempt < self.attempt:
            return False
        is_news = answer.attempt > self.attempt
        if is_news:
            self._start_over(answer.attempt)
        if answer.state == TransferState.COMPLETE:
            self._complete(answer)
            return True
        is_news |= self._change_state(answer.state)
        is_news |= self._take_slots(answer.in_host)
        if answer.tokens <= self.tokens:
            return is_news
        self._extend_tables(answer)
        self.tokens = answer.tokens
        return True

    def next_range(self, border_tokens: int, least_tokens: float = 1) -> range | None:
        """Return the tokens to read next; None if there are none, or too few as long as more are being computed.

        Args:
            border_tokens: a range ends at a multiple of this, where no unit of either side is cut, or at the end.
            least_tokens: a shorter range is not worth reading before the prompt is complete.
        """
        if self.is_complete:
            return range(self.read_until, self._end_token) if self.read_until < self._end_token else None
        if self._waits_for_end or self.state != TransferState.COMPUTING:
            return None
        end = min(self.tokens, self._end_token) // border_tokens * border_tokens
        return range(self.read_until, end) if end - self.read_until >= max(least_tokens, 1) else None

    def next_in_host(self, border_tokens: int, least_tokens: float = 1) -> range | None:
        """Return the tokens to read next in P's host memory, if the device does not hold them yet; None if none.

        The arguments are those of ``next_range``.
        """
        if self.in_host is None or self.is_complete or self._waits_for_end or self.state != TransferState.COMPUTING:
            return None
        tokens = self.in_host.tokens
        end = min(tokens.stop, self._end_token) // border_tokens * border_tokens
        is_worth_it = tokens.start <= self.read_until and end - self.read_until >= max(least_tokens, 1)
        return range(self.read_until, end) if is_worth_it else None

    def leave_host(self) -> None:
        """Read nothing more in host memory before P starts over: it does not hold what is wanted."""
        self.in_host = None

    def wait_for_end(self) -> None:
        """Read nothing more before the prompt is complete: its block table lacks a block that is wanted."""
        assert not self.is_complete, "the block table is final"
        self._waits_for_end = True

    def has_read(self, tokens: range, blocks: Iterable[BlocksRead]) -> None:
        """Record that ``tokens`` have been read, from ``blocks``; those do not matter once the prompt is complete."""
        assert tokens.start == self.read_until, "tokens have been left out, or read twice"
        self.read_until = tokens.stop
        if not self.is_complete:
            self._blocks_read += [(group, numbers, self.tables[group].block_ids[numbers]) for group, numbers in blocks]

    def check_integrity(self) -> None:
        """Raise AssertionError unless the numbers of tokens are possible."""
        assert self._first_token <= self.read_until <= self._end_token, "tokens were read that are not wanted"
        # What is here already may be more than what P has computed.
        computed = max(self.tokens, self._first_token, self._host_tokens)
        assert self.is_complete or self.read_until <= computed, "tokens were read that had not been computed"
        assert self.read_until > self._first_token or not self._blocks_read, "nothing was read, but blocks were"

    def _change_state(self, state: str) -> bool:
        before, self.state = self.state, state
        return before != state

    def _start_over(self, attempt: int) -> None:
        self.attempt = attempt
        self.tokens = 0
        self.tables = [BlockTable.of(()) for _ in self.tables]
        self._waits_for_end = False
        self.in_host, self._host_tokens = None, 0
        self._read_again()

    def _take_slots(self, told: SlotRange | None) -> bool:
        """Learn which tokens can be read in host memory. Return whether that is new."""
        if told is None or told.end_token <= self._host_tokens:
            return False
        groups = len(self.tables)
        is_well_formed = len(told.slots) == len(told.first_blocks) == groups
        if not (is_well_formed and told.first_token < told.end_token <= self.remote.remote_num_tokens):
            raise TransferEnded(
                f"the prefill engine has announced tokens {told.first_token} to {told.end_token} in host memory, with "
                f"{len(told.slots)} tables of slots and {len(told.first_blocks)} first blocks; the prompt has "
                f"{self.remote.remote_num_tokens} tokens, and there must be {groups} of each"
            )
        tables = tuple(BlockTable.of(ids, first) for ids, first in zip(told.slots, told.first_blocks, strict=True))
        self.in_host = InHost(range(told.first_token, told.end_token), tables)
        self._host_tokens = told.end_token
        return True

    def _read_again(self) -> None:
        self.read_until = self._first_token
        self._blocks_read = []
        self.restarts += 1

    def _complete(self, answer: Followed) -> None:
        self.remote = msgspec.structs.replace(
            self.remote, remote_block_ids=answer.block_ids, remote_attempt=answer.attempt
        )
        self.state, self.tokens = answer.state, self.remote.remote_num_tokens
        self.tables = [block_table(ids) for ids in answer.block_ids]
        if not all(self._is_in_place(*read) for read in self._blocks_read):
            self._read_again()

    def _is_in_place(self, group: int, numbers: Int64Array, block_ids: Int64Array) -> bool:
        final = self.tables[group].block_ids
        return bool(numbers.max(initial=-1) < len(final) and np.array_equal(final[numbers], block_ids))

    def _extend_tables(self, answer: Followed) -> None:
        tables = self.tables or [BlockTable.of(()) for _ in answer.block_ids]
        for group, (first, table) in enumerate(zip(answer.first_blocks, tables, strict=True)):
            if first > len(table.block_ids):
                raise TransferEnded(
                    f"the prefill engine has announced blocks of cache group {group} from block {first} on, but of "
                    f"those before only {len(table.block_ids)}"
                )
        self.tables = [
            BlockTable.of(np.concatenate([table.block_ids[:first], block_table(ids).block_ids]))
            for table, first, ids in zip(tables, answer.first_blocks, answer.block_ids, strict=True)
        ]

    def _check_tables(self, answer: Followed) -> None:
        """Raise unless an answer's block tables are well-formed. Peers may send any numbers."""
        tables = len(self.tables) or len(answer.block_ids)
        if not len(answer.block_ids) == len(answer.first_blocks) == tables:
            raise TransferEnded(
                f"the prefill engine has answered with {len(answer.block_ids)} block tables and "
                f"{len(answer.first_blocks)} first blocks; there must be {tables} of each"
            )
        is_whole = answer.state == TransferState.COMPLETE
        for first, ids in zip(answer.first_blocks, answer.block_ids, strict=True):
            if first < 0 or (first and is_whole):
                raise TransferEnded(
                    f"the prefill engine has answered {str(answer.state)!r} with a block table from block {first} on; "
                    f"it must begin with {'block 0' if is_whole else 'a block'}"
                )
            if ids and not 0 <= min(ids) <= max(ids) <= _MAX_BLOCK_ID:
                wrong = min(ids) if min(ids) < 0 else max(ids)
                raise TransferEnded(f"the prefill engine has announced block id {wrong}; they are 0 to {_MAX_BLOCK_ID}")

    def _check_prompt(self, answer: Followed) -> None:
        """Raise unless an answer is about the prompt that was ordered: a name may have been given to two requests."""
        known = self.remote
        told = (
            ("engine", answer.engine_id, known.remote_engine_id),
            ("lease", answer.lease_id, known.lease_id),
            ("number of prompt tokens", answer.prompt_tokens, known.remote_num_tokens),
        )
        may_be_untold = (
            ("prompt digest", answer.prompt_digest, known.prompt_digest),
            ("adapter digest", answer.adapter_digest, known.adapter_digest),
            ("media digest", answer.media_digest, known.media_digest),
            ("block sizes", answer.block_sizes, known.remote_block_sizes),
        )
        for what, theirs, ours in (*told, *(each for each in may_be_untold if each[1] and each[2])):
            if theirs != ours:
                raise TransferEnded(
                    f"the prefill engine computes another prompt under transfer id {self._transfer_id!r} than at "
                    f"first: its {what} is {theirs!r}, and was {ours!r}. A transfer id is good for one request"
                )

    def _end_reason(self, answer: Followed) -> str:
        name = f"transfer id {self._transfer_id!r}"
        match answer.state:
            case TransferState.UNKNOWN:
                what = f"the prefill engine does not know {name}, or not any longer"
            case TransferState.ENDED:
                what = f"the prefill engine's request with {name} has ended before its prompt was computed"
            case _:
                what = f"the prefill engine's request with {name} is {str(answer.state)!r}, which is not known here"
        return f"{what}: {answer.reason}" if answer.reason else what
