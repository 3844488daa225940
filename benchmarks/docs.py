"""What README and docs have from the code and from the results' files: ``python -m benchmarks.docs`` writes it anew.

Whole tables and lists stand between two lines, of which the first one names them. ``TABLES`` has what makes them.

    <!-- generated: transfers -->
    - first token: 1.04 times that of P alone
    <!-- generated: end -->

A figure in prose may be followed by a comment that says where it comes from: the result's name, a colon, and the place
in its ``figures``, names between slashes. A percentage is written for a share. It keeps as many decimals as it has.

    16<!--legs:handover/3500/together_ms--> ms, 12%<!--legs:total_2000_tokens/1/longer-->

Figures without one are few, and a test compares them: ``tests/benchmarks/test_docs.py``.
"""

import re
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from benchmarks import record, reference, tables
from benchmarks.cuda import table as cuda

#: What makes the tables between ``generated`` lines, by name.
TABLES: Mapping[str, Callable[[], str]] = {
    "settings": reference.settings,
    "metrics of decode engines": reference.metrics_of_decode,
    "metrics of prefill engines": reference.metrics_of_prefill,
    "metrics of host memory": reference.metrics_of_host_memory,
    "beside vLLM's connectors": tables.peers,
    "where two servers do not fit": tables.trouble,
    "transfers": tables.transfers,
    "reads": tables.reads,
    "decode engines a prefill engine": tables.fleet_split,
    "pulls chunk by chunk": tables.fleet_chunks,
    "one CUDA GPU": cuda.measured,
}

_MARKED = re.compile(r"(?P<number>-?[\d,]*\d(?:\.\d+)?)(?P<percent>%?)<!--(?P<name>\w+):(?P<place>[^>]+?)-->")
_TABLE = re.compile(r"(?P<begin>^<!-- generated: (?P<name>.+?) -->\n)(?P<table>.*?)(?P<end>^<!-- generated: end -->$)",
                    re.MULTILINE | re.DOTALL)  # fmt: skip
_MEASURED = re.compile(r"python -m benchmarks|<!--\w+:")
_LOOSE = re.compile(r"(?<![\w.,])[\d,]*\d(?:\.\d+)?\s?(?:ms|us|µs|GB/s|MB/s|%)(?!\w)")


@dataclass(frozen=True)
class Figure:
    """A figure in a page."""

    text: str
    wanted: str

    @property
    def is_right(self) -> bool:
        """Whether the page says what the file says."""
        return self.text == self.wanted


def pages(root: Path = record.ROOT) -> list[Path]:
    """Return all pages of which the figures are held. CONTRIBUTING.md has none: the mark in it shows what one is."""
    others = [root / directory / "README.md" for directory in ("pd_proxy", "deploy")]
    return [root / "README.md", *sorted((root / "docs").glob("*.md")), *others]


def figures(text: str) -> Iterator[Figure]:
    """Yield the marked figures of a page.

    Raises:
        LookupError: there is no such result, or no such figure in it; the message says how to make it.
    """
    for match in _MARKED.finditer(text):
        yield Figure(match["number"] + match["percent"], _wanted(match))


def unmarked(text: str) -> list[str]:
    """Return the plain figures in paragraphs and tables that say that a benchmark measured them."""
    blocks = [block for block in re.split(r"\n\s*\n", _TABLE.sub("", text)) if _MEASURED.search(block)]
    return [loose for block in blocks for loose in _LOOSE.findall(_MARKED.sub("", block))]


def written(text: str) -> str:
    """Return a page with the tables and the marked figures of the code and of the results' files.

    Raises:
        LookupError: there is no such table, result or figure; the message says which.
    """
    text = _TABLE.sub(lambda match: match["begin"] + _table(match["name"]) + "\n" + match["end"], text)
    return _MARKED.sub(lambda match: _wanted(match) + match[0][match[0].index("<!--") :], text)


def form(text: str, place: str) -> str:
    """Return a plain figure (``29 ms``) as the result has it at a place (``legs:handover/7000/together_ms``)."""
    number, blank, unit = text.partition(" ")
    match = _MARKED.fullmatch(f"{number}<!--{place}-->")
    if not match:
        raise LookupError(f"{text!r} is no figure, or {place!r} no place")
    return _wanted(match) + blank + unit


def _table(name: str) -> str:
    if name not in TABLES:
        raise LookupError(f"there is no table {name!r}; there are {', '.join(TABLES)}")
    return TABLES[name]()


def _wanted(match: re.Match[str]) -> str:
    value = record.figure(f"{match['name']}:{match['place']}")
    value = 100 * value if match["percent"] else value
    decimals = len(match["number"].partition(".")[2])
    return f"{value:z,.{decimals}f}{match['percent']}"


def main() -> None:
    """Write the tables and the figures of all pages anew."""
    for page in pages():
        text = page.read_text()
        try:
            new = written(text)
        except LookupError as error:
            sys.exit(f"{page.relative_to(record.ROOT)}: {error}")
        if new != text:
            page.write_text(new)
            print(f"{page.relative_to(record.ROOT)}: written anew")


if __name__ == "__main__":
    main()
