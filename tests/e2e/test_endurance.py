"""Many requests: while things go wrong at random, and for so long that whatever grows has grown.

Figures are reported at the end.
"""

import contextlib
import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import httpx
import pytest

from tests.support.e2e.client import Completion
from tests.support.e2e.cluster import Cluster, Footprint, Server
from tests.support.e2e.deployments import CHAOS, on
from tests.support.e2e.forwarder import Forwarder
from tests.support.e2e.pair import Pair, make_prompt, wait_until_at_rest
from tests.support.waiting import until

pytestmark = [
    pytest.mark.endurance,
    pytest.mark.slow,
    pytest.mark.timeout(3000),
    on(CHAOS),
]

CHAOS_S = 180.0
REQUESTS = 200
POOL = 24  # different prompts


@dataclass(frozen=True, slots=True)
class Case:
    prompt: list[int]
    expected: Completion


class Faults:
    """A thread that does harm to a prefill server until told to stop, and leaves it healthy."""

    def __init__(self, server: Server, cluster: Cluster, forwarder: Callable[[], Forwarder]) -> None:
        self.done: Counter[str] = Counter()
        self._server, self._cluster, self._forwarder = server, cluster, forwarder
        self._over = threading.Event()
        self._random = random.Random(7)
        self._thread = threading.Thread(target=self._run, name="faults")
        self._thread.start()

    def stop(self) -> None:
        self._over.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._over.wait(self._random.uniform(1.0, 4.0)):
            fault = self._random.choices([self._pause, self._lose_messages, self._kill], [6, 6, 1])[0]
            fault()
            self.done[fault.__name__.strip("_")] += 1

    def _pause(self) -> None:
        processes = self._random.choice([["EngineCore"], ["Worker"], ["EngineCore", "Worker"]])
        for process in processes:
            self._server.signal(signal.SIGSTOP, process)
        self._over.wait(self._random.uniform(0.2, 4.0))
        for process in processes:
            self._server.signal(signal.SIGCONT, process)

    def _lose_messages(self) -> None:
        self._forwarder().lose(self._random.choice([0.3, 0.6, 1.0]))
        self._over.wait(self._random.uniform(0.5, 4.0))
        self._forwarder().lose(0.0)

    def _kill(self) -> None:
        self._server.kill()
        self._cluster.restart(self._server)


class Forwarders:
    """One forwarder for every control port that the prefill server has had."""

    def __init__(self) -> None:
        self._by_port: dict[tuple[str, int], Forwarder] = {}
        self._lock = threading.Lock()
        self._newest = self.to("127.0.0.1", 9)

    def to(self, host: str, port: int) -> Forwarder:
        with self._lock:
            if (host, port) not in self._by_port:
                self._by_port[host, port] = self._newest = Forwarder(host, port)
            return self._by_port[host, port]

    def newest(self) -> Forwarder:
        return self._newest

    def close(self) -> None:
        for forwarder in self._by_port.values():
            forwarder.close()


def test_no_wrong_token_no_stuck_request_and_no_leak_in_three_minutes_of_faults(
    servers: dict[str, Server], cluster: Cluster, figures: list[str]
) -> None:
    p, deciders = servers["P"], [servers["D fail"], servers["D recompute"]]
    prompts = [make_prompt(random.Random(number).randrange(20, 1800), ("chaos", number)) for number in range(POOL)]
    cases = [Case(prompt, deciders[0].client.compute(prompt)) for prompt in prompts]
    forwarders = Forwarders()
    outcomes: Counter[str] = Counter()
    wrong: list[int] = []
    lock = threading.Lock()
    deadline = time.monotonic() + CHAOS_S
    pause = CHAOS_S / REQUESTS

    def one(number: int) -> None:
        choice = random.Random(number)
        case, decode = cases[choice.randrange(POOL)], deciders[number % 2]
        policy = decode.spec.load_failure_policy
        try:
            params = p.client.prefill(case.prompt)
        except (httpx.HTTPError, AssertionError):  # of a server that is killed
            with lock:
                outcomes["prefill failed"] += 1
            return
        forwarder = forwarders.to(params["remote_host"], params["remote_port"])
        through = {**params, "remote_port": forwarder.port}
        salt = f"chaos {number}"
        if choice.random() < 0.1:
            decode.client.abandon(case.prompt, choice.uniform(0.01, 1.0), kv_transfer_params=through, cache_salt=salt)
            outcome = "client left"
        else:
            completion = decode.client.complete(case.prompt, kv_transfer_params=through, cache_salt=salt)
            outcome = f"{policy}: {completion.status}"
            if completion.status == 200 and completion.tokens != case.expected.tokens:
                wrong.append(number)
        with lock:
            outcomes[outcome] += 1

    faults = Faults(p, cluster, forwarders.newest)
    try:
        with ThreadPoolExecutor(4) as pool:
            started = []
            number = 0
            while time.monotonic() < deadline or number < REQUESTS:
                started.append(pool.submit(one, number))
                number += 1
                time.sleep(pause)
            for request in started:
                request.result(180.0)
    finally:
        faults.stop()
        figures.append(f"chaos: {dict(outcomes)}, faults {dict(faults.done)}, wrong answers {len(wrong)}")
        for server in servers.values():
            with contextlib.suppress(AssertionError):
                until(server.client.is_healthy, "healthy again", within_s=60.0)
    try:
        assert not wrong
        assert sum(outcomes.values()) >= REQUESTS
        assert set(outcomes) <= {"prefill failed", "client left", "fail: 200", "fail: 500", "recompute: 200"}
        assert outcomes["fail: 200"] + outcomes["recompute: 200"] > REQUESTS // 4
        for server in servers.values():
            wait_until_at_rest(server)
            assert server.is_running
        for decode in deciders:
            prompt = make_prompt(500, ("after the chaos", decode.port))
            Pair(p, decode).assert_right(Pair(p, decode).disaggregate(prompt), prompt)
    finally:
        forwarders.close()


SOAK_REQUESTS, SOAK_WARM, SOAK_AT_ONCE, SOAK_EVERY = 2000, 500, 8, 250


@pytest.mark.parametrize("pair", [("P", "D fail")], indirect=True, ids="-".join)
def test_memory_threads_and_descriptors_stay_flat_over_two_thousand_requests(pair: Pair, figures: list[str]) -> None:
    def one(number: int) -> None:
        prompt = make_prompt(random.Random(number).randrange(1, 600), ("soak", number))
        assert pair.decode_leg(prompt, pair.prefill.client.prefill(prompt), 8).status == 200

    samples: dict[str, list[Footprint]] = {"P": [], "D": []}
    with ThreadPoolExecutor(SOAK_AT_ONCE) as pool:
        for first in range(0, SOAK_REQUESTS, SOAK_EVERY):
            list(pool.map(one, range(first, first + SOAK_EVERY)))
            pair.wait_until_at_rest()
            for name, server in (("P", pair.prefill), ("D", pair.decode)):
                samples[name].append(Footprint.of(server))
    for name, footprints in samples.items():
        figures.append(f"soak, {name}, every {SOAK_EVERY} requests: {footprints}")
        warm, last = footprints[SOAK_WARM // SOAK_EVERY - 1], footprints[-1]
        assert last.threads <= warm.threads + 2
        assert last.descriptors <= warm.descriptors + 8
        assert last.resident_mb < 1.03 * warm.resident_mb + 20.0
