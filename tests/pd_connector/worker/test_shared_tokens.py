"""What walks the tokens of a cache is right where ranks share them: checksums, values, and the comparison of pulls.

Covers: layout.checksums.
"""

import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from layout.compatibility import IncompatibleCachesError
from layout.geometry import Region
from layout.host_blocks import host_layout
from layout.host_slots import slot_geometry
from layout.plan import BlockTable, compile_plans
from layout.scratch import scratch_bytes, scratch_geometry
from layout.sharding import choose_sources
from pd_connector.orders import ChecksumOrder, ChecksumReport, PullOrder
from pd_connector.scheduler.prefill.checksum_table import ChecksumTable
from pd_connector.worker import verification
from pd_connector.worker.canary import canary_room
from pd_connector.worker.lease_checksums import CacheChecksums
from pd_connector.worker.pull_end import PullFailed
from pd_connector.worker.verification import Verifier
from tests.support.connector.requests import a_prompt, a_remote
from tests.support.layout.shared_tokens import INDEXED, LATENT, Shared, SharedRank, execute, ranks_of
from transfer.control.client import ControlClient
from transfer.copies.checksums.block_checksums import sum_plane
from transfer.copies.checksums.values import read_values

IDS = (5, 2, 4, 1)
#: A rank that holds all tokens, with blocks of as many.
ALONE = Shared(rows=64, blocks=6)


def filled(side: Shared) -> list[SharedRank]:
    ranks = ranks_of(INDEXED, replace(side, blocks=6))
    for rank in ranks:
        rank.write(rank.caches, IDS, range(len(IDS) * side.block_tokens))
    return ranks


@pytest.mark.parametrize("interleave", [1, 4, 16])
def test_the_sums_of_ranks_that_share_tokens_add_up_to_those_of_one_that_has_all(interleave: int) -> None:
    side, borders = Shared(4, 4, interleave, rows=16), [64, 128, 192, 203]
    (alone,) = filled(ALONE)
    for number, plane in enumerate(alone.geometry.groups[0].planes):
        whole = sum_plane(plane, 64, BlockTable.of(IDS), 64, 203).between(borders)
        shared = filled(side)  # owns the memory
        planes = [rank.geometry.groups[0].planes[number] for rank in shared]
        parts = [sum_plane(each, 64, BlockTable.of(IDS), 64, 203).between(borders) for each in planes]
        np.testing.assert_array_equal(
            parts[0] if plane.part == "index" else np.sum(parts, axis=0, dtype=np.uint64), whole
        )
        assert whole.all()


