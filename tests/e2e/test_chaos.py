"""Processes that die, stop, come back or lie, at every stage of a pull: no wrong token, no stuck request, no leak.

Answers are compared with what the decode server computes by itself; block pools and leases of both sides must be empty
at the end, by vLLM's own metrics. Times are reported at the end.
"""

import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace

import msgspec
import pytest
import zmq

from tests.support.e2e.client import Completion, KVTransferParams
from tests.support.e2e.cluster import Cluster
from tests.support.e2e.deployments import CHAOS, CHAOS_LEASE_TTL_S, CHAOS_PULL_TIMEOUT_S, on, prefill
from tests.support.e2e.forwarder import Forwarder
from tests.support.e2e.pair import Pair, make_prompt, wait_until_at_rest
from tests.support.e2e.trouble import stopped
from tests.support.waiting import until
from transfer.control.messages import PROTOCOL_VERSION

PROMPT_TOKENS = 1500

pytestmark = [
    pytest.mark.chaos,
    pytest.mark.slow,
    pytest.mark.timeout(900),
    on(CHAOS),
]
both_policies = pytest.mark.parametrize("pair", [("P", "D fail"), ("P", "D recompute")], indirect=True, ids="-".join)
failing = pytest.mark.parametrize("pair", [("P", "D fail")], indirect=True, ids="-".join)


def policy_of(pair: Pair) -> str:
    return pair.decode.spec.load_failure_policy


def assert_settled_by_policy(pair: Pair, completion: Completion, prompt: list[int]) -> None:
    """A right answer, or an error where the policy allows one."""
    if policy_of(pair) == "recompute" or completion.status == 200:
        pair.assert_right(completion, prompt)
    else:
        assert completion.status == 500, f"{completion.status} {completion.body}"


@contextmanager
def pull_under_way(pair: Pair, prompt: list[int]) -> Iterator["Future[Completion]"]:
    """A decode leg whose read hangs, because the prefill server has been stopped after its prefill.

    The pair has met before, so that the handshake is over. The prefill server goes on when the block ends.
    """
    params = pair.prefill.client.prefill(prompt)
    with ThreadPoolExecutor(1) as pool, stopped(pair.prefill):
        completion = pool.submit(pair.decode_leg, prompt, params)
        time.sleep(1.0)
        assert not completion.done()
        yield completion


@both_policies
def test_a_prefill_server_that_is_killed_before_the_pull(pair: Pair, cluster: Cluster, figures: list[str]) -> None:
    pair.get_acquainted()
    prompt = make_prompt(PROMPT_TOKENS, ("before", pair.name))
    params = pair.prefill.client.prefill(prompt)
    pair.prefill.kill()
    began = time.monotonic()
    completion = pair.decode_leg(prompt, params)
    figures.append(f"answer after P died, {policy_of(pair)}: {time.monotonic() - began:.1f} s")
    cluster.restart(pair.prefill)
    assert_settled_by_policy(pair, completion, prompt)


@both_policies
def test_a_prefill_server_that_is_killed_during_the_pull(pair: Pair, cluster: Cluster, figures: list[str]) -> None:
    pair.get_acquainted()
    prompt = make_prompt(PROMPT_TOKENS, ("during", pair.name))
    with pull_under_way(pair, prompt) as pulling:
        pair.prefill.kill()
        began = time.monotonic()
        completion = pulling.result(CHAOS_PULL_TIMEOUT_S + 10.0)
        figures.append(f"answer after P died mid-pull, {policy_of(pair)}: {time.monotonic() - began:.1f} s")
    cluster.restart(pair.prefill)
    assert_settled_by_policy(pair, completion, prompt)


@failing
def test_a_prefill_server_that_is_killed_after_the_pull(pair: Pair, cluster: Cluster) -> None:
    prompt = make_prompt(PROMPT_TOKENS, ("after", pair.name))
    params = pair.prefill.client.prefill(prompt)
    with pair.decode.client.stream(prompt, 200, kv_transfer_params=params) as tokens:
        next(tokens)
        pair.prefill.kill()
        assert sum(1 for _ in tokens) > 100
    cluster.restart(pair.prefill)
    pair.assert_right(pair.disaggregate(prompt), prompt)


@both_policies
def test_late_bytes_of_a_prefill_server_that_stood_still_do_not_land_in_reused_blocks(pair: Pair) -> None:
    """P stops for 60 s in mid-pull. Meanwhile other requests use every block of D; then they are asked again."""
    pair.get_acquainted()
    prompt = make_prompt(PROMPT_TOKENS, ("late", pair.name))
    count = pair.decode.client.cache_blocks() // 60
    others = [make_prompt(1900, ("reuse", pair.name, number)) for number in range(count)]
    with pull_under_way(pair, prompt) as pulling:
        began = time.monotonic()
        completion = pulling.result(60.0)
        assert_settled_by_policy(pair, completion, prompt)
        before = [pair.decode.client.complete(other, 4) for other in others]
        time.sleep(max(0.0, 60.0 - (time.monotonic() - began)))
    until(pair.prefill.client.is_healthy, "the prefill server answers again")
    time.sleep(2.0)
    cached = pair.decode.client.metrics()
    again = [pair.decode.client.complete(other, 4) for other in reversed(others)][::-1]
    assert pair.decode.client.metrics().since(cached).prompt_tokens("local_cache_hit") > 0, "nothing was reused"
    for other, first, second in zip(others, before, again, strict=True):
        assert first.tokens == second.tokens == pair.decode.client.compute(other, 4).tokens
    pair.wait_until_at_rest()
    pair.assert_right(pair.disaggregate(prompt), prompt)


