"""Layers that draft tokens, for random models: they mostly say what the model will say, from caches of their own.

Of a random model, no draft would be accepted, and nobody would see what the draft's cache holds. So the first layer of
the model makes most of what it says, and a copy of that layer drafts: from nearly the same tokens, by keys and values
of its own. Its drafts are right often, not always.
"""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors.numpy import save_file

from tests.support.e2e.architectures import (
    HEADS,
    HIDDEN,
    INITIALIZER_RANGE,
    LATENT_RANK,
    MAX_POSITIONS,
    NOPE_SIZE,
    ROPE_SIZE,
    SHARPNESS,
    VALUE_SIZE,
    Matrix,
    Name,
    Weights,
)

#: Where the directory of a model has a checkpoint that drafts for it by EAGLE-3.
EAGLE3 = "eagle3"
#: After which layers such a draft sees the model's hidden states.
_STATES = (1, 2, 3)
#: With which it scales what it passes on to its next step, so that it hardly matters there.
_FAINT = np.float32(1e-3)
_INPUTS = tuple(f"self_attn.{name}_proj.weight" for name in "qkv")
#: The size of its heads where the model has latent vectors, of which the second half of each half hardly rotates.
_WIDE = 256
_UNTURNED = {"rope_type": "default", "rope_theta": 1e16}
#: By which YaRN's scaling makes queries and keys longer.
_MSCALE = 1 + 0.1 * math.log(2)

#: What the other layers add, of what random weights would.
_OTHER_LAYERS = 0.15
_OUTPUTS = ("o_proj.weight", "out_proj.weight", "down_proj.weight", "wo_b.weight")


def draft_config(architecture: Name, layers: int) -> dict[str, object]:
    """What a layer that drafts changes in the configuration of a model with so many layers."""
    config: dict[str, object] = {"num_nextn_predict_layers": 1}
    if architecture == "glm5_next":
        # vllm-ascend 0.30 asks for the number of experts. The pools of a layer that drafts begin a token later than
        # those of the model, so others would be selected: all are.
        config |= {"n_routed_experts": 0, "mlp_layer_types": ["dense"] * layers, "index_topk": MAX_POSITIONS}
    return config


def add_draft(weights: Weights, layers: int, architecture: Name) -> None:
    """Add a layer that drafts to a model with so many layers."""
    if architecture == "deepseek_v4":
        _add_v4_draft(weights)
    elif architecture == "glm5_next":
        _add_glm5_next_draft(weights, layers)
    else:
        _add_deepseek_draft(weights, layers)


def _add_deepseek_draft(weights: Weights, layers: int, copied: int = 0) -> None:
    """Add a layer that drafts, as DeepSeek's models and GLM-5 have it behind the last one: a copy of the first."""
    norm = np.ones(HIDDEN, np.float32)
    draft = _emphasise(weights, copied) | {
        **dict.fromkeys(("enorm.weight", "hnorm.weight", "shared_head.norm.weight"), norm),
        "eh_proj.weight": _embeddings_only(),
        "embed_tokens.weight": weights["model.embed_tokens.weight"],
        "shared_head.head.weight": weights["lm_head.weight"],
    }
    weights |= {f"model.layers.{layers}.{name}": weight.copy() for name, weight in draft.items()}


def _add_glm5_next_draft(weights: Weights, layers: int) -> None:
    """The same of GLM-5.3-Flash: a copy of its first layer with latent vectors, before which others add nothing.

    It has one residual stream; those of the model hardly differ.
    """
    for name in weights:
        if ".hc_" in name and name.endswith("_scale"):
            weights[name] = weights[name] * _FAINT
    first = min(int(name.split(".")[2]) for name in weights if name.endswith("kv_a_layernorm.weight"))
    _add_deepseek_draft(weights, layers, first)
    for name in [name for name in weights if name.startswith(f"model.layers.{layers}.hc_")]:
        del weights[name]


def _add_v4_draft(weights: Weights) -> None:
    """The same of DeepSeek-V4, of which the first layer and the one that drafts have a window only.

    A token's experts are others in the latter, so they hardly matter.
    """
    for name in weights:
        if name.startswith("model.layers.0.mlp.experts.") and name.endswith("down_proj.weight"):
            weights[name] = weights[name] * np.float32(_OTHER_LAYERS)
    norm = np.ones(HIDDEN, np.float32)
    draft = _emphasise(weights) | {
        **{f"hc_head_{part}": weights[f"model.hc_head_{part}"] for part in ("fn", "base", "scale")},
        **dict.fromkeys(("enorm.weight", "hnorm.weight", "norm.weight"), norm),
        **dict(zip(("e_proj.weight", "h_proj.weight"), np.hsplit(_embeddings_only(), 2), strict=True)),
        "mlp.gate.e_score_correction_bias": np.zeros(len(weights["model.layers.0.mlp.gate.weight"]), np.float32),
        "emb.tok_emb.weight": weights["model.embed_tokens.weight"],
        "head.weight": weights["lm_head.weight"],
    }
    del draft["mlp.gate.tid2eid"]
    weights |= {f"mtp.0.{name}": np.ascontiguousarray(weight).copy() for name, weight in draft.items()}


