"""Process supervision: whatever happens, no process of a server is left."""

import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from examples.quickstart.servers import Server, ServerFailed, Servers, free_ports

ROOT = Path(__file__).parents[3]

# Answers /health; like vLLM it starts a helper, here in a session of its own and deaf to SIGTERM.
FAKE_SERVER = """
import http.server, os, pathlib, signal, socketserver, subprocess, sys
port, pids, mode = int(sys.argv[1]), pathlib.Path(sys.argv[2]), sys.argv[3]
helper = subprocess.Popen(
    [sys.executable, "-S", "-c", "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(60)"],
    start_new_session=True,
)
pids.write_text(f"{os.getpid()} {helper.pid}")
if mode == "crash":
    print("no such model")
    os._exit(3)
if mode == "killed":
    os.kill(os.getpid(), 9)
if mode == "deaf":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
if mode == "tidy":
    def tidy_up(*_):
        print("tidied up", flush=True)
        os._exit(0)
    signal.signal(signal.SIGTERM, tidy_up)
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(503 if mode == "loading" else 200)
        self.end_headers()
socketserver.TCPServer(("127.0.0.1", port), Handler).serve_forever()
"""


class Bed:
    """Makes fake servers in a directory and knows the processes that they consist of."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self.script = directory / "fake_server.py"
        self.script.write_text(FAKE_SERVER)
        self._pid_files: list[Path] = []

    def server(self, mode: str = "good") -> Server:
        name = f"{mode} server"
        pids = self._directory / f"{len(self._pid_files)}.pids"
        self._pid_files.append(pids)
        (port,) = free_ports(1)
        command = [sys.executable, "-S", str(self.script), str(port), str(pids), mode]
        return Server(name, command, url=f"http://127.0.0.1:{port}", log=self._directory / f"{mode}.log")

    def pids(self) -> list[int]:
        eventually(lambda: all(path.is_file() and path.read_text() for path in self._pid_files))
        return [int(pid) for path in self._pid_files for pid in path.read_text().split()]


def eventually(condition: Callable[[], bool], timeout_s: float = 10) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.02)


def alive(pids: list[int]) -> list[int]:
    def runs(pid: int) -> bool:
        try:
            return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
        except OSError:
            return False

    return [pid for pid in pids if runs(pid)]


@pytest.fixture
def bed(tmp_path: Path) -> Bed:
    return Bed(tmp_path)


def test_a_ready_server_answers_and_stop_leaves_no_process(bed: Bed) -> None:
    ready: list[str] = []
    with Servers() as servers:
        server = servers.start(bed.server())
        servers.wait_ready([server], 10, on_ready=lambda each: ready.append(each.name))
        pids = bed.pids()
        assert len(alive(pids)) == 2
    assert ready == ["good server"]
    assert alive(pids) == []
    assert not server.running


def test_a_server_may_tidy_up_before_it_ends(bed: Bed) -> None:
    with bed.server("tidy") as server:
        eventually(server.ready)
    assert server.log_tail(lines=1) == "tidied up"


def test_a_server_here_is_not_asked_through_the_proxy_of_a_network(bed: Bed, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    with bed.server() as server:
        eventually(server.ready)


def test_a_server_that_ignores_sigterm_is_killed(bed: Bed, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("examples.quickstart.servers._GRACE_S", 0.2)
    with Servers() as servers:
        server = servers.start(bed.server("deaf"))
        servers.wait_ready([server], 10)
        pids = bed.pids()
    assert alive(pids) == []


@pytest.mark.parametrize(("mode", "status"), [("crash", 3), ("killed", 128 + signal.SIGKILL)])
def test_a_server_that_dies_at_start_ends_the_wait_with_its_status(bed: Bed, mode: str, status: int) -> None:
    with Servers() as servers:
        server = servers.start(bed.server(mode))
        with pytest.raises(ServerFailed, match=rf"{mode} server ended .* with exit status {status}"):
            servers.wait_ready([server], 20)
        assert alive(bed.pids()) == []  # its helper has ended with it, before anyone asked


def test_the_failure_holds_the_end_of_the_log_without_noise(bed: Bed) -> None:
    with Servers() as servers:
        server = servers.start(bed.server("crash"))
        with pytest.raises(ServerFailed) as failure:
            servers.wait_ready([server], 20)
    assert failure.value.log_tail == "no such model"

    server.log.write_text("one\n\x1b[31mtwo\x1b[0m\n\nnanobind: leaked 4 instances!\n - leaked type x\n")
    assert server.log_tail() == "one\ntwo"
    assert server.log_tail(lines=1) == "two"


def test_the_end_of_the_log_comes_after_the_errors_before_it(bed: Bed) -> None:
    server = bed.server()
    cause = "(Worker pid=7) ERROR 11-21 11:02:34 [executor.py:953] RuntimeError: no weights in `/x`"
    server.log.write_text(f"loading\n{cause}\n    raise RuntimeError(\nlater\nRuntimeError: see above\n")
    assert server.log_tail(lines=2) == f"{cause}\n...\nlater\nRuntimeError: see above"


def test_the_errors_of_a_log_are_told_from_tracebacks_and_warnings(bed: Bed) -> None:
    server = bed.server()
    server.log.write_text(
        "(Worker pid=7) WARNING 11-21 11:02:34 [base.py:214] experimental\n"
        "(Worker pid=7) ERROR 11-21 11:02:34 [half.py:136] PDConnector: the pull failed\n"
        "(Worker pid=7) ERROR 11-21 11:02:34 [executor.py:953] Traceback (most recent call last):\n"
        "(Worker pid=7) ERROR 11-21 11:02:34 [executor.py:953]     raise RuntimeError(\n"
        "zmq.error.ZMQError: Address already in use\n"
    )
    assert server.errors() == [
        "(Worker pid=7) ERROR 11-21 11:02:34 [half.py:136] PDConnector: the pull failed",
        "zmq.error.ZMQError: Address already in use",
    ]


def test_one_dying_server_ends_the_wait_for_another(bed: Bed) -> None:
    with Servers() as servers:
        loading = servers.start(bed.server("loading"))
        servers.start(bed.server("crash"))
        with pytest.raises(ServerFailed, match="crash server"):
            servers.wait_ready([loading], 20)
    assert alive(bed.pids()) == []


def test_a_server_that_is_never_ready_runs_out_of_time(bed: Bed) -> None:
    with Servers() as servers:
        server = servers.start(bed.server("loading"))
        with pytest.raises(ServerFailed, match="loading server was not ready within 0 s"):
            servers.wait_ready([server], 0.3)


def test_a_program_that_does_not_exist_is_named(tmp_path: Path) -> None:
    server = Server("odd server", ["/nowhere/python"], url="http://127.0.0.1:1", log=tmp_path / "log")
    with Servers() as servers:
        servers.start(server)
        with pytest.raises(ServerFailed) as failure:
            servers.wait_ready([server], 20)
    assert "cannot start '/nowhere/python'" in failure.value.log_tail


def test_a_server_is_started_once(bed: Bed) -> None:
    with bed.server() as server, pytest.raises(RuntimeError, match="started already"):
        server.start()


def test_free_ports_are_all_different() -> None:
    assert len(set(free_ports(20))) == 20


# Runs the demonstration's main with a stand-in for the part that needs vLLM: two servers that stay.
ASKER = """
import sys
from pathlib import Path
from examples.quickstart import __main__ as demo
from examples.quickstart.servers import Server, Servers, free_ports

