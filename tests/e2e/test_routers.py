"""Routers in front of real servers: the example proxy with both legs at once, and vllm-router as it comes from PyPI.

vllm-router and smg are run from environments of their own, as vllm-router needs other versions of packages than vLLM.
Their commands are taken from PD_CONNECTOR_VLLM_ROUTER and PD_CONNECTOR_SMG, or from the path; their tests are skipped
where there is none. Of others, whole requests are replayed.
"""

import json
import os
import random
import shutil
import string
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.e2e.client import MODEL_NAME, Client
from tests.support.e2e.cluster import BLOCK_SIZE, Server
from tests.support.e2e.deployments import ROUTED, bootstrap_port, on
from tests.support.e2e.fixtures import Acquaintance, meet
from tests.support.e2e.pair import Pair, Traffic, make_prompt, make_text, wait_until_at_rest
from tests.support.e2e.router_bodies import AT_ONCE, IN_TURN
from tests.support.e2e.routers import CHATS_TOO, answer, running, text_answered
from tests.support.examples.balancer import Balancer
from tests.support.examples.harness import ProxyProcess
from tests.support.examples.minimal import MinimalProxy
from tests.support.process import free_ports
from tests.support.waiting import until

pytestmark = [pytest.mark.routers, on(ROUTED)]

LONG = 2800
ROUTER = os.environ.get("PD_CONNECTOR_VLLM_ROUTER") or shutil.which("vllm-router") or ""
SMG = os.environ.get("PD_CONNECTOR_SMG") or shutil.which("smg") or ""
#: Choices of each prompt; vLLM wants sampling switched on for them.
TWO: dict[str, Any] = {"n": 2, "temperature": 1.0, "top_k": 1, "logprobs": 1}
FIGURES = ("prompt_tokens", "completion_tokens", "total_tokens")
Proxied = Callable[..., "Proxy"]


class Proxy:
    """The example proxy as a process, and a client of it."""

    def __init__(self, process: ProxyProcess) -> None:
        self.process = process
        self.client = Client(process.url)

    def count(self, sample: str) -> float:
        """A line of the proxy's own metrics; 0 where it is not there."""
        lines = httpx.get(f"{self.process.url}/metrics", trust_env=False).text.splitlines()
        return next((float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(f"{sample} ")), 0.0)

    def stream(self, prompt: list[int], **changes: Any) -> list[dict[str, Any]]:
        """The events of a greedy stream."""
        body = {"model": MODEL_NAME, "prompt": prompt, "max_tokens": 16, "temperature": 0.0, "ignore_eos": True}
        body |= {"stream": True} | changes
        response = httpx.post(f"{self.process.url}/v1/completions", json=body, timeout=120, trust_env=False)
        assert response.status_code == 200, response.text
        lines = [line.removeprefix("data: ") for line in response.text.splitlines() if line]
        assert lines.pop() == "[DONE]", response.text
        return [json.loads(line) for line in lines]


@pytest.fixture
def proxied(servers: dict[str, Server]) -> Iterator[Proxied]:
    """Starts the proxy in front of the named prefill servers and D; all have answered it once."""
    with ExitStack() as stack:

        def start(*prefill: str, **options: str) -> Proxy:
            arguments = [argument for name in prefill for argument in ("--prefill", servers[name].client.base_url)]
            arguments += [f"--{name.replace('_', '-')}={value}" for name, value in options.items()]
            arguments += ["--decode", servers["D"].client.base_url]
            proxy = Proxy(stack.enter_context(ProxyProcess(["-m", "pd_proxy", *arguments])))
            stack.callback(proxy.client.close)
            for number in range(len(prefill)):
                prompt = make_prompt(33, ("introduced", number, time.monotonic()))
                assert proxy.client.complete(prompt).status == 200
            return proxy

        yield start


@pytest.fixture
def pulls(servers: dict[str, Server], acquainted: set[Acquaintance]) -> Pair:
    """The first prefill server and D, which have met."""
    pair = Pair(servers["P"], servers["D"])
    meet(pair, acquainted)
    return pair


