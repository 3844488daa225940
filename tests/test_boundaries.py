"""Which package imports what: the arrows run one way, vLLM is known in one room only, and tests lend nothing.

Imports are read off the source, those inside functions and under TYPE_CHECKING too.
"""

import ast
import importlib
import re
import sys
from types import ModuleType

import pytest

import layout
import transfer
from tests.support.imports import PACKAGES, WITHOUT_VLLM, lacks
from tests.support.sources import ROOT, imports, is_test_module, is_within, modules, source_file, source_tree

MOST_LINES = 500
OURS = ("layout", "transfer", "pd_connector", "pd_proxy", "examples", "benchmarks", "tests")


#: Package, what it must not import, except (modules of it that may).
RULES: list[tuple[str, tuple[str, ...], tuple[str, ...]]] = [
    # The arrows between the packages.
    ("layout", ("transfer", "pd_connector", "pd_proxy", "examples", "benchmarks", "tests"), ()),
    ("transfer", ("pd_connector", "pd_proxy", "examples", "benchmarks", "tests"), ()),
    ("pd_connector", ("pd_proxy", "examples", "benchmarks", "tests"), ()),
    ("pd_proxy", ("layout", "transfer", "pd_connector", "vllm", "examples", "benchmarks", "tests"), ()),
    ("examples", ("layout", "transfer", "pd_connector", "pd_proxy", "benchmarks", "tests"), ()),
    ("benchmarks", ("pd_proxy", "tests"), ()),
    # Nothing but vLLM's room and its face knows vLLM.
    ("layout", ("vllm",), ()),
    ("transfer", ("vllm",), ()),
    ("pd_connector", ("vllm",), ("pd_connector.vllm", "pd_connector.connector")),
    # layout is arithmetic: it moves no bytes and reads no memory.
    ("layout", ("torch", "ctypes", "mmap", "llvmlite", "zmq", "mooncake", "msgspec"), ()),
    # Engine and control channel are siblings, and so are the two kinds of copies. Between processes of one host, a read
    # is a copy.
    ("transfer.engine", ("transfer.control",), ()),
    ("transfer.engine", ("transfer.copies",), ("transfer.engine.cuda_ipc", "transfer.engine.cuda_ipc_copies")),
    ("transfer.control", ("transfer.engine", "transfer.copies"), ()),
    ("transfer.copies", ("transfer.engine", "transfer.control"), ()),
    ("transfer.copies.reshape", ("transfer.copies.batch",), ()),
    ("transfer.copies.checksums", ("transfer.copies.batch",), ()),
    ("transfer.peers", ("transfer.engine", "transfer.control", "transfer.copies"), ()),
    # Prefill and decode are siblings, and both stand on host memory.
    ("pd_connector.scheduler.prefill", ("pd_connector.scheduler.decode",), ()),
    ("pd_connector.scheduler.decode", ("pd_connector.scheduler.prefill",), ()),
    ("pd_connector.scheduler.host", ("pd_connector.scheduler.prefill", "pd_connector.scheduler.decode"), ()),
    # What arrives from elsewhere is parsed by type; nothing is unpickled.
    ("layout", ("pickle", "marshal", "shelve"), ()),
    ("transfer", ("pickle", "marshal", "shelve"), ()),
    ("pd_connector", ("pickle", "marshal", "shelve"), ()),
    # What passes between the two sides of the connector is orders, and nothing else.
    ("pd_connector.scheduler", ("pd_connector.worker", "pd_connector.connector", "pd_connector.doctor"), ()),
    ("pd_connector.worker", ("pd_connector.scheduler", "pd_connector.connector", "pd_connector.doctor"), ()),
    (
        "pd_connector.vllm",
        ("pd_connector.scheduler", "pd_connector.worker", "pd_connector.connector", "pd_connector.doctor"),
        (),
    ),
    ("pd_connector.connector", ("pd_connector.doctor",), ()),
    *(
        (f"pd_connector.{module}", ("pd_connector.scheduler", "pd_connector.worker", "pd_connector.vllm"), ())
        for module in ("config", "orders", "params", "secret", "stats", "traces")
    ),
]


