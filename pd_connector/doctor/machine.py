"""What this machine gives the transfer engine: protocols that start, devices, memory to lock, an even clock."""

import importlib
import resource
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from layout.geometry import Region
from pd_connector.config import ConnectorConfig
from pd_connector.doctor.findings import Check, CheckFailed, CheckSkipped, Outcome, Verdict
from pd_connector.worker.machine_memory import machine_memory
from transfer.batch_copy.backends import Backend, pinned_memory
from transfer.engine.base import EngineStartError
from transfer.engine.identity import IdentityMemory
from transfer.engine.mooncake import (
    IDENTITY_BYTES,
    PROTOCOLS,
    MooncakeEngine,
    MooncakeOptions,
)
from transfer.engine.rdma import INFINIBAND_DEVICES
from transfer.memory import HostMemory
from transfer.peers import is_own_address

_MIB = 1 << 20
_MEMORY_BYTES = 64 * _MIB  # that is registered and pinned for a check
_START_TIMEOUT_S = 120.0
_NAPS, _NAP_S = 20, 0.01
#: A machine that wakes threads later than this stalls transfers; leases are renewed every third of their time to live.
_LATE_S = 1.0
_CLOCK_DRIFT = 0.01
_SUSPENDED_S = 1.0


@dataclass(frozen=True, slots=True)
class Started:
    """How the start of a transfer engine went, in a process of its own."""

    error: str = ""  # empty if it started
    address: str = ""
    registered_s: float = 0.0  # for ``_MEMORY_BYTES``


def start_engine(protocol: str, host: str, devices: str) -> Started:
    """Start a Mooncake engine in this process, register memory with it, and close it."""
    with ExitStack() as undo:
        try:
            options = MooncakeOptions(host, protocol, devices)
            region, identities = _memory_on_npu(undo) if protocol == "ascend" else _host_memory(undo)
            engine = MooncakeEngine(options, identities)
            undo.callback(engine.close)
            begun = time.perf_counter()
            engine.register([region])
            return Started("", engine.address, time.perf_counter() - begun)
        except (EngineStartError, ImportError, RuntimeError, MemoryError, AttributeError) as error:
            return Started(str(error))


def _host_memory(undo: ExitStack) -> tuple[Region, None]:
    """Return memory to register; the engine itself takes host memory for identities."""
    memory = HostMemory(_MEMORY_BYTES)
    memory.allocate()
    undo.callback(lambda: memory)
    return memory.region, None


def _memory_on_npu(undo: ExitStack) -> tuple[Region, IdentityMemory]:
    """Return memory of the first NPU to register, and for identities: the transport reads no other."""
    torch = importlib.import_module("torch")
    importlib.import_module("torch_npu")
    from pd_connector.worker.device_memory import DeviceIdentityMemory, device_memory  # noqa: PLC0415  needs torch

    torch.npu.set_device(0)
    memory = device_memory(_MEMORY_BYTES, torch.device("npu", 0), "free some of it")
    undo.callback(lambda: memory)
    return Region(memory.data_ptr(), memory.numel()), DeviceIdentityMemory.on_npu(IDENTITY_BYTES)


def start_engine_apart(protocol: str, host: str, devices: str) -> Started:
    """Do the same in a new process: Mooncake reads its environment once, and may take a process with it."""
    with ProcessPoolExecutor(1, get_context("spawn")) as processes:
        trial = processes.submit(start_engine, protocol, host, devices)
        try:
            return trial.result(_START_TIMEOUT_S)
        except TimeoutError:
            for process in list((processes._processes or {}).values()):
                process.kill()
            return Started(f"it has not started within {_START_TIMEOUT_S:.0f} s")
        except BrokenProcessPool:
            return Started("its process has ended without a word: the library crashed")


