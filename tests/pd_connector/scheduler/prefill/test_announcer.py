"""What is announced of named prompts, under vLLM's own schedulers: what has been computed, and never more.

``NamedPrefill`` compares all that is announced with the simulated memory, after every event of every test here.
"""

import logging
import time
from typing import Any, NoReturn
from unittest.mock import patch

import pytest

from pd_connector.params import parse_remote_prefill
from pd_connector.stats import StatsRecorder
from tests.support.connector.requests import a_prompt
from tests.support.releases import counts_under_way
from tests.support.simulation.named_prefill import CHUNK_TOKENS, StartPrefill
from tests.support.simulation.prefill_works import PAGE_TOKENS
from transfer.control.messages import Cancel, Release, TransferState

QUEUED, COMPUTING, COMPLETE, ENDED = (
    TransferState.QUEUED, TransferState.COMPUTING, TransferState.COMPLETE, TransferState.ENDED,
)  # fmt: skip


@pytest.mark.parametrize("asynchronous", [False, True])
def test_after_each_step_what_it_has_computed_is_announced(start_prefill: StartPrefill, asynchronous: bool) -> None:
    engine = start_prefill(asynchronous=asynchronous)
    engine.ask("r", a_prompt(200), "t")
    assert engine.state("t") == (QUEUED, 0, 0)
    for tokens in (64, 128, 192):
        step = engine.schedule()
        assert engine.state("t")[2] == tokens - CHUNK_TOKENS
        engine.end(step)
        assert engine.state("t") == (COMPUTING, 0, tokens)
    engine.step()
    assert engine.state("t") == (COMPLETE, 0, 200)


def test_the_news_of_a_step_are_told_together(start_prefill: StartPrefill) -> None:
    """Each time, the control channel's thread wakes, and takes the interpreter from the scheduler's."""
    engine = start_prefill(chunk_tokens=128)
    for name in ("a", "b", "c"):
        engine.ask(name, a_prompt(40, ord(name)), name)
    step = engine.schedule()
    woken = engine.wakes
    engine.announcer.computed(dict.fromkeys(step.numbers, 1), 1)
    assert engine.changes[-3:] == ["a", "b", "c"]
    assert engine.wakes == woken + 1


def test_a_prompt_that_has_blocks_and_no_tokens_yet_is_being_computed(start_prefill: StartPrefill) -> None:
    """A decode engine allocates its own blocks then, not before."""
    engine = start_prefill()
    engine.ask("r", a_prompt(200), "t")
    engine.schedule()
    told = engine.told("t")
    assert (told.state, told.tokens, told.block_ids) == (COMPUTING, 0, ((),))
    assert (told.prompt_tokens, told.block_sizes) == (200, (PAGE_TOKENS,))


def test_a_prompt_that_ends_in_the_middle_of_a_block_is_announced_to_its_end(start_prefill: StartPrefill) -> None:
    engine = start_prefill()
    engine.ask("r", a_prompt(70), "t")
    engine.step()
    first = engine.told("t")
    assert (first.tokens, len(first.block_ids[0])) == (64, 4)
    engine.step()
    last = engine.told("t")
    assert (last.tokens, len(last.block_ids[0])) == (70, 5)
    assert last.block_ids[0][:4] == first.block_ids[0]


def test_only_what_follows_the_known_tokens_is_told_while_the_prompt_is_computed(start_prefill: StartPrefill) -> None:
    engine = start_prefill()
    engine.ask("r", a_prompt(200), "t")
    engine.step()
    engine.step()
    whole, rest = engine.told("t"), engine.told("t", 0, 64)
    assert rest.first_blocks == (4,)
    assert rest.block_ids == (whole.block_ids[0][4:],)


def test_the_answer_to_the_router_is_what_the_followers_are_told(start_prefill: StartPrefill) -> None:
    engine = start_prefill()
    engine.ask("r", a_prompt(200), "t")
    engine.run()
    told, remote = engine.told("t"), parse_remote_prefill(engine.answers["r"])
    assert told.block_ids == remote.remote_block_ids
    assert (told.lease_id, told.prompt_digest) == (remote.lease_id, remote.prompt_digest)
    assert (told.attempt, told.prompt_tokens) == (remote.remote_attempt, remote.remote_num_tokens) == (0, 200)


def test_two_steps_under_way_are_announced_as_each_ends(start_prefill: StartPrefill) -> None:
    engine = start_prefill(asynchronous=True)
    engine.ask("r", a_prompt(200), "t")
    first, second = engine.schedule(), engine.schedule()
    assert engine.state("t") == (COMPUTING, 0, 0)
    engine.end(first)
    assert engine.state("t") == (COMPUTING, 0, 64)
    third = engine.schedule()
    engine.end(second)
    assert engine.state("t") == (COMPUTING, 0, 128)
    engine.end(third)
    assert engine.state("t") == (COMPUTING, 0, 192)


