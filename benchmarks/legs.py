"""What sending both legs at once saves: ``python -m benchmarks.legs``.

A prefill and a decode server on CPU, a random model of 24 layers (1 KiB of cache for each layer and token), prompts in
chunks of 512 tokens. Each prompt is new. Requests in turn and requests with both legs at once take turns, so that
whatever else the machine does hits both alike.

Handover: from the prefill server's answer to the decode server's first token, less what a request of one token takes
there. Total: from the client's request to the last of its tokens; which way goes first alternates. Last: the longest
connector calls of both servers, from their start to the end of the run. ``--mbit-per-s`` has each server on a host of
its own, at the end of such a network (network namespaces: as root).

``--hybrid`` serves a model with states, which D reads when P has computed all of the prompt. A handover holds a step of
D over the prompt's tokens, which takes longer than that over one token, and is no transfer. So steps are measured
apart, as are pulls, by what D says of them (without their waits for P).
"""

import argparse
import os
import random
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from benchmarks.pair import (
    ATTENTION,
    DIRECTORY,
    HYBRID,
    Model,
    Pair,
    Side,
    Times,
    a_prompt,
    counted,
    longest_calls_ms,
    running,
)
from examples.quickstart.servers import ServerFailed

BURSTS = 8  # of each size, at least
STEPS, PULLS = 16, 8  # that a time of a step, and of a pull, is the mean of
LENGTHS, HYBRID_LENGTHS = (500, 512, 2000, 3500, 7000), (64, 500, 3500)

Send = Callable[[list[int], int], Times]


def take_turns(sends: Sequence[Send], tokens: int, answer_tokens: int, repeats: int) -> list[list[Times]]:
    """Return the times of each way to send, of ``repeats`` prompts each, after two that are not counted."""
    times: list[list[Times]] = [[] for _ in sends]
    for number in range(repeats + 2):
        for each, send in zip(times, sends, strict=True):
            taken = send(a_prompt(tokens), answer_tokens)
            if number >= 2:
                each.append(taken)
    return times


def one_token(pair: Pair) -> Send:
    """Return how to send a request of one token to the decode server alone, whatever the prompt."""

    def send(_tokens: list[int], answer_tokens: int) -> Times:
        start = time.perf_counter()
        pair.complete(pair.decode, a_prompt(1), answer_tokens, None)
        return Times(prefilled=0.0, ended=time.perf_counter() - start)

    return send


def with_steps(send: Send) -> Send:
    """Return how to send the same with ``STEPS`` more tokens answered."""
    return lambda tokens, answer_tokens: send(tokens, answer_tokens + STEPS)


def decoding_ms(taken: Sequence[Times]) -> float:
    """Return the median from the prefill leg's answer to the end."""
    return statistics.median(each.ended - each.prefilled for each in taken) * 1e3


def pull_ms(pair: Pair, tokens: int) -> float:
    """Return the mean of the pulls of some prompts, without their waits."""

    def so_far() -> list[float]:
        return [counted(pair.decode, f"vllm:pd_pull_seconds_{each}", phase="total") for each in ("sum", "count")]

    before = so_far()
    for _ in range(PULLS):
        pair.together(a_prompt(tokens), 1)
    seconds, count = (after - earlier for after, earlier in zip(so_far(), before, strict=True))
    return 1e3 * seconds / count