@pytest.mark.parametrize("interleave", [1, 4, 16])
def test_values_are_at_their_tokens(interleave: int) -> None:
    (alone,), shared = filled(ALONE), filled(Shared(4, 4, interleave, rows=16))
    for rank in shared:
        for ours, all_of in zip(rank.geometry.groups[0].planes, alone.geometry.groups[0].planes, strict=True):
            values = read_values(ours, 64, BlockTable.of(IDS), 30, 203)
            right = read_values(all_of, 64, BlockTable.of(IDS), 30, 203)
            held = [ours.tokens.ranks == 1 or token // interleave % 4 == rank.dcp_rank for token in range(30, 203)]
            assert values.held.tolist() == held
            np.testing.assert_array_equal(values.data[:, held], right.data[:, held])
            assert not values.data[:, ~values.held].any()


def test_scratch_memory_has_the_same_tokens() -> None:
    """So that a prompt of a canary is pulled to it, and compared, as to the cache."""
    (alone,), rank = filled(ALONE), filled(Shared(4, 4, 4, rows=16))[2]
    memory = np.zeros(scratch_bytes(rank.geometry, [4]), np.uint8)
    scratch = scratch_geometry(rank.geometry, Region(int(memory.ctypes.data), memory.size), [4])
    plans = compile_plans(scratch, [alone.geometry], choose_sources(scratch, [alone.geometry]))
    execute(plans[0].instantiate([BlockTable.of([3, 1, 2, 4])], [BlockTable.of(IDS)], 0, 256))
    for ours, theirs in zip(rank.geometry.groups[0].planes, scratch.groups[0].planes, strict=True):
        cached = read_values(ours, 64, BlockTable.of(IDS), 0, 200)
        pulled = read_values(theirs, 64, BlockTable.of([3, 1, 2, 4]), 0, 200)
        np.testing.assert_array_equal(cached.held, pulled.held)
        np.testing.assert_array_equal(cached.data, pulled.data)


@pytest.mark.parametrize("interleave", [1, 16])
def test_the_fewest_tokens_that_prove_an_engine_are_on_every_rank(interleave: int) -> None:
    for rank in filled(Shared(4, 4, interleave, rows=16)):
        least = canary_room(rank.geometry).least
        for plane in rank.geometry.groups[0].planes:
            assert read_values(plane, 64, BlockTable.of(IDS), 0, least).held.any()


def test_a_slot_of_host_memory_has_a_ranks_share_of_a_block() -> None:
    (alone,), rank = filled(ALONE), filled(Shared(4, 4, 4, rows=16))[1]
    layout = host_layout(rank.geometry)
    memory = np.zeros(5 * layout.slot_bytes, np.uint8)
    slots = slot_geometry(rank.geometry, layout, Region(int(memory.ctypes.data), memory.size))
    plans = compile_plans(slots, [alone.geometry], choose_sources(slots, [alone.geometry]))
    execute(plans[0].instantiate([BlockTable.of([3, 1, 2, 4])], [BlockTable.of(IDS)], 0, 256))
    for plane in rank.geometry.groups[0].planes:
        cached = read_values(plane, 64, BlockTable.of(IDS), 0, 200)
        held = [each for each in slots.groups[0].planes if each.part == plane.part]
        loaded = [read_values(each, 64, BlockTable.of([3, 1, 2, 4]), 0, 200) for each in held]
        np.testing.assert_array_equal(cached.held, loaded[0].held)
        np.testing.assert_array_equal(cached.data, np.concatenate([each.data for each in loaded]))


# Pulls that are compared


class BookClient(ControlClient):
    """Asks a book without a network."""

    def __init__(self, book: ChecksumTable) -> None:  # no thread
        self.book = book

    def request(self, host: str, port: int, message: Any, timeout_s: float) -> Future[Any]:
        answer: Future[Any] = Future()
        answer.set_result(self.book.answer(message))
        return answer


def verify(local: Shared, remote: Shared, spoil: Sequence[int] = ()) -> tuple[int, list[str]]:
    """Pull a prompt into every rank and compare; return the bytes that were spoilt, and what was found.

    ``spoil``: numbers of items of each cache that change after they have arrived.
    """
    end = 3 * max(local.block_tokens, remote.block_tokens) - 5
    need = [tuple(range(1, 1 + -(-end // side.block_tokens))) for side in (local, remote)]
    theirs = ranks_of(LATENT, replace(remote, blocks=len(need[1]) + 1))
    for rank in theirs:
        rank.write(rank.caches, need[1], range(len(need[1]) * remote.block_tokens))
    remotes = [rank.geometry for rank in theirs]
    prefilled = a_remote(a_prompt(end + 1), remote_block_ids=[need[1]])
    book = ChecksumTable(frozenset)
    book.set_workers(len(theirs))
    book.order(ChecksumOrder(prefilled.lease_id, (need[1],), end))
    for number, geometry in enumerate(remotes):
        sums = CacheChecksums(geometry).sums([need[1]], 0, end, threading.Event())
        book.add(ChecksumReport(prefilled.lease_id, number, sums))
    found, spoilt = [], 0
    for rank in ranks_of(LATENT, replace(local, blocks=len(need[0]) + 1)):
        sources = choose_sources(rank.geometry, remotes)
        for plan in compile_plans(rank.geometry, remotes, sources).values():
            execute(plan.instantiate([BlockTable.of(need[0])], [BlockTable.of(need[1])], 0, end))
        wanted = [np.zeros_like(cache) for cache in rank.caches]
        rank.write(wanted, need[0], range(end))
        for cache, right in zip(rank.caches, wanted, strict=True):
            for place in spoil:
                spoilt += bool(right.flat[place])
                cache[np.unravel_index(place, cache.shape)] ^= 1
        verifier = Verifier(CacheChecksums(rank.geometry), BookClient(book))
        verifier.check_peer(True, remotes, sources)
        try:
            order = PullOrder("r", prefilled, (need[0],), 0, end, "pull")
            verifier.verify(order, remotes, sources, time.monotonic() + 10, threading.Event())
        except PullFailed as failed:
            found.append(str(failed))
    return spoilt, found


PAIRS = [
    (Shared(4, 4, 1, 16), Shared(4, 4, 1, 16)),
    (Shared(4, 4, 1, 32), Shared(4, 4, 1, 16)),
    (Shared(4, 4, 1, 16), Shared(4, 4, 1, 8)),
    (Shared(4, 4, 16, 32), Shared(4, 4, 16, 16)),
    (Shared(3, 3, 16, 16), Shared(2, 2, 16, 16)),
    (Shared(1, 1, 1, 16), Shared(4, 4, 32, 32)),
    (Shared(4, 4, 32, 32), Shared(1, 1, 1, 16)),
    (Shared(4, 2, 16, 16), Shared(4, 4, 16, 48)),
]


@pytest.mark.parametrize(("local", "remote"), PAIRS)
def test_what_arrives_is_what_was_leased_and_one_wrong_item_is_found(local: Shared, remote: Shared) -> None:
    assert verify(local, remote) == (0, [])
    for place in (local.rows * 4 + 5, local.rows * 9 + 2):
        spoilt, found = verify(local, remote, [place])
        assert spoilt
        assert len(found) == local.tp
        assert "1 of" in found[0] or "2 of" in found[0]


def test_many_ranges_are_asked_for_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verification, "_RANGES_PER_ANSWER", 2)
    assert verify(*PAIRS[4]) == (0, [])
    spoilt, found = verify(*PAIRS[4], [PAIRS[4][0].rows * 4 + 5])
    assert spoilt
    assert len(found) == 3


def test_checksums_over_tokens_of_several_ranks_are_refused() -> None:
    message = "a checksum is of 16 tokens, .* runs of 1 tokens on 2 ranks here and of 16 on 4 on the remote engine"
    with pytest.raises(IncompatibleCachesError, match=message):
        verify(Shared(2, 2, 1, 16), Shared(4, 4, 16, 16))
