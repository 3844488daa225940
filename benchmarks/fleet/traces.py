"""Requests and when they arrive, in the format of the Mooncake paper's traces: a line of JSON for each request.

    {"timestamp": 1500, "input_length": 700, "output_length": 32, "hash_ids": [4, 9]}

``timestamp`` is in milliseconds since the trace's start. ``hash_ids`` names each 512 tokens of the prompt, the last of
which may be fewer: prompts that begin with the same ids begin with the same tokens.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import msgspec

BLOCK_TOKENS = 512


class TraceError(ValueError):
    """A line of a trace is not a request; the message names line, value and rule."""


class _Line(msgspec.Struct, frozen=True):
    timestamp: Annotated[float, msgspec.Meta(ge=0)]
    input_length: Annotated[int, msgspec.Meta(ge=1)]
    output_length: Annotated[int, msgspec.Meta(ge=1)]
    hash_ids: tuple[int, ...]


@dataclass(frozen=True)
class Arrival:
    """One request of a trace."""

    at_s: float
    input_tokens: int
    output_tokens: int
    hash_ids: tuple[int, ...]

    @property
    def whole_ids(self) -> tuple[int, ...]:
        """The ids of the whole blocks: those that another prompt may share."""
        return self.hash_ids[: self.input_tokens // BLOCK_TOKENS]


@dataclass(frozen=True)
class Mix:
    """What a generated trace is like."""

    requests: int
    per_s: float  # arrivals, by chance at this mean
    input_tokens: int  # the median; lengths are log-normal
    output_tokens: int  # likewise
    spread: float = 0.6  # the deviation of a length's logarithm; 0: all are equal
    continued: float = 0.3  # the share of prompts that begin with an earlier one's whole blocks
    longest: int = 131_072  # tokens of a prompt, at most
    shortest: int = 16


def read(path: Path) -> list[Arrival]:
    """Return the requests of a trace.

    Raises:
        TraceError: a line breaks a rule, or there is none.
    """
    arrivals: list[Arrival] = []
    for number, line in enumerate(path.read_text().splitlines(), start=1):
        if line.strip():
            arrivals.append(_parse(line, f"{path.name}, line {number}"))
            if len(arrivals) > 1 and arrivals[-1].at_s < arrivals[-2].at_s:
                raise TraceError(
                    f"{path.name}, line {number}: timestamp = {arrivals[-1].at_s * 1e3:g}: it must not be less than "
                    f"that of the request before it, {arrivals[-2].at_s * 1e3:g}"
                )
    if not arrivals:
        raise TraceError(f"{path.name} has no line with a request")
    return arrivals


def synthetic(mix: Mix, seed: int) -> list[Arrival]:
    """Return a trace by chance; equal seeds give equal traces."""
    chance = random.Random(seed)
    arrivals: list[Arrival] = []
    at_s, next_id = 0.0, 0
    for _ in range(mix.requests):
        at_s += chance.expovariate(mix.per_s)
        tokens = min(max(_length(chance, mix.input_tokens, mix.spread), mix.shortest), mix.longest)
        beginning: tuple[int, ...] = ()
        if arrivals and chance.random() < mix.continued:
            earlier = chance.choice(arrivals)
            beginning = earlier.whole_ids
            tokens = min(max(tokens, len(beginning) * BLOCK_TOKENS + mix.shortest), mix.longest)
            beginning = beginning[: tokens // BLOCK_TOKENS]
        new = -(-tokens // BLOCK_TOKENS) - len(beginning)
        ids = (*beginning, *range(next_id, next_id + new))
        next_id += new
        output = max(_length(chance, mix.output_tokens, mix.spread), 1)
        arrivals.append(Arrival(round(at_s * 1e3) / 1e3, tokens, output, ids))
    return arrivals


def faster(arrivals: Sequence[Arrival], factor: float) -> list[Arrival]:
    """Return the same requests ``factor`` times as often."""
    return [Arrival(each.at_s / factor, each.input_tokens, each.output_tokens, each.hash_ids) for each in arrivals]


def _length(chance: random.Random, median: int, spread: float) -> int:
    return round(median * chance.lognormvariate(0.0, spread)) if spread else median


def _parse(line: str, place: str) -> Arrival:
    try:
        found = msgspec.json.decode(line, type=_Line)
    except msgspec.DecodeError as error:
        raise TraceError(f"{place}: {line[:80]!r} is not a request: {error}") from None
    wanted = -(-found.input_length // BLOCK_TOKENS)
    if len(found.hash_ids) != wanted:
        raise TraceError(
            f"{place}: hash_ids has {len(found.hash_ids)} ids: a prompt of {found.input_length} tokens has {wanted}, "
            f"one for each {BLOCK_TOKENS} tokens or part of them"
        )
    return Arrival(found.timestamp / 1e3, found.input_length, found.output_length, found.hash_ids)