def test_a_step_counts_when_every_rank_has_reported_it(start_prefill: StartPrefill) -> None:
    engine = start_prefill(ranks=3)
    engine.ask("r", a_prompt(200), "t")
    step = engine.schedule()
    (number,) = step.numbers
    for _ in range(2):
        engine.announcer.computed({number: 1}, 3)
        assert engine.state("t") == (COMPUTING, 0, 0)
    engine.memory |= step.writes
    engine.announcer.computed({number: 1}, 3)
    assert engine.state("t") == (COMPUTING, 0, 64)


def test_reports_of_steps_that_nobody_waits_for_any_longer_are_ignored(start_prefill: StartPrefill) -> None:
    """Each rank may report twice, and after the prompt has left."""
    engine = start_prefill(ranks=2, asynchronous=True)
    engine.ask("r", a_prompt(200), "t")
    steps = [engine.schedule(), engine.schedule()]
    engine.abort("r")
    engine.announcer.computed({steps[0].numbers[0]: 1}, 2)
    for step in steps:
        engine.end(step)
    engine.announcer.computed({steps[0].numbers[0]: 2, 12345: 1}, 2)
    engine.announcer.check_integrity()
    assert not engine.announcer._steps
    assert not engine.announcer._reports


def test_steps_that_nobody_waits_for_are_not_reported(start_prefill: StartPrefill) -> None:
    engine = start_prefill()
    engine.ask("without a name", a_prompt(100))
    assert engine.schedule().numbers == ()


class Beginnings(list[Any]):
    """Blocks that nobody may go over from the first on: of a running request there may be thousands."""

    def __iter__(self) -> NoReturn:
        raise AssertionError("all blocks were looked at")


