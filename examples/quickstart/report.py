"""The verdict of the demonstration, and what it shows of it."""

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from examples.quickstart.metrics import Snapshot, Work
from examples.quickstart.questions import Answer, Question

#: A connector call that keeps vLLM's scheduler or model longer than this is worth a look.
CALL_LIMIT_S = 0.002


@dataclass(frozen=True, slots=True)
class Outcome:
    """One question, asked twice: through the proxy, and straight at D without disaggregation."""

    question: Question
    pulled: Sequence[Answer]  # through the proxy
    direct: Sequence[Answer]
    pulled_work: Work  # of D
    direct_work: Work  # of D

    @property
    def prompt_tokens(self) -> int:
        """Tokens of all prompts together."""
        return sum(answer.prompt_tokens for answer in self.pulled)

    @property
    def identical(self) -> bool:
        """Whether every answer is the same with and without disaggregation."""
        return [answer.text for answer in self.pulled] == [answer.text for answer in self.direct]


def problems(outcome: Outcome) -> list[str]:
    """Why ``outcome`` does not prove that D answered from pulled blocks and answered right; empty if it does."""
    return [*_answer_problems(outcome), *_pull_problems(outcome), *_comparison_problems(outcome)]


def _answer_problems(outcome: Outcome) -> list[str]:
    found = []
    if not outcome.identical:
        found.append("the answers with and without disaggregation differ")
    if not all(answer.text.strip() for answer in (*outcome.pulled, *outcome.direct)):
        found.append("an answer is empty")
    return found


def _pull_problems(outcome: Outcome) -> list[str]:
    work, prompts = outcome.pulled_work, len(outcome.question.prompts)
    found = []
    if work.requests != prompts:
        found.append(f"D finished {work.requests} requests; {prompts} were sent")
    if work.failures:
        found.append(f"{_count(work.failures, 'pull')} failed; the decode server's log says why")
    if work.pulls < prompts:
        found.append(f"D counted {_count(work.pulls, 'pull')} for {_count(prompts, 'prompt')}")
    if work.computed_tokens > prompts:
        found.append(
            f"D computed {work.computed_tokens:,} of {outcome.prompt_tokens:,} prompt tokens itself; "
            "at most one a prompt is allowed"
        )
    if work.pulled_tokens < outcome.prompt_tokens - prompts:
        found.append(f"D pulled only {work.pulled_tokens:,} of {outcome.prompt_tokens:,} prompt tokens")
    return found


def _comparison_problems(outcome: Outcome) -> list[str]:
    work = outcome.direct_work
    tokens = sum(answer.prompt_tokens for answer in outcome.direct)
    if work.computed_tokens == tokens == outcome.prompt_tokens:
        return []
    return [
        f"without disaggregation D should have computed all {outcome.prompt_tokens:,} prompt tokens; it computed "
        f"{work.computed_tokens:,} of {tokens:,} ({work.cached_tokens:,} from its cache, {work.pulled_tokens:,} pulled)"
    ]


def first_token_s(answers: Sequence[Answer], work: Work) -> float:
    """Mean time to the first token as the client saw it, in seconds.

    An answer that was not streamed came whole: the time that D reports from its first to its last token is taken off.
    """
    measured = [answer.first_token_s for answer in answers if answer.first_token_s is not None]
    if len(measured) == len(answers):
        return sum(measured) / len(measured)
    return (sum(answer.total_s for answer in answers) - work.decode_s) / len(answers)


def table(outcomes: Sequence[Outcome], decode_tp: int) -> Table:
    """One row a question."""
    result = Table(title="Prompts computed by the prefill server, pulled by the decode server", title_justify="left")
    result.add_column("question", no_wrap=True)
    for heading in ("prompt\ntokens", "KV\nMB", "descrip-\ntors", "pull\nms", "read\nGB/s"):
        result.add_column(heading, justify="right")
    result.add_column("first token,\nP/D, ms", justify="right")
    result.add_column("first token,\nD alone, ms", justify="right")
    result.add_column("answers")
    for outcome in outcomes:
        result.add_row(*_cells(outcome, decode_tp))
    return result


