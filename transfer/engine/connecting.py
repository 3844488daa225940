"""This process's sockets: those that are still being connected, and those that others connect to."""

import os
import socket
import stat
import sys
from collections.abc import Iterable, Iterator
from contextlib import suppress
from ipaddress import IPv6Address, ip_address
from pathlib import Path

_TABLES = [Path("/proc/thread-self/net", name) for name in ("tcp", "tcp6")]
_SYN_SENT = "02"
_FILES = "/proc/self/fd"
#: After a minute of silence, 4 probes in another minute. The peer's kernel answers, so its process may be stopped.
_PROBES = ((socket.TCP_KEEPIDLE, 60), (socket.TCP_KEEPINTVL, 15), (socket.TCP_KEEPCNT, 4))


def connecting_to(port: int) -> Iterator[tuple[socket.socket, str]]:
    """Yield duplicates of sockets that wait for a peer's port to answer, with its IP address.

    The caller closes each before the next. The table may have thousands of lines: for when a call hangs.
    """
    asked = dict(_asked(port))
    for entry in os.listdir(_FILES) if asked else ():
        with suppress(OSError):  # closed in the meantime
            file = os.stat(f"{_FILES}/{entry}")
            number = file.st_ino
            if number not in asked or not stat.S_ISSOCK(file.st_mode):  # file systems have numbers of their own
                continue
            duplicate = os.dup(int(entry))
            if os.fstat(duplicate).st_ino != number:  # the file's number is another one's by now
                os.close(duplicate)
                continue
            # Said not to block, it stays as it is.
            yield socket.socket(type=socket.SOCK_STREAM | socket.SOCK_NONBLOCK, fileno=duplicate), asked[number]


def probe_peers(files: Iterable[str]) -> None:
    """Have the kernel end connections whose peer's machine has vanished, of all that come to listeners among ``files``.

    Mooncake would keep them for ever. Accepted sockets take these options over.
    """
    for entry in files:
        with suppress(OSError):  # closed in the meantime
            if not os.readlink(f"{_FILES}/{entry}").startswith("socket:"):
                continue
            kind = socket.SOCK_STREAM | socket.SOCK_NONBLOCK  # said not to block, it stays as it is
            with socket.socket(type=kind, fileno=os.dup(int(entry))) as found:
                if found.family != socket.AF_UNIX and found.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
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
