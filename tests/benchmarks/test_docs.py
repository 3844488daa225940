"""Every figure in README and docs that a benchmark measured is that of its results' file."""

import json
import re
import sys
from pathlib import Path

import pytest

from benchmarks import docs, record

#: Figures beside measured ones that nobody has measured, by page, and what they are.
NOT_MEASURED = {
    "README.md": {"200 MB/s": "the rate to which a benchmark slows the network"},
    "docs/fleet.md": {"15%": "how far off the simulation may be"},
    "docs/host-memory.md": {"25 MB/s": "the rate to which a benchmark slows the network"},
}
PAGES = pytest.mark.parametrize("page", docs.pages(), ids=lambda page: str(page.relative_to(record.ROOT)))


@pytest.fixture
def results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(record, "RESULTS", tmp_path)
    figures = {"long": {"ms": 1234.56, "share": 0.1249, "less": -0.001}}
    (tmp_path / "pull.json").write_text(json.dumps({"figures": figures}))
    return tmp_path


@PAGES
def test_the_figures_of_a_page_are_those_of_the_results(page: Path) -> None:
    assert [figure for figure in docs.figures(page.read_text()) if not figure.is_right] == []


@PAGES
def test_what_a_benchmark_measured_is_marked_in_every_page(page: Path) -> None:
    known = NOT_MEASURED.get(str(page.relative_to(record.ROOT)), {})
    assert set(docs.unmarked(page.read_text())) == set(known)


def test_every_result_says_where_and_when_it_was_measured() -> None:
    for path in record.RESULTS.glob("*.json"):
        result = json.loads(path.read_text())
        assert result["command"].startswith("python -m benchmarks"), path
        assert {"processor", "cores", "memory_gib"} <= set(result["machine"]), path
        assert {"python", "pd-connector", "commit"} <= set(result["versions"]), path
        assert re.fullmatch(r"\d{4}-\d\d-\d\d", result["date"]), path


@pytest.mark.usefixtures("results")
class TestMarks:
    @pytest.mark.parametrize(
        ("said", "right"),
        [
            ("1,235<!--pull:long/ms--> ms", True),
            ("1,234.56<!--pull:long/ms--> ms", True),
            ("1,234.6<!--pull:long/ms--> ms", True),
            ("1235<!--pull:long/ms--> ms", False),
            ("1,236<!--pull:long/ms--> ms", False),
            ("12%<!--pull:long/share-->", True),
            ("13%<!--pull:long/share-->", False),
            ("0%<!--pull:long/less-->", True),
        ],
    )
    def test_a_figure_is_compared_in_the_page_s_form(self, said: str, right: bool) -> None:
        (figure,) = docs.figures(f"It takes {said}, so.")
        assert figure.is_right == right

    def test_figures_are_written_in_the_page_s_form(self) -> None:
        page = "7.5<!--pull:long/ms--> ms, 9%<!--pull:long/share--> and 7 ms"
        assert docs.written(page) == "1,234.6<!--pull:long/ms--> ms, 12%<!--pull:long/share--> and 7 ms"

    @pytest.mark.parametrize(
        ("mark", "said"),
        [
            ("push:long/ms", r"no benchmarks/results/push\.json: make bench ARGS=push"),
            ("pull:short/ms", r"pull\.json has no figure 'short/ms': there is no 'short'"),
            ("pull:long/ms/p50", "there is no 'p50'"),
        ],
    )
    def test_a_mark_that_leads_nowhere_says_so(self, mark: str, said: str) -> None:
        with pytest.raises(LookupError, match=said):
            list(docs.figures(f"1<!--{mark}-->"))


def test_what_a_benchmark_measured_must_be_marked() -> None:
    measured = "A lease of 30 s.\n\nA pull takes 26 ms (`python -m benchmarks.pull`), 12%<!--pull:a--> of it idle."
    assert docs.unmarked(measured) == ["26 ms"]
    assert docs.unmarked("| `python -m benchmarks.pull` | 3<!--pull:b--> ms |\n|---|---|\n| all | 4.5 GB/s, 6% |") == [
        "4.5 GB/s", "6%",
    ]  # fmt: skip


def test_a_result_s_file_holds_what_was_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record, "RESULTS", tmp_path / "results")
    with record.kept_output() as output:
        sys.stdout.write("a line\n")
    record.write("pull", ("benchmarks.pull", "--verify"), {"ms": [1 / 3]}, output.kept, seconds=2.4)
    result = record.read("pull")
    assert result["command"] == "python -m benchmarks.pull --verify"
    assert (result["figures"], result["printed"], result["seconds"]) == ({"ms": [0.3333]}, ["a line"], 2)
