"""DeepSeek-V4 and V4.1 as test models: windows, compressed caches, indexers, states of compressors. No CPU serves them.

V4's layers are of three kinds: two with a window only, then by turns of ratio 4 with an indexer, and of ratio 128.
V4.1's read compressed caches and selected rows of layers before them, see ``_V41``; a compressor's state is a ring, and
at ratio 1 there is none; and a table is read by the last tokens (Engram). Every layer has a mixture of experts; those
of V4's first layer are chosen by a token's id.
"""

import math

import numpy as np

from tests.support.e2e.architectures import (
    HEADS,
    HIDDEN,
    INITIALIZER_RANGE,
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
#: Layers of V4.1 that have compressed caches of their own, and those that have an indexer.
_SOURCES, _INDEXERS = (1, 3), (1, 3, 4)
#: Its layers: a window only; rows of 2 tokens, and a layer that reads them, too; rows of 1 token, whose indexer also
#: finds candidates; an indexer that selects among them; and a layer that reads what it selects.
_V41: dict[str, object] = {
    "compress_ratios": [0, 2, 2, 1, 1, 1],
    "kv_source_layer_ids": [*_SOURCES],
    "index_source_layer_ids": [*_INDEXERS],
    "candidate_source_layer_id": 3,
    "candidate_topk_blocks": 16,
    "candidate_block_size": 8,
}
_TABLE_LAYER, _NGRAM, _TABLE_HEADS, _TABLE_SIZE = 1, 4, 2, 32
#: Numbers of rows for each head of each number of tokens: the first primes from the last power of two on.
_TABLE_ROWS = (67, 71, 73, 79, 83, 89)
#: What the test models' tokens are to a table, for which letters are alike in both cases.
_TABLE_NAMES = 483
_TABLE_SCALE = 2.0**-9
_TABLE = f"layers.{_TABLE_LAYER}.engram.embed"
#: vLLM reads a table from where an index says it is.
_INDEX = {"weight_map": {f"{_TABLE}.{part}": "model.safetensors" for part in ("weight", "scale")}}
#: Of its keys: queries are not normalised by head.
_V41_SHARPNESS = SHARPNESS / (INITIALIZER_RANGE * math.sqrt(_QUERY_RANK))


def _ratio(layer: int) -> int:
    """Tokens for which a compressed row of a layer of V4 stands; 0 where there is none."""
    return 0 if layer < 2 else (4, 128)[layer % 2]


def _config(layers: int, kv_heads: int) -> dict[str, object]:
    own = {"compress_ratios": [*map(_ratio, range(layers)), 0], "num_hash_layers": 1, "num_nextn_predict_layers": 1}
    return {"architectures": ["DeepseekV4ForCausalLM"], "model_type": "deepseek_v4"} | _shared_by_both() | own


def _config_of_v41(layers: int, kv_heads: int) -> dict[str, object]:
    table = {
        "engram_layer_ids": [_TABLE_LAYER],
        "engram_num_embeddings": [sum(_TABLE_ROWS)],
        "engram_max_ngram_size": _NGRAM,
        "engram_vocab_size": 64,
        "engram_n_heads": _TABLE_HEADS,
        "engram_head_dim": _TABLE_SIZE,
        "engram_pad_token_id": 0,
        "engram_compressed_vocab_size": _TABLE_NAMES,
    }
    text = _shared_by_both()
    return {
        "architectures": ["DeepseekV41ForCausalLM"],
        "model_type": "deepseek_v41",
        "num_key_value_heads": 1,
        "max_position_embeddings": text["max_position_embeddings"],
        "image_token_id": 2 * VOCABULARY,  # of none
        "text_config": text | _V41 | table | {"model_type": "deepseek_v41_text"},
        "vision_config": {},
    }


def _shared_by_both() -> dict[str, object]:
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
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.5,
        "scoring_func": "sqrtsoftplus",
        "topk_method": "noaux_tc",
        "n_group": 1,
        "topk_group": 1,
        "hc_mult": _STREAMS,
        "hc_eps": 1e-6,
        "hc_sinkhorn_iters": 20,
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
    """What a layer of V4 has by its number: how its experts are chosen, compressors, an indexer."""
    if number == 0:
        token, place = np.indices((VOCABULARY, _CHOSEN), np.float32)
        own = {"mlp.gate.tid2eid": (token + 3 * place) % _EXPERTS}
    else:
        own = {"mlp.gate.e_score_correction_bias": draw(1, _EXPERTS)[0]}
    if ratio := _ratio(number):
        own |= _compressor(draw, "self_attn.compressor", ratio, _SIZE)
    if ratio == 4:
        own |= _compressor(draw, "self_attn.indexer.compressor", ratio, _INDEX_SIZE) | _index_queries(draw)
    return own


def _index_queries(draw: Draw) -> Weights:
    return {
        "self_attn.indexer.wq_b.weight": draw(_INDEX_HEADS * _INDEX_SIZE, _QUERY_RANK),
        "self_attn.indexer.weights_proj.weight": draw(_INDEX_HEADS, HIDDEN),
    }


def _own_of_v41(draw: Draw, number: int, kv_heads: int) -> Weights:
    """The same of V4.1."""
    own = {
        "mlp.gate.e_score_correction_bias": draw(1, _EXPERTS)[0],
        "self_attn.kv_norm.weight": constant(_SIZE, _V41_SHARPNESS),
    }
    if number in _INDEXERS:
        own |= _index_queries(draw)
    if number in _SOURCES:
        own |= {
            "self_attn.compressor.wkv.weight": draw(_SIZE, HIDDEN),
            "self_attn.compressor.norm.weight": constant(_SIZE, _V41_SHARPNESS),
            "self_attn.indexer.wk.weight": draw(_INDEX_SIZE, _SIZE),
            "self_attn.indexer.k_norm.weight": constant(_INDEX_SIZE),
        }
    if number == _SOURCES[0]:
        own["self_attn.compressor.wgate.weight"] = draw(_SIZE, HIDDEN)
    if number == _TABLE_LAYER:
        own["engram.wkv.weight"] = draw((_STREAMS + 1) * HIDDEN, (_NGRAM - 1) * _TABLE_HEADS * _TABLE_SIZE)
        own |= {f"engram.{each}_weight": np.ones((_STREAMS, HIDDEN), np.float32) for each in "qk"}
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


def _table(draw: Draw) -> Weights:
    """In int8, with a scale for 32 numbers."""
    rows = sum(_TABLE_ROWS)
    return {
        f"{_TABLE}.weight": (draw(rows, _TABLE_SIZE) * 300).clip(-127, 127).astype(np.int8),
        f"{_TABLE}.scale": np.full((rows, _TABLE_SIZE // 32), _TABLE_SCALE, np.float32),
    }


#: Pulls begin where rows of every cache do, at multiples of 4 rows of ratio 128.
COMPRESSED_MODEL = Architecture(_config, _layer, own=_own, beside=_head, unit_tokens=512)
V41_MODEL = Architecture(
    _config_of_v41, _layer, own=_own_of_v41, beside=_table, files={"model.safetensors.index.json": _INDEX}
)
