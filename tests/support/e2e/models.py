"""A tiny model whose output depends on every block of its prompt, written as a directory that vLLM serves offline.

A test of equal tokens proves nothing with a model that ignores its context. This one has untied embeddings, wide
random weights and sharp attention, so that one changed block of keys and values changes the output. It is made of
random numbers from a fixed seed: nothing is downloaded, and equal specifications give equal weights.
"""

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from tests.support.e2e.architectures import (
    ARCHITECTURES,
    HIDDEN,
    INITIALIZER_RANGE,
    MAX_POSITIONS,
    VOCABULARY,
    Matrix,
    Name,
    Weights,
    shared_config,
)


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """What may differ between two models of a test. ``kv_heads`` means nothing to DeepSeek-V2."""

    layers: int = 4
    kv_heads: int = 4
    seed: int = 20
    architecture: Name = "qwen3"

    @property
    def name(self) -> str:
        """For directories, log files and messages."""
        return f"{self.architecture}-{self.layers}layers-{self.kv_heads}heads-seed{self.seed}"

    @property
    def cpu_arguments(self) -> tuple[str, ...]:
        """What a server of this model needs on its command line, on the CPU platform."""
        return ARCHITECTURES[self.architecture].cpu_arguments


DEFAULT_MODEL = ModelSpec()


def write_model(directory: Path, spec: ModelSpec) -> Path:
    """Write configuration, weights (float32) and tokenizer to ``directory``, which must not exist; returns it."""
    directory.mkdir(parents=True)
    own = ARCHITECTURES[spec.architecture].config(spec.layers, spec.kv_heads)
    (directory / "config.json").write_text(json.dumps(shared_config(spec.layers, spec.kv_heads) | own))
    save_file(_weights(spec), directory / "model.safetensors", metadata={"format": "pt"})
    _write_tokenizer(directory)
    return directory


def _weights(spec: ModelSpec) -> Weights:
    architecture = ARCHITECTURES[spec.architecture]
    random = np.random.default_rng(spec.seed)

    def draw(rows: int, columns: int) -> Matrix:
        return random.normal(0.0, INITIALIZER_RANGE, (rows, columns)).astype(np.float32)

    weights = {
        "model.embed_tokens.weight": draw(VOCABULARY, HIDDEN),
        "model.norm.weight": np.full(HIDDEN, architecture.plain_norm, np.float32),
        "lm_head.weight": draw(VOCABULARY, HIDDEN),
    }
    for index in range(spec.layers):
        layer = architecture.layer(draw, spec.kv_heads)
        weights |= {f"model.layers.{index}.{name}": weight for name, weight in layer.items()}
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
