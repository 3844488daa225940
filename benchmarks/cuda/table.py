"""The table of docs/cuda.md: a row for each question, its goal, and a column for each card that has run it."""

from typing import Any

from benchmarks import record
from benchmarks.cuda.copies import BATCH_RUN_BYTES, DEVICE_COPY, ONE_PIECE, RESHAPE_RUN_BYTES
from benchmarks.cuda.servers import ALONE, LOADS, PULLS

LENGTHS = ("2000", "8000", "30000")
NOT_RUN = "not run"


def _sizes(*sizes: int) -> str:
    return f"{'/'.join(f'{size / 1024:g}' for size in sizes)} KiB"


def _each(place: str, names: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(place.format(name) for name in names)


#: What is asked, its goal, the form of a figure, and where the figures stand.
ROWS: tuple[tuple[str, str, str, tuple[str, ...]], ...] = (
    (
        f"reshape in runs of {_sizes(*RESHAPE_RUN_BYTES)}, device copy, GB/s", "≥150 / ≥400", "{:,.0f}",
        _each("reshape/{}", (*map(str, RESHAPE_RUN_BYTES), DEVICE_COPY)),
    ),
    *(
        (
            f"batches {way} the device, {_sizes(*BATCH_RUN_BYTES)}, one piece, GB/s", "≥45", "{:.1f}",
            _each(f"batches/{direction}/{{}}", (*map(str, BATCH_RUN_BYTES), ONE_PIECE)),
        )
        for way, direction in (("to", "host to device"), ("from", "device to host"))
    ),
    ("read of 2,000/8,000/30,000 tokens, ms", "", "{:,.0f}", _each("lengths/{}/read_ms", LENGTHS)),
    ("device copy of them, ms", "", "{:,.2f}", _each("lengths/{}/device_copy_ms", LENGTHS)),
    ("the read, GB/s", "", "{:.2f}", _each("lengths/{}/gb_per_s", LENGTHS)),
    ("read over CUDA IPC, ms", "≤1.25 device copies", "{:,.1f}", _each("mapped/{}/read_ms", LENGTHS)),
    ("the same, GB/s", "", "{:.1f}", _each("mapped/{}/gb_per_s", LENGTHS)),
    ("handover in turn over it, ms", "≤30 for 30,000", "{:,.1f}", _each("mapped/{}/in_turn_ms", LENGTHS)),
    ("P's prefill meanwhile, ms", "≤1.05 alone", "{:,.0f}", _each("mapped/{}/prefill_beside_read_ms", LENGTHS)),
    ("handover in turn, ms", "", "{:,.0f}", _each("handover/{}/in_turn_ms", LENGTHS)),
    ("handover at once, ms", "≤in turn", "{:,.0f}", _each("handover/{}/together_ms", LENGTHS)),
    ("P's prefill alone, ms", "", "{:,.0f}", _each("lengths/{}/prefill_ms", LENGTHS)),
    ("P's prefill beside a read, ms", "≤1.05 alone", "{:,.0f}", _each("lengths/{}/prefill_beside_read_ms", LENGTHS)),
    *(
        (f"D's tokens {way}, gaps p50/p99, ms", goal, "{:.1f}", _each(f"gaps/{name}/{{}}_ms", ("p50", "p99")))
        for way, name, goal in (
            ("alone", ALONE, ""),
            ("beside pulls, stores", PULLS, "p99 ≤1.10 alone"),
            ("beside loads", LOADS, "p99 ≤1.10 alone"),
        )
    ),
)  # fmt: skip


def measured() -> str:
    """Return the table. Before the first card, it has the goals."""
    results = [record.read(path.stem) for path in sorted(record.RESULTS.glob("cuda-*.json"))]
    figures = [result["figures"] for result in results]
    lines = [["what", "goal", *map(_head, results)], ["---"] * (len(figures) + 2)]
    rows = [row for row in ROWS if results or row[1]]
    lines += [[what, goal, *(_cell(each, form, places) for each in figures)] for what, goal, form, places in rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _head(result: dict[str, Any]) -> str:
    card, versions = result["figures"]["card"], result["versions"]
    return (
        f"{card['name']}, {result['figures']['protocol']}, vLLM {versions.get('vllm', '?')}, {result['date']}, "
        f"{versions['commit']}"
    )


def _cell(figures: dict[str, Any], form: str, places: tuple[str, ...]) -> str:
    found = [_at(figures, place) for place in places]
    if all(value is None for value in found):
        return NOT_RUN
    return " / ".join(NOT_RUN if value is None else form.format(value) for value in found)


def _at(figures: Any, place: str) -> float | None:
    for step in place.split("/"):
        figures = figures.get(step) if isinstance(figures, dict) else None
    return figures if isinstance(figures, int | float) else None
