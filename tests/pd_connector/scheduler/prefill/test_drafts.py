"""A prefill engine whose device writes draft layers after a step's results have come, under vLLM's own schedulers.

Nothing is announced, and no lease can be read, before the draft layers are written. ``NamedPrefill`` compares what is
announced with the draft layer, after every event. Its device ends a step's drafts when the test lets it.

Covers: pd_connector.scheduler.prefill.announcer, pd_connector.scheduler.prefill.lease_service,
pd_connector.scheduler.prefill.leases.
"""

from unittest.mock import patch

import pytest

from pd_connector.params import parse_remote_prefill
from tests.support.connector.requests import a_prompt
from tests.support.simulation.named_prefill import NamedPrefill, StartPrefill
from tests.support.simulation.prefill_works import PAGE_TOKENS, stamps_of
from transfer.control.messages import Cancel, InvalidReason, Place, Release, Released, TransferState

COMPUTING, COMPLETE = TransferState.COMPUTING, TransferState.COMPLETE
PROMPT = a_prompt(200)


def computed(
    start_prefill: StartPrefill, name: str | None = None, chunk_tokens: int = 256, **options: object
) -> tuple[NamedPrefill, str]:
    """An engine that has computed a prompt, but for its drafts, and the lease over it."""
    engine = start_prefill(drafts=True, chunk_tokens=chunk_tokens, **options)
    engine.ask("r", PROMPT, name)
    engine.run()
    return engine, parse_remote_prefill(engine.answers["r"]).lease_id


def is_written(engine: NamedPrefill) -> bool:
    """Whether the draft layer holds the prompt where the lease says."""
    (table,) = parse_remote_prefill(engine.answers["r"]).remote_block_ids
    places = [(table[token // PAGE_TOKENS], token % PAGE_TOKENS) for token in range(len(PROMPT))]
    return [engine.draft_memory.get(place) for place in places] == stamps_of(PROMPT)


def release(engine: NamedPrefill, lease_id: str) -> Released:
    reply = engine.service.handle(
        Release(engine.service.engine_id, lease_id, 0, 1, "pull", engine.service.leases._active[lease_id].contents)
    )
    assert isinstance(reply, Released)
    return reply


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_step_is_announced_when_its_drafts_are_written(start_prefill: StartPrefill, asynchronous: bool) -> None:
    engine = start_prefill(drafts=True, asynchronous=asynchronous)
    engine.ask("r", PROMPT, "t")
    engine.step()
    engine.step()
    assert engine.state("t") == (COMPUTING, 0, 0)
    engine.end_drafts()
    engine.step()
    assert engine.state("t") == (COMPUTING, 0, 128)


def test_what_a_prompt_finds_is_announced_with_its_first_step(start_prefill: StartPrefill) -> None:
    """The drafts of whoever has computed it may be under way."""
    engine, _ = computed(start_prefill, chunk_tokens=128)
    engine.ask("second", [*PROMPT, *a_prompt(300, 7)], "t")
    step = engine.schedule()
    assert engine.state("t") == (COMPUTING, 0, 0)
    engine.end(step)
    assert engine.state("t") == (COMPUTING, 0, 0)
    engine.end_drafts()
    engine.step()
    assert engine.state("t")[2] >= 192


def test_a_lease_can_be_read_when_all_of_it_is_written(start_prefill: StartPrefill) -> None:
    engine, lease_id = computed(start_prefill)
    assert engine.locate(lease_id) is None
    assert engine.announcer.wants_step, "nobody would learn that it is written"
    engine.step()
    assert engine.locate(lease_id) is None
    engine.end_drafts()
    seen = len(engine.changes)
    engine.step()
    assert engine.changes[seen:] == [lease_id], "who waits is not told"
    located = engine.locate(lease_id)
    assert located is not None
    assert located.place == Place.DEVICE
    assert is_written(engine)
    assert not engine.announcer.wants_step, "the engine steps for ever"
    assert release(engine, lease_id).valid


def test_a_followed_prompt_is_complete_when_all_of_it_is_written(start_prefill: StartPrefill) -> None:
    engine, lease_id = computed(start_prefill, "t")
    assert engine.state("t")[0] is COMPUTING
    engine.step()
    assert engine.state("t")[0] is COMPUTING
    engine.end_drafts()
    seen = len(engine.changes)
    engine.step()
    assert "t" in engine.changes[seen:]
    assert engine.state("t") == (COMPLETE, 0, len(PROMPT))
    assert is_written(engine)
    assert release(engine, lease_id).valid, "who follows a prompt does not ask where its lease lies"


def test_a_lease_that_was_read_without_asking_is_not_valid(start_prefill: StartPrefill) -> None:
    """A decode engine of an earlier version does not know that it must."""
    engine, lease_id = computed(start_prefill)
    engine.end_drafts()
    engine.step()
    assert release(engine, lease_id) == Released(False, InvalidReason.EARLY)


@pytest.mark.parametrize("name", [None, "t"])
def test_a_lease_that_ends_before_it_is_written_leaves_nothing(start_prefill: StartPrefill, name: str | None) -> None:
    engine, lease_id = computed(start_prefill, name)
    engine.service.handle(Cancel(engine.service.engine_id, (lease_id,)))
    engine.producer.free_blocks()
    engine.step()
    engine.end_drafts()
    engine.step()
    for left in (engine.announcer._unwritten, engine.service._unwritten, engine.announcer._last_steps):
        assert not left
    assert engine.locate(lease_id) is not None, "it has ended"
    if name:
        assert engine.state(name)[0] is TransferState.ENDED


def test_checksums_are_taken_when_all_is_written(start_prefill: StartPrefill) -> None:
    """Workers read the blocks beside the model's stream."""
    engine = start_prefill(drafts=True, chunk_tokens=256)
    with patch.object(engine.service.checksums, "enabled", new=True):
        engine.ask("r", PROMPT)
        engine.run()
        engine.step()
        assert not engine.service.checksums._reports
        engine.end_drafts()
        engine.step()
        assert list(engine.service.checksums._reports) == [parse_remote_prefill(engine.answers["r"]).lease_id]


def test_a_lease_does_not_move_before_it_is_written(start_prefill: StartPrefill) -> None:
    engine, lease_id = computed(start_prefill, host_slots=64)
    leases = engine.service.leases
    assert not leases.movable(0.0, 1)
    engine.end_drafts()
    engine.step()
    assert [each.lease_id for each in leases.movable(0.0, 1)] == [lease_id]


def test_nothing_is_left_of_steps_that_have_been_reported(start_prefill: StartPrefill) -> None:
    engine = start_prefill(drafts=True)
    for number in range(4):
        engine.ask(f"r{number}", a_prompt(100, number), f"t{number}" if number % 2 else None)
    engine.abort("r3")
    engine.run()
    engine.end_drafts()
    for _ in range(2):
        engine.step()
    announcer = engine.announcer
    for left in (announcer._steps, announcer._reports, announcer._unwritten, announcer._last_steps, announcer._named):
        assert not left
