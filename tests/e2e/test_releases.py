"""Servers of other vLLM releases, alone and together with the one that the tests run on, in both directions.

What releases do differently is run here: how they learn of failed pulls, when they reuse freed blocks, how their queue
of free blocks is ordered, and when an engine steps without requests. ``make test-versions`` makes their environments
and runs these tests.
"""

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest
import torch

from pd_connector.vllm.releases.installed import release_of
from tests.support.e2e.client import KVTransferParams
from tests.support.e2e.cluster import BLOCK_SIZE, Server
from tests.support.e2e.deployments import Deployment
from tests.support.e2e.hybrid_deployments import QWEN3_NEXT_BLOCK
from tests.support.e2e.pair import Pair, assert_failed_pull, assert_same_output, end_lease, make_prompt
from tests.support.e2e.release_servers import release_borders, release_hybrids, release_pair, release_windows
from tests.support.process import free_ports
from tests.support.releases import OTHERS, WITH_LAYOUTS, interpreter
from tests.support.waiting import until

pytestmark = pytest.mark.releases

DIRECTIONS = [("other", "installed"), ("installed", "other")]
WITH_ALONE = [*DIRECTIONS, ("other", "other fail")]
BOTH_POLICIES = [("installed", "other"), ("other", "other fail")]
#: The release that learns of failed pulls by block ids.
BY_BLOCKS = "0.23"
#: Nearly as many tokens as a prompt may have.
LONG = 1900


def each(deploy: Callable[[str], Deployment], *releases: str) -> pytest.MarkDecorator:
    """The test runs on what is deployed of each release, all of ``OTHERS`` unless named, where its environment is."""
    params = []
    for release in releases or OTHERS:
        reason = f"make test-versions makes the environment of vLLM {release}"
        mark = pytest.mark.skipif(not interpreter(release).exists(), reason=reason)
        deployment = deploy(release)
        params.append(pytest.param(deployment, id=deployment.name, marks=mark))
    return pytest.mark.parametrize("deployment", params, indirect=True)


def on(*pairs: tuple[str, str]) -> pytest.MarkDecorator:
    """The test runs with each of the pairs of a prefill and a decode server."""
    return pytest.mark.parametrize("pair", pairs, indirect=True, ids=" to ".join)


def evict(server: Server, seed: object) -> None:
    """Compute prompts that take all blocks of a server's device."""
    left = server.client.cache_blocks()
    while left > 1:
        server.client.complete(make_prompt(min(left, 40) * BLOCK_SIZE - 1, (server.log.stem, seed, left)), 1)
        left -= 40


def _blocks_of_no_cache(params: KVTransferParams) -> None:
    params["remote_block_ids"] = [[10**6] * len(table) for table in params["remote_block_ids"]]


#: Ways in which a pull fails: what is done to its params, the cause that is counted, and what the log names.
FAILURES: list[tuple[Callable[[KVTransferParams], object], str, str]] = [
    (end_lease, "lease", "lease"),
    (_blocks_of_no_cache, "params", "1000000"),
]
each_failure = pytest.mark.parametrize(("spoil", "cause", "logged"), FAILURES, ids=[cause for _, cause, _ in FAILURES])


def assert_resets(pair: Pair) -> None:
    """Nothing is pulled that the prefill server held before it was reset; what it computes afterwards is."""
    prompt = make_prompt(300, (pair.name, "reset"))
    params = pair.prefill.client.prefill(prompt)
    assert pair.prefill.client.reset_prefix_cache()
    pair.prefill.client.complete(prompt, 1)  # the books come with a step
    assert_failed_pull(pair, prompt, params, "lease", ("lease",))
    with pair.traffic() as traffic:
        completion = pair.disaggregate(prompt, cache_salt="after the reset")
    assert traffic.pulled("pulls") == 1
    pair.assert_right(completion, prompt)


def assert_fails_and_serves_on(
    pair: Pair, spoil: Callable[[KVTransferParams], object], cause: str, logged: str
) -> None:
    """A spoilt pull ends as the decode server's policy says, and the next one of the same prompt is right."""
    prompt = make_prompt(200, (pair.name, cause))
    params = pair.prefill.client.prefill(prompt)
    spoilt = dict(params)
    spoil(spoilt)
    assert_failed_pull(pair, prompt, spoilt, cause, (logged,))
    end_lease(params)
    pair.assert_right(pair.disaggregate(prompt, cache_salt="again"), prompt)


