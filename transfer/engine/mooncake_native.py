"""The Mooncake library as this project uses it: loaded once with the right environment, ended without stalling Python.

All calls into Mooncake are in this module, with the behaviour of the library that callers must know. What a read is,
and when its memory may be used again, is decided in ``mooncake``.

Two of Mooncake's habits are dealt with here through its sockets, which are file descriptors of this process:

- Its destructor holds the GIL and waits for a thread that sits in ``accept`` for up to a second. A model process must
  not stop for so long, so the wait is shortened before the destructor runs (measured: from 1,005 ms to about 3).
- The first call to a peer that accepts and never answers blocks for 60 s. Shutting that connection down ends it.
"""

import importlib
import math
import os
import socket
import struct
import time
from collections.abc import Iterator, MutableMapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from layout.geometry import Region
from layout.regions import describe_region
from transfer.engine.base import EngineStartError

_CODES = {-1: "invalid argument", -6: "no such device", -7: "it overlaps memory that is registered already"}
_ACCEPT_TIMEOUT_S = 0.001
_LISTENING = "0A"  # the state column of /proc/net/tcp


@dataclass(frozen=True, slots=True)
class NativeOptions:
    """What a Mooncake engine is started with."""

    host: str  # without port or brackets
    protocol: str
    devices: str  # comma-separated network devices, "" for all
    progress_timeout_s: float  # Mooncake gives a transfer up after so long without a byte
    connect_timeout_s: float


def set_environment(options: NativeOptions, environment: MutableMapping[str, str]) -> None:
    """Give Mooncake's variables the values that this project needs, unless the user has set them.

    Mooncake reads them when it is imported and when its first engine starts, so the first engine of a process decides.
    """
    progress_s = str(max(1, math.ceil(options.progress_timeout_s)))
    settings = {
        # With its default of 1,024 queued and 1,024 waiting transfers a peer, a batch above that can break the
        # connection for good. The window of a link is the limit that holds.
        "MC_TCP_MAX_QUEUED_TRANSFERS_PER_PEER": "65535",
        "MC_TCP_MAX_PENDING_ADMISSIONS_PER_PEER": "65535",
        "MC_TCP_PROGRESS_TIMEOUT_SEC": progress_s,
        "MC_TCP_STATUS_TIMEOUT_SEC": progress_s,
        "MC_HANDSHAKE_CONNECT_TIMEOUT": str(max(1, math.ceil(options.connect_timeout_s))),
        "MC_LOG_LEVEL": "ERROR",
    }
    if options.protocol == "tcp":
        settings["MC_FORCE_TCP"] = "1"  # else it takes any RDMA device that it finds
    if ":" in options.host:
        settings["MC_USE_IPV6"] = "1"
    for name, value in settings.items():
        environment.setdefault(name, value)


def load(options: NativeOptions) -> Any:
    """Mooncake's TransferEngine class.

    Raises:
        EngineStartError: Mooncake or a library that it needs is not installed.
    """
    set_environment(options, os.environ)
    try:
        return importlib.import_module("mooncake.engine").TransferEngine
    except ImportError as error:
        raise EngineStartError(_explain_import_error(error)) from error


def _explain_import_error(error: ImportError) -> str:
    if isinstance(error, ModuleNotFoundError):
        way_out = "install it with the extra for your platform: pip install 'pd-connector[cpu]', [cuda] or [npu]"
    elif "libibverbs" in str(error) or "librdmacm" in str(error):
        way_out = (
            "it is linked to the RDMA libraries, also where only TCP is used: apt-get install libibverbs1 librdmacm1"
        )
    else:
        way_out = "a library that it is linked to is missing; check that the wheel fits the platform (cpu, cuda, npu)"
    return f"cannot import the Mooncake transfer engine ({error}): {way_out}"


