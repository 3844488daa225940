"""What a process says of its device memory, so that another process of the same host may map it.

Data only: makes no call of the driver.
"""

import base64
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Self

import msgspec

from layout.geometry import Identity, Region
from transfer.engine.interface import ReadFailed

_SCHEME = "cuda-ipc"
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_PID_NAMESPACE = Path("/proc/self/ns/pid")

#: What an address may hold; no engine has so many allocations.
_Position = Annotated[int, msgspec.Meta(ge=1, lt=2**62)]
_Handle = Annotated[bytes, msgspec.Meta(min_length=64, max_length=64)]
_Name = Annotated[str, msgspec.Meta(max_length=64)]
_MOST_ALLOCATIONS = 4096


@dataclass(frozen=True, slots=True)
class ProcessPlace:
    """Where a process runs."""

    boot_id: _Name  # of the kernel, the same in all containers of a host until it starts again
    pid: int  # as the process itself sees it
    pid_namespace: int  # inode

    @classmethod
    def here(cls) -> Self:
        """Return the place of this process."""
        return cls(_BOOT_ID.read_text().strip(), os.getpid(), _PID_NAMESPACE.stat().st_ino)


class Allocation(msgspec.Struct, frozen=True, array_like=True):
    """An allocation of device memory, and the driver's handle of it: whoever has that may read and write all of it."""

    address: _Position  # of its first byte, in the process that owns it
    size: _Position  # bytes
    handle: _Handle

    @property
    def region(self) -> Region:
        """The whole allocation."""
        return Region(self.address, self.size)


class ExportedMemory(msgspec.Struct, frozen=True, array_like=True):
    """A process's device memory, and how to know that process."""

    place: ProcessPlace
    device: _Name  # the GPU's UUID
    identity: Identity  # its number lies in one of the allocations
    allocations: Annotated[tuple[Allocation, ...], msgspec.Meta(max_length=_MOST_ALLOCATIONS)]

    @property
    def name(self) -> str:
        """The process, for people: without handles."""
        return f"{_SCHEME}:{self.place.pid}@{self.device}"

    def encode(self) -> str:
        """Return the address of the engine that owns the memory: a secret, but for the name in front of the slash."""
        return f"{self.name}/{base64.urlsafe_b64encode(msgspec.msgpack.encode(self)).decode()}"

    @classmethod
    def decode(cls, address: str) -> "ExportedMemory":
        """Read what ``encode`` has returned, in whatever process.

        Raises:
            ReadFailed: it is something else (always settled).
        """
        name, _, encoded = address.partition("/")
        try:
            return msgspec.msgpack.decode(base64.urlsafe_b64decode(encoded), type=cls)
        except (ValueError, RecursionError) as error:  # also those of msgspec and base64
            raise ReadFailed(f"cannot open a link to {name[:80]!r}: it is no address: {error}", settled=True) from error


def check_shares_host(here: ProcessPlace, exported: ExportedMemory) -> None:
    """Raise unless this process may be able to map the memory of the other.

    Raises:
        ReadFailed: the two run on different hosts, or are one process, or look like one (always settled).
    """
    there = exported.place
    reason = ""
    if there.boot_id != here.boot_id:
        reason = "it runs on another host"
    elif there.pid == here.pid and there.pid_namespace == here.pid_namespace:
        reason = "it is this process, which cannot map its own memory"
    elif there.pid == here.pid:
        reason = (
            f"both processes have pid {here.pid}, each in its own PID namespace, which the driver does not support: "
            "have them share one (docker run --pid host)"
        )
    if reason:
        raise ReadFailed(f"cannot open a link to {exported.name}: {reason}", settled=True)
