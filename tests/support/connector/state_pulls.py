"""Pulls of states between two engines, of which every byte is checked."""

from typing import Any

import numpy as np

from layout.plan import BlockTable, Plan, compile_plans
from layout.sharding import choose_sources
from tests.support.connector.state_caches import StateLayout, StateModel, StateRank, fill, ranks

#: Of the request.
STATE_TOKENS = 100


def state_plans(local: StateRank, remotes: list[StateRank]) -> dict[int, Plan]:
    theirs = [remote.geometry for remote in remotes]
    return compile_plans(local.geometry, theirs, choose_sources(local.geometry, theirs))


def pull_states(
    model: StateModel, local: StateLayout, remote: StateLayout, monkeypatch: Any,
    ours: dict[int, int] | None = None, theirs: dict[int, int] | None = None,
) -> int:  # fmt: skip
    """Read states into every rank and check every byte of it; return the number of descriptors.

    ``ours`` and ``theirs``: by the number of tokens, in which block each state is.
    """
    ours, theirs = ours or {STATE_TOKENS: 2}, theirs or {STATE_TOKENS: 4}
    senders, readers = ranks(model, remote, monkeypatch), ranks(model, local, monkeypatch)
    fill(senders, theirs, model)
    descriptors = 0
    for reader in readers:
        expected, writers = reader.memory.copy(), np.zeros(len(reader.memory), np.int64)
        for tokens in ours.keys() & theirs.keys():
            places, values = reader.bytes_of(ours[tokens], model.state(tokens))
            expected[places] = values
            writers[places] += 1
        for source, plan in state_plans(reader, senders).items():
            copies = plan.instantiate_states([state_table(ours, local)], [state_table(theirs, remote)], STATE_TOKENS)
            reader.receive(copies, senders[source])
            descriptors += len(copies.sizes)
        assert np.array_equal(reader.memory, expected)
        assert np.array_equal(reader.writers, writers)
    return descriptors


def state_table(blocks: dict[int, int], engine: StateLayout) -> BlockTable:
    """A block table with a state in each of ``blocks``."""
    ids = [-1] * -(-STATE_TOKENS // engine.block_tokens)
    for tokens, block in blocks.items():
        ids[-(-tokens // engine.block_tokens) - 1] = block
    return BlockTable.of(ids)
