"""How long an answer pauses that moves because its decode server is drained: ``python -m benchmarks.drain``.

A small real model on P and two D, and a proxy. So many streams run at once, on both D; then one D is drained, the other
one the next time. Pause: the longest time between two events of a stream that moved, behind the moment when its D was
leaving. Beside it, what the pull of a prompt took on the D where they went on, under that load; and the time between
two events on both D before. Each D proves the other one in the first two rounds, which are not counted. Streams
that end too early are.

``--by-way-of-prefill``: the proxy is not told where a D's prefixes are found, so that P pulls what was written, and the
next D all from P.
"""

import argparse
import random
import re
import statistics
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx

from benchmarks.first_token import VOCABULARY
from benchmarks.pair import REQUEST_TIMEOUT_S, counted
from benchmarks.serving import DIRECTORY, HOST, MODEL, NAME, READY_TIMEOUT_S, ROOT, command
from examples.quickstart import model
from examples.quickstart.servers import Server, ServerFailed, Servers, free_ports

FILE = DIRECTORY / "draining"
#: Of a stream, before its D is drained.
WRITTEN = 40
POLL_S = 0.005
#: Longest time from when the proxy says something to when that is read.
NOTICED_S = 0.05


@dataclass
class Stream:
    """What came of an answer, and when."""

    name: str
    times: list[float] = field(default_factory=list)
    tokens: int = 0  # by its usage; 0 if it did not come to its end

    def read(self, url: str, prompt_tokens: int, answer_tokens: int) -> None:
        """Ask, and note the events."""
        prompt = [random.choice(VOCABULARY) for _ in range(prompt_tokens)]
        body = {"model": NAME, "prompt": prompt, "max_tokens": answer_tokens, "temperature": 0, "ignore_eos": True,
                "stream": True, "stream_options": {"include_usage": True}}  # fmt: skip
        last, ended = "", False
        with httpx.stream(
            "POST", f"{url}/v1/completions", json=body, headers={"x-request-id": self.name},
            timeout=REQUEST_TIMEOUT_S, trust_env=False,
        ) as answer:  # fmt: skip
            for line in answer.iter_lines():
                ended = line == "data: [DONE]"
                if line.startswith("data: {"):
                    self.times.append(time.perf_counter())
                    last = line
                if ended:
                    break
        self.tokens = answer_tokens if ended and f'"completion_tokens":{answer_tokens}' in last else 0

    def longest_ms(self, since: float) -> float:
        """Return the longest time between two events that ended behind a moment."""
        return 1e3 * max((after - before for before, after in pairwise(self.times) if after > since), default=0.0)


@contextmanager
def running(megabytes: int) -> Iterator[tuple[Server, list[Server]]]:
    """Yield the proxy and both D, ready."""
    prefill, *decodes, proxy = free_ports(4, HOST)
    environment = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind",
                   "OMP_NUM_THREADS": "1"}  # fmt: skip
    lends: dict[str, object] = {"serve_prefixes": True, "peers": []}
    commands = [(prefill, command(prefill, "kv_producer", megabytes, {"peers": ["readers"]}))]
    commands += [(port, command(port, "kv_consumer", megabytes, lends)) for port in decodes]
    with Servers() as servers:

        def start(port: int, words: list[str]) -> Server:
            log = DIRECTORY / f"drain-{port}.log"
            return servers.start(
                Server(f"{port}", words, url=f"http://{HOST}:{port}", log=log, environment=environment, cwd=ROOT)
            )

        started = [start(port, words) for port, words in commands]
        servers.wait_ready(started, READY_TIMEOUT_S)
        legs = [f"--prefill={started[0].url}", *(f"--decode={each.url}" for each in started[1:])]
        words = [sys.executable, "-m", "pd_proxy", "--host", HOST, "--port", str(proxy), "--draining", str(FILE), *legs]
        before_them = start(proxy, words)
        servers.wait_ready([before_them], READY_TIMEOUT_S)
        yield before_them, started[1:]


def found_at(server: Server) -> str:
    """Return where the prefixes that a D holds are found."""
    return str(re.findall(r"answers on the control channel at (\S+)", server.log.read_text())[-1])


def wait_for(log: Path, words: str, times: int) -> None:
    """Wait until a log has words so many times.

    Raises:
        RuntimeError: it has not, in time.
    """
    deadline = time.monotonic() + REQUEST_TIMEOUT_S
    while log.read_text().count(words) < times:
        if time.monotonic() > deadline:
            raise RuntimeError(f"{log} has {words!r} fewer than {times} times")
        time.sleep(POLL_S)


