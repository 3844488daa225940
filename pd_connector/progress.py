"""How far a prefill engine is with a named prompt, put together from its answers. Pure: asks nobody.

An answer tells only what is new. It is checked like all that comes from a peer: what does not fit is an error, and
never becomes part of a block table.
"""

from dataclasses import dataclass

import msgspec

from pd_connector.params import ParamsError, RemotePrefill, RemoteTransfer, check_groups
from transfer.control.messages import Followed, TransferState


class BadProgressError(ValueError):
    """A prefill engine's answer does not fit what it answered before, or has invalid fields."""


@dataclass(frozen=True, slots=True)
class Progress:
    """What is known of a prompt that a prefill engine computes or has computed."""

    #: What to read. Its block table covers the complete tokens.
    remote: RemotePrefill
    tokens: int  # complete
    is_complete: bool  # all tokens are, and the lease is granted
    #: By cache group, the first token of what will be held once all are; empty if the prefill engine has not said.
    first_tokens: tuple[int, ...] = ()


def progress_of(transfer: RemoteTransfer, followed: Followed, known: Progress | None) -> Progress:
    """Return what is known after an answer whose state is COMPUTING or COMPLETE.

    Args:
        transfer: that was asked for.
        followed: the answer.
        known: what was known when it was asked for; None if nothing was.

    Raises:
        BadProgressError: the answer does not fit what was known, or is invalid; the message says how.
    """
    if known is None or followed.attempt != known.remote.remote_attempt:
        before: tuple[tuple[int, ...], ...] = ((),) * len(followed.block_ids)
    else:
        before = known.remote.remote_block_ids
    sizes, firsts = followed.block_sizes, followed.first_blocks
    if not len(before) == len(followed.block_ids) == len(firsts) == len(sizes):
        raise BadProgressError(
            f"{transfer.label} is announced with {len(followed.block_ids)} block tables, {len(firsts)} beginnings of "
            f"them and {len(sizes)} block sizes; {len(before)} each were expected"
        )
    tables = tuple(
        _joined(transfer, ids, first, new) for ids, first, new in zip(before, firsts, followed.block_ids, strict=True)
    )
    held = {
        "remote_engine_id": followed.engine_id,
        "remote_host": transfer.remote_host,
        "remote_port": transfer.remote_port,
        "remote_block_ids": tables,
        "remote_num_tokens": followed.prompt_tokens,
        "remote_block_sizes": sizes,
        "remote_layers": followed.layers,
        "remote_attempt": followed.attempt,
        "lease_id": followed.lease_id,
        "lease_ttl_s": followed.lease_ttl_s,
        "prompt_digest": followed.prompt_digest,
        "adapter_digest": followed.adapter_digest,
        "media_digest": followed.media_digest,
    }
    try:
        remote = msgspec.convert(held, RemotePrefill)
        check_groups(remote)
    except (msgspec.ValidationError, ParamsError) as error:
        raise BadProgressError(f"{transfer.label} is announced with invalid values: {error}") from None
    is_complete = followed.state == TransferState.COMPLETE
    tokens = followed.prompt_tokens if is_complete else followed.tokens
    if tokens > followed.prompt_tokens:
        raise BadProgressError(
            f"{transfer.label} is announced with {tokens} complete tokens of {followed.prompt_tokens}"
        )
    for group, (ids, size) in enumerate(zip(tables, sizes, strict=True)):
        if len(ids) < -(-tokens // size):
            raise BadProgressError(
                f"{transfer.label} is announced with {tokens} complete tokens, and cache group {group} has "
                f"{len(ids)} blocks of {size} tokens for them: some are missing"
            )
    if len(followed.first_tokens) not in {0, len(tables)}:
        raise BadProgressError(
            f"{transfer.label} is announced with the first tokens of {len(followed.first_tokens)} cache groups; "
            f"{len(tables)} were expected"
        )
    return Progress(remote, tokens, is_complete, followed.first_tokens)


def _joined(transfer: RemoteTransfer, ids: tuple[int, ...], first: int, new: tuple[int, ...]) -> tuple[int, ...]:
    """Return a block table with ``new`` in place of what begins with block ``first``."""
    if not 0 <= first <= len(ids):
        raise BadProgressError(
            f"{transfer.label} is announced from block {first} on, and {len(ids)} blocks are known: some are missing"
        )
    return ids[:first] + new
