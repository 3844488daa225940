"""Requests and when they arrive, in the format of the Mooncake paper's traces: a line of JSON for each request.

    {"timestamp": 1500, "input_length": 700, "output_length": 32, "hash_ids": [4, 9]}

``timestamp`` is in milliseconds since the trace's start. ``hash_ids`` names each 512 tokens of the prompt, the last of
which may be fewer: prompts that begin with the same ids begin with the same tokens.
"""

import json
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

BLOCK_TOKENS = 512
SAMPLE = Path(__file__).with_name("sample.jsonl")
_KEYS = ("timestamp", "input_length", "output_length", "hash_ids")


class TraceError(ValueError):
    """A line of a trace is not a request; the message names line, value and rule."""


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


def write(path: Path, arrivals: Iterable[Arrival]) -> None:
    """Write a trace."""
    path.write_text("".join(json.dumps(_line(each)) + "\n" for each in arrivals))


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


def check_order(arrivals: Sequence[Arrival]) -> None:
    """Raise AssertionError unless the requests are in the order of their arrivals."""
    assert all(one.at_s <= other.at_s for one, other in pairwise(arrivals)), "requests are not in order"


def _length(chance: random.Random, median: int, spread: float) -> int:
    return round(median * chance.lognormvariate(0.0, spread)) if spread else median


def _line(arrival: Arrival) -> dict[str, Any]:
    return {
        "timestamp": round(arrival.at_s * 1e3), "input_length": arrival.input_tokens,
        "output_length": arrival.output_tokens, "hash_ids": list(arrival.hash_ids),
    }  # fmt: skip


def _parse(line: str, place: str) -> Arrival:
    try:
        found = json.loads(line)
    except ValueError as error:
        raise TraceError(f"{place}: {line[:80]!r} is not JSON ({error}): a line is one request") from None
    if not isinstance(found, dict):
        raise TraceError(f"{place}: {line[:80]!r} is not an object: a line is one request with {', '.join(_KEYS)}")
    for key in _KEYS:
        if key not in found:
            raise TraceError(f"{place}: {key} is missing: a request has {', '.join(_KEYS)}")
    at_ms, tokens, output = (_number(found, key, least, place) for key, least in zip(_KEYS, (0, 1, 1), strict=False))
    return Arrival(at_ms / 1e3, int(tokens), int(output), _ids(found["hash_ids"], int(tokens), place))


def _number(found: dict[str, Any], key: str, least: int, place: str) -> float:
    value = found[key]
    kinds = (int, float) if key == "timestamp" else (int,)
    if isinstance(value, bool) or not isinstance(value, kinds) or not least <= value < float("inf"):
        kind = "a number" if key == "timestamp" else "a whole number"
        raise TraceError(f"{place}: {key} = {value!r}: it must be {kind}, {least} or more")
    return float(value)


def _ids(value: Any, tokens: int, place: str) -> tuple[int, ...]:
    if not isinstance(value, list) or not all(isinstance(each, int) and not isinstance(each, bool) for each in value):
        raise TraceError(f"{place}: hash_ids = {str(value)[:80]}: it must be a list of whole numbers")
    wanted = -(-tokens // BLOCK_TOKENS)
    if len(value) != wanted:
        raise TraceError(
            f"{place}: hash_ids has {len(value)} ids: a prompt of {tokens} tokens has {wanted}, one for each "
            f"{BLOCK_TOKENS} tokens or part of them"
        )
    return tuple(value)