def drain(
    proxy: Server, leaving: Server, other: Server, number: int, arguments: argparse.Namespace
) -> Mapping[str, list[float]]:
    """Return what a drain of one D took: pauses, pulls and times between two events in ms; and streams that failed."""
    pulls = "vllm:pd_pull_seconds_sum", "vllm:pd_pull_seconds_count"
    before = [counted(other.url, name, phase="total") for name in pulls]
    streams = [Stream(f"drain-{number}-{stream}") for stream in range(arguments.streams)]
    with ThreadPoolExecutor(len(streams)) as clients:
        sizes = arguments.prompt_tokens, arguments.answer_tokens
        read = [clients.submit(each.read, proxy.url, *sizes) for each in streams]
        while any(len(each.times) < WRITTEN for each in streams) and not all(each.done() for each in read):
            time.sleep(POLL_S)
        apart = [1e3 * (b - a) for each in streams for a, b in pairwise(each.times[-WRITTEN // 2 :])]
        FILE.write_text(leaving.url if arguments.by_way_of_prefill else f"{leaving.url} {found_at(leaving)}")
        wait_for(proxy.log, f"{leaving.url} is leaving", number // 2 + 1)
        since = time.perf_counter() - NOTICED_S
        for each in read:
            each.result()
    FILE.write_text("")
    wait_for(proxy.log, "is back", number + 1)
    seconds, count = (counted(other.url, name, phase="total") - was for name, was in zip(pulls, before, strict=True))
    lines = [line for line in proxy.log.read_text().splitlines() if " moved=http" in line]
    moved = [each for each in streams if any(f" id={each.name} " in line for line in lines)]
    return {
        "pause_ms": [each.longest_ms(since) for each in moved],
        "pull_ms": [1e3 * seconds / count] if count else [],
        "between_ms": apart,
        "failed": [1.0 for each in streams if each.tokens != arguments.answer_tokens],
    }


def measure(proxy: Server, decodes: Sequence[Server], arguments: argparse.Namespace) -> dict[str, Any]:
    """Print what all drains took, and return it.

    Raises:
        RuntimeError: no answer moved, or nothing was pulled.
    """
    taken: dict[str, list[float]] = {"pause_ms": [], "pull_ms": [], "between_ms": [], "failed": []}
    for number in range(arguments.rounds + 2):
        leaving, other = decodes[:: -1 if number % 2 else 1]
        found = drain(proxy, leaving, other, number, arguments)
        for name, values in found.items() if number > 1 else ():
            taken[name] += values
        print(f"{len(found['pause_ms'])} of {arguments.streams} moved: pauses of "
              f"{', '.join(f'{pause:.0f}' for pause in found['pause_ms'])} ms; a pull: {found['pull_ms']}")  # fmt: skip
    if not (taken["pause_ms"] and taken["pull_ms"]):
        raise RuntimeError(f"no answer moved, or nothing was pulled: the logs in {DIRECTORY} say why")
    pause, pull, apart = (statistics.median(taken[name]) for name in ("pause_ms", "pull_ms", "between_ms"))
    most, failed = max(taken["pause_ms"]), len(taken["failed"])
    print(f"pause {pause:.0f} ms, at most {most:.0f}: {pause / pull:.2f} of a pull ({pull:.0f} ms); without the "
          f"{apart:.0f} ms between two events {(pause - apart) / pull:.2f}; {failed} failed")  # fmt: skip
    return {
        "pause_ms": pause, "most_ms": most, "pull_ms": pull, "between_ms": apart, "ratio": pause / pull,
        "moved": len(taken["pause_ms"]), "failed": failed,
    }  # fmt: skip


def main(words: Sequence[str] | None = None) -> dict[str, Any]:
    """Print what drains took, and return the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=8, help="in which one D is drained")
    parser.add_argument("--streams", type=int, default=6, help="at once")
    parser.add_argument("--prompt-tokens", type=int, default=800)
    parser.add_argument("--answer-tokens", type=int, default=400)
    parser.add_argument("--megabytes", type=int, default=512, help="of the KV cache of each server")
    parser.add_argument("--by-way-of-prefill", action="store_true", help="by both legs")
    arguments = parser.parse_args(words)
    if not model.is_made(MODEL):
        model.make(MODEL)
    DIRECTORY.mkdir(parents=True, exist_ok=True)
    FILE.unlink(missing_ok=True)
    try:
        with running(arguments.megabytes) as (proxy, decodes):
            return measure(proxy, decodes, arguments)
    except ServerFailed as error:
        sys.exit(f"{error}. The end of its log in {DIRECTORY}:\n{error.log_tail}")


if __name__ == "__main__":
    main()
