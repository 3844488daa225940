"""Conversations over prefill and decode servers, with what D has decoded found by P and without: ``python -m
benchmarks.reuse``.

The servers of ``pair``. Each conversation begins with a system prompt; every turn adds a question, and the answer that
D has decoded. Conversations take turns, so that whatever else the machine does hits all alike: one whose prefill legs
say where D is (``prefixes_at``), one whose do not, and one that D serves alone. First token: the time of the prefill
leg, or of one token of the server alone. Computed: prompt tokens that P computes.

``--prefills 2``: the turns of a conversation go to so many prefill servers in turn, which have D in their ``peers`` and
are told nothing; beside it, a server with host memory that serves conversations alone.

``--no-hit``: prompts that nobody has, sent to prefill servers that look for prefixes, in D and in a pool, and to two
that look nowhere, in another order each time. First token: of a prompt alone. Rate: of all tokens, prompts at once.
"""

import argparse
import os
import random
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

from benchmarks.pair import (
    ATTENTION,
    BLOCK_TOKENS,
    CACHE_BYTES,
    DIRECTORY,
    HOST,
    Model,
    Pair,
    Side,
    a_prompt,
    counted,
    prove,
    running,
)
from benchmarks.peers.model import LONGEST, make
from benchmarks.pool import store
from examples.quickstart.servers import ServerFailed, free_ports

FOUND, WITHOUT, ALONE, ONE = "found at D", "not looked for", "D alone", "one server"
SYSTEM, QUESTION, ANSWER = 500, 60, 120  # tokens
OFF, EQUAL, PEERS, POOL = "off", "off, too", "peers", "peers and pool"
PROMPT, SINGLES, AT_ONCE, DECODED = 500, 3, 8, 16
NO_HIT_BYTES = 256 << 20  # of a cache; there are five
#: Its weights lie in files: without, nothing is shared by a pool.
WITH_WEIGHTS = Model(
    lambda: make(DIRECTORY / "attention", "attention"), ATTENTION.token_bytes, 0, BLOCK_TOKENS, LONGEST, ()
)
Figures = dict[str, Any]


@dataclass
class Conversation:
    """One conversation, and what its turns took."""

    way: str
    history: list[int] = field(default_factory=lambda: a_prompt(SYSTEM))
    first_token_ms: list[float] = field(default_factory=list)
    computed: list[int] = field(default_factory=list)  # of P

    def take_turn(self, pair: Pair, hint: Mapping[str, Any]) -> None:
        """Ask, and remember the answer."""
        self.history += a_prompt(QUESTION)
        before = computed_by(pair.prefill)
        start = time.perf_counter()
        params = None
        if self.way in {ALONE, ONE}:
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


def measure(
    ways: Mapping[str, Sequence[Pair]], hint: Mapping[str, Any], turns: int, conversations: int
) -> dict[str, dict[str, list[float]]]:
    """Print what each turn took, medians over the conversations, and return it.

    Args:
        ways: the pairs that the turns of a conversation go to in turn.
        hint: where D is.
        turns: of each conversation.
        conversations: of each way.
    """
    all_of: dict[str, list[Conversation]] = {way: [] for way in ways}
    for number in range(conversations + 1):
        together = [Conversation(way) for way in ways]
        for turn in range(turns):
            first = turn % len(together)
            for each in together[first:] + together[:first]:
                pairs = ways[each.way]
                each.take_turn(pairs[turn % len(pairs)], hint)
        for each in together if number else ():  # the first of each is not counted
            all_of[each.way].append(each)
    figures = {}
    for way, taken in all_of.items():
        by_turn = zip(*(zip(each.first_token_ms, each.computed, strict=True) for each in taken), strict=True)
        medians = [tuple(statistics.median(column) for column in zip(*turn, strict=True)) for turn in by_turn]
        figures[way] = {
            "first_token_ms": [ms for ms, _ in medians],
            "computed_tokens": [tokens for _, tokens in medians],
            "most_computed_tokens": [max(turn) for turn in zip(*(each.computed for each in taken), strict=True)],
        }
    print("median first token in ms, and prompt tokens that P computed, by turn")
    for way in ways:
        cells = (
            f"{ms:>7.0f} {tokens:>5.0f}"
            for ms, tokens in zip(figures[way]["first_token_ms"], figures[way]["computed_tokens"], strict=True)
        )
        print(f"{way:>16}", *cells)
    return figures


