"""Schedulers that vllm-ascend can put in the place of vLLM's: they work with the connector, or are refused by name."""

from dataclasses import replace

import pytest

from tests.support.ascend.servers import BALANCE, ONE_RANK, additional_config
from tests.support.e2e.cluster import Cluster, ServerSpec
from tests.support.e2e.deployments import on
from tests.support.e2e.pair import Pair, make_prompt


@on(BALANCE)
@pytest.mark.parametrize("pair", [("P", "D")], indirect=True, ids="-".join)
class TestBalanceScheduler:
    """One engine has nobody to balance with; the scheduler's own ``schedule`` is in use all the same."""

    def test_a_pulled_prompt_gives_the_same_output(self, pair: Pair) -> None:
        pair.assert_pulls_right(make_prompt(1000, (pair.name, "balance")))

    def test_concurrent_prompts_give_the_same_outputs(self, pair: Pair) -> None:
        pair.assert_concurrent_pulls_right(4)


def refused(cluster: Cluster, spec: ServerSpec, says: str) -> None:
    with pytest.raises(RuntimeError, match=says):
        cluster.start([spec])


def test_the_recompute_scheduler_is_refused_by_name(cluster: Cluster) -> None:
    consumer = dict(ONE_RANK.servers)["D"]
    options = additional_config(recompute_scheduler_enable=True)
    refused(cluster, replace(consumer, arguments=(*consumer.arguments, *options)), "recompute_scheduler_enable: ")


def test_quantised_caches_are_refused_by_name(cluster: Cluster) -> None:
    producer = dict(ONE_RANK.servers)["P"]
    refused(
        cluster,
        replace(producer, arguments=(*producer.arguments, "--kv-cache-dtype", "int8")),
        "kv_cache_dtype = int8: ",
    )