class Machine:
    """Checks of this machine, for engines that are configured like ``config``."""

    def __init__(
        self,
        config: ConnectorConfig,
        host: str,
        protocol: str,
        start: Callable[[str, str, str], Started] = start_engine_apart,
    ) -> None:
        """Args are the settings, the address and the protocol that engines would take, and what tries an engine."""
        self._config = config
        self._host = host
        self._protocol = protocol
        self._start = start

    @property
    def checks(self) -> list[tuple[str, Check]]:
        """All of them, none of which needs another."""
        protocols: list[tuple[str, Check]] = [(f"protocol {name}", partial(self.protocol, name)) for name in PROTOCOLS]
        return [
            ("address", self.address),
            *protocols,
            ("devices", self.devices),
            ("memory", self.memory),
            ("clock", self.clock),
        ]

    def address(self) -> Verdict:
        """Check that peers can be told this machine's address."""
        values = {"host": self._host}
        if not is_own_address(self._host):
            raise CheckFailed(
                f"{self._host} is not an address of this machine, so nobody can read a prefill engine's memory there: "
                "set host, or VLLM_HOST_IP, to that of a network interface"
            )
        if self._host.startswith("127.") or self._host == "::1":
            text = f"{self._host} is of this machine only: set host, or VLLM_HOST_IP, for peers on others"
            return Verdict(text, values, Outcome.WARN)
        return Verdict(f"{self._host} is an address of this machine", values)

    def protocol(self, name: str) -> Verdict:
        """Check that the transfer engine starts with a protocol; only the one that will be used must."""
        started = self._start(name, self._host, self._config.devices if name == self._protocol else "")
        values = {"used": name == self._protocol, "starts": not started.error}
        if not started.error:
            milliseconds = 1e3 * started.registered_s
            text = f"starts at {started.address}; {_MEMORY_BYTES // _MIB} MiB registered in {milliseconds:.1f} ms"
            return Verdict(text, values | {"register_ms": round(milliseconds, 3)})
        if name == self._protocol:
            raise CheckFailed(started.error)
        raise CheckSkipped(f"not used, and does not start: {started.error}")

    def devices(self) -> Verdict:
        """Name the RDMA devices and the accelerators of this machine."""
        nics = rdma_devices()
        accelerators = _accelerators()
        text = f"RDMA: {', '.join(nics) or 'none'}; accelerators: {', '.join(accelerators) or 'none'}"
        values = {"rdma": nics, "accelerators": accelerators}
        if self._config.protocol == "auto" and self._protocol == "tcp" and accelerators:
            text += "; protocol auto takes tcp here, which is slower, and peers must use tcp, too"
            return Verdict(text, values, Outcome.WARN)
        down = [nic for nic in nics if "ACTIVE" not in nic]
        if self._protocol == "rdma" and down:
            return Verdict(f"{text}; ports that are not active move nothing", values, Outcome.WARN)
        return Verdict(text, values)

    def memory(self) -> Verdict:
        """Check that memory can be locked and pinned as the protocol and the device need it."""
        soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
        limit = "unlimited" if soft == resource.RLIM_INFINITY else f"{soft // 1024} KiB"
        free = machine_memory().available
        lock_bytes = None if soft == resource.RLIM_INFINITY else soft
        values: dict[str, Any] = {"memlock_bytes": lock_bytes, "available_bytes": free}
        wanted = self._config.cpu_bytes_to_use
        if wanted > free:
            raise CheckFailed(f"cpu_bytes_to_use is {wanted} bytes, and {free} are available on this machine")
        text = f"{free // _MIB} MiB available, lock limit {limit}"
        if self._protocol == "rdma" and soft != resource.RLIM_INFINITY:
            raise CheckFailed(
                f"{text}: RDMA locks all memory that it registers. Raise it with `ulimit -l unlimited`, LimitMEMLOCK= "
                "of the service, or --ulimit memlock=-1 of the container"
            )
        return Verdict(f"{text}; {_pin(values)}", values)

    def clock(self) -> Verdict:
        """Check that the clock by which leases expire runs evenly, and that threads wake in time for renewals."""
        before = time.monotonic(), time.time()
        late = []
        for _ in range(_NAPS):
            began = time.monotonic()
            time.sleep(_NAP_S)
            late.append(time.monotonic() - began - _NAP_S)
        passed, wall = time.monotonic() - before[0], time.time() - before[1]
        suspended = time.clock_gettime(time.CLOCK_BOOTTIME) - time.clock_gettime(time.CLOCK_MONOTONIC)
        latest = max(late)
        values = {
            "resolution_s": time.get_clock_info("monotonic").resolution,
            "wakes_late_ms": {"median": round(1e3 * statistics.median(late), 3), "worst": round(1e3 * latest, 3)},
            "suspended_s": round(suspended, 3),
        }
        text = f"a thread wakes {1e3 * statistics.median(late):.2f} ms late, {1e3 * latest:.1f} ms at the worst"
        if latest > self._config.lease_ttl_s / 3:
            raise CheckFailed(f"{text}: leases of {self._config.lease_ttl_s:g} s are renewed every third of that")
        if abs(passed - wall) > max(_CLOCK_DRIFT, _CLOCK_DRIFT * passed):
            text += f"; the wall clock moved {wall:.3f} s in {passed:.3f} s: it is being set, and logs will not agree"
            return Verdict(text, values, Outcome.WARN)
        if suspended > _SUSPENDED_S:
            text += (
                f"; this machine has slept for {suspended:.0f} s: leases stand still meanwhile, their readers do not"
            )
            return Verdict(text, values, Outcome.WARN)
        if latest > _LATE_S:
            return Verdict(f"{text}: transfers stall when threads do", values, Outcome.WARN)
        return Verdict(text, values)


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


def _accelerators() -> list[str]:
    """Return the names of the devices that torch sees."""
    try:
        torch = importlib.import_module("torch")
    except (ImportError, OSError):
        return []
    for module, name in (("torch_npu", "npu"), ("", "cuda")):
        try:
            if module:
                importlib.import_module(module)
            device = getattr(torch, name)
            if device.is_available():
                return [str(device.get_device_name(index)) for index in range(device.device_count())]
        except (ImportError, AttributeError, RuntimeError, OSError):
            continue
    return []


def _pin(values: dict[str, Any]) -> str:
    """Pin memory for the device of this machine, and return what came of it."""
    if not _accelerators():
        return "there is no device to pin it for"
    torch = importlib.import_module("torch")
    name, backend = ("npu", Backend.ACL) if hasattr(torch, "npu") else ("cuda", Backend.CUDA)
    torch.empty(1, device=name)  # the device must be current in this thread
    begun = time.perf_counter()
    pinned_memory(backend, _MEMORY_BYTES).close()
    values["pin_ms"] = round(1e3 * (time.perf_counter() - begun), 3)
    return f"{_MEMORY_BYTES // _MIB} MiB pinned for {name} in {values['pin_ms']} ms"
