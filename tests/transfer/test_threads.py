"""A process to which the system gives no further thread is not ended by libzmq, whose threads it has already."""

import os
import subprocess
import sys
import threading

import pytest

from tests.support.control.samples import Handler
from transfer.control.failures import ControlStartError
from transfer.control.server import ControlServer
from transfer.threads import check_threads

#: Asks for the first time when there is no thread left. The limit is that of a user other than root.
PROGRAM = """
import os, resource
from transfer.control.client import ControlClient
from transfer.control.messages import Hello
from transfer.control.failures import PeerUnreachable

os.setgroups([]); os.setgid(61235); os.setuid(61235)
client = ControlClient()
_, hard = resource.getrlimit(resource.RLIMIT_NPROC)
number = len(os.listdir("/proc/self/task"))
resource.setrlimit(resource.RLIMIT_NPROC, (number, hard))
try:
    client.request("127.0.0.1", 9, Hello("engine"), 1.0).result()
except PeerUnreachable as error:
    print("unreachable:", error, flush=True)
client.close()
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become a user without processes")
def test_who_asks_with_the_last_thread_lives() -> None:
    ended = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 0, ended.stderr
    assert "unreachable: " in ended.stdout


def test_all_or_none_are_left(monkeypatch: pytest.MonkeyPatch) -> None:
    start, started = threading.Thread.start, list[threading.Thread]()

    def three(thread: threading.Thread) -> None:
        if len(started) == 3:
            raise RuntimeError("can't start new thread")
        started.append(thread)
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", three)
    check_threads("this", 3)
    started.clear()
    with pytest.raises(RuntimeError, match=r"no thread left \(can't start new thread\), and this needs 4\. Raise"):
        check_threads("this", 4)
    assert not any(thread.is_alive() for thread in started)


def test_a_control_server_for_which_there_is_no_thread_names_the_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    with pytest.raises(ControlStartError, match=r"no thread left .* the control channel needs 2\. Raise the limit"):
        ControlServer(Handler(), "127.0.0.1").start()
