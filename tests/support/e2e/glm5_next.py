"""GLM-5.3-Flash without experts: configuration and random weights, in the names of its checkpoints.

Of four layers, three are Kimi delta attention (KDA) and keep states. The other has one latent vector a token, a key of
an indexer for every few tokens, a pool, and a ring of those that are in no pool yet. Where two ranks add up what each
makes of its half of the inputs, one of them adds zeros: the sums have the same bits on one rank and on two, also in
bfloat16, which is the only type that KDA is computed in.
"""

import math

import numpy as np

from tests.support.e2e.architectures import (
    HEADS,
    HIDDEN,
    INITIALIZER_RANGE,
    INTERMEDIATE,
    LATENT_RANK,
    NOPE_SIZE,
    SHARPNESS,
    VALUE_SIZE,
    Architecture,
    Draw,
    Weights,
    constant,
    one_rank_each,
)

#: Tokens that a query attends to besides those of the pool that is open, and tokens of a pool.
SELECTED_IN_POOLS = 256
POOL = 4
_INDEX_HEADS = 8
#: The sizes of an indexer's and of KDA's heads: the only ones that NPUs know.
_HEAD_SIZE = 128
_KDA_HEADS = 2
_CONVOLUTION = 4
_QUERY_RANK = 128
#: Residual streams.
_STREAMS = 4
_LINEAR, _SPARSE = "linear_attention", "deepseek_sparse_attention"


def _kind(layer: int) -> str:
    return _SPARSE if layer % 4 == 3 else _LINEAR


def _config(layers: int, kv_heads: int) -> dict[str, object]:
    return {
        "architectures": ["Glm5NextForCausalLM"],
        "model_type": "glm5_next",
        "num_key_value_heads": HEADS,
        "hidden_act": "silu",
        "layer_types": [_kind(layer) for layer in range(layers)],
        "n_routed_experts": None,
        "num_nextn_predict_layers": 0,
        # Of an embedding that no layer applies, and that vllm-ascend does not make without columns.
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "rope_dim": 32},
        "q_lora_rank": _QUERY_RANK,
        "kv_lora_rank": LATENT_RANK,
        "qk_nope_head_dim": NOPE_SIZE,
        "qk_rope_head_dim": 0,
        "v_head_dim": VALUE_SIZE,
        "index_topk": SELECTED_IN_POOLS,
        "index_n_heads": _INDEX_HEADS,
        "index_head_dim": _HEAD_SIZE,
        "index_kpool": POOL,
        "linear_num_heads": _KDA_HEADS,
        "linear_head_dim": _HEAD_SIZE,
        "linear_conv_kernel_dim": _CONVOLUTION,
        "hc_mult": _STREAMS,
    }


def _layer(draw: Draw, kv_heads: int) -> Weights:
    """What every layer has besides attention; streams are mixed in other ways for each token."""
    mixes = 2 * _STREAMS + _STREAMS**2
    of_streams: Weights = {}
    for part in ("attn", "ffn"):
        of_streams[f"hc_{part}_fn"] = draw(mixes, _STREAMS * HIDDEN)
        of_streams[f"hc_{part}_base"] = constant(mixes, 0.0)
        of_streams[f"hc_{part}_scale"] = constant(3, 0.3)
    return of_streams | {
        "input_layernorm.weight": constant(HIDDEN),
        "post_attention_layernorm.weight": constant(HIDDEN),
        "mlp.gate_proj.weight": draw(INTERMEDIATE, HIDDEN),
        "mlp.up_proj.weight": draw(INTERMEDIATE, HIDDEN),
        "mlp.down_proj.weight": one_rank_each(draw(HIDDEN, INTERMEDIATE)),
    }


def _linear(draw: Draw) -> Weights:
    """States forget slowly, each column at another rate: else only the last tokens of a prompt would matter."""
    width = _KDA_HEADS * _HEAD_SIZE
    weights = {f"self_attn.{each}_proj.weight": draw(width, HIDDEN) for each in "qkv"}
    for each in "qkv":
        weights[f"self_attn.{each}_conv1d.weight"] = 2 * draw(width, _CONVOLUTION).reshape(width, 1, _CONVOLUTION)
    for each in "fg":
        weights[f"self_attn.{each}_a_proj.weight"] = draw(_HEAD_SIZE, HIDDEN)
        weights[f"self_attn.{each}_b_proj.weight"] = draw(width, _HEAD_SIZE) * np.float32(0.2)
    return weights | {
        "self_attn.b_proj.weight": draw(_KDA_HEADS, HIDDEN),
        "self_attn.dt_bias": np.linspace(-10.0, -4.0, width, dtype=np.float32),
        "self_attn.A_log": constant(_KDA_HEADS, 0.0),
        "self_attn.o_norm.weight": constant(_HEAD_SIZE),
        "self_attn.o_proj.weight": one_rank_each(draw(HIDDEN, width)),
    }


def _sparse(draw: Draw) -> Weights:
    # Deviation of the logits: of the normalised queries and latent vectors, times those of their projections.
    logits = INITIALIZER_RANGE**2 * math.sqrt(_QUERY_RANK * LATENT_RANK)
    return {
        "self_attn.q_a_proj.weight": draw(_QUERY_RANK, HIDDEN),
        "self_attn.q_a_layernorm.weight": constant(_QUERY_RANK),
        "self_attn.q_b_proj.weight": draw(HEADS * NOPE_SIZE, _QUERY_RANK) * np.float32(SHARPNESS / logits),
        "self_attn.kv_a_proj_with_mqa.weight": draw(LATENT_RANK, HIDDEN),
        "self_attn.kv_a_layernorm.weight": constant(LATENT_RANK),
        "self_attn.kv_b_proj.weight": draw(HEADS * (NOPE_SIZE + VALUE_SIZE), LATENT_RANK),
        "self_attn.o_proj.weight": one_rank_each(draw(HIDDEN, HEADS * VALUE_SIZE)),
        "self_attn.indexer.wq_b.weight": draw(_INDEX_HEADS * _HEAD_SIZE, _QUERY_RANK),
        "self_attn.indexer.wk.weight": draw(_HEAD_SIZE, HIDDEN),
        "self_attn.indexer.k_norm.weight": constant(_HEAD_SIZE),
        "self_attn.indexer.k_norm.bias": constant(_HEAD_SIZE, 0.0),
        "self_attn.indexer.weights_proj.weight": draw(_INDEX_HEADS, HIDDEN),
        "self_attn.indexer.index_kpool_compress_gate": draw(_HEAD_SIZE, HIDDEN),
        "self_attn.indexer.index_kpool_compress_ape": draw(POOL, _HEAD_SIZE),
    }


def _own(draw: Draw, number: int, kv_heads: int) -> Weights:
    return _linear(draw) if _kind(number) == _LINEAR else _sparse(draw)


GLM5_NEXT = Architecture(_config, _layer, own=_own)
