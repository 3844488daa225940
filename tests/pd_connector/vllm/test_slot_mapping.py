"""Which token lies where if ranks share them, against the source of vLLM's own kernel.

Covers: layout.context_parallel.
"""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from vllm.v1.worker import block_table

from tests.support.releases import INSTALLED, module_needs

if INSTALLED < (0, 30):
    module_needs((0, 30), "context parallelism that is served")

from layout.context_parallel import TokenSplit
from tests.support.connector.slot_mapping import NumpyTriton, slots_by_vllm

splits = st.builds(
    lambda interleave, ranks, rank: TokenSplit(interleave, ranks, rank % ranks),
    st.sampled_from([1, 2, 3, 8]),
    st.integers(1, 6),
    st.integers(0, 5),
)


@settings(deadline=None)
@given(splits, st.integers(1, 4), st.data())
def test_tokens_lie_where_vllm_writes_them(split: TokenSplit, runs: int, data: st.DataObject) -> None:
    rows = split.interleave * runs
    block_ids = data.draw(st.permutations(range(7)))
    tokens = np.arange(rows * split.ranks * len(block_ids))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(block_table, "tl", NumpyTriton())
        form = split.interleave, split.ranks, split.rank
        slots = slots_by_vllm(tokens.tolist(), block_ids, rows, form)
    held = split.holds(tokens)
    np.testing.assert_array_equal(held, slots >= 0)
    places = split.before(tokens[held])
    np.testing.assert_array_equal(slots[held], np.array(block_ids)[places // rows] * rows + places % rows)
    np.testing.assert_array_equal(split.tokens_at(places), tokens[held])
    np.testing.assert_array_equal(split.before(tokens), np.concatenate([[0], np.cumsum(held)[:-1]]))
