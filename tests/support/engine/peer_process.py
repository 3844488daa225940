"""A Mooncake peer in a process of its own, to be stopped, killed and continued.

Run as a module it is the peer: it registers memory of noise, prints its address and waits for the end of its input.
"""

import ctypes
import mmap
import os
import signal
import subprocess
import sys
import threading
from types import TracebackType
from typing import Self
from unittest.mock import patch

import numpy as np
import psutil

from layout.geometry import Identity, Region
from tests.support.memory import Memory, even_copies, noise
from tests.support.process import stop
from tests.support.waiting import until
from transfer.engine.interface import ReadFailed
from transfer.engine.mooncake import MooncakeEngine, MooncakeOptions
from transfer.engine.mooncake_links import MooncakeLink
from transfer.memory import HostMemory

MIB = 1 << 20
SIZE = 64 * MIB
_PIECE_BYTES = 8192  # of a read that is to take a while: Mooncake brings one after the other

_MAP_FIXED_NOREPLACE = 0x100000  # of Linux


class PeerProcess:
    """The peer as seen from the test: its address, its memory, and the signals that it gets."""

    def __init__(self, size: int, seed: int, at: int = 0, host: str = "127.0.0.1", ipv6: str | None = None) -> None:
        """Start it.

        Args:
            size: of its memory, in bytes.
            seed: of the noise in it.
            at: where it is to lie, and behind it the page of its identity; 0 leaves it to the system.
            host: its address.
            ipv6: what ``MC_USE_IPV6`` is; None: not set.
        """
        self._process = subprocess.Popen(
            [sys.executable, "-m", __name__, str(size), str(seed), str(at), host],
            env=environment_with(ipv6),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        assert self._process.stdout is not None
        self.address, start, identity, nonce = self._process.stdout.readline().split()
        self.region = Region(int(start), size)
        self.identity = Identity(int(identity), bytes.fromhex(nonce))

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def data_port(self) -> int:
        """Where its memory is read, which is not the port of its address."""
        listening = {
            each.laddr.port
            for each in psutil.Process(self.pid).net_connections("tcp")
            if each.status == psutil.CONN_LISTEN
        }
        (port,) = listening - {int(self.address.rpartition(":")[2])}
        return int(port)

    def stop(self) -> None:
        stop(self.pid)

    def go_on(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

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


def environment_with(ipv6: str | None) -> dict[str, str]:
    """This process's environment with a value for ``MC_USE_IPV6``, which Mooncake's first engine has read here."""
    others = {name: value for name, value in os.environ.items() if name != "MC_USE_IPV6"}
    return others if ipv6 is None else others | {"MC_USE_IPV6": ipv6}


def fail_mid_read(link: MooncakeLink, peer: PeerProcess, destination: Memory, happens: str) -> ReadFailed:
    """Stop or kill the peer once bytes begin to land; the failure of the read."""
    failures: list[ReadFailed] = []

    def read() -> None:
        try:
            timeout_s = 1.0 if happens == "stopped" else 20.0
            link.read(even_copies(destination.region, peer.region, SIZE // _PIECE_BYTES, _PIECE_BYTES), timeout_s)
        except ReadFailed as error:
            failures.append(error)

    reading = threading.Thread(target=read)
    reading.start()
    until(lambda: bool(destination.view[0]))
    peer.stop()  # before it is killed too, so that it does not finish first
    if happens == "killed":
        peer.kill()
    reading.join()
    assert failures, "the read was over before the peer was stopped: give it more bytes"
    return failures[0]


class MemoryAt:
    """Memory at an address of one's choice."""

    def __init__(self, address: int, size: int) -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        libc.mmap.restype = ctypes.c_void_p
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_FIXED_NOREPLACE
        protection = mmap.PROT_READ | mmap.PROT_WRITE
        assert libc.mmap(ctypes.c_void_p(address), ctypes.c_size_t(size), protection, flags, -1, 0) == address
        self.view = np.ndarray((size,), np.uint8, memoryview((ctypes.c_char * size).from_address(address)))
        self.region = Region(address, size)


def main() -> None:
    size, seed, at = map(int, sys.argv[1:4])
    memory: Memory | MemoryAt = MemoryAt(at, size) if at else Memory(size)
    memory.view[:] = noise(size, seed)
    page = (lambda size: MemoryAt(memory.region.end, size)) if at else HostMemory
    with patch("transfer.engine.identity.HostMemory", page):
        engine = MooncakeEngine(MooncakeOptions(sys.argv[4]))
    engine.register([memory.region])
    identity = engine.identity
    sys.stdout.write(f"{engine.address} {memory.region.address} {identity.address} {identity.nonce.hex()}\n")
    sys.stdout.flush()
    sys.stdin.read()
    engine.close()


if __name__ == "__main__":
    main()