@each(release_pair)
class TestPlainAttention:
    @on(*WITH_ALONE)
    @pytest.mark.parametrize("tokens", [2, 33, 1000])
    def test_a_pulled_prompt_gives_the_same_output(self, pair: Pair, tokens: int) -> None:
        pair.assert_pulls_right(make_prompt(tokens, (tokens, pair.name)))

    @on(*WITH_ALONE)
    def test_concurrent_prompts_give_the_same_outputs(self, pair: Pair) -> None:
        pair.assert_concurrent_pulls_right(8)

    @on(*WITH_ALONE)
    def test_only_blocks_that_the_decode_server_does_not_hold_are_pulled(self, pair: Pair) -> None:
        pair.assert_pulls_the_rest(make_prompt(200, (pair.name, "partial hit")), computed_before=100)

    @pytest.mark.parametrize("server", ["other", "other fail"], indirect=True)
    def test_the_log_says_what_the_release_cannot_give_and_warns_of_no_tested_one(self, server: Server) -> None:
        log = server.log_since()
        release = server.spec.python.rpartition(".venv-vllm-")[2].partition("/")[0]
        major, minor = (int(number) for number in release.split("."))
        for limit in release_of((major, minor)).limits:
            assert limit in log
        assert "is not among the releases" not in log


@each(release_pair)
class TestFailedPulls:
    @on(*BOTH_POLICIES)
    @each_failure
    def test_the_request_ends_as_the_policy_says(
        self, pair: Pair, spoil: Callable[[KVTransferParams], object], cause: str, logged: str
    ) -> None:
        assert_fails_and_serves_on(pair, spoil, cause, logged)

    @on(("installed", "other"))
    def test_a_pull_from_a_port_where_nobody_answers_ends(self, pair: Pair) -> None:
        """It is a canary, which takes the whole time that P has to answer; its request waits for nothing."""
        prompt = make_prompt(200, (pair.name, "nobody answers"))
        params = pair.prefill.client.prefill(prompt)
        (port,) = free_ports(1)
        with pair.traffic() as traffic:
            pair.assert_right(pair.decode_leg(prompt, params | {"remote_port": port}), prompt)
            end_lease(params)
        assert traffic.decode is not None
        assert traffic.decode.value("vllm:pd_canaries_total", outcome="failed") == 1
        pair.assert_right(pair.disaggregate(prompt, cache_salt="again"), prompt)

    @on(*BOTH_POLICIES)
    def test_a_running_request_that_shares_blocks_with_the_failed_one_goes_on(self, pair: Pair) -> None:
        """Where failures are told by block ids, no block that others use may be among them."""
        begin = make_prompt(100, (pair.name, "shared"))
        prompt = [*begin, *make_prompt(100, (pair.name, "not shared"))]
        pair.decode.client.complete(begin, 1)
        params = pair.prefill.client.prefill(prompt)
        end_lease(params)
        with ThreadPoolExecutor(1) as pool:
            running = pool.submit(pair.decode.client.complete, begin, 300)
            failed = pair.decode_leg(prompt, params)
            assert not running.done(), "the other request has ended before the pull has failed"
            pair.assert_right(running.result(), begin)
        if pair.decode.spec.load_failure_policy == "recompute":
            pair.assert_right(failed, prompt)
        else:
            assert failed.status == 500, failed.body


@each(release_pair)
class TestRequestsThatLeave:
    @on(*WITH_ALONE)
    def test_at_any_moment_of_the_pull_they_hold_nothing(self, pair: Pair) -> None:
        prompt = make_prompt(LONG, (pair.name, "left in pull"))
        delays = [0.001 * 1.6**i for i in range(12)]  # up to 0.18 s
        with pair.traffic() as traffic:
            for i, delay in enumerate(delays):
                params = pair.prefill.client.prefill(prompt)
                pair.decode.client.abandon(
                    prompt, delay, max_tokens=100, kv_transfer_params=params, cache_salt=f"left after {i}"
                )
        assert traffic.leases("granted") == len(delays)
        assert traffic.leases("expired") == 0, "a lease was left to expire although somebody knew that it was over"
        pair.assert_right(pair.disaggregate(prompt), prompt)

    @on(*WITH_ALONE)
    def test_their_blocks_are_pulled_into_at_once_and_every_output_is_right(self, pair: Pair) -> None:
        """The cache holds few prompts: pulls are given blocks that the model was writing to a moment ago."""
        prompts = [make_prompt(900, (pair.name, "in their place", number)) for number in range(4)]
        expected = [pair.decode.client.compute(prompt) for prompt in prompts]
        with ThreadPoolExecutor(3) as pool:
            for turn in range(3):
                leaving = pool.submit(self._leave_while_decoding, pair, turn)
                answers = list(pool.map(pair.disaggregate, prompts))
                leaving.result()
                for answer, right in zip(answers, expected, strict=True):
                    assert_same_output(answer, right)
                until(pair.decode.client.reset_prefix_cache, "the decode server forgets the prompts")

    @staticmethod
    def _leave_while_decoding(pair: Pair, turn: int) -> None:
        for number in range(4):
            prompt = make_prompt(700, (pair.name, "leaves", turn, number))
            with pair.decode.client.stream(prompt, 500) as tokens:
                for _ in range(2):
                    next(tokens)


