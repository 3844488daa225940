"""Tiny configurations of the architectures that the recipes serve: no weights, few layers, the same forms of caches.

Numbers of KV heads, and widths that a cache row is made of, are the real models'; everything else is small.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from tests.support.ascend.recipes import Recipe, RecipeSide

Config: TypeAlias = dict[str, Any]
_VOCABULARY = 512
_HIDDEN = 256
#: Divided by every TP x DP of the recipes.
_EXPERTS = 64
#: Of two pipeline stages: the first has more layers, wherever the recipe's has.
_STAGES = {(30, 30): (3, 3), (41, 37): (5, 3), (42, 36): (5, 3)}
_LAYERS = 4


@dataclass(frozen=True)
class TinyModels:
    """Where the configurations of a recipe's side are, and what follows from them."""

    target: Path
    draft: Path | None  # of a draft that is a model of its own
    partition: str  # layers of each pipeline stage, as ``VLLM_PP_LAYER_PARTITION``; empty without


def write_models(directory: Path, recipe: Recipe, side: RecipeSide) -> TinyModels:
    """Write what a recipe's side serves to a directory."""
    stages = _STAGES[recipe.p.partition] if recipe.p.partition else (_LAYERS,)
    target = _write(directory / "target", _MODELS[family_of(recipe)](sum(stages)))
    draft = None
    if side.draft.get("method") == "eagle3":
        draft = _write(directory / "draft", _eagle3(recipe))
    return TinyModels(target, draft, ",".join(map(str, stages)) if side.pp > 1 else "")


def family_of(recipe: Recipe) -> str:
    """The key of a recipe's architecture."""
    return next(family for prefix, family in _FAMILIES if recipe.name.startswith(prefix))


def _write(directory: Path, config: Config) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def _shared(architecture: str, model_type: str, layers: int) -> Config:
    return {
        "architectures": [architecture],
        "model_type": model_type,
        "num_hidden_layers": layers,
        "vocab_size": _VOCABULARY,
        "hidden_size": _HIDDEN,
        "intermediate_size": 512,
        "moe_intermediate_size": 128,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "bos_token_id": 0,
        "eos_token_id": 1,
        "num_experts_per_tok": 2,
    }


def _qwen3_moe(layers: int) -> Config:
    return _shared("Qwen3MoeForCausalLM", "qwen3_moe", layers) | {
        "num_attention_heads": 64, "num_key_value_heads": 4, "head_dim": 128, "num_experts": _EXPERTS,
        "mlp_only_layers": list(range(1, layers)),
    }  # fmt: skip


def _qwen3_vl_moe(layers: int) -> Config:
    text = _qwen3_moe(layers) | {"model_type": "qwen3_vl_moe_text"}
    text["rope_parameters"] = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [24, 20, 20]}
    vision = {
        "model_type": "qwen3_vl_moe", "depth": 1, "hidden_size": 64, "num_heads": 8, "intermediate_size": 64,
        "out_hidden_size": _HIDDEN, "patch_size": 16, "spatial_merge_size": 2, "temporal_patch_size": 2,
        "deepstack_visual_indexes": [],
    }  # fmt: skip
    return {
        "architectures": ["Qwen3VLMoeForConditionalGeneration"], "model_type": "qwen3_vl_moe", "text_config": text,
        "vision_config": vision, "torch_dtype": "bfloat16", "tie_word_embeddings": False,
        "image_token_id": 500, "video_token_id": 501, "vision_start_token_id": 502, "vision_end_token_id": 503,
    }  # fmt: skip


def _glm4_moe(layers: int) -> Config:
    return _shared("Glm4MoeForCausalLM", "glm4_moe", layers) | {
        "num_attention_heads": 96, "num_key_value_heads": 8, "head_dim": 128, "n_routed_experts": _EXPERTS,
        "n_shared_experts": 1, "first_k_dense_replace": layers, "use_qk_norm": True, "partial_rotary_factor": 0.5,
        "num_nextn_predict_layers": 1, "n_group": 1, "topk_group": 1, "norm_topk_prob": True,
    }  # fmt: skip


def _minimax_m2(layers: int) -> Config:
    return _shared("MiniMaxM2ForCausalLM", "minimax_m2", layers) | {
        "num_attention_heads": 48, "num_key_value_heads": 8, "head_dim": 128, "num_local_experts": _EXPERTS,
        "rotary_dim": 64, "use_qk_norm": True, "scoring_func": "sigmoid", "use_routing_bias": True,
        "shared_intermediate_size": 0,
    }  # fmt: skip


def _deepseek_v3(layers: int) -> Config:
    return _shared("DeepseekV3ForCausalLM", "deepseek_v3", layers) | {
        "num_attention_heads": 128, "num_key_value_heads": 128, "q_lora_rank": 64, "kv_lora_rank": 512,
        "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128, "n_routed_experts": _EXPERTS,
        "n_shared_experts": 1, "first_k_dense_replace": layers, "moe_layer_freq": 1, "n_group": 4, "topk_group": 2,
        "norm_topk_prob": True, "routed_scaling_factor": 2.5, "scoring_func": "sigmoid",
        "topk_method": "noaux_tc", "num_nextn_predict_layers": 1,
    }  # fmt: skip


_FAMILIES = (
    ("qwen3-235b", "qwen3_moe"),
    ("qwen3-vl", "qwen3_vl_moe"),
    ("glm4x", "glm4_moe"),
    ("minimax-m2", "minimax_m2"),
    ("dsv31", "deepseek_v3"),
)
_MODELS: dict[str, Callable[[int], Config]] = {
    "qwen3_moe": _qwen3_moe,
    "qwen3_vl_moe": _qwen3_vl_moe,
    "glm4_moe": _glm4_moe,
    "minimax_m2": _minimax_m2,
    "deepseek_v3": _deepseek_v3,
}


def _eagle3(recipe: Recipe) -> Config:
    return _shared("LlamaForCausalLMEagle3", "llama", 1) | {
        "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 128, "draft_vocab_size": _VOCABULARY,
    }  # fmt: skip
