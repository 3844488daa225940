"""Requests that leave at any stage give everything back: on both sides, at once where somebody can say so.

The ``pair`` fixture checks after every test that both servers live and hold no request, no block and no lease.
"""

import signal
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.support.e2e.choice import on_pairs, pairs
from tests.support.e2e.deployments import BHLNC, BLHNC, LBHNC, LEASE_TTL_S, MIXED
from tests.support.e2e.pair import Pair, make_prompt
from tests.support.waiting import until

pytestmark = [
    pytest.mark.lifetimes,
    on_pairs(
        pairs(MIXED, [("TP2", "TP1")]), *(pairs(each, [("P1", "D1"), ("P2", "D2")]) for each in (LBHNC, BLHNC, BHLNC))
    ),
]

LONG = 2000


def test_a_request_that_leaves_during_prefill_holds_nothing(pair: Pair) -> None:
    with pair.traffic() as traffic:
        left = pair.prefill.client.abandon(
            make_prompt(LONG, (pair.name, "left in prefill")),
            after_s=0.02,
            max_tokens=1,
            kv_transfer_params={"do_remote_decode": True},
        )
    assert left, "the prefill was over before the client could leave"
    assert traffic.leases("granted") == traffic.leases("expired")


@pytest.mark.slow
def test_a_prompt_that_nobody_decodes_is_freed_when_its_lease_expires(pair: Pair) -> None:
    with pair.traffic() as traffic:
        pair.prefill.client.prefill(make_prompt(1000, (pair.name, "nobody decodes")))
        granted = time.monotonic()
    assert traffic.leases("expired") == 1
    assert time.monotonic() - granted > 0.9 * LEASE_TTL_S, "the lease ended before its time"


def test_requests_that_leave_at_any_moment_of_the_pull_hold_nothing(pair: Pair) -> None:
    prompt = make_prompt(LONG, (pair.name, "left in pull"))
    pair.assert_nothing_is_left(prompt)
    pair.assert_right(pair.disaggregate(prompt), prompt)


def test_a_request_that_leaves_while_the_prefill_server_is_silent_holds_nothing(pair: Pair) -> None:
    prompt = make_prompt(500, (pair.name, "left in silence"))
    params = pair.prefill.client.prefill(prompt)
    pair.prefill.signal(signal.SIGSTOP, "EngineCore")
    try:
        assert pair.decode.client.abandon(prompt, 1.0, kv_transfer_params=params)
    finally:
        pair.prefill.signal(signal.SIGCONT, "EngineCore")
    until(pair.prefill.client.is_healthy, "the prefill server answers again", within_s=10.0)
    pair.wait_until_at_rest()
    pair.assert_right(pair.disaggregate(prompt), prompt)


def test_requests_that_leave_while_decoding_hold_nothing(pair: Pair) -> None:
    prompts = [make_prompt(200, (i, pair.name, "left in decode")) for i in range(4)]

    def leave_after_three_tokens(prompt: list[int]) -> None:
        params = pair.prefill.client.prefill(prompt)
        with pair.decode.client.stream(prompt, 1500, kv_transfer_params=params) as tokens:
            for _ in range(3):
                next(tokens)

    with pair.traffic() as traffic, ThreadPoolExecutor(len(prompts)) as pool:
        list(pool.map(leave_after_three_tokens, prompts))
    assert traffic.leases("released") == len(prompts)
    assert traffic.source("local_compute") == len(prompts)


def test_a_decode_leg_that_the_server_rejects_ends_its_lease_at_once(pair: Pair) -> None:
    prompt = make_prompt(100, (pair.name, "rejected"))
    with pair.traffic() as traffic:
        params = pair.prefill.client.prefill(prompt)
        completion = pair.decode_leg(prompt, params, max_tokens=1_000_000)
    assert completion.status == 400, completion.body
    assert traffic.leases("cancelled") == 1


def test_a_prefill_worker_that_stalls_costs_time_or_an_error_but_never_a_wrong_answer(pair: Pair) -> None:
    prompt = make_prompt(LONG, (pair.name, "stall"))
    params = pair.prefill.client.prefill(prompt)
    with ThreadPoolExecutor(1) as pool:
        pair.prefill.signal(signal.SIGSTOP, "Worker")
        try:
            pulling = pool.submit(pair.decode_leg, prompt, params)
            time.sleep(1.0)
        finally:
            pair.prefill.signal(signal.SIGCONT, "Worker")
        completion = pulling.result()
    assert completion.status in {200, 500}
    if completion.status == 200:
        pair.assert_right(completion, prompt)