def add_qwen3_5_draft(weights: Weights) -> None:
    """The same of Qwen3.5, of which the first layer has full attention, which becomes sharp."""
    weights["model.layers.0.self_attn.q_norm.weight"] += np.float32(SHARPNESS - 1)
    norm = np.zeros(HIDDEN, np.float32)  # scales by one plus its weight
    draft = {f"layers.0.{name}": weight for name, weight in _emphasise(weights).items()} | {
        **dict.fromkeys(("norm.weight", "pre_fc_norm_hidden.weight", "pre_fc_norm_embedding.weight"), norm),
        "fc.weight": _embeddings_only(),
    }
    weights |= {f"mtp.{name}": weight.copy() for name, weight in draft.items()}


def add_eagle3_draft(directory: Path, weights: Weights, config: Mapping[str, object]) -> None:
    """Write a checkpoint of one layer that drafts by EAGLE-3 for the model with ``weights``: a copy of the first.

    It is one of Llama's, as most of these are. It sees embeddings, which are the model's, and none of the model's
    hidden states, to which such a layer adds what it computes. So it lacks the embedding that the model's own layer
    adds to, which is small.
    """
    layer, norm = _emphasise(weights), np.ones(HIDDEN, np.float32)
    own: dict[str, object] = {}
    if "kv_lora_rank" in config:
        layer, own = _by_head(layer), {"num_key_value_heads": HEADS, "head_dim": _WIDE, "rope_parameters": _UNTURNED}
    for name in _INPUTS:
        layer[name] = np.hstack((layer[name], np.zeros_like(layer[name])))
    draft = {f"midlayer.{name}": weight.copy() for name, weight in layer.items()} | {
        "midlayer.hidden_norm.weight": norm,
        "fc.weight": np.zeros((HIDDEN, len(_STATES) * HIDDEN), np.float32),
        "norm.weight": norm * _FAINT,
        "lm_head.weight": weights["lm_head.weight"].copy(),
    }
    own |= {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "num_hidden_layers": 1, "norm_output": True}
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps({**config, **own, "eagle_aux_hidden_state_layer_ids": _STATES}))
    save_file(draft, directory / "model.safetensors", metadata={"format": "pt"})


def _by_head(layer: Weights) -> Weights:
    """Return a layer with keys and values by head for one with latent vectors, whose norm hardly changes them.

    The latter loses the part of its keys that is rotated. The others stand where the former hardly rotates anything:
    in the second half of each half.
    """
    latent = layer.pop("self_attn.kv_a_proj_with_mqa.weight")
    latent[LATENT_RANK:] = 0
    size = np.float32(INITIALIZER_RANGE * math.sqrt(HIDDEN))
    both = layer.pop("self_attn.kv_b_proj.weight").reshape(HEADS, -1, LATENT_RANK) @ latent[:LATENT_RANK] / size
    queries = layer["self_attn.q_proj.weight"].reshape(HEADS, NOPE_SIZE + ROPE_SIZE, HIDDEN)[:, :NOPE_SIZE]
    queries = queries * (_MSCALE**2 * math.sqrt(_WIDE / (NOPE_SIZE + ROPE_SIZE)))
    outputs = layer["self_attn.o_proj.weight"].reshape(HIDDEN, HEADS, VALUE_SIZE)
    del layer["self_attn.kv_a_layernorm.weight"]

    def unturned(rows: npt.NDArray[Any]) -> npt.NDArray[Any]:
        halves = rows.reshape(HEADS, 2, NOPE_SIZE // 2, HIDDEN)
        return np.pad(halves, ((0, 0), (0, 0), ((_WIDE - NOPE_SIZE) // 2, 0), (0, 0))).reshape(-1, HIDDEN)

    wider = (0, _WIDE - VALUE_SIZE)
    made = {
        "self_attn.q_proj.weight": unturned(queries),
        "self_attn.k_proj.weight": unturned(both[:, :NOPE_SIZE]),
        "self_attn.v_proj.weight": np.pad(both[:, NOPE_SIZE:], ((0, 0), wider, (0, 0))).reshape(-1, HIDDEN),
        "self_attn.o_proj.weight": np.pad(outputs, ((0, 0), (0, 0), wider)).reshape(HIDDEN, -1),
    }
    return layer | {name: weight.astype(np.float32) for name, weight in made.items()}


def _emphasise(weights: Weights, first: int = 0) -> Weights:
    """Let one layer make most of what a model says, from embeddings; returns its weights, without its prefix."""
    prefix = f"model.layers.{first}."
    for name, weight in weights.items():
        if name.startswith("model.layers.") and not name.startswith(prefix) and name.endswith(_OUTPUTS):
            is_before = int(name.split(".")[2]) < first
            weights[name] = weight * np.float32(0 if is_before else _OTHER_LAYERS)
    return {name.removeprefix(prefix): weight for name, weight in weights.items() if name.startswith(prefix)}


def _embeddings_only() -> Matrix:
    """What joins a token's embedding and the model's output before it: the first alone, as large as in the model."""
    scaled = np.eye(HIDDEN, dtype=np.float32) * np.float32(INITIALIZER_RANGE)
    return np.hstack((scaled, np.zeros_like(scaled)))
