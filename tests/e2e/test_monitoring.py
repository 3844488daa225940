"""P, D and the proxy under a real Prometheus: the dashboard's queries return data, and alerts fire when P is killed."""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.deploy.monitoring import Query, needs_prometheus, queries
from tests.support.deploy.prometheus import Prometheus
from tests.support.e2e.client import MODEL_NAME
from tests.support.e2e.cluster import Server, ServerSpec
from tests.support.e2e.deployments import Deployment, on
from tests.support.e2e.pair import make_prompt
from tests.support.examples.harness import ProxyProcess
from tests.support.waiting import until

pytestmark = [pytest.mark.slow, pytest.mark.monitoring, pytest.mark.timeout(560), needs_prometheus]

#: Alerts that a machine which is short of cores may rightly raise.
OF_THE_MACHINE = {"PDSchedulerStalls", "PDPullsSlow", "PDPullsQueue"}

_HOST = ("cpu_bytes_to_use", 64 << 20)
WATCHED = Deployment(
    "watched",
    (
        ("P", ServerSpec("kv_producer", options=(_HOST, ("lease_ttl_s", 20.0), ("host_transfers", "auto")))),
        (
            "D",
            ServerSpec(
                "kv_consumer",
                load_failure_policy="recompute",
                options=(_HOST, ("host_transfers", "auto")),
            ),
        ),
    ),
    slow=True,
)


@pytest.fixture
def proxy(servers: dict[str, Server]) -> Iterator[ProxyProcess]:
    legs = ["--prefill", servers["P"].client.base_url, "--decode", servers["D"].client.base_url]
    with ProxyProcess(["-m", "pd_proxy", *legs, "--prefill-from", "10"]) as proxy:
        yield proxy


def ask(proxy: ProxyProcess, prompt: list[int], **options: object) -> None:
    body = {"model": MODEL_NAME, "prompt": prompt, "max_tokens": 4, "temperature": 0, **options}
    answer = httpx.post(f"{proxy.url}/v1/completions", json=body, timeout=120, trust_env=False)
    assert answer.status_code == 200, answer.text


def empty(prometheus: Prometheus) -> list[Query]:
    """The queries of the dashboard that return no number: nothing, or NaN, as means and quantiles of nothing are.

    There is no pool.
    """
    asked = [query for query in queries() if "vllm:pd_pool_works" not in query.expression]
    return [query for query in asked if not any(map(is_number, prometheus.query(query.asked("5m"))))]


def is_number(series: dict[str, Any]) -> bool:
    """Whether a panel draws anything of what a query returned."""
    return not math.isnan(float(series["value"][1]))


@on(WATCHED)
def test_panels_have_data_and_alerts_fire_when_p_dies(
    servers: dict[str, Server], proxy: ProxyProcess, tmp_path: Path
) -> None:
    p, d = servers["P"], servers["D"]
    ask(proxy, make_prompt(100, "first"), prompt_logprobs=0)  # begins the proxy's counters
    targets = {"pd-prefill": f"127.0.0.1:{p.port}", "pd-decode": f"127.0.0.1:{d.port}"}
    with Prometheus(tmp_path, targets | {"pd-proxy": proxy.url.removeprefix("http://")}) as prometheus:
        until(lambda: prometheus.value('sum(up{job=~"pd-.+"})') == 3, "all targets are scraped", within_s=60)
        # rate() needs each series twice.
        until(lambda: prometheus.value("min(count_over_time(vllm:pd_pulls_total[5m]))") >= 2, within_s=60)
        for number in range(7):  # one of which proves P, and is not pulled
            ask(proxy, make_prompt(200, f"watched {number}"), stream=True)
        ask(proxy, make_prompt(100, "again"), prompt_logprobs=0)
        until(lambda: prometheus.value("vllm:pd_pulls_total") >= 6, within_s=60)
        until(lambda: prometheus.value("vllm:pd_host_blocks_cached") > 0, within_s=60)
        until(lambda: not empty(prometheus), lambda: f"no data for {empty(prometheus)}", within_s=60)
        for moved in (
            "sum(increase(vllm:pd_pulls_total[5m]))",
            "sum(increase(vllm:pd_pull_bytes_total[5m]))",
            'sum(increase(vllm:pd_leases_total{event="released"}[5m]))',
            'sum(increase(pd_proxy_handover_seconds_count{legs="together"}[5m]))',
            'sum(increase(vllm:pd_host_bytes_total{event="stored"}[5m]))',
        ):
            until(lambda moved=moved: prometheus.value(moved) > 0, moved, within_s=60)  # type: ignore[misc]
        assert prometheus.firing().keys() <= OF_THE_MACHINE

        prompt = make_prompt(200, "never pulled")
        params = p.client.prefill(prompt)
        p.kill()
        completion = d.client.complete(prompt, 4, kv_transfer_params=params)
        assert completion.status == 200, completion.body  # D has computed it
        failed = until(lambda: prometheus.firing().get("PDPullsFail", []), "PDPullsFail", within_s=90)
        assert {alert["cause"] for alert in failed} <= {"unreachable", "read"}
        assert {alert["instance"] for alert in failed} == {targets["pd-decode"]}
        down = until(lambda: prometheus.firing().get("PDTargetDown", []), "PDTargetDown", within_s=150)
        assert [(alert["job"], alert["instance"]) for alert in down] == [("pd-prefill", targets["pd-prefill"])]
