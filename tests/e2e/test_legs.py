"""Both legs of a request at once: D pulls what P has computed while P computes the rest. Same tokens, or an error.

The prompts take P up to a dozen steps. Where one long prompt is pulled with the decode leg first, the counters prove
that D pulled before P was done.
"""

import signal
import time
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.support.e2e.choice import on_pairs, pairs
from tests.support.e2e.cluster import BLOCK_SIZE
from tests.support.e2e.deployments import (
    BHLNC,
    HOST_LEGS,
    LEGS,
    LEGS_QUEUE_TIMEOUT_S,
    MIXED,
    MLA_LEGS,
    UNEQUAL_LEGS,
    WINDOW_LEGS,
    on,
)
from tests.support.e2e.host_memory import evict, whole_blocks
from tests.support.e2e.legs import Router
from tests.support.e2e.pair import (
    Pair,
    Traffic,
    assert_failed_pull,
    end_lease,
    make_prompt,
    wait_until_at_rest,
)

LONG = 2800
#: Of what a server takes, with room for the answer.
LONGEST = 4000
#: For D to be there when P begins.
DECODE_FIRST_S = 0.3

pytestmark = pytest.mark.legs


@pytest.fixture
def router(pair: Pair) -> Router:
    """A router for the pair of the test."""
    return Router(pair)


@pytest.fixture
def quiet(pair: Pair) -> Iterator[None]:
    """Neither server logs an exception during the test."""
    marks = pair.prefill.log_size, pair.decode.log_size
    yield
    for server, mark in zip((pair.prefill, pair.decode), marks, strict=True):
        assert "Traceback" not in server.log_since(mark)


def assert_failed(router: Router, status: int) -> None:
    """The decode leg has ended as the decode server's policy says."""
    assert status == (200 if router.pair.decode.spec.load_failure_policy == "recompute" else 500)


def assert_serves(router: Router) -> None:
    """The next request through the same pair is right."""
    router.assert_right(make_prompt(600, ("next", time.monotonic())))


def leave_p(router: Router, tokens: int, attempt: int) -> bool:
    """The client of the prefill leg leaves while P computes, with P's engine stopped in between.

    The engine may have been too fast to be stopped, and then the transfer is complete: tells whether D was told that
    it ended.
    """
    pair, name = router.pair, uuid.uuid4().hex
    prompt, before = make_prompt(tokens, ("left on P", pair.name, attempt)), router.transfers()
    with ThreadPoolExecutor(1) as clients:
        decode = clients.submit(pair.decode_leg, prompt, router.decode_params(name))
        with pair.prefill.client.leaving(prompt, 1, kv_transfer_params=router.prefill_params(name)):
            router.wait_for("begun", since=before)
            pair.prefill.signal(signal.SIGSTOP, "EngineCore")
        time.sleep(1.0)  # for P's front end to pass it on
        pair.prefill.signal(signal.SIGCONT, "EngineCore")
        router.wait_for("complete", "ended", since=before)
        answer = decode.result(timeout=60)
    if router.transfers()["complete"] > before.get("complete", 0.0):
        return False
    assert_failed(router, answer.status)
    return True


def assert_fails_when_p_is_left(router: Router, tokens: int) -> None:
    """The client of the prefill leg leaves while P computes: D is told at once, and both go on serving."""
    assert any(leave_p(router, tokens, attempt) for attempt in range(5))
    assert_serves(router)


def pulls_ahead(router: Router, tokens: int, prompt_of: object, decode_first_s: float) -> bool:
    """A prompt gives the right output; tells whether D, which may have been slow, pulled ahead of P."""
    traffic = router.assert_right(make_prompt(tokens, prompt_of), decode_first_s=decode_first_s)
    return traffic.pulled("pulls_ahead") == router.pair.decode_ranks


def assert_pulled_ahead(router: Router, traffic: Traffic) -> None:
    """Every rank of D had read a part of the only prompt before P was done, and the rest after it."""
    assert traffic.pulled("pulls_ahead") == router.pair.decode_ranks
    assert 0 < traffic.pulled("pull_bytes_ahead") < traffic.pulled("pull_bytes")