@each(release_pair)
class TestHostMemory:
    @pytest.mark.parametrize("server", ["other", "other fail"], indirect=True)
    def test_an_evicted_prompt_is_loaded_from_host_memory(self, server: Server) -> None:
        """One server stores what it computes, the other what it is about to evict."""
        prompt = make_prompt(1000, (server.log.stem, "evicted"))
        first = server.client.complete(prompt)
        evict(server, "evicted")
        before = server.client.metrics()
        again = server.client.complete(prompt)
        counted = server.client.metrics().since(before)
        held = 999 // BLOCK_SIZE * BLOCK_SIZE
        assert counted.value("vllm:pd_host_tokens_total") == held
        assert counted.prompt_tokens("external_kv_transfer") == held
        assert_same_output(again, first)
        assert_same_output(again, server.client.compute(prompt))

    @pytest.mark.parametrize("server", ["other", "other fail"], indirect=True)
    def test_preempted_requests_give_the_answers_that_they_give_alone(self, server: Server) -> None:
        prompts = [make_prompt(300, (server.log.stem, "preempted", number)) for number in range(8)]
        before = server.client.metrics()
        with ThreadPoolExecutor(len(prompts)) as pool:
            together = list(pool.map(lambda prompt: server.client.complete(prompt, 250), prompts))
        assert server.client.metrics().since(before).value("vllm:num_preemptions_total") > 0
        for prompt, completion in zip(prompts, together, strict=True):
            assert_same_output(completion, server.client.compute(prompt, 250))

    @on(("installed", "other"))
    def test_a_prompt_comes_from_the_device_host_memory_and_the_prefill_server(self, pair: Pair) -> None:
        prompt = make_prompt(LONG, (pair.name, "three sources"))
        pair.decode.client.complete(prompt[:1600], 1)
        pair.decode.client.complete(make_prompt(40 * BLOCK_SIZE - 1, (pair.name, "evicts the end")), 1)
        with pair.traffic() as traffic:
            completion = pair.disaggregate(prompt)
        on_device = traffic.source("local_cache_hit")
        assert on_device > 0
        assert traffic.loaded() == 1600 - on_device > 0
        assert traffic.pulled("pull_tokens") == LONG - 1 - 1600
        assert traffic.source("local_compute") == 1
        pair.assert_right(completion, prompt)

    @on(("other", "installed"))
    def test_what_a_prefill_server_loads_from_host_memory_can_be_pulled(self, pair: Pair) -> None:
        prompt = make_prompt(1500, (pair.name, "loaded and pulled"))
        pair.prefill.client.complete(prompt[:1216], 1)
        evict(pair.prefill, "loaded and pulled")
        with pair.traffic() as traffic:
            completion = pair.disaggregate(prompt)
        assert traffic.loaded("prefill") == 1216
        assert traffic.pulled("pull_tokens") == 1499
        pair.assert_right(completion, prompt)


@each(release_pair)
class TestEngine:
    @on(("other", "other fail"), ("other", "installed"))
    def test_after_a_reset_no_block_is_pulled_that_was_held_before(self, pair: Pair) -> None:
        assert_resets(pair)

    @pytest.mark.parametrize("server", ["other", "other fail"], indirect=True)
    def test_nothing_comes_back_from_host_memory_after_a_reset(self, server: Server) -> None:
        prompt = make_prompt(400, (server.log.stem, "reset"))
        server.client.complete(prompt)
        evict(server, "reset")
        assert server.client.reset_prefix_cache()
        before = server.client.metrics()
        server.client.complete(prompt)
        counted = server.client.metrics().since(before)
        assert counted.prompt_tokens("local_compute") == 400
        assert counted.value("vllm:pd_host_tokens_total") == 0

    @on(("other", "installed"))
    def test_a_prefill_engine_without_requests_steps_only_when_a_lease_has_ended(self, pair: Pair) -> None:
        (engine,) = pair.prefill.processes("EngineCore")
        params = pair.prefill.client.prefill(make_prompt(300, (pair.name, "idle")))
        time.sleep(1.0)  # what the request has left to do
        before = psutil.Process(engine).cpu_times()
        time.sleep(3.0)
        after = psutil.Process(engine).cpu_times()
        busy_s = after.user + after.system - before.user - before.system
        assert pair.prefill.client.metrics().value("vllm:pd_leases_active") == 1, "the lease has ended meanwhile"
        assert busy_s < 0.6, f"an engine with a lease and without requests was busy for {busy_s:.2f} s of 3 s"
        end_lease(params)
        pair.wait_until_at_rest()  # the blocks are given back without a request


