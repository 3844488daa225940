"""The list of examples: complete, and its links lead somewhere."""

import re
from pathlib import Path

import pytest

from tests.support.sources import ROOT

EXAMPLES = ROOT / "examples"
READMES = sorted(EXAMPLES.rglob("README.md"))


def test_every_example_has_a_line() -> None:
    lines = [line for line in (EXAMPLES / "README.md").read_text().splitlines() if line.startswith("| [")]
    listed = sorted(match[1].rstrip("/") for line in lines if (match := re.match(r"\| \[`([^`]+)`\]", line)))
    there = {path.name for path in EXAMPLES.iterdir()} - {"README.md", "__init__.py", "__pycache__"}
    assert listed == sorted(there)


@pytest.mark.parametrize("readme", READMES, ids=lambda path: path.parent.name)
def test_links_lead_somewhere(readme: Path) -> None:
    links = re.findall(r"\]\(([^)#]+)\)", readme.read_text())
    assert not [link for link in links if "://" not in link and not (readme.parent / link).exists()]
