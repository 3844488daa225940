"""Copies by Ascend's runtime, libascendcl: batches if it supports them, else single copies.

Tested against a simulated runtime (``tests/npu_sim``), with and without the real torch_npu binary; not run on an NPU.
The contract of the batch call:

- It takes one direction per call, host to device or device to host. Copies are unordered and must not be empty.
- The attributes must match where each address really is, including the device number.
- Only 4,096 copies per call are safe to assume, which is the limit of the synchronous call.
- After an error, the copies before the refused one are in progress.
- It looks both addresses of each copy up, which ``aclrtMemcpyAsync`` leaves out where the driver cannot tell of all
  memory. So it may refuse as invalid what the single call takes.
- Driver or chip may return ``FEATURE_NOT_SUPPORT`` at run time even if the symbol exists.
- Pageable host memory is accepted, but each such copy blocks.
"""

import ctypes
import logging
import mmap
from contextlib import ExitStack

from layout.copies import Copies
from layout.geometry import Region
from transfer import numa
from transfer.copies.batch import acl_abi as abi
from transfer.copies.batch.base import CopierStartError, Direction
from transfer.copies.batch.device import CopyRuntime, Explanation, Refusal, bind
from transfer.copies.batch.single import acl_copies
from transfer.memory import PinnedMemory, warn_of_node

logger = logging.getLogger(__name__)

LIBRARY = "libascendcl.so"

_KINDS = {Direction.HOST_TO_DEVICE: abi.MEMCPY_HOST_TO_DEVICE, Direction.DEVICE_TO_HOST: abi.MEMCPY_DEVICE_TO_HOST}

#: What it means if the library lacks a function.
_OTHERWISE = "it is not CANN's, or too old. CANN 8.0 or newer is needed"


class AclRuntime(CopyRuntime):
    """libascendcl, for copies to and from one device."""

    platform = "acl"
    chunk = 4096
    batch_call = "aclrtMemcpyBatchAsync (CANN 8.5 has it)"

    def __init__(self, library: ctypes.CDLL, device: int) -> None:
        """Set the prototypes of ``library``, which no other code may use with different ones.

        Raises:
            CopierStartError: a required function is missing.
        """
        self._device = device
        self._functions = bind(library, LIBRARY, abi.PROTOTYPES, abi.REQUIRED, _OTHERWISE)
        self._v2 = self._functions.get("aclrtMemcpyBatchAsyncV2")  # of CANN 9.1; ACL's version number does not tell
        self._v1 = self._functions.get("aclrtMemcpyBatchAsync")

    @classmethod
    def load(cls, device: int) -> "AclRuntime":
        """Load the runtime of the installed CANN.

        Raises:
            CopierStartError: CANN is not installed or too old.
        """
        try:
            return cls(ctypes.CDLL(LIBRARY), device)
        except OSError as error:
            raise CopierStartError(
                f"{LIBRARY} cannot be loaded ({error}). It is part of CANN: source CANN's set_env.sh, which adds it to "
                "LD_LIBRARY_PATH, or use another backend"
            ) from error

    @property
    def takes_batches(self) -> bool:
        """See ``CopyRuntime``."""
        return self._v2 is not None or self._v1 is not None

    def submit_batch(self, copies: Copies, direction: Direction, stream: int) -> Refusal | None:
        """See ``CopyRuntime``."""
        device = abi.AclMemLocation(self._device, abi.LOCATION_DEVICE)
        host = abi.AclMemLocation(0, abi.LOCATION_HOST)
        to, origin = (device, host) if direction is Direction.HOST_TO_DEVICE else (host, device)
        sizes = copies.sizes.ctypes.data
        arguments = (
            copies.destinations.ctypes.data,
            sizes,  # capacity of each destination
            copies.sources.ctypes.data,
            sizes,
            len(copies),
            ctypes.byref(abi.MemcpyBatchAttr(to, origin)),
            ctypes.byref(ctypes.c_size_t(0)),  # the attribute's first copy
            1,
        )
        if self._v2 is not None:
            code = self._v2(*arguments, stream)
            return Refusal(code, None, "aclrtMemcpyBatchAsyncV2") if code != abi.SUCCESS else None
        assert self._v1 is not None, "asked for a batch of a runtime that takes none"
        failed = ctypes.c_size_t(abi.NO_INDEX)
        code = self._v1(*arguments, ctypes.byref(failed), stream)
        if code == abi.SUCCESS:
            return None
        return Refusal(code, None if failed.value == abi.NO_INDEX else failed.value, "aclrtMemcpyBatchAsync")

    def submit_singly(self, copies: Copies, direction: Direction, stream: int) -> Refusal | None:
        """See ``CopyRuntime``."""
        memcpy = self._functions["aclrtMemcpyAsync"]
        index, code = acl_copies(memcpy, *copies.columns, _KINDS[direction], stream)
        return Refusal(code, index, "aclrtMemcpyAsync") if code != abi.SUCCESS else None

    def is_unsupported(self, code: int) -> bool:
        """See ``CopyRuntime``."""
        return code == abi.FEATURE_NOT_SUPPORT

    def is_stricter(self, code: int) -> bool:
        """See ``CopyRuntime``."""
        return code in (abi.INVALID_PARAM, abi.RT_PARAM_INVALID)

    def pci_address(self) -> str:
        """Return the device's place on the PCI bus, as "0000:3d:00.0"; "" where the runtime does not tell."""
        ask = self._functions.get("aclrtDeviceGetPCIBusId")
        text = ctypes.create_string_buffer(32)
        if ask is None or ask(self._device, ctypes.addressof(text), len(text)) != abi.SUCCESS:
            return ""
        return text.value.decode(errors="replace").lower()

    def explain(self, code: int) -> Explanation:
        """See ``CopyRuntime``. Adds the runtime's latest error message of this thread, if there is one."""
        name, meaning = abi.ERRORS.get(code, ("unlisted ACL error", "see CANN's list of error codes"))
        latest = self._functions.get("aclGetRecentErrMsg")
        said = (latest() or b"").decode(errors="replace").strip() if latest is not None else ""
        return Explanation(name, f"{meaning}. The runtime says: {said}" if said else meaning)

    def pinned(self, size: int, node: int | None = None) -> PinnedMemory:
        """Allocate ``size`` bytes of pinned, page-aligned host memory. A device must be set in the calling thread.

        The runtime allocates the pages in this call, so the node is asked for on behalf of the calling thread.

        Raises:
            ValueError: ``size`` is not positive.
            CopierStartError: the runtime refused.
        """
        if size <= 0:
            raise ValueError(f"the size of pinned memory must be positive, not {size} bytes")
        start = ctypes.c_void_p()
        with ExitStack() as preference:
            if node is not None:
                try:
                    preference.enter_context(numa.preferring(node))
                except OSError as refusal:
                    warn_of_node(node, refusal)
            code = self._functions["aclrtMallocHost"](ctypes.byref(start), size + mmap.PAGESIZE)
        if code != abi.SUCCESS or start.value is None:
            raise CopierStartError(f"aclrtMallocHost refused {size} bytes: {self.describe(code)}")
        allocation = start.value
        return PinnedMemory(Region(allocation + -allocation % mmap.PAGESIZE, size), lambda: self._free(allocation))

    def _free(self, allocation: int) -> None:
        code = self._functions["aclrtFreeHost"](allocation)
        if code != abi.SUCCESS:
            logger.warning("aclrtFreeHost refused %#x: %s", allocation, self.describe(code))
