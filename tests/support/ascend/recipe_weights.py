"""What a recipe's checkpoint says of how its weights are quantised: ``quant_model_description.json``.

As ModelSlim writes it: how each weight is quantised, by its name in the checkpoint. What is not quantised, is ``FLOAT``
or left out. Layers that a model drafts with are as the others.
"""

from dataclasses import dataclass, replace
from typing import Any, TypeAlias

from tests.support.ascend.recipes import Recipe

Config: TypeAlias = dict[str, Any]

_STATIC, _DYNAMIC = "W8A8", "W8A8_DYNAMIC"
_BY_HEAD = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj")
_LATENT = ("self_attn.q_a_proj", "self_attn.kv_a_proj_with_mqa", "self_attn.q_b_proj", "self_attn.o_proj")
_INDEXER, _INDEXER_TYPE = "self_attn.indexer.wq_b", "self_attn.indexer.quant_type"
_COMPRESSED = ("attn.wq_a", "attn.wq_b", "attn.wkv", "attn.wo_b", "attn.indexer.wq_b")
_LINEAR = ("linear_attn.in_proj_qkv", "linear_attn.in_proj_z", "linear_attn.out_proj")
#: Of a layer, what is not quantised.
_FLOAT = ("mlp.gate", "block_sparse_moe.gate", "self_attn.kv_b_proj", "self_attn.indexer.weights_proj")
_LINEAR_FLOAT = ("mlp.shared_expert_gate", *(f"linear_attn.{name}" for name in ("conv1d", "in_proj_b", "in_proj_a")))


@dataclass(frozen=True)
class _Names:
    """The names of an architecture's quantised weights; what some of its layers lack stands for all."""

    layers: str
    attention: tuple[str, ...]
    experts: str = "mlp"  # what the experts are part of, and those that every token goes through
    shared: str = "shared_experts"
    parts: tuple[str, ...] = ("gate_proj", "up_proj", "down_proj")
    drafts: str = ""  # of a layer that drafts; empty where these are numbered on
    parts_of_experts: tuple[str, ...] = ()  # where these have other names
    whole: tuple[str, ...] = _FLOAT
    images: tuple[str, ...] = ()  # of what reads them, which is not quantised


_MLPS = ("blocks.0.mlp", "merger")  # of what reads images
_INNER_OUTSIDE = ("language_model.lm_head", "language_model.model.embed_tokens")
_INNER, _NUMBERED = "language_model.model.layers", ("w1", "w2", "w3")
_MINIMAX = _Names(
    _INNER, _BY_HEAD, "block_sparse_moe", parts_of_experts=_NUMBERED,
    images=tuple(f"vision_tower.vision_model.encoder.layers.0.{name}" for name in _BY_HEAD),
)  # fmt: skip
_VISION = tuple(
    f"model.visual.{name}"
    for name in ("blocks.0.attn.qkv", "blocks.0.attn.proj", *(f"{each}.linear_fc{n}" for each in _MLPS for n in (1, 2)))
)
_QWEN_VL = _Names("model.language_model.layers", _BY_HEAD, images=_VISION)
_QWEN3_5 = replace(
    _QWEN_VL,
    attention=(*_BY_HEAD, *_LINEAR),
    shared="shared_expert",
    drafts="mtp.layers",
    whole=(*_FLOAT, *_LINEAR_FLOAT),
)
_KIMI_VISION = (
    *(f"vision_tower.encoder.blocks.0.{name}" for name in ("wqkv", "wo", "mlp.fc0", "mlp.fc1")),
    *("mm_projector.linear_1", "mm_projector.linear_2", "mm_projector.proj.0", "mm_projector.proj.2"),
)
_V4 = _Names("layers", _COMPRESSED, "ffn", parts=_NUMBERED, drafts="mtp")
_NAMES = {
    "qwen3_moe": _Names("model.layers", _BY_HEAD),
    "qwen3_vl_moe": _QWEN_VL,
    "glm4_moe": _Names("model.layers", _BY_HEAD),
    "minimax_m2": _Names("model.layers", _BY_HEAD, "block_sparse_moe", parts_of_experts=_NUMBERED),
    "minimax_m3": _MINIMAX,
    "deepseek_v3": _Names("model.layers", _LATENT),
    "kimi_k25": _Names(_INNER, _LATENT, images=_KIMI_VISION),
    "deepseek_v32": _Names("model.layers", (*_LATENT, _INDEXER)),
    "glm_moe_dsa": _Names("model.layers", (*_LATENT, _INDEXER)),
    "qwen3_5_moe": _QWEN3_5,
    "qwen3_5": _QWEN3_5,
    "glm5_next": _Names("model.layers", (*_LATENT, _INDEXER)),
    "deepseek_v4": _V4,
    "deepseek_v41": _V4,
}


