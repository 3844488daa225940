"""Measures this connector beside vLLM's own: ``make bench-peers``. Writes peers.json, a table and plots."""

import argparse
import json
import random
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks import multi_turn, record
from benchmarks.peers import connectors, model, plots, summary, table
from benchmarks.peers.rounds import LAYOUTS, Plan, Rounds
from benchmarks.peers.sending import Router
from benchmarks.peers.servers import Fleet
from benchmarks.peers.trouble import BLOCK_SIZES, TYPES, Trouble

DIRECTORY = record.ROOT / ".cache" / "peers"
#: A chat that takes a minute or two: ``benchmarks.multi_turn`` measures a longer one.
CHAT = ("--conversations", "4", "--turns", "4", "--document-tokens", "400", "--answer-tokens", "8", "--also", "plain")
PARTS = ("rounds", "misfits", "killed", "chat")


def parse(words: list[str] | None) -> argparse.Namespace:
    """Return the arguments."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.peers", description=__doc__)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--lengths", type=int, nargs="+", default=Plan.lengths, help="tokens of a prompt")
    parser.add_argument("--repeats", type=int, default=Plan.repeats, help="prompts of each length, at most")
    parser.add_argument("--round-s", type=float, default=Plan.round_s, help="in which a round's lengths should be done")
    parser.add_argument("--bursts", type=int, default=Plan.bursts, help="of eight requests at once")
    parser.add_argument("--tp", nargs="+", default=["2-1", "1-1", "1-2"], help="P's and D's tensor parallel sizes")
    parser.add_argument("--layouts", nargs="+", choices=LAYOUTS, default=LAYOUTS)
    parser.add_argument("--connectors", nargs="+", choices=[each.key for each in connectors.ALL],
                        default=[each.key for each in connectors.ALL])  # fmt: skip
    parser.add_argument("--threads", type=int, default=1, help="of each worker's kernels")
    parser.add_argument("--seed", type=int, default=1, help="of the prompts")
    parser.add_argument("--name", default="peers", help="of the files in benchmarks/results")
    return parser.parse_args(words)


def main(words: list[str] | None = None) -> None:
    """Measure, and write the results."""
    arguments = parse(words)
    start = time.monotonic()

    def say(what: str) -> None:
        print(f"{time.monotonic() - start:5.0f} s  {what}", file=sys.stderr, flush=True)

    sizes = tuple((int(size.split("-")[0]), int(size.split("-")[1])) for size in arguments.tp)
    compared = tuple(each for each in connectors.ALL if each.key in arguments.connectors)
    plan = Plan(
        lengths=tuple(arguments.lengths), repeats=arguments.repeats, round_s=arguments.round_s, bursts=arguments.bursts,
        sizes=sizes, layouts=tuple(arguments.layouts), connectors=compared,
    )  # fmt: skip
    DIRECTORY.mkdir(parents=True, exist_ok=True)
    for old in (*DIRECTORY.glob("*.log"), *DIRECTORY.glob("*.jsonl")):
        old.unlink()
    command = ["benchmarks.peers", *(sys.argv[1:] if words is None else words)]
    figures = measure(plan, arguments, model.make(DIRECTORY / "model"), say)
    path = record.write(arguments.name, command, figures, seconds=time.monotonic() - start)
    if "chat" in arguments.parts:
        say("a chat of several turns, with host memory and without")
        figures["chat"] = multi_turn.main([*CHAT])
        record.write(arguments.name, command, figures, seconds=time.monotonic() - start)
    result = record.read(arguments.name)
    path.with_suffix(".md").write_text(table.markdown(result))
    for plot in plots.draw(result, path.parent):
        say(f"wrote {plot.relative_to(record.ROOT)}")
    print(table.markdown(result))
    say(f"wrote {path.relative_to(record.ROOT)}; servers' logs are in {DIRECTORY.relative_to(record.ROOT)}")


def measure(plan: Plan, arguments: argparse.Namespace, directory: Path, say: Any) -> dict[str, Any]:
    """Return the figures of all parts that need pairs of servers."""
    chance = random.Random(arguments.seed)
    figures: dict[str, Any] = {"labels": {each.key: each.label for each in connectors.ALL}}
    router = Router()
    with Fleet(directory, DIRECTORY, arguments.threads) as fleet:
        rounds = Rounds(fleet, router, plan, chance)
        trouble = Trouble(fleet, router, rounds, chance, plan.connectors)
        if "rounds" in arguments.parts:
            samples = list(rounds.run(say))
            figures |= {"cases": summary.rows(samples), "not_started": rounds.failures}
            with (DIRECTORY / "samples.jsonl").open("w") as file:
                file.writelines(json.dumps(summary.plain(sample)) + "\n" for sample in samples)
        figures["trouble"] = []
        if "misfits" in arguments.parts:
            figures["trouble"] += trouble.misfit(BLOCK_SIZES, say)
        if "killed" in arguments.parts:
            figures["trouble"] += trouble.killed(say)
        if "misfits" in arguments.parts:
            figures["trouble"] += trouble.misfit(TYPES, say)
    router.close()
    return figures


if __name__ == "__main__":
    main()
