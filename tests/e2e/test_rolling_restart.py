"""Every server of a deployment is stopped and started again, one after the other, under load: no request fails.

A status is not enough for that: vLLM gives requests up with status 200, no text and finish reason ``abort``.

A server gets its signal when the proxy sends it nothing any more and has nothing of it: what comes after the signal
gets an error from vLLM, an empty text, or no answer. Streams of a decode server go on at the other one. Servers are
taken away and added by a second proxy with the new list.
"""

import json
import re
import signal
import threading
import time
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import httpx
import pytest

from tests.support.e2e.client import MODEL_NAME
from tests.support.e2e.cluster import Cluster, Server
from tests.support.e2e.deployments import PATIENT, Deployment, decode, on, prefill
from tests.support.e2e.pair import make_prompt
from tests.support.examples.harness import ProxyProcess
from tests.support.waiting import until

pytestmark = [pytest.mark.slow, pytest.mark.drain, pytest.mark.timeout(1800)]

#: For requests under way, and for P's leases.
STAYING = ("--shutdown-timeout", "60")
#: Every prefill server must have been asked, and every decode server have answered, so many times between restarts.
BETWEEN = 4
EXIT_S = 120.0
TOKENS = 8
#: Of a stream: so many that it is under way when its decode server is drained.
STREAMED = 400

_P = replace(prefill(), arguments=STAYING)
_D = replace(decode("fail", patient=True), arguments=STAYING, options=PATIENT)
ROLLING = Deployment("rolling", (("P", _P), ("P other", _P), ("D", _D), ("D other", _D)), slow=True)


def incomplete(answer: httpx.Response, wanted: int) -> str:
    """What an answer lacks of being the whole one; empty if nothing."""
    if answer.status_code != 200:
        return f"status {answer.status_code}: {answer.text}"
    if answer.text.startswith("data: "):
        *_, last, usage, end = (line.removeprefix("data: ") for line in answer.text.splitlines() if line)
        if end != "[DONE]":
            return f"ends with {end}"
        told = json.loads(last) | {"usage": json.loads(usage)["usage"]}
    else:
        told = answer.json()
    reason, tokens = told["choices"][0]["finish_reason"], told["usage"]["completion_tokens"]
    return "" if (reason, tokens) == ("length", wanted) else f"finish reason {reason!r}, {tokens} tokens: {answer.text}"


class Load:
    """Clients that ask one question after the other, and note every answer that is not what was asked for.

    The first one asks for long streams.
    """

    def __init__(self, url: str, clients: int) -> None:
        self.answered = 0
        self.problems: list[str] = []
        self.url = url  # of the next requests
        self._counting = threading.Lock()
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._ask, args=(number,)) for number in range(clients)]
        for thread in self._threads:
            thread.start()

    def _ask(self, client: int) -> None:
        with httpx.Client(timeout=300, trust_env=False) as http:
            number = 0
            while not self._stop.is_set():
                number += 1
                prompt = make_prompt(100 + 37 * client, ("rolling", client, number))
                tokens = TOKENS if client else STREAMED
                body = {"model": MODEL_NAME, "prompt": prompt, "max_tokens": tokens, "ignore_eos": True}
                if not client:
                    body |= {"stream": True, "stream_options": {"include_usage": True}}
                try:
                    answer = http.post(f"{self.url}/v1/completions", json=body)
                except httpx.HTTPError as error:
                    self.problems.append(repr(error))
                    continue
                if problem := incomplete(answer, tokens):
                    self.problems.append(problem)
                with self._counting:
                    self.answered += 1

    def wait_for(self, more: int) -> None:
        """Wait until so many more requests have been answered."""
        wanted = self.answered + more
        until(lambda: self.answered >= wanted or self.problems, within_s=300)

    def end(self) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()


class Proxies:
    """The proxy that the load goes to. Another list of servers is another proxy, which takes over."""

    def __init__(self, servers: Iterable[tuple[str, Server]], draining: Path) -> None:
        self._draining = draining
        self._current = self._proxy_of(servers)
        self.load = Load(self._current.url, 3)

    @property
    def log(self) -> str:
        """What the proxy has written."""
        return self._current.log

    def drain(self, server: Server) -> None:
        """Wait until a server gets nothing new, and the proxy has nothing of it."""
        url = server.client.base_url
        self._draining.write_text(url)
        until(lambda: f"server {url} is leaving" in self.log)
        in_flight = re.compile(rf'^pd_proxy_in_flight\{{leg="\w+",url="{re.escape(url)}"\}} 0$', re.MULTILINE)
        metrics = f"{self._current.url}/metrics"
        until(lambda: in_flight.search(httpx.get(metrics, trust_env=False).text), within_s=300)

    def use_all(self) -> None:
        """Let every server have requests again."""
        back = self.log.count("is back")
        self._draining.write_text("")
        until(lambda: self.log.count("is back") == back + 1)

    def take_over(self, servers: Iterable[tuple[str, Server]]) -> None:
        """Lead the load to a new proxy, and end the old one with its last answer."""
        old, self._current = self._current, self._proxy_of(servers)
        self.load.url = self._current.url
        try:
            ended = old.end(signal.SIGTERM)
            assert ended == -signal.SIGTERM, old.log[-3000:]  # uvicorn raises the signal again when it has shut down
        finally:
            old.kill()

    def close(self) -> None:
        """End the load and the proxy."""
        self.load.end()
        self._current.kill()

    def _proxy_of(self, servers: Iterable[tuple[str, Server]]) -> ProxyProcess:
        arguments = ["-m", "pd_proxy", "--shutdown-timeout", "50", "--draining", str(self._draining)]
        for name, server in servers:
            arguments += ["--prefill" if name.startswith("P") else "--decode", server.client.base_url]
        return ProxyProcess(arguments)


@on(ROLLING)
def test_no_request_fails_while_every_server_restarts(
    servers: dict[str, Server], cluster: Cluster, figures: list[str], tmp_path: Path
) -> None:
    proxies, started = Proxies(servers.items(), tmp_path / "draining"), time.monotonic()
    load = proxies.load
    try:
        load.wait_for(BETWEEN)
        for server in servers.values():
            proxies.drain(server)
            server.process.send_signal(signal.SIGTERM)
            assert server.process.wait(EXIT_S) == 0, server.log_since()[-3000:]
            load.wait_for(BETWEEN)  # by the others alone
            cluster.restart(server)
            proxies.use_all()
            load.wait_for(BETWEEN)
        assert "moved=http" in proxies.log
        proxies.take_over(list(servers.items())[:-1])
        load.wait_for(BETWEEN)
        proxies.take_over(servers.items())
        load.wait_for(BETWEEN)
    finally:
        proxies.close()
    assert load.problems == []
    took = time.monotonic() - started
    figures.append(
        f"4 servers restarted in turn under load: {load.answered} requests in {took:.0f} s, all answered in full"
    )
