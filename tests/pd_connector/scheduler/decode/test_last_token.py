"""What a prefill engine leases of a window: all that the last prompt token sees, which the decode engine computes.

vLLM's own scheduler frees what the token after the prompt does not see, before it tells its connector of the end.
"""

from typing import Any

import pytest

from tests.support.simulation.named_prefill import REACH_TOKENS, NamedPrefill, StartPrefill
from tests.support.simulation.prefill_works import PAGE_TOKENS, stamps_of


def first_needed(tokens: int) -> int:
    """Number of the first block of a window that computing the last token needs."""
    return max(tokens - REACH_TOKENS, 0) // PAGE_TOKENS


def leased_windows(engine: NamedPrefill, name: str) -> list[int]:
    answer = engine.answers[name]
    assert answer is not None
    _, windowed = answer["remote_block_ids"]
    return list(windowed)


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("chunk_tokens", [16, 512])
def test_prompts_of_every_length_are_leased_as_far_as_their_last_token_sees(
    start_prefill: StartPrefill, asynchronous: bool, chunk_tokens: int
) -> None:
    engine = start_prefill(256, with_window=True, asynchronous=asynchronous, chunk_tokens=chunk_tokens)
    lengths = range(1, 4 * PAGE_TOKENS + 2)
    for tokens in lengths:
        prompt = list(range(1000 * tokens, 1000 * tokens + tokens))
        stamps, first = stamps_of(prompt), first_needed(tokens)
        for name in (f"r{tokens}", f"again{tokens}"):  # the second one finds the first one's blocks
            engine.ask(name, prompt)
            engine.run()
            windowed = leased_windows(engine, name)
            assert [bool(block) for block in windowed] == [number >= first for number in range(len(windowed))], tokens
            for token in range(first * PAGE_TOKENS, tokens):
                assert engine.memory[windowed[token // PAGE_TOKENS], token % PAGE_TOKENS] == stamps[token]
            engine.side.reset()  # its lease ends
    passed = [tokens for tokens in lengths if first_needed(tokens) < max(tokens + 1 - REACH_TOKENS, 0) // PAGE_TOKENS]
    assert len(passed) == 2, "none of these lengths is one of which vLLM frees a block that is needed"


def test_a_named_prompt_says_from_the_start_what_will_be_held(start_prefill: StartPrefill) -> None:
    engine = start_prefill(with_window=True, chunk_tokens=16)
    tokens = REACH_TOKENS + PAGE_TOKENS - 1
    engine.ask("r", list(range(tokens)), "t")
    engine.step()
    engine.step()
    assert engine.told("t").first_tokens == (0, first_needed(tokens) * PAGE_TOKENS) == (0, 0)
    engine.run()
    assert engine.told("t").block_ids[1] == tuple(leased_windows(engine, "r"))
    assert all(leased_windows(engine, "r"))


def test_blocks_that_are_kept_for_the_last_token_are_given_back_with_the_lease(start_prefill: StartPrefill) -> None:
    engine = start_prefill(with_window=True)
    pool = engine.scheduler.kv_cache_manager.block_pool
    free = pool.get_num_free_blocks()
    engine.ask("r", list(range(REACH_TOKENS + PAGE_TOKENS - 1)))
    engine.run()
    assert all(leased_windows(engine, "r"))
    assert pool.get_num_free_blocks() < free
    engine.side.reset()
    engine.step()
    assert pool.get_num_free_blocks() == free


def test_requests_that_nobody_will_pull_are_cut_short_as_ever(start_prefill: StartPrefill) -> None:
    engine = start_prefill(with_window=True)
    tokens = REACH_TOKENS + PAGE_TOKENS - 1
    asked: list[int] = []
    coordinator = engine.scheduler.kv_cache_manager.coordinator
    windowed: Any = coordinator.single_type_managers[1]
    remove = windowed.remove_skipped_blocks

    def noted(request_id: str, computed: int, *args: Any) -> None:
        asked.append(computed)
        remove(request_id, computed, *args)

    windowed.remove_skipped_blocks = noted
    engine.ask("r", list(range(tokens)), do_remote_decode=False)
    engine.run()
    assert asked[-1] == tokens
