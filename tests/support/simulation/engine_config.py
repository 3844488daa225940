"""vLLM's configuration of a simulated engine, as ``vllm serve`` would make it for a small model."""

import atexit
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from unittest.mock import patch

import vllm.platforms
from vllm.config import VllmConfig
from vllm.engine.arg_utils import EngineArgs

from tests.support.e2e.models import DEFAULT_MODEL, write_model


@cache
def simulated_config(max_tokens: int, chunk_tokens: int, page_tokens: int) -> VllmConfig:
    """One for every engine of these measures: copy what is to differ.

    A request has at most ``max_tokens`` tokens, a step ``chunk_tokens``, a block ``page_tokens``.
    """
    directory = TemporaryDirectory()  # vLLM reads the model whenever it looks at a copy's configuration
    atexit.register(directory.cleanup)
    model = write_model(Path(directory.name) / "model", DEFAULT_MODEL)
    arguments = EngineArgs(
        model=str(model), dtype="float32", max_model_len=max_tokens, max_num_batched_tokens=chunk_tokens,
        max_num_seqs=16, block_size=page_tokens, enforce_eager=True, enable_prefix_caching=True,
        hf_overrides={"max_position_embeddings": max_tokens},
    )  # fmt: skip
    # A vLLM without its compiled parts has no platform.
    with patch.object(vllm.platforms.current_platform, "device_type", "cpu"):
        return arguments.create_engine_config()