def handovers(
    pair: Pair, model: Model, lengths: Sequence[int], repeats: int, mbit_per_s: int
) -> dict[str, dict[str, float]]:
    """Print the handover by the length of the prompt, and return it.

    What a request of one token takes is measured in the same turns: after the same pauses and with the same caches.
    """
    figures = {}
    print("handover in ms, median and 90th percentile")
    print(
        f"{'tokens':>7} {'MB':>6} {'prefill':>9} {'1 token':>8} {'in turn':>15} {'together':>15} "
        f"{'ratio':>6} {'hidden':>7}"
    )
    for tokens in lengths:
        size = model.cache_bytes(tokens)
        times = take_turns((pair.in_turn, one_token(pair), pair.together), tokens, 1, repeats)
        least = statistics.median(each.ended for each in times.pop(1))
        turn, both = ([(each.ended - each.prefilled - least) * 1e3 for each in taken] for taken in times)
        prefill = statistics.median(each.prefilled for each in times[0]) * 1e3
        medians = statistics.median(turn), statistics.median(both)
        tails = statistics.quantiles(turn, n=10)[-1], statistics.quantiles(both, n=10)[-1]
        network_ms = size * 8 / mbit_per_s / 1e3 if mbit_per_s else medians[0]
        hidden = 1 - max(medians[1], 0.0) / network_ms
        figures[str(tokens)] = {
            "megabytes": size / 1e6, "prefill_ms": prefill, "one_token_ms": least * 1e3,
            "in_turn_ms": medians[0], "in_turn_p90_ms": tails[0],
            "together_ms": medians[1], "together_p90_ms": tails[1],
            "ratio": medians[1] / medians[0], "hidden": hidden,
        }  # fmt: skip
        print(
            f"{tokens:>7,} {size / 1e6:>6.1f} {prefill:>9.0f} {least * 1e3:>8.1f} {medians[0]:>7.1f} {tails[0]:>7.1f} "
            f"{medians[1]:>7.1f} {tails[1]:>7.1f} {medians[1] / medians[0]:>6.2f} {hidden:>7.0%}"
        )
    return figures


def beside_transfers(pair: Pair, found: Mapping[str, Mapping[str, float]], repeats: int) -> dict[str, dict[str, float]]:
    """Print what of the handovers that were ``found`` is no transfer, and return it by the length of the prompt."""
    figures: dict[str, dict[str, float]] = {}
    alone = one_token(pair)
    ways = (pair.in_turn, with_steps(pair.in_turn), alone, with_steps(alone))
    print("both legs at once in ms: pull, step of D over the prompt, by how much it exceeds one over one token")
    print(
        f"{'tokens':>7} {'pull':>7} {'step':>7} {'longer':>7} {'handover, times the first':>26} {'without longer':>15}"
    )
    for tokens in map(int, found):
        medians = [decoding_ms(taken) for taken in take_turns(ways, tokens, 1, repeats)]
        step, shortest_step = ((more - one) / STEPS for one, more in (medians[:2], medians[2:]))
        together = found[str(tokens)]["together_ms"]
        each = {"pull_ms": pull_ms(pair, tokens), "step_ms": step, "longer_step_ms": step - shortest_step}
        each |= {"together_ms": together, "without_longer_step_ms": together - each["longer_step_ms"]}
        figures[str(tokens)] = each
        first = next(iter(figures.values()))
        for name in ("together", "without_longer_step"):
            each[f"{name}_times"] = each[f"{name}_ms"] / first[f"{name}_ms"]
        print(
            f"{tokens:>7,} {each['pull_ms']:>7.1f} {step:>7.2f} {each['longer_step_ms']:>7.2f} "
            f"{each['together_times']:>26.2f} {each['without_longer_step_times']:>15.2f}"
        )
    return figures


def link_shares(pair: Pair, lengths: Sequence[int], repeats: int, mbit_per_s: int) -> dict[str, float]:
    """Print how much of the network's rate pulls of whole prompts use while they read, and return it."""
    figures = {}
    for tokens in lengths:
        before = _read(pair)
        for _ in range(repeats):
            pair.in_turn(a_prompt(tokens), 2)
        size, seconds = (now - was for now, was in zip(_read(pair), before, strict=True))
        figures[str(tokens)] = size * 8 / seconds / (mbit_per_s * 1e6)
        print(f"of the network's {mbit_per_s} Mbit/s, pulls of {tokens:,} tokens use {figures[str(tokens)]:.0%}")
    return figures


def _read(pair: Pair) -> tuple[float, float]:
    """Return the bytes that the decode server has pulled, and the seconds of it. A step brings its books up to date."""
    pair.complete(pair.decode, a_prompt(1), 1, None)
    return (
        counted(pair.decode, "vllm:pd_pull_bytes_total"),
        counted(pair.decode, "vllm:pd_pull_seconds_sum", phase="read"),
    )


