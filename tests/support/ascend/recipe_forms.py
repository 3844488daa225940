"""The forms of a recipe's caches, by letters, and what the shapes of their tensors must be.

    G    keys and values by head
    M    MLA's latent vectors and rotary keys, the same on every rank
    P    MLA's row of a token packed into bytes, with its scales
    I    the sparse indexer's keys beside them, quantised with scales in a second tensor: I+s
    K    the same, pooled: a row for several tokens
    T    the ring of the tokens that are not pooled yet
    S    states of recurrent layers
    V4   DeepSeek V4's compressed caches, windows and compressors' states in windows
    V41  those of V4.1: with rings for the compressors

(fp8) behind a letter: values of one byte, without scales.
"""

import re
from typing import Any

import torch

from tests.support.ascend.recipe_memory import tensors_of
from tests.support.ascend.recipe_oracle import specs_by_layer, tokens_of_row
from tests.support.ascend.recipe_ranks import RankCaches

_VERSIONS = {"deepseek_v4": "V4", "deepseek_v41": "V41"}


def forms_of(rank: RankCaches) -> set[str]:
    """The forms of a rank's caches, without those of draft layers; their tensors have the shapes that these have.

    Raises:
        AssertionError: a tensor has another shape.
    """
    config, found = rank.kv_cache_config, set()
    for group in config.kv_cache_groups:
        for layer, spec in specs_by_layer(group).items():
            form = _form(spec, _version_of(rank))
            _check_shapes(rank, form, layer, spec)
            if not _is_draft(rank, layer):
                found.add(form)
    return found


def _version_of(rank: RankCaches) -> str:
    """The letters of all caches of a model that is DeepSeek V4 or V4.1; empty of others."""
    return _VERSIONS.get(rank.vllm_config.model_config.hf_config.model_type, "")


def _form(spec: Any, version: str) -> str:
    kind = type(spec).__name__
    if version and kind != "FullAttentionSpec":
        return version
    plain = "(fp8)" if getattr(spec, "dtype", None) == torch.float8_e4m3fn else ""
    if kind == "AscendMLAAttentionSpec":
        return "P" if spec.cache_sparse_sfa_c8 else "M" if tokens_of_row(spec) == 1 else "K"
    if kind == "AscendSFAIndexerCacheSpec":
        return "I+s" if spec.scale_dim else f"I{plain}"
    return {"FullAttentionSpec": f"G{plain}", "AscendIndexerKPoolTailSpec": "T", "MambaSpec": "S"}.get(kind, kind)


def _check_shapes(rank: RankCaches, form: str, layer: str, spec: Any) -> None:
    """Compare the tensors of a layer with what its specification and the model's widths make of them."""
    text, blocks = rank.vllm_config.model_config.hf_text_config, rank.kv_cache_config.num_blocks
    shapes = [tuple(tensor.shape) for tensor in tensors_of(rank.kv_caches[layer])]
    letter = form.removesuffix("(fp8)")
    if letter == "S":
        expected = [(blocks, *shape) for shape in spec.shapes]
    elif letter == "T":
        expected = [(blocks, 2, spec.block_size, spec.head_size)]
    elif type(spec).__name__.endswith("CircularBufferSpec"):
        expected = [(blocks, spec.block_size, 1, spec.head_size)]
    else:
        copies = getattr(spec, "sfa_dcp_replicated_indexer_size", 1)
        rows = spec.block_size // tokens_of_row(spec) * blocks * copies
        per_block = shapes[0][1]
        heads = [spec.num_kv_heads] if len(shapes[0]) == 4 else []
        widths = _widths(letter, spec, text)
        expected = [(rows // per_block, per_block, *heads, width) for width in widths]
    assert shapes == expected, f"{layer}: {shapes}; expected {expected} of {spec}"


def _widths(letter: str, spec: Any, text: Any) -> list[int]:
    if letter == "G":
        return [spec.head_size, spec.head_size_v]
    if letter == "M":
        return [width for width in (text.kv_lora_rank, text.qk_rope_head_dim) if width]
    return [spec.head_size, *([spec.scale_dim] if getattr(spec, "scale_dim", 0) else [])]


def _is_draft(rank: RankCaches, layer: str) -> bool:
    number = re.search(r"\blayers\.(\d+)\b", layer)
    layers = rank.vllm_config.model_config.get_total_num_hidden_layers()
    return "mtp" in layer.split(".") or (number is not None and int(number[1]) >= layers)
