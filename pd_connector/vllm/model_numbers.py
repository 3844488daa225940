"""Reads off a loaded model what its layers compute with: rotary tables, scales, and what options of the engine decide.

Where layers would set scales later, it has them do so at once.

vLLM gives connectors no access to the model: ``callers`` says how its runner is found.
"""

import logging
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, TypeAlias

import torch

from layout.layer_numbers import ROTARY, ROTARY_POSITIONS, TEMPERATURE, LayerNumbers, merged
from pd_connector.vllm.callers import callers

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.attention.backends.triton_attn import TritonAttentionImpl

logger = logging.getLogger(__name__)

#: Scales of a quantised cache: attributes of vLLM's attention layers, with one number or one for each head.
_SCALES = {"_k_scale": "k_scale", "_v_scale": "v_scale", "_q_scale": "q_scale", "_prob_scale": "prob_scale"}
_UNQUANTISED = frozenset({"auto", "float16", "half", "bfloat16", "float32", "float"})
#: Choices that vLLM makes when it builds a model: attributes of the modules around an attention layer.
_CHOICES = {
    "attn_temperature_tuning": TEMPERATURE,
    "floor_scale": "attention temperature floor_scale",
    "attn_scale": "attention temperature attn_scale",
}

_Table: TypeAlias = tuple[tuple[float, ...], int]


def layer_numbers(vllm_config: "VllmConfig", layers: Iterable[str]) -> tuple[LayerNumbers, ...]:
    """Return the numbers of the layers that have a KV cache here. Must be called while vLLM hands the caches over.

    Layers of which nothing is known are left out, those of a draft model among them.
    """
    layers = tuple(layers)
    model = _loaded_model() if layers else None
    if model is None and layers:
        logger.warning(
            "PDConnector: the loaded model cannot be reached in this release of vLLM, so its rotary tables are not "
            "compared with those of other engines"
        )
    attention = getattr(vllm_config.compilation_config, "static_forward_context", {})
    found: list[LayerNumbers] = []
    tables: dict[int, _Table | None] = {}  # by module: layers share them
    for layer in layers:
        if (module := attention.get(layer)) is not None:
            found += _attention_numbers(layer, module)
        for around in _modules_around(model, layer):
            found += _choices(layer, around)
            for name, child in around.named_children():
                if id(child) not in tables:
                    tables[id(child)] = _rotary_numbers(child)
                if (table := tables[id(child)]) is not None:
                    found.append(LayerNumbers(f"{ROTARY} {name}", (layer,), *table))
    return merged(found)


def fill_token_scales(vllm_config: "VllmConfig") -> None:
    """Have the layers that keep a scale for each token and head fill all of theirs with 1, as they do only once.

    Otherwise they would do it when they first compute, and blocks that were brought before would lose their scales.
    """
    for layer in vllm_config.compilation_config.static_forward_context.values():
        impl: TritonAttentionImpl | None = getattr(layer, "impl", None)
        if impl is not None and getattr(impl, "_is_per_token_head_quant", False) and layer.kv_cache.numel():
            impl._ensure_scale_caches(layer.kv_cache)  # in the kernel's blocks, unlike what connectors are given


def _rotary_numbers(module: torch.nn.Module) -> _Table | None:
    """Return the numbers of a rotary module, and their width; None if it is none, or has a table of unknown form."""
    table = _rotary_table(module)
    if table is None or table.dim() != 2 or not table.numel():
        return None
    rows = [position for position in ROTARY_POSITIONS if position < len(table)]
    values = table[torch.tensor(rows, dtype=torch.long, device=table.device)].float().cpu()
    return tuple(round(float(each), 5) for each in values.flatten()), int(table.shape[1])


def _rotary_table(module: torch.nn.Module) -> torch.Tensor | None:
    """Return the cosines and sines by which a module rotates keys, a row for each position."""
    both = getattr(module, "long_short_cos_sin_cache", None)
    if isinstance(both, torch.Tensor):  # LongRoPE: short factors first, as many rows as the model's original length
        original: int = module.original_max_position_embeddings
        return both[original:] if module.use_long_rope else both[:original]
    for name in ("cos_sin_cache", "cos_sin_k_cache"):
        table = getattr(module, name, None)
        if isinstance(table, torch.Tensor):
            return table
    return None


def _attention_numbers(layer: str, module: Any) -> Iterator[LayerNumbers]:
    """Return the factor on attention's logits, and the scales of a quantised cache that do not depend on the rank."""
    for factor in (getattr(module, "scale", None), getattr(getattr(module, "impl", None), "scale", None)):
        if isinstance(factor, float):
            yield LayerNumbers("softmax scale", (layer,), (factor,))
            break
    if str(getattr(module, "kv_cache_dtype", "auto")) in _UNQUANTISED:
        return
    for attribute, name in _SCALES.items():
        scale = getattr(module, attribute, None)
        if isinstance(scale, torch.Tensor) and scale.numel() == 1:
            yield LayerNumbers(name, (layer,), (float(scale),))


def _choices(layer: str, module: torch.nn.Module) -> Iterator[LayerNumbers]:
    for attribute, name in _CHOICES.items():
        value = getattr(module, attribute, None)
        if isinstance(value, bool | int | float):
            yield LayerNumbers(name, (layer,), (float(value),))


def _modules_around(model: torch.nn.Module | None, layer: str) -> Iterator[torch.nn.Module]:
    """Return the modules of which a layer is a part, by its name: the whole model first."""
    module = model
    for name in layer.split("."):
        if module is None:
            return
        yield module
        module = dict(module.named_children()).get(name)


def _loaded_model() -> torch.nn.Module | None:
    """Return the model of the runner that is handing over its KV caches; None if there is none on the stack."""
    runner: Any = next((each for each in callers() if hasattr(each, "get_model")), None)
    model = runner.get_model() if runner is not None else None
    return model if isinstance(model, torch.nn.Module) else None
