"""Random models whose answers depend on every block of the prompt, as directories that vLLM serves offline.

A connector that loads wrong blocks must be seen by its answers. Of a usual random model the answers hardly depend on
the prompt: here the weights are wide, the embeddings untied and the attention sharp. The first has as much to transfer
as a larger one, and little to compute, so that a run is short. The other is a hybrid: Mamba2 in all layers but one,
with one group of B and C for all heads, as in Granite 4.
"""

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

LAYERS, KV_HEADS, HEAD_SIZE, VOCABULARY, LONGEST = 24, 4, 32, 512, 4096
#: Of keys and values of one token in all layers, in 4 bytes a number.
TOKEN_BYTES = LAYERS * KV_HEADS * HEAD_SIZE * 2 * 4
SHARPNESS = 4.0  # the deviation of the logits of attention
CONVOLUTION = 0.3  # the deviation of a convolution's weights
_SHARED: Mapping[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 256, "num_key_value_heads": KV_HEADS, "max_position_embeddings": LONGEST,
    "initializer_range": 0.15, "tie_word_embeddings": False, "bos_token_id": None, "eos_token_id": None,
    "pad_token_id": None,
}  # fmt: skip
Model = Literal["attention", "hybrid"]
CONFIGS: Mapping[Model, Mapping[str, Any]] = {
    "attention": {
        **_SHARED, "model_type": "qwen3", "intermediate_size": 256, "num_hidden_layers": LAYERS,
        "num_attention_heads": 4, "head_dim": HEAD_SIZE,
    },
    "hybrid": {
        **_SHARED, "model_type": "granitemoehybrid", "intermediate_size": 512, "shared_intermediate_size": 512,
        "num_hidden_layers": 4, "num_attention_heads": 8,
        "layer_types": ["linear_attention", "linear_attention", "full_attention", "linear_attention"],
        "num_local_experts": 0, "num_experts_per_tok": 0, "mamba_n_heads": 16, "mamba_n_groups": 1, "mamba_d_state": 32,
        "mamba_d_head": 32, "mamba_d_conv": 4, "mamba_expand": 2, "mamba_chunk_size": 64,
        "position_embedding_type": "nope",
    },
}  # fmt: skip


def _is_made(directory: Path, config: Mapping[str, Any]) -> bool:
    """Return whether the model lies there, of the sizes that it has now."""
    try:
        made = json.loads((directory / "config.json").read_text())
    except FileNotFoundError:
        return False
    return config == {name: made.get(name) for name in config}


def make(directory: Path, name: Model) -> Path:
    """Write the model of that name to ``directory`` where it is not there yet, and return the directory.

    Equal seeds give equal weights with one version of PyTorch; all servers of a run read the same files.
    """
    config = CONFIGS[name]
    if _is_made(directory, config):
        return directory
    os.environ["HF_HUB_OFFLINE"] = "1"  # read when transformers is imported
    import torch  # noqa: PLC0415  takes seconds, and is needed once
    from transformers import AutoConfig, AutoModelForCausalLM  # noqa: PLC0415
    from transformers.utils import logging  # noqa: PLC0415

    logging.disable_progress_bar()
    torch.manual_seed(20)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config), dtype=torch.float32)
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if parameter_name.endswith("q_norm.weight"):
                parameter.fill_(SHARPNESS)
            elif parameter_name.endswith("conv1d.weight"):
                parameter.normal_(std=CONVOLUTION)
    unfinished = directory.with_name(directory.name + ".unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    model.save_pretrained(unfinished)
    shutil.rmtree(directory, ignore_errors=True)
    unfinished.rename(directory)
    return directory
