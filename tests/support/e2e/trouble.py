"""Servers of a pair that stop, and die and come back, while requests are sent to them."""

import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Literal, Self

from tests.support.e2e.cluster import START_TIMEOUT_S, Cluster, Server
from tests.support.e2e.legs import Router
from tests.support.e2e.pair import Pair
from tests.support.waiting import until

Side = Literal["prefill", "decode"]

_STEPS = range(3, 15)  # among these steps of trouble are those that kill


@contextmanager
def stopped(server: Server, *processes: str) -> Iterator[None]:
    """The server's engine and workers, or its processes of these titles, do nothing at all while the block runs."""
    processes = processes or ("EngineCore", "Worker")
    for process in processes:
        server.signal(signal.SIGSTOP, process)
    try:
        yield
    finally:
        for process in processes:
            server.signal(signal.SIGCONT, process)


class Trouble:
    """Stops processes at random until it is told to end, and kills a server now and then, which then comes back."""

    def __init__(
        self,
        pair: Pair,
        cluster: Cluster,
        seed: int,
        kills: Sequence[Side],
        before_kill: Callable[[Server], None] = lambda server: None,
    ) -> None:
        """Cause none yet.

        Args:
            pair: the servers.
            cluster: that starts a killed one again.
            seed: of when, whom and for how long.
            kills: which server to kill, in turn.
            before_kill: is called with a server that is about to be killed, and is not stopped. It must not raise.
        """
        self._pair, self._cluster, self._random = pair, cluster, random.Random(seed)
        self._before_kill = before_kill
        self._kills = dict(zip(sorted(self._random.sample(_STEPS, len(kills))), kills, strict=True))
        self.router = Router(pair)
        self.caused: Counter[str] = Counter()
        self._over = threading.Event()
        self._up = threading.Event()
        self._up.set()
        self._thread = threading.Thread(target=self._run_until_over)
        self._failure: Exception | None = None

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()
        if self._failure is not None:
            raise self._failure

    def wait_for_servers(self) -> None:
        """Wait while a server that was killed is being started again: it could only refuse connections."""
        assert self._up.wait(START_TIMEOUT_S + 60.0), "a server has not come back"
        assert self._failure is None, "a server could not be started again"

    def _run_until_over(self) -> None:
        try:
            self._run()
        except Exception as error:  # raised at the end; nobody waits for it until then
            self._failure = error
            self._up.set()

    def _run(self) -> None:
        number = 0
        while not self._over.wait(self._random.uniform(0.2, 1.5)) or number <= max(self._kills):
            number += 1
            if killed := self._kills.get(number):
                self._kill(killed)
            else:
                self._stop(self._random.choice([self._pair.prefill, self._pair.decode]))

    def _kill(self, which: Side) -> None:
        server = self._pair.prefill if which == "prefill" else self._pair.decode
        self.caused[f"killed {which}"] += 1
        self._before_kill(server)
        self._up.clear()
        server.kill()
        self._cluster.restart(server)
        until(server.client.is_healthy, f"{server.spec.name} answers again")
        if server is self._pair.prefill:
            self.router = Router(self._pair)
        self._up.set()

    def _stop(self, server: Server) -> None:
        self.caused["stopped"] += 1
        with stopped(server):
            time.sleep(self._random.uniform(0.05, 1.5))
