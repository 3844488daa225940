"""Runs benchmarks in turn and writes what they measured to benchmarks/results: ``python -m benchmarks [NAME ...]``.

A benchmark that is started by itself (``python -m benchmarks.pull --rounds 50``) prints and writes nothing.
"""

import argparse
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks import (
    detour,
    drain,
    first_token,
    host_memory,
    host_step,
    legs,
    micro,
    multi_turn,
    partition,
    planning,
    pool,
    proxy,
    pull,
    record,
    reuse,
    serving,
    short_of_blocks,
    states,
    unequal,
)


@dataclass(frozen=True)
class Benchmark:
    """A benchmark's ``main``, and the words of its command line."""

    main: Callable[[Sequence[str] | None], dict[str, Any]]
    words: tuple[str, ...] = ()

    @property
    def module(self) -> str:
        """The module's name, as ``python -m`` takes it."""
        return f"benchmarks.{self.main.__module__.rpartition('.')[2]}"


#: By the names of their results' files.
BENCHMARKS: Mapping[str, Benchmark] = {
    "host_memory": Benchmark(host_memory.main),
    "host_step": Benchmark(host_step.main),
    "micro": Benchmark(micro.main),
    "planning": Benchmark(planning.main),
    "pull": Benchmark(pull.main),
    "pull_verified": Benchmark(pull.main, ("--verify", "--rounds", "15")),
    "unequal": Benchmark(unequal.main),
    "states": Benchmark(states.main),
    "short_of_blocks": Benchmark(short_of_blocks.main, ("--repeats", "41")),
    "short_of_blocks_slow_network": Benchmark(
        short_of_blocks.main, ("--parts", "bursts", "growth", "--mbit-per-s", "400")
    ),
    "short_of_blocks_slower_network": Benchmark(short_of_blocks.main, ("--parts", "bursts", "--mbit-per-s", "200")),
    "legs": Benchmark(legs.main),
    "legs_slow_network": Benchmark(legs.main, ("--mbit-per-s", "1000", "--lengths", "512", "2000", "3500")),
    "legs_hybrid": Benchmark(legs.main, ("--hybrid",)),
    "partition": Benchmark(partition.main),
    "first_token": Benchmark(first_token.main),
    "detour": Benchmark(detour.main),
    "proxy": Benchmark(proxy.main),
    "reuse": Benchmark(reuse.main),
    "reuse_two_prefills": Benchmark(reuse.main, ("--prefills", "2")),
    "reuse_no_hit": Benchmark(reuse.main, ("--no-hit",)),
    "drain": Benchmark(drain.main),
    "drain_by_way_of_prefill": Benchmark(drain.main, ("--by-way-of-prefill",)),
    "pool": Benchmark(pool.main),
    "multi_turn": Benchmark(multi_turn.main),
    "serving": Benchmark(serving.main),
    "multi_turn_lazy": Benchmark(multi_turn.main, ("--store", "lazy")),
}


def run(name: str) -> None:
    """Run one and write its file."""
    benchmark = BENCHMARKS[name]
    print(f"== {name}")
    start = time.monotonic()
    with record.kept_output() as output:
        figures = benchmark.main(benchmark.words)
    seconds = time.monotonic() - start
    record.write(name, (benchmark.module, *benchmark.words), figures, output.kept, seconds=seconds)


def main() -> None:
    """Run those that are named, or all."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(BENCHMARKS)}; all if none")
    names = parser.parse_args().names or list(BENCHMARKS)
    unknown = [name for name in names if name not in BENCHMARKS]
    if unknown:
        parser.error(f"there is no benchmark {unknown[0]!r}; there are {', '.join(BENCHMARKS)}")
    for name in names:
        run(name)


if __name__ == "__main__":
    main()
