"""What is known of a prompt that is being computed: which range is next, and what an answer changes.

Answers are made by hand first. Then a prefill engine of random fate makes them, and a reader that reads at any time
from blocks that may be others' by then must hold the prompt's bytes in the end, or have been told that it cannot.
"""

import random
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pd_connector.orders import PullOrder
from pd_connector.progress import TransferEnded
from pd_connector.worker.followed_prompt import FollowedPrompt
from tests.support.connector.requests import a_prompt, a_remote
from transfer.control.messages import Follow, Followed, TransferState

BLOCK = 16
REMOTE = a_remote(a_prompt(70), remote_block_ids=((5, 6),), remote_block_sizes=(BLOCK,))
TABLE = (5, 6, 3, 9, 2)


def a_followed(tokens: int = 32, first: int = 0, end: int = 69, **changes: Any) -> FollowedPrompt:
    """A prompt of which so many tokens were computed when the pull was ordered."""
    known = msgspec.structs.replace(REMOTE, remote_block_ids=(TABLE[: -(-tokens // BLOCK)],), **changes)
    order = PullOrder("r", known, ((1, 2, 8, 3, 11),), first, end, "pull", "transfer-1", tokens)
    return FollowedPrompt(order)


def computing(tokens: int, block_ids: tuple[int, ...] = (), first_block: int = 0, **changes: Any) -> Followed:
    answer = Followed(
        REMOTE.remote_engine_id,
        TransferState.COMPUTING,
        REMOTE.lease_id,
        30.0,
        0,
        70,
        REMOTE.prompt_digest,
        (BLOCK,),
        tokens,
        (block_ids,),
        (first_block,),
    )
    return msgspec.structs.replace(answer, **changes)


def complete(block_ids: tuple[int, ...] = TABLE, **changes: Any) -> Followed:
    return computing(70, block_ids, state=TransferState.COMPLETE, **changes)


def state(name: str, reason: str = "", attempt: int = 0) -> Followed:
    return Followed(REMOTE.remote_engine_id, name, attempt=attempt, reason=reason)


def read(prompt: FollowedPrompt, tokens: range) -> None:
    blocks = np.arange(tokens.start // BLOCK, -(-tokens.stop // BLOCK))
    prompt.has_read(tokens, [(0, blocks)])
    prompt.check_integrity()


def ids(prompt: FollowedPrompt) -> list[int]:
    return [int(block) for block in prompt.progress.tables[0].block_ids]


# A prompt that is complete from the start


def test_a_prompt_that_is_complete_is_one_range_and_nothing_is_asked() -> None:
    prompt = FollowedPrompt(PullOrder("r", REMOTE, ((1, 2),), 16, 69, "pull"))
    assert prompt.is_complete
    assert prompt.next_range(48, 1e9) == range(16, 69)
    prompt.has_read(range(16, 69), ())
    assert prompt.next_range(48) is None
    assert prompt.progress.remote is REMOTE
    assert prompt.take(state(TransferState.ENDED)) is False, "whatever comes late: the lease decides"


# Which range is next


def test_a_range_ends_where_no_unit_is_cut() -> None:
    prompt = a_followed(63)
    assert prompt.next_range(16) == range(48)
    assert prompt.next_range(32) == range(32)
    assert prompt.next_range(64) is None


def test_a_range_that_is_too_long_ends_at_a_border_and_the_next_one_goes_on() -> None:
    prompt = a_followed(63, first=16)
    assert prompt.next_range(16, most_tokens=16) == range(16, 32)
    prompt.take(complete())
    ranges = []
    while (tokens := prompt.next_range(16, most_tokens=32)) is not None:
        ranges.append(tokens)
        prompt.has_read(tokens, ())
    assert ranges == [range(16, 48), range(48, 69)]
    assert a_followed(63, first=16).next_range(32, most_tokens=32) == range(16, 32)


def test_a_range_that_is_too_short_waits_for_more_but_not_at_the_end() -> None:
    prompt = a_followed(32)
    assert prompt.next_range(16, least_tokens=33) is None
    assert prompt.next_range(16, least_tokens=32) == range(32)
    prompt.take(computing(48, (3,), 2))
    assert prompt.next_range(16, least_tokens=33) == range(48)
    prompt.take(complete())
    assert prompt.next_range(16, least_tokens=1e9) == range(69)


def test_a_prefix_that_is_here_already_is_not_read() -> None:
    prompt = a_followed(48, first=32)
    assert prompt.next_range(16) == range(32, 48)
    assert a_followed(32, first=32).next_range(16) is None
    assert a_followed(16, first=32).next_range(16) is None


def test_nothing_beyond_the_wanted_end_is_read() -> None:
    prompt = a_followed(64, end=40)
    assert prompt.next_range(16) == range(32)
    read(prompt, range(32))
    assert prompt.next_range(16) is None
    prompt.take(complete())
    assert prompt.next_range(16) == range(32, 40)


def test_the_last_range_may_be_empty() -> None:
    prompt = a_followed(64, end=64)
    read(prompt, range(64))
    prompt.take(complete())
    assert prompt.next_range(16) is None


def test_a_block_that_is_missing_is_awaited_to_the_end_or_to_the_next_attempt() -> None:
    prompt = a_followed(32)
    prompt.wait_for_end()
    prompt.take(computing(48, (3,), 2))
    assert prompt.next_range(16) is None
    prompt.take(computing(16, (4,), attempt=1))
    assert prompt.next_range(16) == range(16)
    prompt.wait_for_end()
    prompt.take(complete(attempt=1))
    assert prompt.next_range(16) == range(69)


# What is asked


def test_the_question_says_what_is_known() -> None:
    prompt = a_followed(32)
    assert prompt.progress.question(2.0) == Follow("engine-p", "transfer-1", 0, 32, "computing", 2.0)
    prompt.take(computing(16, (4,), attempt=3))
    prompt.take(state(TransferState.QUEUED, attempt=3))
    assert prompt.progress.question(-1.0) == Follow("engine-p", "transfer-1", 3, 16, "queued", 0.0)


# What an answer changes


def test_tables_grow_with_the_answers() -> None:
    prompt = a_followed(32)
    assert prompt.take(computing(48, (3,), 2))
    assert (prompt.progress.tokens, ids(prompt)) == (48, [5, 6, 3])
    assert prompt.take(computing(64, (3, 9), 2))
    assert ids(prompt) == [5, 6, 3, 9]
    assert prompt.take(complete())
    assert (prompt.is_complete, ids(prompt), prompt.restarts) == (True, list(TABLE), 0)
    assert prompt.progress.remote == msgspec.structs.replace(REMOTE, remote_block_ids=(TABLE,))


def test_a_table_may_begin_with_the_first_answer() -> None:
    order = PullOrder("r", msgspec.structs.replace(REMOTE, remote_block_ids=()), ((1, 2),), 0, 69, "p", "transfer-1")
    prompt = FollowedPrompt(order)
    assert prompt.next_range(16) is None
    assert prompt.take(computing(32, (5, 6)))
    assert (ids(prompt), prompt.next_range(16)) == ([5, 6], range(32))


@pytest.mark.parametrize(
    "answer",
    [
        computing(32, (), 2),
        computing(16, (8,)),
        computing(32, (8, 7)),
        computing(64, (1, 2, 3, 4), attempt=-1),
        complete((1, 2, 3, 4, 5), attempt=-1),
    ],
    ids=["again", "late", "other blocks", "late attempt", "late end"],
)
def test_what_is_not_new_changes_nothing(answer: Followed) -> None:
    prompt = a_followed(32)
    assert not prompt.take(answer)
    assert (prompt.progress.tokens, prompt.progress.attempt, prompt.progress.state, ids(prompt)) == (
        32,
        0,
        "computing",
        [5, 6],
    )
    assert prompt.restarts == 0


def test_a_new_attempt_is_read_from_the_beginning() -> None:
    prompt = a_followed(48, first=16)
    read(prompt, range(16, 48))
    assert prompt.take(computing(32, (8, 7), attempt=1))
    assert (prompt.next_range(16), prompt.restarts, ids(prompt)) == (range(16, 32), 1, [8, 7])
    prompt.take(complete((8, 7, 6, 5, 4), attempt=1))
    assert prompt.progress.remote.remote_attempt == 1
    assert prompt.progress.remote.remote_block_ids == ((8, 7, 6, 5, 4),)


def test_a_new_attempt_is_news_before_any_of_it_is_computed() -> None:
    prompt = a_followed(48)
    assert prompt.take(computing(0, (), attempt=1))
    assert (prompt.next_range(1), prompt.progress.tokens) == (None, 0)


def test_a_prompt_that_is_queued_again_is_not_read_until_it_goes_on() -> None:
    prompt = a_followed(32)
    assert prompt.take(state(TransferState.QUEUED))
    assert not prompt.take(state(TransferState.QUEUED))
    assert prompt.next_range(16) is None
    assert prompt.take(computing(32, (), 2))
    assert prompt.next_range(16) == range(32)


@pytest.mark.parametrize(
    ("final", "again"),
    [(TABLE, False), ((5, 6, 3, 9, 7), False), ((5, 7, 3, 9, 2), True), ((5, 0, 3, 9, 2), True)],
    ids=["same", "another to come", "another", "not held"],
)
def test_blocks_that_were_read_must_be_in_the_final_table(final: tuple[int, ...], again: bool) -> None:
    prompt = a_followed(48)
    read(prompt, range(48))
    prompt.take(complete(final))
    assert prompt.restarts == again
    assert prompt.next_range(16) == range(0 if again else 48, 69)


def test_blocks_that_a_window_has_passed_do_not_matter_if_they_were_not_read() -> None:
    prompt = a_followed(48)
    prompt.has_read(range(48), [(0, np.array([2]))])
    prompt.take(complete((0, 0, 3, 9, 2)))
    assert prompt.restarts == 0


# What cannot be


@pytest.mark.parametrize("answer", [state(TransferState.ENDED), computing(64, (1, 2, 3, 4), lease_id="other")])
def test_what_ends_a_prompt_leaves_what_is_known_of_it(answer: Followed) -> None:
    """As ``tests/pd_connector/test_progress.py`` says what does."""
    prompt = a_followed(32)
    read(prompt, range(32))
    with pytest.raises(TransferEnded):
        prompt.take(answer)
    assert (prompt.progress.tokens, prompt.read_until, prompt.restarts) == (32, 32, 0)


# A prefill engine of random fate


@dataclass
class Fate:
    """A prefill engine that computes, preempts and moves a window as dice say; the memory is by block id."""

    dice: random.Random
    prompt_tokens: int
    window: int
    attempt: int = 0
    tokens: int = 0
    state: str = TransferState.COMPUTING
    table: list[int] = field(default_factory=list)
    memory: dict[int, list[str]] = field(default_factory=dict)
    free: list[int] = field(default_factory=lambda: list(range(1, 40)))

    def step(self) -> None:
        """Compute some more, or lose everything."""
        if self.state == TransferState.COMPLETE:
            return
        if self.dice.random() < 0.15 and self.tokens:
            for block in filter(None, self.table):
                self._let_go(block)
            self.table, self.tokens, self.attempt = [], 0, self.attempt + 1
            self.state = self.dice.choice([TransferState.QUEUED, TransferState.COMPUTING])
            return
        self.state = TransferState.COMPUTING
        until = min(self.prompt_tokens, self.tokens + self.dice.choice([1, 7, 16, 40]))
        for token in range(self.tokens, until):
            if token % BLOCK == 0:
                self.table.append(self.free.pop(self.dice.randrange(len(self.free))))
                self.memory[self.table[-1]] = ["nothing"] * BLOCK
            self.memory[self.table[-1]][token % BLOCK] = f"{self.attempt}: {token}"
        self.tokens = until
        for number, block in enumerate(self.table):
            if block and self.window and (number + 1) * BLOCK <= until - self.window:
                self._let_go(block)
                self.table[number] = 0
        if until == self.prompt_tokens:
            self.state = TransferState.COMPLETE

    def _let_go(self, block: int) -> None:
        self.memory[block] = ["another's"] * BLOCK
        self.free.append(block)

    def answer(self, asked: Follow) -> Followed:
        if self.state == TransferState.QUEUED:
            return state(TransferState.QUEUED, attempt=self.attempt)
        is_whole = self.state == TransferState.COMPLETE or asked.attempt != self.attempt
        first = 0 if is_whole else min(asked.tokens // BLOCK, len(self.table))
        return computing(
            self.tokens,
            tuple(self.table[first:]),
            first,
            state=self.state,
            attempt=self.attempt,
            prompt_tokens=self.prompt_tokens,
        )


@pytest.mark.thorough
@settings(max_examples=400, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    prompt_tokens=st.integers(20, 200),
    window=st.sampled_from([0, 0, 40]),
    disorder=st.sampled_from([0.0, 0.3]),
    border=st.sampled_from([4, 16, 32]),
)
def test_what_is_confirmed_was_read_from_the_final_blocks_whatever_the_answers_were(
    seed: int, prompt_tokens: int, window: int, disorder: float, border: int
) -> None:
    dice = random.Random(seed)
    engine = Fate(dice, prompt_tokens, window)
    engine.step()
    wanted_from = 0 if not window else max(0, prompt_tokens - window) // BLOCK * BLOCK  # holes of ours before
    known = a_remote(a_prompt(prompt_tokens), lease_id="lease-1", remote_block_ids=(tuple(engine.table),))
    known = msgspec.structs.replace(known, remote_attempt=engine.attempt, prompt_digest="")
    order = PullOrder("r", known, ((1,) * 40,), 0, prompt_tokens - 1, "pull", "transfer-1", engine.tokens)
    prompt, ours, past = FollowedPrompt(order), ["nothing"] * prompt_tokens, list[Followed]()

    def read_what_can_be() -> None:
        """As late as the dice say: the engine goes on in the meantime."""
        while (tokens := prompt.next_range(border, dice.choice([1, 16]))) is not None:
            if not prompt.is_complete:
                for _ in range(dice.choice([0, 0, 1, 3])):
                    engine.step()
            blocks = set()
            for token in filter(lambda token: token >= wanted_from, tokens):
                number = token // BLOCK
                block = int(prompt.progress.tables[0].block_ids[number])
                if block < 0:
                    assert not prompt.is_complete, "a block that is wanted is not held in the end"
                    prompt.wait_for_end()
                    break
                blocks.add(number)
                ours[token] = engine.memory[block][token % BLOCK]
            else:
                prompt.has_read(tokens, [(0, np.array(sorted(blocks), np.int64))])
            prompt.check_integrity()

    for _ in range(1000):
        read_what_can_be()
        if prompt.is_complete:
            break
        past.append(engine.answer(prompt.progress.question(2.0)))
        answer = dice.choice(past) if dice.random() < disorder else past[-1]
        try:
            prompt.take(answer)
        except TransferEnded:  # a late answer left out blocks that are not known any more
            assert disorder, "answers that came in order were refused"
            return
        prompt.check_integrity()
        engine.step()
    assert prompt.is_complete, "the prompt was never complete"
    assert prompt.next_range(border) is None
    assert prompt.progress.remote.remote_block_ids == (tuple(engine.table),)
    final = [f"{engine.attempt}: {token}" for token in range(prompt_tokens)]
    assert ours[wanted_from:-1] == final[wanted_from:-1]
