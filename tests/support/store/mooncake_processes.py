"""A real Mooncake Store on this machine: a master, and the client process that holds the machine's objects.

Or this machine's client, which holds none, and one that does, as if on another machine: every byte crosses TCP.

Or the master alone, for clients in other processes.
"""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.support.process import free_ports, stop
from tests.support.waiting import until
from transfer.peers import Address

#: How long the master keeps a client that it does not hear of.
CLIENT_TTL_S = 3
#: Long, as servers may fill the machine meanwhile.
_START_TIMEOUT_S = 120.0


class MooncakeProcesses:
    """Owner of the processes. Each may be killed, stopped and started again."""

    def __init__(
        self, directory: Path, held_bytes: int = 512 << 20, lease_ms: int = 500, *, elsewhere: bool = False
    ) -> None:
        """Start all, with room for ``held_bytes``; what was looked up is not evicted for ``lease_ms``.

        ``elsewhere``: another machine's client has the room.
        """
        self._lease_ms = lease_ms
        self._directory = directory
        self._held_bytes = held_bytes
        self._master_port, self._client_port, self._metrics_port, self._holder_port = free_ports(4)
        self._own_bytes = 0 if elsewhere else held_bytes
        self.master = self._start_master()
        self.client = self._start_client()
        self.holder = self._start_holder() if elsewhere else self.client

    @property
    def address(self) -> Address:
        """Of the client: the setting ``pool``."""
        return Address("127.0.0.1", self._client_port)

    def restart_master(self) -> None:
        """Kill the master, and start one that knows nothing."""
        _kill(self.master)
        self.master = self._start_master()

    def restart_client(self) -> None:
        """Kill the client, and start one that holds nothing. The master forgets the old one."""
        _kill(self.client)
        time.sleep(CLIENT_TTL_S + 1)
        self.client = self._start_client()

    def restart_holder(self) -> None:
        """Kill another machine's client, and start one that holds nothing, at once."""
        _kill(self.holder)
        self.holder = self._start_holder()

    @contextmanager
    def holder_stopped(self) -> Iterator[None]:
        """Stop the client that has the room, for as long as the context lasts."""
        with _stopped(self.holder):
            yield

    @contextmanager
    def client_stopped(self) -> Iterator[None]:
        """Stop the client, so that it answers nothing, for as long as the context lasts."""
        with _stopped(self.client):
            yield

    @contextmanager
    def master_stopped(self) -> Iterator[None]:
        """The same with the master."""
        with _stopped(self.master):
            yield

    def close(self) -> None:
        """End all."""
        for process in (self.holder, self.client, self.master):
            _kill(process)

    def _start_master(self) -> "subprocess.Popen[bytes]":
        return self._start(
            self._master_port, "mooncake_master", "--rpc_address=127.0.0.1", f"--rpc_port={self._master_port}",
            "--metrics_host=127.0.0.1", f"--metrics_port={self._metrics_port}", f"--client_ttl={CLIENT_TTL_S}",
            f"--default_kv_lease_ttl={self._lease_ms}", "--put_start_discard_timeout_sec=1",
            "--put_start_release_timeout_sec=2",
        )  # fmt: skip

    def _start_client(self) -> "subprocess.Popen[bytes]":
        return self._start_one(self._client_port, self._own_bytes)

    def _start_holder(self) -> "subprocess.Popen[bytes]":
        return self._start_one(self._holder_port, self._held_bytes)

    def _start_one(self, port: int, held_bytes: int) -> "subprocess.Popen[bytes]":
        return self._start(
            port, "mooncake_client", "--host=127.0.0.1", f"--port={port}",
            f"--master_server_address=127.0.0.1:{self._master_port}", "--metadata_server=P2PHANDSHAKE",
            f"--global_segment_size={held_bytes >> 20}MB", "--local_buffer_size=16MB", "--protocol=tcp",
        )  # fmt: skip

    def _start(self, port: int, program: str, *arguments: str) -> "subprocess.Popen[bytes]":
        return _start(self._directory, port, program, *arguments)


@contextmanager
def master_alone(directory: Path) -> Iterator[Address]:
    """Run a master without a client, for as long as the context lasts."""
    port, metrics_port = free_ports(2)
    where = ("--rpc_address=127.0.0.1", f"--rpc_port={port}")
    metrics = ("--metrics_host=127.0.0.1", f"--metrics_port={metrics_port}")
    master = _start(directory, port, "mooncake_master", *where, *metrics)
    try:
        yield Address("127.0.0.1", port)
    finally:
        _kill(master)


def _start(directory: Path, port: int, program: str, *arguments: str) -> "subprocess.Popen[bytes]":
    # What an engine in this process has set for itself, such as an address family, is not for them.
    others = {name: value for name, value in os.environ.items() if not name.startswith("MC_")}
    with (directory / f"{program}.log").open("ab") as log:
        process = subprocess.Popen(
            [str(Path(sys.executable).with_name(program)), *arguments],
            stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT,
            env={**others, "MC_RPC_TIMEOUT_MS": "500"},
        )  # fmt: skip
    try:
        until(lambda: _listens(port), f"{program} listens at {port}", within_s=_START_TIMEOUT_S)
    except BaseException:
        _kill(process)
        raise
    return process


def _listens(port: int) -> bool:
    with socket.socket() as connection:
        return connection.connect_ex(("127.0.0.1", port)) == 0


@contextmanager
def _stopped(process: "subprocess.Popen[bytes]") -> Iterator[None]:
    stop(process.pid)
    try:
        yield
    finally:
        process.send_signal(signal.SIGCONT)


def _kill(process: "subprocess.Popen[bytes]") -> None:
    process.kill()
    process.wait()
