"""Whether the caches of a model runner's layers can be one tensor for each part, and what shape that has.

Judges tensors by their shapes only: those of the meta device will do.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from pd_connector.vllm.npu.cache_check import PartShape

_PLAIN_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


class LayersApartError(Exception):
    """The layers' caches must be allocated apart; the message says why, as the end of a sentence."""


@dataclass(frozen=True)
class CacheForm:
    """The caches of all layers of an engine, which have one shape."""

    layers: tuple[str, ...]
    blocks: int  # the kernel's
    block_tokens: int  # in a block of the kernel
    parts: tuple[PartShape, ...]

    @property
    def block_bytes(self) -> int:
        """Bytes of one block over all layers and parts."""
        return sum(part.block_bytes for part in self.parts) * len(self.layers)


def check_groups(groups: Sequence[Any]) -> None:
    """Raise unless vLLM's cache ``groups`` are one, of full attention or MLA with plain numbers.

    Raises:
        LayersApartError: naming what else there is.
    """
    if len(groups) != 1:
        raise LayersApartError(f"the model has {len(groups)} groups of layers with block tables of their own")
    spec = groups[0].kv_cache_spec
    for name, one in getattr(spec, "kv_cache_specs", {"": spec}).items():
        kind, where = type(one).__name__, f" of layer {name!r}" if name else ""
        if kind not in ("FullAttentionSpec", "MLAAttentionSpec", "AscendMLAAttentionSpec"):
            raise LayersApartError(f"the cache{where} is of kind {kind}")
        if one.dtype not in _PLAIN_DTYPES:
            raise LayersApartError(f"the cache{where} is quantized ({one.dtype})")


def common_form(caches: Mapping[str, Any], block_tokens: int, blocks: int) -> CacheForm:
    """Return the form of all layers' caches.

    Args:
        caches: by layer name, what the model runner would bind.
        block_tokens: tokens of one of vLLM's blocks.
        blocks: vLLM's blocks.

    Raises:
        LayersApartError: they have no common form.
    """
    if len(caches) < 2:
        raise LayersApartError(f"this worker has {len(caches)} layer with a cache")
    forms = {name: _parts(name, cache) for name, cache in caches.items()}
    first = next(iter(forms))
    for name, form in forms.items():
        if form != forms[first]:
            raise LayersApartError(f"the caches of layers {first!r} and {name!r} differ in shape or type")
    kernel_blocks = {int(part.shape[0]) for part in caches[first]}
    if len(kernel_blocks) != 1 or (blocks * block_tokens) % (held := kernel_blocks.pop()) or held % blocks:
        raise LayersApartError(f"layer {first!r} does not hold {blocks} blocks in each of its parts")
    return CacheForm(tuple(forms), held, blocks * block_tokens // held, forms[first])


def _parts(layer: str, cache: Any) -> tuple[PartShape, ...]:
    if not isinstance(cache, tuple | list) or len(cache) != 2:
        raise LayersApartError(f"the cache of layer {layer!r} is not two tensors")
    for part in cache:
        if part.dim() != 4 or not part[0].is_contiguous():
            shape, strides = tuple(part.shape), tuple(part.stride())
            raise LayersApartError(f"blocks of layer {layer!r} are not dense (shape {shape}, strides {strides})")
        if part.dtype not in _PLAIN_DTYPES:
            raise LayersApartError(f"the cache of layer {layer!r} is quantized ({part.dtype})")
    return tuple(PartShape((int(part.shape[1]), int(part.shape[2]), int(part.shape[3])), part.dtype) for part in cache)
