"""The extras of pyproject.toml name what the examples and the proxy import, and nothing else."""

import ast
import re
import sys
import tomllib
from collections.abc import Iterator
from importlib.metadata import packages_distributions
from pathlib import Path

from packaging.requirements import Requirement

from tests.support.sources import ROOT

EXAMPLES = ROOT / "examples"
PROXY = ROOT / "pd_proxy"
TRACING = PROXY / "spans.py"
QUICKSTART = EXAMPLES / "quickstart"
#: What every build of vLLM brings; the demonstration makes its model with it.
WITH_VLLM = {"torch", "transformers"}


def canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def extra(name: str) -> set[str]:
    """The distributions that an extra brings, by itself and by the extras of this project that it names."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    found = set()
    for line in project["optional-dependencies"][name]:
        requirement = Requirement(line)
        nested = [extra(one) for one in requirement.extras] if canonical(requirement.name) == "pd-connector" else []
        found |= set().union(*nested) if nested else {canonical(requirement.name)}
    return found


def imported(path: Path) -> Iterator[str]:
    """The top-level packages that a module imports, anywhere in it."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path}: a relative import"
            assert node.module is not None
            yield node.module.partition(".")[0]


def third_party(*paths: Path) -> dict[str, set[str]]:
    """The distributions of other projects that modules import, and the modules of each."""
    distributions = packages_distributions()
    found: dict[str, set[str]] = {}
    for path in paths:
        for package in set(imported(path)) - sys.stdlib_module_names - {"examples", "pd_proxy"}:
            names = {canonical(name) for name in distributions.get(package, [package])}
            found.setdefault("|".join(sorted(names)), set()).add(str(path.relative_to(ROOT)))
    return found


def test_the_extra_covers_every_third_party_import_of_the_examples() -> None:
    routers = [path for path in EXAMPLES.rglob("*.py") if QUICKSTART not in path.parents]
    assert routers
    found = third_party(*routers)
    assert not found.keys() - extra("examples"), found


def test_the_demonstrations_extra_covers_the_rest() -> None:
    found = third_party(*QUICKSTART.rglob("*.py"))
    assert not found.keys() - extra("examples") - extra("demo") - WITH_VLLM, found


def test_the_proxys_extra_is_what_it_imports() -> None:
    assert extra("proxy") == third_party(*set(PROXY.rglob("*.py")) - {TRACING}).keys()


def test_what_brings_tracing_has_an_extra_of_its_own() -> None:
    (libraries,) = third_party(TRACING).keys() - extra("proxy")
    assert extra("tracing") <= set(libraries.split("|"))


def test_the_extra_names_nothing_that_no_example_imports() -> None:
    imported = third_party(*EXAMPLES.rglob("*.py")).keys() - WITH_VLLM
    assert extra("examples") == imported | extra("proxy"), "examples start the proxy"
