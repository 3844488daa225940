"""How much host memory this process may still take: of the machine, and of the container that it runs in."""

from pathlib import Path

import psutil

_CGROUP = Path("/sys/fs/cgroup")


def available_bytes(cgroup: Path = _CGROUP) -> int:
    """Bytes that can be taken without swapping, or being killed for it."""
    machine = int(psutil.virtual_memory().available)
    container = _of_cgroup(cgroup)
    return machine if container is None else min(machine, container)


def _of_cgroup(directory: Path) -> int | None:
    """What a limit of cgroup v2 leaves, counting the file cache as free; None where there is no limit."""
    try:
        limit = (directory / "memory.max").read_text().strip()
        used = int((directory / "memory.current").read_text())
        statistics = dict(line.split(maxsplit=1) for line in (directory / "memory.stat").read_text().splitlines())
        file_cache = int(statistics.get("inactive_file", 0))
    except (OSError, ValueError):
        return None
    if not limit.isdigit():
        return None
    return max(int(limit) - used + file_cache, 0)