@failing
def test_a_prefill_server_that_came_back_on_the_same_ports_is_noticed_and_works_at_once(
    pair: Pair, cluster: Cluster, figures: list[str]
) -> None:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port = one.getsockname()[1]
    spec = prefill()
    (p,) = cluster.start([replace(spec, options=(*spec.options, ("port", port)))])
    other = Pair(p, pair.decode)
    try:
        prompt = make_prompt(PROMPT_TOKENS, ("same ports", pair.name))
        other.assert_right(other.disaggregate(prompt), prompt)
        stale = p.client.prefill(prompt)
        p.kill()
        cluster.restart(p)
        with other.traffic() as traffic:
            assert other.decode_leg(prompt, stale, cache_salt="stale").status == 500
        assert traffic.failures() == 1
        fresh = make_prompt(PROMPT_TOKENS, ("same ports again", pair.name))
        began = time.monotonic()
        other.assert_right(other.disaggregate(fresh), fresh)
        figures.append(f"first answer through a P that came back: {time.monotonic() - began:.1f} s")
    finally:
        cluster.stop([p])


@failing
def test_a_decode_server_that_is_killed_mid_pull_costs_the_prefill_server_one_lease(
    pair: Pair, cluster: Cluster, figures: list[str]
) -> None:
    pair.get_acquainted()
    prompt = make_prompt(PROMPT_TOKENS, ("decode dies", pair.name))
    params = pair.prefill.client.prefill(prompt)
    with ThreadPoolExecutor(1) as pool:
        with stopped(pair.prefill):
            pulling = pool.submit(pair.decode_leg, prompt, params)
            time.sleep(1.0)
            pair.decode.kill()
            began = time.monotonic()
        assert pulling.exception(10.0) is not None
    wait_until_at_rest(pair.prefill)
    waited = time.monotonic() - began
    figures.append(f"P's blocks free after D died, lease of {CHAOS_LEASE_TTL_S:.0f} s: {waited:.1f} s")
    assert waited < CHAOS_LEASE_TTL_S + 5.0
    cluster.restart(pair.decode)
    pair.assert_right(pair.disaggregate(prompt), prompt)


@both_policies
def test_lost_control_messages_cost_time_but_nothing_else(pair: Pair) -> None:
    """Every third chunk in either direction is lost: of the handshake, the renewals and the releases."""
    prompts = [make_prompt(300, ("lost", pair.name, number)) for number in range(12)]
    params = [pair.prefill.client.prefill(prompt) for prompt in prompts]
    forwarder = Forwarder(params[0]["remote_host"], params[0]["remote_port"])
    try:
        proof = make_prompt(300, ("proof", pair.name))  # of the engine at this address
        pair.decode_leg(proof, pair.prefill.client.prefill(proof) | {"remote_port": forwarder.port})
        pair.wait_until_at_rest()
        forwarder.lose(0.33)
        through: list[KVTransferParams] = [{**one, "remote_port": forwarder.port} for one in params]
        with ThreadPoolExecutor(4) as pool:
            completions = list(pool.map(pair.decode_leg, prompts, through))
        assert forwarder.lost > 0
        forwarder.lose(0.0)
        for prompt, completion in zip(prompts, completions, strict=True):
            assert_settled_by_policy(pair, completion, prompt)
        pair.wait_until_at_rest()
    finally:
        forwarder.close()


@both_policies
def test_an_engine_that_answers_garbage_fails_its_own_pulls_only(pair: Pair) -> None:
    prompt = make_prompt(300, ("liar", pair.name))
    params = pair.prefill.client.prefill(prompt)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    liar = context.socket(zmq.ROUTER)
    port = liar.bind_to_random_port("tcp://127.0.0.1")
    over = threading.Event()

    def lie() -> None:
        welcome = msgspec.msgpack.encode([PROTOCOL_VERSION, 1, {"type": "welcome"}])
        lies = [b"", b"\xc1", b"\x93\x01\x01\x80", bytes(100_000), welcome]
        while not over.is_set():
            if liar.poll(50):
                sender, *_ = liar.recv_multipart()
                for frame in lies:
                    liar.send_multipart([sender, frame])

    thread = threading.Thread(target=lie)
    thread.start()
    try:
        spoilt = {**params, "remote_port": port, "remote_engine_id": "a liar"}
        with ThreadPoolExecutor(1) as pool:
            completion = pool.submit(pair.decode_leg, prompt, spoilt)
            honest = make_prompt(300, ("honest", pair.name))
            pair.assert_right(pair.disaggregate(honest), honest)
            assert_settled_by_policy(pair, completion.result(), prompt)
    finally:
        over.set()
        thread.join()
        context.destroy(linger=0)