class NativeEngine:
    """One Mooncake engine, and the only reference to it: after ``delete`` it is gone, with its threads and sockets.

    Raises:
        EngineStartError: Mooncake is not installed or does not start.
    """

    def __init__(self, options: NativeOptions) -> None:
        self._options = options
        self._engine: Any = load(options)()
        code = self._engine.initialize(options.host, "P2PHANDSHAKE", options.protocol, options.devices)
        if code != 0:
            self._engine = None
            raise EngineStartError(
                f"Mooncake did not start (code {code}) with host {options.host!r}, protocol {options.protocol!r}, "
                f"devices {options.devices!r}: the host must be an address of this machine, the devices must exist, "
                "and ports from 15000 on must be free; MC_LOG_LEVEL=INFO shows more"
            )
        self._port = int(self._engine.get_rpc_port())

    @property
    def address(self) -> str:
        """Where peers reach this engine: host:port, the host in brackets if it is an IPv6 address."""
        host = self._options.host
        return f"[{host}]:{self._port}" if ":" in host else f"{host}:{self._port}"

    def register(self, regions: Sequence[Region]) -> None:
        """Let peers read ``regions``: all of them or none. Holds the GIL: for start-up only.

        Raises:
            EngineStartError: Mooncake refuses one.
        """
        for number, region in enumerate(regions):
            code = self._engine.register_memory(region.address, region.size)
            if code != 0:
                for done in regions[:number]:
                    self._engine.unregister_memory(done.address)
                raise EngineStartError(
                    f"Mooncake refuses to register the {describe_region(region)}: "
                    f"{_CODES.get(code, 'no reason given')} (code {code})"
                )

    def probe(self, address: str) -> bool:
        """Whether the peer answers. Blocks up to 60 s; ``interrupt`` ends it. Releases the GIL."""
        return bool(self._engine.send_probe(address) == 0)

    def submit(self, address: str, destinations: list[int], sources: list[int], sizes: list[int]) -> int:
        """Queue a batch of reads; its id, or 0 if it was not queued.

        The first call to a peer connects and blocks up to 60 s (``interrupt`` ends it). Releases the GIL.
        """
        batch = int(self._engine.batch_transfer_async_read(address, destinations, sources, sizes))
        return 0 if batch in (-1, 2**64 - 1) else batch

    def poll(self, batch: int) -> int:
        """State of a batch of ONE descriptor: 0 under way, 1 done, negative failed. The id is gone unless 0.

        Of a longer batch it sees the first descriptor only and then frees the whole: never ask.
        """
        return int(self._engine.transfer_check_status(batch))

    def wait(self, batch: int) -> int:
        """Wait for a batch of any length: 0 done, else failed. Spins on a core. The id is gone afterwards."""
        return int(self._engine.get_batch_transfer_status([batch]))

    def interrupt(self, address: str) -> None:
        """End calls that wait for the peer's first answer: they return as failed."""
        host, port = split_address(address)
        try:
            peers = {entry[4][0] for entry in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)}
        except (OSError, UnicodeError):
            return  # a host without an address has no connection either
        for connection in _own_sockets(remote_port=port):
            with connection:
                try:
                    if connection.getpeername()[0] in peers:
                        connection.shutdown(socket.SHUT_RDWR)
                except OSError:
                    continue  # it ended by itself

    def delete(self) -> None:
        """End the engine: afterwards it writes nothing more. No other call may be running. Idempotent."""
        if self._engine is not None:
            # Only a matter of speed, and without a free file descriptor it fails: the engine must go all the same.
            with suppress(OSError):
                self._shorten_accept()
            self._engine = None

    def _shorten_accept(self) -> None:
        for listener in _own_sockets(listening_port=self._port):
            with listener:
                timeout = struct.pack("ll", 0, int(_ACCEPT_TIMEOUT_S * 1e6))
                listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, timeout)
                # The accept that is under way keeps its old timeout; a connection ends it.
                loopback = "::1" if listener.family == socket.AF_INET6 else "127.0.0.1"
                try:
                    socket.create_connection((loopback, self._port), timeout=1.0).close()
                except OSError:
                    return  # bound to another interface: the destructor takes up to a second
                time.sleep(5 * _ACCEPT_TIMEOUT_S)


def split_address(address: str) -> tuple[str, int]:
    """Host and port of ``host:port`` or ``[host]:port``.

    Raises:
        ValueError: it is neither.
    """
    host, colon, port = address.rpartition(":")
    host = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    if not colon or not host or not port.isascii() or not port.isdigit() or not 0 < int(port) < 65536:
        raise ValueError(f"{address!r} is not a transfer engine address: host:port or [IPv6 host]:port")
    return host, int(port)


def _own_sockets(*, listening_port: int = 0, remote_port: int = 0) -> Iterator[socket.socket]:
    """Duplicates of this process's TCP sockets that listen on one port or are connected to one. Close them.

    Sockets that do not match are never touched: they belong to others.
    """
    inodes = set()
    for table in ("tcp", "tcp6"):
        path = Path("/proc/self/net", table)
        for line in path.read_text().splitlines()[1:] if path.exists() else ():
            columns = line.split()
            local, remote = (int(columns[index].rpartition(":")[2], 16) for index in (1, 2))
            listening = columns[3] == _LISTENING
            if (listening and local == listening_port) or (not listening and remote == remote_port):
                inodes.add(f"socket:[{columns[9]}]")
    if not inodes:
        return
    for entry in os.listdir("/proc/self/fd"):
        try:
            if os.readlink(f"/proc/self/fd/{entry}") in inodes:
                yield socket.socket(fileno=os.dup(int(entry)))
        except OSError:
            continue  # closed meanwhile
