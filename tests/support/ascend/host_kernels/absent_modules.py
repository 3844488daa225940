"""Modules of vllm-ascend's container images that PyPI does not have: importable here, but hardly anything works.

acl                         pyACL: one call of its runtime
fla_npu                     operators of gated delta net and KDA; any other attribute can be read, and calling it raises
vllm_ascend.vllm_ascend_C   defines the operators of _C_ascend by their own schemas; a few have a body
"""

import ctypes
import importlib.abc
import importlib.machinery
import sys
import types
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from tests.support.ascend.host_kernels import compressed_attention, experts, gated_delta, hyper_connections, kda
from tests.support.ascend.host_kernels.block_sparse_attention import (
    npu_msa_index_score,
    npu_sparse_attention_score,
    shapes_of_index_score,
    shapes_of_sparse_attention_score,
)
from tests.support.ascend.host_kernels.dispatch import Operator, OperatorLibrary
from tests.support.ascend.host_kernels.norms import npu_rms_norm_cast, scaled_norm, shapes_of_rms_norm_cast
from tests.support.ascend.host_kernels.paged_cache import write_rows, write_slots
from tests.support.ascend.host_kernels.quantised_attention import (
    npu_kv_quant_sparse_flash_attention_vllm,
    npu_lightning_indexer_quant,
    shapes_of_kv_quant_sparse_flash_attention,
    shapes_of_lightning_indexer_quant,
    store_kv_block,
    store_kv_block_metadata,
)
from tests.support.ascend.host_kernels.rotary import inplace_partial_rotary_mul
from tests.support.ascend.host_kernels.sparse_attention import (
    npu_sparse_flash_attention,
    shapes_of_sparse_flash_attention,
)
from tests.support.ascend.paths import operator_schemas

_OPERATORS = "vllm_ascend.vllm_ascend_C"
_ABSENT = ("acl", "fla_npu")
#: Asks for an experimental package, without which MiniMax-M3 takes another operator.
_OPTIONAL = "is_minimax_sparse_attention_split_kv_available"


class _AbsentModule(types.ModuleType):
    def __getattr__(self, name: str) -> Callable[..., None]:
        if name.startswith("__"):
            raise AttributeError(name)

        def absent(*_args: object, **_kwargs: object) -> None:
            raise RuntimeError(f"{self.__name__}.{name} is not on this machine")

        return absent


class _AbsentFinder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname.partition(".")[0] in _ABSENT or fullname == _OPERATORS:
            return importlib.machinery.ModuleSpec(fullname, self, is_package=True)
        return None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return _AbsentModule(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        if module.__name__ == _OPERATORS:
            module.library = _define_operators()  # type: ignore[attr-defined]  # the operators live as long as it
        elif module.__name__ == "fla_npu.ops.ascendc":
            libraries, operators = zip(gated_delta.define_operators(), kda.define_kda_operators(), strict=True)
            module.libraries = libraries  # type: ignore[attr-defined]  # the operators live as long as they
            vars(module).update(operators[0] | operators[1])
        elif module.__name__ == "acl.rt":
            module.memcpy = _memcpy()  # type: ignore[attr-defined]


def install_absent_modules() -> None:
    """Make the modules importable, unless they are there."""
    sys.meta_path.append(_AbsentFinder())


def _memcpy() -> Any:
    runtime = ctypes.CDLL("libascendcl.so")
    pointer, size = ctypes.c_void_p, ctypes.c_size_t
    runtime.aclrtMemcpy.argtypes = (pointer, size, pointer, size, ctypes.c_int)
    return runtime.aclrtMemcpy


def npu_add_rms_norm_bias(
    x1: Tensor, x2: Tensor, gamma: Tensor, beta: Tensor | None = None, epsilon: float = 1e-6
) -> tuple[Tensor, Tensor, Tensor]:
    total = x1 + x2
    normalised, reciprocal = scaled_norm(total, gamma, epsilon)
    return (normalised if beta is None else normalised + beta), reciprocal, total


def _shapes_of_add_rms_norm(
    x1: Tensor, x2: Tensor, gamma: Tensor, beta: Tensor | None = None, epsilon: float = 1e-6
) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(x1), x1.new_empty((*x1.shape[:-1], 1), dtype=torch.float32), torch.empty_like(x1)


def npu_gemma_rms_norm(x: Tensor, gamma: Tensor, epsilon: float = 1e-6) -> tuple[Tensor, Tensor]:
    return scaled_norm(x, 1 + gamma.float(), epsilon)


def _shapes_of_gemma_rms_norm(x: Tensor, gamma: Tensor, epsilon: float = 1e-6) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), x.new_empty((*x.shape[:-1], 1), dtype=torch.float32)


def _scatter_to_heads_first(
    key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor,
    *, cache_mode: str = "Norm", scatter_mode: str = "None",
) -> None:  # fmt: skip
    """Writing to caches [blocks, heads, tokens of a block, head size]."""
    assert (cache_mode, scatter_mode) == ("Norm", "NHSD"), (cache_mode, scatter_mode)
    write_slots(slot_mapping, ((key, key_cache.transpose(1, 2)), (value, value_cache.transpose(1, 2))))


#: Those of vllm-ascend's operators that models call here.
_BODIES = (
    Operator(npu_add_rms_norm_bias, _shapes_of_add_rms_norm),
    Operator(npu_gemma_rms_norm, _shapes_of_gemma_rms_norm),
    Operator(npu_rms_norm_cast, shapes_of_rms_norm_cast),
    Operator(inplace_partial_rotary_mul),
    Operator(_scatter_to_heads_first, name="npu_scatter_pa_kv_cache"),
    Operator(write_rows, name="npu_scatter_nd_update_sk"),
    Operator(npu_sparse_flash_attention, shapes_of_sparse_flash_attention),
    Operator(npu_lightning_indexer_quant, shapes_of_lightning_indexer_quant),
    Operator(npu_kv_quant_sparse_flash_attention_vllm, shapes_of_kv_quant_sparse_flash_attention),
    Operator(store_kv_block_metadata),
    Operator(store_kv_block),
    Operator(npu_msa_index_score, shapes_of_index_score),
    Operator(npu_sparse_attention_score, shapes_of_sparse_attention_score),
    *compressed_attention.COMPRESSED_ATTENTION,
    *hyper_connections.HYPER_CONNECTIONS,
    *experts.EXPERTS,
)


def _define_operators() -> Any:
    """Define vllm-ascend's operators; returns the library that holds them."""
    library = torch.library.Library("_C_ascend", "DEF")
    names = set()
    for schema in operator_schemas().read_text().splitlines():
        library.define(schema)
        names.add(schema.partition("(")[0])
    operators = OperatorLibrary("_C_ascend", library)
    for operator in _BODIES:
        name = operator.name or operator.body.__name__
        if name in names:
            operators.define(operator.body, name=name, shapes=operator.shapes)
    if _OPTIONAL in names:
        library.impl(_OPTIONAL, lambda: False, "CompositeExplicitAutograd")
    return library
