"""Another connector of MultiConnector loads while a step computes, under vLLM's own schedulers and MultiConnector.

vLLM counts its tokens as computed at once. ``NamedPrefill`` compares whatever is announced or leased with the memory,
after every event.
"""

import pytest

from tests.support.connector.requests import a_prompt
from tests.support.releases import INSTALLED, counts_under_way
from tests.support.simulation.named_prefill import CHUNK_TOKENS, NamedPrefill, StartPrefill
from tests.support.simulation.prefill_works import PAGE_TOKENS
from transfer.control.messages import TransferState

COMPUTING, COMPLETE = TransferState.COMPUTING, TransferState.COMPLETE
HELD = 96  # tokens of the prompt that the sibling holds
PROMPT = a_prompt(200)


def with_two_prompts(start_prefill: StartPrefill, name: str | None = "t", **options: object) -> NamedPrefill:
    """Of the same prompt, the sibling loads the beginning for the first; the second finds it in the same step.

    ``name``: of the second, as a transfer.
    """
    engine = start_prefill(with_sibling=True, chunk_tokens=4 * CHUNK_TOKENS, **options)
    engine.sibling.held["first"] = HELD
    engine.ask("first", PROMPT)
    engine.ask("second", PROMPT, name)
    return engine


def test_what_another_request_is_being_loaded_is_announced_when_the_step_has_ended(
    start_prefill: StartPrefill,
) -> None:
    engine = with_two_prompts(start_prefill)
    step = engine.schedule()
    assert [load.request_id for load in step.loads] == ["first"]
    tables = {work.request_id: work.tables[0] for work in step.works}
    assert tables["first"][: HELD // PAGE_TOKENS] == tables["second"][: HELD // PAGE_TOKENS], "it was not found"
    assert engine.state("t") == (COMPUTING, 0, 0)
    engine.end(step)
    engine.run()
    assert engine.state("t") == (COMPLETE, 0, len(PROMPT))
    assert not engine.misread


def test_what_a_prompt_is_loaded_itself_is_announced_when_the_step_has_ended(start_prefill: StartPrefill) -> None:
    engine = start_prefill(with_sibling=True)
    engine.sibling.held["r"] = HELD
    engine.ask("r", PROMPT, "t")
    step = engine.schedule()
    assert engine.state("t") == (COMPUTING, 0, 0)
    engine.end(step)
    assert engine.state("t") == (COMPUTING, 0, HELD + CHUNK_TOKENS)


@counts_under_way
def test_what_was_loaded_long_ago_is_announced_at_once(start_prefill: StartPrefill) -> None:
    engine = start_prefill(with_sibling=True)
    engine.sibling.held["first"] = HELD
    engine.ask("first", PROMPT)
    engine.run()
    engine.ask("other", a_prompt(300, 1))
    engine.run()
    engine.ask("second", PROMPT, "t")
    engine.schedule()
    assert engine.state("t") == (COMPUTING, 0, 192)


@pytest.mark.parametrize("leaves", [False, True])
def test_what_is_loaded_for_a_request_that_found_it_in_a_later_step(start_prefill: StartPrefill, leaves: bool) -> None:
    """The step that loads is still under way, and perhaps nobody hears how it ends."""
    engine = start_prefill(with_sibling=True, asynchronous=True)
    engine.sibling.held["first"] = HELD
    engine.ask("first", PROMPT)
    first = engine.schedule()
    if leaves:
        engine.abort("first")
    engine.ask("second", PROMPT, "t")
    second = engine.schedule()
    assert engine.state("t") == (COMPUTING, 0, 0)
    engine.end(first)
    engine.end(second)
    engine.run()
    assert engine.state("t") == (COMPLETE, 0, len(PROMPT))


@pytest.mark.parametrize("asynchronous", [False, True])
def test_nothing_of_a_failed_load_is_announced_or_leased(start_prefill: StartPrefill, asynchronous: bool) -> None:
    """Where it is computed again. The second request is told of a new attempt."""
    engine = with_two_prompts(start_prefill, asynchronous=asynchronous)
    engine.fails_sibling = True
    engine.step()
    engine.fails_sibling = False
    engine.run()
    assert engine.misread, "nobody has computed from what was not there"
    if INSTALLED >= (0, 30):
        assert engine.state("t") == (COMPLETE, 1, len(PROMPT))
        assert engine.answers["first"]
    else:  # nobody knows when all of it has been computed again
        assert engine.state("t") == (TransferState.ENDED, 1, 0)
        assert engine.answers["first"] is None


@pytest.mark.parametrize("next_begins", [False, True])
def test_what_has_computed_from_a_failed_load_in_the_next_step_is_not_leased(
    start_prefill: StartPrefill, next_begins: bool
) -> None:
    """vLLM goes on with who has found it then, and ends its request with a token of that step: both answers are wrong.

    The prompts are computed where they are decoded. A step that computes the first again may have begun.
    """
    engine = start_prefill(with_sibling=True, asynchronous=True, chunk_tokens=4 * CHUNK_TOKENS)
    prompt = a_prompt(400)
    engine.sibling.held["first"] = HELD
    engine.ask("first", prompt)
    steps = [engine.schedule()]
    engine.ask("second", prompt, "t")
    steps.append(engine.schedule())
    engine.fails_sibling = True
    engine.end(steps.pop(0))
    engine.fails_sibling = False
    if next_begins:
        steps.append(engine.schedule())
    for step in steps:
        engine.end(step)
    engine.ask("third", prompt, "u")
    engine.run()
    assert {"first", "second"} <= set(engine.misread), "vLLM has noticed it"
    assert "third" not in engine.misread, "what the others have computed was found"
    assert engine.answers["first"] is engine.answers["second"] is None
    assert engine.state("t")[0] is TransferState.ENDED
    assert engine.answers["third"]
    assert engine.state("u")[0] is COMPLETE


@pytest.mark.thorough
@pytest.mark.parametrize("policy", ["fail", "recompute"])
@pytest.mark.parametrize("who", ["both", "the second stays", "nobody stays"])
@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("store", ["eager", "lazy"])
def test_a_failed_load_leaves_nothing_that_others_find(
    start_prefill: StartPrefill, policy: str, who: str, asynchronous: bool, store: str
) -> None:
    """Neither on the device nor, for good, in host memory. Its request may be gone before it has failed."""
    engine = with_two_prompts(
        start_prefill,
        None,
        asynchronous=asynchronous,
        policy=policy,
        host_slots=64,
        host_settings={"cpu_bytes_to_use": 1 << 20, "cpu_store": store},
    )
    step = engine.schedule()
    if who != "both":
        engine.abort("first")
    if who == "nobody stays":
        engine.abort("second")
    engine.fails_sibling = True
    engine.end(step)
    engine.fails_sibling = False
    if policy == "fail" and who == "both":
        assert engine.ended["first"] == "error"
    misread = list(engine.misread)
    assert misread, "nobody has computed from what was not there"
    engine.run()
    for name in ("third", "fourth"):
        for number in range(2):
            engine.ask(f"{name}, {number}", a_prompt(500, 5 + number))  # they take the device's blocks
            engine.run()
            engine.settle()
        engine.ask(name, PROMPT)
        engine.run()
        engine.settle()
    assert engine.misread == misread, "what has failed to load is found"
    assert engine.answers["fourth"]


def test_a_request_that_is_preempted_before_its_load_has_failed_leaves_nothing(start_prefill: StartPrefill) -> None:
    """vLLM asks only the requests that run."""
    engine = start_prefill(with_sibling=True, asynchronous=True)
    engine.sibling.held["first"] = HELD
    first = engine.ask("first", PROMPT)
    step = engine.schedule()
    engine.preempt(first)
    engine.sibling.held.clear()
    engine.fails_sibling = True
    engine.end(step)
    engine.fails_sibling = False
    misread = list(engine.misread)
    engine.run()
    engine.ask("second", PROMPT, "t")
    engine.run()
    assert engine.misread == misread
    assert engine.answers["second"]


def test_what_a_session_has_computed_is_not_taken_for_a_load_when_its_next_tokens_come(
    start_prefill: StartPrefill,
) -> None:
    """Nobody is asked what there is of these, and its blocks are found after it has left at once."""
    engine = start_prefill(with_sibling=True)
    engine.go_on("session", PROMPT)
    for _ in range(2 + len(PROMPT) // CHUNK_TOKENS):
        engine.step()
    engine.go_on("session", a_prompt(8, 1))
    engine.step()
    engine.abort("session")
    engine.ask("other", PROMPT, "t")
    engine.schedule()
    assert engine.state("t") == (COMPUTING, 0, len(PROMPT) // PAGE_TOKENS * PAGE_TOKENS)
