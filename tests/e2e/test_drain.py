"""A prefill server that is told to stop: it stays for decode servers that hold leases, and then leaves nothing behind.

As the README says: with ``--shutdown-timeout``, and for at most ``drain_timeout_s``.
"""

import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.e2e.cluster import Cluster, Server
from tests.support.e2e.deployments import CHAOS, LEASE_TTL_S, on, prefill
from tests.support.e2e.pair import Pair, make_prompt
from tests.support.waiting import until

PROMPT_TOKENS = 500
STAYING = ("--shutdown-timeout", "40")
DRAIN_S = 6.0  # long against a pull, short against a lease
EXIT_S = 20.0  # for vLLM to stop its processes on a busy machine


@pytest.fixture
def leaving(cluster: Cluster) -> Iterator[Server]:
    """A prefill server to be told to stop."""
    spec = prefill()
    options = (*spec.options, ("drain_timeout_s", DRAIN_S))
    (server,) = cluster.start([replace(spec, options=options, arguments=STAYING)])
    yield server
    cluster.stop([server])


def shared_memory(server: Server) -> set[Path]:
    """The segments of shared memory that a server's processes have mapped."""
    found = set()
    for pid in server.processes(""):
        lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
        found |= {Path(line.split(maxsplit=5)[5]) for line in lines if "/dev/shm/" in line}
    return {path for path in found if path.exists()}


@pytest.mark.drain
@pytest.mark.slow
@on(CHAOS)
@pytest.mark.parametrize("pair", [("P", "D fail")], indirect=True, ids="-".join)
def test_who_comes_a_moment_later_gets_its_blocks_and_who_does_not_come_is_waited_for_so_long(
    pair: Pair, leaving: Server, figures: list[str]
) -> None:
    stopping = Pair(leaving, pair.decode)
    prompts = [make_prompt(PROMPT_TOKENS, (which, pair.name)) for which in ("read in the drain", "never read")]
    params, _ = [leaving.client.prefill(prompt) for prompt in prompts]
    segments, mark = shared_memory(leaving), leaving.log_size
    assert segments
    leaving.process.terminate()
    told = time.monotonic()
    time.sleep(1.0)
    completion = stopping.decode_leg(prompts[0], params)  # the first that this decode server hears of it
    assert leaving.process.wait(DRAIN_S + EXIT_S) == 0, leaving.log_since(mark)
    took = time.monotonic() - told
    stopping.assert_right(completion, prompts[0])
    assert "staying up to 6.0 s for decode engines that hold 2 leases" in leaving.log_since(mark)
    assert DRAIN_S <= took < LEASE_TTL_S
    until(lambda: not leaving.processes(""), "all processes of the server have ended", within_s=EXIT_S)
    assert [path for path in segments if path.exists()] == []
    figures.append(f"P that was told to stop, with {DRAIN_S:.0f} s for one lease that nobody read: {took:.1f} s")