class TestProxy:
    @pytest.mark.parametrize("tokens", [2, 33, 257, LONG])
    def test_both_legs_at_once_give_the_same_output(self, proxied: Proxied, pulls: Pair, tokens: int) -> None:
        proxy, prompt = proxied("P"), make_prompt(tokens, ("through the proxy", tokens))
        with pulls.traffic() as traffic:
            completion = proxy.client.complete(prompt)
        assert traffic.source("external_kv_transfer") == tokens - 1
        assert traffic.source("local_compute") == 1
        assert traffic.failures() == 0
        assert (traffic.leases("granted"), traffic.leases("released")) == (1, 1)
        if tokens == LONG:
            assert traffic.pulled("pulls_ahead") == 1
        assert proxy.count('pd_proxy_legs_total{legs="together"}') == 1
        pulls.assert_right(completion, prompt)

    def test_concurrent_requests_over_two_prefill_servers(self, proxied: Proxied, pulls: Pair) -> None:
        proxy = proxied("P", "P other")
        prompts = [make_prompt(100 + 150 * number, ("concurrent, proxied", number)) for number in range(8)]
        with ThreadPoolExecutor(len(prompts)) as clients:
            completions = list(clients.map(proxy.client.complete, prompts))
        for prompt, completion in zip(prompts, completions, strict=True):
            pulls.assert_right(completion, prompt)
        assert proxy.count('pd_proxy_legs_total{legs="together"}') == len(prompts)

    def test_prefill_servers_behind_one_url_share_the_prompts(self, servers: dict[str, Server], pulls: Pair) -> None:
        """As a Service of Kubernetes has them, which chooses one for each connection."""
        p = [servers[name].client for name in ("P", "P other")]
        prompts = [make_prompt(100 + 90 * number, ("behind one URL", number)) for number in range(12)]
        with ExitStack() as stack:
            balancer = Balancer(stack, *(each.base_url for each in p))
            legs = ["--prefill", balancer.url, "--decode", servers["D"].client.base_url]
            proxy = Proxy(stack.enter_context(ProxyProcess(["-m", "pd_proxy", *legs])))
            stack.callback(proxy.client.close)
            with pulls.traffic() as traffic, ThreadPoolExecutor(4) as clients:
                before = [each.metrics().value("vllm:pd_leases_total", event="granted") for each in p]
                completions = list(clients.map(proxy.client.complete, prompts))
                granted = [
                    each.metrics().value("vllm:pd_leases_total", event="granted") - was
                    for each, was in zip(p, before, strict=True)
                ]
            for prompt, completion in zip(prompts, completions, strict=True):
                pulls.assert_right(completion, prompt)
            assert min(granted) >= 2
            assert traffic.failures() == 0
            assert traffic.pulled("pulls") >= len(prompts) - 2  # each P is proven by one that D computes

    @pytest.mark.parametrize("legs", ["together", "in-turn"])
    def test_the_choices_of_a_request_share_one_pull(self, proxied: Proxied, pulls: Pair, legs: str) -> None:
        proxy, prompt = proxied("P", legs=legs), make_prompt(257, ("choices", legs))
        with pulls.traffic() as traffic:
            choices = proxy.client.choices(prompt, 3, temperature=1.0, top_k=1)
        assert (traffic.pulled("pulls"), traffic.failures()) == (1, 0)
        assert (traffic.leases("granted"), traffic.leases("released")) == (1, 1)
        assert choices == [pulls.decode.client.compute(prompt).tokens] * 3

    @pytest.mark.parametrize(("stream", "changes"), [(False, TWO), (True, TWO), (True, {})])
    def test_several_prompts_are_answered_as_by_one_server(
        self, proxied: Proxied, pulls: Pair, stream: bool, changes: dict[str, Any]
    ) -> None:
        proxy = proxied("P")
        prompts = [make_prompt(tokens, ("several", tokens, stream, *changes)) for tokens in (33, 257, 700)]
        body = {"model": MODEL_NAME, "prompt": prompts, "max_tokens": 16, "temperature": 0.0, "ignore_eos": True}
        body |= {"stream": stream, "stream_options": {"include_usage": True} if stream else None} | changes
        with pulls.traffic() as traffic:
            choices, usage = _choices(proxy.process.url, body)
        assert (traffic.pulled("pulls"), traffic.failures(), traffic.leases("granted")) == (3, 0, 3)
        expected, figures = _choices(pulls.decode.client.base_url, body | {"cache_salt": f"alone {stream}"})
        assert len(expected) == 3 * changes.get("n", 1)
        assert choices.keys() == expected.keys()
        for index, choice in expected.items():
            assert choices[index].pop("token_logprobs") == pytest.approx(choice.pop("token_logprobs"), abs=1e-3)
            assert choices[index] == choice
        assert {name: usage[name] for name in FIGURES} == {name: figures[name] for name in FIGURES}

    def test_a_prompt_that_is_too_long_is_refused_at_once(self, proxied: Proxied) -> None:
        proxy = proxied("P")
        start = time.monotonic()
        refused = proxy.client.complete(make_prompt(20_000, "too long"))
        assert (refused.status, "maximum" in refused.body) == (400, True), refused.body
        assert time.monotonic() - start < 20

    def test_a_prefill_server_that_is_killed_in_the_middle_of_a_prompt_is_replaced(
        self, proxied: Proxied, pulls: Pair, servers: dict[str, Server]
    ) -> None:
        proxy, prompt = proxied("P", "P other"), make_prompt(LONG, ("killed", time.monotonic()))
        with ThreadPoolExecutor(1) as clients:
            completion = clients.submit(proxy.client.complete, prompt)
            self._wait_until_computing(servers["P"])
            servers["P"].kill()
            pulls.assert_right(completion.result(timeout=120), prompt)
        assert "prefill_retries=1" in proxy.process.log
        wait_until_at_rest(servers["P other"])
        wait_until_at_rest(servers["D"])

    def test_a_client_that_leaves_frees_both_servers(self, proxied: Proxied, pulls: Pair) -> None:
        proxy, prompt = proxied("P"), make_prompt(LONG, ("left", time.monotonic()))
        with ThreadPoolExecutor(1) as clients:
            left = clients.submit(proxy.client.abandon, prompt, 0.4, 400)
            self._wait_until_computing(pulls.prefill)
            assert left.result(timeout=60)
        pulls.wait_until_at_rest()
        until(lambda: "status=499" in proxy.process.log)
        prompt = make_prompt(600, ("after one that left", time.monotonic()))
        pulls.assert_right(proxy.client.complete(prompt), prompt)

    @pytest.mark.parametrize("legs", ["together", "in-turn"])
    def test_a_first_token_from_p_changes_nothing_but_when_it_comes(self, proxied: Proxied, legs: str) -> None:
        plain, early = proxied("P", legs=legs, first_token="decode"), proxied("P", legs=legs)
        for tokens in (2, 33, 257, 700):
            for number in range(4):
                prompt = make_prompt(tokens, ("first token", legs, number))
                changes = {"cache_salt": f"{legs} early", "stream_options": {"include_usage": True}}
                with_it = early.stream(prompt, **changes)
                without = plain.stream(prompt, **changes | {"cache_salt": f"{legs} plain"})
                assert _text(with_it) == _text(without), (tokens, number)
                assert with_it[-1]["usage"] == without[-1]["usage"]
                assert len({event["id"] for event in with_it}) == 1
        assert early.count("pd_proxy_first_tokens_from_prefill_total") >= 8  # a token may have no text of its own
        assert early.count("pd_proxy_first_tokens_different_total") == 0
        assert plain.count("pd_proxy_first_tokens_from_prefill_total") == 0

    @pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
    @pytest.mark.parametrize("legs", ["together", "in-turn"])
    def test_the_usage_is_what_a_single_server_says(
        self, proxied: Proxied, pulls: Pair, legs: str, stream: bool
    ) -> None:
        proxy, prompt = proxied("P", legs=legs), make_prompt(700, ("cached tokens", legs, stream))
        known = prompt[:300]
        alone, salt = pulls.decode.client, f"alone {legs} {stream}"
        alone.complete(known, cache_salt=salt)
        wanted = json.loads(alone.complete(prompt, cache_salt=salt).body)["usage"]
        assert wanted["prompt_tokens_details"]["cached_tokens"] == 300 // BLOCK_SIZE * BLOCK_SIZE
        pulls.prefill.client.complete(known, 1)
        with pulls.traffic() as traffic:
            if stream:
                usage = proxy.stream(prompt, stream_options={"include_usage": True})[-1]["usage"]
            else:
                usage = json.loads(proxy.client.complete(prompt).body)["usage"]
        assert traffic.source("external_kv_transfer") == len(prompt) - 1
        assert _told(usage) == _told(wanted)

    @staticmethod
    def _wait_until_computing(server: Server) -> None:
        until(lambda: server.client.metrics().value("vllm:num_requests_running") > 0)