def test_blocks_that_a_step_may_write_are_found_without_a_look_at_those_before(start_prefill: StartPrefill) -> None:
    """In each step, for each request that runs."""
    engine = start_prefill(asynchronous=True)
    engine.ask("r", a_prompt(200), "t")
    engine.step()
    engine.schedule()
    blocks = engine.announcer._blocks
    (table,) = blocks.table("r")
    with patch.object(blocks, "table", lambda _: (Beginnings(table),)):
        assert engine.announcer.being_written() == {block.block_id for block in table[CHUNK_TOKENS // PAGE_TOKENS :]}


def test_what_others_may_write_is_told_apart_from_what_a_request_may(start_prefill: StartPrefill) -> None:
    """Also in a block of its own: one that another connector loads into, say."""
    engine = start_prefill(asynchronous=True)
    request = engine.ask("r", a_prompt(100))
    engine.schedule()
    (table,) = engine.announcer._blocks.table("r")
    last = table[-1].block_id
    assert last in (engine.announcer.being_written() or set())
    assert engine.announcer.being_written(besides=request) == set()
    with patch.object(engine.announcer, "_unproven", lambda: frozenset({last})):
        assert engine.announcer.being_written(besides=request) == {last}


def test_who_may_write_is_asked_once_for_all_prompts_that_begin_in_a_step(start_prefill: StartPrefill) -> None:
    """There may be hundreds of both."""
    engine = start_prefill(chunk_tokens=512)
    shared = a_prompt(64)
    engine.ask("first", [*shared, *a_prompt(20, 1)])
    for _ in range(4):
        engine.step()
    for name in ("a", "b", "c", "d"):
        engine.ask(name, [*shared, *a_prompt(20, ord(name))], name)
    with patch.object(engine.announcer, "_unwritten_blocks", wraps=engine.announcer._unwritten_blocks) as asked:
        engine.schedule()
    assert [engine.state(name) for name in ("a", "b", "c", "d")] == [(COMPUTING, 0, 64)] * 4
    assert asked.call_count == 8, "once for all, and once for its own"


def test_each_step_is_reported_under_a_number_of_its_own(start_prefill: StartPrefill) -> None:
    engine = start_prefill()
    engine.ask("a", a_prompt(100), "ta")
    engine.ask("b", a_prompt(100, 1), "tb")
    numbers = [engine.step().numbers for _ in range(4)]
    assert [len(each) for each in numbers] == [1, 1, 1, 1]
    assert numbers == sorted(set(numbers))


def test_whoever_follows_is_told_of_every_change(start_prefill: StartPrefill) -> None:
    engine = start_prefill()
    engine.ask("r", a_prompt(100), "t")
    seen = len(engine.changes)
    assert seen, "the request's arrival is news"
    for _ in range(2):
        engine.step()
        assert set(engine.changes[seen:]) == {"t"}
        seen = len(engine.changes)


# How it ends


@pytest.mark.parametrize("begun", [False, True])
def test_an_aborted_prompt_has_ended_and_says_why(start_prefill: StartPrefill, begun: bool) -> None:
    engine = start_prefill()
    engine.ask("r", a_prompt(200), "t")
    if begun:
        engine.step()
    seen = len(engine.changes)
    engine.abort("r")
    told = engine.told("t")
    assert told.state == ENDED
    assert told.reason == "the prefill engine's request has ended (aborted)"
    assert "t" in engine.changes[seen:]
    lease = engine.told("t").lease_id
    assert engine.service.leases.still_valid([lease]) == frozenset()


def test_nothing_is_left_of_prompts_that_have_ended(start_prefill: StartPrefill) -> None:
    engine = start_prefill()
    for number in range(6):
        engine.ask(f"r{number}", a_prompt(100, number), f"t{number}")
    engine.step()
    engine.abort("r0")
    engine.abort("r5")
    engine.run()
    for _ in range(4):
        engine.step()
    announcer = engine.announcer
    for left in (announcer._requests, announcer._named, announcer._begun, announcer._steps, announcer._reports):
        assert not left
    assert engine.service.transfers.open_leases == ()
    assert not engine.service.leases._growing


def test_a_prompt_that_the_decode_engine_has_cancelled_is_not_leased(start_prefill: StartPrefill) -> None:
    engine = start_prefill()
    engine.ask("r", a_prompt(100), "t")
    engine.step()
    engine.service.handle(Cancel("", (), ("t",)))
    engine.run()
    assert engine.answers == {"r": None}
    assert engine.service.leases.active == 0
    assert engine.state("t")[0] is ENDED


def test_a_prompt_that_was_cancelled_before_it_came_is_not_leased(start_prefill: StartPrefill) -> None:
    engine = start_prefill()
    engine.service.handle(Cancel("", (), ("t",)))
    engine.ask("r", a_prompt(100), "t")
    engine.run()
    assert engine.answers == {"r": None}
    assert engine.state("t")[0] is TransferState.UNKNOWN


def test_a_cancel_between_any_two_looks_at_a_prompt_does_no_harm(start_prefill: StartPrefill) -> None:
    """The control channel's thread may take a prompt away at any time."""
    engine = start_prefill()
    engine.ask("r", a_prompt(200), "t")
    known = engine.service.transfers.blocks_known

    def cancelled(transfer_id: str) -> Any:
        engine.service.handle(Cancel("", (), ("t",)))
        return known(transfer_id)

    with patch.object(engine.service.transfers, "blocks_known", cancelled):
        engine.run()
    assert engine.answers == {"r": None}


def test_a_lease_that_its_readers_have_given_up_is_not_announced_as_complete(start_prefill: StartPrefill) -> None:
    engine = start_prefill()
    engine.ask("r", a_prompt(100), "t")
    engine.step()
    lease = engine.told("t").lease_id
    engine.service.handle(Release(engine.service.engine_id, lease, 0, 1, "pull", "nothing"))
    engine.run()
    told = engine.told("t")
    assert told.state == ENDED
    assert "released" in told.reason
    engine.producer.free_blocks()
    assert engine.service.leases.active == 0


def test_what_is_being_written_is_known_again_once_all_steps_from_before_a_preemption_have_ended(
    start_prefill: StartPrefill,
) -> None:
    """Not only once the request has ended: with asynchronous scheduling, a step of it is always under way."""
    engine = start_prefill(asynchronous=True)
    request = engine.ask("r", a_prompt(400), "t")
    before = engine.schedule()
    engine.preempt(request)
    step = engine.schedule()
    assert engine.announcer.being_written() is None
    engine.end(before)
    for _ in range(4):
        after = engine.schedule()
        engine.end(step)
        step = after
    written = engine.announcer.being_written()
    assert written is not None
    assert written >= {block.block_id for block in engine.announcer._blocks.table("r")[0][-4:]}
    engine.end(step)
    engine.run()


# Names


@pytest.mark.parametrize(
    ("transfer_id", "words"),
    [("", "1 to 128 printable"), ("two words", "two words"), (7, "transfer_id 7"), ("x" * 129, "1 to 128")],
)
def test_a_prompt_with_a_name_that_cannot_be_one_is_served_without(
    start_prefill: StartPrefill, caplog: pytest.LogCaptureFixture, transfer_id: object, words: str
) -> None:
    engine = start_prefill()
    with caplog.at_level(logging.ERROR):
        engine.ask("r", a_prompt(100), transfer_id)
    (record,) = (each for each in caplog.records if each.levelno == logging.ERROR)
    assert words in record.message
    assert "request r cannot be followed by name" in record.message
    engine.run()
    assert engine.answers["r"] is not None


def test_a_second_prompt_of_the_same_name_is_served_without(
    start_prefill: StartPrefill, caplog: pytest.LogCaptureFixture
) -> None:
    engine = start_prefill()
    with caplog.at_level(logging.ERROR):
        engine.ask("a", a_prompt(100), "t")
        engine.ask("b", a_prompt(100, 1), "t")
    assert "request b cannot be followed by name: transfer id t belongs to another request" in caplog.text
    engine.run()
    first, second = (parse_remote_prefill(engine.answers[each]) for each in "ab")
    assert engine.told("t").lease_id == first.lease_id != second.lease_id


def test_a_name_is_not_free_as_long_as_its_first_request_lives(
    start_prefill: StartPrefill, caplog: pytest.LogCaptureFixture
) -> None:
    """It was cancelled, and forgotten: its blocks would be announced as those of the prompt that has its name."""
    engine = start_prefill()
    transfers = engine.service.transfers
    engine.ask("a", a_prompt(200), "t")
    engine.step()
    engine.service.handle(Cancel("", (), ("t",)))
    with patch.object(transfers, "_clock", lambda: time.monotonic() + 3600), caplog.at_level(logging.ERROR):
        engine.ask("b", a_prompt(100, 1), "t")
        assert "request b cannot be followed by name: transfer id t belongs to another request" in caplog.text
        engine.run()
        assert engine.answers["a"] is None
        assert parse_remote_prefill(engine.answers["b"]).remote_num_tokens == 100
        engine.ask("c", a_prompt(100, 2), "t")
        engine.run()
        assert engine.told("t").lease_id == parse_remote_prefill(engine.answers["c"]).lease_id


def test_what_is_not_a_prefill_leg_has_no_name(start_prefill: StartPrefill) -> None:
    engine = start_prefill()
    engine.ask("r", a_prompt(100), "t", do_remote_decode=False)
    assert engine.state("t")[0] is TransferState.UNKNOWN


def test_a_named_prompt_may_come_before_the_workers_are_known(start_prefill: StartPrefill) -> None:
    """Inside MultiConnector, their handshakes come with the first step's report."""
    engine = start_prefill(knows_workers=False)
    engine.ask("r", a_prompt(100), "t")
    assert engine.schedule().output.num_scheduled_tokens == {}
    engine.tell_workers()
    engine.run()
    assert engine.state("t") == (COMPLETE, 0, 100)


def test_named_prompts_are_counted_by_what_became_of_them(start_prefill: StartPrefill) -> None:
    engine = start_prefill()
    engine.ask("a", a_prompt(100), "ta")
    engine.ask("b", a_prompt(100, 1), "tb")
    engine.ask("c", a_prompt(100, 2), "tb")
    engine.ask("d", a_prompt(100, 3), "no name")
    with patch.object(engine.producer, "update_stats"):  # for vLLM's
        engine.step()
        engine.preempt(engine.scheduler.requests["a"])
        engine.step()
        engine.abort("b")
        engine.run()
    stats = StatsRecorder()
    for _ in range(2):
        engine.producer.update_stats(stats)
    data = stats.take()
    assert data is not None
    counted = {name: number for name, number in data["counts"].items() if name.startswith("transfers:")}
    assert counted == {
        "transfers:begun": 2, "transfers:restarted": 1, "transfers:complete": 1, "transfers:ended": 1,
        "transfers:refused": 2,
    }  # fmt: skip


# Sliding windows


def test_every_cache_group_is_announced_and_a_complete_prompt_without_what_windows_have_passed(
    start_prefill: StartPrefill,
) -> None:
    engine = start_prefill(with_window=True)
    engine.ask("r", a_prompt(200), "t")
    engine.step()
    told = engine.told("t")
    assert [len(ids) for ids in told.block_ids] == [4, 4]
    engine.run()
    told = engine.told("t")
    full, windowed = told.block_ids
    assert (len(full), len(windowed)) == (13, 13)
    assert all(full)
    assert windowed[:10] == (0,) * 10
    assert all(windowed[10:])


@counts_under_way
def test_a_window_that_a_hit_has_found_is_complete_at_once(start_prefill: StartPrefill) -> None:
    engine = start_prefill(with_window=True)
    engine.ask("before", a_prompt(200))
    engine.run()
    engine.ask("r", a_prompt(200), "t")
    engine.schedule()
    told = engine.told("t")
    assert told.tokens == 192
    full, windowed = told.block_ids
    assert all(full)
    assert windowed[:10] == (0,) * 10
    assert all(windowed[10:])
