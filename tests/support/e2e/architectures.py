"""The architectures that the test models have: configurations and random weights, in the names of checkpoints.

Each keeps another kind of KV cache: keys and values of every head and token (Qwen3), the same for some layers and only
a window of it for the others (Gemma3), one latent vector a token for all heads (DeepSeek-V2), the same beside a key by
which an indexer selects the tokens that are attended to (DeepSeek-V3.2 and GLM-5, which no CPU serves), keys and values
beside such a key, which selects blocks (MiniMax-M3, neither), keys that are rotated by other factors in long contexts
(Phi-3). Llama keeps what Qwen3 does and normalises neither queries nor keys, as drafts of EAGLE-3 do not. Idefics3 is
Llama that reads images, too; they can be prepared without torchvision. The weights are wide and the attention is sharp;
``models`` says why.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

VOCABULARY = 512
MAX_POSITIONS = 4096
HIDDEN = 256
HEADS = 8
HEAD_SIZE = 32
INTERMEDIATE = 512
INITIALIZER_RANGE = 0.15
#: The deviation of the attention logits. With 1, the usual, a query averages over a thousand tokens and no single one
#: matters; with much more it sees one token and the others do not matter.
SHARPNESS = 4.0

#: Tokens that Gemma3's layers with a sliding window see, and one in how many layers has full attention.
WINDOW = 128
FULL_ATTENTION_EVERY = 3

#: Sizes of DeepSeek-V2's attention: vLLM's CPU kernel knows these of the latent vector (rank + rope) only.
LATENT_RANK = 512
ROPE_SIZE = 64
NOPE_SIZE = 128
VALUE_SIZE = 128

#: Tokens that DeepSeek-V3.2's indexer selects: what vllm-ascend asks of it, whatever a configuration says.
SELECTED = 2048
#: The indexer's heads, its keys' size, which is the only one that NPUs know, and the rank of all queries.
_INDEX_HEADS = 8
_INDEX_SIZE = 128
_QUERY_RANK = 128

#: Blocks that MiniMax-M3's indexer selects.
SELECTED_BLOCKS = 4
#: The size of its heads, and the tokens of such a block: the only ones that NPUs know.
_M3_SIZE = 128

#: A ``--max-model-len`` above this takes Phi-3's rotary embedding from its short to its long factors, for all tokens.
SHORT_CONTEXT = 256

#: Idefics3: a square image's side and that of its patches, in pixels, and those of a square of patches that make one
#: token. A vision tower of its own width.
IMAGE_SIZE = 64
_PATCH_SIZE = 4
_PATCHES_A_TOKEN = 2
_VISION_HIDDEN = 64
_VISION_HEADS = 2
_VISION_LAYERS = 2
#: Tokens of an image in a prompt: those that hold it, with three around them.
IMAGE_TOKENS = (IMAGE_SIZE // _PATCH_SIZE // _PATCHES_A_TOKEN) ** 2 + 3
_IMAGE_TOKEN = "<image>"
#: Ends an answer, if the tokenizer has it.
END_TOKEN = "<end_of_utterance>"
_IMAGE_MARKS = ("<fake_token_around_image>", "<global-img>", END_TOKEN, _IMAGE_TOKEN)

#: What reasoning parsers of vLLM look for: in the text, so no special tokens.
THINKING_MARKS = ("<think>", "</think>")

Name = Literal[
    "qwen3", "gemma3", "deepseek_v2", "deepseek_v32", "deepseek_v4", "deepseek_v41", "glm5_next", "glm_moe_dsa",
    "llama", "minimax_m3", "phi3", "idefics3",
]  # fmt: skip
Matrix = npt.NDArray[np.float32]
#: By their names in a checkpoint: matrices, or what is quantised.
Weights = dict[str, npt.NDArray[Any]]
#: A random matrix of (rows, columns) with the deviation ``INITIALIZER_RANGE``.
Draw = Callable[[int, int], Matrix]


@dataclass(frozen=True, slots=True)
class Architecture:
    """What a checkpoint of one architecture consists of, beside embeddings and tokenizer."""

    config: Callable[[int, int], dict[str, object]]  # layers, KV heads -> what differs from ``shared_config``
    layer: Callable[[Draw, int], Weights]  # draw, KV heads -> one layer's weights, without the layer's prefix
    plain_norm: float = 1.0  # the weight with which a norm does not scale
    cpu_arguments: tuple[str, ...] = ()
    text_model: str = "model"  # where a checkpoint has embeddings and layers
    #: draw, number of a layer, KV heads -> what else it has
    own: Callable[[Draw, int, int], Weights] = lambda draw, number, kv_heads: {}
    beside: Callable[[Draw], Weights] = lambda draw: {}  # what there is beside the layers, by its whole names
    special_tokens: tuple[str, ...] = ()  # of the tokenizer; the last ones of the vocabulary
    unit_tokens: int = 1  # at whose multiples pulls of its caches begin
    files: Mapping[str, object] = field(default_factory=dict)  # more JSON files of the checkpoint, by name


def shared_config(layers: int, kv_heads: int) -> dict[str, object]:
    """What all architectures call by the same name."""
    return {
        "vocab_size": VOCABULARY,
        "hidden_size": HIDDEN,
        "intermediate_size": INTERMEDIATE,
        "num_hidden_layers": layers,
        "num_attention_heads": HEADS,
        "num_key_value_heads": kv_heads,
        "max_position_embeddings": MAX_POSITIONS,
        "initializer_range": INITIALIZER_RANGE,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "use_cache": True,
        "bos_token_id": None,
        "eos_token_id": None,
        "torch_dtype": "float32",
    }


def constant(size: int, value: float = 1.0) -> Matrix:
    """A vector of one number."""
    return np.full(size, value, np.float32)


def _attention(draw: Draw, kv_heads: int, plain_norm: float) -> Weights:
    """Attention over normalised queries and keys of ``HEAD_SIZE``."""
    return {
        "self_attn.q_proj.weight": draw(HEADS * HEAD_SIZE, HIDDEN),
        "self_attn.k_proj.weight": draw(kv_heads * HEAD_SIZE, HIDDEN),
        "self_attn.v_proj.weight": draw(kv_heads * HEAD_SIZE, HIDDEN),
        "self_attn.o_proj.weight": draw(HIDDEN, HEADS * HEAD_SIZE),
        "self_attn.q_norm.weight": constant(HEAD_SIZE, SHARPNESS - 1.0 + plain_norm),
        "self_attn.k_norm.weight": constant(HEAD_SIZE, plain_norm),
    }


def _mlp(draw: Draw) -> Weights:
    return {
        "mlp.gate_proj.weight": draw(INTERMEDIATE, HIDDEN),
        "mlp.up_proj.weight": draw(INTERMEDIATE, HIDDEN),
        "mlp.down_proj.weight": draw(HIDDEN, INTERMEDIATE),
    }


def _norms(plain_norm: float, *names: str) -> Weights:
    return {f"{name}.weight": constant(HIDDEN, plain_norm) for name in names}


def _qwen3_config(layers: int, kv_heads: int) -> dict[str, object]:
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "head_dim": HEAD_SIZE,
        "hidden_act": "silu",
        "rope_theta": 10000.0,
    }


def _qwen3_layer(draw: Draw, kv_heads: int) -> Weights:
    return _norms(1.0, "input_layernorm", "post_attention_layernorm") | _attention(draw, kv_heads, 1.0) | _mlp(draw)


def _gemma3_config(layers: int, kv_heads: int) -> dict[str, object]:
    is_full = [(layer + 1) % FULL_ATTENTION_EVERY == 0 for layer in range(layers)]
    return {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "head_dim": HEAD_SIZE,
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": HEAD_SIZE,
        "sliding_window": WINDOW,
        "layer_types": ["full_attention" if full else "sliding_attention" for full in is_full],
        "rope_parameters": {
            kind: {"rope_type": "default", "rope_theta": 10000.0} for kind in ("full_attention", "sliding_attention")
        },
        "pad_token_id": None,
    }


def _gemma3_layer(draw: Draw, kv_heads: int) -> Weights:
    """Gemma's norms scale by one plus their weight."""
    norms = ("input", "post_attention", "pre_feedforward", "post_feedforward")
    return _norms(0.0, *(f"{name}_layernorm" for name in norms)) | _attention(draw, kv_heads, 0.0) | _mlp(draw)


