"""How much host memory this process may still take: of the machine, and of the containers that it runs in.

Control groups are read as the kernel describes them (cgroup-v1/memory and cgroup-v2, proc(5)): each limits all that
is below it, so the tightest from the process's own up to the root counts. Where a container sees nothing but itself,
its own group is mounted as the root.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import psutil

_RESERVED = 0.05  # of what is free, for what everybody else on the machine will need


@dataclass(frozen=True)
class MachineMemory:
    """Bytes that this process and others could take together, and what they have left."""

    total: int
    available: int


@dataclass(frozen=True)
class _Files:
    """Where a version of control groups keeps its numbers."""

    limit: str
    used: str
    file_cache: str  # its key in memory.stat

    def of(self, group: Path) -> "MachineMemory | None":
        """What a group's limit is and leaves, counting the file cache as free; None where there is no limit."""
        try:
            limit = (group / self.limit).read_text().strip()
            used = int((group / self.used).read_text())
            statistics = dict(line.split(maxsplit=1) for line in (group / "memory.stat").read_text().splitlines())
            file_cache = int(statistics.get(self.file_cache, 0))
        except (OSError, ValueError):
            return None
        return MachineMemory(int(limit), max(int(limit) - used + file_cache, 0)) if limit.isdigit() else None


_V1 = _Files("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
_V2 = _Files("memory.max", "memory.current", "inactive_file")


def machine_memory(system: Path = Path("/")) -> MachineMemory:
    """What can be taken without swapping, or being killed for it; a little is left for others.

    ``system``: where ``proc`` and ``sys`` are mounted.
    """
    machine = psutil.virtual_memory()
    known = [MachineMemory(machine.total, machine.available)]
    known += [limited for files, group in _groups(system) if (limited := files.of(group)) is not None]
    total, available = min(one.total for one in known), min(one.available for one in known)
    return MachineMemory(int(total * (1 - _RESERVED)), int(available * (1 - _RESERVED)))


def _groups(system: Path) -> Iterator[tuple[_Files, Path]]:
    """The control groups that limit this process's memory, from its own to the root."""
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
