"""Pulls of prompts that the prefill engine still computes: range by range, and confirmed once, at the end.

Real leases and real bytes; the transfer engine is the in-process one, and the test says when P computes what.
"""

import logging
import random
import threading
from dataclasses import replace

import pytest

from layout.cost import CostModel
from pd_connector.orders import Cause
from pd_connector.stats import StatsRecorder
from pd_connector.worker import peer, remote_reader
from pd_connector.worker.lease_checksums import CacheChecksums
from pd_connector.worker.verification import Verifier
from tests.support.connector.chunked_prompts import TRANSFER_ID, ChunkedPrompt, follow
from tests.support.connector.engines import (
    MODEL,
    OURS,
    THEIRS,
    Blocks,
    Site,
)
from tests.support.connector.followed_legs import ELSEWHERE, FollowedLegs, legs_of
from tests.support.engine.in_process import Fault
from tests.support.layout.oracle import Engine
from tests.support.waiting import until
from transfer.control.messages import Cancel, TransferState


@pytest.fixture(autouse=True)
def everything_is_worth_reading(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_reader, "RANGE_S", 0.0)


@pytest.fixture
def legs(site: Site) -> FollowedLegs:
    return legs_of(site)


# The way that succeeds


def test_what_is_computed_is_read_while_the_rest_is_being_computed(legs: FollowedLegs) -> None:
    legs.prompt.compute(16)
    legs.submit()
    legs.reads(1)
    assert legs.worker.holds([(OURS, 0, 16)])
    legs.prompt.compute(40)
    legs.reads(2)
    assert legs.worker.holds([(OURS, 0, 32)]), "a block that is not full yet is left for later"
    assert not legs.session.idle
    legs.prompt.complete()
    end = legs.end()
    assert (end.cause, end.reason, end.tokens) == ("", "", 69)
    assert legs.worker.holds([(OURS, 0, 69)])
    assert legs.site.fabric.reads == 3
    assert legs.prefill.leases.collect() == (TRANSFER_ID,)
    assert legs.prefill.leases.take_counts() == {"granted": 1, "released": 1}
    assert legs.client.cancels == []


def test_a_prompt_that_is_complete_when_the_pull_begins_is_one_range(legs: FollowedLegs) -> None:
    legs.prompt.compute(16)
    order = legs.prompt.order("r", OURS)
    legs.prompt.complete()
    legs.session.submit(replace(order, complete_tokens=0))
    assert legs.end().cause == ""
    assert (legs.site.fabric.reads, len(legs.prompt.asked)) == (1, 1)
    assert legs.worker.holds([(OURS, 0, 69)])


