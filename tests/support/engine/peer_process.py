"""A Mooncake peer in a process of its own, to be stopped, killed and continued.

Run as a module it is the peer: it registers memory of noise, prints its address and waits for the end of its input.
"""

import os
import signal
import subprocess
import sys
from types import TracebackType
from typing import Self

from layout.geometry import Region
from tests.support.memory import Memory
from transfer.engine.mooncake import MooncakeEngine, MooncakeOptions


class PeerProcess:
    """The peer as seen from the test: its address, its memory, and the signals that it gets."""

    def __init__(self, size: int, seed: int) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", __name__, str(size), str(seed)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        assert self._process.stdout is not None
        self.address, start = self._process.stdout.readline().split()
        self.region = Region(int(start), size)

    def stop(self) -> None:
        os.kill(self._process.pid, signal.SIGSTOP)
        os.waitpid(self._process.pid, os.WUNTRACED)  # the signal may be sent before all threads stand still

    def go_on(self) -> None:
        os.kill(self._process.pid, signal.SIGCONT)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.kill()
        for stream in (self._process.stdin, self._process.stdout):
            assert stream is not None
            stream.close()


def main() -> None:
    size, seed = map(int, sys.argv[1:])
    memory = Memory.of_noise(size, seed)
    engine = MooncakeEngine(MooncakeOptions("127.0.0.1"))
    engine.register([memory.region])
    sys.stdout.write(f"{engine.address} {memory.region.address}\n")
    sys.stdout.flush()
    sys.stdin.read()
    engine.close()


if __name__ == "__main__":
    main()
