"""DeepSeek-V4 as a test model: windows, compressed caches of both ratios, an indexer, states of compressors.

Layers are of three kinds: two with a window only, then by turns of ratio 4 with an indexer, and of ratio 128. Every
layer has a mixture of experts; those of the first are chosen by a token's id. No CPU serves it.
"""

import numpy as np

from tests.support.e2e.architectures import (
    HEADS,
    HIDDEN,
    MAX_POSITIONS,
    SHARPNESS,
    VOCABULARY,
    WINDOW,
    Architecture,
    Draw,
    Weights,
    constant,
    one_rank_each,
)

#: Compressed rows that its indexer selects.
SELECTED_ROWS = 64
#: Sizes that are part of the form of its caches, and the only ones that NPUs know.
_SIZE, _ROPE_SIZE, _INDEX_SIZE = 512, 64, 128
_INDEX_HEADS = 8
_QUERY_RANK = 128
_OUTPUT_GROUPS, _OUTPUT_RANK = 4, 64
_STREAMS = 4
#: By how much rotary embeddings reach further than they were made for.
_LONGER = 2
_EXPERTS, _CHOSEN, _EXPERT_SIZE = 8, 2, 128
#: How unlike each other tokens' mixes of streams are.
_MIX = 0.2


def _ratio(layer: int) -> int:
    """Tokens for which a compressed row of a layer stands; 0 where there is none."""
    return 0 if layer < 2 else (4, 128)[layer % 2]


def _config(layers: int, kv_heads: int) -> dict[str, object]:
    rope = {
        "rope_type": "yarn",
        "type": "yarn",
        "rope_theta": 10000.0,
        "factor": float(_LONGER),
        "beta_fast": 32,
        "beta_slow": 1,
        "original_max_position_embeddings": MAX_POSITIONS,
    }
    return {
        "architectures": ["DeepseekV4ForCausalLM"],
        "model_type": "deepseek_v4",
        "max_position_embeddings": _LONGER * MAX_POSITIONS,
        "num_key_value_heads": 1,
        "head_dim": _SIZE,
        "qk_rope_head_dim": _ROPE_SIZE,
        "q_lora_rank": _QUERY_RANK,
        "o_lora_rank": _OUTPUT_RANK,
        "o_groups": _OUTPUT_GROUPS,
        "hidden_act": "silu",
        "swiglu_limit": 10.0,
        "sliding_window": WINDOW,
        "compress_ratios": [*map(_ratio, range(layers)), 0],
        "compress_rope_theta": 160000.0,
        "rope_theta": 10000.0,
        "rope_scaling": rope,
        "index_topk": SELECTED_ROWS,
        "index_n_heads": _INDEX_HEADS,
        "index_head_dim": _INDEX_SIZE,
        "n_routed_experts": _EXPERTS,
        "n_shared_experts": 1,
        "num_experts_per_tok": _CHOSEN,
        "moe_intermediate_size": _EXPERT_SIZE,
        "num_hash_layers": 1,
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.5,
        "scoring_func": "sqrtsoftplus",
        "topk_method": "noaux_tc",
        "n_group": 1,
        "topk_group": 1,
        "hc_mult": _STREAMS,
        "hc_eps": 1e-6,
        "hc_sinkhorn_iters": 20,
        "num_nextn_predict_layers": 1,
    }


def _layer(draw: Draw, kv_heads: int) -> Weights:
    """What all layers have. A token's key is its value, too; both are normalised to be ``SHARPNESS``."""
    mixes = _STREAMS * (2 + _STREAMS)
    layer = {
        "input_layernorm.weight": constant(HIDDEN),
        "post_attention_layernorm.weight": constant(HIDDEN),
        "self_attn.wq_a.weight": draw(_QUERY_RANK, HIDDEN),
        "self_attn.q_norm.weight": constant(_QUERY_RANK),
        "self_attn.wq_b.weight": draw(HEADS * _SIZE, _QUERY_RANK),
        "self_attn.wkv.weight": draw(_SIZE, HIDDEN),
        "self_attn.kv_norm.weight": constant(_SIZE, SHARPNESS),
        "self_attn.wo_a.weight": draw(_OUTPUT_GROUPS * _OUTPUT_RANK, HEADS * _SIZE // _OUTPUT_GROUPS),
        "self_attn.wo_b.weight": one_rank_each(draw(HIDDEN, _OUTPUT_GROUPS * _OUTPUT_RANK)),
        "self_attn.attn_sink": constant(HEADS, 0.0),
        "mlp.gate.weight": draw(_EXPERTS, HIDDEN),
    }
    for name in ("attn", "ffn"):
        layer[f"hc_{name}_fn"] = draw(mixes, _STREAMS * HIDDEN)
        layer[f"hc_{name}_base"] = constant(mixes, 0.0)
        layer[f"hc_{name}_scale"] = constant(3, _MIX)
    for name in ("shared_experts", *(f"experts.{expert}" for expert in range(_EXPERTS))):
        layer[f"mlp.{name}.gate_proj.weight"] = draw(_EXPERT_SIZE, HIDDEN)
        layer[f"mlp.{name}.up_proj.weight"] = draw(_EXPERT_SIZE, HIDDEN)
        layer[f"mlp.{name}.down_proj.weight"] = one_rank_each(draw(HIDDEN, _EXPERT_SIZE))
    return layer


def _own(draw: Draw, number: int, kv_heads: int) -> Weights:
    """What a layer has by its number: how its experts are chosen, compressors, an indexer."""
    if number == 0:
        token, place = np.indices((VOCABULARY, _CHOSEN), np.float32)
        own = {"mlp.gate.tid2eid": (token + 3 * place) % _EXPERTS}
    else:
        own = {"mlp.gate.e_score_correction_bias": draw(1, _EXPERTS)[0]}
    if ratio := _ratio(number):
        own |= _compressor(draw, "self_attn.compressor", ratio, _SIZE)
    if ratio == 4:
        own |= _compressor(draw, "self_attn.indexer.compressor", ratio, _INDEX_SIZE)
        own["self_attn.indexer.wq_b.weight"] = draw(_INDEX_HEADS * _INDEX_SIZE, _QUERY_RANK)
        own["self_attn.indexer.weights_proj.weight"] = draw(_INDEX_HEADS, HIDDEN)
    return own


def _compressor(draw: Draw, name: str, ratio: int, size: int) -> Weights:
    width = (2 if ratio == 4 else 1) * size
    return {
        f"{name}.ape": draw(ratio, width),
        f"{name}.wkv.weight": draw(width, HIDDEN),
        f"{name}.wgate.weight": draw(width, HIDDEN),
        f"{name}.norm.weight": constant(size, SHARPNESS),
    }


def _head(draw: Draw) -> Weights:
    """What the last hidden state is read by."""
    return {
        "model.hc_head_fn": draw(_STREAMS, _STREAMS * HIDDEN),
        "model.hc_head_base": constant(_STREAMS, 0.0),
        "model.hc_head_scale": constant(1, _MIX),
    }


#: Pulls begin where rows of every cache do, at multiples of 4 rows of ratio 128.
COMPRESSED_MODEL = Architecture(_config, _layer, own=_own, beside=_head, unit_tokens=512)
