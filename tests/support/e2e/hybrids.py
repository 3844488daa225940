"""Models of which some layers keep states instead of keys and values, small and random, saved by transformers.

That is done by a process of its own, in the environment of a server: in others, PyTorch may find no libraries.
Convolutions get wide weights, as everything else does: with transformers' own, states would hardly matter.
"""

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors.numpy import load_file, save_file

from tests.support.e2e.draft_layers import add_qwen3_5_draft

_ROOT = Path(__file__).parents[3]
#: Deviation of a convolution's weights.
_CONVOLUTION = 0.3

#: Mamba2, one group of B and C for all heads.
_GRANITE: dict[str, Any] = {
    "model_type": "granitemoehybrid",
    "shared_intermediate_size": 512,
    "num_local_experts": 0,
    "num_experts_per_tok": 0,
    "layer_types": ["mamba", "mamba", "attention", "mamba"],
    "mamba_n_heads": 16,
    "mamba_n_groups": 1,
    "mamba_d_state": 32,
    "mamba_d_head": 32,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "mamba_chunk_size": 64,
    "position_embedding_type": "nope",
}

_GATED_DELTA_NET: dict[str, Any] = {
    "head_dim": 32,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
    "linear_conv_kernel_dim": 4,
    "layer_types": ["linear_attention", "linear_attention", "linear_attention", "full_attention"],
}

#: Without experts.
_QWEN3_5 = _GATED_DELTA_NET | {"model_type": "qwen3_5_text"}
_DRAFT_LAYERS = "mtp_num_hidden_layers"

#: What differs from ``architectures.shared_config``, by the name that tests use.
CONFIGS: Mapping[str, dict[str, Any]] = {
    "granite": _GRANITE,
    # The same for three ranks, and for two. vLLM gives each rank as much of the vocabulary.
    "granite_6": _GRANITE
    | {
        "vocab_size": 576,
        "hidden_size": 384,
        "num_attention_heads": 6,
        "num_key_value_heads": 6,
        "shared_intermediate_size": 768,
        "mamba_n_heads": 24,
    },
    "qwen3_next": _GATED_DELTA_NET
    | {
        "model_type": "qwen3_next",
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 128,
        "shared_expert_intermediate_size": 128,
        "mlp_only_layers": [],
    },
    "qwen3_5": _QWEN3_5,
    # The same with a layer that drafts, as the first one.
    "qwen3_5_mtp": _QWEN3_5 | {_DRAFT_LAYERS: 1, "layer_types": ["full_attention"] + 3 * ["linear_attention"]},
    # Mamba2 and attention in every layer.
    "falcon_h1": {
        "model_type": "falcon_h1",
        "mamba_d_ssm": 512,
        "mamba_n_heads": 16,
        "mamba_d_head": 32,
        "mamba_n_groups": 1,
        "mamba_d_state": 32,
        "mamba_d_conv": 4,
        "mamba_chunk_size": 64,
    },
    # Mamba2 with several groups.
    "nemotron_h": {
        "model_type": "nemotron_h",
        "layers_block_type": ["linear_attention", "full_attention", "mlp", "linear_attention"],
        "head_dim": 32,
        "mamba_num_heads": 16,
        "mamba_head_dim": 32,
        "n_groups": 4,
        "ssm_state_size": 32,
        "conv_kernel": 4,
        "chunk_size": 64,
    },
    # Short convolutions.
    "lfm2": {
        "model_type": "lfm2",
        "conv_dim": 256,
        "conv_L_cache": 4,
        "block_dim": 256,
        "block_multiple_of": 256,
        "block_ffn_dim_multiplier": 1.0,
        "layer_types": ["conv", "conv", "full_attention", "conv"],
    },
}


def write_hybrid(
    directory: Path, name: str, shared: Mapping[str, object], seed: int, environment: Mapping[str, str] | None
) -> None:
    """Write configuration and weights (float32) of the hybrid ``name`` to ``directory``.

    Args:
        environment: the variables with which a process finds its libraries; this process's by default.
    """
    subprocess.run(
        [sys.executable, "-m", __name__, str(directory), str(seed)],
        input=json.dumps({**shared, **CONFIGS[name]}), text=True, check=True, cwd=_ROOT,
        env={**(os.environ if environment is None else environment), "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"},
    )  # fmt: skip


def _save_random(directory: str, seed: int, settings: dict[str, Any]) -> None:
    import torch  # noqa: PLC0415  in the process that was started for it only
    from transformers import AutoConfig, AutoModelForCausalLM  # noqa: PLC0415

    config = AutoConfig.for_model(settings.pop("model_type"), **settings)
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    for parameter_name, parameter in model.named_parameters():
        if "conv" in parameter_name and parameter_name.endswith("weight"):
            torch.nn.init.normal_(parameter, std=_CONVOLUTION)
    model.save_pretrained(directory)
    if getattr(config, _DRAFT_LAYERS, 0):
        weights = load_file(f"{directory}/model.safetensors")
        add_qwen3_5_draft(weights)
        save_file(weights, f"{directory}/model.safetensors", metadata={"format": "pt"})


if __name__ == "__main__":
    _save_random(sys.argv[1], int(sys.argv[2]), json.load(sys.stdin))