@pytest.mark.parametrize(("package", "forbidden", "excepted"), RULES)
def test_arrows_run_one_way(package: str, forbidden: tuple[str, ...], excepted: tuple[str, ...]) -> None:
    wrong = [
        f"{module} imports {name}"
        for module in modules(package)
        if not is_within(module, excepted)
        for name in imports(module)
        if is_within(name, forbidden)
    ]
    assert wrong == []


def test_a_rule_can_be_broken() -> None:
    """The reading of imports sees those that this file has, a function's too."""
    found = set(imports("tests.test_boundaries"))
    assert {"ast", "tests.support.sources.imports", "layout", "json"} <= found
    import json  # noqa: F401, PLC0415


def test_layout_imports_numpy_and_numba_only() -> None:
    tops = {name.partition(".")[0] for module in modules("layout") for name in imports(module)}
    assert tops - set(sys.stdlib_module_names) == {"layout", "numpy", "numba"}


@pytest.mark.parametrize("package", [layout, transfer])
def test_the_public_names_are_those_of_the_docstring_and_there(package: ModuleType) -> None:
    documented = re.findall(r"^    (\w+) {2,}\S", str(package.__doc__), re.MULTILINE)
    name = package.__name__
    here = {module.split(".")[1] for module in modules(name) if "." in module}
    assert set(documented) == here
    for public in documented:
        importlib.import_module(f"{name}.{public}")


def test_no_two_classes_have_one_name() -> None:
    places: dict[str, list[str]] = {}
    for package in ("layout", "transfer", "pd_connector"):
        for module in modules(package):
            for node in ast.walk(source_tree(module)):
                if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                    places.setdefault(node.name, []).append(module)
    assert {name: where for name, where in places.items() if len(where) > 1} == {}


TESTS = list(modules("tests"))


def test_nobody_imports_a_test_module() -> None:
    wrong = [f"{module} imports {name}" for module in TESTS for name in imports(module) if is_test_module(name)]
    assert wrong == []


def test_tests_import_of_tests_only_their_support() -> None:
    wrong = [
        f"{module} imports {name}"
        for module in TESTS
        for name in imports(module)
        if is_within(name, ("tests",)) and not is_within(name, ("tests.support",))
    ]
    assert wrong == []


def test_beside_tests_there_are_tests_only() -> None:
    for module in TESTS:
        file = source_file(module)
        is_empty_package = file.name == "__init__.py" and not file.read_text()
        assert is_within(module, ("tests.support",)) or is_test_module(module) or is_empty_package, module


def test_no_file_is_longer_than_a_room() -> None:
    for package in OURS:
        for file in (ROOT / package).rglob("*.py"):
            assert len(file.read_text().splitlines()) <= MOST_LINES, (
                f"{file.relative_to(ROOT)} has more than {MOST_LINES} lines"
            )


@pytest.mark.parametrize("package", ["transfer", "pd_connector", "pd_proxy"])
def test_host_and_port_are_joined_where_ipv6_is_known(package: str) -> None:
    """Without brackets, an IPv6 address and a port are no address: ``Address`` writes them."""
    joined = re.compile(r"host\}:\{|%s:%d")
    writers = {"transfer.peers", "pd_proxy.control", "pd_connector.doctor.http"}
    found = {module for module in modules(package) if joined.search(source_file(module).read_text())}
    assert found <= writers, f"use Address: {found - writers}"


def test_what_a_machine_without_vllm_uses_imports_nothing_of_it() -> None:
    """Among it the doctor, which is to say what is missing."""
    plain = [name for package in PACKAGES for name in modules(package) if name.startswith(WITHOUT_VLLM)]
    assert len(plain) > 20
    assert {name: lacks(name) for name in plain if lacks(name)} == {}
