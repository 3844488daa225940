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
from typing import Any

from pd_proxy.apis import Body
from pd_proxy.settings import AUTO

#: Why a decode server computes a prompt that could take the detour.
SHORT, SOONER, COMPARED = "a short prompt", "a short prompt, sooner so", "a short prompt, to compare"

_NO_PROMPT = frozenset({"model", "user", "cache_salt", "request_id", "session_id"})
_LONGEST = 512  # tokens of a prompt that ``auto`` gives to D alone
_SHARE = 0.1  # of all prompt tokens, at most, that ``auto`` gives to D alone
_SAMPLES = 24  # first-token times that are kept, of each way and length
_ENOUGH = 5  # of them to judge by
_EVERY = 20  # which request of a length takes the way that seems slower, so that a change is seen
_LEAST, _MOST = 0.5, 20.0  # characters of a token: anything else is no text
_WEIGHT = 0.05  # of the last prompt among those before it, in the characters of a token


@dataclass(frozen=True, slots=True)
class PromptSize:
    """How long a request's prompt is, as far as its body shows."""

    ids: int  # tokens given as numbers
    characters: int  # of all texts in the body; an image counts with those of its URL

    @classmethod
    def of(cls, body: Body) -> "PromptSize":
        """Return the size of a request's prompt."""
        return cls(*_size({name: value for name, value in body.items() if name not in _NO_PROMPT}))


class Detour:
    """Decides for each prompt, and learns from what became of it. One for a proxy."""

    def __init__(self, prefill_from: int | str) -> None:
        """``prefill_from``: tokens of the shortest prompt that takes the detour, or ``AUTO``."""
        self._from = prefill_from
        self._characters = 4.0  # of a token
        self._tokens = 0.0  # of all prompts, and of those that D has computed alone
        self._alone = 0.0
        self._ways: dict[int, _Ways] = {}

    def reason_against(self, size: PromptSize) -> str | None:
        """Return why a decode server is to compute a prompt by itself; None if it takes the detour."""
        tokens = self._tokens_of(size)
        if self._from != AUTO:
            return SHORT if tokens < int(self._from) else None
        reason = self._auto(tokens)
        self._tokens += tokens
        self._alone += tokens if reason else 0
        return reason

    def learn(self, size: PromptSize, tokens: int | None, *, alone: bool, first_token_s: float | None) -> None:
        """Note what became of a request.

        Args:
            size: of its prompt.
            tokens: of the prompt, by a prefill server's usage; None if that is not known.
            alone: whether D computed it by itself.
            first_token_s: how long the client waited for the first token; None if that is not known.
        """
        guess = self._tokens_of(size)
        if tokens is not None and tokens > size.ids and _LEAST <= size.characters / (tokens - size.ids) <= _MOST:
            self._characters += _WEIGHT * (size.characters / (tokens - size.ids) - self._characters)
        if first_token_s is not None and self._from == AUTO and guess <= _LONGEST:
            self._ways.setdefault(_class_of(guess), _Ways()).note(first_token_s, alone=alone)

    def _tokens_of(self, size: PromptSize) -> float:
        return size.ids + size.characters / self._characters

    def _auto(self, tokens: float) -> str | None:
        if tokens > _LONGEST or self._alone + tokens > _SHARE * (self._tokens + tokens):
            return None
        return self._ways.setdefault(_class_of(tokens), _Ways()).choice()


class _Ways:
    """The first-token times of prompts of one length, by way."""

    def __init__(self) -> None:
        self._taken: dict[bool, deque[float]] = {alone: deque(maxlen=_SAMPLES) for alone in (False, True)}
        self._asked = 0

    def note(self, seconds: float, *, alone: bool) -> None:
        self._taken[alone].append(seconds)

    def choice(self) -> str | None:
        """Return why D is to compute the next prompt alone; None for the detour."""
        self._asked += 1
        detour, alone = self._taken[False], self._taken[True]
        if min(len(detour), len(alone)) < _ENOUGH:
            return COMPARED if len(alone) < min(len(detour), _ENOUGH) else None
        is_sooner = statistics.median(alone) < statistics.median(detour)
        is_trial = self._asked % _EVERY == 0
        if is_sooner == is_trial:
            return None
        return SOONER if is_sooner else COMPARED


def _class_of(tokens: float) -> int:
    """Return a number that prompts of about the same length share."""
    return max(int(tokens), 32).bit_length()


def _size(value: Any) -> tuple[int, int]:
    """Return how many token ids and how many characters of text a JSON value has: lists of numbers are of ids."""
    if isinstance(value, str):
        return 0, len(value)
    if isinstance(value, dict):
        value = list(value.values())
    elif isinstance(value, list) and value and isinstance(value[0], int):
        return len(value), 0
    ids = characters = 0
    for each in value if isinstance(value, list) else ():
        more, text = _size(each)
        ids, characters = ids + more, characters + text
    return ids, characters
