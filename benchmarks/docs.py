"""Figures in README and docs, held to the results' files: ``python -m benchmarks.docs`` writes them anew.

A figure is followed by a comment that says where it comes from: the result's name, a colon, and the place in its
``figures``, names between slashes. A percentage is written for a share.

    16<!--legs:handover/3500/together_ms--> ms, 12%<!--legs:total_2000_tokens/1/longer-->

A figure keeps its form: as many decimals as it has in the page.
"""

import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import record

_MARKED = re.compile(r"(?P<number>-?[\d,]*\d(?:\.\d+)?)(?P<percent>%?)<!--(?P<name>\w+):(?P<place>[^>]+?)-->")
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
    """Return the figures without a mark in paragraphs and tables that say that a benchmark measured them."""
    blocks = [block for block in re.split(r"\n\s*\n", text) if _MEASURED.search(block)]
    return [loose for block in blocks for loose in _LOOSE.findall(_MARKED.sub("", block))]


def written(text: str) -> str:
    """Return a page with the figures of the results' files."""
    return _MARKED.sub(lambda match: _wanted(match) + match[0][match[0].index("<!--") :], text)


def _wanted(match: re.Match[str]) -> str:
    value = _value(match["name"], match["place"])
    value = 100 * value if match["percent"] else value
    decimals = len(match["number"].partition(".")[2])
    return f"{value:z,.{decimals}f}{match['percent']}"


def _value(name: str, place: str) -> float:
    try:
        value: Any = record.read(name)["figures"]
    except FileNotFoundError:
        raise LookupError(f"there is no benchmarks/results/{name}.json: make bench ARGS={name}") from None
    for step in place.split("/"):
        if not isinstance(value, dict) or step not in value:
            raise LookupError(f"benchmarks/results/{name}.json has no figure {place!r}: there is no {step!r}")
        value = value[step]
    return float(value)


def main() -> None:
    """Write the figures of all pages anew."""
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