def test_what_takes_too_many_descriptors_is_read_in_several_ranges(
    legs: FollowedLegs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their number follows from what a peer states of its caches, and they take memory."""
    monkeypatch.setattr(peer, "_RANGE_DESCRIPTORS", 1)
    legs.prompt.compute(16)
    order = legs.prompt.order("r", OURS)
    legs.prompt.complete()
    legs.session.submit(replace(order, complete_tokens=0))
    assert legs.end().cause == ""
    assert legs.site.fabric.reads == 5
    assert legs.worker.holds([(OURS, 0, 69)])


def test_where_reading_slows_the_prefill_engine_down_nothing_is_read_before_the_prompt_is_complete(site: Site) -> None:
    legs = legs_of(site, reads_ahead=False)
    legs.prompt.compute(16)
    legs.submit()
    legs.reads(0)
    legs.prompt.compute(48)
    legs.reads(0)
    legs.prompt.complete()
    end = legs.end()
    assert (end.cause, end.tokens, end.ahead_bytes) == ("", 69, 0)
    assert legs.site.fabric.reads == 1
    assert legs.worker.holds([(OURS, 0, 69)])


def test_a_prefix_that_is_here_already_is_not_read(legs: FollowedLegs) -> None:
    legs.prompt.compute(16)
    legs.submit(first=32)
    legs.reads(0)
    legs.prompt.compute(48)
    legs.reads(1)
    legs.prompt.complete()
    end = legs.end()
    assert (end.cause, end.tokens) == ("", 37)
    assert legs.worker.holds([(OURS, 32, 69)])


def test_what_is_small_is_read_together(legs: FollowedLegs, monkeypatch: pytest.MonkeyPatch) -> None:
    token_bytes = MODEL.layers * MODEL.kv_heads * sum(MODEL.contents) * MODEL.item_size
    monkeypatch.setattr(remote_reader, "RANGE_S", 48 * token_bytes * legs.worker.context().reads._cost.beta)
    legs.prompt.compute(32)
    legs.submit()
    legs.reads(0)
    legs.prompt.compute(48)
    legs.reads(1)
    assert legs.worker.holds([(OURS, 0, 48)])
    legs.prompt.compute(64)
    legs.reads(1)
    legs.prompt.complete()
    assert legs.end().cause == ""
    assert legs.site.fabric.reads == 2
    assert legs.worker.holds([(OURS, 0, 69)])


def test_where_bytes_cost_nothing_all_is_read_at_the_end() -> None:
    reader = remote_reader.RemoteReader(replace(CostModel.of_protocol("tcp"), beta=0.0), ())
    assert reader.least_bytes() == float("inf")


@pytest.mark.parametrize(
    ("prefill", "decode"),
    [
        (Engine("BHLNC", block_tokens=32, blocks=12, tp=2), Engine("LBHNC", blocks=12)),
        (Engine("LBNHC", block_tokens=16, blocks=12), Engine("BLHNC", block_tokens=48, blocks=12, tp=2)),
        (Engine("LBNHC", block_tokens=48, blocks=12, pp=2, tp=4), Engine("BHLNC", block_tokens=32, blocks=12, tp=2)),
        (Engine("BLNHC", "packed", block_tokens=32, blocks=12), Engine("BHLNC", "packed", block_tokens=32, blocks=12)),
    ],
    ids=["tp 2 to 1", "tp 1 to 2", "pp 2, tp 4 to 2", "packed"],
)
@pytest.mark.parametrize("seed", range(3))
def test_every_byte_arrives_whatever_the_engines_and_the_chunks_are(
    site: Site, prefill: Engine, decode: Engine, seed: int
) -> None:
    dice = random.Random(seed)
    theirs, ours = ((tuple(dice.sample(range(1, 12), -(-70 // engine.block_tokens))),) for engine in (prefill, decode))
    source, workers = site.prefill(prefill), site.decode(decode)
    prompt = ChunkedPrompt(source, theirs)
    prompt.compute(dice.choice([0, 5, 20]))
    sessions = []
    for worker in workers:
        follow(worker, prompt)
        sessions.append(site.session(worker, prompt.remote()))
        sessions[-1].submit(prompt.order("r", ours))
    while prompt.tokens < 60:
        until(lambda: prompt.waiting == len(workers))
        prompt.compute(min(prompt.tokens + dice.choice([1, 9, 16, 33]), 70))
    until(lambda: prompt.waiting == len(workers))
    prompt.complete()
    assert [worker.next_end().cause for worker in workers] == ["" for _ in workers]
    assert all(worker.holds([(ours, 0, 69)], prefill) for worker in workers)
    assert site.fabric.reads > len(workers) * len(source.ranks), "nothing was read before the end"
    assert source.leases.collect() == (TRANSFER_ID,)


def test_a_window_that_moves_while_the_prompt_is_computed_is_read_where_it_ends(site: Site) -> None:
    windowed = replace(MODEL, groups=((0, 2), (1,)), windows=(0, 32))
    ours: Blocks = ((1, 2, 8, 3, 11), (0, 0, 7, 9, 5))
    legs = legs_of(site, blocks=((5, 6, 3, 9, 2), (10, 11, 1, 4, 7)), model=windowed)
    legs.prompt.compute(32)
    legs.submit(ours)
    legs.reads(1)
    legs.prompt.compute(64)
    legs.reads(2)
    assert legs.prompt.remote().remote_block_ids[1] == (0, 0, 1, 4)
    legs.prompt.complete()
    end = legs.end()
    assert (end.cause, end.restarts) == ("", 0)
    assert legs.worker.holds([(ours, 0, 69)])


def test_a_block_that_the_window_passes_after_it_was_read_fails_the_pull(site: Site) -> None:
    """It is wanted here, because blocks here are larger than the window: what was read of it cannot be confirmed."""
    windowed = replace(MODEL, groups=((0, 2), (1,)), windows=(0, 32))
    legs = legs_of(site, blocks=((5, 6, 3, 9, 2), (10, 11, 1, 4, 7)), model=windowed)
    legs.prompt.compute(32)
    legs.submit(((1, 2, 8, 3, 11), (4, 6, 7, 9, 5)))
    legs.reads(1)
    legs.prompt.complete()
    end = legs.end()
    assert (end.cause, end.restarts) == (Cause.PARAMS, 1)
    assert "the remote side holds no block for token 0, which is needed here" in end.reason


def test_a_block_that_is_not_announced_is_awaited(legs: FollowedLegs) -> None:
    legs.prompt.compute(32)
    legs.prompt.changes = {"block_ids": ((5, 0, 3),), "first_blocks": (0,)}
    legs.submit(remote_block_ids=((5, 0),))
    legs.reads(0)
    legs.prompt.compute(48)
    legs.reads(0)
    legs.prompt.changes = {}
    legs.prompt.complete()
    assert legs.end().cause == ""
    assert legs.worker.holds([(OURS, 0, 69)])


# What P takes back


def test_a_prompt_that_is_preempted_is_read_from_the_beginning(legs: FollowedLegs) -> None:
    legs.prompt.compute(48)
    legs.submit()
    legs.reads(1)
    legs.prompt.preempt(ELSEWHERE)
    legs.prompt.answer_news()
    legs.reads(1)
    assert legs.prompt.asked[-1].state == TransferState.QUEUED
    legs.prompt.compute(32)
    legs.reads(2)
    legs.prompt.complete()
    end = legs.end()
    assert (end.cause, end.restarts) == ("", 1)
    assert legs.worker.holds([(OURS, 0, 69)])
    assert 2 * end.copied_bytes == 5 * end.ahead_bytes, "what came to nothing does not count"
    assert legs.prefill.leases.take_counts() == {"granted": 1, "released": 1}


def test_a_prompt_that_is_preempted_and_complete_again_before_anybody_asks(legs: FollowedLegs) -> None:
    legs.prompt.compute(48)
    hung = threading.Event()
    legs.site.fabric.inject(1, Fault(until=hung, fails=False))
    legs.submit()
    until(lambda: legs.site.fabric.reads == 1)
    legs.prompt.preempt(ELSEWHERE)
    legs.prompt.complete()
    hung.set()
    end = legs.end()
    assert (end.cause, end.restarts) == ("", 1)
    assert legs.worker.holds([(OURS, 0, 69)])


def test_a_prompt_whose_blocks_were_exchanged_in_silence_is_read_again(legs: FollowedLegs) -> None:
    """No prefill engine should do that: but only the final block table is trusted."""
    legs.prompt.compute(48)
    legs.submit()
    legs.reads(1)
    legs.prompt.preempt(ELSEWHERE)
    legs.prompt.attempt = 0
    legs.prompt.complete()
    end = legs.end()
    assert (end.cause, end.restarts) == ("", 1)
    assert legs.worker.holds([(OURS, 0, 69)])


@pytest.mark.parametrize("state", ["ended", "unknown", "paused"])
def test_a_prompt_that_will_not_be_complete_fails_the_pull_and_p_is_told(legs: FollowedLegs, state: str) -> None:
    legs.prompt.compute(16)
    legs.submit()
    legs.reads(1)
    legs.prompt.end("its client has left", state)
    end = legs.end()
    assert end.cause == Cause.TRANSFER
    assert TRANSFER_ID in end.reason
    assert end.reason.endswith(": its client has left")
    assert legs.client.cancels == [Cancel(legs.prefill.service.engine_id, (), (TRANSFER_ID,))]


def test_a_lease_that_has_ended_fails_what_was_read_ahead(legs: FollowedLegs) -> None:
    legs.prompt.compute(48)
    legs.submit()
    legs.reads(1)
    hung = threading.Event()
    legs.site.fabric.inject(2, Fault(until=hung, fails=False))
    legs.prompt.complete()
    until(lambda: legs.site.fabric.reads == 2)
    legs.prefill.leases.cancel(["lease-of-transfer-1"])
    hung.set()
    end = legs.end()
    assert end.cause == Cause.LEASE
    assert "was cancelled before the read was done" in end.reason
    assert legs.client.cancels == []


def test_a_lease_over_other_blocks_than_were_announced_is_not_confirmed(legs: FollowedLegs) -> None:
    legs.prompt.compute(48)
    legs.submit()
    legs.reads(1)
    legs.prompt.changes = {"attempt": 1, "block_ids": THEIRS, "first_blocks": (0,)}
    legs.prompt.complete()
    end = legs.end()
    assert (end.cause, end.restarts) == (Cause.LEASE, 1)
    assert "kv_transfer_params were altered on the way" in end.reason


def test_another_request_under_the_same_name_is_refused(legs: FollowedLegs) -> None:
    legs.prompt.compute(16)
    legs.submit()
    legs.reads(1)
    legs.prompt.changes = {"prompt_tokens": 71}
    legs.prompt.complete()
    end = legs.end()
    assert end.cause == Cause.TRANSFER
    assert "its num_tokens is 71, and was 70. A transfer id is good for one request" in end.reason


# Checksums and statistics


def test_what_was_read_in_ranges_is_compared_with_what_was_leased(site: Site) -> None:
    source, (worker,) = site.prefill(verify=True), site.decode()
    prompt = ChunkedPrompt(source, THEIRS)
    follow(worker, prompt)
    verifier = Verifier(CacheChecksums(worker.rank.geometry), worker.client)
    session = site.session(worker, prompt.remote(), verifier=verifier)
    prompt.compute(48)
    session.submit(prompt.order("r", OURS))
    until(lambda: prompt.waiting == 1)
    second_block = worker.rank.planes[0].index[0, OURS[0][1]]
    worker.rank.memory[second_block[0, 0, 0]] ^= 1  # of what has been read ahead
    prompt.complete()
    source.hash_leased()
    end = worker.next_end()
    assert end.cause == Cause.CHECKSUM
    assert "tokens 16 to 31" in end.reason


def test_a_pull_counts_what_it_has_read_ahead(legs: FollowedLegs) -> None:
    legs.prompt.compute(32)
    legs.submit()
    legs.reads(1)
    legs.prompt.complete()
    end = legs.end()
    assert end.seconds.keys() == {"queue", "handshake", "wait", "plan", "read", "release", "total"}
    token_bytes = MODEL.layers * MODEL.kv_heads * sum(MODEL.contents) * MODEL.item_size
    assert (end.copied_bytes, end.ahead_bytes) == (80 * token_bytes, 32 * token_bytes)
    stats = StatsRecorder()
    end.count(stats)
    replace(end, cause=Cause.READ, restarts=2).count(stats)
    report = stats.take()
    assert report is not None
    assert report["counts"] == {
        "pulls": 1,
        "pull_bytes": 80 * token_bytes,
        "pull_descriptors": end.descriptors,
        "pull_tokens": 69,
        "pulls_ahead": 1,
        "pull_bytes_ahead": 32 * token_bytes,
        "pull_restarts": 2,
        "pull_failures:read": 1,
    }
    assert report["seconds"].keys() == end.seconds.keys()


def test_the_log_of_a_pull_names_each_range(
    legs: FollowedLegs, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("pd_connector"), "propagate", True)
    caplog.set_level(logging.DEBUG)
    legs.prompt.compute(32)
    legs.submit()
    legs.reads(1)
    legs.prompt.preempt(ELSEWHERE)
    legs.prompt.complete()
    assert legs.end().cause == ""
    for words in (
        "r, tokens 0 to 31 of 69 (computing)",
        "r begins again, with attempt 1 of the prefill engine",
        "r, tokens 0 to 68 of 69 (complete)",
    ):
        assert words in caplog.text
