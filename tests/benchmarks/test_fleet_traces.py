"""Traces in the Mooncake paper's format: what is read, and what a malformed line says."""

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.fleet.traces import BLOCK_TOKENS, Arrival, Mix, TraceError, read, synthetic

GOOD: dict[str, Any] = {"timestamp": 1500, "input_length": 700, "output_length": 32, "hash_ids": [4, 9]}


def written(path: Path, *lines: object) -> Path:
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return path


def test_a_line_is_a_request(tmp_path: Path) -> None:
    (arrival,) = read(written(tmp_path / "trace.jsonl", GOOD))
    assert arrival == Arrival(1.5, 700, 32, (4, 9))
    assert arrival.whole_ids == (4,)


def test_a_generated_trace_keeps_its_bounds_and_shares_beginnings() -> None:
    mix = Mix(300, 2.0, 1500, 40, continued=0.5, longest=4000, shortest=32)
    arrivals = synthetic(mix, 5)
    assert [each.at_s for each in arrivals] == sorted(each.at_s for each in arrivals)
    assert all(mix.shortest <= each.input_tokens <= mix.longest for each in arrivals)
    assert all(len(each.hash_ids) == -(-each.input_tokens // BLOCK_TOKENS) for each in arrivals)
    ids = [each for arrival in arrivals for each in arrival.hash_ids]
    assert len(set(ids)) < len(ids)
    alone = [each for arrival in synthetic(Mix(300, 2.0, 1500, 40, continued=0.0), 5) for each in arrival.hash_ids]
    assert len(set(alone)) == len(alone)
    assert (300 - 1) / (arrivals[-1].at_s - arrivals[0].at_s) == pytest.approx(2.0, rel=0.25)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("{", r"line 2: '\{' is not a request: Input data was truncated"),
        ([1], r"line 2: '\[1\]' is not a request: Expected `object`, got `array`"),
        ({**GOOD, "input_length": 0}, r"line 2: .* is not a request: Expected `int` >= 1 - at `\$.input_length`"),
        ({**GOOD, "output_length": "8"}, r"line 2: .*: Expected `int`, got `str` - at `\$.output_length`"),
        ({**GOOD, "timestamp": -1}, r"line 2: .*: Expected `float` >= 0.0 - at `\$.timestamp`"),
        ({**GOOD, "timestamp": 1499}, "line 2: timestamp = 1499: it must not be less than that of .* 1500"),
        ({**GOOD, "hash_ids": ["4", 9]}, r"line 2: .*: Expected `int`, got `str` - at `\$.hash_ids\[0\]`"),
        ({**GOOD, "hash_ids": [4]}, "line 2: hash_ids has 1 ids: a prompt of 700 tokens has 2, one for each 512"),
        ({"timestamp": 1500}, "line 2: .*: Object missing required field `input_length`"),
    ],
)
def test_a_malformed_line_is_named_with_its_value_and_the_rule(tmp_path: Path, line: object, said: str) -> None:
    with pytest.raises(TraceError, match=f"^trace.jsonl, {said}"):
        read(written(tmp_path / "trace.jsonl", GOOD, line))


def test_an_empty_trace_is_named(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=r"trace\.jsonl has no line with a request"):
        read(written(tmp_path / "trace.jsonl", ""))
