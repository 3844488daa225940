"""What is true of cache tensors, as vLLM would state it. Imports no vLLM, which the simulated device is without."""

import torch

from pd_connector.vllm.cache_specs import LayerSpec

Parts = tuple[tuple[str, int], ...]


def stated_of(tensor: torch.Tensor, parts: Parts = (), *, heads_axis: int = 1, page_bytes: int = 0) -> LayerSpec:
    """What is true of a cache of one tensor; of one of several, given one of them and the bytes of a block in all."""
    heads, item = tensor.shape[heads_axis], tensor.element_size()
    return LayerSpec(
        heads=heads,
        total_heads=heads,
        token_bytes=tensor.shape[3] * item,
        page_bytes=page_bytes or tensor[0].numel() * item,
        dtype=tensor.dtype,
        parts=parts,
    )
