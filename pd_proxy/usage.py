"""What an answer's ``usage`` says of cached prompt tokens: P's figures in the place of D's. No I/O.

D has taken the whole prompt over from P. vLLM counts that as cached, unless the ``kv_transfer_params`` that D was given
say what P had cached: they do if the legs go in turn and P's vLLM is 0.31 or newer, and cannot if D gets its leg
together with P. What a single server would have said is what P says, which has computed the rest of the prompt.

Only the JSON object with these figures is replaced; every other byte of an answer passes as it came.
"""

import asyncio
import json
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

_OBJECT = re.compile(rb"\{(?:[^{}]|\{[^{}]*\})*\}")
_LONGEST_KEY = 128  # bytes of the key and the spaces that it is looked for in
_LONGEST_OBJECT = 4096  # more is nothing that vLLM sends


@dataclass(frozen=True, slots=True)
class PromptDetails:
    """A prefill server's figures of one prompt, in tokens; None where it did not tell."""

    cached: int | None = None
    created: int | None = None


#: Waits for those of P.
Details = Callable[[], Awaitable[PromptDetails]]


@dataclass(frozen=True, slots=True)
class Figures:
    """What an API calls the figures of a prompt in its answers."""

    member: str  # of the JSON object that has them
    before: str = ""  # a regular expression of what stands before the member, where its name alone is not enough
    cached: str = "cached_tokens"
    created: str = "created_cache_tokens"
    turns: str = ""  # the list of the cached tokens of each turn, if there is one
    whole: str = "prompt_tokens"  # all tokens of the prompt, beside the figures
    others: str = ""  # all other tokens of the prompt, if the figures add up to it

    def of(self, answer: dict[str, Any]) -> PromptDetails:
        """Return what a prefill server's answer tells."""
        told = self.told(answer)
        transfer = answer.get("kv_transfer_params")
        cached = _count(transfer.get("remote_prefill_cached_tokens")) if isinstance(transfer, dict) else None
        if cached is None:
            cached = _count(told.get(self.cached))
        return PromptDetails(cached, _count(told.get(self.created)))

    def prompt_tokens(self, answer: dict[str, Any]) -> int | None:
        """Return how many tokens the prompt of a whole answer has; None if it does not tell."""
        usage = answer.get("usage")
        if not isinstance(usage, dict):
            return None
        if self.others:
            known = [_count(usage.get(name)) for name in (self.others, self.cached, self.created)]
            return None if known[0] is None else sum(each or 0 for each in known)
        return _count(usage.get(self.whole))

    def told(self, answer: dict[str, Any]) -> dict[str, Any]:
        """Return the figures of a whole answer as they stand there; nothing if there are none."""
        usage = answer.get("usage")
        found = usage.get(self.member) if isinstance(usage, dict) and self.member != "usage" else usage
        return found if isinstance(found, dict) else {}

    def key(self) -> re.Pattern[bytes]:
        """Return what stands before the figures. Inside of a string, the quotes would stand behind backslashes."""
        return re.compile(rb'%b"%b"\s*:\s*(?=\{)' % (self.before.encode(), self.member.encode()))

    async def replaced(self, raw: bytes, details: Details) -> bytes:
        """Return a decode server's figures with the prefill server's in their places, null where they are unknown."""
        try:
            told = json.loads(raw)
        except ValueError:  # nothing that vLLM sends
            return raw
        if told.keys().isdisjoint((self.cached, self.created)):  # as where a message begins: P may still compute
            return raw
        found = await details()
        known = {self.cached: found.cached, self.created: found.created}
        changed = told | {name: value for name, value in known.items() if name in told}
        if isinstance(turns := told.get(self.turns), list) and len(turns) == 1:
            changed[self.turns] = [found.cached or 0]
        if self.others and changed != told:
            whole = sum(_count(told.get(name)) or 0 for name in (self.others, *known))
            changed[self.others] = max(0, whole - sum(_count(changed.get(name)) or 0 for name in known))
        return raw if changed == told else json.dumps(changed, separators=(",", ":")).encode()


#: Of completions and chat completions.
CHAT_DETAILS = Figures("prompt_tokens_details")
#: Its streams begin with what was asked, and schemas of tools may have members of the same name.
RESPONSES_DETAILS = Figures(
    "input_tokens_details", before=r'"usage"\s*:\s*\{\s*"input_tokens"\s*:\s*\d+\s*,\s*',
    created="cache_write_tokens", turns="cached_tokens_per_turn", whole="input_tokens",
)  # fmt: skip
ANTHROPIC = Figures(
    "usage", cached="cache_read_input_tokens", created="cache_creation_input_tokens", others="input_tokens"
)


async def corrected(pieces: AsyncIterator[bytes], figures: Figures, details: Details) -> AsyncIterator[bytes]:
    """Yield an answer as it comes, with P's figures in it. No byte waits for the next but those of D's figures.

    Args:
        pieces: of D's answer, a stream of JSON events.
        figures: of its API.
        details: waits for P's figures; called when D's have come.
    """
    key = figures.key()
    context, rest = b"", b""  # the end of what has been passed on; an object that is not whole yet
    async for piece in pieces:
        data, passed, begin, sent = context + rest + piece, bytearray(), 0, len(context)
        while found := key.search(data, begin):  # never in the context alone: it ends before an object
            start = found.end()
            passed += data[sent:start]
            whole = _OBJECT.match(data, start)
            if whole is None and len(data) - start <= _LONGEST_OBJECT:
                context, rest = data[max(begin, start - _LONGEST_KEY) : start], data[start:]
                break
            begin = sent = whole.end() if whole else start + 1
            passed += await figures.replaced(data[start:begin], details) if whole else data[start:begin]
            await asyncio.sleep(0)  # a client may have a piece of thousands echoed
        else:
            passed += data[sent:]
            context, rest = data[max(begin, len(data) - _LONGEST_KEY) :], b""
        if passed:
            yield bytes(passed)
    if rest:
        yield rest


async def corrected_whole(content: bytes, figures: Figures, details: Details) -> bytes:
    """Return a whole answer with P's figures in it. What only looks like figures, in a tool's arguments say, stays."""
    try:
        told = figures.told(json.loads(content))
    except (ValueError, AttributeError, RecursionError):  # nothing that vLLM sends
        return content
    for before in reversed(list(figures.key().finditer(content))):
        found = _OBJECT.match(content, before.end())
        with suppress(ValueError):
            if found is not None and json.loads(found[0]) == told:
                return content[: found.start()] + await figures.replaced(found[0], details) + content[found.end() :]
    return content


def _count(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**63 else None
