"""Device memory for the transfer engine: aligned as it must be registered, and a place for identities.

Tested with CPU tensors, and on a simulated NPU; not run on hardware.
"""

from typing import Any

import torch

from layout.geometry import Region
from pd_connector.vllm.cross_layer_tensors import ALIGNMENT
from pd_connector.worker.device_fence import landing
from transfer.copies.reshape.reshape_torch import SideStream


def device_memory(size: int, device: torch.device, way_out: str) -> torch.Tensor:
    """Return bytes of a device whose address and size are aligned as transfer engines of devices require.

    Raises:
        MemoryError: the device has no ``size`` bytes left; the message ends with ``way_out``.
    """
    size = -(-size // ALIGNMENT) * ALIGNMENT
    try:
        memory = torch.empty(size + ALIGNMENT, dtype=torch.uint8, device=device)
    except RuntimeError as error:  # what torch raises if memory is lacking
        raise MemoryError(f"{device} has no {size} bytes left for the transfer engine: {way_out}") from error
    start = -memory.data_ptr() % ALIGNMENT
    return memory[start : start + size]


class DeviceIdentityMemory:
    """Device memory for the identities of a transfer engine, where peers cannot read host memory, or should not.

    Implements ``transfer.engine.identity.IdentityMemory``.
    """

    def __init__(self, size: int, device: torch.device) -> None:
        """Allocate ``size`` bytes.

        Raises:
            MemoryError: the device has too little memory left.
        """
        self._bytes = device_memory(size, device, "lower gpu_memory_utilization")
        self._stream = SideStream(device)  # not the model's, whose work a reader would have to wait for
        self._land = landing("tcp", device)  # the way by which a GPU's is read
        self.region = Region(int(self._bytes.data_ptr()), int(self._bytes.numel()))

    @classmethod
    def on_npu(cls, size: int) -> "DeviceIdentityMemory":
        """Allocate on the NPU of the calling thread."""
        npu: Any = torch.npu  # torch_npu adds it
        return cls(size, torch.device("npu", npu.current_device()))

    @classmethod
    def on_gpu(cls, size: int) -> "DeviceIdentityMemory":
        """Allocate on the GPU of the calling thread."""
        return cls(size, torch.device("cuda", torch.cuda.current_device()))

    def write(self, address: int, data: bytes) -> None:
        """Store ``data`` at ``address``; return when peers can read it."""
        with torch.inference_mode(), self._stream.running():
            self._at(address, len(data)).copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))

    def read(self, address: int, size: int) -> bytes:
        """Return the ``size`` bytes at ``address``."""
        self._land()
        with torch.inference_mode(), self._stream.running():
            return bytes(self._at(address, size).cpu().numpy())

    def _at(self, address: int, size: int) -> torch.Tensor:
        start = address - self.region.address
        return self._bytes[start : start + size]
