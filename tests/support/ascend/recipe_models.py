"""Tiny configurations of the architectures that the recipes serve: no weights, few layers, the same forms of caches.

Numbers of KV heads, and widths that a cache row is made of, are the real models'; everything else is small.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from tokenizers import Tokenizer, models

from tests.support.ascend.recipe_weights import Config, quantised_weights
from tests.support.ascend.recipes import Recipe, RecipeSide

_VOCABULARY = 512
_HIDDEN = 256
#: Divided by every TP x DP of the recipes.
_EXPERTS = 64
#: Of two pipeline stages: the first has more layers, wherever the recipe's has.
_STAGES: dict[tuple[int, ...], tuple[int, ...]] = {(30, 30): (3, 3), (41, 37): (5, 3), (42, 36): (5, 3)}
#: Without stages, where 4 layers would have too few of each kind.
_LAYERS = {"deepseek_v4": 7, "deepseek_v41": 9, "qwen3_5": 8, "qwen3_5_moe": 8, "glm5_next": 8}


#: Where a prompt takes more blocks, all cache groups together.
_BLOCKS = {"deepseek_v4": 100, "deepseek_v41": 64, "glm5_next": 64}


@dataclass(frozen=True)
class TinyModels:
    """Where the configurations of a recipe's side are, and what follows from them."""

    target: Path
    draft: Path | None  # of a draft that is a model of its own
    partition: str  # layers of each pipeline stage, as ``VLLM_PP_LAYER_PARTITION``; empty without
    blocks: int  # of vLLM's pool on every rank: enough for a test's prompt


def write_models(directory: Path, recipe: Recipe, side: RecipeSide) -> TinyModels:
    """Write what a recipe's side serves to a directory."""
    family = family_of(recipe)
    stages = _STAGES[recipe.p.partition] if recipe.p.partition else (_LAYERS.get(family, 4),)
    config = _MODELS[family](sum(stages))
    if side.options["quantization"] == "mxfp8":
        config["quantization_config"] = {"quant_method": "mxfp8", "ignored_layers": ["lm_head"]}
    target = _write(directory / "target", config)
    if family == "deepseek_v41":
        _write_tokenizer(target)
    if side.options["quantization"] == "ascend":
        described = json.dumps(quantised_weights(recipe, family, config))
        (target / "quant_model_description.json").write_text(described)
    draft = None
    if side.draft.get("method") == "eagle3":
        draft = _write(directory / "draft", _eagle3(recipe))
    partition = ",".join(map(str, stages)) if side.pp > 1 else ""
    return TinyModels(target, draft, partition, _BLOCKS.get(family, 16))


def family_of(recipe: Recipe) -> str:
    """The key of a recipe's architecture."""
    return next(family for prefix, family in _FAMILIES if recipe.name.startswith(prefix))


def _write(directory: Path, config: Config) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def _write_tokenizer(directory: Path) -> None:
    """A word a token: a table (Engram) is looked up by words."""
    words = {f"word{number}": number for number in range(_VOCABULARY)}
    Tokenizer(models.WordLevel(words, unk_token="word0")).save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))


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
        "mlp_only_layers": list(range(1, layers)), "norm_topk_prob": True,
    }  # fmt: skip


def _qwen3_vl_moe(layers: int) -> Config:
    text = _qwen3_moe(layers) | {"model_type": "qwen3_vl_moe_text", "norm_topk_prob": True}
    text["rope_parameters"] = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [24, 20, 20]}
    vision = {
        "model_type": "qwen3_vl_moe", "depth": 1, "hidden_size": 64, "num_heads": 16, "intermediate_size": 64,
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
        "n_shared_experts": 1, "first_k_dense_replace": 1, "use_qk_norm": True, "partial_rotary_factor": 0.5,
        "num_nextn_predict_layers": 1, "n_group": 1, "topk_group": 1, "norm_topk_prob": True,
    }  # fmt: skip


