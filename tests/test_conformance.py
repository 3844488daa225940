"""The list of known failures in ``docs/conformance.md`` names tests that exist, or says why it names none."""

import ast
import re
from dataclasses import dataclass
from functools import cache

import pytest

from tests.support.sources import ROOT

PAGE = (ROOT / "docs" / "conformance.md").read_text()
HEADING = re.compile(r"^## (?P<group>[A-Z])\. \S.*$")
ENTRY = re.compile(r"^- \*\*(?P<group>[A-Z])(?P<number>\d+)\. .*$")
TEST = re.compile(r"`(?P<file>tests/[\w/]+\.py)::(?P<names>\w+(?:::\w+)?)`")
#: With the beginning of a reason.
WITHOUT = re.compile(r"\*Not (?:shown|done)\*:? \w")


@dataclass(frozen=True, slots=True)
class Failure:
    """An entry of the list: ``group`` and ``number`` name it, ``text`` is all of it."""

    group: str
    number: int
    text: str
    under: str  # the letter of the heading above it

    def __str__(self) -> str:
        return f"{self.group}{self.number}"


def failures_of(page: str) -> list[Failure]:
    """Return the entries of a page: each begins with a bold number and ends before the next one, or a heading."""
    found: list[Failure] = []
    under = ""
    lines: list[str] = []
    for line in [*page.splitlines(), "## end"]:
        heading, entry = line.startswith("## "), line.startswith("- ")
        if (heading or entry) and lines:
            first = ENTRY.match(lines[0])
            assert first, f"not an entry: {lines[0]}"
            found.append(Failure(first["group"], int(first["number"]), "\n".join(lines), under))
            lines = []
        if heading:
            under = match["group"] if (match := HEADING.match(line)) else ""
        elif entry or lines:
            lines.append(line)
    return found


@cache
def names_in(file: str) -> frozenset[str]:
    """Return what pytest may collect of a file: functions, classes, assigned names, and ``Class::method``."""
    found: set[str] = set()
    for node in ast.parse((ROOT / file).read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            found.add(node.name)
        elif isinstance(node, ast.ClassDef):
            methods = [each.name for each in node.body if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef)]
            found |= {node.name, *(f"{node.name}::{method}" for method in methods)}
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            found |= {target.id for target in targets if isinstance(target, ast.Name)}
    return frozenset(found)


def is_collected(file: str, names: str) -> bool:
    """Return whether a test of this name is there, in a file and under a name that pytest collects."""
    *_, last = names.split("::")
    return (
        file.rpartition("/")[2].startswith("test_")
        and (ROOT / file).is_file()
        and names.startswith(("test_", "Test"))
        and last.startswith(("test_", "Test"))
        and names in names_in(file)
    )


def numbering_of(failures: list[Failure]) -> list[str]:
    """Return what is wrong with the numbers: each group counts from 1 under its own heading."""
    problems = [f"{each} is under {each.under or 'no heading'}" for each in failures if each.group != each.under]
    for group in dict.fromkeys(each.group for each in failures):
        numbers = [each.number for each in failures if each.group == group]
        if numbers != [*range(1, len(numbers) + 1)]:
            problems.append(f"{group} is numbered {numbers}")
    return problems


def proof_of(failure: Failure) -> list[str]:
    """Return what is wrong with the tests that an entry names, and with its reasons where it names none."""
    named = [match.group("file", "names") for match in TEST.finditer(failure.text)]
    problems = [f"{failure}: no test {file}::{names}" for file, names in named if not is_collected(file, names)]
    if len(set(named)) < len(named):
        problems.append(f"{failure} names a test twice")
    if failure.text.count("::") != sum(1 + names.count("::") for _, names in named):
        problems.append(f"{failure}: a test is not written as `tests/path.py::name`")
    reasons = WITHOUT.findall(failure.text)
    if len(reasons) < failure.text.count("*Not "):
        problems.append(f"{failure}: no reason")
    if not named and not reasons:
        problems.append(f"{failure} names no test and does not say why")
    return problems


def problems_of(page: str) -> list[str]:
    """Return what is wrong with a page."""
    failures = failures_of(page)
    return numbering_of(failures) + [problem for failure in failures for problem in proof_of(failure)]


def test_every_failure_has_a_test_that_exists_or_a_reason() -> None:
    assert problems_of(PAGE) == []


def test_the_list_is_read() -> None:
    failures = failures_of(PAGE)
    assert len(failures) == len(re.findall(r"^- \*\*", PAGE, re.MULTILINE)) > 60
    assert len(TEST.findall(PAGE)) == PAGE.count("::") - len(re.findall(r"::Test\w+::", PAGE)) > 60


HERE = "`tests/test_conformance.py::test_the_list_is_read`"
MACHINE = "`tests/pd_connector/scheduler/decode/test_canary_machine.py::TestCanaries`"
METHOD = "`tests/e2e/test_equality.py::TestPrefixHits::test_a_prompt_of_one_token_is_not_pulled`"
GOOD = f"# A page\n\n## A. One\n\n- **A1. It fails.** Not here.\n  - {HERE}\n"


@pytest.mark.parametrize(
    ("entry", "problem"),
    [
        (f"- **A2. More.** {MACHINE} {METHOD}", ""),
        ("- **A2. More.** *Not done*: nobody asked.", ""),
        ("- **A2. More.** *Not shown* on a GPU.", ""),
        ("- **A2. More.** It does not happen.", "A2 names no test and does not say why"),
        ("- **A2. More.** *Not shown*", "A2: no reason; A2 names no test"),
        (f"- **A2. More.** {HERE} *Not done*.", "A2: no reason"),
        (f"- **A1. More.** {HERE}", r"A is numbered \[1, 1\]"),
        (f"- **A3. More.** {HERE}", r"A is numbered \[1, 3\]"),
        (f"- **B1. More.** {HERE}", "B1 is under A"),
        ("- **A2. More.** `tests/test_conformance.py::test_the_list`", "A2: no test tests/test_conformance.py"),
        ("- **A2. More.** `tests/test_nothing.py::test_the_list_is_read`", "A2: no test tests/test_nothing.py"),
        ("- **A2. More.** `tests/test_conformance.py::problems_of`", "A2: no test"),
        ("- **A2. More.** `tests/test_conformance.py::Failure`", "A2: no test"),
        (f"- **A2. More.** {METHOD.replace('one_token', 'no_token')}", "A2: no test"),
        (f"- **A2. More.** {HERE} tests/test_conformance.py::test_the_list_is_read", "A2: a test is not written as"),
        (f"- **A2. More.** {HERE} {HERE}", "A2 names a test twice"),
    ],
)
def test_what_is_wrong_with_an_entry_is_noticed(entry: str, problem: str) -> None:
    problems = "; ".join(problems_of(f"{GOOD}{entry}\n"))
    assert re.match(f"^{problem}", problems) if problem else not problems


def test_an_entry_without_a_number_is_noticed() -> None:
    with pytest.raises(AssertionError, match="not an entry: - It fails"):
        problems_of(f"{GOOD}- It fails. {HERE}\n")
