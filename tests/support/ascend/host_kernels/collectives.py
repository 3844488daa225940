"""HCCL's place taken by Gloo, over CPU tensors that alias device tensors. A collective waits for its stream."""

from collections.abc import Sequence
from typing import Any

import torch.distributed
from torch import Tensor
from torch._C import _distributed_c10d as c10d
from torch.distributed import ProcessGroup

from tests.support.ascend.host_kernels.dispatch import host


def _on_host(tensor: Tensor) -> Tensor:
    return host.alias(tensor) if tensor.device.type == "npu" else tensor


def _all_on_host(tensors: Sequence[Tensor]) -> list[Tensor]:
    return [_on_host(tensor) for tensor in tensors]


class HostHccl(ProcessGroup):  # type: ignore[misc]  # torch is not followed
    """The collectives that vllm-ascend calls in eager tensor parallelism. Method names are those of PyTorch."""

    def __init__(self, store: Any, rank: int, size: int, timeout: Any) -> None:
        super().__init__(rank, size)
        self._name = ""
        self._gloo: Any = c10d.ProcessGroupGloo(store, rank, size, timeout)

    def getBackendName(self) -> str:
        return "hccl"

    # PyTorch keeps the name in backends, of which this group has none.

    @property
    def group_name(self) -> str:
        return self._name

    def _set_group_name(self, name: str) -> None:
        self._name = name

    def allreduce(self, tensors: Sequence[Tensor], opts: Any = None) -> Any:
        return self._gloo.allreduce(_all_on_host(tensors), opts or c10d.AllreduceOptions())

    def broadcast(self, tensors: Sequence[Tensor], opts: Any = None) -> Any:
        return self._gloo.broadcast(_all_on_host(tensors), opts or c10d.BroadcastOptions())

    def allgather(self, outputs: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor], opts: Any = None) -> Any:
        places = [_all_on_host(out) for out in outputs]
        return self._gloo.allgather(places, _all_on_host(inputs), opts or c10d.AllgatherOptions())

    def all_gather_single(self, output: Tensor, own: Tensor, opts: Any = None) -> Any:
        parts = list(_on_host(output).view(self.size(), *own.shape).unbind(0))
        return self._gloo.allgather([parts], [_on_host(own).contiguous()], c10d.AllgatherOptions())

    _allgather_base = all_gather_single

    def alltoall_base(
        self, output: Tensor, own: Tensor, output_sizes: Sequence[int], own_sizes: Sequence[int], opts: Any = None
    ) -> Any:
        places = _on_host(output), _on_host(own)
        return self._gloo.alltoall_base(*places, output_sizes, own_sizes, opts or c10d.AllToAllOptions())

    def gather(self, outputs: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor], opts: Any = None) -> Any:
        places = [_all_on_host(out) for out in outputs]
        return self._gloo.gather(places, _all_on_host(inputs), opts or c10d.GatherOptions())

    def barrier(self, opts: Any = None) -> Any:
        return self._gloo.barrier(c10d.BarrierOptions())

    def send(self, tensors: Sequence[Tensor], dst: int, tag: int = 0) -> Any:
        return self._gloo.send(_all_on_host(tensors), dst, tag)

    def recv(self, tensors: Sequence[Tensor], src: int, tag: int = 0) -> Any:
        return self._gloo.recv(_all_on_host(tensors), src, tag)


def _create(*args: Any) -> HostHccl:
    if len(args) == 2:  # the extended form: options of the distributed backend, options of HCCL
        options = args[0]
        return HostHccl(options.store, options.group_rank, options.group_size, options.timeout)
    return HostHccl(*args)


def install_collectives() -> None:
    """Let torch.distributed make ``HostHccl`` where HCCL is asked for."""
    plugins = torch.distributed.Backend._plugins
    own = plugins["HCCL"]
    plugins["HCCL"] = type(own)(_create, own.extended_api)
