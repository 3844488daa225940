"""This process's TCP sockets: those to a peer, and those that others connect to."""

import os
import socket
import sys
from collections.abc import Iterable, Iterator
from contextlib import suppress
from ipaddress import IPv6Address, ip_address
from pathlib import Path

_TABLES = [Path("/proc/thread-self/net", name) for name in ("tcp", "tcp6")]
_SYN_SENT = "02"
_FILES = "/proc/self/fd"
MAPPED = "::ffff:"  # before an IPv4 address in the form that IPv6 sockets take
#: After a minute of silence, 4 probes in another minute. The peer's kernel answers, so its process may be stopped.
_PROBES = ((socket.TCP_KEEPIDLE, 60), (socket.TCP_KEEPINTVL, 15), (socket.TCP_KEEPCNT, 4))


def own_sockets(among: Iterable[str] | None = None) -> Iterator[socket.socket]:
    """Yield duplicates of this process's TCP sockets, each open until the next is asked for.

    ``among``: numbers of files; None for all.
    """
    for entry in os.listdir(_FILES) if among is None else among:
        with suppress(OSError):  # closed in the meantime, and its number is perhaps another file's
            if not os.readlink(f"{_FILES}/{entry}").startswith("socket:"):
                continue
            duplicate = os.dup(int(entry))
            try:
                # Said not to block, it stays as it is. Otherwise a default timeout would make it so, for all users.
                found = socket.socket(type=socket.SOCK_STREAM | socket.SOCK_NONBLOCK, fileno=duplicate)
            except OSError:
                os.close(duplicate)
                continue
            with found:
                if found.proto == socket.IPPROTO_TCP and found.family in (socket.AF_INET, socket.AF_INET6):
                    yield found


def listeners(among: Iterable[str] | None = None) -> Iterator[socket.socket]:
    """Yield those of ``own_sockets`` that others connect to."""
    return (each for each in own_sockets(among) if each.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))


def connections_to(port: int) -> Iterator[tuple[socket.socket, str]]:
    """Yield those that are connected to a peer's port, or wait for it to answer, with the peer's IP address.

    Reads the system's table of sockets, which may have thousands of lines: for when a call hangs.
    """
    asked = dict(_asked(port))
    for found in own_sockets():
        try:
            ip, connected_to = found.getpeername()[:2]
        except OSError:  # not connected
            ip, connected_to = asked.get(os.fstat(found.fileno()).st_ino, ""), port
        if ip and connected_to == port:
            yield found, ip.removeprefix(MAPPED)


def probe_peers(files: Iterable[str]) -> None:
    """Have the kernel end connections whose peer's machine has vanished, of all that come to listeners among ``files``.

    Mooncake would keep them for ever. Accepted sockets take these options over.
    """
    for found in listeners(files):
        found.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in _PROBES:
            found.setsockopt(socket.IPPROTO_TCP, option, value)


def _asked(port: int) -> Iterator[tuple[int, str]]:
    """Yield inodes and peers' addresses of all sockets here that are being connected to a port."""
    for table in _TABLES:
        for line in table.read_text().splitlines()[1:] if table.exists() else ():
            _, _, remote, state, _, _, _, _, _, inode = line.split()[:10]
            host, _, asked = remote.partition(":")
            if state == _SYN_SENT and int(asked, 16) == port:
                yield int(inode), _address(host)


def _address(words: str) -> str:
    """Return an address whose words of four bytes are written as this machine has them in memory."""
    in_memory = (int(words[at : at + 8], 16).to_bytes(4, sys.byteorder) for at in range(0, len(words), 8))
    found = ip_address(b"".join(in_memory))
    return str(found.ipv4_mapped if isinstance(found, IPv6Address) and found.ipv4_mapped else found)