def _minimax_m2(layers: int) -> Config:
    return _shared("MiniMaxM2ForCausalLM", "minimax_m2", layers) | {
        "num_attention_heads": 48, "num_key_value_heads": 8, "head_dim": 128, "num_local_experts": _EXPERTS,
        "rotary_dim": 64, "use_qk_norm": True, "scoring_func": "sigmoid", "use_routing_bias": True,
        "shared_intermediate_size": 0,
    }  # fmt: skip


def _mla(architecture: str, model_type: str, layers: int) -> Config:
    return _shared(architecture, model_type, layers) | {
        "num_attention_heads": 128, "num_key_value_heads": 128, "q_lora_rank": 64, "kv_lora_rank": 512,
        "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128, "n_routed_experts": _EXPERTS,
        "n_shared_experts": 1, "first_k_dense_replace": 1, "moe_layer_freq": 1, "n_group": 4, "topk_group": 2,
        "norm_topk_prob": True, "routed_scaling_factor": 2.5, "scoring_func": "sigmoid",
        "topk_method": "noaux_tc", "num_nextn_predict_layers": 1,
    }  # fmt: skip


def _deepseek_v3(layers: int) -> Config:
    return _mla("DeepseekV3ForCausalLM", "deepseek_v3", layers)


def _kimi_k25(layers: int) -> Config:
    vision = {
        "num_hidden_layers": 1, "hidden_size": 128, "num_attention_heads": 8, "intermediate_size": 128,
        "model_type": "kimi_k25_vision",
    }  # fmt: skip
    text = _deepseek_v3(layers) | {"num_attention_heads": 64, "num_key_value_heads": 64}
    return {
        "architectures": ["KimiK25ForConditionalGeneration"], "model_type": "kimi_k25", "vision_config": vision,
        "text_config": text, "torch_dtype": "bfloat16", "media_placeholder_token_id": 500,
    }  # fmt: skip


_INDEXER: Config = {"index_topk": 64, "index_head_dim": 128, "index_n_heads": 64}


_YARN: Config = {
    "rope_type": "yarn", "rope_theta": 10000.0, "factor": 2.0, "original_max_position_embeddings": 2048,
    "beta_fast": 32, "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 1.0,
}  # fmt: skip


def _deepseek_v32(layers: int) -> Config:
    return _mla("DeepseekV32ForCausalLM", "deepseek_v32", layers) | _INDEXER | {"rope_parameters": _YARN}


def _glm_moe_dsa(layers: int) -> Config:
    own = {
        "num_attention_heads": 64, "num_key_value_heads": 64, "qk_nope_head_dim": 192, "v_head_dim": 256,
        "index_n_heads": 32, "n_group": 1, "topk_group": 1,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
    }  # fmt: skip
    return _mla("GlmMoeDsaForCausalLM", "glm_moe_dsa", layers) | _INDEXER | own


def _minimax_m3(layers: int) -> Config:
    sparse = [0] + [1] * (layers - 1)
    text = _shared("MiniMaxM3SparseForCausalLM", "minimax_m3", layers) | {
        "num_attention_heads": 64, "num_key_value_heads": 4, "head_dim": 128, "rotary_dim": 64,
        "dense_intermediate_size": 512, "shared_intermediate_size": 128, "num_local_experts": _EXPERTS,
        "moe_layer_freq": sparse, "hidden_act": "swigluoai",
        "sparse_attention_config": {
            "use_sparse_attention": True, "sparse_index_dim": 128, "sparse_num_index_heads": 4,
            "sparse_topk_blocks": 16, "sparse_block_size": 128, "sparse_disable_index_value": sparse,
            "sparse_score_type": "max", "sparse_init_block": 0, "sparse_local_block": 1,
            "sparse_attention_freq": sparse,
        },
    }  # fmt: skip
    vision = {
        "hidden_size": 256, "num_attention_heads": 4, "num_hidden_layers": 1, "intermediate_size": 64,
        "img_token_compression_config": {"spatial_merge_size": 2, "temporal_patch_size": 2}, "layer_norm_eps": 1e-6,
        "num_channels": 3, "patch_size": 14, "image_size": 56, "hidden_act": "gelu", "attention_dropout": 0.0,
        "rope_theta": 10000.0,
    }  # fmt: skip
    return {
        "architectures": ["MiniMaxM3SparseForConditionalGeneration"], "model_type": "minimax_m3_vl",
        "text_config": text, "vision_config": vision, "torch_dtype": "bfloat16",
    }  # fmt: skip


