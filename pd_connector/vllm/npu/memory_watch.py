"""How much memory of an NPU a call takes."""

from collections.abc import Callable
from typing import Any

import torch


class DeviceMemoryWatch:
    """Watches the current NPU: what PyTorch's allocator hands out, and what the device has left.

    The second sees what the first does not know: workspace that operators take past PyTorch's allocator.
    """

    def __init__(self) -> None:
        self._npu: Any = torch.npu  # torch_npu adds it

    def taken_by(self, call: Callable[[], object]) -> int:
        """Implement ``cache_check.MemoryWatch``."""
        npu = self._npu
        # A call could take what earlier ones have left in the allocators, workspace above all, and nobody would see it.
        self.give_back()
        npu.reset_peak_memory_stats()
        allocated, free = npu.memory_allocated(), npu.mem_get_info()[0]
        call()
        npu.synchronize()
        return int(max(npu.max_memory_allocated() - allocated, free - npu.mem_get_info()[0]))

    def give_back(self) -> None:
        """Return to the device what was taken and is not in use, so that the caches find it in one piece."""
        self._npu.synchronize()
        self._npu.empty_cache()
