"""RDMA devices, as far as this process sees them: in a container, those that were passed into it."""

from pathlib import Path

INFINIBAND_DEVICES = Path("/sys/class/infiniband")


def has_rdma_device() -> bool:
    """Return whether there is one."""
    return INFINIBAND_DEVICES.is_dir() and any(INFINIBAND_DEVICES.iterdir())
