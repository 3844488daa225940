"""A tiny model whose output depends on every block of its prompt, written as a directory that vLLM serves offline.

A test of equal tokens proves nothing with a model that ignores its context. This one has untied embeddings, wide
random weights and sharp attention, so that one changed block of keys and values changes the output. It is made of
random numbers from a fixed seed: nothing is downloaded, and equal specifications give equal weights.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from tests.support.e2e.architectures import (
    ARCHITECTURES,
    END_TOKEN,
    HIDDEN,
    INITIALIZER_RANGE,
    MAX_POSITIONS,
    THINKING_MARKS,
    VOCABULARY,
    Architecture,
    Matrix,
    Name,
    Weights,
    shared_config,
)
from tests.support.e2e.compressed_model import COMPRESSED_MODEL, V41_MODEL
from tests.support.e2e.draft_layers import EAGLE3, add_draft, add_eagle3_draft, draft_config
from tests.support.e2e.glm5_next import GLM5_NEXT
from tests.support.e2e.hybrids import write_hybrid

_ARCHITECTURES: Mapping[Name, Architecture] = {
    **ARCHITECTURES,
    "deepseek_v4": COMPRESSED_MODEL,
    "deepseek_v41": V41_MODEL,
    "glm5_next": GLM5_NEXT,
}


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """What may differ between two models of a test. ``kv_heads`` means nothing to DeepSeek-V2."""

    layers: int = 4
    kv_heads: int = 4
    seed: int = 20
    architecture: Name = "qwen3"
    adapters: tuple[str, ...] = ()  # LoRA adapters, by name; other names are other weights
    hybrid: str = ""  # one of ``hybrids.CONFIGS`` in the place of an architecture
    #: Has a layer that drafts: as DeepSeek's models do ("mtp"), or in a checkpoint of its own in ``EAGLE3``.
    drafts: Literal["", "mtp", "eagle3"] = ""

    @property
    def name(self) -> str:
        """For directories, log files and messages."""
        return "-".join(
            (
                self.hybrid or self.architecture,
                f"{self.layers}layers",
                f"{self.kv_heads}heads",
                f"seed{self.seed}",
                *((self.drafts,) if self.drafts else ()),
                *self.adapters,
            )
        )

    @property
    def cpu_arguments(self) -> tuple[str, ...]:
        """What a server of this model needs on its command line, on the CPU platform."""
        return _ARCHITECTURES[self.architecture].cpu_arguments

    @property
    def unit_tokens(self) -> int:
        """Tokens at whose multiples pulls of its caches begin, if blocks are smaller."""
        return _ARCHITECTURES[self.architecture].unit_tokens

    def adapter_arguments(self, directory: Path) -> tuple[str, ...]:
        """What serves the adapters of the model in ``directory`` under their names."""
        if not self.adapters:
            return ()
        modules = (f"{name}={directory / name}" for name in self.adapters)
        # On CPU, vLLM before 0.33 applies the last slot to prompts without an adapter in a step that has others, too.
        slots = str(len(self.adapters) + 1)
        return ("--enable-lora", "--max-lora-rank", str(ADAPTER_RANK), "--max-loras", slots, "--lora-modules", *modules)


DEFAULT_MODEL = ModelSpec()
ADAPTER_RANK = 8
#: What makes chats of models without a template the text of their messages.
CHATS = ("--chat-template", "{% for message in messages %}{{ message.content }}{% endfor %}")


def write_model(directory: Path, spec: ModelSpec, environment: Mapping[str, str] | None = None) -> Path:
    """Write configuration, weights (float32) and tokenizer to ``directory``, which must not exist; returns it.

    ``environment``: that of a server, in which hybrids are made.
    """
    directory.mkdir(parents=True)
    if spec.hybrid:
        write_hybrid(directory, spec.hybrid, shared_config(spec.layers, spec.kv_heads), spec.seed, environment)
        _write_tokenizer(directory, ())
        return directory
    architecture = _ARCHITECTURES[spec.architecture]
    config = shared_config(spec.layers, spec.kv_heads) | architecture.config(spec.layers, spec.kv_heads)
    drafts = draft_config(spec.architecture, spec.layers) if spec.drafts == "mtp" else {}
    weights = _weights(spec)
    if spec.drafts == "eagle3":
        add_eagle3_draft(directory / EAGLE3, weights, config)
    (directory / "config.json").write_text(json.dumps(config | drafts))
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    for name, contents in architecture.files.items():
        (directory / name).write_text(json.dumps(contents))
    _write_tokenizer(directory, architecture.special_tokens)
    for name in spec.adapters:
        _write_adapter(directory / name, spec)
    return directory


def _weights(spec: ModelSpec) -> Weights:
    architecture = _ARCHITECTURES[spec.architecture]
    random = np.random.default_rng(spec.seed)

    def draw(rows: int, columns: int) -> Matrix:
        return random.normal(0.0, INITIALIZER_RANGE, (rows, columns)).astype(np.float32)

    text = architecture.text_model
    weights = {
        f"{text}.embed_tokens.weight": draw(VOCABULARY, HIDDEN),
        f"{text}.norm.weight": np.full(HIDDEN, architecture.plain_norm, np.float32),
        "lm_head.weight": draw(VOCABULARY, HIDDEN),
    }
    for index in range(spec.layers):
        layer = architecture.layer(draw, spec.kv_heads) | architecture.own(draw, index, spec.kv_heads)
        weights |= {f"{text}.layers.{index}.{name}": weight for name, weight in layer.items()}
    weights |= architecture.beside(draw)
    if spec.drafts == "mtp":
        add_draft(weights, spec.layers, spec.architecture)
    return weights


def _write_adapter(directory: Path, spec: ModelSpec) -> None:
    """Write an adapter for every projection of the language model, which changes each as much as another seed would.

    What it adds to the last one is large, and of rank 2: its answers come from few tokens and repeat themselves, so
    that who looks for the next ones in what was before is right at times.
    """
    directory.mkdir()
    random = np.random.default_rng(list(directory.name.encode()))
    deviation = math.sqrt(INITIALIZER_RANGE / math.sqrt(ADAPTER_RANK))  # the product's is that of the weights
    text = _ARCHITECTURES[spec.architecture].text_model
    projections = {
        name.removesuffix(".weight"): weight.shape
        for name, weight in _weights(spec).items()
        if name.startswith(text) and name.endswith("_proj.weight")
    }
    tensors: Weights = {}
    for name, (rows, columns) in projections.items():
        down = random.normal(0.0, deviation, (ADAPTER_RANK, columns)).astype(np.float32)
        up = random.normal(0.0, deviation, (rows, ADAPTER_RANK)).astype(np.float32)
        if name == f"{text}.layers.{spec.layers - 1}.mlp.down_proj":
            up[:, :2] *= 20.0
            up[:, 2:] = 0.0
        tensors |= {f"base_model.model.{name}.lora_{part}.weight": each for part, each in (("A", down), ("B", up))}
    save_file(tensors, directory / "adapter_model.safetensors", metadata={"format": "pt"})
    modules = sorted({name.rpartition(".")[2] for name in projections})
    config = {"peft_type": "LORA", "r": ADAPTER_RANK, "lora_alpha": ADAPTER_RANK, "target_modules": modules}
    (directory / "adapter_config.json").write_text(json.dumps(config))


def _write_tokenizer(directory: Path, special: tuple[str, ...]) -> None:
    """A byte-level tokenizer: one token a byte, names for the rest of the vocabulary, and the special tokens last."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    names = [*alphabet, *(f"<{token}>" for token in range(len(alphabet), VOCABULARY - len(special))), *special]
    tokenizer = Tokenizer(models.BPE(vocab={name: token for token, name in enumerate(names)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    for name in special:
        is_text = name in THINKING_MARKS
        add = tokenizer.add_tokens if is_text else tokenizer.add_special_tokens
        add([AddedToken(name, special=not is_text, normalized=False)])
    end = {"eos_token": END_TOKEN} if END_TOKEN in special else {}
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": MAX_POSITIONS} | end)
    )
