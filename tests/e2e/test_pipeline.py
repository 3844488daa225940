"""Pipeline parallelism: stages of unequal numbers of layers on one side, and none on the other.

vLLM has as many steps under way as there are stages, and several of them may be of one prompt.
"""

import signal
import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import httpx
import pytest

from tests.support.e2e.choice import on_pairs, pairs
from tests.support.e2e.cluster import Cluster, Server
from tests.support.e2e.host_memory import whole_blocks
from tests.support.e2e.legs import Router
from tests.support.e2e.pair import Pair, make_prompt
from tests.support.e2e.pipeline_deployments import PIPELINE, PIPELINE_OF_TWO_RANKS
from tests.support.e2e.trouble import stopped
from tests.support.waiting import until
from transfer.control.messages import TransferState

FROM_STAGES, TO_STAGES, FROM_FOUR = ("PP2", "PP1"), ("PP1", "PP2"), ("TP2 PP2", "TP1")
LONG = 2800
#: Tokens that a server computes at most in a step.
STEP = 256
#: For D to be there when P begins.
DECODE_FIRST_S = 0.3

pytestmark = pytest.mark.layouts
on_all = on_pairs(pairs(PIPELINE, [FROM_STAGES, TO_STAGES]), pairs(PIPELINE_OF_TWO_RANKS, [FROM_FOUR]))
from_stages = on_pairs(pairs(PIPELINE, [FROM_STAGES]), pairs(PIPELINE_OF_TWO_RANKS, [FROM_FOUR]))


@pytest.fixture
def router(pair: Pair) -> Router:
    """A router for the pair of the test."""
    return Router(pair)


@on_all
class TestOneLegAfterTheOther:
    @pytest.mark.parametrize("tokens", [2, 33, 1000])
    def test_a_pulled_prompt_gives_the_same_output(self, pair: Pair, tokens: int) -> None:
        pair.assert_pulls_right(make_prompt(tokens, (tokens, pair.name)))

    def test_concurrent_prompts_give_the_same_outputs(self, pair: Pair) -> None:
        pair.assert_concurrent_pulls_right(12)

    def test_only_blocks_that_the_decode_server_does_not_hold_are_pulled(self, pair: Pair) -> None:
        pair.assert_pulls_the_rest(make_prompt(700, (pair.name, "partial hit")), computed_before=300)

    def test_a_prefix_hit_on_the_prefill_server_is_pulled_whole(self, pair: Pair) -> None:
        prompt = make_prompt(700, (pair.name, "prefilled before"))
        pair.prefill.client.complete(prompt[:500], 1)
        pair.assert_pulls_right(prompt)


@on_all
class TestBothLegsAtOnce:
    def test_a_prompt_is_pulled_while_it_is_computed(self, router: Router) -> None:
        prompt = make_prompt(LONG, ("pipeline", router.pair.name))
        traffic = router.assert_right(prompt, decode_first_s=DECODE_FIRST_S)
        assert traffic.pulled("pulls_ahead") == router.pair.decode_ranks
        assert 0 < traffic.pulled("pull_bytes_ahead") < traffic.pulled("pull_bytes")

    def test_a_prompt_whose_prefill_leg_is_first_gives_the_same_output(self, router: Router) -> None:
        router.assert_right(make_prompt(LONG, ("pipeline, P first", router.pair.name)), decode_first_s=-0.1)

    def test_concurrent_prompts_give_the_same_outputs(self, router: Router) -> None:
        prompts = [make_prompt(100 + 150 * number, ("pipeline", router.pair.name, number)) for number in range(8)]
        with ThreadPoolExecutor(len(prompts)) as clients:
            answers = list(clients.map(router.send, prompts))
        for prompt, legs in zip(prompts, answers, strict=True):
            router.pair.assert_right(legs.decode, prompt)

    def test_prompts_of_one_beginning_that_is_being_computed_give_the_same_outputs(self, router: Router) -> None:
        """The later ones find blocks of the first in the prefix cache while steps that write them are under way."""
        beginning = make_prompt(1500, ("one beginning", router.pair.name))
        prompts = [[*beginning, *make_prompt(100 + 40 * number, ("its end", number))] for number in range(4)]
        with ThreadPoolExecutor(len(prompts)) as clients:
            sent = []
            for prompt in prompts:
                sent.append(clients.submit(router.send, prompt))
                time.sleep(0.1)
            answers = [each.result() for each in sent]
        for prompt, legs in zip(prompts, answers, strict=True):
            router.pair.assert_right(legs.decode, prompt)

    def test_a_second_turn_continues_the_first(self, router: Router) -> None:
        prompt = make_prompt(900, ("first turn", router.pair.name))
        first = router.send(prompt, 32).decode
        longer = [*prompt, *first.tokens, *make_prompt(600, ("second turn", router.pair.name))]
        router.assert_right(longer, hit=whole_blocks(len(prompt) + len(first.tokens) - 1))


