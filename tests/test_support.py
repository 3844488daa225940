"""The rules that the helpers of the tests keep: an index of them all, one name for one thing, waiting that can fail."""

import ast
import gc
import os
import re
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from pathlib import Path

import pytest
from numba.core.caching import FunctionCache, IndexDataCacheFile
from numba.core.dispatcher import Dispatcher

import tests.support
from tests.support import kernels
from tests.support.e2e.cluster import Cluster
from tests.support.e2e.deployments import FAULTS, OTHER_MODELS, Deployment
from tests.support.e2e.fixtures import start_all
from tests.support.process import free_ports
from tests.support.sources import modules, source_file
from tests.support.waiting import ManualClock, holds_for, until

SUPPORT = Path(__file__).parent / "support"
FILES = sorted(SUPPORT.rglob("*.py"))
#: Tests on pairs of servers that are none, which are only counted.
ON_PAIRS = """
import pytest
from tests.support.e2e.choice import on_pairs, pairs
from tests.support.e2e.deployments import FAULTS, MIXED
from tests.support.e2e.fixtures import deployed, deployment

class Cluster:
    running = 0

    def start(self, specs):
        print("started a deployment")
        assert not self.running
        self.running = len(list(specs))
        return range(self.running)

    def stop(self, servers):
        self.running -= len(servers)

@pytest.fixture(scope="session")
def cluster():
    return Cluster()

@pytest.fixture
def pair(request, deployment):
    return request.param

@on_pairs(
    pairs(MIXED, [("TP1", "TP2"), ("TP2", "TP1")], (2, 33)), pairs(FAULTS, [("P", "D fail")], (2, 33)), value="tokens"
)
def test_a_pair(pair, tokens):
    pass
"""


def module_of(file: Path) -> str:
    return file.relative_to(SUPPORT).with_suffix("").as_posix().replace("/", ".")


def public_names(file: Path) -> list[str]:
    """The classes, functions and constants that a module defines for others."""
    names = []
    for node in ast.parse(file.read_text()).body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            names.append(node.name)
        elif isinstance(node, ast.Assign):
            names += [target.id for target in node.targets if isinstance(target, ast.Name)]
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            names.append(node.target.id)
    return [name for name in names if not name.startswith("_") and name != "main"]


def test_the_index_names_every_module_and_nothing_else() -> None:
    named = re.findall(r"^    ([\w.]+) {2,}\S", str(tests.support.__doc__), re.MULTILINE)
    assert sorted(named) == sorted(module_of(file) for file in FILES if file.name != "__init__.py")


def test_no_two_helpers_have_one_name() -> None:
    places: dict[str, list[str]] = {}
    for file in FILES:
        for name in public_names(file):
            places.setdefault(name, []).append(module_of(file))
    assert {name: where for name, where in places.items() if len(where) > 1} == {}


def test_until_returns_what_has_come() -> None:
    answers = iter([None, 0, "here"])
    assert until(lambda: next(answers)) == "here"


def test_until_says_what_it_waited_for() -> None:
    never = threading.Event()
    with pytest.raises(AssertionError, match=r"not within 0\.01 s: until\(lambda: never\.is_set\(\) is True"):
        until(lambda: never.is_set() is True, within_s=0.01)
    with pytest.raises(AssertionError, match=r"not within 0\.01 s: Event\.is_set$"):
        until(never.is_set, within_s=0.01)
    with pytest.raises(AssertionError, match=r"not within 0\.01 s: the event$"):
        until(never.is_set, "the event", within_s=0.01)
    with pytest.raises(AssertionError, match=r"not within 0\.01 s: False$"):
        until(never.is_set, lambda: str(never.is_set()), within_s=0.01)


def test_holds_for_notices_a_moment_in_which_it_does_not_hold() -> None:
    holds_for(lambda: True, 0.01)
    answers = iter([True, True, False, True])
    with pytest.raises(AssertionError, match=r"held for less than 5 s: holds_for\(lambda: next\(answers\), 5\)"):
        holds_for(lambda: next(answers), 5)


def test_a_manual_clock_moves_when_it_is_told_to() -> None:
    clock = ManualClock()
    before = clock()
    assert clock() == before
    clock.advance(1.5)
    assert clock() == before + 1.5


def test_free_ports_are_all_different() -> None:
    assert len(set(free_ports(20))) == 20


def test_servers_of_all_deployments_start_at_once_or_none_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster, figures = Cluster(SUPPORT), list[str]()
    with monkeypatch.context() as patched:
        patched.setattr(cluster, "start", list)
        started = start_all([FAULTS, OTHER_MODELS], cluster, figures)
        specs: dict[Deployment, object] = {each: dict(each.servers) for each in (FAULTS, OTHER_MODELS)}
        assert (started, list(started)) == (specs, list(specs))
        assert not figures
        patched.setattr(cluster, "start", lambda _: 1 / 0)
        assert start_all([FAULTS, OTHER_MODELS], cluster, figures) == {}
    assert figures == ["servers of 2 deployments did not start at once: ZeroDivisionError('division by zero')"]


def test_tests_on_pairs_share_the_servers_of_a_deployment(tmp_path: Path) -> None:
    (tmp_path / "test_pairs.py").write_text(ON_PAIRS)
    options = ("-s", "-p", "no:cacheprovider", "--rootdir", str(tmp_path), str(tmp_path))
    command = [sys.executable, "-m", "pytest", *options]
    ran = subprocess.run(command, cwd=SUPPORT.parents[1], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert ran.stdout.count("started a deployment") == 2


def test_garbage_is_collected_among_what_came_after_the_imports_only() -> None:
    assert gc.isenabled()
    assert gc.get_freeze_count() > 0


def test_two_processes_that_keep_what_they_have_compiled_keep_both(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    read_index = IndexDataCacheFile._load_index

    def slow(self: IndexDataCacheFile) -> object:
        found = read_index(self)
        time.sleep(0.1)
        return found

    monkeypatch.setattr(IndexDataCacheFile, "_load_index", slow)
    files = [IndexDataCacheFile(str(tmp_path), "f", (0, 0)) for _ in range(2)]
    with ThreadPoolExecutor(2) as pool:
        for saved in [pool.submit(file.save, key, key) for file, key in zip(files, "ab", strict=True)]:
            saved.result()
    assert [files[0].load(key) for key in "ab"] == ["a", "b"]


def test_nothing_is_kept_where_nothing_can_be_written(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setattr(kernels, "ROOT", tmp_path / "file")
    before = os.environ["NUMBA_CACHE_DIR"]
    kernels.keep_compiled()
    assert os.environ["NUMBA_CACHE_DIR"] == before


def test_loops_that_numba_compiles_are_kept_for_the_next_process() -> None:
    texts = {name: source_file(name).read_text() for package in ("layout", "transfer") for name in modules(package)}
    compiling = {name for name, text in texts.items() if "from numba import" in text}
    assert compiling - {"transfer.copies.reshape.reshape_kernel"} == set(kernels.MODULES)
    loops = [
        loop for name in kernels.MODULES for loop in vars(import_module(name)).values() if isinstance(loop, Dispatcher)
    ]
    assert len(loops) >= 10
    for loop in loops:
        assert isinstance(loop._cache, FunctionCache), f"{loop} is compiled again in each process"
        assert loop.py_func.__closure__ is None, f"{loop} is never found again: each process has another closure"
