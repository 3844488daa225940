"""What this process holds of the machine, and ports that nobody holds."""

import contextlib
import os
import random
import signal
import socket
from dataclasses import dataclass
from pathlib import Path

from tests.support.waiting import until


@dataclass(frozen=True)
class OpenResources:
    """Threads and file descriptors of this process."""

    threads: int
    files: int

    @classmethod
    def now(cls) -> "OpenResources":
        return cls(len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd")))

    @property
    def is_all(self) -> bool:
        """Whether no more is held now. It may be less: what an earlier test closed may still have been ending."""
        now = OpenResources.now()
        return now.threads <= self.threads and now.files <= self.files


def open_ends() -> set[str]:
    """Sockets, event counters and shared memory of this process."""
    descriptors = set()
    for path in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # that of the directory itself
            descriptors.add(str(path.readlink()))
    return {name for name in descriptors if name.startswith(("socket:", "anon_inode:", "/dev/shm/", "/memfd:"))}


def free_ports(count: int) -> list[int]:
    """TCP ports of the loopback interface on which nobody listened a moment ago, all different.

    Below those that the kernel gives to connections, of which servers make many before they listen.
    """
    first_given = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    found: list[int] = []
    with contextlib.ExitStack() as stack:
        for port in random.sample(range(10_000, first_given), 1000):
            if len(found) == count:
                break
            with contextlib.suppress(OSError):
                stack.enter_context(socket.socket()).bind(("127.0.0.1", port))
                found.append(port)
    assert len(found) == count, "hardly any port is free"
    return found


def is_free(port: int) -> bool:
    """Whether a server could listen on a port of the loopback interface."""
    with socket.socket() as one:
        one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as servers do: what is closed does not matter
        try:
            one.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def free_port() -> int:
    """A TCP port of the loopback interface on which nobody listened a moment ago."""
    return free_ports(1)[0]


def stop(pid: int) -> None:
    """Stop a process (SIGSTOP), and wait until all of its threads stand still: they may go on for a moment."""
    os.kill(pid, signal.SIGSTOP)
    until(lambda: _stands_still(pid), f"process {pid} stops")


def _stands_still(pid: int) -> bool:
    """Whether no thread of a process runs. One that has ended stands still."""
    states = set()
    for path in Path(f"/proc/{pid}/task").glob("*/stat"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            states.add(path.read_text().rpartition(") ")[2][0])
    return states <= set("TtZX")
