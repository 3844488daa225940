"""Transparent huge pages of the kernel: whether it gives any, and how many it has given.

They need no reservation, and nothing fails where there are too few: the kernel takes small pages instead. Explicit huge
pages (hugetlbfs) would have to be reserved by the machine's owner, and counted apart in each container.
"""

from pathlib import Path

from layout.geometry import Region

_SETTINGS = Path("sys/kernel/mm/transparent_hugepage")
_USUAL_BYTES = 2 << 20


def mode(system: Path = Path("/")) -> str:
    """Return which memory the kernel gives huge pages to: "always", "madvise" (on request) or "never".

    Empty if the kernel has none at all. ``system`` is the directory with ``sys``.
    """
    try:
        words = (system / _SETTINGS / "enabled").read_text().split()
    except OSError:
        return ""
    return next((word.strip("[]") for word in words if word.startswith("[")), "")


def page_bytes(system: Path = Path("/")) -> int:
    """Return the size of a huge page in bytes: 2 MiB, except where small pages are larger than 4 KiB."""
    try:
        return int((system / _SETTINGS / "hpage_pmd_size").read_text())
    except (OSError, ValueError):
        return _USUAL_BYTES


def given(region: Region, system: Path = Path("/")) -> int:
    """Return how many bytes of ``region`` lie in huge pages now, as proc_pid_smaps(5) counts them.

    The kernel counts by mapping. Of one that goes beyond ``region``, at most the part that lies in it is counted.

    Raises:
        OSError, ValueError: the system does not say.
    """
    counted, inside = 0, 0
    with (system / "proc/self/smaps").open() as lines:
        for line in lines:
            key, _, rest = line.partition(" ")
            if not key.endswith(":"):
                start, end = (int(word, 16) for word in key.split("-"))
                inside = max(min(end, region.end) - max(start, region.address), 0)
            elif key == "AnonHugePages:":
                counted += min(int(rest.split()[0]) << 10, inside)
    return counted
