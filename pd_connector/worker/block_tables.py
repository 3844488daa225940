"""vLLM's block tables as planning takes them."""

from collections.abc import Sequence

import numpy as np

from layout.plan import BlockTable


def block_table(block_ids: Sequence[int]) -> BlockTable:
    """A request's block table; vLLM's null block, id 0, is a hole."""
    ids = np.array(block_ids, np.int64)
    return BlockTable.of(np.where(ids == 0, -1, ids))
