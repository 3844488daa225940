"""Medians and percentiles of what was measured, with counts of errors and wrong answers."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from benchmarks.peers.counters import Moved
from benchmarks.peers.sending import Answer

#: Their order in a table; "alone" is one server without a transfer.
ALONE = "alone"
CONNECTORS = ("ours", "mooncake", "nixl", ALONE)
PERCENTILES = {"p50": 50, "p90": 90, "p99": 99}


@dataclass(frozen=True)
class Case:
    """What was asked of whom."""

    layout: str
    prefill_tp: int
    decode_tp: int
    prompt_tokens: int
    at_once: int
    connector: str
    legs: str


@dataclass(frozen=True)
class Sample:
    """One request."""

    case: Case
    answer: Answer
    wrong: bool
    least_s: float  # what a request of one token takes at the decode server
    moved: Moved  # of this request, or of this many at once

    @property
    def handover_s(self) -> float:
        """From P's answer to D's first token, less what one token takes."""
        return self.answer.first_token_s - self.answer.prefilled_s - self.least_s


def plain(sample: Sample) -> dict[str, Any]:
    """Return a sample as it is written to a file."""
    return asdict(sample) | {"handover_s": sample.handover_s}


def percentiles(values: Iterable[float]) -> dict[str, float]:
    """Return percentiles in milliseconds. Of few values, the 99th is the largest of them."""
    array = np.array(list(values)) * 1e3
    return {name: round(float(np.percentile(array, rank)), 2) for name, rank in PERCENTILES.items()}


def of_case(case: Case, samples: Sequence[Sample]) -> dict[str, Any]:
    """Return one row of the results."""
    right = [sample for sample in samples if not sample.answer.error]
    row: dict[str, Any] = vars(case) | {
        "repeats": len(samples) // case.at_once, "requests": len(samples), "errors": len(samples) - len(right),
        "wrong": sum(each.wrong for each in right),
    }  # fmt: skip
    causes = Counter(sample.answer.error for sample in samples if sample.answer.error)
    if causes:
        row["error"] = causes.most_common(1)[0][0]
    if not right:
        return row
    row["first_token_ms"] = percentiles(each.answer.first_token_s for each in right)
    row["total_ms"] = percentiles(each.answer.total_s for each in right)
    if case.connector != ALONE:
        row["handover_ms"] = percentiles(each.handover_s for each in right)
        row |= _moved(case, samples)
    return row


def _moved(case: Case, samples: Sequence[Sample]) -> dict[str, Any]:
    """Return descriptors and bytes a request, and bytes a second of one transfer."""
    total = sum((sample.moved for sample in samples), start=Moved())
    requests = sum(1 for sample in samples if sample.moved.transfers) * case.at_once
    if not requests:
        return {}
    return {
        "transfers": round(total.transfers / requests, 2), "descriptors": round(total.descriptors / requests, 1),
        "megabytes": round(total.bytes / requests / 1e6, 2),
        "megabytes_per_s": round(total.bytes / 1e6 / total.seconds) if total.seconds else None,
    }  # fmt: skip


def rows(samples: Iterable[Sample]) -> list[dict[str, Any]]:
    """Return a row for each case: rounds in the order in which they came, and the same order of connectors in each."""
    by_case: dict[Case, list[Sample]] = {}
    for sample in samples:
        by_case.setdefault(sample.case, []).append(sample)
    questions = list(dict.fromkeys(_question(case) for case in by_case))
    order = sorted(by_case, key=lambda case: (questions.index(_question(case)), *_place(case)))
    return [of_case(case, by_case[case]) for case in order]


def by_name(rows: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Return rows by layout, sizes, tokens, how many at once, and way, as figures of the results' file.

    "BHLNC", "1-1", "2000", "1", "ours, together"; one server without a transfer is "alone".
    """
    named: dict[str, Any] = {}
    for row in rows:
        place = named
        sizes = f"{row['prefill_tp']}-{row['decode_tp']}"
        for step in (row["layout"], sizes, str(row["prompt_tokens"]), str(row["at_once"])):
            place = place.setdefault(step, {})
        place[ALONE if row["connector"] == ALONE else f"{row['connector']}, {row['legs']}"] = dict(row)
    return named


def in_order(named: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the rows that ``by_name`` has named."""
    if "requests" in named:
        return [dict(named)]
    return [row for part in named.values() for row in in_order(part)]


def _question(case: Case) -> tuple[object, ...]:
    return case.layout, case.prefill_tp, case.decode_tp, case.prompt_tokens, case.at_once


def _place(case: Case) -> tuple[int, bool]:
    return CONNECTORS.index(case.connector), case.legs == "in turn"
