"""What this process holds of the machine, and ports that nobody holds."""

import contextlib
import os
import socket
from dataclasses import dataclass
from pathlib import Path


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
    """TCP ports of the loopback interface on which nobody listened a moment ago, all different."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]


def free_port() -> int:
    """A TCP port of the loopback interface on which nobody listened a moment ago."""
    return free_ports(1)[0]
