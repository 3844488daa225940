"""Memory of the simulated device, looked at and changed past torch and past all streams."""

import ctypes
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

Bytes = npt.NDArray[np.uint8]

HOST_TO_DEVICE, DEVICE_TO_HOST = 1, 2


@dataclass
class DeviceBytes:
    """Device memory by address: what is there now, whatever is under way."""

    acl: ctypes.CDLL

    def _copy(self, to: int, start: int, size: int, kind: int) -> None:
        bytes_ = ctypes.c_size_t(size)
        assert self.acl.aclrtMemcpy(ctypes.c_void_p(to), bytes_, ctypes.c_void_p(start), bytes_, kind) == 0

    def at(self, address: int, size: int) -> Bytes:
        result = np.empty(size, np.uint8)
        self._copy(result.ctypes.data, address, size, DEVICE_TO_HOST)
        return result

    def of(self, tensor: torch.Tensor) -> Bytes:
        return self.at(tensor.data_ptr(), tensor.numel() * tensor.element_size())

    def put(self, address: int, values: Bytes) -> None:
        self._copy(address, np.ascontiguousarray(values).ctypes.data, values.nbytes, HOST_TO_DEVICE)
