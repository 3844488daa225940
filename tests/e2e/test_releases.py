"""Servers of other vLLM releases, alone and together with the one that the tests run on, in both directions.

``make test-versions`` makes their environments and runs these tests.
"""

import pytest

from tests.support.e2e.cluster import BLOCK_SIZE, Server
from tests.support.e2e.deployments import Deployment, release_pair, release_windows
from tests.support.e2e.pair import Pair, assert_failed_pull, assert_same_output, end_lease, make_prompt
from tests.support.releases import OTHERS, interpreter

pytestmark = pytest.mark.releases

DIRECTIONS = [("other", "installed"), ("installed", "other")]
WITH_ALONE = [*DIRECTIONS, ("other", "other fail")]


def each(*deployments: Deployment) -> pytest.MarkDecorator:
    """The test runs on each of the deployments, which are in the order of ``OTHERS``, where its environment is."""
    params = [
        pytest.param(
            deployment,
            id=deployment.name,
            marks=pytest.mark.skipif(
                not interpreter(release).exists(), reason=f"make test-versions makes the environment of vLLM {release}"
            ),
        )
        for release, deployment in zip(OTHERS, deployments, strict=True)
    ]
    return pytest.mark.parametrize("deployment", params, indirect=True)


@each(*(release_pair(release) for release in OTHERS))
class TestPlainAttention:
    @pytest.mark.parametrize("pair", WITH_ALONE, indirect=True, ids=" to ".join)
    @pytest.mark.parametrize("tokens", [2, 33, 1000])
    def test_a_pulled_prompt_gives_the_same_output(self, pair: Pair, tokens: int) -> None:
        pair.assert_pulls_right(make_prompt(tokens, (tokens, pair.name)))

    @pytest.mark.parametrize("pair", DIRECTIONS, indirect=True, ids=" to ".join)
    def test_concurrent_prompts_give_the_same_outputs(self, pair: Pair) -> None:
        pair.assert_concurrent_pulls_right(8)

    @pytest.mark.parametrize("pair", DIRECTIONS, indirect=True, ids=" to ".join)
    def test_only_blocks_that_the_decode_server_does_not_hold_are_pulled(self, pair: Pair) -> None:
        pair.assert_pulls_the_rest(make_prompt(200, (pair.name, "partial hit")), computed_before=100)

    @pytest.mark.parametrize(
        "pair", [("installed", "other"), ("installed", "other fail")], indirect=True, ids=" to ".join
    )
    def test_a_pull_whose_lease_has_ended_ends_as_the_policy_says(self, pair: Pair) -> None:
        prompt = make_prompt(200, (pair.name, "no lease"))
        params = pair.prefill.client.prefill(prompt)
        end_lease(params)
        assert_failed_pull(pair, prompt, params, "lease", ("lease",))

    @pytest.mark.parametrize("server", ["other"], indirect=True)
    def test_an_evicted_prompt_is_loaded_from_host_memory(self, server: Server) -> None:
        prompt = make_prompt(1000, (server.log.stem, "evicted"))
        first = server.client.complete(prompt)
        for number in range(3):  # more than the device holds
            server.client.complete(make_prompt(40 * BLOCK_SIZE - 1, (server.log.stem, "evicting", number)), 1)
        before = server.client.metrics()
        again = server.client.complete(prompt)
        counted = server.client.metrics().since(before)
        held = 999 // BLOCK_SIZE * BLOCK_SIZE
        assert counted.value("vllm:pd_host_tokens_total") == held
        assert counted.prompt_tokens("external_kv_transfer") == held
        assert_same_output(again, first)
        assert_same_output(again, server.client.compute(prompt))


@each(*(release_windows(release) for release in OTHERS))
class TestSlidingWindows:
    @pytest.mark.parametrize("pair", DIRECTIONS, indirect=True, ids=" to ".join)
    @pytest.mark.parametrize("tokens", [33, 1000])
    def test_a_pulled_prompt_gives_the_same_output(self, pair: Pair, tokens: int) -> None:
        pair.assert_pulls_right(make_prompt(tokens, (tokens, pair.name)))
