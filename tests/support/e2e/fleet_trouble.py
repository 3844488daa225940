"""Servers of a fleet, and the processes of the pool that they share, which stop, and die and come back."""

import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Self

from tests.support.e2e.cluster import Cluster, Server
from tests.support.e2e.trouble import stopped
from tests.support.store.mooncake_processes import MooncakeProcesses
from tests.support.waiting import until

_STEPS_TO_A_KILL = 4
#: Seconds between two steps, at most. An engine leaves a pool alone for 10 s that has failed, and so must work longer.
_SERVER_PAUSE_S, _POOL_PAUSE_S = 2.0, 24.0


class FleetTrouble:
    """Does harm at random until it is told to end: to one server at a time, and to one process of the pool.

    Each dies in turn, and others stop for moments between. When it has ended, all are there again. Each has died once
    at least: if it is told to end before, it goes on without pauses until then.
    """

    def __init__(
        self,
        servers: Mapping[str, Server],
        cluster: Cluster,
        pool: MooncakeProcesses,
        seed: int,
        before_kill: Callable[[Server], None] = lambda server: None,
    ) -> None:
        """Cause none yet.

        Args:
            servers: by the names that ``caused`` has for them.
            cluster: starts them again.
            pool: its processes.
            seed: of when, whom and for how long.
            before_kill: is called with a server that is about to be killed. It must not raise.
        """
        self._servers, self._cluster, self._pool = servers, cluster, pool
        self._before_kill = before_kill
        self.caused: Counter[str] = Counter()
        self._over = threading.Event()
        to_servers = (list(servers), self._kill_server, self._server_stopped, _SERVER_PAUSE_S, random.Random(seed))
        of_pool = ["master", "client"]
        to_pool = (of_pool, self._kill_of_pool, self._of_pool_stopped, _POOL_PAUSE_S, random.Random(seed + 1))
        self._threads = [threading.Thread(target=self._run, args=harm) for harm in (to_servers, to_pool)]

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join()

    def _run(
        self,
        names: list[str],
        kill: Callable[[str], None],
        stop: Callable[[str], AbstractContextManager[None]],
        pause_s: float,
        chance: random.Random,
    ) -> None:
        to_kill = list(names)
        chance.shuffle(to_kill)
        number = 0
        while not self._over.wait(chance.uniform(0.1, 1.0) * pause_s) or number < _STEPS_TO_A_KILL * len(names):
            number += 1
            if number % _STEPS_TO_A_KILL == 0:
                to_kill.insert(0, name := to_kill.pop())
                self.caused[f"killed {name}"] += 1
                kill(name)
            else:
                name = chance.choice(names)
                self.caused[f"stopped {name}"] += 1
                with stop(name):
                    time.sleep(chance.uniform(0.05, 2.0))

    def _kill_server(self, name: str) -> None:
        server = self._servers[name]
        self._before_kill(server)
        server.kill()
        self._cluster.restart(server)
        until(server.client.is_healthy, f"{name} answers again")

    def _server_stopped(self, name: str) -> AbstractContextManager[None]:
        return stopped(self._servers[name])

    def _kill_of_pool(self, name: str) -> None:
        if name == "master":
            self._pool.restart_master()
        else:
            self._pool.restart_client()

    def _of_pool_stopped(self, name: str) -> AbstractContextManager[None]:
        return self._pool.master_stopped() if name == "master" else self._pool.client_stopped()
