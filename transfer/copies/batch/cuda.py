"""Copies by the CUDA driver, libcuda: batches by ``cuMemcpyBatchAsync``, single copies by ``cuMemcpyAsync``.

Tested against a simulated driver, and on a GPU where the tests find one.

A batch tells the driver how early it may read the sources: here in the order of the stream. What leaves the device was
just written by a kernel before the event, and a load after an event may follow the very copy that fills its source.
"""

import ctypes
import logging
from typing import Any

from layout.copies import Copies
from layout.geometry import Region
from transfer.copies.batch import cuda_abi as abi
from transfer.copies.batch.base import CopierStartError, Direction
from transfer.copies.batch.device import CopyRuntime, Explanation, Refusal, bind
from transfer.copies.batch.single import cuda_copies
from transfer.errors import TransferError
from transfer.memory import HostMemory, PinnedMemory

logger = logging.getLogger(__name__)

LIBRARY = "libcuda.so.1"

#: What it means if the library lacks a function.
_OTHERWISE = "it is not NVIDIA's driver, or too old. A driver for CUDA 12 is needed"


class IpcRefused(TransferError):  # noqa: N818  named after the event
    """The driver does not share memory between these processes; the message has its error and what that means."""


class CudaRuntime(CopyRuntime):
    """The CUDA driver, for the device of the calling thread."""

    platform = "cuda"
    chunk = 1 << 30  # the driver sets no limit
    batch_call = "cuMemcpyBatchAsync (drivers for CUDA 12.8 have it)"

    def __init__(self, library: ctypes.CDLL) -> None:
        """Set the prototypes of ``library``, which no other code may use with different ones.

        Raises:
            CopierStartError: a required function is missing.
        """
        prototypes = {name: (arguments, ctypes.c_int) for name, arguments in abi.PROTOTYPES.items()}
        required = abi.PROTOTYPES.keys() - abi.OPTIONAL
        self._functions = bind(library, LIBRARY, prototypes, required, _OTHERWISE)
        self._batch = self._find_batch()

    @classmethod
    def load(cls) -> "CudaRuntime":
        """Load the installed driver.

        Raises:
            CopierStartError: no driver is installed, or it is too old.
        """
        try:
            return cls(ctypes.CDLL(LIBRARY))
        except OSError as error:
            raise CopierStartError(
                f"{LIBRARY} cannot be loaded ({error}). It is part of NVIDIA's driver; a container has it only if it "
                "was started with access to the GPU (docker run --gpus all)"
            ) from error

    @property
    def takes_batches(self) -> bool:
        """See ``CopyRuntime``."""
        return self._batch is not None

    def submit_batch(self, copies: Copies, direction: Direction, stream: int) -> Refusal | None:
        """See ``CopyRuntime``."""
        assert self._batch is not None, "asked for a batch of a driver that takes none"
        failed = ctypes.c_size_t(abi.NO_INDEX)
        code = self._batch(
            copies.destinations.ctypes.data,
            copies.sources.ctypes.data,
            copies.sizes.ctypes.data,
            len(copies),
            ctypes.byref(abi.MemcpyAttributes(srcAccessOrder=abi.SRC_ACCESS_ORDER_STREAM)),
            ctypes.byref(ctypes.c_size_t(0)),  # the attributes' first copy
            1,
            ctypes.byref(failed),
            stream,
        )
        if code == abi.SUCCESS:
            return None
        return Refusal(code, None if failed.value == abi.NO_INDEX else failed.value, "cuMemcpyBatchAsync")

    def submit_singly(
        self,
        copies: Copies,
        direction: Direction,  # the driver knows it from the addresses
        stream: int,
    ) -> Refusal | None:
        """See ``CopyRuntime``."""
        memcpy = self._functions["cuMemcpyAsync"]
        index, code = cuda_copies(memcpy, *copies.columns, stream)
        return Refusal(code, index, "cuMemcpyAsync") if code != abi.SUCCESS else None

    def is_unsupported(self, code: int) -> bool:
        """See ``CopyRuntime``."""
        return code == abi.NOT_SUPPORTED

    def is_stricter(self, code: int) -> bool:
        """See ``CopyRuntime``. No such answer is known of CUDA."""
        return False

    def is_device(self, address: int) -> bool:
        """Return whether ``address`` is memory of a device."""
        kind = ctypes.c_uint()
        code = self._functions["cuPointerGetAttribute"](
            ctypes.addressof(kind), abi.POINTER_ATTRIBUTE_MEMORY_TYPE, address
        )
        return (code, kind.value) == (abi.SUCCESS, abi.MEMORY_TYPE_DEVICE)

    def explain(self, code: int) -> Explanation:
        """See ``CopyRuntime``. Returns the driver's own text, plus advice if there is any."""
        said = []
        for name in ("cuGetErrorName", "cuGetErrorString"):
            text = ctypes.c_char_p()
            found = self._functions[name](code, ctypes.byref(text)) == abi.SUCCESS
            said.append((text.value or b"").decode(errors="replace") if found else "")
        advice = abi.ADVICE.get(code)
        meaning = said[1] or "unknown to this driver"
        return Explanation(said[0] or "unnamed CUDA error", f"{meaning}: {advice}" if advice else meaning)

    def pinned(self, size: int, node: int | None = None) -> PinnedMemory:
        """Allocate ``size`` bytes of pinned, page-aligned host memory. A device must be set in the calling thread.

        Pins with ``cuMemHostRegister``, as ``cudaHostRegister`` does: exactly ``size`` bytes, while torch's pinned
        allocator takes the next power of two.

        Raises:
            ValueError: ``size`` is not positive.
            CopierStartError: the driver refused.
        """
        memory = HostMemory(size, node)
        address = memory.region.address
        code = self._functions["cuMemHostRegister_v2"](address, size, abi.MEM_HOST_REGISTER_PORTABLE)
        if code != abi.SUCCESS:
            raise CopierStartError(f"cuMemHostRegister refused {size} bytes: {self.describe(code)}")
        return PinnedMemory(memory.region, lambda: self._unpin(address), owner=memory)

    def _unpin(self, address: int) -> None:
        code = self._functions["cuMemHostUnregister"](address)
        if code != abi.SUCCESS:
            logger.warning("cuMemHostUnregister refused %#x: %s", address, self.describe(code))

    def allocation(self, address: int) -> Region:
        """Return the allocation in which ``address`` lies: what a handle stands for.

        Raises:
            IpcRefused: it is no device memory.
        """
        base, size = ctypes.c_uint64(), ctypes.c_size_t()
        self._share("cuMemGetAddressRange_v2", ctypes.byref(base), ctypes.byref(size), address)
        return Region(base.value, size.value)

    def handle(self, base: int) -> bytes:
        """Return what lets another process of this host map the allocation that begins at ``base``.

        Raises:
            IpcRefused: the memory or the device cannot be shared.
        """
        handle = abi.IpcHandle()
        self._share("cuIpcGetMemHandle", ctypes.byref(handle), base)
        return bytes(handle.reserved)

    def map_handle(self, handle: bytes) -> int:
        """Map another process's allocation, and return where it begins here. Mapping it twice is an error of ours.

        Raises:
            IpcRefused: the driver does not open the handle.
        """
        base = ctypes.c_uint64()
        given = abi.IpcHandle.from_buffer_copy(handle)
        self._share("cuIpcOpenMemHandle_v2", ctypes.byref(base), given, abi.IPC_LAZY_ENABLE_PEER_ACCESS)
        return base.value

    def unmap(self, base: int) -> None:
        """Give back what ``map_handle`` has returned: the other process's memory is free once all have.

        Raises:
            IpcRefused: the driver does not know it.
        """
        self._share("cuIpcCloseMemHandle", base)

    def device_uuid(self) -> str:
        """Return the name of the current device, which is the same in every process; of an instance under MIG.

        Raises:
            IpcRefused: no device is current.
        """
        device, uuid = ctypes.c_int(), ctypes.create_string_buffer(16)
        self._share("cuCtxGetDevice", ctypes.byref(device))
        self._share("cuDeviceGetUuid_v2", uuid, device)
        return f"GPU-{uuid.raw.hex()}"

    def _share(self, name: str, *arguments: Any) -> None:
        code = self._functions[name](*arguments)
        if code != abi.SUCCESS:
            error = self.explain(code)
            advice = abi.IPC_ADVICE.get(code, error.meaning)
            raise IpcRefused(f"{name} answers {code} {error.name}: {advice}")

    def _find_batch(self) -> Any:
        """Return ``cuMemcpyBatchAsync`` as of CUDA 12.8, whatever its symbol in this driver; None in older drivers."""
        find = self._functions.get("cuGetProcAddress_v2")
        if find is None:
            return None
        address, found = ctypes.c_void_p(), ctypes.c_int()
        code = find(
            b"cuMemcpyBatchAsync",
            ctypes.byref(address),
            abi.BATCH_VERSION,
            abi.GET_PROC_ADDRESS_DEFAULT,
            ctypes.byref(found),
        )
        if code != abi.SUCCESS or address.value is None:
            return None
        return ctypes.CFUNCTYPE(ctypes.c_int, *abi.BATCH_ARGUMENTS)(address.value)
