"""Questions for prefixes on their way from the control channel to the scheduler and back."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import msgspec
import pytest

from pd_connector.scheduler.prefill.prefix_service import PrefixService
from pd_connector.vllm.cache_specs import Retention
from tests.support.connector.requests import a_prompt, a_remote
from tests.support.waiting import ManualClock
from transfer.control.messages import Find, Found
from transfer.control.waiting_requests import NotYet

BLOCK, ENGINE = 16, "engine"


class FakeBlocks:
    """Blocks 1 to 8 in a row: the hash of each is its number. Of 100."""

    hash_tokens, block_tokens, total = BLOCK, (BLOCK,), 100

    def __init__(self) -> None:
        self.held, self.free = 8, 60
        self.whole: dict[int, int] = {}  # the groups, and their block sizes, of which it was last asked

    def has_spare(self, number: int, share: float) -> bool:
        return self.free - number >= share * self.total

    def may_hold(self, hashes: Any, tokens: int, groups: dict[int, int]) -> bool:
        self.whole = groups
        return bool(groups) and -(-tokens // BLOCK) <= min(self.held, len(hashes))

    def longest_prefix(self, hashes: Any) -> tuple[tuple[tuple[Any, ...], ...], int]:
        found = [SimpleNamespace(block_id=number[0], is_null=False) for number in hashes[: self.held]]
        return (tuple(found),), len(found) * BLOCK


class Asked:
    """A service, and what it has done."""

    def __init__(self, groups: Sequence[Retention] = (Retention(BLOCK),)) -> None:
        self.blocks, self.unfinished, self.woken, self.told, self.lent = FakeBlocks(), set[int](), 0, list[str](), 0
        self.counts = Counter[tuple[str, str]]()
        hashes: Any = SimpleNamespace(hashing="alike")
        self.known, self.is_short, self.clock = True, False, ManualClock()
        blocks: Any = self.blocks
        self.service = PrefixService(
            blocks, hashes, groups, lambda: self.unfinished if self.known else None,
            self.lend, self.wake, self.told.append, self.counts, self.clock, wants_blocks=lambda: self.is_short,
        )  # fmt: skip

    def wake(self) -> None:
        self.woken += 1

    def lend(self, held: Any, block_ids: Any, tokens: int) -> Any:
        self.lent += 1
        remote = a_remote(a_prompt(tokens + 1), lease_id=f"lease-{self.lent}", remote_block_ids=block_ids)
        return msgspec.structs.replace(remote, remote_block_sizes=(BLOCK,))

    def ask(self, find: Find) -> Found:
        """The answer, at once or with the next step."""
        answer = self.service.ask(find, ENGINE)
        if isinstance(answer, NotYet):
            assert answer.topic == find.find_id
            self.service.serve(ENGINE)
            answer = self.service.ask(find, ENGINE)  # as the server does when it is told
        self.service.check_integrity()
        assert isinstance(answer, Found)
        return answer


def find(blocks: int = 6, **changes: Any) -> Find:
    base = Find("", "find-1", "alike", BLOCK, tuple(bytes([number]) for number in range(1, blocks + 1)))
    return msgspec.structs.replace(base, **changes)


@pytest.fixture
def asked() -> Asked:
    return Asked()


def test_a_step_answers_for_two_milliseconds_and_the_next_ones_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = Asked()
    longest = asked.blocks.longest_prefix

    def slow(hashes: Any) -> Any:
        asked.clock.advance(0.0015)
        return longest(hashes)

    monkeypatch.setattr(asked.blocks, "longest_prefix", slow)
    for number in range(3):
        asked.service.ask(find(find_id=f"find-{number}"), ENGINE)
    asked.service.serve(ENGINE)
    assert (asked.told, asked.service.is_asked) == (["find-0", "find-1"], True)
    asked.service.serve(ENGINE)
    assert (asked.told[2:], asked.service.is_asked) == (["find-2"], False)


def test_what_is_found_is_leased_once_however_often_it_is_asked_for(asked: Asked) -> None:
    first, again = asked.ask(find()), asked.ask(find())
    assert first == again
    assert (first.lease_id, first.tokens, first.block_ids) == ("lease-1", 6 * BLOCK, ((1, 2, 3, 4, 5, 6),))
    assert asked.lent == asked.woken == 1
    assert asked.told == ["find-1"]
    assert asked.counts == {("prefixes_served", "found"): 1}


@pytest.mark.parametrize(("least", "lent"), [(6 * BLOCK, 1), (6 * BLOCK + 1, 0)])
def test_as_much_as_is_asked_for_at_least_is_enough(asked: Asked, least: int, lent: int) -> None:
    asked.ask(find(least_tokens=least))
    assert asked.lent == lent


def test_no_block_is_lent_that_requests_wait_for(asked: Asked) -> None:
    asked.is_short = True
    assert asked.ask(find()).reason == "it is short of blocks"
    assert not asked.lent


@pytest.mark.parametrize(("step_s", "lent"), [(0.7, 1), (0.9, 0), (5.0, 0)])
def test_a_question_is_not_served_when_its_asker_has_been_told_that_nobody_answers(
    asked: Asked, step_s: float, lent: int
) -> None:
    """He would not end the lease."""
    assert isinstance(asked.service.ask(find(), ENGINE), NotYet)
    asked.clock.advance(step_s)
    asked.service.serve(ENGINE)
    answer = asked.service.ask(find(), ENGINE)
    assert isinstance(answer, Found)
    assert (asked.lent, answer.reason) == (lent, "" if lent else "it is busy")
    asked.service.check_integrity()


def test_a_repetition_gets_its_lease_though_the_blocks_are_gone(asked: Asked) -> None:
    first = asked.ask(find(least_tokens=32))
    asked.blocks.held = 0
    assert asked.service.ask(find(least_tokens=32), ENGINE) == first


def test_two_questions_are_two_leases(asked: Asked) -> None:
    assert asked.ask(find()).lease_id != asked.ask(find(find_id="find-2")).lease_id


@pytest.mark.parametrize(("unit", "tokens"), [(16, 96), (32, 96), (64, 64), (80, 80), (128, 0)])
def test_it_ends_where_a_block_ends_on_the_other_engine(asked: Asked, unit: int, tokens: int) -> None:
    assert asked.ask(find(unit_tokens=unit)).tokens == tokens


@pytest.mark.parametrize(("unit", "tokens"), [(1, 48), (32, 32)])
def test_what_is_being_written_is_not_offered_nor_what_comes_behind(asked: Asked, unit: int, tokens: int) -> None:
    asked.unfinished.add(4)
    assert asked.ask(find(unit_tokens=unit)).tokens == tokens


def test_nothing_is_offered_while_nobody_knows_what_is_being_written(asked: Asked) -> None:
    asked.known = False
    assert not asked.ask(find()).lease_id


@pytest.mark.parametrize("changes", [{"least_tokens": 129}, {"hash_tokens": 32}, {"hashing": "otherwise"}])
def test_what_needs_no_lease_is_answered_without_a_step(asked: Asked, changes: dict[str, Any]) -> None:
    answer = asked.service.ask(find(9, **changes), ENGINE)
    assert isinstance(answer, Found)
    assert not answer.lease_id
    assert (answer.hash_tokens, asked.woken) == (BLOCK, 0)
    assert bool(answer.reason) == ("hashing" in changes)


def test_too_little_is_not_leased(asked: Asked) -> None:
    asked.unfinished.add(4)
    assert not asked.ask(find(least_tokens=64)).lease_id
    assert asked.lent == 0


def test_an_engine_that_would_be_short_of_blocks_lends_none(asked: Asked) -> None:
    asked.blocks.free = 15
    assert "short of blocks" in asked.ask(find()).reason
    asked.blocks.free = 16
    assert asked.ask(find(find_id="find-2")).lease_id


@pytest.mark.parametrize(
    ("on_device", "in_host", "free_in_host", "lender", "tokens"),
    [
        (8, 8, 60, "device", 6 * BLOCK),
        (4, 6, 60, "host", 6 * BLOCK),
        (4, 6, 15, "device", 4 * BLOCK),
        (0, 6, 16, "host", 6 * BLOCK),
        (0, 6, 15, "", 0),
    ],
)
def test_host_memory_lends_where_it_holds_more_and_has_room(
    asked: Asked, on_device: int, in_host: int, free_in_host: int, lender: str, tokens: int
) -> None:
    host, lent = FakeBlocks(), list[str]()
    asked.blocks.held, host.held, host.free = on_device, in_host, free_in_host

    def lend(held: Any, block_ids: Any, tokens: int) -> Any:
        lent.append("host")
        return asked.lend(held, block_ids, tokens)

    pool: Any = host
    asked.service.use_host(pool, lend)
    assert asked.ask(find()).tokens == tokens
    assert (lent or ["device"] * asked.lent or [""]) == [lender]


def test_host_memory_lends_though_nobody_knows_what_the_device_is_writing(asked: Asked) -> None:
    host: Any = FakeBlocks()
    asked.known = False
    asked.service.use_host(host, asked.lend)
    assert asked.ask(find()).tokens == 6 * BLOCK


def test_more_questions_than_a_step_may_take_are_answered_at_once(asked: Asked) -> None:
    answers = [asked.service.ask(find(find_id=f"find-{number}"), ENGINE) for number in range(70)]
    assert sum(isinstance(answer, NotYet) for answer in answers) == 64
    assert asked.service.is_asked
    asked.service.serve(ENGINE)
    assert not asked.service.is_asked
    assert asked.lent == 64


def test_answers_are_forgotten_with_their_leases_and_when_there_are_many(asked: Asked) -> None:
    for number in range(300):
        asked.ask(find(find_id=f"find-{number}"))
    assert asked.ask(find(find_id="find-0")).lease_id == "lease-301"
    before = asked.ask(find(find_id="find-0"))
    asked.service.forget()
    assert asked.ask(find(find_id="find-0")) != before


def test_groups_that_keep_a_window_say_nothing_of_what_may_be_found() -> None:
    kept = [Retention(16), Retention(32, window=64), Retention(16, chunk=128), replace(Retention(64), states=True)]
    asked = Asked(kept)
    asked.ask(find())
    assert asked.blocks.whole == {0: 16}


@pytest.mark.parametrize(("unit", "tokens"), [(16, 80), (32, 64), (48, 48), (64, 64)])
def test_beside_drafts_whole_units_are_offered_and_looked_up_a_few_times(asked: Asked, unit: int, tokens: int) -> None:
    """However few hashes it is given, vLLM leaves out the last block that it finds."""
    longest = asked.blocks.longest_prefix

    def drafting(hashes: Any) -> Any:
        (found,), _ = longest(hashes)
        return (found[:-1],), max(len(found) - 1, 0) * BLOCK

    with patch.object(asked.blocks, "longest_prefix", side_effect=drafting) as looked_up:
        assert asked.ask(find(unit_tokens=unit)).tokens == tokens
    assert looked_up.call_count <= 3