def totals(pair: Pair, tokens: int, answer_tokens: int, repeats: int) -> dict[str, dict[str, float]]:
    """Print the total time of requests, alone and eight at a time, and return it."""
    figures = {}
    print(f"total in ms of {tokens:,} tokens and {answer_tokens} answered, median and 90th percentile")
    print(f"{'at once':>8} {'in turn':>15} {'together':>15} {'ratio':>6}")
    for at_once in (1, 8):

        def burst(send: Send, number: int = at_once) -> list[float]:
            with ThreadPoolExecutor(number) as clients:
                sent = [clients.submit(send, a_prompt(tokens), answer_tokens) for _ in range(number)]
                return [each.result().ended * 1e3 for each in sent]

        taken: tuple[list[float], list[float]] = ([], [])
        ways = list(zip(taken, (pair.in_turn, pair.together), strict=True))
        for number in range(max(repeats // at_once, BURSTS) + 1):
            for each, send in ways[:: 1 if number % 2 else -1]:  # what the one leaves behind hits the other as often
                times = burst(send)
                each.extend(times if number else ())
        medians = [statistics.median(each) for each in taken]
        tails = [statistics.quantiles(each, n=10)[-1] for each in taken]
        cells = [f"{median:>7.0f} {tail:>7.0f}" for median, tail in zip(medians, tails, strict=True)]
        ratio = medians[1] / medians[0]
        print(f"{at_once:>8} {cells[0]:>15} {cells[1]:>15} {ratio:>6.2f}")
        figures[str(at_once)] = {
            "in_turn_ms": medians[0], "in_turn_p90_ms": tails[0],
            "together_ms": medians[1], "together_p90_ms": tails[1],
            "ratio": ratio, "longer": ratio - 1,
        }  # fmt: skip
    return figures


def longest_calls(pair: Pair) -> dict[str, dict[str, float]]:
    """Print the longest time that each connector call took on either server's threads so far, and return it, in ms."""
    calls = {"prefill": longest_calls_ms(pair.prefill), "decode": longest_calls_ms(pair.decode)}
    for side, longest in calls.items():
        slowest = sorted(longest.items(), key=lambda call: -call[1])
        print(f"longest connector calls of the {side} server in ms: " + ", ".join(f"{c} {ms:.2f}" for c, ms in slowest))
    return calls


def main(words: Sequence[str] | None = None) -> dict[str, Any]:
    """Print the tables, and return the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=int, nargs="+", help="of the prompts, ascending")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--mbit-per-s", type=int, default=0, help="of the network; 0: none between the servers")
    parser.add_argument("--threads", type=int, default=1, help="of each server's kernels (1)")
    parser.add_argument("--hybrid", action="store_true")
    arguments = parser.parse_args(words)
    model = HYBRID if arguments.hybrid else ATTENTION
    lengths = arguments.lengths or (HYBRID_LENGTHS if arguments.hybrid else LENGTHS)
    random.seed(os.urandom(8))
    try:
        rate = arguments.mbit_per_s
        side = Side(longest=model.longest)
        with running(side, side, threads=arguments.threads, mbit_per_s=rate, model=model) as (pair,):
            by_length = handovers(pair, model, lengths, arguments.repeats, rate)
            figures: dict[str, Any] = {"handover": by_length}
            if arguments.hybrid:
                figures["beside_transfers"] = beside_transfers(pair, by_length, arguments.repeats)
            figures["total_2000_tokens"] = totals(pair, 2000, 16, arguments.repeats)
            if rate:
                figures["link_share"] = link_shares(pair, lengths, arguments.repeats, rate)
            return figures | {"longest_call_ms": longest_calls(pair)}
    except ServerFailed as error:
        sys.exit(f"{error}. The end of its log in {DIRECTORY}:\n{error.log_tail}")


if __name__ == "__main__":
    main()
