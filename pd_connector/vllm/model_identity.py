"""Identifies the model that an engine serves, by digests of its configuration and a sample of its weights."""

import hashlib
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from layout.geometry import ModelIdentity

if TYPE_CHECKING:
    from vllm.config import VllmConfig


def model_identity(vllm_config: "VllmConfig", check: str) -> ModelIdentity:
    """Return what must be equal on both sides of a transfer; ``check`` is the setting ``model_check``."""
    model = vllm_config.model_config
    directory = _model_directory(model)
    model_dtype = str(model.dtype).removeprefix("torch.")
    cache_dtype = str(vllm_config.cache_config.cache_dtype)
    return ModelIdentity(
        architecture=str(model.architecture),
        config_digest="" if check == "off" else _config_digest(model, directory),
        weights_digest=_weights_digest(directory) if directory and check == "weights" else "",
        layers=int(model.get_total_num_hidden_layers()),
        kv_heads=1 if model.use_mla else int(model.get_total_num_kv_heads()),
        head_size=int(model.get_head_size()),
        model_dtype=model_dtype,
        cache_dtype=model_dtype if cache_dtype == "auto" else cache_dtype,
    )


#: Keys of a model's configuration that tell how it was saved or is run, not what it computes.
_VOLATILE_KEYS = frozenset({"_name_or_path", "dtype", "torch_dtype", "transformers_version", "use_cache"})


def _model_directory(model_config: Any) -> Path | None:
    """Return the directory of the model's files: a path, or the local cache of a model that a hub id names."""
    path = Path(model_config.model)
    if path.is_dir():
        return path
    from huggingface_hub import snapshot_download  # noqa: PLC0415  only for models from a hub
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError  # noqa: PLC0415

    try:
        return Path(snapshot_download(model_config.model, revision=model_config.revision, local_files_only=True))
    except (HFValidationError, LocalEntryNotFoundError, OSError):
        return None


def _config_digest(model_config: Any, directory: Path | None) -> str:
    """Return a digest of the model's overrides and its configuration file, or what transformers made of it."""
    path = directory / "config.json" if directory else None
    config = json.loads(path.read_text()) if path and path.is_file() else model_config.hf_config.to_diff_dict()
    content = {key: value for key, value in config.items() if key not in _VOLATILE_KEYS}
    if overrides := model_config.hf_overrides:
        content["hf_overrides"] = overrides if isinstance(overrides, dict) else "callable"
    return hashlib.blake2b(json.dumps(content, sort_keys=True, default=str).encode(), digest_size=8).hexdigest()


_SAMPLE_BYTES = 4096
_SAMPLES_PER_FILE = 8


def _weights_digest(directory: Path) -> str:
    """Return a digest of a few kilobytes of every weight file; empty if there are no safetensors.

    Fine-tuned variants of a model differ in almost every tensor, so a cheap sample tells them apart.
    """
    files = sorted(directory.glob("*.safetensors"))
    if not files:
        return ""
    digest = hashlib.blake2b(digest_size=8)
    for file in files:
        size = file.stat().st_size
        digest.update(f"{file.name}:{size}".encode())
        with file.open("rb") as stream:
            for sample in range(_SAMPLES_PER_FILE):
                stream.seek(size * (2 * sample + 1) // (2 * _SAMPLES_PER_FILE))
                digest.update(stream.read(_SAMPLE_BYTES))
    return digest.hexdigest()