def conversations(arguments: argparse.Namespace) -> Figures:
    """Print the table of conversations, and return the figures."""
    (port,) = free_ports(1, HOST)
    several = arguments.prefills > 1
    asks = Side(options={"peers": ["readers", f"{HOST}:{port}"] if several else []})
    one = Side(options={"cpu_bytes_to_use": 2 * CACHE_BYTES})
    decodes = [Side(options={"serve_prefixes": True, "port": port}), *([one] if several else [])]
    hint = {} if several else {"prefixes_at": f"{HOST}:{port}"}
    others = [asks] * (arguments.prefills - 1)
    with running(asks, *decodes, others=others, threads=arguments.threads) as pairs:
        with_d = pairs[:: len(decodes)]
        for pair in with_d:
            prompt = a_prompt(4 * SYSTEM)
            pair.complete(pair.decode, prompt, 1, None)
            pair.complete(pair.prefill, prompt, 1, hint)
            prove(pair.prefill, pair.decode)
        ways = {FOUND: with_d, **({ONE: pairs[1:2]} if several else {WITHOUT: with_d, ALONE: with_d})}
        figures = measure(ways, hint, arguments.turns, arguments.conversations)
    later = {way: statistics.median(each["first_token_ms"][1:]) for way, each in figures.items()}
    ratios = {way: later[FOUND] / later[way] for way in ways if way != FOUND}
    told = ", ".join(f"{ratio:.2f} of {way}" for way, ratio in ratios.items())
    median, most = (max(figures[FOUND][of][1:]) for of in ("computed_tokens", "most_computed_tokens"))
    print(f"from turn 2 on, {FOUND}: first token {told}; P computes at most {most:.0f}, {median:.0f} as medians of "
          f"conversations; a question and a block are {QUESTION + BLOCK_TOKENS}")  # fmt: skip
    return {"by_turn": figures, "first_token_ratio": ratios, "sizes": {"question": QUESTION, "answer": ANSWER}}


def send(pair: Pair) -> dict[str, float]:
    """Return what a server takes for prompts that nobody has."""

    def one(answer_tokens: int) -> float:
        start = time.perf_counter()
        pair.complete(pair.prefill, a_prompt(PROMPT), answer_tokens, None)
        return (time.perf_counter() - start) * 1e3

    first = statistics.median(one(1) for _ in range(SINGLES))
    start = time.perf_counter()
    with ThreadPoolExecutor(AT_ONCE) as clients:
        list(clients.map(one, [DECODED] * AT_ONCE))
    return {"first_token_ms": first, "tokens_per_s": AT_ONCE * (PROMPT + DECODED) / (time.perf_counter() - start)}


def no_hit(arguments: argparse.Namespace) -> Figures:
    """Print what looking for prefixes costs that nobody has, and return it."""
    (port,) = free_ports(1, HOST)
    with ExitStack() as stack:
        looks = {"peers": ["readers", f"{HOST}:{port}"], "serve_prefixes": True}
        pool = {"pool": str(stack.enter_context(store()))}
        options: dict[str, dict[str, object]] = {OFF: {}, EQUAL: {}, PEERS: looks, POOL: looks | pool}
        shared = {"cpu_bytes_to_use": 2 * NO_HIT_BYTES}
        sides = [Side("", NO_HIT_BYTES, LONGEST, shared | each) for each in options.values()]
        serves = Side("", NO_HIT_BYTES, LONGEST, {"serve_prefixes": True, "port": port})
        servers = running(sides[0], serves, others=sides[1:], threads=arguments.threads, model=WITH_WEIGHTS)
        pairs = dict(zip(options, stack.enter_context(servers), strict=True))
        taken: dict[str, list[dict[str, float]]] = {name: [] for name in pairs}
        for number in range(arguments.alternations + 1):
            for name in random.sample(list(pairs), len(pairs)):
                time.sleep(1)  # what the last one stores and puts behind its answers is no matter of this one
                found = send(pairs[name])
                taken[name].extend([found] if number else ())  # the first of each is not counted
        asked = {name: counted(pairs[name].prefill, "vllm:pd_prefixes_total", event="asked") for name in (PEERS, POOL)}
        of_pool = counted(pairs[POOL].prefill, "vllm:pd_pool_prompts_total", event="asked")
    figures: Figures = {"asked": asked, "pool_asked": of_pool}
    told = ", ".join(f"{number:.0f} by {name}" for name, number in asked.items())
    print(f"beside {OFF}: median, and least and most of {arguments.alternations}; D was asked for {told}, "
          f"the pool for {of_pool:.0f}")  # fmt: skip
    for figure in ("first_token_ms", "tokens_per_s"):
        values = {name: [each[figure] for each in found] for name, found in taken.items()}
        figures[figure] = {"median": {name: statistics.median(each) for name, each in values.items()}}
        for name in (EQUAL, PEERS, POOL):
            ratios = [ours / off for ours, off in zip(values[name], values[OFF], strict=True)]
            figures[figure][name] = found = {
                "ratio": statistics.median(ratios), "least": min(ratios), "most": max(ratios)
            }  # fmt: skip
            print(f"{figure:>15} {name:>15} {found['ratio']:6.3f} {found['least']:6.3f} {found['most']:6.3f}")
    return figures


def main(words: Sequence[str] | None = None) -> Figures:
    """Print the table, and return the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=8)
    parser.add_argument("--conversations", type=int, default=7)
    parser.add_argument("--prefills", type=int, default=1, help="servers (1)")
    parser.add_argument("--no-hit", action="store_true")
    parser.add_argument("--alternations", type=int, default=10, help="with --no-hit (10)")
    parser.add_argument("--threads", type=int, default=1, help="of each server's kernels (1)")
    arguments = parser.parse_args(words)
    random.seed(os.urandom(8))
    try:
        return no_hit(arguments) if arguments.no_hit else conversations(arguments)
    except ServerFailed as error:
        sys.exit(f"{error}. The end of its log in {DIRECTORY}:\n{error.log_tail}")


if __name__ == "__main__":
    main()
