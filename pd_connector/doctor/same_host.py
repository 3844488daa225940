"""Which transport two processes of this machine would use on its GPUs: whether one maps the other's memory, how fast.

Reads and writes nothing but memory that it allocates itself. Run on a fake driver, not on a GPU.
"""

import importlib
import time
from contextlib import closing
from functools import partial
from typing import Any, Protocol

import numpy as np

from layout.copies import Copies
from layout.geometry import Region
from pd_connector.config import ConnectorConfig
from pd_connector.doctor.findings import CheckFailed, CheckWarned
from pd_connector.doctor.listener import serving_apart
from pd_connector.secret import load_keys
from transfer.engine.cuda_ipc import CudaIpcEngine
from transfer.engine.interface import EngineStartError
from transfer.errors import TransferError

_BYTES = 256 << 20
_READS = 5
_TIMEOUT_S = 60.0


class Gpus(Protocol):
    """The GPUs of a process. A stand-in must be one that can be pickled."""

    def engine(self, *, is_read: bool) -> CudaIpcEngine:
        """Return the engine of a process that is read, or reads. Called once in a process, before ``allocate``."""

    def allocate(self, size: int) -> Any:
        """Return a tensor of so many bytes on the engine's GPU."""


class FirstGpus:
    """The first GPU for the process that is read, and the second one, if there is any, for the one that reads."""

    def engine(self, *, is_read: bool) -> CudaIpcEngine:
        """See ``Gpus``."""
        from pd_connector.worker.same_host import second_way  # noqa: PLC0415  needs torch

        cuda = importlib.import_module("torch").cuda
        cuda.set_device(0 if is_read else min(1, cuda.device_count() - 1))
        return second_way(is_read=is_read, reads=not is_read)

    def allocate(self, size: int) -> Any:
        """See ``Gpus``."""
        torch = importlib.import_module("torch")
        return torch.zeros(size, dtype=torch.uint8, device="cuda")


def has_gpu() -> bool:
    """Return whether torch sees a CUDA device."""
    try:
        return bool(importlib.import_module("torch").cuda.is_available())
    except Exception:  # with whatever torch cannot be imported: a finding of its own
        return False


class _Shared:
    """Noise in GPU memory that other processes map. ``address``: where it begins, and the engine's."""

    def __init__(self, gpus: Gpus, size: int) -> None:
        self._engine = gpus.engine(is_read=True)
        self._memory = gpus.allocate(size)
        self._memory.copy_(_noise(size))
        self._memory[-1].item()  # waits until it is there
        self._engine.register([Region(self._memory.data_ptr(), size)])
        if not self._engine.address:
            self._engine.close()
            raise EngineStartError(self._engine.refusal)
        self.address = f"{self._memory.data_ptr()}/{self._engine.address}"

    def close(self) -> None:
        self._engine.close()


class SameHost:
    """Has a process of its own share GPU memory, and reads it as a decode engine would."""

    def __init__(
        self, config: ConnectorConfig, gpus: Gpus | None = None, size: int = _BYTES, *, by_auto: bool = False
    ) -> None:
        """``config`` has the protocol that engines would take; ``by_auto``: by the protocol auto."""
        self._config = config
        self._gpus = gpus or FirstGpus()
        self._size = size
        self._by_auto = by_auto

    def check(self) -> str:
        """Check whether two processes on this machine would use CUDA IPC; return its rate, or why they would not."""
        protocol = self._config.protocol
        if not self._by_auto:
            return f"two processes here use {protocol}, as protocol says; auto would try CUDA IPC"
        if load_keys(self._config.secret_file) is None:
            return f"two processes here use {protocol}: CUDA IPC takes a secret (secret_file)"
        try:
            with serving_apart(partial(_Shared, self._gpus, self._size), "CUDA IPC") as address:
                found, wrong = self._read(address)
        except (CheckFailed, TransferError, MemoryError, RuntimeError) as error:
            raise CheckWarned(f"two processes here use {protocol}, and not CUDA IPC: {error}") from error
        if wrong:
            raise CheckFailed(f"two processes here would use CUDA IPC: {found}, {wrong} bytes wrong")
        return f"two processes here use CUDA IPC: {found}, all bytes equal"

    def _read(self, address: str) -> tuple[str, int]:
        """Read all that another process shares, some times; return how fast that was, and how many bytes are wrong."""
        with closing(self._gpus.engine(is_read=False)) as engine:
            memory = self._gpus.allocate(self._size)
            engine.register([Region(memory.data_ptr(), self._size)])
            start, _, theirs = address.partition("/")
            shared = Region(int(start), self._size)
            copies = Copies(*(np.array([each], np.int64) for each in (memory.data_ptr(), shared.address, self._size)))
            with closing(engine.open(theirs, [shared])) as link:
                fastest_s = min(_seconds(partial(link.read, copies, _TIMEOUT_S)) for _ in range(_READS))
                where = "another GPU" if link.is_between_devices else "the same GPU"
            wrong = int((memory.cpu() != _noise(self._size)).sum())
        rate = f"{1e3 * fastest_s:.2f} ms, {self._size / fastest_s / 1e9:.1f} GB/s"
        return f"{self._size / 1e6:.1f} MB of {where} in {rate}", wrong


def _seconds(action: Any) -> float:
    begun = time.perf_counter()
    action()
    return time.perf_counter() - begun


def _noise(size: int) -> Any:
    """Return random bytes that are the same in every process, and do not repeat in steps of blocks or pages."""
    period = np.random.default_rng(0).integers(0, 256, 65537, np.uint8)
    return importlib.import_module("torch").from_numpy(np.resize(period, size))
