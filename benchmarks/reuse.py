"""Conversations over a prefill and a decode server, with what D has decoded found by P and without: ``python -m
benchmarks.reuse``.

The servers of ``pair``. Each conversation begins with a system prompt; every turn adds a question, and the answer that
D has decoded. Three conversations take turns, so that whatever else the machine does hits all alike: one whose prefill
legs say where D is (``prefixes_at``), one whose do not, and one that D serves alone. First token: the time of the
prefill leg, or of one token of D alone. Computed: prompt tokens that P computes.
"""

import argparse
import os
import random
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from benchmarks.pair import DIRECTORY, HOST, Pair, Side, a_prompt, counted, prove, running
from examples.quickstart.servers import ServerFailed, free_ports

FOUND, WITHOUT, ALONE = "found at D", "not looked for", "D alone"
SYSTEM, QUESTION, ANSWER = 500, 60, 120  # tokens


@dataclass
class Conversation:
    """One conversation, and what its turns took."""

    way: str
    history: list[int] = field(default_factory=lambda: a_prompt(SYSTEM))
    first_token_ms: list[float] = field(default_factory=list)
    computed: list[int] = field(default_factory=list)  # of P

    def take_turn(self, pair: Pair, hint: dict[str, Any]) -> None:
        """Ask, and remember the answer."""
        self.history += a_prompt(QUESTION)
        before = computed_by(pair.prefill)
        start = time.perf_counter()
        params = None
        if self.way == ALONE:
            pair.complete(pair.decode, self.history, 1, None)
        else:
            wish = {"do_remote_decode": True, **(hint if self.way == FOUND else {})}
            params = pair.complete(pair.prefill, self.history, 1, wish)["kv_transfer_params"]
        self.first_token_ms.append((time.perf_counter() - start) * 1e3)
        self.computed.append(computed_by(pair.prefill) - before)
        answer = pair.complete(pair.decode, self.history, ANSWER, params)
        self.history += answer["choices"][0]["token_ids"]


def computed_by(url: str) -> int:
    """Return how many prompt tokens a server has computed."""
    return int(counted(url, "vllm:prompt_tokens_by_source_total", source="local_compute"))


def measure(pair: Pair, hint: dict[str, Any], turns: int, conversations: int) -> dict[str, dict[str, list[float]]]:
    """Print what each turn took, medians over the conversations, and return it."""
    ways = (FOUND, WITHOUT, ALONE)
    all_of: dict[str, list[Conversation]] = {way: [] for way in ways}
    for number in range(conversations + 1):
        three = [Conversation(way) for way in ways]
        for turn in range(turns):
            for each in three[turn % len(three) :] + three[: turn % len(three)]:
                each.take_turn(pair, hint)
        for each in three if number else ():  # the first of each is not counted
            all_of[each.way].append(each)
    figures = {}
    for way, taken in all_of.items():
        by_turn = zip(*(zip(each.first_token_ms, each.computed, strict=True) for each in taken), strict=True)
        medians = [tuple(statistics.median(column) for column in zip(*turn, strict=True)) for turn in by_turn]
        figures[way] = {
            "first_token_ms": [ms for ms, _ in medians],
            "computed_tokens": [tokens for _, tokens in medians],
        }
    print("median first token in ms, and prompt tokens that P computed, by turn")
    for way in ways:
        cells = (
            f"{ms:>7.0f} {tokens:>5.0f}"
            for ms, tokens in zip(figures[way]["first_token_ms"], figures[way]["computed_tokens"], strict=True)
        )
        print(f"{way:>16}", *cells)
    return figures


def main(words: Sequence[str] | None = None) -> dict[str, Any]:
    """Print the table, and return the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=8)
    parser.add_argument("--conversations", type=int, default=7)
    parser.add_argument("--threads", type=int, default=1, help="of each server's kernels (1)")
    arguments = parser.parse_args(words)
    random.seed(os.urandom(8))
    (port,) = free_ports(1, HOST)
    asks, serves = Side(options={"peers": []}), Side(options={"serve_prefixes": True, "port": port})
    hint = {"prefixes_at": f"{HOST}:{port}"}
    try:
        with running(asks, serves, threads=arguments.threads) as (pair,):
            prompt = a_prompt(4 * SYSTEM)
            pair.complete(pair.decode, prompt, 1, None)
            pair.complete(pair.prefill, prompt, 1, hint)
            prove(pair.prefill, pair.decode)
            figures = measure(pair, hint, arguments.turns, arguments.conversations)
    except ServerFailed as error:
        sys.exit(f"{error}. The end of its log in {DIRECTORY}:\n{error.log_tail}")
    later = {way: statistics.median(each["first_token_ms"][1:]) for way, each in figures.items()}
    ratios = {way: later[FOUND] / later[way] for way in (WITHOUT, ALONE)}
    told = ", ".join(f"{ratio:.2f} of {way}" for way, ratio in ratios.items())
    print(f"first token from turn 2 on, {FOUND}: {told}")
    return {"by_turn": figures, "first_token_ratio": ratios, "sizes": {"question": QUESTION, "answer": ANSWER}}


if __name__ == "__main__":
    main()
