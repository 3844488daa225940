"""Which prompts take the detour over a prefill server, and which a decode server computes by itself. No I/O.

A short prompt can have its first token sooner without the detour. But what D computes delays the streams that it runs.
So ``auto`` has D compute few tokens: prompts of at most 512, which together are at most a tenth of all prompt tokens,
and only where streams have shown that D alone is sooner. It learns that by trying the other way now and then.

Nothing is tokenized. Token ids are counted; of texts, characters are, and divided by how many a token has had so far:
P's answers tell how many tokens a prompt had.
"""

import statistics
from collections import deque
from dataclasses import dataclass

from pd_proxy.apis import Body
from pd_proxy.settings import AUTO

#: Why a decode server computes a prompt that could take the detour.
SHORT = "a short prompt"
#: Why a prompt takes the detour.
LONG, MEDIA = "a long prompt", "a prompt with media"
BEYOND, UNKNOWN = "a short prompt, beyond D's share", "a short prompt, not compared yet"
#: Why either.
SOONER, COMPARED = "a short prompt, sooner so", "a short prompt, to compare"

#: What of a body can be its prompt, in any API; and members of parts that are no text.
_PROMPT = ("prompt", "suffix", "messages", "system", "input", "instructions", "tools", "documents", "token_ids")
_MEDIA = frozenset(f"{kind}_{form}" for kind in ("image", "video", "audio") for form in ("url", "embeds")) | {
    "input_audio", "source", "file_id"
}  # fmt: skip
_LONGEST = 512  # tokens of a prompt that ``auto`` gives to D alone
_SHARE = 0.1  # of all prompt tokens, at most, that ``auto`` gives to D alone
_MOST_CREDIT = 4096  # tokens of this share that were not used: of a night with long prompts, say
_SAMPLES = 24  # first-token times that are kept, of each way and length
_ENOUGH = 5  # of them to judge by
_EVERY = 20  # which request of a length takes the way that seems slower, so that a change is seen
_LEAST, _MOST = 0.5, 20.0  # characters of a token: anything else is no text
_WEIGHT = 0.05  # of the last prompt among those before it, in the characters of a token


@dataclass(frozen=True, slots=True)
class PromptSize:
    """How long a request's prompt is, as far as its body shows."""

    ids: int  # tokens given as numbers
    characters: int  # of all texts in the prompt
    has_media: bool = False  # images, say, of which nothing here tells how many tokens they have

    @classmethod
    def of(cls, body: Body) -> "PromptSize":
        """Return the size of a request's prompt."""
        if body.get("features") or body.get("content_parts"):  # of /inference/v1/generate, beside its token ids
            return cls(0, 0, has_media=True)
        ids = characters = 0
        values = [value for name, value in body.items() if name in _PROMPT]
        while values:
            value = values.pop()
            if isinstance(value, str):
                characters += len(value)
            elif isinstance(value, dict):
                if not _MEDIA.isdisjoint(value):
                    return cls(ids, characters, has_media=True)
                values += value.values()
            elif isinstance(value, list):
                if value and isinstance(value[0], int):
                    ids += len(value)
                else:
                    values += value
        return cls(ids, characters)


@dataclass(frozen=True, slots=True)
class Choice:
    """Which way a prompt takes, and why."""

    alone: bool  # a decode server computes it by itself
    reason: str


class Detour:
    """Decides for each prompt, and learns from what became of it. One for a proxy."""

    def __init__(self, prefill_from: int | str) -> None:
        """``prefill_from``: tokens of the shortest prompt that takes the detour, or ``AUTO``."""
        self._from = prefill_from
        self._characters = 4.0  # of a token
        self._credit = 0.0  # tokens that D may compute alone
        self._ways: dict[int, _Ways] = {}

    def choice(self, size: PromptSize, *, streams: bool) -> Choice:
        """Choose the way of a prompt. Only if it ``streams``, its first-token time can teach something."""
        if size.has_media:
            return Choice(alone=False, reason=MEDIA)
        tokens = self._tokens_of(size)
        if self._from != AUTO:
            return Choice(alone=True, reason=SHORT) if tokens < int(self._from) else Choice(alone=False, reason=LONG)
        if tokens > min(_LONGEST, self._credit):
            return Choice(alone=False, reason=LONG if tokens > _LONGEST else BEYOND)
        choice = self._ways.setdefault(_class_of(tokens), _Ways()).choice(streams=streams)
        self._credit -= tokens if choice.alone else 0
        return choice

    def learn(self, size: PromptSize, tokens: int | None, *, alone: bool, first_token_s: float | None) -> None:
        """Note what became of a request.

        Args:
            size: of its prompt.
            tokens: of the prompt, by a prefill server's usage; None if that is not known.
            alone: whether D computed it by itself.
            first_token_s: how long the client waited for the first token; None if that is not known.
        """
        if tokens is not None and not alone:
            self._credit = min(self._credit + tokens * _SHARE / (1 - _SHARE), _MOST_CREDIT)
        if size.has_media:
            return
        guess = self._tokens_of(size)
        if tokens is not None and tokens > size.ids and _LEAST <= size.characters / (tokens - size.ids) <= _MOST:
            self._characters += _WEIGHT * (size.characters / (tokens - size.ids) - self._characters)
        if first_token_s is not None and self._from == AUTO and guess <= _LONGEST:
            self._ways.setdefault(_class_of(guess), _Ways()).note(first_token_s, alone=alone)

    def _tokens_of(self, size: PromptSize) -> float:
        return size.ids + size.characters / self._characters


class _Ways:
    """The first-token times of prompts of one length, by way."""

    def __init__(self) -> None:
        self._taken: dict[bool, deque[float]] = {alone: deque(maxlen=_SAMPLES) for alone in (False, True)}
        self._asked = 0

    def note(self, seconds: float, *, alone: bool) -> None:
        self._taken[alone].append(seconds)

    def choice(self, *, streams: bool) -> Choice:
        """Return the way of the next prompt. Only streams are used to compare."""
        self._asked += streams
        detour, alone = self._taken[False], self._taken[True]
        if min(len(detour), len(alone)) < _ENOUGH:
            if not streams:
                return Choice(alone=False, reason=UNKNOWN)
            return Choice(alone=len(alone) < min(len(detour), _ENOUGH), reason=COMPARED)
        is_sooner = statistics.median(alone) < statistics.median(detour)
        is_trial = streams and self._asked % _EVERY == 0
        return Choice(alone=is_sooner != is_trial, reason=COMPARED if is_trial else SOONER)


def _class_of(tokens: float) -> int:
    """Return a number that prompts of about the same length share."""
    return max(int(tokens), 32).bit_length()