@each(release_windows)
class TestSlidingWindows:
    @on(*DIRECTIONS)
    @pytest.mark.parametrize("tokens", [33, 1000])
    def test_a_pulled_prompt_gives_the_same_output(self, pair: Pair, tokens: int) -> None:
        pair.assert_pulls_right(make_prompt(tokens, (tokens, pair.name)))


@each(release_windows, BY_BLOCKS)
class TestSlidingWindowsByBlocks:
    """vLLM 0.23 learns of failures by block ids, and by itself serves connectors with one cache group only."""

    @on(("other", "other fail"))
    def test_a_pulled_prompt_gives_the_same_output(self, pair: Pair) -> None:
        pair.assert_pulls_right(make_prompt(1000, (1000, pair.name)))

    @on(*BOTH_POLICIES)
    @each_failure
    def test_a_failed_pull_ends_as_the_policy_says(
        self, pair: Pair, spoil: Callable[[KVTransferParams], object], cause: str, logged: str
    ) -> None:
        assert_fails_and_serves_on(pair, spoil, cause, logged)

    @on(*BOTH_POLICIES)
    def test_requests_that_leave_at_any_moment_of_the_pull_hold_nothing(self, pair: Pair) -> None:
        prompt = make_prompt(LONG, (pair.name, "left in pull"))
        with pair.traffic() as traffic:
            for i in range(8):
                params = pair.prefill.client.prefill(prompt)
                pair.decode.client.abandon(
                    prompt, 0.002 * 2**i, max_tokens=100, kv_transfer_params=params, cache_salt=f"left after {i}"
                )
        assert traffic.leases("expired") == 0
        pair.assert_right(pair.disaggregate(prompt), prompt)

    @on(*BOTH_POLICIES)
    def test_after_a_reset_no_block_is_pulled_that_was_held_before(self, pair: Pair) -> None:
        assert_resets(pair)

    @on(*BOTH_POLICIES)
    def test_what_is_found_in_a_full_cache_and_what_is_pulled_behind_it_keep_apart(self, pair: Pair) -> None:
        """Prompts of a common beginning, which the decode server holds among the blocks that it takes next."""
        begin = make_prompt(400, (pair.name, "common"))
        prompts = [[*begin, *make_prompt(700, (pair.name, "their own", number))] for number in range(5)]
        expected = [pair.decode.client.compute(prompt) for prompt in prompts]
        for turn in range(2):
            for prompt, right in zip(prompts, expected, strict=True):
                assert_same_output(pair.disaggregate(prompt), right)
                pair.decode.client.complete(make_prompt(200 * (turn + 1), (pair.name, "others", turn)), 1)


@each(release_hybrids, *WITH_LAYOUTS)
@pytest.mark.skipif(
    torch.cpu._is_avx512_bf16_supported(),
    reason="vLLM before 0.32 packs convolutions as bfloat16 on a CPU that knows it, and cannot those of float32",
)
class TestHybrids:
    @on(*DIRECTIONS)
    @pytest.mark.parametrize("tokens", [2, 97, 1000])
    def test_states_give_the_same_output(self, pair: Pair, tokens: int) -> None:
        pair.assert_pulls_right(make_prompt(tokens, (tokens, pair.name)))


@each(release_borders, *WITH_LAYOUTS)
class TestBorders:
    """The model computes in bfloat16, so the last token of a prompt is alone in its step on one server, too."""

    @on(*DIRECTIONS)
    def test_the_next_turn_pulls_only_what_is_new(self, pair: Pair) -> None:
        turn = make_prompt(4 * QWEN3_NEXT_BLOCK + 1, (pair.name, "turns"))
        pair.assert_next_turn_pulls_the_rest(turn, 700, QWEN3_NEXT_BLOCK)