@pytest.mark.parametrize("at_once", [False, True], ids=["in turn", "at once"])
def test_the_shortest_proxy_gives_the_same_output(pulls: Pair, at_once: bool) -> None:
    p, prompt = pulls.prefill, make_prompt(LONG, ("the shortest proxy", at_once))
    control = ["--control", f"127.0.0.1:{dict(p.spec.options)['port']}"] if at_once else []
    with (
        MinimalProxy(p.client.base_url, pulls.decode.client.base_url, *control) as proxy,
        closing(Client(proxy.url)) as client,
        pulls.traffic() as traffic,
    ):
        completion = client.complete(prompt)
    assert traffic.source("external_kv_transfer") == len(prompt) - 1
    assert traffic.pulled("pulls_ahead") == at_once
    assert (traffic.failures(), traffic.leases("granted"), traffic.leases("released")) == (0, 1, 1)
    pulls.assert_right(completion, prompt)


class TestReplayedRouters:
    @pytest.mark.parametrize("router", IN_TURN)
    def test_legs_in_turn_give_the_same_output(self, pulls: Pair, router: str) -> None:
        legs, prompt = IN_TURN[router], json.dumps(make_text(700, ("replayed", router)))
        with pulls.traffic() as traffic:
            answered = _post(pulls.prefill, legs.prefill.replace("PROMPT", prompt), legs.api)
            relayed = legs.relayed(answered["kv_transfer_params"])
            body = legs.decode.replace("TRANSFER", relayed).replace("PROMPT", prompt)
            given = _post(pulls.decode, body, legs.api)
        _assert_pulled_right(pulls, traffic, 700, legs.api, body, given)

    @pytest.mark.parametrize("api", AT_ONCE)
    def test_legs_at_once_give_the_same_output(self, pulls: Pair, api: str) -> None:
        """llm-d's sidecar, ``mooncake``: it asks P's bootstrap port, and ignores what P answers."""
        legs, bootstrap = AT_ONCE[api], f"http://127.0.0.1:{bootstrap_port(pulls.prefill.spec)}"
        told = httpx.get(f"{bootstrap}/query", trust_env=False).json()
        names = {
            "TRANSFER_ID": f"xfer-ac99cb10-2e32-4756-a910-5e5e805e3c7d-{api}",
            "BOOTSTRAP": bootstrap,
            "ENGINE_ID": told["0"]["engine_id"],
            "PROMPT": json.dumps(make_text(LONG, ("replayed at once", api))),
        }
        for_p, for_d = legs.prefill, legs.decode
        for name, value in names.items():
            for_p, for_d = for_p.replace(name, value), for_d.replace(name, value)
        with pulls.traffic() as traffic, ThreadPoolExecutor(1) as threads:
            prefill = threads.submit(_post, pulls.prefill, for_p, api, {"X-data-parallel-rank": "0"})
            given = _post(pulls.decode, for_d, api)
            prefill.result(timeout=60)
        _assert_pulled_right(pulls, traffic, LONG, api, for_d, given)
        assert traffic.pulled("pulls_ahead") == 1


