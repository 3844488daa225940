"""Lets operators of the simulated device run on the host; importing this replaces those of PyTorch itself.

``host`` is the compiled module, see native/kernels.cpp.
"""

import contextlib
import importlib.util
import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch_npu  # noqa: F401  registers the device and its operators

from tests.support.ascend.paths import kernel_library

#: What stays torch_npu's own: allocation, views, pinning, and scalars read back. They launch no kernel.
_KEPT = re.compile(
    r"^aten::(empty(\.|$|_strided)|new_empty|view(\.|$)|as_strided(\.|$|_)|_reshape_alias|set_|resize_|record_stream"
    r"|is_pinned|_?pin_memory|_local_scalar_dense|_has_compatible|detach|alias|expand|transpose|permute|select|slice"
    r"|squeeze|unsqueeze|split|unbind|t$|t_$|_unsafe_view|narrow|lift|to\.|_to_cpu|contiguous|data|_thnn_|unfold$"
    r"|view_as|real|imag|diagonal)"
)
_ALWAYS = ("aten::copy_", "aten::_to_copy")

Body = Callable[..., Any]


def _load() -> Any:
    spec = importlib.util.spec_from_file_location("host_kernels", kernel_library())
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """PyTorch warns of every kernel that is replaced, in C++."""
    kept, null = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(null)


def replace_kernels(names: Sequence[str]) -> None:
    """Let these operators of the device run their CPU kernels on the host."""
    with _quiet():
        host.install(list(names))


@dataclass(frozen=True)
class Operator:
    """A CPU kernel, and how its results are made as meta tensors, where nobody else has said."""

    body: Body
    shapes: Body | None = None
    name: str = ""  # if it is not that of ``body``


class OperatorLibrary:
    """Operators of one namespace ("npu"), to which it gives CPU kernels; the device runs them."""

    def __init__(self, space: str, library: Any = None) -> None:
        self.space = space
        self._library = library or torch.library.Library(space, "IMPL")

    def define(
        self, body: Body, *, name: str = "", shapes: Body | None = None, aliases: dict[int, int] | None = None
    ) -> None:
        """Give an operator that body.

        Args:
            name: the operator's, if it is not that of ``body``.
            shapes: makes the results as meta tensors, where nobody else has said how. Without it, and without results
                or others' word, the operator runs at once instead of being queued.
            aliases: return values that are arguments, where the operator's schema does not say so.
        """
        name = name or body.__name__
        with _quiet():
            self._library.impl(name, body, "CPU")
            if shapes is not None:
                self._library.impl(name, shapes, "Meta")
        if aliases:
            host.returns_arguments(f"{self.space}::{name}", aliases)
        replace_kernels([f"{self.space}::{name}"])


def _replace_all_of_pytorch() -> None:
    registered = torch._C._dispatch_get_registrations_for_dispatch_key("PrivateUse1")
    names = [name for name in registered if name.startswith("aten::") and not _KEPT.match(name)]
    replace_kernels(names + [name for name in _ALWAYS if name not in names])


def _handle(stream: Any) -> int:
    return int(host.handle(stream.stream_id, stream.device_index, stream.device_type))


# Kernels that are written in Python take the GIL from the thread that launches them; by default that takes 5 ms.
sys.setswitchinterval(0.0005)
host: Any = _load()
_replace_all_of_pytorch()
# torch_npu's own keeps the GIL while it waits until work has been handed to streams, and that may wait for kernels that
# are written in Python, which no device has.
torch.npu.Stream.npu_stream = property(_handle)
NPU = OperatorLibrary("npu")
ATB = OperatorLibrary("atb")


def npu_operator(body: Body) -> Body:
    """The body of ``npu::NAME``, one of torch_npu's own operators."""
    NPU.define(body)
    return body


def atb_operator(body: Body) -> Body:
    """The body of ``atb::NAME``, an operator of the ATB library."""
    ATB.define(body)
    return body