def _cells(outcome: Outcome, decode_tp: int) -> list[str]:
    work = outcome.pulled_work
    # The ranks of D read at the same time: together they are as much faster as they are many.
    rate = work.pull_bytes / (work.read_s / decode_tp) / 1e9 if work.read_s else 0.0
    return [
        outcome.question.title,
        f"{outcome.prompt_tokens:,}",
        f"{work.pull_bytes / 1e6:,.1f}",
        f"{work.descriptors:,}",
        f"{1e3 * work.pull_s / work.pulls:,.1f}" if work.pulls else "-",
        f"{rate:.2f}" if rate else "-",
        f"{1e3 * first_token_s(outcome.pulled, outcome.pulled_work):,.0f}",
        f"{1e3 * first_token_s(outcome.direct, outcome.direct_work):,.0f}",
        "[green]identical[/]" if outcome.identical else "[red]different[/]",
    ]


def show_table(console: Console, outcomes: Sequence[Outcome], decode_tp: int) -> None:
    """The table, and how to read it."""
    console.print(table(outcomes, decode_tp))
    console.print(
        "[dim]pull: from D's order to P's word that the blocks were unchanged, less what D waited for P to compute; "
        "read: the transfer alone. P and D share "
        "this machine, so P/D cannot be faster than D alone here: the difference is what the detour costs.[/]\n"
    )


def show_answers(console: Console, outcomes: Sequence[Outcome]) -> None:
    """The prompts and what was answered; both answers where they differ."""
    for outcome in outcomes:
        for prompt, pulled, direct in zip(outcome.question.prompts, outcome.pulled, outcome.direct, strict=True):
            console.print(f"[bold]{escape(prompt.caption)}[/]")
            if pulled.text == direct.text:
                _indent(console, pulled.text)
            else:
                _indent(console, f"with P/D: {pulled.text.strip()}")
                _indent(console, f"D alone:  {direct.text.strip()}")
    console.print()


def show_verdict(console: Console, outcomes: Sequence[Outcome]) -> bool:
    """Say whether every outcome proves its point, and if not, why. Whether it does."""
    failed = [(outcome, found) for outcome in outcomes if (found := problems(outcome))]
    for outcome, found in failed:
        for problem in found:
            console.print(f"[red]{escape(outcome.question.title)}: {escape(problem)}.[/]")
    if failed or not outcomes:
        return False
    answers = sum(len(outcome.pulled) for outcome in outcomes)
    tokens = sum(outcome.prompt_tokens for outcome in outcomes)
    pulled = sum(outcome.pulled_work.pulled_tokens for outcome in outcomes)
    computed = sum(outcome.pulled_work.computed_tokens for outcome in outcomes)
    console.print(f"[green]All {answers} answers are identical with and without disaggregation.[/]")
    console.print(
        f"[green]D pulled {pulled:,} of {tokens:,} prompt tokens and computed {computed:,} "
        f"(at most one a prompt), by its own metrics.[/]"
    )
    return True


def show_engines(console: Console, prefill: Snapshot, decode: Snapshot) -> None:
    """What became of P's leases, and the connector call that kept vLLM waiting longest on either side."""
    leases = {
        event: round(prefill.total("vllm:pd_leases_total", event=event))
        for event in ("granted", "released", "cancelled", "expired")
    }
    console.print("Leases on P: " + ", ".join(f"{count} {event}" for event, count in leases.items()) + ".")
    parts = []
    for name, snapshot in (("P", prefill), ("D", decode)):
        if (longest := snapshot.longest_connector_call()) is None:
            parts.append(f"{name} none reported")
            continue
        call, seconds = longest
        time = f"{1e3 * seconds:.2f} ms"
        parts.append(f"{name} {f'[yellow]{time}[/]' if seconds > CALL_LIMIT_S else time} ({escape(call)})")
    console.print(
        f"Longest connector call on vLLM's own threads: {', '.join(parts)}; above {1e3 * CALL_LIMIT_S:.0f} ms it is "
        "too long, or this machine was busy."
    )


def _indent(console: Console, text: str) -> None:
    for line in text.strip().splitlines():
        wrapped = textwrap.fill(line, console.width, initial_indent="  ", subsequent_indent="  ")
        console.print(wrapped, markup=False, highlight=False)


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"
