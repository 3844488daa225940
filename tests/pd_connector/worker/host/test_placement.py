"""Which NUMA node is near a device, by what a system says of it, and the line of log about where memory lies."""

import logging
import mmap
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from pd_connector.worker.host import placement
from pd_connector.worker.host.placement import NearNode, log_placement, near_node
from tests.support.memory import Memory
from tests.support.numa import needs_a_choice, online
from transfer import numa

GPU, CPU = torch.device("cuda", 1), torch.device("cpu")
PLACE = SimpleNamespace(pci_domain_id=1, pci_bus_id=0x3B, pci_device_id=2)


@pytest.fixture
def system(tmp_path: Path) -> Path:
    """Two nodes of four processors each, and one with memory only."""
    for node, processors in ((0, "0-1,4-5\n"), (1, "2,3,6-7\n"), (2, "\n")):
        directory = tmp_path / f"sys/devices/system/node/node{node}"
        directory.mkdir(parents=True)
        (directory / "cpulist").write_text(processors)
    (tmp_path / "sys/devices/system/node/online").write_text("0-2\n")
    return tmp_path


def with_gpu(system: Path, monkeypatch: pytest.MonkeyPatch, node: str, properties: Any = PLACE) -> Path:
    directory = system / "sys/bus/pci/devices/0001:3b:02.0"
    directory.mkdir(parents=True)
    (directory / "numa_node").write_text(node)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: {GPU: properties}[device])
    return system


def bound_to(monkeypatch: pytest.MonkeyPatch, *processors: int) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(processors))


# Of GPUs


def test_a_gpu_has_the_node_of_its_place_on_the_bus(system: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    near = near_node(GPU, with_gpu(system, monkeypatch, "1\n"))
    assert near == NearNode(1, "that is the node of cuda:1 (0001:3b:02.0)")


def test_a_node_that_the_system_does_not_know_is_not_guessed(system: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not by the processors either: they say nothing of the GPU."""
    bound_to(monkeypatch, 0)
    assert near_node(GPU, with_gpu(system, monkeypatch, "-1\n")).node is None


@pytest.mark.parametrize("written", ["", "none"])
def test_a_file_that_says_nothing_is_no_node(system: Path, monkeypatch: pytest.MonkeyPatch, written: str) -> None:
    near = near_node(GPU, with_gpu(system, monkeypatch, written))
    assert near == NearNode(None, "the system does not tell the node of cuda:1 (0001:3b:02.0)")


def test_a_gpu_that_the_system_does_not_show_has_no_node(system: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    elsewhere = SimpleNamespace(pci_domain_id=0, pci_bus_id=0, pci_device_id=0)
    assert near_node(GPU, with_gpu(system, monkeypatch, "1", elsewhere)).node is None


def test_a_pytorch_that_tells_no_place_has_no_node(system: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    near = near_node(GPU, with_gpu(system, monkeypatch, "1", SimpleNamespace(name="H200")))
    assert near == NearNode(None, "this PyTorch does not tell where cuda:1 is on the PCI bus")


# Of NPUs


class Npu:
    """An NPU as torch_npu names it, which is not there."""

    type, index = "npu", 1

    def __str__(self) -> str:
        return "npu:1"


NPU: Any = Npu()


def cann_tells(monkeypatch: pytest.MonkeyPatch, place: str) -> None:
    monkeypatch.setattr(placement, "npu_pci_address", lambda number: {NPU.index: place}[number])


def test_an_npu_has_the_node_of_its_place_wherever_its_worker_may_run(
    system: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bound_to(monkeypatch, *range(8))
    cann_tells(monkeypatch, "0001:3b:02.0")
    near = near_node(NPU, with_gpu(system, monkeypatch, "1\n"))
    assert near == NearNode(1, "that is the node of npu:1 (0001:3b:02.0)")


def test_an_npu_whose_place_has_no_node_has_that_of_its_workers_processors(
    system: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bound_to(monkeypatch, 3, 7)
    cann_tells(monkeypatch, "0001:3b:02.0")
    assert near_node(NPU, with_gpu(system, monkeypatch, "-1\n")).node == 1


# Of processors


@pytest.mark.parametrize("device", [CPU, NPU], ids=["cpu", "npu"])
@pytest.mark.parametrize(("processors", "node"), [((4,), 0), ((0, 1, 4, 5), 0), ((3, 7), 1), ((6,), 1)])
def test_a_worker_that_is_bound_to_a_node_has_it(
    system: Path, monkeypatch: pytest.MonkeyPatch, device: torch.device, processors: tuple[int, ...], node: int
) -> None:
    bound_to(monkeypatch, *processors)
    cann_tells(monkeypatch, "")
    near = near_node(device, system)
    assert near == NearNode(node, "that is the node of the processors that this worker is bound to")


@pytest.mark.parametrize("processors", [(0, 2), tuple(range(8))])
def test_a_worker_that_is_bound_to_none_has_none(
    system: Path, monkeypatch: pytest.MonkeyPatch, processors: tuple[int, ...]
) -> None:
    bound_to(monkeypatch, *processors)
    assert near_node(CPU, system) == NearNode(None, "this worker is bound to no node: it may run on 2 of them")


def test_a_machine_with_one_node_needs_no_choice(tmp_path: Path) -> None:
    for nodes in (0, 1):
        if nodes:
            (tmp_path / "sys/devices/system/node/node0").mkdir(parents=True)
            (tmp_path / "sys/devices/system/node/node0/cpulist").write_text("0-7\n")
        assert near_node(CPU, tmp_path) == NearNode(None, "the machine has one node, or does not tell of others")


def test_this_machine_is_read() -> None:
    nodes = len(list(Path("/sys/devices/system/node").glob("node[0-9]*")))
    assert (near_node(CPU).node is None) or nodes > 1


# The line


def line_of(caplog: pytest.LogCaptureFixture) -> str:
    [line] = [record.getMessage() for record in caplog.records if record.levelno == logging.INFO]
    return line


@pytest.fixture(autouse=True)
def _all_lines(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)


@needs_a_choice
def test_the_line_says_where_pages_lie_and_why(caplog: pytest.LogCaptureFixture) -> None:
    memory = Memory(100 * mmap.PAGESIZE)
    memory.view[:] = 1
    log_placement(memory.region, NearNode(online(), "because"))
    assert line_of(caplog) == (
        f"PDConnector: this worker's host memory of {100 * mmap.PAGESIZE} bytes: NUMA node {online()} is preferred, of "
        f"100 pages that were looked at lie 100 on node {online()}; because"
    )


@needs_a_choice
def test_the_line_promises_nothing_of_pages_that_are_not_there(caplog: pytest.LogCaptureFixture) -> None:
    memory = Memory(4096)
    log_placement(memory.region, NearNode(None, "because"))
    assert line_of(caplog).endswith(": no NUMA node is preferred, no page is allocated yet; because")


def test_a_system_that_does_not_tell_where_pages_lie_costs_a_word(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_: object) -> None:
        raise PermissionError(1, "move_pages: Operation not permitted")

    monkeypatch.setattr(numa, "nodes_of", refuse)
    memory = Memory(4096)
    log_placement(memory.region, NearNode(1, "because"))
    assert "where the pages lie is not known (move_pages: Operation not permitted); because" in line_of(caplog)