def _qwen3_5(layers: int, *, experts: bool) -> Config:
    kind = "qwen3_5_moe" if experts else "qwen3_5"
    text = _shared("", f"{kind}_text", layers) | {
        "num_attention_heads": 32 if experts else 24, "num_key_value_heads": 2 if experts else 4, "head_dim": 256,
        "linear_num_key_heads": 16, "linear_num_value_heads": 64 if experts else 48, "linear_key_head_dim": 128,
        "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4, "full_attention_interval": 4,
        "mtp_num_hidden_layers": 1, "shared_expert_intermediate_size": 128, "mamba_ssm_dtype": "float32",
        "rope_parameters": {
            "rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25, "mrope_section": [11, 11, 10],
            "mrope_interleaved": True,
        },
    }  # fmt: skip
    if experts:
        text["num_experts"] = _EXPERTS
    vision = {
        "model_type": kind, "depth": 1, "hidden_size": 64, "num_heads": 16, "intermediate_size": 64,
        "out_hidden_size": _HIDDEN, "patch_size": 16, "spatial_merge_size": 2, "temporal_patch_size": 2,
        "deepstack_visual_indexes": [],
    }  # fmt: skip
    name = "Qwen3_5MoeForConditionalGeneration" if experts else "Qwen3_5ForConditionalGeneration"
    del text["architectures"]
    return {
        "architectures": [name], "model_type": kind, "text_config": text, "vision_config": vision,
        "torch_dtype": "bfloat16", "tie_word_embeddings": False, "image_token_id": 500, "video_token_id": 501,
        "vision_start_token_id": 502, "vision_end_token_id": 503,
    }  # fmt: skip


def _deepseek_v4(layers: int) -> Config:
    """Sliding windows first, then layers of both compressions; a draft has a window only."""
    rope = {
        "rope_type": "yarn", "type": "yarn", "rope_theta": 10000.0, "factor": 16.0, "beta_fast": 32, "beta_slow": 1,
        "original_max_position_embeddings": 4096,
    }  # fmt: skip
    return _shared("DeepseekV4ForCausalLM", "deepseek_v4", layers) | {
        "num_attention_heads": 64, "num_key_value_heads": 1, "head_dim": 512, "qk_rope_head_dim": 64,
        "q_lora_rank": 64, "o_lora_rank": 64, "o_groups": 16, "sliding_window": 128,
        "compress_ratios": [*[0, 0, *([4, 128] * layers)][:layers], 0], "compress_rope_theta": 160000.0,
        "rope_theta": 10000.0, "rope_scaling": rope, "n_routed_experts": _EXPERTS, "n_shared_experts": 1,
        "num_hash_layers": 1, "norm_topk_prob": True, "routed_scaling_factor": 1.5, "scoring_func": "sqrtsoftplus",
        "topk_method": "noaux_tc", "hc_mult": 4, "hc_eps": 1e-6, "hc_sinkhorn_iters": 20, "swiglu_limit": 10.0,
        "num_nextn_predict_layers": 1, "dspark_markov_rank": 16, "dspark_block_size": 6,
        "dspark_target_layer_ids": [1, 2], "dspark_num_mtp_layers": 3, "dspark_n_routed_experts": _EXPERTS,
        "n_mtp_layers": 3, "n_group": 1,
        "topk_group": 1,
    } | _INDEXER  # fmt: skip


