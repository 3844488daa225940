"""The matrix of docs/support.md: every feature of the tests is in it, and every tick has a test that could show it.

Covers: docs/support.md.
"""

import re

import pytest

from tests.support.sources import ROOT

PAGE = (ROOT / "docs" / "support.md").read_text()
COLUMNS = ("bytes", "CPU", "other releases", "simulated NPU", "H200")
HEAD = f"| feature | {' | '.join(COLUMNS)} | tests |"
MOST_WORDS = 5
#: Directories of tests without servers, whose files may show a tick of the first column.
IN_PROCESS = ("tests/layout/", "tests/pd_connector/", "tests/transfer/")


def matrix() -> dict[str, tuple[dict[str, str], list[str]]]:
    """The cells of each row by column, and what its last cell names."""
    (_, table) = PAGE.split(HEAD)
    found = {}
    for line in table.split("\n\n")[0].splitlines()[2:]:
        name, *cells, tests = (cell.strip() for cell in line.strip("|").split("|"))
        found[name] = dict(zip(COLUMNS, cells, strict=True)), re.findall(r"`([\w/.]+)`", tests)
    return found


@pytest.fixture(scope="module")
def features(pytestconfig: pytest.Config) -> set[str]:
    """The markers that pyproject.toml registers as features."""
    registered = [line.partition(":") for line in pytestconfig.getini("markers")]
    return {name for name, _, meaning in registered if meaning.strip().startswith("e2e feature:")}


def test_the_matrix_is_read() -> None:
    assert len(matrix()) == len(re.findall(r"^\|.*✓.*\|$", PAGE, re.MULTILINE)) > 20


def test_every_feature_of_the_end_to_end_tests_has_a_row(features: set[str]) -> None:
    named = {test for _, tests in matrix().values() for test in tests if "/" not in test}
    assert named == features


def test_every_file_that_is_named_exists() -> None:
    for name, (_, tests) in matrix().items():
        assert [test for test in tests if "/" in test and not (ROOT / test).is_file()] == [], name


def test_a_tick_has_tests_of_its_level(features: set[str]) -> None:
    for name, (cells, tests) in matrix().items():
        servers = [test for test in tests if test in features or test.startswith("tests/e2e/")]
        assert bool(cells["CPU"]) == bool(servers), name
        assert bool(cells["simulated NPU"]) == any(test.startswith("tests/ascend_sim/") for test in tests), name
        if any(test.startswith(IN_PROCESS) for test in tests):
            assert cells["bytes"], name


def test_cells_are_short() -> None:
    for name, (cells, _) in matrix().items():
        for cell in (name, *cells.values()):
            assert len(cell.split()) <= MOST_WORDS, cell
        assert all(cell == "" or cell.startswith("✓") for cell in cells.values()), name
