"""Makes copiers and pinned memory for a named backend: the entry point of this package.

Imports or loads nothing of CUDA, CANN, torch or torch_npu before it is needed.
"""

from enum import Enum

from transfer.copies.batch.acl import AclRuntime
from transfer.copies.batch.base import CopierStartError, Direction
from transfer.copies.batch.copier import BatchCopier
from transfer.copies.batch.cuda import CudaRuntime
from transfer.copies.batch.device import DeviceBackend
from transfer.copies.batch.host import HostBackend
from transfer.copies.batch.streams import DeviceStream
from transfer.memory import HostMemory, PinnedMemory


class Backend(Enum):
    """What moves the bytes."""

    ACL = "acl"  # Ascend NPUs
    CUDA = "cuda"  # NVIDIA GPUs
    HOST = "host"  # the CPU: both ends are host memory


def open_copier(backend: Backend, direction: Direction, device: int = 0) -> BatchCopier:
    """Open a copier that moves bytes in ``direction``, to or from torch's device number ``device``.

    ``Backend.HOST`` ignores both. The caller closes the copier.

    Raises:
        CopierStartError: a library, torch or the device is missing; the message says which.
    """
    name = f"pd-copy-{backend.value}-{direction.name.lower()}"
    if backend is Backend.HOST:
        return BatchCopier(HostBackend(), name)
    runtime = _runtime(backend, device)
    platform = "npu" if backend is Backend.ACL else "cuda"
    return BatchCopier(DeviceBackend(runtime, DeviceStream(platform, device), direction), name)


def pinned_memory(backend: Backend, size: int, device: int = 0, node: int | None = None) -> PinnedMemory:
    """Allocate ``size`` bytes of page-aligned host memory that ``backend`` copies from and to at full speed.

    The device must be current in the calling thread, as it is once torch has used it there. Pages are allocated before
    this returns, but not with ``Backend.HOST``. ``node``: see ``HostMemory``.

    Raises:
        ValueError: ``size`` is not positive.
        CopierStartError: a library is missing, or the driver cannot pin this much.
    """
    if backend is Backend.HOST:
        memory = HostMemory(size, node)
        return PinnedMemory(memory.region, lambda: None, owner=memory)
    return _runtime(backend, device).pinned(size, node)


def npu_pci_address(device: int) -> str:
    """Return where torch's NPU number ``device`` is on the PCI bus ("0000:3d:00.0"), "" where CANN does not tell."""
    try:
        return AclRuntime.load(device).pci_address()
    except CopierStartError:
        return ""


def _runtime(backend: Backend, device: int) -> AclRuntime | CudaRuntime:
    return AclRuntime.load(device) if backend is Backend.ACL else CudaRuntime.load()
