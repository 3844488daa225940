"""Identifies the model that an engine serves: by its configuration, its weights, and what its layers compute with."""

import hashlib
import json
import logging
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from layout.geometry import ModelIdentity
from layout.layer_numbers import merged
from pd_connector.tensor_files import model_directory, tensors_digest, weight_files
from pd_connector.vllm.model_numbers import layer_numbers

if TYPE_CHECKING:
    from vllm.config import VllmConfig

logger = logging.getLogger(__name__)

#: Ways to load of which the tensors in the model's directory tell nothing: they are those of ranks, and an engine of
#: another size has others of the same model, or what is loaded comes from elsewhere.
_UNTOLD_BY_FILES = frozenset({"sharded_state", "runai_streamer_sharded", "dummy", "ipc_cache", "tensorizer"})


def model_identity(
    vllm_config: "VllmConfig", check: str, layers: Iterable[str] = (), *, reads_weights: bool = True
) -> ModelIdentity:
    """Return what must be equal on both sides of a transfer.

    Args:
        vllm_config: of the engine.
        check: the setting ``model_check``.
        layers: the attention layers that have a KV cache in this process, whose numbers are to be read off the model.
        reads_weights: whether this process is the one of the engine that reads its files.
    """
    model = vllm_config.model_config
    model_dtype = str(model.dtype).removeprefix("torch.")
    cache_dtype = str(vllm_config.cache_config.cache_dtype)
    is_read = reads_weights and check == "weights"
    load = vllm_config.load_config
    draft = getattr(vllm_config.speculative_config, "draft_model_config", None)
    drafts_apart = draft is not None and draft.model != model.model
    return ModelIdentity(
        architecture=str(model.architecture),
        config_digest="" if check == "off" else _config_digest(model),
        weights_digest=_weights_digest(model, str(load.load_format), load.download_dir) if is_read else "",
        layers=int(model.get_total_num_hidden_layers()),
        kv_heads=1 if model.use_mla else int(model.get_total_num_kv_heads()),
        head_size=int(model.get_head_size()),
        model_dtype=model_dtype,
        cache_dtype=model_dtype if cache_dtype == "auto" else _ALIASES.get(cache_dtype, cache_dtype),
        numbers=() if check == "off" else layer_numbers(vllm_config, layers),
        draft_digest=_weights_digest(draft, "auto", load.download_dir) if is_read and drafts_apart else "",
    )


def of_engine(workers: Sequence[ModelIdentity]) -> ModelIdentity:
    """Return the identity of an engine, given those of its workers. One of them has read the files."""
    weights, draft = max(each.weights_digest for each in workers), max(each.draft_digest for each in workers)
    numbers = merged(part for worker in workers for part in worker.numbers)
    return replace(workers[0], weights_digest=weights, draft_digest=draft, numbers=numbers)


def _weights_digest(model_config: Any, form: str, cache: str | None) -> str:
    """Return a digest of a model's weights as they lie in files; empty if that tells nothing of them."""
    if form in _UNTOLD_BY_FILES:
        return ""
    directory = model_directory(model_config.model, model_config.revision, cache)
    files = weight_files(directory, form) if directory else ()
    if not files:
        logger.warning(
            "PDConnector: the weights of %s are not compared with those of other engines: this machine has no "
            "safetensors files of it where they are looked for. Serve it from a directory, also with "
            "VLLM_USE_MODELSCOPE", model_config.model,
        )  # fmt: skip
    return tensors_digest(files)


#: Names of vLLM for one format of a cache.
_ALIASES = {"fp8": "fp8_e4m3"}

#: Keys of a model's configuration that tell how it was saved or is run, not what it computes.
_VOLATILE_KEYS = frozenset({"_name_or_path", "dtype", "torch_dtype", "transformers_version", "use_cache"})


def _config_digest(model_config: Any) -> str:
    """Return a digest of the configuration file, or what transformers made of it, and of what the user overrides."""
    directory = model_directory(model_config.hf_config_path or model_config.model, model_config.revision)
    path = directory / "config.json" if directory else None
    config = json.loads(path.read_bytes()) if path and path.is_file() else model_config.hf_config.to_diff_dict()
    content = {key: value for key, value in config.items() if key not in _VOLATILE_KEYS}
    if overrides := model_config.hf_overrides:
        content["hf_overrides"] = overrides if isinstance(overrides, dict) else "callable"
    # vLLM's hashes of images tell only what requests say of how to process them. The device is that of the processor.
    options = getattr(getattr(model_config, "multimodal_config", None), "mm_processor_kwargs", None) or {}
    if options := {key: value for key, value in options.items() if key != "device"}:
        content["mm_processor_kwargs"] = options
    return hashlib.blake2b(json.dumps(content, sort_keys=True, default=str).encode(), digest_size=8).hexdigest()
