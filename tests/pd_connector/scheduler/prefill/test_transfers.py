"""What is told of named prompts: each change once, whatever was asked before, and nothing of what was taken back."""

import msgspec
import pytest

from pd_connector.params import PromptIdentity
from pd_connector.scheduler.prefill import transfers
from pd_connector.scheduler.prefill.transfers import Begun, Prompt, Transfers
from pd_connector.vllm.cache_specs import Retention
from tests.support.waiting import ManualClock
from transfer.control.messages import Follow, Followed, SlotRange, TransferState
from transfer.control.waiting_requests import NotYet

QUEUED, COMPUTING, COMPLETE, ENDED = (
    TransferState.QUEUED, TransferState.COMPUTING, TransferState.COMPLETE, TransferState.ENDED,
)  # fmt: skip

TTL_S = 30.0
SIZES = (4, 8)  # tokens in a block of each cache group


class Desk:
    """Transfers on a clock of their own, checked after every use, and one who asks them."""

    def __init__(self) -> None:
        self.clock = ManualClock()
        self.transfers = Transfers(TTL_S, self.clock)
        self.transfers.set_groups([Retention(size) for size in SIZES])

    def open(self, transfer_id: str = "t", tokens: int = 30) -> bool:
        is_open = self.transfers.open(
            Prompt(transfer_id, f"lease of {transfer_id}", PromptIdentity(tokens, "00ff", "french", "aa", "bb:cc"))
        )
        self.transfers.check_integrity()
        return is_open

    def announce(self, tokens: int, transfer_id: str = "t", base: int = 100) -> bool:
        """Announce blocks that are numbered by their places, each group by ``base`` more."""
        known = self.transfers.blocks_known(transfer_id)
        assert known is not None
        new = [
            [base * (group + 1) + number for number in range(first, -(-tokens // size))]
            for group, (first, size) in enumerate(zip(known, SIZES, strict=True))
        ]
        is_news = self.transfers.announce(transfer_id, tokens, new)
        self.transfers.check_integrity()
        return is_news

    def ask(
        self, attempt: int = -1, tokens: int = 0, state: str = TransferState.UNKNOWN, transfer_id: str = "t"
    ) -> Followed | NotYet:
        return self.transfers.answer("engine", Follow("", transfer_id, attempt, tokens, state, 2.0))

    def told(self, attempt: int = -1, tokens: int = 0, state: str = TransferState.UNKNOWN) -> Followed:
        reply = self.ask(attempt, tokens, state)
        assert isinstance(reply, Followed), "there is nothing new"
        return reply


@pytest.fixture
def desk() -> Desk:
    return Desk()


def test_who_asks_for_a_prompt_that_has_not_come_waits_for_it(desk: Desk) -> None:
    assert desk.ask() == NotYet("t", 2.0, Followed("engine", TransferState.UNKNOWN))


def test_a_prompt_that_has_come_is_queued_until_its_first_step(desk: Desk) -> None:
    assert desk.open()
    assert desk.told() == Followed("engine", QUEUED)
    assert desk.ask(0, 0, QUEUED) == NotYet("t", 2.0, Followed("engine", QUEUED))


def test_the_beginning_is_news_although_nothing_is_complete(desk: Desk) -> None:
    desk.open()
    assert desk.announce(0)
    told = desk.told(0, 0, QUEUED)
    assert (told.state, told.lease_id, told.lease_ttl_s, told.attempt) == (COMPUTING, "lease of t", TTL_S, 0)
    assert (told.prompt_tokens, told.prompt_digest, told.block_sizes) == (30, "00ff", SIZES)
    assert (told.adapter_digest, told.media_digest) == ("aa", "bb:cc")
    assert (told.tokens, told.block_ids, told.first_blocks) == (0, ((), ()), (0, 0))


def test_only_blocks_that_are_not_known_are_told_and_one_that_was_not_full_again(desk: Desk) -> None:
    desk.open()
    assert desk.announce(10)
    told = desk.told()
    assert (told.tokens, told.block_ids, told.first_blocks) == (10, ((100, 101, 102), (200, 201)), (0, 0))
    assert isinstance(desk.ask(0, 10, COMPUTING), NotYet)
    assert desk.announce(20)
    told = desk.told(0, 10, COMPUTING)
    assert (told.tokens, told.block_ids, told.first_blocks) == (20, ((102, 103, 104), (201, 202)), (2, 1))
    whole = desk.told()
    assert whole.block_ids == ((100, 101, 102, 103, 104), (200, 201, 202))


def test_what_was_announced_is_no_news(desk: Desk) -> None:
    desk.open()
    assert desk.announce(10)
    assert not desk.announce(10)
    assert not desk.announce(5)
    assert desk.told().tokens == 10


def test_who_says_that_he_knows_more_than_there_is_waits(desk: Desk) -> None:
    desk.open()
    desk.announce(10)
    assert isinstance(desk.ask(0, 2**62, COMPUTING), NotYet)


def test_another_state_is_news_to_who_knows_all_tokens(desk: Desk) -> None:
    desk.open()
    desk.announce(0)
    assert isinstance(desk.ask(0, 0, QUEUED), Followed)
    assert isinstance(desk.ask(0, 0, COMPUTING), NotYet)


def test_a_new_attempt_begins_with_nothing(desk: Desk) -> None:
    desk.open()
    desk.announce(20)
    desk.transfers.start_over("t")
    desk.transfers.check_integrity()
    assert desk.told(0, 20, COMPUTING) == Followed("engine", QUEUED, attempt=1)
    assert desk.announce(10, base=500)
    told = desk.told(0, 20, COMPUTING)
    assert (told.attempt, told.tokens, told.first_blocks) == (1, 10, (0, 0))
    assert told.block_ids == ((500, 501, 502), (1000, 1001))
    assert desk.transfers.begun("t") == Begun(
        Prompt("t", "lease of t", PromptIdentity(30, "00ff", "french", "aa", "bb:cc")), 1
    )


def test_a_complete_prompt_is_told_whole(desk: Desk) -> None:
    """Windows have moved, so that blocks that were announced are not held any longer."""
    desk.open()
    desk.announce(20)
    desk.transfers.complete("t", ((100, 101, 102, 103, 104, 105, 106, 107), (0, 0, 202, 203)))
    desk.transfers.check_integrity()
    told = desk.told(0, 20, COMPUTING)
    assert (told.state, told.tokens, told.first_blocks) == (COMPLETE, 30, (0, 0))
    assert told.block_ids == ((100, 101, 102, 103, 104, 105, 106, 107), (0, 0, 202, 203))
    assert desk.told(0, 30, COMPUTING) == told
    assert isinstance(desk.ask(0, 30, COMPLETE), NotYet)
    assert desk.transfers.begun("t") is None


def test_a_prompt_that_has_ended_says_why_and_gives_no_blocks(desk: Desk) -> None:
    desk.open()
    desk.announce(20)
    desk.transfers.end("t", "aborted")
    desk.transfers.end("t", "of another reason")
    assert desk.told(0, 20, COMPUTING) == Followed("engine", ENDED, "lease of t", reason="aborted")


def test_a_reason_fits_into_the_message(desk: Desk) -> None:
    desk.open()
    desk.transfers.end("t", "x" * 5000)
    told = desk.told()
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(told), type=Followed) == told
    assert len(told.reason) == 400


@pytest.mark.parametrize("how", ["open", "complete", "ended"])
def test_a_name_belongs_to_one_prompt(desk: Desk, how: str) -> None:
    desk.open()
    if how == "complete":
        desk.transfers.complete("t", ((), ()))
    elif how == "ended":
        desk.transfers.end("t", "aborted")
    with pytest.raises(ValueError, match=r"transfer id t belongs to another request: each needs its own"):
        desk.open()


def test_nothing_more_is_announced_of_what_is_complete_or_has_ended(desk: Desk) -> None:
    for transfer_id in ("complete", "ended"):
        desk.open(transfer_id)
    desk.transfers.complete("complete", ((), ()))
    desk.transfers.end("ended", "aborted")
    for transfer_id in ("complete", "ended", "unknown"):
        assert desk.transfers.blocks_known(transfer_id) is None
        assert not desk.transfers.announce(transfer_id, 4, [[1], [2]])
        desk.transfers.start_over(transfer_id)
        desk.transfers.complete(transfer_id, ((), ()))
        desk.transfers.end(transfer_id, "late")
    assert desk.ask(transfer_id="complete") != desk.ask(transfer_id="ended")


def test_the_end_of_a_prompt_is_remembered_for_twice_the_time_to_live(desk: Desk) -> None:
    desk.open()
    desk.transfers.end("t", "aborted")
    desk.clock.advance(2 * TTL_S - 1)
    desk.open("other")
    assert desk.told().state == ENDED
    desk.clock.advance(1)
    assert desk.open()
    assert desk.told().state == QUEUED


def test_who_asks_for_what_has_been_forgotten_is_told_at_once(desk: Desk) -> None:
    assert desk.told(0, 20, COMPUTING) == Followed("engine", TransferState.UNKNOWN)


def test_the_past_is_bounded(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfers, "_MAX_PAST", 20)
    for number in range(30):
        desk.open(f"t{number}")
        desk.transfers.end(f"t{number}", "aborted")
        desk.transfers.check_integrity()
    assert [*desk.transfers._past] == [f"t{number}" for number in range(10, 30)]
    assert isinstance(desk.ask(transfer_id="t29"), Followed)
    assert isinstance(desk.ask(transfer_id="t9"), NotYet)


def test_what_thousands_leave_behind_that_end_at_once_pushes_out_no_complete_prompt(desk: Desk) -> None:
    """Who reads a range when the prompt is complete asks behind it."""
    desk.open("complete")
    desk.transfers.complete("complete", [range(1, 2**19), []])
    for number in range(2):
        desk.open(f"long{number}")
        desk.transfers.complete(f"long{number}", [range(1, 2**19), []])
    for number in range(8192):
        desk.transfers.open(Prompt(f"t{number}", f"lease of t{number}", PromptIdentity(30, "00ff")))
        desk.transfers.end(f"t{number}", "aborted")
    told = desk.ask(transfer_id="complete", state=TransferState.COMPUTING)
    assert isinstance(told, Followed)
    assert told.state == TransferState.COMPLETE


def test_the_blocks_of_past_prompts_are_bounded(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    """The newest is kept whatever its size."""
    monkeypatch.setattr(transfers, "_MAX_PAST_BLOCKS", 25)
    for number, blocks in enumerate((10, 10, 10, 30)):
        desk.open(f"t{number}")
        desk.transfers.complete(f"t{number}", [range(1, blocks + 1), []])
        desk.transfers.check_integrity()
    assert list(desk.transfers._past) == ["t3"]
    desk.open("t4")
    desk.announce(8, "t4")
    desk.transfers.end("t4", "aborted")
    desk.transfers.check_integrity()
    assert (list(desk.transfers._past), desk.transfers._past_blocks) == (["t4"], 0)


def test_what_is_cancelled_before_it_comes_is_not_taken_up(desk: Desk) -> None:
    assert desk.transfers.cancel(["t"]) == []
    assert not desk.open()
    assert desk.open(), "the name is free again"


def test_a_cancel_is_forgotten_after_a_minute(desk: Desk) -> None:
    desk.transfers.cancel(["t"])
    desk.clock.advance(60)
    assert desk.open()


def test_a_cancel_that_is_repeated_keeps_no_other_from_being_forgotten(desk: Desk) -> None:
    desk.transfers.cancel(["again", "t"])
    desk.clock.advance(59)
    desk.transfers.cancel(["again"])
    desk.clock.advance(1)
    assert desk.open("t")
    assert not desk.open("again")


def test_cancels_of_what_never_comes_are_bounded(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfers, "_MAX_PAST", 2048)
    desk.transfers.cancel([f"t{number}" for number in range(5000)])
    assert len(desk.transfers._cancelled) == 2048
    desk.transfers.cancel(["t7"])
    assert len(desk.transfers._cancelled) == 2048
    desk.clock.advance(60)
    desk.transfers.cancel(["late"])
    assert not desk.open("late")


def test_a_cancel_names_the_leases_to_end(desk: Desk) -> None:
    for transfer_id in ("a", "b", "c"):
        desk.open(transfer_id)
    desk.transfers.complete("b", ((), ()))
    assert desk.transfers.cancel(["a", "b", "unknown"]) == ["lease of a", "lease of b"]
    assert desk.transfers.end_of(["lease of a", "lease of b", "lease of nobody"], "cancelled") == ["a"]
    assert desk.transfers.open_leases == ("lease of c",)


def test_slots_are_told_once_to_those_who_read_host_memory_until_the_attempt_ends(desk: Desk) -> None:
    slots = SlotRange(0, 24, (0, 0), ((0, 1, 2, 3, 4, 5), (6, 7, 8)))

    def told(host_tokens: int, attempt: int, tokens: int = 0, state: str = COMPUTING) -> Followed | NotYet:
        return desk.transfers.answer("engine", Follow("", "t", attempt, tokens, state, 2.0, host_tokens))

    desk.open()
    for attempt in (0, 1):
        desk.announce(0)
        assert isinstance(told(0, attempt), NotYet)
        assert desk.transfers.announce_slots("t", slots)
        assert not desk.transfers.announce_slots("t", slots)
        for host_tokens, asked_of in ((0, attempt), (23, attempt), (24, attempt - 1)):
            answer = told(host_tokens, asked_of)
            assert isinstance(answer, Followed)
            assert answer.in_host == slots
        assert isinstance(told(24, attempt), NotYet)
        assert isinstance(told(-1, attempt), NotYet)
        if not attempt:
            desk.transfers.start_over("t")
    desk.transfers.complete("t", ((1,), (2,)))
    answer = told(0, 1)
    assert isinstance(answer, Followed)
    assert answer.in_host is None
    assert isinstance(told(0, 1, 30, COMPLETE), NotYet)


def test_a_prompt_may_come_before_the_block_sizes_are_known() -> None:
    transfers = Transfers(TTL_S)
    transfers.open(Prompt("t", "lease", PromptIdentity(30, "")))
    transfers.set_groups([Retention(size) for size in SIZES])
    assert transfers.announce("t", 4, [[1], [2]])
    transfers.check_integrity()


def test_a_complete_prompt_is_remembered_for_as_long_as_its_lease_may_be_unclaimed() -> None:
    clock = ManualClock()
    transfers = Transfers(TTL_S, clock, remembered_s=120.0)
    transfers.set_groups([Retention(size) for size in SIZES])
    transfers.open(Prompt("t", "lease", PromptIdentity(4, "")))
    transfers.complete("t", ((1,), (2,)))

    def is_known() -> bool:
        transfers.open(
            Prompt(f"at {clock.now}", "another lease", PromptIdentity(4, ""))
        )  # which makes it forget what is old
        return isinstance(transfers.answer("engine", Follow("", "t", -1, 0, TransferState.UNKNOWN, 2.0)), Followed)

    clock.advance(119.0)
    assert is_known()
    clock.advance(1.0)
    assert not is_known()
