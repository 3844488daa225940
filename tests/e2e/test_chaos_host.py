"""Leases that move and prompts that land, while processes of either side die and stop and clients leave.

Neither device has room for what is asked of it at once. Whatever happens: no wrong token, no request that does not end,
no block, lease or slot of host memory that stays.
"""

import random
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import httpx
import pytest

from tests.support.e2e.client import Completion
from tests.support.e2e.cluster import Cluster, Server
from tests.support.e2e.deployments import CHAOS_HOST, CHAOS_HOST_RANKS, on
from tests.support.e2e.host_memory import wait_until_nothing_is_lent
from tests.support.e2e.legs import Router
from tests.support.e2e.pair import Pair, make_prompt
from tests.support.e2e.trouble import Side, Trouble
from tests.support.waiting import until

REQUESTS, CLIENTS, LONGEST = 200, 8, 1500
REQUESTS_OF_RANKS = 80  # where three workers share two cores
PROMPTS = 140  # different ones, so that some are asked for again, and found in host memory
KILLS: tuple[Side, ...] = ("prefill", "decode", "prefill", "decode")
ENDS_WITHIN_S = 100.0

pytestmark = [pytest.mark.chaos, pytest.mark.slow, pytest.mark.timeout(1500)]

Outcome = tuple[list[int], Completion | None, float]


def send(trouble: Trouble, number: int) -> Outcome:
    """Send a request, its legs in turn or at once; one of them may be left. Returns what the decode leg answered."""
    chance = random.Random(number)
    which = chance.randrange(PROMPTS)
    prompt = make_prompt(random.Random(which).randrange(2, LONGEST), ("chaos host", which))
    leaves_at = chance.choice(["", "", "", "", "prefill", "decode"])
    at_once = chance.random() < 0.3
    trouble.wait_for_servers()
    began = time.monotonic()
    answer = None
    with suppress(httpx.HTTPError):  # of a server that has just been killed
        answer = together(trouble.router, number, prompt) if at_once else in_turn(trouble.router, prompt, leaves_at)
    return prompt, answer, time.monotonic() - began


def together(router: Router, number: int, prompt: list[int]) -> Completion:
    name = f"chaos-{number}-{time.monotonic()}"
    return router.send(prompt, name=name, decode_first_s=0.1).decode


def in_turn(router: Router, prompt: list[int], leaves_at: str) -> Completion | None:
    pair = router.pair
    if leaves_at == "prefill":
        pair.prefill.client.abandon(prompt, 0.2, 1, kv_transfer_params={"do_remote_decode": True})
        return None
    answer = pair.prefill.client.complete(prompt, 1, kv_transfer_params={"do_remote_decode": True})
    if answer.status != 200 or answer.kv_transfer_params is None:
        return None
    if leaves_at == "decode":
        pair.decode.client.abandon(prompt, 0.3, kv_transfer_params=answer.kv_transfer_params)
        return None
    return pair.decode_leg(prompt, answer.kv_transfer_params)


class HostWork:
    """What was done with host memory, over all lives of a pair's servers: a server's counters end with its process."""

    def __init__(self, pair: Pair) -> None:
        self._pair = pair
        self._before = {server.port: server.client.metrics() for server in (pair.prefill, pair.decode)}
        self.moved = self.landed = 0.0  # blocks of leases; prompts

    def add(self, server: Server) -> None:
        """Count what a server has done since then or its last start. To be called once in each of its lives."""
        before = self._before.pop(server.port, None)
        metrics = server.client.metrics()
        if before is not None:
            metrics = metrics.since(before)
        if server is self._pair.prefill:
            self.moved += metrics.value("vllm:pd_lease_blocks_moved_total")
        else:
            self.landed += metrics.value("vllm:pd_landings_total", event="landed")

    def add_in_trouble(self, server: Server) -> None:
        """The same of a server that may not answer: then what it has done in this life is left out."""
        with suppress(httpx.HTTPError):
            self.add(server)


def assert_right_in_trouble(pair: Pair, cluster: Cluster, figures: list[str], requests: int) -> None:
    recomputes = pair.decode.spec.load_failure_policy == "recompute"
    work = HostWork(pair)
    in_trouble = Trouble(pair, cluster, recomputes, KILLS, work.add_in_trouble)
    with in_trouble as trouble, ThreadPoolExecutor(CLIENTS) as clients:
        answers = list(clients.map(lambda number: send(trouble, number), range(requests)))
    for server in (pair.prefill, pair.decode):
        until(server.client.is_healthy, f"{server.spec.name} answers again")
    pair.wait_until_at_rest()
    for server in (pair.prefill, pair.decode):
        wait_until_nothing_is_lent(server)
        work.add(server)
    ended = Counter("none" if answer is None else str(answer.status) for _, answer, _ in answers)
    figures.append(
        f"{pair.decode.spec.name}: {dict(ended)} of {requests}, {dict(trouble.caused)}; "
        f"{work.moved:.0f} blocks moved, {work.landed:.0f} prompts landed"
    )
    assert trouble.caused["killed prefill"] == trouble.caused["killed decode"] == 2
    assert work.moved > 0, "no lease has moved: nothing of it was tried"
    assert work.landed > 0, "no prompt has landed: nothing of it was tried"
    assert max(seconds for _, _, seconds in answers) < ENDS_WITHIN_S
    assert set(ended) <= ({"none", "200"} if recomputes else {"none", "200", "500"})
    assert ended["200"] > requests // 3
    for prompt, answer, _ in answers:
        if answer is not None and answer.status == 200:
            pair.assert_right(answer, prompt)
    prompt = make_prompt(LONGEST, ("after the trouble", pair.name))
    pair.assert_right(pair.disaggregate(prompt), prompt)


@on(CHAOS_HOST)
@pytest.mark.parametrize("pair", [("P", "D auto fail"), ("P", "D host recompute")], indirect=True, ids="-".join)
def test_two_hundred_requests_in_trouble(pair: Pair, cluster: Cluster, figures: list[str]) -> None:
    assert_right_in_trouble(pair, cluster, figures, REQUESTS)


@on(CHAOS_HOST_RANKS)
@pytest.mark.parametrize("pair", [("TP1", "TP2"), ("TP2", "TP1")], indirect=True, ids="-".join)
def test_eighty_requests_in_trouble_between_unequal_ranks(pair: Pair, cluster: Cluster, figures: list[str]) -> None:
    assert_right_in_trouble(pair, cluster, figures, REQUESTS_OF_RANKS)
