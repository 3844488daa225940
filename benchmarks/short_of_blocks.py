"""What host memory at both ends of a transfer brings when blocks are short: ``python -m benchmarks.short_of_blocks``.

Prefill: nobody comes for what a prefill server has leased. Its device holds 16 prompts. How much of it is leased 2 s
after they are computed; and, with ``host_transfers``, how long three times as many take, beside the same number without
a lease.

Decode: 16 requests at once at a decode server whose device holds two of them, whose prompts are computed: with
``host_transfers`` auto and off, in turns, and all answers must be equal. The same with answers that outgrow the device,
so that vLLM preempts requests; also without host memory, out of which they come back. Then one request at a time where
there is room, also at a second server with off: what differs between those two is what one server differs from
another.
``--mbit-per-s`` has each server on a host of its own (network namespaces: as root) at the end of such a network, for
which requests wait; on loopback hardly any does. ``--parts`` chooses.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

from benchmarks.pair import BLOCK_TOKENS, DIRECTORY, HEAD_SIZE, KV_HEADS, LAYERS, Pair, Side, a_prompt, counted, running
from examples.quickstart.servers import ServerFailed

BLOCK_BYTES = BLOCK_TOKENS * LAYERS * KV_HEADS * HEAD_SIZE * 2 * 4
HOST_BYTES = 1 << 30
AT_ONCE = 16

LEASED_TOKENS = 500
PREFILL_BLOCKS = AT_ONCE * -(-(LEASED_TOKENS + 1) // BLOCK_TOKENS) + 8
FREE_WITHIN_S = 2.0

DECODE_TOKENS = 900
SPARE_BLOCKS = 4
PLACES = ("off", "auto")
WITHOUT = "without"  # host memory
AGAIN = "off again"
PARTS = ("prefill", "bursts", "growth", "room")


@dataclass(frozen=True)
class Load:
    """Requests that a decode server gets at once, and how much of two of them its device has room for."""

    answer_tokens: int
    room_tokens: int
    servers: tuple[str, ...] = PLACES  # by ``host_transfers``, or ``WITHOUT``

    @property
    def blocks(self) -> int:
        """The device's blocks."""
        return 2 * -(-(DECODE_TOKENS + self.room_tokens) // BLOCK_TOKENS) + SPARE_BLOCKS


FITTING = Load(answer_tokens=48, room_tokens=48)
GROWING = Load(answer_tokens=128, room_tokens=1, servers=(WITHOUT, *PLACES))


def lease(pair: Pair, prompts: int, params: dict[str, Any] | None) -> float:
    """Return the seconds in which a prefill server computes so many prompts, four at a time."""
    start = time.perf_counter()
    with ThreadPoolExecutor(4) as threads:
        each = [a_prompt(LEASED_TOKENS) for _ in range(prompts)]
        list(threads.map(lambda prompt: pair.complete(pair.prefill, prompt, 1, params), each))
    return time.perf_counter() - start


def leased_share(pair: Pair) -> float:
    """Return the share of a prefill server's blocks that are leased. A step brings its books up to date."""
    pair.complete(pair.prefill, a_prompt(2), 1, None)
    return counted(pair.prefill, "vllm:pd_leased_blocks") / PREFILL_BLOCKS


def prefills(moves: bool) -> dict[str, float]:
    """Measure a prefill server whose leases nobody reads."""
    options = {"cpu_bytes_to_use": HOST_BYTES, "host_transfers": "auto" if moves else "off"}
    side = Side(cache_bytes=PREFILL_BLOCKS * BLOCK_BYTES, longest=2048, options=options)
    wanted = {"do_remote_decode": True}
    with running(side, Side()) as (pair,):
        lease(pair, 8, None)  # warm
        plain_s = lease(pair, 3 * AT_ONCE, None)
        lease(pair, AT_ONCE, wanted)
        time.sleep(FREE_WITHIN_S)
        share = leased_share(pair)
        if not moves:  # more would wait for the leases to expire
            return {"leased_share": share}
        leased_s = lease(pair, 3 * AT_ONCE, wanted)
    return {"leased_share": share, "plain_s": plain_s, "leased_s": leased_s, "rate": plain_s / leased_s}


def burst(pair: Pair, prompts: Sequence[list[int]], answer_tokens: int) -> tuple[float, list[Any]]:
    """Return the seconds in which a decode server answers requests that come at once, and the answers."""
    wanted = {"do_remote_decode": True}
    params = [pair.complete(pair.prefill, prompt, 1, wanted)["kv_transfer_params"] for prompt in prompts]
    start = time.perf_counter()
    with ThreadPoolExecutor(AT_ONCE) as threads:
        sent = [
            threads.submit(pair.complete, pair.decode, prompt, answer_tokens, held)
            for prompt, held in zip(prompts, params, strict=True)
        ]
        answers = [each.result()["choices"][0] for each in sent]
    return time.perf_counter() - start, [answer["token_ids"] for answer in answers]


def bursts(load: Load, rounds: int, mbit_per_s: int) -> dict[str, dict[str, float]]:
    """Measure decode servers whose device has room for two of the load, and whose host memory, if any, for all."""
    decodes = [
        Side(cache_bytes=load.blocks * BLOCK_BYTES, longest=1088,
             options={} if name == WITHOUT else {"cpu_bytes_to_use": HOST_BYTES, "host_transfers": name})
        for name in load.servers
    ]  # fmt: skip
    taken: dict[str, list[float]] = {name: [] for name in load.servers}
    with running(Side(), *decodes, mbit_per_s=mbit_per_s) as pairs:
        before = [counted(pair.decode, "vllm:num_preemptions_total") for pair in pairs]
        for number in range(rounds + 1):
            prompts = [a_prompt(DECODE_TOKENS) for _ in range(AT_ONCE)]
            seconds, answers = zip(*(burst(pair, prompts, load.answer_tokens) for pair in pairs), strict=True)
            assert all(each == answers[0] for each in answers), "the answers differ"
            for name, took in zip(load.servers, seconds, strict=True):
                taken[name] += [took] if number else []
        preempted = [counted(pair.decode, "vllm:num_preemptions_total") - was
                     for pair, was in zip(pairs, before, strict=True)]  # fmt: skip
    return {
        name: {"per_minute": 60 * AT_ONCE / statistics.median(taken[name]), "preemptions": number}
        for name, number in zip(load.servers, preempted, strict=True)
    }


def with_room(repeats: int, mbit_per_s: int) -> dict[str, float]:
    """Return the median milliseconds of a decode leg of one token where the device has room, by server."""
    taken: dict[str, list[float]] = {name: [] for name in (*PLACES, AGAIN)}
    sides = [
        Side(options={"cpu_bytes_to_use": HOST_BYTES, "host_transfers": "auto" if name == "auto" else "off"})
        for name in taken
    ]
    with running(Side(), *sides, mbit_per_s=mbit_per_s) as pairs:
        servers = list(zip(taken.values(), pairs, strict=True))
        for number in range(repeats + 2):
            first = number % len(servers)  # what a server still does in the background hits another one each time
            for times, pair in (*servers[first:], *servers[:first]):
                leg = pair.in_turn(a_prompt(DECODE_TOKENS), 1)
                if number >= 2:
                    times.append(1e3 * (leg.ended - leg.prefilled))
    return {name: statistics.median(each) for name, each in taken.items()}


def measure_prefill() -> dict[str, Any]:
    """Measure and print what becomes of leases that nobody reads."""
    moving, staying = prefills(moves=True), prefills(moves=False)
    print(
        f"{AT_ONCE} prompts of {LEASED_TOKENS} tokens that nobody comes for; the prefill server's device holds as many"
    )
    for name, found in (("leases that move", moving), ("leases that stay", staying)):
        print(f"  {name}: {found['leased_share']:.0%} of its blocks are leased after {FREE_WITHIN_S:.0f} s")
    print(f"  {3 * AT_ONCE} prompts with leases that move: {moving['rate']:.0%} of the rate without leases")
    return {"moving": moving, "staying": staying}


def measure_bursts(load: Load, rounds: int, mbit_per_s: int) -> dict[str, Any]:
    """Measure and print what a full decode server answers, by ``host_transfers``."""
    by_place = bursts(load, rounds, mbit_per_s)
    auto = by_place["auto"]["per_minute"]
    ratios = {name: auto / of["per_minute"] for name, of in by_place.items() if name != "auto"}
    print(
        f"{AT_ONCE} requests of {DECODE_TOKENS} tokens at once, {load.answer_tokens} tokens each to be answered, at a "
        f"decode server whose device has room for two with {load.room_tokens}"
    )
    for name, of in by_place.items():
        server = "without host memory" if name == WITHOUT else f"host_transfers {name}"
        print(f"  {server:19} {of['per_minute']:7.1f} answers a minute, {of['preemptions']:.0f} preemptions")
    for name, ratio in ratios.items():
        print(f"  auto / {name}: {ratio:.2f} times as many")
    without = {"ratio_without": ratios[WITHOUT]} if WITHOUT in ratios else {}
    return {"by_place": by_place, "ratio": ratios["off"], **without}


def measure_room(repeats: int, mbit_per_s: int) -> dict[str, Any]:
    """Measure and print what ``host_transfers`` costs where the device has room."""
    single = with_room(repeats, mbit_per_s)
    device = (single["off"] + single[AGAIN]) / 2
    ratio, noise = single["auto"] / device, max(single["off"], single[AGAIN]) / min(single["off"], single[AGAIN])
    print(
        f"a request that finds room: {device:.1f} ms with off, {ratio:.3f} times as long with auto; "
        f"two servers with off differ by {noise - 1:.1%}"
    )
    return {"room_ms": single, "room_ratio": ratio, "room_noise": noise - 1}


def main(words: Sequence[str] | None = None) -> dict[str, Any]:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3, help="bursts at each decode server")
    parser.add_argument("--repeats", type=int, default=21, help="single requests at each")
    parser.add_argument("--mbit-per-s", type=int, default=0, help="of the network; 0: none between the servers")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    arguments = parser.parse_args(words)
    measures: dict[str, Callable[[], dict[str, Any]]] = {
        "prefill": measure_prefill,
        "bursts": lambda: {"bursts": measure_bursts(FITTING, arguments.rounds, arguments.mbit_per_s)},
        "growth": lambda: {"growth": measure_bursts(GROWING, arguments.rounds, arguments.mbit_per_s)},
        "room": partial(measure_room, arguments.repeats, arguments.mbit_per_s),
    }
    figures: dict[str, Any] = {}
    try:
        for part in arguments.parts:
            figures |= measures[part]()
    except ServerFailed as error:
        sys.exit(f"{error}. The end of its log in {DIRECTORY}:\n{error.log_tail}")
    return figures


if __name__ == "__main__":
    main()