def run(console, options):
    with Servers() as servers:
        for index, port in enumerate(free_ports(2)):
            directory = Path(sys.argv[2])
            command = [sys.executable, "-S", sys.argv[1], str(port), str(directory / f"{index}.pids"), "good"]
            log = directory / f"{index}.log"
            server = servers.start(Server("fake", command, url=f"http://127.0.0.1:{port}", log=log))
            servers.wait_ready([server], 20)
        print("up", flush=True)
        while True:
            servers.check()
            demo.time.sleep(1)

demo._run = run
sys.exit(demo.main([]))
"""


@pytest.mark.parametrize(
    ("number", "status"),
    [
        (signal.SIGINT, 130),
        pytest.param(signal.SIGTERM, 143, marks=pytest.mark.slow),
        (signal.SIGKILL, -9),  # no chance to clean up: the guards do
    ],
)
def test_no_process_is_left_when_the_demonstration_is_ended(
    bed: Bed, tmp_path: Path, number: signal.Signals, status: int
) -> None:
    asker = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(ASKER), str(bed.script), str(tmp_path)],
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    )
    with asker:
        assert asker.stdout is not None
        assert asker.stdout.readline() == "up\n"
        pids = [int(pid) for index in (0, 1) for pid in (tmp_path / f"{index}.pids").read_text().split()]
        assert len(alive(pids)) == 4
        os.kill(asker.pid, number)
        rest, _ = asker.communicate(timeout=20)
    assert asker.returncode == status
    eventually(lambda: alive(pids) == [])
    if number != signal.SIGKILL:
        assert rest == f"Ended by {number.name}; all servers are stopped.\n"
