"""The plugin that vLLM loads in each of its processes: it puts the host kernels in place.

This module must stay cheap to import. An entry point of ``vllm.general_plugins`` names it, see ``environment``.
"""

import contextlib
import importlib
from functools import cache

from tests.support.ascend.faults import install_faults

_OPERATORS = ("norms", "rotary", "paged_cache", "attention", "sparse_attention", "quantised_attention", "experts")


@cache
def register() -> None:
    """Replace what needs an NPU, CANN or Triton. vLLM may call it again."""
    package = __name__.rpartition(".")[0]
    _load_atb()
    for name in _OPERATORS:
        importlib.import_module(f"{package}.{name}")
    for name in ("absent_modules", "triton_kernels", "collectives"):
        getattr(importlib.import_module(f"{package}.{name}"), f"install_{name}")()
    install_faults()


def _load_atb() -> None:
    """torch_npu defines atb's operators when this module is imported, in the releases that have it."""
    importlib.import_module("torch_npu")
    with contextlib.suppress(ImportError):
        importlib.import_module("torch_npu.op_plugin.atb._atb_ops")
