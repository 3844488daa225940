"""What is asked of the simulator beyond this machine, and its answers as figures.

``ASSUMED`` is an engine that is not here: a model of 70 billion parameters on eight accelerators. **Its numbers are
inputs, not measurements**: they say how the answers depend on each other, not what any machine does. The shape of the
cache is arithmetic; put in your own engine's times to get your own answers.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np

from benchmarks.fleet import control
from benchmarks.fleet.constants import (
    Cache,
    Constants,
    EngineCosts,
    PullCosts,
    apart,
    linked,
    measured,
    with_blocks,
)
from benchmarks.fleet.node import Legs, Settings
from benchmarks.fleet.simulation import Ran, simulate, summary
from benchmarks.fleet.traces import Arrival, Mix, synthetic

ASSUMED = Constants(
    Cache(layers=80, kv_heads=8, head_size=128, item_bytes=2, block_tokens=16, blocks=75_000),
    EngineCosts(
        prefill_step_s=0.01, prefill_token_s=5e-5, prefill_pair_s=1e-9, decode_step_s=0.02, decode_request_s=1e-4,
        decode_context_s=2e-8, request_s=0.005,
    ),
    PullCosts(fixed_s=0.002, message_s=0.0005, descriptor_s=2e-6, byte_s=0.08e-9),
    chunk_tokens=4096, protocol="rdma",
)  # fmt: skip
LINKS = (25, 100, 400)  # gigabits a second, of each engine, all its ranks together
ENGINES = 8  # that are divided into P and D
SEED = 11
_MANY_BLOCKS = 8192  # of an engine with the measured costs: leases fit whatever the split
_LEGS: tuple[Legs, ...] = ("in turn", "together")


def answers(messages: Mapping[str, Any]) -> dict[str, Any]:
    """Return the figures of all plots. ``messages``: what ``control.measure`` has measured."""
    return {
        "assumed": msgspec.to_builtins(ASSUMED),
        "split": split(),
        "chunks": chunks(),
        "host_memory": host_memory(),
        "control": saturation(messages),
    }


def split() -> dict[str, Any]:
    """How many D a P feeds: requests a second of eight engines, by how many of them prefill and how long answers are.

    More requests are waiting than are served. At most 64 decode at a time on a D, so that tokens keep coming.
    """
    kinds = {
        "measured": (with_blocks(apart(measured()), _MANY_BLOCKS), 1000, (16, 64, 256)),
        "assumed": (linked(ASSUMED, 400), 6000, (100, 400, 1600)),
    }
    figures: dict[str, Any] = {}
    for kind, (constants, input_tokens, outputs) in kinds.items():
        figures[kind] = {"input_tokens": input_tokens, "outputs": {}}
        for output in outputs:
            arrivals = synthetic(_mix(400, 1e4, input_tokens, output, constants), SEED)
            rates = {str(prefills): _rate(arrivals, constants, prefills) for prefills in range(1, ENGINES)}
            best = max(rates, key=lambda each: rates[each])
            figures[kind]["outputs"][str(output)] = {
                "requests_per_s": rates, "best_prefills": int(best), "decodes_per_prefill": ENGINES / int(best) - 1,
            }  # fmt: skip
            print(f"{kind} engines, answers of {output}: best with {best} P of {ENGINES}, {rates[best]:.2f} requests/s")
    return figures


def _rate(arrivals: Sequence[Arrival], constants: Constants, prefills: int) -> float:
    ran = simulate(arrivals, constants, Settings(max_requests=64, queue_timeout_s=1e5, max_lease_age_s=1e5),
                   prefills, ENGINES - prefills)  # fmt: skip
    return _middle_rate(ran)


def _middle_rate(ran: Ran) -> float:
    """Return requests a second between the first and the last quarter of those that end: all engines are busy then."""
    ends = sorted(each.at_s + each.total_s for each in ran.outcomes if not each.failed)
    first, last = len(ends) // 4, 3 * len(ends) // 4
    return (last - first) / (ends[last] - ends[first])


def chunks() -> dict[str, Any]:
    """What pulls chunk by chunk bring: the handover of one request at a time, and first tokens under load."""
    figures: dict[str, Any] = {"alone": {}, "loaded": {}}
    for link in LINKS:
        constants = linked(ASSUMED, link)
        alone: dict[str, dict[str, float]] = {}
        figures["alone"][str(link)] = alone
        for legs in _LEGS:
            settings = Settings(legs=legs)
            alone[legs] = {
                str(tokens): 1e3 * _handover_s(tokens, constants, settings) for tokens in (1000, 4000, 16_000, 64_000)
            }
        loaded: dict[str, Any] = {}
        arrivals = synthetic(_mix(400, 1.2, 6000, 200, constants), SEED)
        for legs in _LEGS:
            found = summary(simulate(arrivals, constants, Settings(legs=legs), 2, 2).outcomes)
            loaded[legs] = {
                "first_token_ms": {rank: 1e3 * value for rank, value in found.first_token_s.items()},
                "handover_ms": {rank: 1e3 * value for rank, value in found.handover_s.items()}, "failed": found.failed,
            }  # fmt: skip
        shorter = 1 - loaded["together"]["first_token_ms"]["p50"] / loaded["in turn"]["first_token_ms"]["p50"]
        figures["loaded"][str(link)] = loaded | {"shorter": shorter}
        print(
            f"{link} Gb/s: 16,000 tokens are handed over in {alone['in turn']['16000']:.0f} ms in turn, "
            f"{alone['together']['16000']:.0f} together; under load, first tokens come {shorter:.0%} sooner"
        )
    return figures


def _handover_s(tokens: int, constants: Constants, settings: Settings) -> float:
    ids = tuple(range(-(-tokens // 512)))
    (outcome,) = simulate([Arrival(0.0, tokens, 4, ids)], constants, settings).outcomes
    return outcome.first_token_s - outcome.prefilled_s


def host_memory() -> dict[str, Any]:
    """What host memory at both ends brings, as modelled: requests that come at once, where the devices have few blocks.

    Engines have an eighth of the blocks, and host memory for eight times as many; copies go at 50 GB/s, assumed.
    """
    few = ASSUMED.cache.blocks // 8
    figures: dict[str, Any] = {"blocks": few, "links": {}}
    ways = {"device only": Settings(), "host memory": Settings(host_blocks=8 * few, host_byte_s=1 / 50e9)}
    for link in LINKS:
        constants = with_blocks(linked(ASSUMED, link), few)
        rows: dict[str, dict[str, dict[str, float]]] = {}
        figures["links"][str(link)] = rows
        for way, settings in ways.items():
            rows[way] = {}
            for number in (16, 32, 64, 96):
                arrivals = synthetic(_mix(number, 1e4, 6000, 400, constants), SEED)
                rows[way][str(number)] = _burst(simulate(arrivals, constants, settings, 1, 1))
        last = {way: of_way["64"] for way, of_way in rows.items()}
        print(
            f"{link} Gb/s, 64 requests at once: "
            + "; ".join(
                f"{way}: computed in {row['prefilled_s']:.0f} s, answered in {row['seconds']:.0f} s, first token "
                f"{row['first_token_s']:.1f} s (median), {row['failed']} failed"
                for way, row in last.items()
            )
        )
    return figures


def _burst(ran: Ran) -> dict[str, float]:
    right = [each for each in ran.outcomes if not each.failed]
    return {
        "prefilled_s": max(each.prefilled_s for each in right), "seconds": max(each.total_s for each in right),
        "first_token_s": summary(ran.outcomes).first_token_s["p50"], "failed": len(ran.outcomes) - len(right),
    }  # fmt: skip


#: What engines ask of one P's control server: its own requests, divided among them, and as many from each.
_P_REQUESTS_PER_S = 2.5  # what an assumed P computes of prompts of 6,000 tokens, about
_EACH_PER_S = 0.5
_WORKERS, _CHUNKS = 8, 2


def saturation(messages: Mapping[str, Any]) -> dict[str, Any]:
    """When one P's control server has no more time, by how many D engines of eight workers ask it."""
    cost_us = messages["cost_us"]
    each = control.Load(_EACH_PER_S, _WORKERS, _CHUNKS)
    counts = (1, 10, 30, 100, 300, 1000)
    figures: dict[str, Any] = {
        "cost_us": dict(cost_us), "round_trip_ms": messages["round_trip_ms"], "workers": _WORKERS, "chunks": _CHUNKS,
        "each": {"requests_per_s": _EACH_PER_S, "saturated_at": control.saturation(each, cost_us), "busy": {},
                 "p99_ms": {}},
        "shared": {"requests_per_s": _P_REQUESTS_PER_S, "busy": {}, "p99_ms": {}},
        "hello_of_1000_s": 1000 * _WORKERS * cost_us["hello"] * 1e-6,
    }  # fmt: skip
    for engines in counts:
        shared = control.Load(_P_REQUESTS_PER_S / engines, _WORKERS, _CHUNKS)
        for name, load in (("each", each), ("shared", shared)):
            busy = engines * load.busy(cost_us)
            figures[name]["busy"][str(engines)] = busy
            if busy < 1:
                delays = control.delays_s(load, engines, cost_us, 20.0, SEED)
                figures[name]["p99_ms"][str(engines)] = 1e3 * float(np.percentile(delays, 99)) if delays else 0.0
    print(f"a P's control server is busy for {figures['shared']['busy']['1000']:.1%} of its time with 1,000 engines "
          f"that share its requests; with {_EACH_PER_S} requests/s from each, it is saturated by "
          f"{figures['each']['saturated_at']:.0f}")  # fmt: skip
    return figures


def _mix(requests: int, per_s: float, input_tokens: int, output_tokens: int, constants: Constants) -> Mix:
    mix = Mix(requests, per_s, input_tokens, output_tokens)
    longest = constants.cache.blocks * constants.cache.block_tokens // 2
    return replace(mix, longest=min(longest, 16 * input_tokens))
