"""Measures this connector beside vLLM's own: ``make bench-peers``. Writes peers.json, a table and plots.

Hybrids have a file of their own: ``--parts hybrid`` measures them anew, and leaves the others as they are.
"""

import argparse
import json
import random
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from benchmarks import multi_turn, record
from benchmarks.pair import hosts_for
from benchmarks.peers import connectors, model, plots, summary, table
from benchmarks.peers.budget import Budget, starts
from benchmarks.peers.rounds import Plan, Round, Rounds
from benchmarks.peers.sending import FIRST_TIMEOUT_S, Router
from benchmarks.peers.servers import Fleet
from benchmarks.peers.summary import Sample
from benchmarks.peers.trouble import BLOCK_SIZES, HYBRIDS, KILLED, TYPES, Situation, Trouble

DIRECTORY = record.ROOT / ".cache" / "peers"
#: A short chat: ``benchmarks.multi_turn`` measures a longer one.
CHAT = ("--conversations", "3", "--turns", "3", "--document-tokens", "400", "--answer-tokens", "8", "--also", "plain")
CHAT_STARTS, CHAT_S, TROUBLE_S, HYBRID_S = 3, 30.0, 30.0, 60.0  # what they take beside the starts
PARTS = ("rounds", "killed", "misfits", "hybrid", "chat")


def parse(words: list[str] | None) -> argparse.Namespace:
    """Return the arguments."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.peers", description=__doc__)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--lengths", type=int, nargs="+", default=Plan.lengths, help="tokens of a prompt")
    parser.add_argument("--repeats", type=int, default=Plan.repeats, help="prompts of each length, at most")
    parser.add_argument("--budget-s", type=float, default=1100.0, help="in which all should be done: it limits repeats")
    parser.add_argument("--bursts", type=int, default=Plan.bursts, help="of eight requests at once, at most")
    parser.add_argument("--rounds", type=Round.named, nargs="+", default=Plan.rounds, metavar="LAYOUT/P-D",
                        help="layouts, and P's and D's tensor parallel sizes")  # fmt: skip
    parser.add_argument("--connectors", nargs="+", choices=[each.key for each in connectors.ALL],
                        default=[each.key for each in connectors.ALL])  # fmt: skip
    parser.add_argument("--mbit-per-s", type=int, default=0,
                        help="of a network between all P and all D, on two hosts of their own; 0: none")  # fmt: skip
    parser.add_argument("--threads", type=int, default=1, help="of each worker's kernels")
    parser.add_argument("--seed", type=int, default=1, help="of the prompts")
    parser.add_argument("--name", default="peers", help="of the files in benchmarks/results")
    return parser.parse_args(words)


class Results:
    """What was measured so far. It is written after each part: one that fails later costs nothing of it."""

    def __init__(self, name: str, command: Sequence[str]) -> None:
        self._name, self._command, self._start = name, command, time.monotonic()
        self._samples: list[Sample] = []
        #: As they are written.
        self.figures: dict[str, Any] = {
            "labels": {each.key: each.label for each in connectors.ALL}, "cases": {}, "failures": {}, "trouble": {},
            "took_s": {},
        }  # fmt: skip

    def say(self, what: str) -> None:
        """Print what is done, with the seconds since the start."""
        print(f"{time.monotonic() - self._start:5.0f} s  {what}", file=sys.stderr, flush=True)

    def measured(self, samples: Sequence[Sample], failures: Mapping[str, Any]) -> None:
        """Add what a round has measured."""
        self._samples += samples
        self.figures |= {"cases": summary.by_name(summary.rows(self._samples)), "failures": dict(failures)}
        with (DIRECTORY / "samples.jsonl").open("w") as file:
            file.writelines(json.dumps(summary.plain(sample)) + "\n" for sample in self._samples)

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Write all figures when this part has ended, with the seconds that it took."""
        begin = time.monotonic()
        yield
        self.figures["took_s"][name] = time.monotonic() - begin
        record.write(self._name, self._command, self.figures, seconds=time.monotonic() - self._start)

    def show(self) -> None:
        """Write a table and plots of the results' file, if anything was written."""
        if not self.figures["took_s"]:
            return
        result, path = record.read(self._name), record.RESULTS / f"{self._name}.md"
        path.write_text(table.markdown(result))
        print(table.markdown(result))
        for each in (path.with_suffix(".json"), path, *plots.draw(result, record.RESULTS, self._name)):
            self.say(f"wrote {each.relative_to(record.ROOT)}")
        self.say(f"servers' logs are in {DIRECTORY.relative_to(record.ROOT)}")


