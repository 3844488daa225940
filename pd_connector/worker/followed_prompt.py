"""What a decode worker knows of a prompt that a prefill engine may still be computing, and what of it to read next.

    first_token           read_until              tokens             end_token
        |---- has been read ----|---- can be read ----|---- is computed ----|

Bookkeeping only: no threads, no memory, and nothing is sent. A prompt that is complete from the start is the case in
which nothing is left to be asked.
"""

from collections.abc import Iterable

import numpy as np

from layout.copies import Int64Array
from pd_connector.orders import PullOrder
from pd_connector.progress import Progress
from transfer.control.messages import Followed, SlotRange, TransferState

#: How long a prefill engine may wait for something new before it answers. A question that waits costs an answer
#: without news that often; and that often, there is a sign of life.
FOLLOW_WAIT_S = 2.0

#: Tokens: more than any prompt has.
_MANY = 1 << 62

#: Block numbers of a cache group of the prefill engine, which have been read from.
BlocksRead = tuple[int, Int64Array]


class FollowedPrompt:
    """Takes the answers about one prompt, and says which tokens can be read. Belongs to one thread at a time.

    Only the final block table is trusted. If a block that was read earlier is not in its place there, everything is
    read again.
    """

    def __init__(self, order: PullOrder) -> None:
        self.progress = Progress.of_order(order)
        self.read_until = order.first_token
        self.restarts = 0  # how many times all that was read came to nothing
        self._left_host: SlotRange | None = None  # slots that do not hold what is wanted
        self._first_token = order.first_token
        self._end_token = order.end_token
        self._waits_for_end = False  # nothing is read before the prompt is complete
        self._blocks_read: list[tuple[int, Int64Array, Int64Array]] = []  # group, block numbers, block ids

    @property
    def is_complete(self) -> bool:
        """Whether the whole prompt can be read, with the final block table."""
        return self.progress.is_complete

    def take(self, answer: Followed) -> bool:
        """Learn from an answer. Return whether it says anything new.

        Raises:
            TransferEnded: as ``Progress.after``.
        """
        before, self.progress = self.progress, self.progress.after(answer)
        if self.progress.attempt != before.attempt:
            self._waits_for_end = False
            self.read_again()
        if self.is_complete and not all(self._is_in_place(*read) for read in self._blocks_read):
            self.read_again()
        return self.progress is not before

    def next_range(self, border_tokens: int, least_tokens: float = 1, most_tokens: int = _MANY) -> range | None:
        """Return the tokens to read next; None if there are none, or too few as long as more are being computed.

        Args:
            border_tokens: a range ends at a multiple of this, where no unit of either side is cut, or at the end.
            least_tokens: a shorter range is not worth reading before the prompt is complete.
            most_tokens: of a range; a multiple of ``border_tokens``.
        """
        if not (self.is_complete or self._may_read_ahead):
            return None
        border = self.read_until // border_tokens * border_tokens + most_tokens
        if self.is_complete:
            end = min(border, self._end_token)
            return range(self.read_until, end) if self.read_until < end else None
        end = min(self.progress.tokens, self._end_token, border) // border_tokens * border_tokens
        return range(self.read_until, end) if end - self.read_until >= max(least_tokens, 1) else None

    def next_in_host(self, border_tokens: int, least_tokens: float = 1, most_tokens: int = _MANY) -> range | None:
        """Return the tokens to read next in P's host memory, if the device does not hold them yet; None if none.

        The arguments are those of ``next_range``.
        """
        told = self.progress.in_host
        if told is None or told is self._left_host or not self._may_read_ahead:
            return None
        border = self.read_until // border_tokens * border_tokens + most_tokens
        end = min(told.end_token, self._end_token, border) // border_tokens * border_tokens
        is_worth_it = told.first_token <= self.read_until and end - self.read_until >= max(least_tokens, 1)
        return range(self.read_until, end) if is_worth_it else None

    def leave_host(self) -> None:
        """Read nothing more in these slots of host memory: they do not hold what is wanted."""
        self._left_host = self.progress.in_host

    def wait_for_end(self) -> None:
        """Read nothing more before the prompt is complete: its block table lacks a block that is wanted."""
        assert not self.is_complete, "the block table is final"
        self._waits_for_end = True

    def read_again(self) -> None:
        """Begin again: what was read counts for nothing."""
        self.read_until = self._first_token
        self._blocks_read = []
        self.restarts += 1

    def has_read(self, tokens: range, blocks: Iterable[BlocksRead]) -> None:
        """Record that ``tokens`` have been read, from ``blocks``; those do not matter once the prompt is complete."""
        assert tokens.start == self.read_until, "tokens have been left out, or read twice"
        self.read_until = tokens.stop
        if not self.is_complete:
            tables = self.progress.tables
            self._blocks_read += [(group, numbers, tables[group].block_ids[numbers]) for group, numbers in blocks]

    def check_integrity(self) -> None:
        """Raise AssertionError unless the numbers of tokens are possible."""
        assert self._first_token <= self.read_until <= self._end_token, "tokens were read that are not wanted"
        # What is here already may be more than what P has computed.
        in_host = self.progress.in_host
        computed = max(self.progress.tokens, self._first_token, in_host.end_token if in_host is not None else 0)
        assert self.is_complete or self.read_until <= computed, "tokens were read that had not been computed"
        assert self.read_until > self._first_token or not self._blocks_read, "nothing was read, but blocks were"

    @property
    def _may_read_ahead(self) -> bool:
        return self.progress.state is TransferState.COMPUTING and not self._waits_for_end

    def _is_in_place(self, group: int, numbers: Int64Array, block_ids: Int64Array) -> bool:
        final = self.progress.tables[group].block_ids
        return bool(numbers.max(initial=-1) < len(final) and np.array_equal(final[numbers], block_ids))
