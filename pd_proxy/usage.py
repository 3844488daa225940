"""What an answer's ``usage`` says of cached prompt tokens: P's figures in the place of D's. No I/O.

D has taken the whole prompt over from P. vLLM counts that as cached, unless the ``kv_transfer_params`` that D was given
say what P had cached: they do if the legs go in turn and P's vLLM is 0.31 or newer, and cannot if D gets its leg
together with P. What a single server would have said is what P says, which has computed the rest of the prompt.

Only the one JSON object ``prompt_tokens_details`` is replaced; every other byte of an answer passes as it came.
"""

import json
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import asdict, dataclass
from typing import Any

#: Up to the value, if that is an object. Inside of a string, the quotes would stand behind backslashes.
_KEY = re.compile(rb'"prompt_tokens_details"\s*:\s*(?=\{)')
_OBJECT = re.compile(rb"\{(?:[^{}]|\{[^{}]*\})*\}")
_LONGEST_KEY = 64  # bytes of the key and the spaces that it is looked for in
_LONGEST_OBJECT = 4096  # more is nothing that vLLM sends


@dataclass(frozen=True, slots=True)
class PromptDetails:
    """A prefill server's figures of one prompt, under vLLM's names; None where it did not tell."""

    cached_tokens: int | None = None
    created_cache_tokens: int | None = None

    @classmethod
    def of(cls, answer: dict[str, Any]) -> "PromptDetails":
        """Return what a prefill server's answer tells."""
        usage = answer.get("usage")
        details = usage.get("prompt_tokens_details") if isinstance(usage, dict) else None
        told = details if isinstance(details, dict) else {}
        transfer = answer.get("kv_transfer_params")
        cached = _count(transfer.get("remote_prefill_cached_tokens")) if isinstance(transfer, dict) else None
        if cached is None:
            cached = _count(told.get("cached_tokens"))
        return cls(cached, _count(told.get("created_cache_tokens")))

    def instead_of(self, told: dict[str, Any]) -> dict[str, Any]:
        """Return a decode server's figures with the prefill server's in their places, null where they are unknown."""
        return told | {name: value for name, value in asdict(self).items() if name in told}


Details = Callable[[], Awaitable[PromptDetails]]


async def corrected(pieces: AsyncIterator[bytes], details: Details) -> AsyncIterator[bytes]:
    """Yield an answer as it comes, with P's figures in it. No byte waits for the next but those of D's figures.

    Args:
        pieces: of D's answer, JSON or a stream of JSON events.
        details: waits for P's figures; called when D's have come.
    """
    context, rest = b"", b""  # the end of what has been passed on; an object that is not whole yet
    async for piece in pieces:
        passed, rest = b"", rest + piece
        while found := _KEY.search(context + rest):  # never in the context alone: it ends before an object
            start = found.end() - len(context)
            passed += rest[:start]
            context, rest = (context + rest[:start])[-_LONGEST_KEY:], rest[start:]
            whole = _OBJECT.match(rest)
            if whole is None and len(rest) <= _LONGEST_OBJECT:
                break
            size = whole.end() if whole else 1
            passed += _replaced(rest[:size], await details()) if whole else rest[:size]
            context, rest = b"", rest[size:]
        else:
            passed += rest
            context, rest = (context + rest)[-_LONGEST_KEY:], b""
        if passed:
            yield passed
    if rest:
        yield rest


def _replaced(raw: bytes, details: PromptDetails) -> bytes:
    try:
        told = json.loads(raw)
    except ValueError:  # nothing that vLLM sends
        return raw
    return json.dumps(details.instead_of(told), separators=(",", ":")).encode()


def _count(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None
