"""Determines how much host memory this process may still take, given the machine and the containers it runs in.

Control groups are read as the kernel documents them (cgroup-v1/memory, cgroup-v2, proc(5)). Each group limits all
groups below it, so the tightest one from the process's own to the root counts. A container that sees only itself has
its own group mounted as the root.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import psutil

_RESERVED = 0.05  # fraction that is left to everything else on the machine


@dataclass(frozen=True)
class MachineMemory:
    """Bytes of memory that this process and others have together, and those of them that are available."""

    total: int
    available: int


@dataclass(frozen=True)
class _CgroupFiles:
    """The files in which a version of control groups reports memory."""

    limit: str
    used: str
    file_cache: str  # key in memory.stat

    def read(self, group: Path) -> MachineMemory | None:
        """Return a group's limit and what it leaves, counting the file cache as free; None if there is no limit."""
        try:
            limit = (group / self.limit).read_text().strip()
            used = int((group / self.used).read_text())
            statistics = dict(line.split(maxsplit=1) for line in (group / "memory.stat").read_text().splitlines())
            file_cache = int(statistics.get(self.file_cache, 0))
        except (OSError, ValueError):
            return None
        return MachineMemory(int(limit), max(int(limit) - used + file_cache, 0)) if limit.isdigit() else None


_V1 = _CgroupFiles("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
_V2 = _CgroupFiles("memory.max", "memory.current", "inactive_file")


def machine_memory(system: Path = Path("/")) -> MachineMemory:
    """Return what can be taken without swapping or being killed, leaving a little for others.

    ``system`` is the directory with ``proc`` and ``sys``.
    """
    machine = psutil.virtual_memory()
    known = [MachineMemory(machine.total, machine.available)]
    known += [limited for files, group in _groups(system) if (limited := files.read(group)) is not None]
    total, available = min(one.total for one in known), min(one.available for one in known)
    return MachineMemory(int(total * (1 - _RESERVED)), int(available * (1 - _RESERVED)))


def _groups(system: Path) -> Iterator[tuple[_CgroupFiles, Path]]:
    """Yield the control groups that limit this process's memory, from its own to the root."""
    mounts = system / "sys/fs/cgroup"
    try:
        memberships = [line.split(":", 2) for line in (system / "proc/self/cgroup").read_text().splitlines()]
    except (OSError, ValueError):
        memberships = [["0", "", "/"]]
    for _, controllers, path in (parts for parts in memberships if len(parts) == 3):
        if not controllers:
            files, root = _V2, mounts / "unified" if (mounts / "unified").is_dir() else mounts
        elif "memory" in controllers.split(","):
            files, root = _V1, mounts / "memory"
        else:
            continue
        own = PurePosixPath(path.lstrip("/"))
        for group in (own, *own.parents):
            yield files, root / group
