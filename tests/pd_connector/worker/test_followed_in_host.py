"""Pulls of prompts that the prefill engine finds in its host memory: read there while it loads them, byte by byte.

The device's blocks hold noise until they are loaded or computed, and what the slots held is overwritten when they are
given back: who reads either of them too early or too late reads something wrong.
"""

from dataclasses import dataclass, replace

import msgspec
import pytest

from pd_connector.worker import remote_reader
from pd_connector.worker.session import PeerSession
from tests.support.connector.chunked_prompts import ChunkedPrompt, FollowingClient, follow
from tests.support.connector.engines import DECODE, MODEL, OURS, PREFILL, THEIRS, Blocks, DecodeWorker, Site
from tests.support.connector.followed_legs import ELSEWHERE
from tests.support.connector.moving import IN_HOST, MovingEngine
from tests.support.layout.oracle import Engine, Model
from tests.support.waiting import until
from transfer.control.messages import Release, Released, SlotRange

WINDOWED = Model(kv_heads=4, contents=(6, 10), item_size=2, groups=((0, 2), (1,)), windows=(0, 40))


@pytest.fixture(autouse=True)
def everything_is_worth_reading(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_reader, "RANGE_S", 0.0)


def slots_of(first: int, end: int, slots: Blocks = IN_HOST) -> SlotRange:
    """The slots of tokens ``first`` to ``end`` of a prompt in blocks of 16 tokens."""
    return SlotRange(first, end, (first // 16,) * len(slots), tuple(ids[first // 16 : end // 16] for ids in slots))


@dataclass
class Loading:
    """A prefill engine that loads a prompt of 70 tokens from its host memory, and decode workers that follow it."""

    site: Site
    moving: MovingEngine
    prompt: ChunkedPrompt
    workers: list[DecodeWorker]
    clients: list[FollowingClient]
    sessions: list[PeerSession]

    def submit(self, local: Blocks = OURS, first: int = 0) -> None:
        for session in self.sessions:
            session.submit(self.prompt.order("r", local, first))

    def parked(self, reads: int) -> None:
        """Wait until every pull has nothing left to read, after so many reads of all."""
        until(lambda: self.site.fabric.reads == reads and self.prompt.waiting == len(self.workers))

    def overwrite_slots(self) -> None:
        for _, memory in self.moving.pools:
            memory[:] = 0x55

    def assert_arrived(self, local: Blocks = OURS, first: int = 0, source: Engine = PREFILL) -> None:
        for worker in self.workers:
            end = worker.next_end()
            assert (end.cause, end.tokens) == ("", 69 - first), end.reason
            assert 0 < end.host_bytes < end.copied_bytes
            assert worker.holds([(local, first, 69)], source)
        until(lambda: all(session.idle for session in self.sessions))
        for session in self.sessions:
            session.check_integrity()


def loading(
    site: Site,
    engines: tuple[Engine, Engine] = (PREFILL, DECODE),
    model: Model = MODEL,
    blocks: Blocks = THEIRS,
    slots: Blocks = IN_HOST,
    **changes: bool,
) -> Loading:
    """``changes`` are made to the context of pulls."""
    moving = MovingEngine(site, engines[0], model)
    prompt = ChunkedPrompt(moving.prefill, blocks)
    prompt._fill(range(80))
    moving.copy(blocks, slots)
    workers = site.decode(engines[1], model)
    clients = [follow(worker, prompt) for worker in workers]
    sessions = [site.session(worker, prompt.remote(), **changes) for worker in workers]
    return Loading(site, moving, prompt, workers, clients, sessions)


def test_what_is_being_loaded_is_read_in_host_memory_at_once(site: Site) -> None:
    legs = loading(site)
    legs.prompt.in_host = slots_of(0, 64)
    legs.submit()
    legs.parked(1)
    assert legs.workers[0].holds([(OURS, 0, 64)])
    legs.prompt.complete()
    legs.assert_arrived()
    assert legs.moving.prefill.leases.take_counts() == {"granted": 1, "released": 1}


def test_host_memory_is_read_while_the_prompt_is_loaded_also_where_the_device_is_not(site: Site) -> None:
    legs = loading(site, reads_ahead=False)
    legs.prompt.in_host = slots_of(0, 48)
    legs.submit()
    legs.parked(1)
    assert legs.workers[0].holds([(OURS, 0, 48)])
    legs.prompt.compute(64)
    legs.parked(1)
    legs.prompt.complete()
    legs.assert_arrived()


def test_what_the_device_holds_is_read_there_and_the_rest_in_host_memory(site: Site) -> None:
    legs = loading(site)
    legs.prompt.compute(32)
    legs.prompt.in_host = slots_of(32, 64)
    legs.submit()
    legs.parked(2)
    assert legs.workers[0].holds([(OURS, 0, 64)])
    legs.prompt.complete()
    legs.assert_arrived()


@pytest.mark.parametrize("moves", [False, True])
@pytest.mark.parametrize("engines", [(PREFILL, DECODE), (replace(PREFILL, tp=2), replace(DECODE, tp=2))])
def test_what_was_read_ahead_is_read_again_in_host_memory_if_the_lease_has_moved_there(
    site: Site, engines: tuple[Engine, Engine], moves: bool
) -> None:
    """The prefill engine had not heard yet that it was being read."""
    legs = loading(site, engines)
    legs.overwrite_slots()
    legs.prompt.compute(48)
    legs.submit()
    legs.parked(len(legs.workers))
    legs.prompt.complete(lambda remote: moves and legs.moving.move(remote, THEIRS, IN_HOST))
    for worker in legs.workers:
        end = worker.next_end()
        assert (end.cause, end.tokens, end.restarts) == ("", 69, int(moves)), end.reason
        assert end.host_bytes == (end.copied_bytes if moves else 0)
        assert worker.holds([(OURS, 0, 69)], engines[0])
    assert legs.moving.prefill.leases.take_counts() == {"granted": 1, "released": 1}


def test_a_lease_of_which_somebody_has_asked_where_it_lies_after_reading_ahead_stays(site: Site) -> None:
    legs = loading(site)
    legs.prompt.compute(48)
    legs.submit()
    legs.parked(1)
    releases = legs.moving.prefill.leases.release
    moved: list[str | None] = []

    def move_first(release: Release) -> Released:
        moved.append(legs.moving.move(legs.prompt.remote(), THEIRS, IN_HOST))
        return releases(release)

    legs.moving.prefill.leases.release = move_first  # type: ignore[method-assign]
    legs.prompt.complete()
    assert legs.workers[0].next_end().cause == ""
    assert moved == [None]


def test_slots_that_are_announced_later_are_read_when_they_are(site: Site) -> None:
    legs = loading(site)
    legs.submit()
    legs.parked(0)
    legs.prompt.in_host = slots_of(0, 48)
    legs.prompt.answer_news()
    legs.parked(1)
    assert legs.workers[0].holds([(OURS, 0, 48)])
    legs.prompt.complete()
    legs.assert_arrived()


def test_what_is_here_already_is_not_read(site: Site) -> None:
    legs = loading(site)
    legs.prompt.in_host = slots_of(0, 64)
    legs.submit(first=32)
    legs.parked(1)
    legs.prompt.complete()
    legs.assert_arrived(first=32)


@pytest.mark.parametrize(
    ("prefill_tp", "decode_tp", "layouts", "decode_tokens"),
    [
        (1, 1, ("LBHNC", "BLHNC"), 8),
        (2, 1, ("BLHNC", "BHLNC"), 32),
        (1, 2, ("BHLNC", "BHLNC"), 8),
        (4, 2, ("BHLNC", "LBHNC"), 16),
    ],
)
def test_unequal_engines_read_host_memory_too(
    site: Site, prefill_tp: int, decode_tp: int, layouts: tuple[str, str], decode_tokens: int
) -> None:
    source = Engine(layout=layouts[0], blocks=12, tp=prefill_tp)
    target = Engine(layout=layouts[1], blocks=24, tp=decode_tp, block_tokens=decode_tokens)
    local = (tuple(range(1, 1 + -(-70 // decode_tokens))),)
    legs = loading(site, (source, target))
    legs.prompt.in_host = slots_of(0, 64)
    legs.submit(local)
    until(lambda: legs.prompt.waiting == decode_tp and len(legs.prompt.asked) >= 2 * decode_tp)
    legs.prompt.complete()
    legs.assert_arrived(local, source=source)


def test_what_was_read_before_the_prompt_started_over_counts_for_nothing(site: Site) -> None:
    legs = loading(site)
    legs.prompt.in_host = slots_of(0, 64)
    legs.overwrite_slots()  # as if the read came after the slots were given back, and before that was known
    legs.submit()
    legs.parked(1)
    legs.prompt.preempt(ELSEWHERE)
    legs.prompt.compute(32)
    legs.parked(2)
    legs.prompt.complete()
    end = legs.workers[0].next_end()
    assert (end.cause, end.restarts, end.host_bytes) == ("", 1, 0)
    assert legs.workers[0].holds([(OURS, 0, 69)])


def test_slots_that_lack_what_is_wanted_are_left_alone(site: Site) -> None:
    """The window of the second cache group reaches further back here than the hit's."""
    theirs: Blocks = ((5, 6, 3, 9, 2), (0, 0, 4, 7, 8))
    ours: Blocks = ((1, 2, 8, 3, 11), (0, 0, 4, 5, 6))
    legs = loading(site, model=WINDOWED, blocks=theirs, slots=((7, 0, 4, 8, 1), (-1, -1, 2, 3, 5)))
    legs.prompt.in_host = slots_of(0, 64, ((7, 0, 4, 8, 1), (-1, -1, -1, 3, 5)))
    legs.submit(ours)
    legs.parked(0)
    assert legs.workers[0].untouched
    legs.prompt.complete()
    end = legs.workers[0].next_end()
    assert (end.cause, end.host_bytes) == ("", 0), end.reason
    assert legs.workers[0].holds([(ours, 0, 69)])


def test_windows_that_have_passed_need_no_slots(site: Site) -> None:
    theirs: Blocks = ((5, 6, 3, 9, 2), (0, 0, 4, 7, 8))
    ours: Blocks = ((1, 2, 8, 3, 11), (0, 0, 4, 5, 6))
    slots = ((7, 0, 4, 8, 1), (-1, -1, 2, 3, 5))
    legs = loading(site, model=WINDOWED, blocks=theirs, slots=slots)
    legs.prompt.in_host = slots_of(0, 64, slots)
    legs.submit(ours)
    legs.parked(1)
    legs.prompt.complete()
    legs.assert_arrived(ours)


def test_who_cannot_read_host_memory_does_not_ask_for_it(site: Site) -> None:
    legs = loading(site)
    legs.moving.prefill.service._host_workers = ()  # so it is not told how
    legs.prompt.in_host = slots_of(0, 64)
    legs.submit()
    legs.parked(0)
    assert {asked.host_tokens for asked in legs.prompt.asked} == {-1}
    legs.prompt.complete()
    assert legs.workers[0].next_end().host_bytes == 0


@pytest.mark.parametrize(
    "changes",
    [
        {"slots": ()},
        {"first_blocks": (0, 0)},
        {"first_token": 64},
        {"end_token": 71},
    ],
)
def test_slots_that_cannot_be_are_an_error_that_says_so(site: Site, changes: dict[str, object]) -> None:
    legs = loading(site)
    legs.prompt.in_host = msgspec.structs.replace(slots_of(0, 64), **changes)
    legs.submit()
    end = legs.workers[0].next_end()
    assert end.cause == "transfer"
    assert "in host memory" in end.reason
    assert legs.workers[0].untouched


def test_slots_that_do_not_exist_are_not_read(site: Site) -> None:
    legs = loading(site)
    legs.prompt.in_host = msgspec.structs.replace(slots_of(0, 64), slots=((7, 0, 4, 9999),))
    legs.submit()
    legs.parked(0)
    legs.prompt.complete()
    assert legs.workers[0].next_end().cause == ""
    assert legs.workers[0].holds([(OURS, 0, 69)])
