"""Mooncake Store, through the client process of this machine (``mooncake_client``).

The client holds the machine's share of the pool, moves bytes between machines, and outlives engines. An engine talks to
it over a socket, and shares its buffer with it: no transfer engine, data port or registration of memory is in this
process, whatever the device is. Measured with Mooncake 0.3.13: a connection takes milliseconds, 64 objects of 1 MiB
that the client holds come in 10.

What its calls return, as measured:

- 0 of a put also means that somebody has begun to put this key, and so does not mean that it is there.
- A client that was restarted answers again by itself, within seconds. One that was stopped for longer than the master
  waits knows a connection no more, and answers -600 until a buffer is registered.
- A client that is stopped answers nothing. Calls return when it goes on, or after about 30 s.
- To close holds the GIL for a second or two, or as long as the client is stopped. So does the end of the process, for
  each connection that is open: no more of them are opened than is needed. Buffers stay mapped all the same.
- To connect holds the GIL: for 4.6 s if nothing listens, for 30 s if the client is stopped. So it is asked before.
- -200 no room, -704 no such object, -706 somebody fetches it, -800 it could not be moved, -900 no master, or -1 of a
  look-up.
"""

import ctypes
import importlib
import mmap
import os
import socket
from collections.abc import Sequence
from typing import Any

from layout.geometry import Region
from transfer.peers import Address
from transfer.store.interface import ObjectStore, Piece, StoreFailed

_INVALID, _NO_ROOM, _NOT_FOUND, _BEING_PUT = -600, -200, -704, -703
#: The client answers, and its master does not; or, for -900, the client itself has not answered in time.
_OF_THE_MASTER = frozenset({-1, -900, -901})
_OF_AN_OBJECT = frozenset({_NO_ROOM, _NOT_FOUND, _BEING_PUT, -701, -705, -706, -707})
_RPC_TIMEOUT_MS = "1000"
_ANSWER_TIMEOUT_S = 1.0
#: What is no request of the client's protocol: it closes the connection on which this comes.
_NONSENSE = bytes(64)


def load() -> Any:
    """Import Mooncake's store, which holds the GIL for some 0.2 s, and return the class of its connections.

    Raises:
        StoreFailed: it is not installed.
    """
    os.environ.setdefault("MC_RPC_TIMEOUT_MS", _RPC_TIMEOUT_MS)
    os.environ.setdefault("MC_LOG_LEVEL", "ERROR")
    try:
        return importlib.import_module("mooncake.store").MooncakeDistributedStore
    except ImportError as error:
        raise StoreFailed(f"Mooncake's store cannot be loaded: {error}") from error


class MooncakeStore(ObjectStore):
    """A connection to the client process of this machine."""

    def __init__(self, client: Address, buffer_bytes: int) -> None:
        """Connect, and share ``buffer_bytes`` with the client; 0 for look-ups only.

        Raises:
            StoreFailed: Mooncake is not installed, or the client does not answer.
        """
        native = load()
        self._client = client
        self._native: Any = native()
        self._buffer = Region(0, 0)
        _check_answers(client)
        try:
            code = self._native.setup_dummy(max(buffer_bytes, 1), 0, str(client))
        except RuntimeError as error:  # the system has no thread left
            raise StoreFailed(f"the connection to mooncake_client at {client} could not be set up: {error}") from error
        if code:
            raise StoreFailed(
                f"what listens at {client} is no mooncake_client of this machine ({code}); start one with "
                f"--host={client.host} --port={client.port}, in the network namespace of this process"
            )
        if buffer_bytes:
            self._share(buffer_bytes)

    @property
    def buffer(self) -> Region:  # noqa: D102
        return self._buffer

    def exist(self, keys: Sequence[str]) -> list[bool]:  # noqa: D102
        return [code == 1 for code in self._checked("look-up", self._native.batch_is_exist(list(keys)))]

    def put(self, pieces: Sequence[Piece]) -> list[bool]:  # noqa: D102
        return [code == 0 for code in self._checked("put", self._native.batch_put_from(*self._arguments(pieces)))]

    def get(self, pieces: Sequence[Piece]) -> list[bool]:  # noqa: D102
        codes = list(self._native.batch_get_into(*self._arguments(pieces)))
        for number, piece in enumerate(pieces):
            if codes[number] == _INVALID and self._native.get_size(piece.key) > piece.size:
                self._native.remove(piece.key, True)  # a stranger's: ours have one size under a key
                codes[number] = _NOT_FOUND
        self._checked("get", codes, may_come_late=True)
        return [code == piece.size for code, piece in zip(codes, pieces, strict=True)]

    def remove(self, keys: Sequence[str]) -> None:  # noqa: D102
        self._checked("remove", [self._native.remove(key, True) for key in keys])

    def close(self) -> bool:  # noqa: D102
        _free(self._buffer)
        try:
            _check_answers(self._client)
        except StoreFailed:
            return False  # it would hold the GIL for 2 s, or as long as the client is stopped
        self._native.close()
        return True

    def renew_buffer(self) -> None:  # noqa: D102
        _check_answers(self._client)
        _free(self._buffer)
        if self._buffer.size:
            self._share(self._buffer.size)

    def _share(self, size: int) -> None:
        address = self._native.alloc_from_mem_pool(size)
        if not address:
            raise StoreFailed(f"mooncake_client at {self._client} shares no {size} bytes of memory with this process")
        if code := self._native.register_buffer(address, size):
            _free(Region(address, size))
            raise StoreFailed(f"mooncake_client at {self._client} refuses a buffer of {size} bytes ({code})")
        self._buffer = Region(address, size)

    def _arguments(self, pieces: Sequence[Piece]) -> tuple[list[str], list[int], list[int]]:
        return (
            [piece.key for piece in pieces],
            [self._buffer.address + piece.offset for piece in pieces],
            [piece.size for piece in pieces],
        )

    def _checked(self, what: str, codes: Sequence[int], *, may_come_late: bool = False) -> Sequence[int]:
        """Return the codes, unless one says that the store does not work.

        ``may_come_late``: what has failed may still write to the buffer.
        """
        broken = next((code for code in codes if code < 0 and code not in _OF_AN_OBJECT), 0)
        if broken:
            raise StoreFailed(
                f"mooncake_client at {self._client}: a {what} ended with {broken}",
                keeps_buffer=broken in _OF_THE_MASTER and not may_come_late,
            )
        return codes


def _free(shared: Region) -> None:
    """Free the pages of shared memory. What still comes late is written to new ones, which nobody reads."""
    page = mmap.PAGESIZE
    begin, end = -(-shared.address // page) * page, shared.end // page * page
    if end > begin:  # if it is refused, they are freed when this process ends
        ctypes.CDLL(None).madvise(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), mmap.MADV_REMOVE)


def _check_answers(client: Address) -> None:
    """Raise StoreFailed unless a client process answers, without holding the GIL."""
    try:
        with socket.create_connection((client.host, client.port), _ANSWER_TIMEOUT_S) as connection:
            connection.sendall(_NONSENSE)
            said = connection.recv(1)
    except TimeoutError as error:
        raise StoreFailed(
            f"mooncake_client at {client} does not answer within {_ANSWER_TIMEOUT_S:g} s: it is stopped, or hangs; "
            "restart it"
        ) from error
    except ConnectionResetError:
        said = b""  # an answer, too
    except OSError as error:
        raise StoreFailed(
            f"no mooncake_client listens at {client} ({error.strerror or error}); start one with "
            f"--host={client.host} --port={client.port}"
        ) from error
    if said:
        raise StoreFailed(f"what listens at {client} is no mooncake_client: pool names the client's --host and --port")
