"""Hosts of their own are made where they can be, else it is said what is missing; and they do not stay."""

import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from tests.support.e2e.hosts import Hosts, why_not

ROOT = Path(__file__).parents[1]
pytestmark = [pytest.mark.hosts, pytest.mark.skipif(bool(why_not()), reason=why_not())]
TOOLS = ("ip", "bridge", "tc")
#: Makes two hosts, says so, and waits.
MAKER = """
import sys
from tests.support.e2e.hosts import Hosts

hosts = Hosts()
print(hosts.namespace(1), hosts.namespace(2), flush=True)
sys.stdin.read()
"""


def there_is_of(process: int) -> list[str]:
    """The namespaces and devices of a process's hosts."""
    listed = [subprocess.check_output(["ip", "-o", kind], text=True) for kind in ("netns", "link")]
    return re.findall(rf"\bpd{process}(?:h|sw|p)\d*\b", "".join(listed))


@pytest.fixture
def tools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A directory with all that hosts are made with, which alone is searched for commands."""
    for tool in (*TOOLS, "sh", "cat"):
        if path := shutil.which(tool):
            (tmp_path / tool).symlink_to(path)
    monkeypatch.setenv("PATH", str(tmp_path))
    why_not.cache_clear()
    yield tmp_path
    why_not.cache_clear()


@pytest.mark.parametrize("tool", TOOLS)
def test_a_tool_that_is_missing_is_named_with_its_package(tools: Path, tool: str) -> None:
    assert why_not() == ""
    why_not.cache_clear()
    (tools / tool).unlink()
    assert why_not() == f"{tool} is missing (Debian: apt-get install iproute2)"


def test_who_is_not_root_is_told(tools: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert why_not() == "only root can make network namespaces"


def test_what_the_system_refuses_is_said_and_nothing_stays(tools: Path) -> None:
    (tools / "tc").unlink()
    (tools / "tc").write_text("#!/bin/sh\necho Specified qdisc kind is unknown >&2\nexit 2\n")
    (tools / "tc").chmod(0o755)
    assert re.fullmatch(r"tc qdisc add dev \S+ root tbf .*: Specified qdisc kind is unknown", why_not())
    assert there_is_of(os.getpid()) == []


def test_hosts_are_removed_also_those_of_a_process_that_was_killed() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", MAKER], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as maker:
        assert maker.stdout is not None
        assert maker.stdout.readline().split() == [f"pd{maker.pid}h1", f"pd{maker.pid}h2"]
        assert len(there_is_of(maker.pid)) >= 5
        maker.send_signal(signal.SIGKILL)
    with closing(Hosts()) as hosts:
        hosts.namespace(1)
        assert there_is_of(maker.pid) == []
        assert len(there_is_of(os.getpid())) >= 3
    assert there_is_of(os.getpid()) == []
