"""How far a prefill engine is with a prompt, put together from its answers, and what to ask it next. Pure: asks nobody.

Both halves of a decode engine keep such a book: the scheduler until it can order the pull, each worker while it reads.
An answer tells only what is new. It is checked like all that comes from a peer: what does not fit is an error, and
never becomes part of a block table.
"""

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NoReturn

import msgspec

from layout.plan import BlockTable
from pd_connector.orders import PullOrder, block_table
from pd_connector.params import ParamsError, RemotePrefill, RemoteTransfer, check_groups
from transfer.control.messages import Follow, Followed, SlotRange, TransferState
from transfer.errors import printable

_Tables = tuple[tuple[int, ...], ...]

#: Blocks of a group beyond one for each token of the prompt: for drafts.
_MOST_MORE_BLOCKS = 1024
#: Of ``RemotePrefill``: what may differ between two answers about one prompt.
_CHANGING = frozenset({"remote_block_ids", "remote_attempt", "lease_ttl_s"})


class TransferEnded(Exception):  # noqa: N818
    """The prompt will not be complete, or an answer does not fit what is known of it. The message says which."""


@dataclass(frozen=True)
class Progress:
    """What is known of a prompt that a prefill engine computes, will compute or has computed.

    Answers may be repeated, late or out of order: what is older than what is known changes nothing. Only the block
    table of a complete prompt is final.
    """

    #: What to read: its block table covers the complete tokens. Without a lease id as long as nothing was computed.
    remote: RemotePrefill
    transfer_id: str  # empty if the prompt was complete from the start
    state: TransferState = TransferState.UNKNOWN
    tokens: int = 0  # complete
    #: By cache group, the first token of what will be held once all are; empty if the prefill engine has not said.
    first_tokens: tuple[int, ...] = ()
    in_host: SlotRange | None = None  # the last slots of host memory that were announced in this attempt

    @classmethod
    def of_transfer(cls, transfer: RemoteTransfer) -> "Progress":
        """Return what is known of a transfer before its prefill engine has been asked."""
        host, port = transfer.remote_host, transfer.remote_port
        nothing = RemotePrefill(transfer.remote_engine_id, host, port, (), 0, "", 0.0, "", remote_attempt=-1)
        return cls(nothing, transfer.transfer_id)

    @classmethod
    def of_order(cls, order: PullOrder) -> "Progress":
        """Return what is known of a prompt when its pull is ordered."""
        if order.transfer_id:
            return cls(order.remote, order.transfer_id, TransferState.COMPUTING, order.complete_tokens)
        return cls(order.remote, "", TransferState.COMPLETE, order.remote.remote_num_tokens)

    @property
    def label(self) -> str:
        """The transfer and where it is, for people."""
        return f"transfer {self.transfer_id} at {self.remote.engine.at}"

    @property
    def attempt(self) -> int:
        """How many times the prompt was started over; -1 if that is not known."""
        return self.remote.remote_attempt

    @property
    def is_complete(self) -> bool:
        """Whether all tokens are, and the lease is granted."""
        return self.state is TransferState.COMPLETE

    @cached_property
    def tables(self) -> list[BlockTable]:
        """The block tables of the prefill engine's cache groups, from block 0 on, as far as they are known."""
        return [block_table(ids) for ids in self.remote.remote_block_ids]

    @cached_property
    def host_tables(self) -> list[BlockTable]:
        """The slots of ``in_host``, by cache group, numbered as the blocks that they hold."""
        told = self.in_host
        return [] if told is None else [*map(BlockTable.of, told.slots, told.first_blocks)]

    def question(self, wait_s: float, *, reads_host: bool = False) -> Follow:
        """Return the message that asks for more, which P answers after ``wait_s`` seconds at the latest.

        ``reads_host``: whether P's host memory can be read.
        """
        in_host = self.in_host.end_token if self.in_host is not None else 0
        return Follow(
            self.remote.remote_engine_id, self.transfer_id, self.attempt, self.tokens, self.state, max(wait_s, 0.0),
            in_host if reads_host else -1,
        )  # fmt: skip

    def without_tables(self) -> "Progress":
        """Return the same for who asks only when the prompt is complete, and is not told of blocks before."""
        return self._changed(tokens=self.remote.remote_num_tokens)

    def after(self, answer: Followed) -> "Progress":
        """Return what is known after an answer; the same object if it says nothing about the prompt that is new.

        Raises:
            TransferEnded: the prompt will not be complete, or the answer is invalid, or of another prompt.
        """
        if self.is_complete or answer.state == self.state == TransferState.UNKNOWN:
            return self
        match answer.state:
            case TransferState.QUEUED | TransferState.COMPUTING | TransferState.COMPLETE:
                if answer.attempt < self.attempt:
                    return self
            case TransferState.UNKNOWN:
                reason = f": {printable(answer.reason)}" if answer.reason else ""
                raise TransferEnded(f"the prefill engine no longer knows {self.label}, which was {self.state}{reason}")
            case _:  # it has ended, or is in a state of a later version
                reason = printable(answer.reason) or f"it is {str(answer.state)!r}"
                raise TransferEnded(f"the prefill engine says that {self.label} has ended: {reason}")
        begun = self if answer.attempt == self.attempt else self._started_over(answer.attempt)
        if answer.state == TransferState.QUEUED:  # again, if it was being computed: its blocks may be others' by now
            engine_id = self.remote.remote_engine_id or answer.engine_id
            remote = msgspec.structs.replace(begun.remote, remote_engine_id=engine_id)
            return begun._changed(remote=remote, state=TransferState.QUEUED)
        return begun._computed(answer)

    def _changed(self, **changes: Any) -> "Progress":
        return self if all(getattr(self, name) == new for name, new in changes.items()) else replace(self, **changes)

    def _started_over(self, attempt: int) -> "Progress":
        nothing = tuple(() for _ in self.remote.remote_block_ids)
        remote = msgspec.structs.replace(self.remote, remote_block_ids=nothing, remote_attempt=attempt)
        return replace(self, remote=remote, tokens=0, in_host=None)

    def _computed(self, answer: Followed) -> "Progress":
        """Return what is known after an answer about this attempt that says what has been computed."""
        state, told = TransferState(answer.state), self._told(answer)
        tokens = answer.prompt_tokens if state is TransferState.COMPLETE else answer.tokens
        in_host = self._slots_after(answer)
        if self.remote.lease_id and state is TransferState.COMPUTING and tokens <= self.tokens:
            return self._changed(state=state, in_host=in_host)
        tables = self._joined(answer)
        if tokens > answer.prompt_tokens:
            self._refuse(f"with {tokens} complete tokens of {answer.prompt_tokens}")
        held = tokens - 1 if state is TransferState.COMPLETE else tokens  # the last one may be left to this engine
        for group, (ids, size) in enumerate(zip(tables, answer.block_sizes, strict=True)):
            if len(ids) > answer.prompt_tokens + _MOST_MORE_BLOCKS:
                self._refuse(f"with {len(ids)} blocks of cache group {group}, for {answer.prompt_tokens} tokens")
            if len(ids) < -(-held // size):
                self._refuse(
                    f"with {tokens} complete tokens, and cache group {group} has {len(ids)} blocks of {size} tokens "
                    "for them: some are missing"
                )
        remote = msgspec.structs.replace(
            self.remote if self.remote.lease_id else told, remote_block_ids=tables, remote_attempt=answer.attempt
        )
        return Progress(remote, self.transfer_id, state, tokens, answer.first_tokens, in_host)

    def _told(self, answer: Followed) -> RemotePrefill:
        """Return what an answer alone says, which must be valid and about the same prompt as all before."""
        tables, firsts, sizes = len(answer.block_ids), len(answer.first_blocks), len(answer.block_sizes)
        expected = len(self.remote.remote_block_ids) or tables
        if not tables == firsts == sizes == expected:
            self._refuse(
                f"with {tables} block tables, {firsts} beginnings of them and {sizes} block sizes; {expected} each "
                "were expected"
            )
        if len(answer.first_tokens) not in {0, tables}:
            self._refuse(f"with the first tokens of {len(answer.first_tokens)} cache groups; {tables} were expected")
        held = {
            "remote_engine_id": answer.engine_id,
            "remote_host": self.remote.remote_host,
            "remote_port": self.remote.remote_port,
            "remote_block_ids": answer.block_ids,
            "remote_num_tokens": answer.prompt_tokens,
            "remote_block_sizes": answer.block_sizes,
            "remote_layers": answer.layers,
            "remote_attempt": answer.attempt,
            "lease_id": answer.lease_id,
            "lease_ttl_s": answer.lease_ttl_s,
            "prompt_digest": answer.prompt_digest,
            "adapter_digest": answer.adapter_digest,
            "media_digest": answer.media_digest,
        }
        try:
            told = msgspec.convert(held, RemotePrefill)
            check_groups(told)
        except (msgspec.ValidationError, ParamsError) as error:
            self._refuse(f"with invalid values: {error}")
        for name in held:
            theirs, ours = getattr(told, name), getattr(self.remote, name)
            if name not in _CHANGING and theirs and ours and theirs != ours:
                raise TransferEnded(
                    f"the prefill engine computes another prompt as {self.label} than at first: its "
                    f"{name.removeprefix('remote_')} is {theirs!r}, and was {ours!r}. A transfer id is good for one "
                    "request"
                )
        return told

    def _joined(self, answer: Followed) -> _Tables:
        """Return the block tables with those of an answer in place of what begins where they do."""
        if answer.state == TransferState.COMPLETE:
            if any(answer.first_blocks):
                self._refuse(f"as complete from blocks {answer.first_blocks} on: it must be told whole")
            return answer.block_ids
        known = self.remote.remote_block_ids or ((),) * len(answer.block_ids)
        for ids, first in zip(known, answer.first_blocks, strict=True):
            if not 0 <= first <= len(ids):
                self._refuse(f"from block {first} on, and {len(ids)} blocks are known: some are missing")
        return tuple(
            ids[:first] + new for ids, first, new in zip(known, answer.first_blocks, answer.block_ids, strict=True)
        )

    def _slots_after(self, answer: Followed) -> SlotRange | None:
        """Return the last slots that are known after an answer."""
        told, groups, tokens = answer.in_host, len(answer.block_ids), answer.prompt_tokens
        if told is None or (self.in_host is not None and told.end_token <= self.in_host.end_token):
            return self.in_host
        is_well_formed = len(told.slots) == len(told.first_blocks) == groups
        if not (is_well_formed and told.first_token < told.end_token <= tokens):
            self._refuse(
                f"with tokens {told.first_token} to {told.end_token} in host memory, {len(told.slots)} tables of slots "
                f"and {len(told.first_blocks)} first blocks; the prompt has {tokens} tokens, and there must be "
                f"{groups} of each"
            )
        return told

    def _refuse(self, what: str) -> NoReturn:
        raise TransferEnded(f"{self.label} is announced {what}")
