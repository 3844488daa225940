"""An engine on a simulated NPU whose attention operators treat caches of all layers together wrongly, in one process.

    python -m tests.support.ascend.faulty_operators FAULT MODEL_DIRECTORY

It logs how the KV caches are allocated, and prints what it says to a prompt: ``TOKENS [1, 2, ...]``.
"""

import sys
from typing import Any

from tests.support.ascend.engine_process import start_engine

#: A tensor: torch is imported in the process that was started for it only.
Tensor = Any

PROMPT = list(range(1, 200))
NEW_TOKENS = 8

#: Of a view, by operators that count in too few bits: more than those that the check of small caches uses.
REACHED_BLOCKS = 8


def as_dense(cache: Tensor) -> Tensor:
    """The cache as an operator sees it that takes blocks to be dense."""
    return cache.as_strided(cache.shape, (cache[0].numel(), *cache.stride()[1:]))


def ignore_strides(operators: Any) -> None:
    """Let what writes the cache ignore the stride of its blocks."""
    write = operators.npu_scatter_pa_kv_cache

    def dense_write(*, key_cache: Tensor, value_cache: Tensor, **others: Any) -> Any:
        if key_cache.stride(0) > 2 * key_cache[0].numel():  # K and V of one layer may share their pages
            key_cache, value_cache = as_dense(key_cache), as_dense(value_cache)
        return write(key_cache=key_cache, value_cache=value_cache, **others)

    operators.npu_scatter_pa_kv_cache = dense_write


def copy_caches(operators: Any) -> None:
    """Let attention copy the whole cache at every call, as vllm-ascend 0.23 does."""
    attend = operators.npu_fused_infer_attention_score

    def copying(*arguments: Any, key: Tensor, value: Tensor, **others: Any) -> Any:
        return attend(*arguments, key=key.contiguous(), value=value.contiguous(), **others)

    operators.npu_fused_infer_attention_score = copying


def refuse(operators: Any) -> None:
    """Let what writes the cache refuse a view of more than K and V of one layer."""
    write = operators.npu_scatter_pa_kv_cache

    def picky(*, key_cache: Tensor, **others: Any) -> Any:
        if key_cache.stride(0) > 2 * key_cache[0].numel():
            raise RuntimeError("the stride of keyCache is not supported")
        return write(key_cache=key_cache, **others)

    operators.npu_scatter_pa_kv_cache = picky


def wrap(operators: Any) -> None:
    """Let what writes the cache reach only the first blocks of a view, as if it counted items in too few bits."""
    write = operators.npu_scatter_pa_kv_cache

    def wrapping(*, key_cache: Tensor, slot_mapping: Tensor, **others: Any) -> Any:
        if key_cache.stride(0) > 2 * key_cache[0].numel():
            slot_mapping = (slot_mapping.cpu() % (REACHED_BLOCKS * key_cache.shape[1])).to(slot_mapping.device)
        return write(key_cache=key_cache, slot_mapping=slot_mapping, **others)

    operators.npu_scatter_pa_kv_cache = wrapping


OPERATOR_FAULTS = {
    "none": lambda operators: None, "ignores": ignore_strides, "copies": copy_caches, "refuses": refuse, "wraps": wrap,
}  # fmt: skip


def main(fault: str, model: str) -> None:
    """Start the engine and let it answer."""
    import torch_npu  # noqa: PLC0415

    OPERATOR_FAULTS[fault](torch_npu)
    engine = start_engine(model)
    from vllm import SamplingParams  # noqa: PLC0415  after the engine, which sets variables for it

    sampling = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True)
    [answer] = engine.generate([{"prompt_token_ids": PROMPT}], sampling, use_tqdm=False)
    print("TOKENS", list(answer.outputs[0].token_ids), flush=True)  # noqa: T201  its result


if __name__ == "__main__":
    main(*sys.argv[1:])
