"""What is asked of the simulator beyond this machine, and its answers as figures, the same for equal constants.

``ASSUMED`` is an engine that is not here: a model of 70 billion parameters on eight accelerators. **Its numbers are
inputs, not measurements**: they say how the answers depend on each other, not what any machine does. The shape of the
cache is arithmetic; put in your own engine's times to get your own answers.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import msgspec

from benchmarks.fleet import control
from benchmarks.fleet.constants import Cache, Constants, EngineCosts, PullCosts, linked, measured, with_blocks
from benchmarks.fleet.node import Legs, Settings
from benchmarks.fleet.simulation import Ran, simulate, summary
from benchmarks.fleet.traces import Arrival, Mix, synthetic

ASSUMED = Constants(
    Cache(layers=80, kv_heads=8, head_size=128, item_bytes=2, block_tokens=16, blocks=75_000),
    EngineCosts(
        prefill_step_s=0.01, prefill_token_s=5e-5, prefill_pair_s=1e-9, decode_step_s=0.02, decode_request_s=1e-4,
        decode_context_s=2e-8, request_s=0.005,
    ),
    PullCosts(fixed_s=0.002, message_s=0.0005, byte_s=0.08e-9),
    chunk_tokens=4096, protocol="rdma",
)  # fmt: skip
LINKS = (25, 100, 400)  # gigabits a second, of each engine, all its ranks together
ENGINES = 8  # that are divided into P and D
BURST = 96  # requests at once
SEED = 11
_MANY_BLOCKS = 8192  # of an engine with the measured costs: leases fit whatever the split
_P_REQUESTS_PER_S, _EACH_PER_S, _CHUNKS = 2.5, 0.5, 2
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
        "measured": (with_blocks(measured(), _MANY_BLOCKS), 1000, (16, 64, 256)),
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
            first_token_ms = {rank: 1e3 * value for rank, value in found.first_token_s.items()}
            loaded[legs] = {"first_token_ms": first_token_ms, "failed": found.failed}
        figures["loaded"][str(link)] = loaded
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
    ways = {"device only": Settings(), "host memory": Settings(host_blocks=8 * few, host_byte_s=1 / 50e9)}
    links: dict[str, Any] = {}
    for link in LINKS:
        constants = with_blocks(linked(ASSUMED, link), few)
        arrivals = synthetic(_mix(BURST, 1e4, 6000, 400, constants), SEED)
        links[str(link)] = {way: _burst(simulate(arrivals, constants, settings)) for way, settings in ways.items()}
    return {"blocks": few, "requests": BURST, "links": links}


def _burst(ran: Ran) -> dict[str, float]:
    right = [each for each in ran.outcomes if not each.failed]
    return {
        "prefilled_s": max(each.prefilled_s for each in right), "seconds": max(each.total_s for each in right),
        "failed": len(ran.outcomes) - len(right),
    }  # fmt: skip


def saturation(messages: Mapping[str, Any]) -> dict[str, Any]:
    """How busy one P's control server is, by how many D engines ask it.

    ``shared``: they divide the requests that an assumed P computes, of 6,000 tokens. ``each``: as many come from each.
    """
    cost_us, counts = messages["cost_us"], (1, 10, 30, 100, 300, 1000)

    def busy(engines: int, requests_per_s: float) -> float:
        return engines * control.busy(requests_per_s, _CHUNKS, cost_us)

    return {
        "cost_us": dict(cost_us), "workers": control.WORKERS, "chunks": _CHUNKS,
        "shared": {
            "requests_per_s": _P_REQUESTS_PER_S,
            "busy": {str(engines): busy(engines, _P_REQUESTS_PER_S / engines) for engines in counts},
        },
        "each": {
            "requests_per_s": _EACH_PER_S,
            "busy": {str(engines): busy(engines, _EACH_PER_S) for engines in counts},
        },
        "hello_of_1000_s": 1000 * control.WORKERS * cost_us["hello"] * 1e-6,
    }  # fmt: skip


def _mix(requests: int, per_s: float, input_tokens: int, output_tokens: int, constants: Constants) -> Mix:
    mix = Mix(requests, per_s, input_tokens, output_tokens)
    longest = constants.cache.blocks * constants.cache.block_tokens // 2
    return replace(mix, longest=min(longest, 16 * input_tokens))
