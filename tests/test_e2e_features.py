"""Every end-to-end test is of one feature, so that ``pytest -m FEATURE`` runs all of them. No server is started."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow  # collects as a run of its own; every run of tests/e2e looks at the tests there

ROOT = Path(__file__).parents[1]
#: Collects what its arguments name, and prints the markers of each test.
COLLECT = """
import json, sys, pytest

class Markers:
    def pytest_collection_finish(self, session):
        self.of = {item.nodeid: [marker.name for marker in item.iter_markers()] for item in session.items}

markers = Markers()
code = pytest.main(["--collect-only", "-q", "-p", "no:cacheprovider", *sys.argv[1:]], plugins=[markers])
assert code == 0, code
print("\\n" + json.dumps(markers.of))
"""


@pytest.fixture(scope="module")
def features(pytestconfig: pytest.Config) -> set[str]:
    """The markers that pyproject.toml registers as features."""
    registered = [line.partition(":") for line in pytestconfig.getini("markers")]
    return {name for name, _, meaning in registered if meaning.strip().startswith("e2e feature:")}


@pytest.fixture(scope="module")
def collected() -> dict[str, list[str]]:
    """The markers of every end-to-end test, and of all others in the same files."""
    elsewhere = [file for file in sorted((ROOT / "tests").rglob("test_*.py")) if "@pytest.mark.e2e" in file.read_text()]
    files = [str(file) for file in elsewhere if file != Path(__file__)]
    ran = subprocess.run(
        [sys.executable, "-c", COLLECT, "tests/e2e", *files], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    found: dict[str, list[str]] = json.loads(ran.stdout.splitlines()[-1])
    return found


def test_every_end_to_end_test_is_of_one_feature(collected: dict[str, list[str]], features: set[str]) -> None:
    of = {test: features & set(markers) for test, markers in collected.items() if "e2e" in markers}
    assert {test: marked for test, marked in of.items() if len(marked) != 1} == {}
    assert set().union(*of.values()) == features, "a feature that is registered has no test"
    assert all("e2e" in markers for test, markers in collected.items() if test.startswith("tests/e2e/"))


def test_no_other_test_is_of_one(collected: dict[str, list[str]], features: set[str]) -> None:
    assert {test for test, markers in collected.items() if "e2e" not in markers and features & set(markers)} == set()
