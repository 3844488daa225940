"""Which states of a request a block table has.

    entry of the table          0             1         2             3
    state after            block_tokens  2 * ...     3 * ...      all tokens     (the running state: the last entry)

An engine that finds no prefixes keeps one state of a request, with a block size of all tokens that it serves. Entries
behind the running state are room for drafts.
"""

import numpy as np

from layout.copies import Int64Array


def running_entry(tokens: int, block_tokens: int) -> int:
    """Return which entry of a block table has the state after all of ``tokens`` tokens, at least 1."""
    return (tokens - 1) // block_tokens


def state_entries(block_ids: Int64Array, block_tokens: int, tokens: int) -> dict[int, int]:
    """Return the entries of a block table that hold states, by the number of tokens after which each is.

    Args:
        block_ids: from entry 0 on; a negative one holds nothing.
        block_tokens: tokens between the states of two entries.
        tokens: of the request, at least 1.
    """
    held = np.flatnonzero(block_ids[: running_entry(tokens, block_tokens) + 1] >= 0).tolist()
    return {min((entry + 1) * block_tokens, tokens): entry for entry in held}
