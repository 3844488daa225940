"""A random model whose answers depend on every block of the prompt, as a directory that vLLM serves offline.

A connector that loads wrong blocks must be seen by its answers. Of a usual random model the answers hardly depend on
the prompt: here the weights are wide, the embeddings untied and the attention sharp. It has as much to transfer as a
larger one, and little to compute, so that a run is short.
"""

import json
import os
import shutil
from pathlib import Path
from typing import Any

LAYERS, KV_HEADS, HEAD_SIZE, VOCABULARY, LONGEST = 24, 4, 32, 512, 4096
#: Of keys and values of one token in all layers, in 4 bytes a number.
TOKEN_BYTES = LAYERS * KV_HEADS * HEAD_SIZE * 2 * 4
SHARPNESS = 4.0  # the deviation of the logits of attention
CONFIG: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": LAYERS,
    "num_attention_heads": 4, "num_key_value_heads": KV_HEADS, "head_dim": HEAD_SIZE,
    "max_position_embeddings": LONGEST, "initializer_range": 0.15, "tie_word_embeddings": False, "bos_token_id": None,
    "eos_token_id": None, "pad_token_id": None,
}  # fmt: skip


def _is_made(directory: Path) -> bool:
    """Return whether the model lies there, of the sizes that it has now."""
    try:
        made = json.loads((directory / "config.json").read_text())
    except FileNotFoundError:
        return False
    return bool(CONFIG.items() <= {name: made.get(name) for name in CONFIG}.items())


def make(directory: Path) -> Path:
    """Write the model to ``directory`` where it is not there yet, and return the directory.

    Equal seeds give equal weights with one version of PyTorch; all servers of a run read the same files.
    """
    if _is_made(directory):
        return directory
    os.environ["HF_HUB_OFFLINE"] = "1"  # read when transformers is imported
    import torch  # noqa: PLC0415  takes seconds, and is needed once
    from transformers import Qwen3Config, Qwen3ForCausalLM  # noqa: PLC0415
    from transformers.utils import logging  # noqa: PLC0415

    logging.disable_progress_bar()
    torch.manual_seed(20)
    model = Qwen3ForCausalLM(Qwen3Config(**CONFIG)).float()
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.q_norm.weight.fill_(SHARPNESS)
    unfinished = directory.with_name(directory.name + ".unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    model.save_pretrained(unfinished)
    shutil.rmtree(directory, ignore_errors=True)
    unfinished.rename(directory)
    return directory
