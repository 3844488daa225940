"""What a prefill engine answers of a named prompt, and decode legs that name it."""

from typing import Any

from pd_connector.params import prompt_digest
from tests.support.connector.requests import FakeRequest, a_prompt
from transfer.control.messages import Followed, TransferState

_BLOCK_TOKENS = 16


def a_named_request(request_id: str, tokens: int = 70, *, seed: int = 0, **changes: Any) -> FakeRequest:
    """The decode leg of a request whose legs were sent at once; ``changes`` are those of its params."""
    params = {"do_remote_prefill": True, "transfer_id": "T", "remote_host": "10.0.0.5", "remote_port": 8998}
    return FakeRequest(request_id, a_prompt(tokens, seed), params | changes)


def blocks_of(tokens: int, *, first: int = 100) -> tuple[int, ...]:
    """The block table of this many tokens at the prefill engine."""
    return tuple(range(first, first + -(-tokens // _BLOCK_TOKENS)))


def computing(complete: int, tokens: int = 70, *, known: int = 0, attempt: int = 0, **changes: Any) -> Followed:
    """The first ``complete`` tokens of a prompt are complete; D knows of ``known`` tokens."""
    first = known // _BLOCK_TOKENS
    fields: dict[str, Any] = {
        "engine_id": "engine-p",
        "state": TransferState.COMPUTING,
        "lease_id": "L",
        "lease_ttl_s": 30.0,
        "attempt": attempt,
        "prompt_tokens": tokens,
        "prompt_digest": prompt_digest(a_prompt(tokens), ()),
        "block_sizes": (_BLOCK_TOKENS,),
        "tokens": complete,
        "block_ids": (blocks_of(complete, first=100 * (attempt + 1))[first:],),
        "first_blocks": (first,),
    }
    return Followed(**{**fields, **changes})


def complete(tokens: int = 70, *, attempt: int = 0, **changes: Any) -> Followed:
    """The whole prompt is."""
    return computing(tokens, tokens, attempt=attempt, **{"state": TransferState.COMPLETE, **changes})


UNKNOWN = Followed("engine-p", TransferState.UNKNOWN)
QUEUED = Followed("engine-p", TransferState.QUEUED)


def ended(reason: str = "") -> Followed:
    """The request has left without it."""
    return Followed("engine-p", TransferState.ENDED, "L", reason=reason)
