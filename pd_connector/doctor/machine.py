"""What this machine gives the connector: an address, a port, devices, and memory to lock."""

import importlib
import os
import re
import resource
import socket
import time
from pathlib import Path

from pd_connector.config import ConnectorConfig
from pd_connector.doctor.findings import Check, CheckFailed, CheckWarned
from pd_connector.worker.host.machine_memory import machine_memory
from transfer.copies.batch.backends import Backend, pinned_memory
from transfer.engine.rdma import INFINIBAND_DEVICES
from transfer.peers import Address, is_own_address, loopback_of, resolve

_MIB = 1 << 20
_PINNED_BYTES = 64 * _MIB  # for a check
_STATUS = Path("/proc/self/status")
_CAP_IPC_LOCK = 14
#: By which NICs reach a GPU's memory; Mooncake's switch to the other way.
_PEERMEM, _DMA_BUF = Path("/sys/module/nvidia_peermem"), "WITH_NVIDIA_PEERMEM"


class Machine:
    """Checks of this machine, for engines that are configured like ``config``."""

    def __init__(self, config: ConnectorConfig, *, by_auto: bool = False) -> None:
        """``config`` has the host and the protocol that engines would take; ``by_auto``: by the protocol auto."""
        self._config = config
        self._host = str(config.host)
        self._by_auto = by_auto

    @property
    def checks(self) -> list[tuple[str, Check]]:
        """All of them, none of which needs another."""
        return [("address", self.address), ("port", self.port), ("devices", self.devices), ("memory", self.memory)]

    def address(self) -> str:
        """Check that peers can be told this machine's address."""
        if not is_own_address(self._host):
            raise CheckFailed(
                f"{self._host} is not an address of this machine, so nobody can read a prefill engine's memory there: "
                "set host, or VLLM_HOST_IP, to that of a network interface"
            )
        loopback = loopback_of(self._host)
        if loopback or self._host in ("localhost", "::1") or self._host.startswith("127."):
            name = f"{self._host} ({loopback} in /etc/hosts)" if loopback else self._host
            raise CheckWarned(f"{name} is of this machine only: set host, or VLLM_HOST_IP, for peers on others")
        return f"{self._host} is an address of this machine"

    def port(self) -> str:
        """Check that a prefill engine can have the control port that is set."""
        if not self._config.port:
            return "the system chooses that of a prefill engine's control channel (setting port)"
        address = Address(self._host, self._config.port)
        try:
            ip = resolve(self._host)
            family = socket.AF_INET6 if ":" in ip else socket.AF_INET
            socket.create_server((ip, self._config.port), family=family).close()
        except OSError as error:
            raise CheckWarned(
                f"{address} cannot be listened at ({error.strerror}): unless a prefill engine of this configuration "
                "runs here already, set port to another"
            ) from error
        return f"{address} is free"

    def devices(self) -> str:
        """Name the RDMA devices and the accelerators of this machine."""
        nics, devices = rdma_devices(), accelerators()
        text = f"RDMA: {', '.join(nics) or 'none'}; accelerators: {', '.join(devices) or 'none'}"
        if self._by_auto and self._config.protocol == "tcp" and devices:
            raise CheckWarned(f"{text}; protocol auto takes tcp here, which is slower, and peers must use tcp, too")
        doubts = []
        if self._config.protocol == "rdma" and any("ACTIVE" not in nic for nic in nics):
            doubts.append("ports that are not active move nothing")
        if self._config.protocol == "rdma" and devices and not (_PEERMEM.exists() or os.environ.get(_DMA_BUF) == "0"):
            doubts.append(
                "the kernel module nvidia-peermem is not loaded: without it, no GPU memory can be registered, "
                f"unless {_DMA_BUF}=0 is set"
            )
        if doubts:
            raise CheckWarned("; ".join([text, *doubts]))
        return text

    def memory(self) -> str:
        """Check that memory can be locked and pinned as the protocol and the device need it."""
        soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
        limit = "unlimited" if soft == resource.RLIM_INFINITY else f"{soft // 1024} KiB"
        free, wanted = machine_memory().available, self._config.cpu_bytes_to_use
        if wanted > free:
            raise CheckFailed(f"cpu_bytes_to_use is {wanted} bytes, and {free} are available on this machine")
        text = f"{free // _MIB} MiB available, lock limit {limit}"
        if self._config.protocol == "rdma" and soft != resource.RLIM_INFINITY and not _may_lock_all(_STATUS):
            raise CheckFailed(
                f"{text}: RDMA locks all memory that it registers. Raise it with `ulimit -l unlimited`, LimitMEMLOCK= "
                "of the service, --ulimit memlock=-1 of the container, or the capability IPC_LOCK"
            )
        return f"{text}; {_pin()}"


def _may_lock_all(status: Path) -> bool:
    """Return whether this process has CAP_IPC_LOCK (capabilities(7)): the limit does not bind it."""
    effective = re.search(r"^CapEff:\s*([0-9a-f]+)$", _word(status), re.MULTILINE)
    return effective is not None and bool(int(effective[1], 16) >> _CAP_IPC_LOCK & 1)


def rdma_devices(root: Path = INFINIBAND_DEVICES) -> list[str]:
    """Return the ports of all RDMA devices, with their state, rate and link layer."""
    found = []
    for port in sorted(root.glob("*/ports/*")) if root.is_dir() else ():
        state, rate, layer = (_word(port / name) for name in ("state", "rate", "link_layer"))
        found.append(f"{port.parents[1].name}/{port.name} {state.partition(': ')[2] or state} {rate} {layer}")
    return found


def _word(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return "unknown"


def accelerators() -> list[str]:
    """Return the names of the devices that torch sees."""
    for module, name in (("torch_npu", "npu"), ("torch", "cuda")):
        try:
            importlib.import_module(module)
            device = getattr(importlib.import_module("torch"), name)
            if device.is_available():
                return [str(device.get_device_name(index)) for index in range(device.device_count())]
        except (ImportError, AttributeError, RuntimeError, OSError):
            continue
    return []


def _pin() -> str:
    """Pin memory for the device of this machine, and return what came of it."""
    if not accelerators():
        return "there is no device to pin it for"
    torch = importlib.import_module("torch")
    name, backend = ("npu", Backend.ACL) if hasattr(torch, "npu") else ("cuda", Backend.CUDA)
    torch.empty(1, device=name)  # the device must be current in this thread
    begun = time.perf_counter()
    pinned_memory(backend, _PINNED_BYTES).close()
    return f"{_PINNED_BYTES // _MIB} MiB pinned for {name} in {1e3 * (time.perf_counter() - begun):.1f} ms"
