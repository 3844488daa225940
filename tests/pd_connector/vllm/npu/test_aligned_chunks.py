"""Ends of prefill chunks. With vllm-ascend's scheduler and vLLM's block managers: ``tests/ascend_sim``."""

import sys

from hypothesis import given
from hypothesis import strategies as st

from pd_connector.vllm.npu.aligned_chunks import align_chunks, chunk_end


@given(st.integers(0, 100), st.integers(1, 100), st.integers(1, 20))
def test_a_chunk_goes_on_and_passes_a_border_only_to_end_at_one(start: int, tokens: int, size: int) -> None:
    end = chunk_end(start, start + tokens, size)
    assert start < end <= start + tokens
    if end // size > start // size:
        assert end % size == 0
    if start % size:
        assert end <= start + size - start % size, "the state that is running there has yet to come to its border"


def test_without_vllm_ascend_nothing_is_changed() -> None:
    align_chunks()
    assert "vllm_ascend" not in sys.modules