def begins_behind_another(router: Router, attempt: int) -> bool:
    """A prompt finds blocks of another one in the prefix cache, which the last stage has yet to fill: it stands still.

    Both are there when P goes on. The other one takes all of the first step, and the prompt finds its blocks in the
    second, which is scheduled while the first is under way. Tells whether it has come early enough for that.
    """
    pair, name = router.pair, uuid.uuid4().hex
    other = make_prompt(STEP + 40, ("another prompt", pair.name, attempt))
    prompt = [*other, *make_prompt(100, "its own end")]
    with ThreadPoolExecutor(3) as clients:
        with stopped(pair.prefill, "Worker_PP1"):
            with stopped(pair.prefill, "EngineCore"):
                clients.submit(pair.prefill.client.complete, other, 1)
                time.sleep(0.5)
                params = router.prefill_params(name)
                prefill = clients.submit(pair.prefill.client.complete, prompt, 1, kv_transfer_params=params)
                decode = clients.submit(pair.decode_leg, prompt, router.decode_params(name))
                time.sleep(0.5)
            time.sleep(1.0)  # in which P begins the second step; D could not read from a process that stands still
            followed = router.followed(name)
        assert prefill.result(60.0).status == 200
        pair.assert_right(decode.result(60.0), prompt)
    assert followed.tokens == 0
    return followed.state == TransferState.COMPUTING


@from_stages
def test_what_the_last_stage_has_yet_to_write_is_not_read(router: Router) -> None:
    assert any(begins_behind_another(router, attempt) for attempt in range(5))


@on_pairs(pairs(PIPELINE, [FROM_STAGES]))
def test_prompts_that_p_preempts_give_the_same_outputs(router: Router) -> None:
    """Two requests that P answers itself leave too few blocks for any of them, until they end."""
    prompts = [make_prompt(LONG, ("preempted in stages", number)) for number in range(4)]
    own = [make_prompt(1500, ("P's own, in stages", number)) for number in range(2)]
    router.assert_right_though_preempted(prompts, own)


@on_pairs(pairs(PIPELINE, [FROM_STAGES]))
class TestAPrefillServerThatDies:
    """All of it, or its second stage alone, after which vLLM ends the rest."""

    dying = pytest.mark.parametrize("title", ["", "Worker_PP1"], ids=["all", "a stage"])

    @dying
    def test_a_pull_under_way_fails_and_the_next_server_is_pulled_from(
        self, pair: Pair, cluster: Cluster, title: str
    ) -> None:
        prompt = make_prompt(1500, ("dies", title))
        params = pair.prefill.client.prefill(prompt)
        with ThreadPoolExecutor(1) as clients:
            with stopped(pair.prefill):
                pulling = clients.submit(pair.decode_leg, prompt, params)
                time.sleep(1.0)
                assert not pulling.done()
                end(pair.prefill, title)
            completion = pulling.result(90.0)
        assert completion.status == 500, completion.body
        assert_comes_back(pair, cluster)

    @dying
    def test_a_prompt_that_it_computes_fails_and_the_next_server_is_pulled_from(
        self, pair: Pair, cluster: Cluster, title: str
    ) -> None:
        router, name = Router(pair), uuid.uuid4().hex
        prompt, before = make_prompt(LONG, ("dies while it computes", title)), router.transfers()
        with ThreadPoolExecutor(2) as clients:
            decode = clients.submit(pair.decode_leg, prompt, router.decode_params(name))
            params = router.prefill_params(name)
            with suppress(httpx.HTTPError):
                prefill = clients.submit(pair.prefill.client.complete, prompt, 1, kv_transfer_params=params)
                router.wait_for("begun", since=before)
                end(pair.prefill, title)
                assert prefill.result(90.0).status == 500
            completion = decode.result(90.0)
        assert completion.status == 500, completion.body
        assert_comes_back(pair, cluster)


def end(server: Server, title: str) -> None:
    """Kill the processes of a server whose command lines contain ``title``."""
    assert server.processes(title)
    server.signal(signal.SIGKILL, title)


def assert_comes_back(pair: Pair, cluster: Cluster) -> None:
    """P has ended, and starts again; D pulls from it."""
    until(lambda: not pair.prefill.client.is_healthy(), within_s=60.0)
    cluster.restart(pair.prefill)
    pair.get_acquainted()
    pair.assert_pulls_right(make_prompt(1000, ("after it died", time.monotonic())))
    Router(pair).assert_right(make_prompt(LONG, ("after it died, both legs", time.monotonic())))
