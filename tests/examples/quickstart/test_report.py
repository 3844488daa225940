"""The verdict: only pulled prompts and identical answers pass."""

from dataclasses import replace
from io import StringIO
from typing import Any

import pytest
from rich.console import Console

from examples.quickstart.metrics import Work, parse
from examples.quickstart.questions import Answer, Prompt, Question
from examples.quickstart.report import (
    Outcome,
    first_token_s,
    problems,
    show_answers,
    show_engines,
    show_verdict,
    table,
)

NOTHING = Work(
    requests=0,
    computed_tokens=0,
    cached_tokens=0,
    pulled_tokens=0,
    pulls=0,
    failures=0,
    pull_bytes=0,
    descriptors=0,
    pull_s=0.0,
    read_s=0.0,
    decode_s=0.0,
)
PULLED = replace(
    NOTHING, requests=2, pulls=2, pulled_tokens=158, computed_tokens=2, pull_bytes=8_000_000, descriptors=7,
    pull_s=0.010, read_s=0.004, decode_s=3.0,
)  # fmt: skip
COMPUTED = replace(NOTHING, requests=2, computed_tokens=160, decode_s=3.0)
ANSWERS = (Answer("Paris.", 100, 2.0, None), Answer("Seven [bold] days.", 60, 2.4, None))
GOOD = Outcome(
    Question("two at once", (Prompt(text="The capital of France is"), Prompt(messages=("How many days?",)))),
    pulled=ANSWERS,
    direct=ANSWERS,
    pulled_work=PULLED,
    direct_work=COMPUTED,
)


def shown(show: Any, *arguments: Any) -> tuple[Any, str]:
    console = Console(file=StringIO(), width=120)
    result = show(console, *arguments)
    return result, console.file.getvalue()  # type: ignore[attr-defined]


def test_pulled_prompts_and_identical_answers_pass() -> None:
    assert problems(GOOD) == []
    passed, text = shown(show_verdict, [GOOD])
    assert passed is True
    assert "All 2 answers are identical" in text
    assert "D pulled 158 of 160 prompt tokens and computed 2" in text


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"computed_tokens": 62, "pulled_tokens": 98}, "D computed 62 of 160 prompt tokens itself"),
        ({"computed_tokens": 3}, "at most one a prompt"),
        ({"pulled_tokens": 126, "cached_tokens": 32}, "D pulled only 126 of 160"),
        ({"failures": 1}, "1 pull failed"),
        ({"pulls": 1}, "D counted 1 pull for 2 prompts"),
        ({"requests": 1}, "D finished 1 requests; 2 were sent"),
    ],
)
def test_a_prompt_that_was_not_wholly_pulled_fails(change: dict[str, Any], words: str) -> None:
    outcome = replace(GOOD, pulled_work=replace(PULLED, **change))
    assert words in "; ".join(problems(outcome))
    passed, text = shown(show_verdict, [GOOD, outcome])
    assert passed is False
    assert "two at once:" in text
    assert "identical" not in text


def test_an_answer_that_differs_fails() -> None:
    outcome = replace(GOOD, direct=(ANSWERS[0], replace(ANSWERS[1], text="Eight.")))
    assert problems(outcome) == ["the answers with and without disaggregation differ"]
    assert "different" in "".join(table_text(outcome))


def test_two_empty_answers_prove_nothing() -> None:
    empty = tuple(replace(answer, text=" ") for answer in ANSWERS)
    assert problems(replace(GOOD, pulled=empty, direct=empty)) == ["an answer is empty"]


@pytest.mark.parametrize(
    "change", [{"computed_tokens": 64, "cached_tokens": 96}, {"computed_tokens": 2, "pulled_tokens": 158}]
)
def test_a_comparison_that_profits_from_the_pull_fails(change: dict[str, Any]) -> None:
    (problem,) = problems(replace(GOOD, direct_work=replace(COMPUTED, **change)))
    assert "should have computed all 160 prompt tokens" in problem


def test_no_outcome_at_all_fails() -> None:
    passed, _ = shown(show_verdict, [])
    assert passed is False


def table_text(outcome: Outcome, decode_tp: int = 1) -> list[str]:
    _, text = shown(lambda console: console.print(table([outcome], decode_tp)))
    return [cell.strip() for cell in text.splitlines()[-2].split("│")][1:-1]


def test_the_table_shows_one_row_a_question() -> None:
    assert table_text(GOOD) == ["two at once", "160", "8.0", "7", "5.0", "2.00", "700", "700", "identical"]


def test_ranks_that_read_at_the_same_time_add_up_their_rates() -> None:
    assert table_text(GOOD, decode_tp=3)[5] == "6.00"


def test_a_question_without_a_pull_has_no_pull_time() -> None:
    assert table_text(replace(GOOD, pulled_work=NOTHING))[2:6] == ["0.0", "0", "-", "-"]


def test_the_first_token_of_a_streamed_answer_is_measured_at_the_client() -> None:
    streamed = [replace(answer, first_token_s=0.25) for answer in ANSWERS]
    assert first_token_s(streamed, PULLED) == 0.25
    assert first_token_s(ANSWERS, PULLED) == pytest.approx(0.7)


def test_both_answers_are_shown_where_they_differ() -> None:
    outcome = replace(GOOD, direct=(ANSWERS[0], replace(ANSWERS[1], text="Eight.")))
    _, text = shown(show_answers, [outcome])
    assert text.count("Paris.") == 1
    assert "with P/D: Seven [bold] days." in text  # an answer's brackets are no markup
    assert "D alone:  Eight." in text


def test_leases_and_the_longest_calls_are_shown() -> None:
    prefill = parse(
        'vllm:pd_leases_total{event="granted"} 6\nvllm:pd_leases_total{event="released"} 6\n'
        'vllm:pd_connector_call_seconds_max{call="scheduler.request_finished"} 0.0004\n'
    )
    _, text = shown(show_engines, prefill, parse(""))
    assert "Leases on P: 6 granted, 6 released, 0 cancelled, 0 expired." in text
    assert "P 0.40 ms (scheduler.request_finished), D none reported" in " ".join(text.split())
