"""Every module of the packages has tests: in the module of its name in the mirrored place, or where these say so.

A test module names what it covers beside that in lines ``Covers: a.b, c.d.`` of its docstring.
"""

import ast
import re
from functools import cache

from tests.support.sources import imports, is_module, is_test_module, modules, source_file, source_tree

PACKAGES = ("layout", "transfer", "pd_connector")
#: Those that do anything: the docstring of a package alone does not.
PRODUCTION = {
    module
    for package in PACKAGES
    for module in modules(package)
    if len(source_tree(module).body) > (source_file(module).name == "__init__.py")
}
TESTS = [module for module in modules("tests") if is_test_module(module) and not module.endswith("conftest")]


def mirrored(test: str) -> str:
    """What a test module covers by its own name: ``tests.a.test_b`` covers ``a.b``."""
    *packages, name = test.split(".")[1:]
    return ".".join([*packages, name.removeprefix("test_")])


@cache
def said(test: str) -> list[str]:
    """What a test module says that it covers."""
    if "Covers: " not in source_file(test).read_text():
        return []
    docstring = ast.get_docstring(source_tree(test)) or ""
    lists = re.findall(r"^Covers: ([\w., \n]+)\.$", docstring, re.MULTILINE)
    return [name.strip() for names in lists for name in names.split(",")]


@cache
def needed(module: str) -> tuple[str, ...]:
    """The modules of the packages and of the tests that one imports."""
    return tuple(name for name in imports(module) if name.partition(".")[0] in (*PACKAGES, "tests") and is_module(name))


def loaded(test: str) -> set[str]:
    """The modules of this project that a test module needs, and what they need."""
    conftest = f"{test.rpartition('.')[0]}.conftest"
    waiting, found = [test, *([conftest] if is_module(conftest) else [])], set()
    while waiting:
        module = waiting.pop()
        if module not in found:
            found.add(module)
            waiting += needed(module)
    return found


def test_every_module_is_covered() -> None:
    covered = {name for test in TESTS for name in (mirrored(test), *said(test))}
    assert sorted(PRODUCTION - covered) == []


def test_what_is_covered_is_there_and_used() -> None:
    for test in TESTS:
        assert set(said(test)) <= PRODUCTION, f"{test} covers what is no module"
        assert mirrored(test) not in said(test), f"{test} covers {mirrored(test)} by its name"
        used = loaded(test)
        for name in {mirrored(test), *said(test)} & PRODUCTION:
            assert name in used, f"{test} covers {name}, and does not load it"
