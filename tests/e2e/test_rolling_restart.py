"""Every server of a deployment is stopped and started again, one after the other, under load: no request fails."""

import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import replace

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

_P = replace(prefill(), arguments=STAYING)
_D = replace(decode("fail", patient=True), arguments=STAYING, options=PATIENT)
ROLLING = Deployment("rolling", (("P", _P), ("P other", _P), ("D", _D), ("D other", _D)), slow=True)


class Load:
    """Clients that ask one question after the other, and note every answer."""

    def __init__(self, url: str, clients: int) -> None:
        self.statuses: list[int] = []
        self.problems: list[str] = []
        self._url = url
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._ask, args=(number,)) for number in range(clients)]
        for thread in self._threads:
            thread.start()

    def _ask(self, client: int) -> None:
        with httpx.Client(base_url=self._url, timeout=300, trust_env=False) as http:
            number = 0
            while not self._stop.is_set():
                number += 1
                prompt = make_prompt(100 + 37 * client, ("rolling", client, number))
                body = {"model": MODEL_NAME, "prompt": prompt, "max_tokens": 8, "temperature": 0, "ignore_eos": True}
                try:
                    answer = http.post("/v1/completions", json=body)
                except httpx.HTTPError as error:
                    self.problems.append(repr(error))
                    continue
                self.statuses.append(answer.status_code)
                if answer.status_code != 200:
                    self.problems.append(answer.text)

    def wait_for(self, more: int) -> None:
        """Wait until so many more requests have been answered."""
        wanted = len(self.statuses) + more
        until(lambda: len(self.statuses) >= wanted or self.problems, within_s=300)

    def end(self) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()


@pytest.fixture
def proxy(servers: dict[str, Server]) -> Iterator[ProxyProcess]:
    arguments = ["-m", "pd_proxy"]
    for name, server in servers.items():
        arguments += ["--prefill" if name.startswith("P") else "--decode", server.client.base_url]
    with ProxyProcess(arguments) as proxy:
        yield proxy


@on(ROLLING)
def test_no_request_fails_while_every_server_restarts(
    servers: dict[str, Server], proxy: ProxyProcess, cluster: Cluster, figures: list[str]
) -> None:
    load, started = Load(proxy.url, 3), time.monotonic()
    try:
        load.wait_for(BETWEEN)
        for server in servers.values():
            server.process.send_signal(signal.SIGTERM)
            assert server.process.wait(EXIT_S) == 0, server.log_since()[-3000:]
            load.wait_for(BETWEEN)  # by the others alone
            cluster.restart(server)
            load.wait_for(BETWEEN)
    finally:
        load.end()
    assert load.problems == []
    assert set(load.statuses) == {200}
    took = time.monotonic() - started
    figures.append(
        f"4 servers restarted in turn under load: {len(load.statuses)} requests in {took:.0f} s, none failed"
    )
