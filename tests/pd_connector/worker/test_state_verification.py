"""What was pulled of states is what was leased: one wrong bit in any of them is found, and its part is named."""

import threading
import time
from dataclasses import dataclass, replace

import numpy as np
import pytest

from tests.support.releases import INSTALLED, module_needs

if INSTALLED < (0, 30):
    module_needs((0, 30), "states of recurrent layers")

from layout.compatibility import IncompatibleCachesError
from layout.sharding import choose_sources
from pd_connector.orders import ChecksumOrder, ChecksumReport, PullOrder
from pd_connector.scheduler.prefill.checksum_table import ChecksumTable
from pd_connector.worker.lease_checksums import CacheChecksums
from pd_connector.worker.pull_end import PullFailed
from pd_connector.worker.verification import Verifier
from tests.support.connector.book_client import BookClient
from tests.support.connector.requests import a_prompt, a_remote
from tests.support.connector.state_caches import GDN, MAMBA2, StateLayout, StateModel, StateRank, fill, ranks
from tests.support.connector.state_pulls import STATE_TOKENS, state_plans, state_table
from transfer.control.limits import MAX_SUMS

#: Of both engines: the last border of the smaller blocks that the larger ones share.
BORDER = 64
OURS, THEIRS = {BORDER: 1, STATE_TOKENS: 4}, {BORDER: 5, STATE_TOKENS: 2}
HERE, THERE = StateLayout(drafts=2, padding=48), StateLayout(is_column_first=True, block_tokens=64)
PARTS = [(MAMBA2, part) for part in ("conv_x", "conv_b", "conv_c", "state")]
PARTS += [(GDN, part) for part in ("conv_q", "conv_k", "conv_v", "state")]
of_parts = pytest.mark.parametrize(("model", "part"), PARTS, ids=lambda each: each if isinstance(each, str) else "")
of_sizes = pytest.mark.parametrize("sizes", [(1, 2), (2, 1), (2, 3)], ids=lambda sizes: f"TP {sizes[1]} to {sizes[0]}")


@dataclass
class _Pulled:
    """States that every rank here has read, and the checksums that the ranks there took before that."""

    model: StateModel
    readers: list[StateRank]
    senders: list[StateRank]
    order: PullOrder
    client: BookClient

    @classmethod
    def of(cls, model: StateModel, sizes: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> "_Pulled":
        here, there = replace(HERE, tp=sizes[0]), replace(THERE, tp=sizes[1])
        readers, senders = ranks(model, here, monkeypatch), ranks(model, there, monkeypatch)
        fill(senders, THEIRS, model)
        ours, theirs = (
            tuple(max(block, 0) for block in state_table(blocks, engine).block_ids.tolist())
            for blocks, engine in ((OURS, here), (THEIRS, there))
        )
        remote = a_remote(a_prompt(STATE_TOKENS + 1), remote_block_ids=(theirs,))
        book = ChecksumTable(frozenset)
        book.set_workers(len(senders))
        book.order(ChecksumOrder(remote.lease_id, (theirs,), STATE_TOKENS))
        for number, sender in enumerate(senders):
            sums = CacheChecksums(sender.geometry).sums((theirs,), 0, STATE_TOKENS, threading.Event())
            book.add(ChecksumReport(remote.lease_id, number, sums))
        for reader in readers:
            for source, plan in state_plans(reader, senders).items():
                tables = [state_table(OURS, here)], [state_table(THEIRS, there)]
                reader.receive(plan.instantiate_states(*tables, STATE_TOKENS), senders[source])
        order = PullOrder("r", remote, (ours,), 0, STATE_TOKENS, "pull")
        return cls(model, readers, senders, order, BookClient(book))

    def verify(self, reader: StateRank) -> None:
        workers = [sender.geometry for sender in self.senders]
        sources = choose_sources(reader.geometry, workers)
        verifier = Verifier(CacheChecksums(reader.geometry), self.client)
        verifier.check_peer(True, workers, sources)
        verifier.verify(self.order, workers, sources, time.monotonic() + 10, threading.Event())


@of_sizes
@of_parts
@pytest.mark.parametrize("tokens", OURS)
def test_the_highest_bit_of_one_number_fails_the_pull_on_the_ranks_that_hold_it(
    model: StateModel, part: str, tokens: int, sizes: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    pulled = _Pulled.of(model, sizes, monkeypatch)
    wrong = model.state(tokens)
    wrong[part.removeprefix("conv_")][-1, -1, -1, -1] ^= 0x80  # of the last layer, row and head: a float's sign
    failed = []
    for reader in pulled.readers:
        pulled.verify(reader)
        before = reader.memory.copy()
        reader.fill(OURS[tokens], wrong)
        if np.array_equal(reader.memory, before):  # another rank holds it
            pulled.verify(reader)
            continue
        words = rf"layer 'model.layers.{model.layers - 1}.mixer', part '{part}', .* tokens 0 to {tokens - 1}:"
        with pytest.raises(PullFailed, match=words) as failure:
            pulled.verify(reader)
        assert str(failure.value).startswith("1 of "), "other states are right"
        failed.append(reader.rank)
    assert failed == (list(range(sizes[0])) if part in {"conv_b", "conv_c"} else [sizes[0] - 1])


@of_sizes
@pytest.mark.parametrize("model", [MAMBA2, GDN], ids=["Mamba2", "GDN"])
def test_what_is_no_part_of_the_states_may_be_anything(
    model: StateModel, sizes: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows for drafts, the room behind each state, and other blocks."""
    pulled = _Pulled.of(model, sizes, monkeypatch)
    for reader in pulled.readers:
        other = ~reader.memory
        for tokens, block in OURS.items():
            places, values = reader.bytes_of(block, model.state(tokens))
            other[places] = values
        reader.memory[:] = other
        pulled.verify(reader)


def test_more_states_by_channel_than_an_answer_has_checksums_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    pulled = _Pulled.of(MAMBA2, (1, 1), monkeypatch)
    (reader,), (sender,) = pulled.readers, pulled.senders
    (group,) = sender.geometry.groups
    planes = tuple(replace(plane, heads=MAX_SUMS // len(plane.layers)) for plane in group.planes)
    larger = replace(sender.geometry, groups=(replace(group, planes=planes),))
    verifier = Verifier(CacheChecksums(reader.geometry), pulled.client)
    with pytest.raises(IncompatibleCachesError, match=rf"heads or channels .* at most {MAX_SUMS} .* \"verify\": false"):
        verifier.check_peer(True, [larger], choose_sources(reader.geometry, [sender.geometry]))
