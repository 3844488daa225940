"""Layers that draft tokens, for random models: they mostly say what the model will say, from caches of their own.

Of a random model, no draft would be accepted, and nobody would see what the draft's cache holds. So the first layer of
the model makes most of what it says, and a copy of that layer drafts: from nearly the same tokens, by keys and values
of its own. Its drafts are right often, not always.
"""

import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from tests.support.e2e.architectures import HIDDEN, INITIALIZER_RANGE, SHARPNESS, Matrix, Weights

#: Where the directory of a model has a checkpoint that drafts for it by EAGLE-3.
EAGLE3 = "eagle3"
#: After which layers such a draft sees the model's hidden states.
_STATES = (1, 2, 3)
#: With which it scales what it passes on to its next step, so that it hardly matters there.
_FAINT = np.float32(1e-3)
_INPUTS = tuple(f"self_attn.{name}_proj.weight" for name in "qkv")

#: What the other layers add, of what random weights would.
_OTHER_LAYERS = 0.15
_OUTPUTS = ("o_proj.weight", "out_proj.weight", "down_proj.weight")


def add_deepseek_draft(weights: Weights, layers: int) -> None:
    """Add a layer that drafts, as DeepSeek's models and GLM-5 have it behind the last one: a copy of the first."""
    norm = np.ones(HIDDEN, np.float32)
    draft = _emphasise_first(weights) | {
        **dict.fromkeys(("enorm.weight", "hnorm.weight", "shared_head.norm.weight"), norm),
        "eh_proj.weight": _embeddings_only(),
        "embed_tokens.weight": weights["model.embed_tokens.weight"],
        "shared_head.head.weight": weights["lm_head.weight"],
    }
    weights |= {f"model.layers.{layers}.{name}": weight.copy() for name, weight in draft.items()}


def add_qwen3_5_draft(weights: Weights) -> None:
    """The same of Qwen3.5, of which the first layer has full attention, which becomes sharp."""
    weights["model.layers.0.self_attn.q_norm.weight"] += np.float32(SHARPNESS - 1)
    norm = np.zeros(HIDDEN, np.float32)  # scales by one plus its weight
    draft = {f"layers.0.{name}": weight for name, weight in _emphasise_first(weights).items()} | {
        **dict.fromkeys(("norm.weight", "pre_fc_norm_hidden.weight", "pre_fc_norm_embedding.weight"), norm),
        "fc.weight": _embeddings_only(),
    }
    weights |= {f"mtp.{name}": weight.copy() for name, weight in draft.items()}


def add_eagle3_draft(directory: Path, weights: Weights, config: Mapping[str, object]) -> None:
    """Write a checkpoint of one layer that drafts by EAGLE-3 for Llama with these ``weights``: a copy of the first.

    It sees embeddings, which are the model's, and none of the model's hidden states, to which such a layer adds what it
    computes. So it lacks the embedding that the model's own layer adds to, which is small.
    """
    layer, norm = _emphasise_first(weights), np.ones(HIDDEN, np.float32)
    for name in _INPUTS:
        layer[name] = np.hstack((layer[name], np.zeros_like(layer[name])))
    draft = {f"midlayer.{name}": weight.copy() for name, weight in layer.items()} | {
        "midlayer.hidden_norm.weight": norm,
        "fc.weight": np.zeros((HIDDEN, len(_STATES) * HIDDEN), np.float32),
        "norm.weight": norm * _FAINT,
        "lm_head.weight": weights["lm_head.weight"].copy(),
    }
    own = {"num_hidden_layers": 1, "norm_output": True, "eagle_aux_hidden_state_layer_ids": _STATES}
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps({**config, **own}))
    save_file(draft, directory / "model.safetensors", metadata={"format": "pt"})


def _emphasise_first(weights: Weights) -> Weights:
    """Let the first layer make most of what a model says; returns its weights, without its prefix."""
    prefix = "model.layers.0."
    for name, weight in weights.items():
        if name.startswith("model.layers.") and not name.startswith(prefix) and name.endswith(_OUTPUTS):
            weights[name] = weight * np.float32(_OTHER_LAYERS)
    return {name.removeprefix(prefix): weight for name, weight in weights.items() if name.startswith(prefix)}


def _embeddings_only() -> Matrix:
    """What joins a token's embedding and the model's output before it: the first alone, as large as in the model."""
    scaled = np.eye(HIDDEN, dtype=np.float32) * np.float32(INITIALIZER_RANGE)
    return np.hstack((scaled, np.zeros_like(scaled)))