def quantised_weights(recipe: Recipe, family: str, config: Config) -> Config:
    """Return the description for a configuration of an architecture."""
    text, names = config.get("text_config", config), _NAMES[family]
    kind, dense, of_experts = _kinds(recipe, family)
    layers = [f"{names.layers}.{number}" for number in range(text["num_hidden_layers"])]
    drafts = max(int(text.get(key, 0)) for key in _NUMBERS_OF_DRAFTS)
    first = 0 if names.drafts else len(layers)
    layers += [f"{names.drafts or names.layers}.{first + number}" for number in range(drafts)]
    experts = next((int(text[key]) for key in _NUMBERS_OF_EXPERTS if key in text), 0)
    described: Config = {"version": "1.0.0", "model_quant_type": of_experts}
    if names is _V4:
        described["hc_head_fn"] = "FLOAT"  # by which vllm-ascend knows whose names these are
    if recipe.p.options.get("indexer_kv_dtype") == "int8" and family == "glm_moe_dsa":
        quantised = [layer for number, layer in enumerate(layers) if number not in recipe.whole_indexers]
        described |= {f"{layer}.{_INDEXER_TYPE}": "INT8_DYNAMIC" for layer in quantised}
        described["indexer_quant_type"] = "INT8_DYNAMIC"
    for layer in layers:
        described |= {f"{layer}.{name}.weight": kind for name in names.attention}
        described |= {f"{layer}.{name}.weight": "FLOAT" for name in names.whole}
        if kind == _STATIC:  # in whose inputs outliers are smoothed
            described[f"{layer}.self_attn.q_a_layernorm.bias"] = "FLOAT"
        for module in ("mlp", f"{names.experts}.{names.shared}"):
            described |= {f"{layer}.{module}.{part}.weight": dense for part in names.parts}
        for expert in range(experts):
            described |= {
                f"{layer}.{names.experts}.experts.{expert}.{part}.weight": of_experts
                for part in names.parts_of_experts or names.parts
            }
    described |= dict.fromkeys(_OUTSIDE, "FLOAT")
    return described | {f"{name}.weight": "FLOAT" for name in names.images}


#: Of layers.
_OUTSIDE = tuple(
    f"{name}.weight"
    for name in ("lm_head", "model.embed_tokens", "model.language_model.embed_tokens", "mtp.fc", *_INNER_OUTSIDE)
)
_NUMBERS_OF_DRAFTS = ("num_nextn_predict_layers", "mtp_num_hidden_layers", "dspark_num_mtp_layers")
_NUMBERS_OF_EXPERTS = ("n_routed_experts", "num_experts", "num_local_experts")


def _kinds(recipe: Recipe, family: str) -> tuple[str, str, str]:
    """How the weights of attention are quantised, those of what every token goes through, and those of experts."""
    if recipe.hardware == "A5":
        kind = "W4A4_MXFP4" if "mxfp4" in recipe.model else "W8A8_MXFP8"
        return "W8A8_MXFP8", kind, kind
    attention = _STATIC if family in ("deepseek_v3", "deepseek_v32") else _DYNAMIC
    return attention, _DYNAMIC, "W4A8_DYNAMIC" if "w4a8" in recipe.model else _DYNAMIC