def _deepseek_v2_config(layers: int, kv_heads: int) -> dict[str, object]:
    # Scaled as in DeepSeek's own checkpoints: vLLM 0.32's CPU kernel for unscaled rotary embeddings rotates the wrong
    # parts of MLA's queries and keys, other ones in other batches, so that no two runs would agree.
    rope = {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 2.0,
        "original_max_position_embeddings": MAX_POSITIONS // 2,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    }
    return {
        "architectures": ["DeepseekV2ForCausalLM"],
        "model_type": "deepseek_v2",
        "num_key_value_heads": HEADS,  # what the latent vector is expanded to
        "hidden_act": "silu",
        "rope_parameters": rope,
        "q_lora_rank": None,
        "kv_lora_rank": LATENT_RANK,
        "qk_rope_head_dim": ROPE_SIZE,
        "qk_nope_head_dim": NOPE_SIZE,
        "v_head_dim": VALUE_SIZE,
        "first_k_dense_replace": layers + 1,  # no mixture of experts, nor in a layer that drafts
    }


def _deepseek_v2_layer(draw: Draw, kv_heads: int) -> Weights:
    key_size = NOPE_SIZE + ROPE_SIZE
    # Deviations of what the projections make of normalised inputs; only the latent vector is normalised again.
    projected, expanded = INITIALIZER_RANGE * math.sqrt(HIDDEN), INITIALIZER_RANGE * math.sqrt(LATENT_RANK)
    logits = projected * math.sqrt((NOPE_SIZE * expanded**2 + ROPE_SIZE * projected**2) / key_size)
    return {
        **_norms(1.0, "input_layernorm", "post_attention_layernorm"),
        "self_attn.q_proj.weight": draw(HEADS * key_size, HIDDEN) * np.float32(SHARPNESS / logits),
        "self_attn.kv_a_proj_with_mqa.weight": draw(LATENT_RANK + ROPE_SIZE, HIDDEN),
        "self_attn.kv_a_layernorm.weight": constant(LATENT_RANK),
        "self_attn.kv_b_proj.weight": draw(HEADS * (NOPE_SIZE + VALUE_SIZE), LATENT_RANK),
        "self_attn.o_proj.weight": draw(HIDDEN, HEADS * VALUE_SIZE),
        **_mlp(draw),
    }


def _deepseek_v32_config(layers: int, kv_heads: int) -> dict[str, object]:
    return _deepseek_v2_config(layers, kv_heads) | {
        "architectures": ["DeepseekV32ForCausalLM"],
        "model_type": "deepseek_v32",
        "q_lora_rank": _QUERY_RANK,
        "index_topk": SELECTED,
        "index_n_heads": _INDEX_HEADS,
        "index_head_dim": _INDEX_SIZE,
    }


def _deepseek_v32_layer(draw: Draw, kv_heads: int) -> Weights:
    """DeepSeek-V2's, with queries through a vector of lower rank that is normalised, and an indexer."""
    layer = _deepseek_v2_layer(draw, kv_heads)
    queries = layer.pop("self_attn.q_proj.weight")[:, :_QUERY_RANK] * np.float32(math.sqrt(HIDDEN / _QUERY_RANK))
    return {
        **layer,
        "self_attn.q_a_proj.weight": draw(_QUERY_RANK, HIDDEN),
        "self_attn.q_a_layernorm.weight": constant(_QUERY_RANK),
        "self_attn.q_b_proj.weight": queries,
        "self_attn.indexer.wq_b.weight": draw(_INDEX_HEADS * _INDEX_SIZE, _QUERY_RANK),
        "self_attn.indexer.wk.weight": draw(_INDEX_SIZE, HIDDEN),
        "self_attn.indexer.k_norm.weight": constant(_INDEX_SIZE),
        "self_attn.indexer.k_norm.bias": constant(_INDEX_SIZE, 0.0),
        "self_attn.indexer.weights_proj.weight": draw(_INDEX_HEADS, HIDDEN),
    }


def _glm_moe_dsa_config(layers: int, kv_heads: int) -> dict[str, object]:
    """GLM-5's, without its mixture of experts, too."""
    return _deepseek_v32_config(layers, kv_heads) | {
        "architectures": ["GlmMoeDsaForCausalLM"],
        "model_type": "glm_moe_dsa",
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    }


def _glm_moe_dsa_layer(draw: Draw, kv_heads: int) -> Weights:
    """DeepSeek-V3.2's, with the same bits on one rank and on two."""
    layer = _deepseek_v32_layer(draw, kv_heads)
    for name in ("self_attn.o_proj.weight", "mlp.down_proj.weight"):
        layer[name] = one_rank_each(layer[name])
    return layer


def one_rank_each(weight: Matrix) -> Matrix:
    """Weights of as large outputs; where two ranks add up what each makes of half of the inputs, one adds zeros.

    So the sums have the same bits on one rank and on two, also in bfloat16.
    """
    weight = weight * np.float32(math.sqrt(2))
    half = weight.shape[1] // 2
    weight[::2, :half] = 0
    weight[1::2, half:] = 0
    return weight


def _minimax_m3_config(layers: int, kv_heads: int) -> dict[str, object]:
    sparse = {
        "use_sparse_attention": True,
        "sparse_index_dim": _M3_SIZE,
        "sparse_num_index_heads": kv_heads,
        "sparse_topk_blocks": SELECTED_BLOCKS,
        "sparse_block_size": _M3_SIZE,
        "sparse_disable_index_value": [1] * layers,
        "sparse_score_type": "max",
        "sparse_init_block": 0,
        "sparse_local_block": 1,
        "sparse_attention_freq": [0] + [1] * (layers - 1),
    }
    text = {
        "architectures": ["MiniMaxM3SparseForCausalLM"],
        "model_type": "minimax_m3_text",
        "head_dim": _M3_SIZE,
        "rotary_dim": _M3_SIZE // 2,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
        "dense_intermediate_size": INTERMEDIATE,
        "moe_layer_freq": [0] * layers,  # no mixture of experts
        "sparse_attention_config": sparse,
    }
    return {
        "architectures": ["MiniMaxM3SparseForCausalLM"],
        "model_type": "minimax_m3_vl",
        "text_config": shared_config(layers, kv_heads) | text,
    }


def _minimax_m3_layer(draw: Draw, kv_heads: int) -> Weights:
    """Attention as in Qwen3, with larger heads, and norms as in Gemma; the same bits on one rank and on two."""
    size, mlp = _M3_SIZE, _mlp(draw)
    return {
        **_norms(0.0, "input_layernorm", "post_attention_layernorm"),
        "self_attn.q_proj.weight": draw(HEADS * size, HIDDEN),
        "self_attn.k_proj.weight": draw(kv_heads * size, HIDDEN),
        "self_attn.v_proj.weight": draw(kv_heads * size, HIDDEN),
        "self_attn.o_proj.weight": one_rank_each(draw(HIDDEN, HEADS * size)),
        "self_attn.q_norm.weight": constant(size, SHARPNESS - 1.0),
        "self_attn.k_norm.weight": constant(size, 0.0),
        **mlp,
        "mlp.down_proj.weight": one_rank_each(mlp["mlp.down_proj.weight"]),
    }


def _minimax_m3_indexer(draw: Draw, number: int, kv_heads: int) -> Weights:
    """An indexer with a head for each of keys, in all layers but the first one, which attends to all tokens."""
    if number == 0:
        return {}
    return {
        "self_attn.index_q_proj.weight": draw(kv_heads * _M3_SIZE, HIDDEN),
        "self_attn.index_k_proj.weight": draw(_M3_SIZE, HIDDEN),
        "self_attn.index_q_norm.weight": constant(_M3_SIZE, 0.0),
        "self_attn.index_k_norm.weight": constant(_M3_SIZE, 0.0),
    }


def _phi3_config(layers: int, kv_heads: int) -> dict[str, object]:
    halves = HEAD_SIZE // 2
    return {
        "architectures": ["Phi3ForCausalLM"],
        "model_type": "phi3",
        "hidden_act": "silu",
        "original_max_position_embeddings": SHORT_CONTEXT,
        "rope_theta": 10000.0,
        "rope_scaling": {
            "type": "longrope",
            "short_factor": [1.0] * halves,
            "long_factor": [1.0 + number for number in range(halves)],
        },
        "sliding_window": None,
        "pad_token_id": None,
    }


def _phi3_layer(draw: Draw, kv_heads: int) -> Weights:
    """Q, K and V in one matrix. Nothing normalises queries and keys, so the queries' rows make the attention sharp."""
    projected = INITIALIZER_RANGE * math.sqrt(HIDDEN)
    queries = draw(HEADS * HEAD_SIZE, HIDDEN) * np.float32(SHARPNESS / projected**2)
    others = draw(2 * kv_heads * HEAD_SIZE, HIDDEN)
    return {
        **_norms(1.0, "input_layernorm", "post_attention_layernorm"),
        "self_attn.qkv_proj.weight": np.concatenate([queries, others]),
        "self_attn.o_proj.weight": draw(HIDDEN, HEADS * HEAD_SIZE),
        "mlp.gate_up_proj.weight": draw(2 * INTERMEDIATE, HIDDEN),
        "mlp.down_proj.weight": draw(HIDDEN, INTERMEDIATE),
    }


_LLAMA = {"model_type": "llama", "head_dim": HEAD_SIZE, "hidden_act": "silu", "rope_theta": 10000.0}


def _llama_config(layers: int, kv_heads: int) -> dict[str, object]:
    return {"architectures": ["LlamaForCausalLM"], **_LLAMA}


def _idefics3_config(layers: int, kv_heads: int) -> dict[str, object]:
    vision = {
        "model_type": "idefics3_vision",
        "hidden_size": _VISION_HIDDEN,
        "intermediate_size": 2 * _VISION_HIDDEN,
        "num_hidden_layers": _VISION_LAYERS,
        "num_attention_heads": _VISION_HEADS,
        "image_size": IMAGE_SIZE,
        "patch_size": _PATCH_SIZE,
    }
    return {
        "architectures": ["Idefics3ForConditionalGeneration"],
        "model_type": "idefics3",
        "image_token_id": VOCABULARY - 1,
        "pad_token_id": None,
        "scale_factor": _PATCHES_A_TOKEN,
        "text_config": shared_config(layers, kv_heads) | _LLAMA,
        "vision_config": vision,
    }


def _llama_layer(draw: Draw, kv_heads: int) -> Weights:
    """Nothing normalises queries: their weights make the attention sharp."""
    projected = INITIALIZER_RANGE * math.sqrt(HIDDEN)
    attention = {name: weight for name, weight in _attention(draw, kv_heads, 1.0).items() if "norm" not in name}
    attention["self_attn.q_proj.weight"] *= np.float32(SHARPNESS / projected**2)
    return _norms(1.0, "input_layernorm", "post_attention_layernorm") | attention | _mlp(draw)


def _idefics3_vision(draw: Draw) -> Weights:
    """A vision tower, and what makes its output as large as embeddings."""
    patch, token = 3 * _PATCH_SIZE**2, _VISION_HIDDEN * _PATCHES_A_TOKEN**2

    def linear(name: str, rows: int, columns: int) -> Weights:
        return {f"{name}.weight": draw(rows, columns), f"{name}.bias": constant(rows, 0.0)}

    def norm(name: str) -> Weights:
        return {f"{name}.weight": constant(_VISION_HIDDEN), f"{name}.bias": constant(_VISION_HIDDEN, 0.0)}

    tower = {
        "embeddings.patch_embedding.weight": draw(_VISION_HIDDEN, patch).reshape(-1, 3, _PATCH_SIZE, _PATCH_SIZE),
        "embeddings.patch_embedding.bias": constant(_VISION_HIDDEN, 0.0),
        "embeddings.position_embedding.weight": draw((IMAGE_SIZE // _PATCH_SIZE) ** 2, _VISION_HIDDEN),
        **norm("post_layernorm"),
    }
    for layer in range(_VISION_LAYERS):
        attention = [f"self_attn.{name}" for name in ("q_proj", "k_proj", "v_proj", "out_proj")]
        parts = [linear(name, _VISION_HIDDEN, _VISION_HIDDEN) for name in attention]
        parts += [linear("mlp.fc1", 2 * _VISION_HIDDEN, _VISION_HIDDEN)]
        parts += [linear("mlp.fc2", _VISION_HIDDEN, 2 * _VISION_HIDDEN)]
        parts += [norm("layer_norm1"), norm("layer_norm2")]
        for part in parts:
            tower |= {f"encoder.layers.{layer}.{name}": weight for name, weight in part.items()}
    projection = draw(HIDDEN, token) / np.float32(math.sqrt(token))
    return {
        "model.connector.modality_projection.proj.weight": projection,
        **{f"model.vision_model.{name}": weight for name, weight in tower.items()},
    }


#: A chat template, with or without tools.
PARTS_IN_ORDER = (
    "{% for message in messages %}{% for part in message['content'] %}"
    f"{{% if part['type'] == 'text' %}}{{{{ part['text'] }}}}{{% else %}}{_IMAGE_TOKEN}{{% endif %}}"
    "{% endfor %}{% endfor %}"
)
_IDEFICS3_FILES = {
    "preprocessor_config.json": {
        "image_processor_type": "Idefics3ImageProcessor",
        "do_image_splitting": False,
        "size": {"longest_edge": IMAGE_SIZE},
        "max_image_size": {"longest_edge": IMAGE_SIZE},
    },
    "processor_config.json": {"processor_class": "Idefics3Processor", "image_seq_len": IMAGE_TOKENS - 3},
}

#: But for DeepSeek-V4's and GLM-5.3-Flash's, which have modules of their own.
ARCHITECTURES: Mapping[Name, Architecture] = {
    "qwen3": Architecture(_qwen3_config, _qwen3_layer),
    "gemma3": Architecture(_gemma3_config, _gemma3_layer, plain_norm=0.0),
    "phi3": Architecture(_phi3_config, _phi3_layer),
    "llama": Architecture(_llama_config, _llama_layer),
    # vLLM's other MLA backend, which it takes by itself where the CPU has AMX, knows bfloat16 only.
    "deepseek_v2": Architecture(
        _deepseek_v2_config, _deepseek_v2_layer, cpu_arguments=("--attention-backend", "CPU_MLA")
    ),
    "deepseek_v32": Architecture(_deepseek_v32_config, _deepseek_v32_layer),
    "glm_moe_dsa": Architecture(_glm_moe_dsa_config, _glm_moe_dsa_layer),
    "minimax_m3": Architecture(_minimax_m3_config, _minimax_m3_layer, plain_norm=0.0, own=_minimax_m3_indexer),
    "idefics3": Architecture(
        _idefics3_config,
        _llama_layer,
        text_model="model.text_model",
        beside=_idefics3_vision,
        special_tokens=THINKING_MARKS + _IMAGE_MARKS,
        files=_IDEFICS3_FILES,
    ),
}
