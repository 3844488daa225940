"""The table of docs/cuda.md: a row for each question, a column for each card that ``make bench-cuda`` has run on."""

from typing import Any

from benchmarks import record
from benchmarks.cuda.copies import BATCH_RUN_BYTES, DEVICE_COPY, ONE_PIECE, RESHAPE_RUN_BYTES
from benchmarks.cuda.servers import ALONE, LOADS, PULLS

LENGTHS = ("2000", "8000", "30000")
NOT_RUN = "not run"
#: What stands in the table's place before the first card.
NO_CARD = (
    "Nothing yet: no card has run it. It measures reshapes, batched copies to and from the device, reads (also over\n"
    "CUDA IPC) and handovers of up to 30,000 tokens, P's prefill while D reads, and gaps between D's tokens while it\n"
    "pulls and loads."
)


def _sizes(*sizes: int) -> str:
    return " / ".join(f"{size >> 10} KiB" if size >= 1 << 10 else f"{size} B" for size in sizes)


def _each(place: str, names: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(place.format(name) for name in names)


#: What is asked, the form of a figure, and where the figures stand.
ROWS: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    (
        f"reshape, runs of {_sizes(*RESHAPE_RUN_BYTES)} / a device copy, GB/s", "{:,.0f}",
        _each("reshape/{}", (*map(str, RESHAPE_RUN_BYTES), DEVICE_COPY)),
    ),
    *(
        (
            f"batches {way}, runs of {_sizes(*BATCH_RUN_BYTES)} / one piece, GB/s", "{:.1f}",
            _each(f"batches/{direction}/{{}}", (*map(str, BATCH_RUN_BYTES), ONE_PIECE)),
        )
        for way, direction in (("to the device", "host to device"), ("from the device", "device to host"))
    ),
    ("a read, 2,000 / 8,000 / 30,000 tokens, ms", "{:,.0f}", _each("lengths/{}/read_ms", LENGTHS)),
    ("a device copy of as many bytes, ms", "{:,.2f}", _each("lengths/{}/device_copy_ms", LENGTHS)),
    ("the read's rate, GB/s", "{:.2f}", _each("lengths/{}/gb_per_s", LENGTHS)),
    ("a read over CUDA IPC, ms", "{:,.1f}", _each("mapped/{}/read_ms", LENGTHS)),
    ("its rate, GB/s", "{:.1f}", _each("mapped/{}/gb_per_s", LENGTHS)),
    ("P's prefill meanwhile, ms", "{:,.0f}", _each("mapped/{}/prefill_beside_read_ms", LENGTHS)),
    ("handover, the legs in turn, ms", "{:,.0f}", _each("handover/{}/in_turn_ms", LENGTHS)),
    ("handover, both legs at once, ms", "{:,.0f}", _each("handover/{}/together_ms", LENGTHS)),
    ("P's prefill alone, ms", "{:,.0f}", _each("lengths/{}/prefill_ms", LENGTHS)),
    ("P's prefill while D reads, ms", "{:,.0f}", _each("lengths/{}/prefill_beside_read_ms", LENGTHS)),
    *(
        (f"gaps between D's tokens, {label}, p50 / p99, ms", "{:.1f}", _each(f"gaps/{way}/{{}}_ms", ("p50", "p99")))
        for way, label in ((ALONE, "alone"), (PULLS, "while it pulls and stores"), (LOADS, "while it loads"))
    ),
)  # fmt: skip


def measured() -> str:
    """Return the table, or, before the first card, what will be in it."""
    results = [record.read(path.stem) for path in sorted(record.RESULTS.glob("cuda-*.json"))]
    if not results:
        return NO_CARD
    figures = [result["figures"] for result in results]
    lines = [["what", *map(_head, results)], ["---"] * (len(results) + 1)]
    lines += [[what, *(_cell(each, form, places) for each in figures)] for what, form, places in ROWS]
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
