"""Whether the first pull of a decode server is as fast as its tenth: ``python -m benchmarks.first_pull``.

A prefill and a decode server on CPU whose caches have different layouts, so that what arrives is reshaped by compiled
kernels. Ten prompts of one length in turn, each of them new, then the same with new servers. Reported are the medians
of the pulls' times, as the decode server counts them, by their place in the row. The first one also shakes hands and
opens the links to the prefill server.
"""

import argparse
import statistics
import sys
from collections.abc import Sequence
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from benchmarks.pair import DIRECTORY, Pair, Side, a_prompt, running
from examples.quickstart.servers import ServerFailed

LAYOUTS = ("LBHNC", "BHLNC")
PULLS = 10


def pull_ms(pair: Pair) -> dict[str, float]:
    """Return the milliseconds that the decode server's pulls have taken so far, by phase, of phases that there were."""
    text = pair.http.get(f"{pair.decode}/metrics").raise_for_status().text
    return {
        sample.labels["phase"]: sample.value * 1e3
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name == "vllm:pd_pull_seconds_sum" and sample.value
    }


def row(tokens: int) -> list[dict[str, float]]:
    """Return the milliseconds of new servers' first pulls, by phase, one after the other."""
    pulls: list[dict[str, float]] = []
    with running(*map(Side, LAYOUTS)) as (pair,):
        before = pull_ms(pair)
        for _ in range(PULLS):
            pair.in_turn(a_prompt(tokens), 2)
            after = pull_ms(pair)
            pulls.append({phase: ms - before.get(phase, 0.0) for phase, ms in after.items()})
            before = after
    return pulls


def main(words: Sequence[str] | None = None) -> dict[str, Any]:
    """Print the table, and return its figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=2000)
    parser.add_argument("--starts", type=int, default=3, help="of both servers")
    arguments = parser.parse_args(words)
    try:
        rows = [row(arguments.tokens) for _ in range(arguments.starts)]
    except ServerFailed as error:
        sys.exit(f"{error}. The end of its log in {DIRECTORY}:\n{error.log_tail}")
    print(f"pulls of {arguments.tokens:,} tokens from {LAYOUTS[0]} to {LAYOUTS[1]}, median ms of {len(rows)} starts")
    phases = sorted({phase for pulls in rows for pull in pulls for phase in pull})
    print(f"{'pull':>5} " + " ".join(f"{phase:>10}" for phase in phases))
    figures: dict[str, dict[str, float]] = {}
    for number in range(PULLS):
        medians = {phase: statistics.median(pulls[number].get(phase, 0.0) for pulls in rows) for phase in phases}
        print(f"{number + 1:>5} " + " ".join(f"{medians[phase]:>10.2f}" for phase in phases))
        figures[str(number + 1)] = medians
    ratio = figures["1"]["total"] / figures[str(PULLS)]["total"]
    read_ratio = figures["1"]["read"] / figures[str(PULLS)]["read"]
    print(f"first / tenth: {ratio:.2f}; of the reads alone: {read_ratio:.2f}")
    return {"pulls_ms": figures, "ratio": ratio, "read_ratio": read_ratio}


if __name__ == "__main__":
    main()
