"""Processes of a fork server are as those of ``subprocess.Popen``: they end, are killed and are waited for."""

import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest

from tests.support.e2e.fork_server import ForkedProcess, ForkServer
from tests.support.e2e.hosts import Hosts, why_not
from tests.support.waiting import until

WITHIN_S = 60.0
SERVER = """
import os, sys, time
print(sys.argv[1:], os.environ["WHOSE"], os.getpgid(0) == os.getpid(), len(os.listdir("/proc/self/fd")), flush=True)
time.sleep(float(sys.argv[2]))
sys.exit(int(sys.argv[1]))
"""
Start = Callable[..., ForkedProcess]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Start a process that ends with a status after so many seconds, with an environment of its own."""
    (tmp_path / "server_of_a_test.py").write_text(SERVER)
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}:{os.environ.get('PYTHONPATH', os.getcwd())}"}
    with closing(ForkServer(environment, knows_vllm=False)) as fork_server, (tmp_path / "log").open("wb") as log:

        def start(status: int, seconds: float, whose: str = "", namespace: str = "") -> ForkedProcess:
            command = ["server_of_a_test", str(status), str(seconds)]
            return fork_server.spawn(command, {**environment, "WHOSE": whose}, log, namespace)

        yield start


def test_each_has_its_arguments_environment_group_and_status(start: Start, tmp_path: Path) -> None:
    longer, shorter = start(0, 0.2, "longer"), start(7, 0, "shorter")
    assert (shorter.wait(WITHIN_S), longer.wait(WITHIN_S)) == (7, 0)
    assert (shorter.poll(), shorter.returncode) == (7, 7)
    # Standard input, output and errors, and that of the directory: nothing of the fork server or of the others.
    assert sorted((tmp_path / "log").read_text().splitlines()) == [
        "['0', '0.2'] longer True 4",
        "['7', '0'] shorter True 4",
    ]


@pytest.mark.skipif(why_not() != "", reason=why_not())
def test_one_may_have_the_network_of_a_host(start: Start) -> None:
    with closing(Hosts()) as hosts:
        namespace = hosts.namespace(1)
        process = start(0, WITHIN_S, namespace=namespace)
        until(lambda: os.stat(f"/proc/{process.pid}/ns/net").st_ino == os.stat(f"/var/run/netns/{namespace}").st_ino)
        process.terminate()
        process.wait(WITHIN_S)


def test_one_that_is_told_to_end_or_killed_says_by_what(start: Start) -> None:
    told, killed = start(0, WITHIN_S), start(0, WITHIN_S)
    with pytest.raises(subprocess.TimeoutExpired):
        told.wait(0.01)
    assert told.poll() is None
    told.terminate()
    os.killpg(killed.pid, signal.SIGKILL)
    assert (told.wait(WITHIN_S), killed.wait(WITHIN_S)) == (-signal.SIGTERM, -signal.SIGKILL)
    told.terminate()  # of one that has ended does nothing


def test_nothing_is_known_of_one_that_outlives_the_fork_server(tmp_path: Path) -> None:
    fork_server = ForkServer(dict(os.environ), knows_vllm=False)
    with (tmp_path / "log").open("wb") as log:
        process = fork_server.spawn(["http.server", "0", "--bind", "127.0.0.1"], os.environ, log)
    fork_server.close()
    with pytest.raises(RuntimeError, match="the process that forks servers has ended"):
        process.wait(WITHIN_S)
    os.kill(process.pid, signal.SIGKILL)
