"""A rank whose caches lie on a simulated CUDA device, with its model's stream and its copies to host memory."""

import threading
from collections.abc import Callable
from typing import TypeVar

import torch

from layout.host_blocks import host_layout
from pd_connector.orders import BlockMoves, LoadOrder, StoreOrder
from pd_connector.vllm.cache_groups import GroupSpec, Ranks
from pd_connector.worker.caches import describe_caches
from pd_connector.worker.host.device_copies import HostCopies
from tests.support.connector.tensors import stated_of
from tests.support.devices.fake_cuda import CudaDevice, FakeEvent, FakeStream
from tests.support.memory import Bytes, noise
from tests.support.waiting import WAIT_S, until
from transfer.copies.batch.base import Direction

LOAD, STORE = Direction.HOST_TO_DEVICE, Direction.DEVICE_TO_HOST
LAYERS, BLOCKS, HEADS, TOKENS, CONTENT, SLOTS = 3, 8, 2, 16, 32, 4
BLOCK_BYTES = HEADS * TOKENS * CONTENT  # of a layer

_Key = TypeVar("_Key")
_End = TypeVar("_End")


class CudaWorker:
    """A rank's caches in the driver's device memory, its host slots, and the stream that its model works on."""

    def __init__(self, cuda: CudaDevice, *, cross_layer: bool, waits: bool = True) -> None:
        """``waits``: copies wait for the model's stream, as they must."""
        memory = cuda.driver.device_memory(LAYERS * BLOCKS * BLOCK_BYTES)
        memory[:] = noise(len(memory), 1)
        self.caches: Bytes = (  # [layers, blocks, bytes]
            memory.reshape(BLOCKS, LAYERS, BLOCK_BYTES).transpose(1, 0, 2)
            if cross_layer
            else memory.reshape(LAYERS, BLOCKS, BLOCK_BYTES)
        )
        tensors = {
            f"layer {number}": torch.from_numpy(cache).view(BLOCKS, HEADS, TOKENS, CONTENT)
            for number, cache in enumerate(self.caches)
        }
        stated = {name: stated_of(tensor) for name, tensor in tensors.items()}
        groups = [GroupSpec(tuple(tensors), TOKENS, 0, BLOCKS, stated)]
        layout = host_layout(describe_caches(tensors, groups, Ranks(0, 1, 0, 1), ""))
        self.driver = cuda.driver
        self.go_on = threading.Event()
        self.runs = len(layout.groups[0])
        self.pinned = cuda.runtime.pinned(SLOTS * layout.slot_bytes)
        self.model = cuda.copier_and_stream(LOAD)[1]
        stores, self.stores_stream = cuda.copier_and_stream(STORE)
        loads, self.loads_stream = cuda.copier_and_stream(LOAD)
        self.copies = HostCopies(layout, self.pinned.region, stores, loads, self._mark if waits else lambda: None)

    def _mark(self) -> FakeEvent:
        event = self.model.record_event()
        self.model.handle()
        return event

    def compute(self, block: int, values: Bytes) -> None:
        """Queue the writing of a block on the model's stream."""
        self.model.push(lambda: self.caches.__setitem__((slice(None), block), values))

    def hold(self, stream: FakeStream) -> None:
        """Let a stream wait for ``go_on``, and no other."""
        stream.push(lambda: self.go_on.wait(WAIT_S))

    def store(self, *pairs: tuple[int, int]) -> None:
        self.copies.store(StoreOrder(0, BlockMoves.of([(0, *pair) for pair in pairs])))

    def load(self, *pairs: tuple[int, int]) -> None:
        self.copies.load(LoadOrder("request", BlockMoves.of([(0, *pair) for pair in pairs]), TOKENS))

    def ended(self, take: Callable[[], dict[_Key, _End]]) -> _End:
        """Ask until something has ended; nothing else is under way."""
        ((_, end),) = until(take, "a copy has ended").items()
        return end

    def close(self) -> None:
        self.driver.running.set()
        self.go_on.set()
        self.stores_stream.lost = self.loads_stream.lost = ""
        self.copies.close()
        for stream in (self.model, self.stores_stream, self.loads_stream):
            stream.synchronize()  # a test that has failed may have left work to them
        self.pinned.close()


def fresh_block(seed: int) -> Bytes:
    """New contents of a block: [layers, bytes]."""
    return noise(LAYERS * BLOCK_BYTES, seed).reshape(LAYERS, BLOCK_BYTES)