@pytest.mark.skipif(not ROUTER, reason="vllm-router is not here: PD_CONNECTOR_VLLM_ROUTER names its command")
class TestVllmRouter:
    @pytest.mark.parametrize("connector", ["nixl", "mooncake"])
    def test_it_gives_the_same_outputs(
        self, servers: dict[str, Server], pulls: Pair, tmp_path: Path, connector: str
    ) -> None:
        prompts = [make_prompt(tokens, ("vllm-router", connector, tokens)) for tokens in (33, 257, 700, LONG)]
        with _vllm_router(servers, connector, tmp_path) as router:
            for prompt in prompts:
                with pulls.traffic() as traffic:
                    completion = router.complete(prompt)
                assert traffic.source("external_kv_transfer") == len(prompt) - 1
                assert traffic.failures() == 0
                pulls.assert_right(completion, prompt)

    @pytest.mark.parametrize("connector", ["nixl", "mooncake"])
    def test_other_apis_give_the_same_outputs(
        self, servers: dict[str, Server], pulls: Pair, tmp_path: Path, connector: str
    ) -> None:
        with _vllm_router(servers, connector, tmp_path) as router:
            for api in CHATS_TOO:
                _assert_answered_as_by_p(pulls, router.base_url, api, ("vllm-router", connector))

    def test_a_prefill_server_that_has_restarted_is_found(
        self, servers: dict[str, Server], pulls: Pair, cluster: Any, tmp_path: Path
    ) -> None:
        """The router asks once where its control channel is."""
        with _vllm_router(servers, "mooncake", tmp_path) as router:
            before = make_prompt(300, "before the restart")
            pulls.assert_right(router.complete(before), before)
            servers["P"].kill()
            cluster.restart(servers["P"])
            after = make_prompt(300, "after the restart")
            until(lambda: router.complete(after).status == 200)
            prompt = make_prompt(500, "after the restart, too")
            with pulls.traffic() as traffic:
                completion = router.complete(prompt)
            assert traffic.source("external_kv_transfer") == len(prompt) - 1
            pulls.assert_right(completion, prompt)


