"""RDMA devices, as far as this process can use them."""

import os
from pathlib import Path

INFINIBAND_DEVICES = Path("/sys/class/infiniband")
#: By which user space reaches them. A container sees the machine's devices above, but only those here that were passed
#: into it.
VERBS_DEVICES = Path("/dev/infiniband")


def has_rdma_device() -> bool:
    """Return whether there is one that this process can open, with a port that is active."""
    can_open = any(os.access(each, os.R_OK | os.W_OK) for each in VERBS_DEVICES.glob("uverbs*"))
    return can_open and any("ACTIVE" in _read(state) for state in INFINIBAND_DEVICES.glob("*/ports/*/state"))


def unknown_devices(names: str) -> list[str]:
    """Return those of comma-separated names that no device of this machine has."""
    return [name for name in names.split(",") if name and not (INFINIBAND_DEVICES / name).exists()]


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
