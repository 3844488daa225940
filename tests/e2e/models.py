"""A tiny model whose output depends on every block of its prompt, written as a directory that vLLM serves offline.

A test of equal tokens proves nothing with a model that ignores its context. This one has untied embeddings, wide
random weights and sharp attention, so that one changed block of keys and values changes the output. It is made of
random numbers from a fixed seed: nothing is downloaded, and equal specifications give equal weights.
"""

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
from safetensors.numpy import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

VOCABULARY = 512
MAX_POSITIONS = 4096

Weights = dict[str, npt.NDArray[np.float32]]


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """What may differ between two models of a test. The head size is always 32 items."""

    layers: int = 4
    kv_heads: int = 4
    seed: int = 20

    @property
    def name(self) -> str:
        """For directories, log files and messages."""
        return f"{self.layers}layers-{self.kv_heads}heads-seed{self.seed}"


DEFAULT_MODEL = ModelSpec()

HIDDEN = 256
HEADS = 8
HEAD_SIZE = 32
INTERMEDIATE = 512
INITIALIZER_RANGE = 0.15
#: The deviation of the attention logits. With 1, the usual, a query averages over a thousand tokens and no single one
#: matters; with much more it sees one token and the others do not matter.
SHARPNESS = 4.0


def write_model(directory: Path, spec: ModelSpec) -> Path:
    """Write configuration, weights (float32) and tokenizer to ``directory``, which must not exist; returns it."""
    directory.mkdir(parents=True)
    (directory / "config.json").write_text(json.dumps(_config(spec)))
    save_file(_weights(spec), directory / "model.safetensors", metadata={"format": "pt"})
    _write_tokenizer(directory)
    return directory


def _config(spec: ModelSpec) -> dict[str, object]:
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": VOCABULARY,
        "hidden_size": HIDDEN,
        "intermediate_size": INTERMEDIATE,
        "num_hidden_layers": spec.layers,
        "num_attention_heads": HEADS,
        "num_key_value_heads": spec.kv_heads,
        "head_dim": HEAD_SIZE,
        "hidden_act": "silu",
        "max_position_embeddings": MAX_POSITIONS,
        "initializer_range": INITIALIZER_RANGE,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "use_cache": True,
        "bos_token_id": None,
        "eos_token_id": None,
        "torch_dtype": "float32",
    }


def _weights(spec: ModelSpec) -> Weights:
    random = np.random.default_rng(spec.seed)

    def matrix(rows: int, columns: int) -> npt.NDArray[np.float32]:
        return random.normal(0.0, INITIALIZER_RANGE, (rows, columns)).astype(np.float32)

    def ones(size: int) -> npt.NDArray[np.float32]:
        return np.ones(size, np.float32)

    weights = {
        "model.embed_tokens.weight": matrix(VOCABULARY, HIDDEN),
        "model.norm.weight": ones(HIDDEN),
        "lm_head.weight": matrix(VOCABULARY, HIDDEN),
    }
    for layer in range(spec.layers):
        prefix = f"model.layers.{layer}."
        weights |= {
            prefix + "input_layernorm.weight": ones(HIDDEN),
            prefix + "post_attention_layernorm.weight": ones(HIDDEN),
            prefix + "self_attn.q_proj.weight": matrix(HEADS * HEAD_SIZE, HIDDEN),
            prefix + "self_attn.k_proj.weight": matrix(spec.kv_heads * HEAD_SIZE, HIDDEN),
            prefix + "self_attn.v_proj.weight": matrix(spec.kv_heads * HEAD_SIZE, HIDDEN),
            prefix + "self_attn.o_proj.weight": matrix(HIDDEN, HEADS * HEAD_SIZE),
            prefix + "self_attn.q_norm.weight": SHARPNESS * ones(HEAD_SIZE),
            prefix + "self_attn.k_norm.weight": ones(HEAD_SIZE),
            prefix + "mlp.gate_proj.weight": matrix(INTERMEDIATE, HIDDEN),
            prefix + "mlp.up_proj.weight": matrix(INTERMEDIATE, HIDDEN),
            prefix + "mlp.down_proj.weight": matrix(HIDDEN, INTERMEDIATE),
        }
    return weights


def _write_tokenizer(directory: Path) -> None:
    """A byte-level tokenizer: one token a byte, and names for the rest of the vocabulary."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    names = alphabet + [f"<{token}>" for token in range(len(alphabet), VOCABULARY)]
    tokenizer = Tokenizer(models.BPE(vocab={name: token for token, name in enumerate(names)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": MAX_POSITIONS})
    )