@pytest.mark.skipif(not SMG, reason="smg is not here: PD_CONNECTOR_SMG names its command")
class TestSmg:
    """It takes texts only, of which the model's tokenizer makes a token a byte."""

    @pytest.mark.parametrize("length", [33, 257, 700, LONG])
    def test_it_gives_the_same_outputs(self, smg: str, servers: dict[str, Server], pulls: Pair, length: int) -> None:
        prompt = "".join(random.Random(f"smg {length}").choices(string.ascii_letters, k=length))
        body = {"model": MODEL_NAME, "prompt": prompt, "max_tokens": 16, "temperature": 0.0, "ignore_eos": True}
        with pulls.traffic() as traffic:
            given = httpx.post(f"{smg}/v1/completions", json=body, timeout=120, trust_env=False)
        assert given.status_code == 200, given.text
        assert given.json()["usage"]["prompt_tokens"] == length
        assert traffic.source("external_kv_transfer") == length - 1
        assert traffic.failures() == 0
        assert (traffic.leases("granted"), traffic.leases("released")) == (1, 1)
        alone = _post(servers["D"], json.dumps(body | {"cache_salt": "alone"}))
        assert given.json()["choices"][0]["text"] == alone["choices"][0]["text"]

    def test_other_apis_give_the_same_outputs(self, smg: str, pulls: Pair) -> None:
        for api in CHATS_TOO:
            _assert_answered_as_by_p(pulls, smg, api, "smg")

    @pytest.fixture
    def smg(self, servers: dict[str, Server], tmp_path: Path) -> Iterator[str]:
        """Run smg in front of P, registered under the name of a connector that it knows, and D; yields its address."""
        port, metrics_port = free_ports(2)
        address = f"http://127.0.0.1:{port}"
        words = [SMG, "launch", "--pd-disaggregation", "--backend", "vllm", "--policy", "round_robin"]
        words += ["--host", "127.0.0.1", "--port", str(port), "--prometheus-port", str(metrics_port)]
        with running([*words, "--disable-tokenizer-autoload"], tmp_path / "smg.log") as alive:
            workers = [
                {"url": servers["P"].client.base_url, "worker_type": "prefill", "kv_connector": "NixlConnector"},
                {"url": servers["D"].client.base_url, "worker_type": "decode"},
            ]
            with closing(Client(address)) as client:
                until(lambda: alive() and client.is_healthy(), "smg to listen")
            for worker in workers:
                body = worker | {"runtime_type": "vllm", "connection_mode": "http", "model_id": MODEL_NAME}
                httpx.post(f"{address}/workers", json=body, trust_env=False).raise_for_status()
            until(lambda: _ready_workers(address) == len(workers), "smg to find both servers")
            yield address


def _ready_workers(smg: str) -> int:
    workers = httpx.get(f"{smg}/workers", trust_env=False).json()["workers"]
    return sum(worker["status"] == "ready" for worker in workers)