def main(words: list[str] | None = None) -> None:
    """Measure, and write the results."""
    arguments = parse(words)
    compared = tuple(each for each in connectors.ALL if each.key in arguments.connectors)
    plan = Plan(
        rounds=tuple(arguments.rounds), lengths=tuple(arguments.lengths), repeats=arguments.repeats,
        bursts=arguments.bursts, connectors=compared,
    )  # fmt: skip
    DIRECTORY.mkdir(parents=True, exist_ok=True)
    for old in (*DIRECTORY.glob("*.log"), *DIRECTORY.glob("*.jsonl")):
        old.unlink()
    command = ["benchmarks.peers", *(sys.argv[1:] if words is None else words)]
    results, of_hybrids = Results(arguments.name, command), Results(f"{arguments.name}_hybrid", command)
    try:
        measure(plan, arguments, results, of_hybrids)
        if "chat" in arguments.parts:
            results.say("a chat of several turns, with host memory and without")
            with results.part("chat"):
                results.figures["chat"] = chat()
    finally:
        results.show()
        of_hybrids.show()


def chat() -> dict[str, Any]:
    """Return the chat's figures, or why there are none."""
    try:
        return multi_turn.main([*CHAT])
    except SystemExit as ended:
        return {"error": str(ended)}


def in_order(plan: Plan, parts: Sequence[str]) -> list[Round | Situation]:
    """Return what needs pairs of servers, in an order in which many are kept."""
    rounds = list(plan.rounds) if "rounds" in parts else []
    alike = next((number for number, each in enumerate(rounds, 1) if each.shapes == KILLED.shapes), len(rounds))
    kept = [situation for situation, part in ((KILLED, "killed"), (BLOCK_SIZES, "misfits")) if part in parts]
    others = [*([TYPES] if "misfits" in parts else []), *(HYBRIDS if "hybrid" in parts else [])]
    return [*rounds[:alike], *kept, *rounds[alike:], *others]


def budget(plan: Plan, arguments: argparse.Namespace) -> Budget:
    """Return the time of a run, of which what is not for the rounds is set aside."""
    steps = in_order(plan, arguments.parts)
    killed, misfits, hybrid, talk = (part in arguments.parts for part in ("killed", "misfits", "hybrid", "chat"))
    count = starts((each.shapes for each in steps), len(plan.connectors))
    count += len(plan.connectors) * killed + CHAT_STARTS * talk
    return Budget(arguments.budget_s, count, CHAT_S * talk + TROUBLE_S * (killed or misfits) + HYBRID_S * hybrid)


def measure(plan: Plan, arguments: argparse.Namespace, results: Results, of_hybrids: Results) -> None:
    """Measure all parts that need pairs of servers."""
    chance, router, patient = random.Random(arguments.seed), Router(), Router(FIRST_TIMEOUT_S)
    models = {name: model.make(DIRECTORY / name, name) for name in model.CONFIGS}
    with (
        hosts_for(2, arguments.mbit_per_s) as (prefill, decode),
        Fleet(models, DIRECTORY, arguments.threads, prefill, decode) as fleet,
    ):
        rounds = Rounds(fleet, router, plan, chance, budget(plan, arguments), patient)
        trouble = Trouble(fleet, rounds, chance, plan.connectors)
        for step in in_order(plan, arguments.parts):
            into = of_hybrids if step in HYBRIDS else results
            with into.part(step.name):
                if isinstance(step, Round):
                    samples = list(rounds.run(plan.rounds.index(step), results.say))
                    results.measured(samples, rounds.failures)
                else:
                    happened = trouble.killed(into.say) if step is KILLED else trouble.misfit(step, into.say)
                    into.figures["trouble"] |= happened
        trouble.close()
    router.close()
    patient.close()


if __name__ == "__main__":
    main()