@on_pairs(pairs(MIXED, [("TP1", "TP2")], (1200,)), pairs(BHLNC, [("P1", "D1")], (3500,)), value="tokens")
class TestOnServersOfOtherTests:
    """Unequal ones, and some that take two steps for a long prompt."""

    @pytest.mark.parametrize("decode_first_s", [0.2, -0.02])
    def test_a_prompt_gives_the_same_output_whichever_leg_is_first(
        self, router: Router, tokens: int, decode_first_s: float
    ) -> None:
        assert any(pulls_ahead(router, tokens, (decode_first_s, attempt), decode_first_s) for attempt in range(3))

    def test_a_client_that_leaves_p_fails_d_at_once_and_the_next_request_is_served(
        self, router: Router, tokens: int
    ) -> None:
        assert_fails_when_p_is_left(router, tokens)


@pytest.mark.usefixtures("quiet")
@on(LEGS)
@pytest.mark.parametrize("pair", [("P", "D fail")], indirect=True, ids="-".join)
class TestEquality:
    @pytest.mark.parametrize("decode_first_s", [0.0, 0.3, -0.02, -1.5])
    @pytest.mark.parametrize("tokens", [2, 33, 257, LONG])
    def test_a_prompt_gives_the_same_output_whichever_leg_is_first(
        self, router: Router, tokens: int, decode_first_s: float
    ) -> None:
        prompt = make_prompt(tokens, ("legs", tokens, decode_first_s))
        traffic = router.assert_right(prompt, decode_first_s=decode_first_s)
        if tokens == LONG and decode_first_s >= 0:
            assert traffic.pulled("pulls_ahead") == 1
            assert traffic.pulled("pull_bytes_ahead") > traffic.pulled("pull_bytes") // 2

    def test_concurrent_prompts_give_the_same_outputs(self, router: Router) -> None:
        prompts = [make_prompt(100 + 150 * number, ("concurrent legs", number)) for number in range(8)]
        with ThreadPoolExecutor(len(prompts)) as clients:
            answers = list(clients.map(router.send, prompts))
        for prompt, legs in zip(prompts, answers, strict=True):
            router.pair.assert_right(legs.decode, prompt)

    def test_what_d_holds_is_not_pulled(self, router: Router) -> None:
        prompt = make_prompt(1500, "half of it is known to D")
        router.pair.disaggregate(prompt[:800])
        router.assert_right(prompt, hit=800 // BLOCK_SIZE * BLOCK_SIZE)

    def test_what_p_holds_is_pulled_while_p_computes_the_rest(self, router: Router) -> None:
        prompt = make_prompt(LONG, "most of it is known to P")
        router.pair.prefill.client.complete(prompt[:2000], 1)
        traffic = router.assert_right(prompt, decode_first_s=DECODE_FIRST_S)
        assert_pulled_ahead(router, traffic)
        assert traffic.pulled("pull_bytes_ahead") / traffic.pulled("pull_bytes") > whole_blocks(2000) / LONG

    def test_a_second_turn_continues_the_first(self, router: Router) -> None:
        prompt = make_prompt(900, "first turn")
        first = router.send(prompt, 32).decode
        longer = [*prompt, *first.tokens, *make_prompt(600, "second turn")]
        held = (len(prompt) + 31) // BLOCK_SIZE * BLOCK_SIZE
        router.assert_right(longer, hit=held)

    def test_prompts_that_p_preempts_give_the_same_outputs(self, router: Router) -> None:
        """Two requests that P answers itself leave too few blocks for any of them, until they end."""
        prompts = [make_prompt(LONG, ("preempted", number)) for number in range(4)]
        own = [make_prompt(1500, ("P's own", number)) for number in range(2)]
        router.assert_right_though_preempted(prompts, own)


@pytest.mark.usefixtures("quiet")
@on(LEGS)
@pytest.mark.parametrize("pair", [("P", "D fail"), ("P", "D recompute")], indirect=True, ids="-".join)
class TestWhatGoesWrong:
    def test_a_transfer_that_nobody_announces_fails_in_time_with_its_name(self, router: Router) -> None:
        pair, name, prompt = router.pair, uuid.uuid4().hex, make_prompt(200, "never announced")
        mark, before, start = pair.decode.log_size, pair.decode.client.metrics(), time.monotonic()
        answer = pair.decode_leg(prompt, router.decode_params(name))
        took_s = time.monotonic() - start
        assert took_s >= LEGS_QUEUE_TIMEOUT_S
        assert took_s < LEGS_QUEUE_TIMEOUT_S + 20.0
        assert_failed(router, answer.status)
        wait_until_at_rest(pair.decode)
        counted = pair.decode.client.metrics().since(before)
        assert counted.value("vllm:pd_pull_failures_total", cause="transfer") == pair.decode_ranks
        log = pair.decode.log_since(mark)
        assert name in log
        assert "queue_timeout_s" in log
        assert_serves(router)

    def test_a_prompt_that_its_client_leaves_on_p_fails_on_d_at_once(self, router: Router) -> None:
        assert_fails_when_p_is_left(router, LONGEST)

    def test_a_client_that_leaves_d_frees_both_sides(self, router: Router) -> None:
        pair, name = router.pair, uuid.uuid4().hex
        prompt = make_prompt(LONG, ("left on D", pair.decode.spec.name))
        with ThreadPoolExecutor(1) as clients:
            params = router.prefill_params(name)
            prefill = clients.submit(pair.prefill.client.complete, prompt, 1, kv_transfer_params=params)
            assert pair.decode.client.abandon(prompt, 0.25, kv_transfer_params=router.decode_params(name))
            assert prefill.result(timeout=60).status == 200
        pair.wait_until_at_rest()
        assert_serves(router)

    def test_of_two_requests_of_one_name_the_first_is_served_and_both_servers_say_why(self, router: Router) -> None:
        """P answers the second one, too, but it cannot be followed; D refuses it."""
        pair, name = router.pair, uuid.uuid4().hex
        first, second = (make_prompt(300, (which, pair.name)) for which in ("first", "second of one name"))
        pair.assert_right(router.send(first, name=name).decode, first)
        marks, before = (pair.prefill.log_size, pair.decode.log_size), pair.prefill.client.metrics()
        legs = router.send(second, name=name)
        assert legs.prefill.status == 200
        assert_failed(router, legs.decode.status)
        assert legs.prefill.kv_transfer_params is not None
        end_lease(legs.prefill.kv_transfer_params)
        pair.wait_until_at_rest()
        assert f"transfer id {name} belongs to another request" in pair.prefill.log_since(marks[0])
        assert "each request needs a transfer_id of its own" in pair.decode.log_since(marks[1])
        counted = pair.prefill.client.metrics().since(before)
        assert counted.value("vllm:pd_transfers_total", event="refused") == 1
        assert_serves(router)

    def test_params_of_both_contracts_are_refused(self, router: Router) -> None:
        pair, prompt = router.pair, make_prompt(300, ("both contracts", router.pair.name))
        params = pair.prefill.client.prefill(prompt)
        mixed = params | {"transfer_id": uuid.uuid4().hex}
        assert_failed_pull(pair, prompt, mixed, "params", ("transfer_id and lease_id and remote_block_ids",))
        end_lease(params)
        assert_serves(router)

    def test_another_prompt_of_the_same_name_is_refused(self, router: Router) -> None:
        pair, name = router.pair, uuid.uuid4().hex
        prompt, other = (make_prompt(300, (which, pair.decode.spec.name)) for which in ("one", "other"))
        mark = pair.decode.log_size
        with ThreadPoolExecutor(1) as clients:
            params = router.prefill_params(name)
            prefill = clients.submit(pair.prefill.client.complete, prompt, 1, kv_transfer_params=params)
            before = pair.decode.client.metrics()
            answer = pair.decode_leg(other, router.decode_params(name))
            prefill.result(timeout=60)
        assert_failed(router, answer.status)
        counted = pair.decode.client.metrics().since(before)
        assert counted.value("vllm:pd_pull_failures_total", cause="params") == pair.decode_ranks
        assert "is of another prompt" in pair.decode.log_since(mark)
        pair.wait_until_at_rest()
        assert_serves(router)


@pytest.mark.usefixtures("quiet")
class TestConversions:
    @on(UNEQUAL_LEGS)
    @pytest.mark.parametrize("pair", [("P2", "D1"), ("P1", "D2"), ("P2", "D2")], indirect=True, ids="-".join)
    def test_heads_are_rearranged_chunk_by_chunk(self, router: Router) -> None:
        prompt = make_prompt(LONG, ("unequal legs", router.pair.name))
        assert_pulled_ahead(router, router.assert_right(prompt, decode_first_s=DECODE_FIRST_S))

    @on(WINDOW_LEGS)
    @pytest.mark.parametrize(
        "pair", [("P", "D"), ("P small", "D large"), ("D large", "P small")], indirect=True, ids="-".join
    )
    @pytest.mark.parametrize("tokens", [300, LONG])
    def test_windows_and_blocks_of_other_sizes(self, router: Router, tokens: int) -> None:
        prompt = make_prompt(tokens, ("window legs", router.pair.name, tokens))
        traffic = router.assert_right(prompt, decode_first_s=DECODE_FIRST_S)
        if tokens == LONG:
            assert_pulled_ahead(router, traffic)

    @on(MLA_LEGS)
    @pytest.mark.parametrize("pair", [("TP1", "TP2"), ("TP2", "TP1")], indirect=True, ids="-".join)
    @pytest.mark.parametrize("tokens", [300, LONG])
    def test_latent_vectors_that_all_ranks_hold(self, router: Router, tokens: int) -> None:
        """On CPU, vLLM computes such prompts in a single step, so D only waits ahead of it."""
        prompt = make_prompt(tokens, ("MLA legs", router.pair.name, tokens))
        traffic = router.assert_right(prompt, decode_first_s=DECODE_FIRST_S)
        assert traffic.pulled("pulls_ahead") == router.pair.decode_ranks


@pytest.mark.usefixtures("quiet")
@on(HOST_LEGS)
@pytest.mark.parametrize("pair", [("P", "D")], indirect=True, ids="-".join)
class TestHostMemory:
    def test_both_ends_bring_what_they_keep_in_host_memory(self, router: Router) -> None:
        """P loads the begin of the prompt, and computes the rest in chunks; D loads less of it, and pulls the rest."""
        pair, prompt = router.pair, make_prompt(1200, "host memory at both ends")
        for server, known in ((pair.prefill, 800), (pair.decode, 400)):
            server.client.complete(prompt[:known], 1)
            evict(server, "host memory at both ends")
        with pair.traffic() as traffic:
            legs = router.send(prompt, decode_first_s=DECODE_FIRST_S)
        assert legs.prefill.status == 200, legs.prefill.body
        assert (traffic.loaded("prefill"), traffic.loaded()) == (whole_blocks(800), whole_blocks(400))
        assert traffic.pulled("pull_tokens") == (1199 - whole_blocks(400)) * pair.decode_ranks
        assert (traffic.source("external_kv_transfer"), traffic.source("local_compute")) == (1199, 1)
        assert (traffic.failures(), traffic.leases("granted"), traffic.leases("released")) == (0, 1, 1)
        assert traffic.prefill is not None
        assert traffic.prefill.value("vllm:pd_transfers_total", event="in_host") == 1
        assert_pulled_ahead(router, traffic)
        pair.assert_right(legs.decode, prompt)

    def test_many_at_once_from_all_places_give_the_right_outputs(self, router: Router) -> None:
        prompts = [make_prompt(600 + 100 * number, ("from all places", number)) for number in range(8)]
        for prompt in prompts[::2]:
            router.pair.prefill.client.complete(prompt[:400], 1)
            router.pair.decode.client.complete(prompt[:300], 1)
        with router.pair.traffic() as traffic, ThreadPoolExecutor(len(prompts)) as clients:
            answers = list(clients.map(router.send, prompts))
        for prompt, legs in zip(prompts, answers, strict=True):
            router.pair.assert_right(legs.decode, prompt)
        assert traffic.pulled("pulls_ahead") > 0