def _post(server: Server, body: str, api: str = "completions", headers: dict[str, str] | None = None) -> dict[str, Any]:
    """Send a server a request as it is, and return the answer."""
    url, headers = f"{server.client.base_url}/v1/{api}", {"Content-Type": "application/json", **(headers or {})}
    response = httpx.post(url, content=body, headers=headers, timeout=120, trust_env=False)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


def _choices(url: str, body: dict[str, Any]) -> tuple[dict[int, dict[str, Any]], dict[str, Any]]:
    """The choices of a text completion by index, whole or put together from a stream, and the usage."""
    response = httpx.post(f"{url}/v1/completions", json=body, timeout=120, trust_env=False)
    assert response.status_code == 200, response.text
    lines = [line.removeprefix("data: ") for line in response.text.splitlines() if line]
    assert not body["stream"] or lines.pop() == "[DONE]", response.text
    answers = [json.loads(line) for line in lines]
    assert len({each["id"] for each in answers}) == 1
    choices: dict[int, dict[str, Any]] = {}
    for choice in (choice for each in answers for choice in each["choices"]):
        told = choices.setdefault(choice["index"], {"text": "", "token_logprobs": [], "text_offset": []})
        told["text"] += choice["text"]
        told["finish_reason"] = choice["finish_reason"]
        for name in ("token_logprobs", "text_offset"):
            told[name] += (choice["logprobs"] or {}).get(name, [])
    return choices, answers[-1]["usage"]


def _assert_pulled_right(
    pulls: Pair, traffic: Traffic, tokens: int, api: str, body: str, given: dict[str, Any]
) -> None:
    """D has pulled the prompt, and answered what P answers to the same body by itself."""
    assert traffic.source("external_kv_transfer") == tokens - 1
    assert traffic.failures() == 0
    assert (traffic.leases("granted"), traffic.leases("released")) == (1, 1)
    alone = _post(
        pulls.prefill, json.dumps(json.loads(body) | {"kv_transfer_params": None, "cache_salt": "alone"}), api
    )
    assert text_answered(api, given) == text_answered(api, alone)
    assert len(text_answered(api, given)) >= 16, "a token has at least a character"


def _assert_answered_as_by_p(pulls: Pair, url: str, api: str, seed: object) -> None:
    """Through a router, D has pulled prompts, and answered what P answers by itself, whole and in a stream."""
    for stream in (False, True):
        prompt = make_text(300, (seed, api, stream))
        with pulls.traffic() as traffic:
            text = answer(url, api, prompt, stream=stream)
        assert traffic.source("external_kv_transfer") == len(prompt) - 1
        assert (traffic.failures(), traffic.leases("granted"), traffic.leases("released")) == (0, 1, 1)
        assert text == answer(pulls.prefill.client.base_url, api, prompt, stream=stream)
        assert len(text) >= 16, "a token has at least a character"


def _told(usage: dict[str, Any]) -> dict[str, Any]:
    """A usage without what it says nothing of: nulls, which streams leave out."""
    details = {name: value for name, value in usage["prompt_tokens_details"].items() if value is not None}
    return {name: value for name, value in usage.items() if value is not None} | {"prompt_tokens_details": details}


def _text(events: list[dict[str, Any]]) -> str:
    return "".join(choice["text"] for event in events for choice in event["choices"])


@contextmanager
def _vllm_router(servers: dict[str, Server], connector: str, directory: Path) -> Iterator[Client]:
    """Run vllm-router in front of P and D; yields a client of it."""
    port, metrics_port = free_ports(2)
    prefill = servers["P"]
    bootstrap = [str(bootstrap_port(prefill.spec))] if connector == "mooncake" else []
    words = [ROUTER, "--host", "127.0.0.1", "--port", str(port), "--prometheus-port", str(metrics_port)]
    words += ["--vllm-pd-disaggregation", "--kv-connector", connector, "--policy", "round_robin"]
    words += ["--prefill", prefill.client.base_url, *bootstrap, "--decode", servers["D"].client.base_url]
    with running(words, directory / "vllm-router.log") as alive:
        client = Client(f"http://127.0.0.1:{port}")
        try:
            until(lambda: alive() and client.is_healthy())
            yield client
        finally:
            client.close()
