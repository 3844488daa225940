"""Both legs at once, while processes die and stop and clients leave in the middle of chunked prefills.

Whatever happens: no wrong token, no request that does not end, no block or lease that stays.
"""

import random
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import httpx
import pytest

from tests.support.e2e.client import Completion
from tests.support.e2e.cluster import Cluster
from tests.support.e2e.deployments import CHAOS_LEGS, on
from tests.support.e2e.legs import Router
from tests.support.e2e.pair import Pair, make_prompt
from tests.support.e2e.trouble import Side, Trouble
from tests.support.waiting import until

REQUESTS, CLIENTS, LONGEST = 200, 6, 2800
KILLS: tuple[Side, ...] = ("prefill", "decode", "prefill")
#: The timeouts of a decode leg one after the other: for the transfer, for blocks, for the pull, and for its answer.
ENDS_WITHIN_S = 100.0

pytestmark = [pytest.mark.chaos, pytest.mark.slow, pytest.mark.timeout(1500), on(CHAOS_LEGS)]


def send(trouble: Trouble, number: int) -> tuple[list[int], Completion | None, float]:
    """Send both legs of a request; one of them may be left by its client. Returns what the decode leg answered."""
    chance = random.Random(number)
    prompt = make_prompt(chance.randrange(2, LONGEST), ("chaos legs", number))
    leaves = chance.choice(["", "", "", "", "prefill", "decode"])
    trouble.wait_for_servers()
    router, name = trouble.router, f"chaos-{number}"
    for_p, for_d = router.prefill_params(name), router.decode_params(name)
    client = router.pair.prefill.client

    def prefill() -> None:
        time.sleep(chance.choice([0.0, 0.0, 0.2]))
        with suppress(httpx.HTTPError):
            if leaves == "prefill":
                client.abandon(prompt, 0.2, 1, kv_transfer_params=for_p)
            else:
                client.complete(prompt, 1, kv_transfer_params=for_p)

    began, answer = time.monotonic(), None
    with ThreadPoolExecutor(1) as threads, suppress(httpx.HTTPError):  # of a server that was killed
        threads.submit(prefill)
        if leaves == "decode":
            router.pair.decode.client.abandon(prompt, 0.3, kv_transfer_params=for_d)
        else:
            answer = router.pair.decode_leg(prompt, for_d)
    return prompt, answer, time.monotonic() - began


@pytest.mark.parametrize("pair", [("P", "D fail"), ("P", "D recompute")], indirect=True, ids="-".join)
def test_two_hundred_requests_in_trouble(pair: Pair, cluster: Cluster, figures: list[str]) -> None:
    recomputes = pair.decode.spec.load_failure_policy == "recompute"
    with Trouble(pair, cluster, recomputes, KILLS) as trouble, ThreadPoolExecutor(CLIENTS) as clients:
        answers = list(clients.map(lambda number: send(trouble, number), range(REQUESTS)))
    for server in (pair.prefill, pair.decode):
        until(server.client.is_healthy, f"{server.spec.name} answers again")
    pair.wait_until_at_rest()
    ended = Counter("left" if answer is None else str(answer.status) for _, answer, _ in answers)
    ahead = pair.decode.client.metrics().value("vllm:pd_pulls_ahead_total")
    figures.append(
        f"{pair.decode.spec.load_failure_policy}: {dict(ended)} of {REQUESTS}, {dict(trouble.caused)}; "
        f"since D's restart {ahead:.0f} pulled ahead"
    )
    assert trouble.caused["killed prefill"] == 2
    assert trouble.caused["killed decode"] == 1
    assert ahead > 0
    assert max(seconds for _, _, seconds in answers) < ENDS_WITHIN_S
    assert set(ended) <= ({"left", "200"} if recomputes else {"left", "200", "500"})
    assert ended["200"] > REQUESTS // 3
    for prompt, answer, _ in answers:
        if answer is not None and answer.status == 200:
            pair.assert_right(answer, prompt)
    prompt = make_prompt(LONGEST, ("after the trouble", pair.name))
    Router(pair).assert_right(prompt)