def _glm5_next(layers: int) -> Config:
    """Three layers in four are linear attention."""
    sparse = [(layer + 1) % 4 == 0 for layer in range(layers)]
    text = _shared("", "glm5_next_text", layers) | {
        "num_attention_heads": 64, "num_key_value_heads": 64, "head_dim": 256, "kv_lora_rank": 512, "q_lora_rank": 64,
        "qk_nope_head_dim": 256, "qk_rope_head_dim": 0, "v_head_dim": 256, "n_routed_experts": _EXPERTS,
        "n_shared_experts": 1, "first_k_dense_replace": 1, "num_nextn_predict_layers": 1, "index_kpool": 4,
        "layer_types": ["deepseek_sparse_attention" if each else "linear_attention" for each in sparse],
        "linear_head_dim": 128, "linear_num_heads": 64, "linear_conv_kernel_dim": 4,
    } | _INDEXER  # fmt: skip
    del text["architectures"]
    return text | {"architectures": ["Glm5NextForCausalLM"]}


def _deepseek_v41(layers: int) -> Config:
    own = {
        "compress_ratios": [0, *([2] * (layers - 1))], "kv_source_layer_ids": [1, 4, 7],
        "index_source_layer_ids": [1, 4, 7], "engram_layer_ids": [1], "engram_num_embeddings": [1092],
        "engram_max_ngram_size": 4, "engram_vocab_size": 64, "engram_n_heads": 4, "engram_head_dim": 32,
        "engram_pad_token_id": 0, "engram_compressed_vocab_size": _VOCABULARY, "candidate_source_layer_id": 1,
        "candidate_topk_blocks": 8, "candidate_block_size": 64,
    }  # fmt: skip
    text = _deepseek_v4(layers) | own | {"model_type": "deepseek_v41_text", "num_nextn_predict_layers": 3}
    return {
        "architectures": ["DeepseekV41ForCausalLM"], "model_type": "deepseek_v41", "text_config": text,
        "vision_config": {}, "torch_dtype": "bfloat16",
    }  # fmt: skip


#: Recipes by the beginnings of their names.
_FAMILIES = (
    ("qwen3-235b", "qwen3_moe"),
    ("qwen3-vl", "qwen3_vl_moe"),
    ("glm4x", "glm4_moe"),
    ("minimax-m2", "minimax_m2"),
    ("dsv31", "deepseek_v3"),
    ("kimi", "kimi_k25"),
    ("dsv32", "deepseek_v32"),
    ("glm53-flash", "glm5_next"),
    ("glm5", "glm_moe_dsa"),
    ("minimax-m3", "minimax_m3"),
    ("qwen35-397b", "qwen3_5_moe"),
    ("qwen35-27b", "qwen3_5"),
    ("dsv41", "deepseek_v41"),
    ("dsv4", "deepseek_v4"),
)
_MODELS: dict[str, Callable[[int], Config]] = {
    "qwen3_moe": _qwen3_moe,
    "qwen3_vl_moe": _qwen3_vl_moe,
    "glm4_moe": _glm4_moe,
    "minimax_m2": _minimax_m2,
    "deepseek_v3": _deepseek_v3,
    "kimi_k25": _kimi_k25,
    "deepseek_v32": _deepseek_v32,
    "glm_moe_dsa": _glm_moe_dsa,
    "minimax_m3": _minimax_m3,
    "qwen3_5_moe": partial(_qwen3_5, experts=True),
    "qwen3_5": partial(_qwen3_5, experts=False),
    "deepseek_v4": _deepseek_v4,
    "glm5_next": _glm5_next,
    "deepseek_v41": _deepseek_v41,
}


def _eagle3(recipe: Recipe) -> Config:
    """Attention by head, or MLA, which Kimi's drafts are published with as well."""
    own = {"draft_vocab_size": _VOCABULARY}
    if recipe.name.startswith("kimi-k26"):
        return _mla("Eagle3DeepseekV2ForCausalLM", "deepseek_v2", 1) | own | {"rope_parameters": _YARN}
    heads = 64 if recipe.name.startswith("kimi") else 8
    return _shared("LlamaForCausalLMEagle3", "llama", 1) | {
        "num_attention_heads": 64, "num_key_value_heads": heads, "head_dim": 128,
    } | own  # fmt: skip
