"""What README and docs have from the code and from the results' files is what these say."""

import json
import re
import sys
from pathlib import Path

import pytest

from benchmarks import docs, record

#: Plain figures where a page names a benchmark: the place of each in the results, or what it is if nobody measured it.
PLAIN = {
    "README.md": {"29 ms": "legs:handover/7000/together_ms", "179 ms": "legs:handover/7000/in_turn_ms"},
    "docs/fleet.md": {"11%": "fleet_validation:median_off", "31%": "fleet_validation:most_off"},
    "docs/host-memory.md": {"25 MB/s": "the rate to which a benchmark slows the network"},
}
MOST_PLAIN = 3
PAGES = pytest.mark.parametrize("page", docs.pages(), ids=lambda page: str(page.relative_to(record.ROOT)))


@pytest.fixture
def results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(record, "RESULTS", tmp_path)
    figures = {"long": {"ms": 1234.56, "share": 0.1249, "less": -0.001}}
    (tmp_path / "pull.json").write_text(json.dumps({"figures": figures}))
    return tmp_path


@PAGES
def test_a_page_is_what_the_code_and_the_results_make_of_it(page: Path) -> None:
    assert page.read_text() == docs.written(page.read_text()), "run python -m benchmarks.docs"


@PAGES
def test_the_plain_figures_of_a_page_are_few_and_those_of_the_results(page: Path) -> None:
    known = PLAIN.get(str(page.relative_to(record.ROOT)), {})
    assert set(docs.unmarked(page.read_text())) == set(known)
    assert len(known) <= MOST_PLAIN
    for text, place in known.items():
        if re.match(r"\w+:", place):
            assert docs.form(text, place) == text


def test_every_table_is_in_a_page() -> None:
    texts = [page.read_text() for page in docs.pages()]
    assert [name for name in docs.TABLES if not any(f"<!-- generated: {name} -->\n" in text for text in texts)] == []


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

    def test_a_plain_figure_is_compared_in_its_own_form(self) -> None:
        assert docs.form("7.5 ms", "pull:long/ms") == "1,234.6 ms"
        assert docs.form("9%", "pull:long/share") == "12%"
        with pytest.raises(LookupError, match="'soon' is no figure"):
            docs.form("soon", "pull:long/ms")

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


class TestTables:
    PAGE = "<!-- generated: {} -->\nold\n<!-- generated: end -->\n\nAfter: 5 ms (`python -m benchmarks.pull`).\n"

    def test_a_table_is_written_between_its_lines(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(docs, "TABLES", {"one": lambda: "| 1 ms |", "two": lambda: "| 2 |"})
        page = self.PAGE.format("one") + self.PAGE.format("two")
        new = docs.written(page)
        assert new == page.replace("old", "| 1 ms |", 1).replace("old", "| 2 |")
        assert docs.written(new) == new

    def test_a_table_that_does_not_exist_is_named(self) -> None:
        with pytest.raises(LookupError, match="no table 'three'"):
            docs.written(self.PAGE.format("three"))

    def test_figures_in_a_table_are_not_plain_ones(self) -> None:
        assert docs.unmarked(self.PAGE.format("one").replace("old", "| `python -m benchmarks.pull` | 7 ms |")) == [
            "5 ms"
        ]


def test_what_a_benchmark_measured_is_found() -> None:
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
