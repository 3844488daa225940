"""Where a worker's host memory is to lie, and what the kernel has made of that: one line of log says both.

Memory lies best on the NUMA node of the device that copies from and to it, or else of the processors that do.
"""

import logging
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from layout.geometry import Region
from transfer import numa
from transfer.copies.batch.backends import npu_pci_address

logger = logging.getLogger(__name__)

_NODES = Path("sys/devices/system/node")
_PCI_DEVICES = Path("sys/bus/pci/devices")


@dataclass(frozen=True)
class NearNode:
    """The NUMA node of a device, and how that is known; None if it is not, and why."""

    node: int | None
    why: str


def near_node(device: torch.device, system: Path = Path("/")) -> NearNode:
    """Return the node of ``device``, as this process sees it. ``system`` is the directory with ``sys``.

    A GPU has the node of its place on the PCI bus, and so has an NPU where CANN tells that. Other workers have the node
    of the processors that they are bound to. vllm-ascend binds its own (``cpu_binding.py``) only after their caches are
    registered.
    """
    if device.type == "cuda":
        return _of_gpu(torch.cuda.get_device_properties(device), device, system)
    if device.type == "npu" and (address := npu_pci_address(device.index or 0)):
        near = _of_place(address, device, system)
        if near.node is not None:
            return near
    return _of_processors(os.sched_getaffinity(0), system)


def log_placement(region: Region, near: NearNode) -> None:
    """Log where the memory lies and why."""
    said = _nodes_said(region, near.node)
    logger.info("PDConnector: this worker's host memory of %d bytes: %s; %s", region.size, said, near.why)


def _of_gpu(properties: Any, device: torch.device, system: Path) -> NearNode:
    try:
        address = f"{properties.pci_domain_id:04x}:{properties.pci_bus_id:02x}:{properties.pci_device_id:02x}.0"
    except AttributeError:
        return NearNode(None, f"this PyTorch does not tell where {device} is on the PCI bus")
    return _of_place(address, device, system)


def _of_place(address: str, device: torch.device, system: Path) -> NearNode:
    try:
        node = int((system / _PCI_DEVICES / address / "numa_node").read_text())
    except (OSError, ValueError):
        return NearNode(None, f"the system does not tell the node of {device} ({address})")
    if node < 0:  # of machines with one node, and of many virtual ones
        return NearNode(None, f"the system knows no node of {device} ({address})")
    return NearNode(node, f"that is the node of {device} ({address})")


def _of_processors(bound_to: set[int], system: Path) -> NearNode:
    try:
        nodes = {
            int(path.name.removeprefix("node")): _numbers((path / "cpulist").read_text())
            for path in (system / _NODES).glob("node[0-9]*")
        }
    except (OSError, ValueError):
        nodes = {}
    if len(nodes) < 2:
        return NearNode(None, "the machine has one node, or does not tell of others")
    # Some nodes have memory only.
    used = [node for node, processors in nodes.items() if processors & bound_to]
    if len(used) == 1:
        return NearNode(used[0], "that is the node of the processors that this worker is bound to")
    return NearNode(None, f"this worker is bound to no node: it may run on {len(used)} of them")


def _numbers(text: str) -> set[int]:
    """Return the numbers of a list as the kernel writes it: "0-3,8"."""
    numbers: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        numbers.update(range(int(first), int(last or first) + 1))
    return numbers


def _nodes_said(region: Region, node: int | None) -> str:
    wanted = "no NUMA node is preferred" if node is None else f"NUMA node {node} is preferred"
    try:
        nodes = numa.nodes_of(region)
    except OSError as error:
        return f"{wanted}, where the pages lie is not known ({error.strerror})"
    if not nodes:
        return f"{wanted}, no page is allocated yet"
    lie = ", ".join(f"{pages} on node {node}" for node, pages in nodes.most_common())
    return f"{wanted}, of {nodes.total()} pages that were looked at lie {lie}"
