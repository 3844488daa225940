"""Conversations over two P and two D, a pool and prefixes of peers, while each of their processes dies and stops.

A proxy sends every turn to any P and any D: what a P lacks of it, another engine or the pool has. No engine has room
for all of them, nor has the pool. One P has two workers.
"""

import random
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import pytest

from tests.support.e2e.client import Client, Completion
from tests.support.e2e.cluster import Cluster, Layout, LoadFailurePolicy, Role, Server, ServerSpec
from tests.support.e2e.deployments import CHAOS_LEASE_TTL_S, CHAOS_PULL_TIMEOUT_S, leases, with_host_memory
from tests.support.e2e.fleet_trouble import FleetTrouble
from tests.support.e2e.host_memory import metrics_after_a_step, wait_until_nothing_is_lent
from tests.support.e2e.pair import assert_same_output, make_prompt, wait_until_at_rest
from tests.support.examples.harness import ProxyProcess
from tests.support.process import free_ports
from tests.support.store.mooncake_processes import MooncakeProcesses
from tests.support.waiting import until

CHATS, TURNS, CLIENTS, ANSWER = 40, 4, 5, 40
ATTEMPTS = 30
POOL_BYTES = 128 << 20

pytestmark = [
    pytest.mark.chaos,
    pytest.mark.slow,
    pytest.mark.timeout(2400),
    pytest.mark.skipif(
        not Path(sys.executable).with_name("mooncake_client").exists(), reason="mooncake_client is not installed"
    ),
]


@dataclass
class Chat:
    """What was asked in one conversation, and the answers."""

    turns: list[tuple[list[int], Completion]] = field(default_factory=list)
    other_ends: Counter[int] = field(default_factory=Counter)  # statuses of turns that were then asked again
    longest_s: float = 0.0


class Found:
    """Counts the tokens that servers have found elsewhere, those too that are killed meanwhile."""

    def __init__(self) -> None:
        self.tokens: Counter[str] = Counter()
        self._lock = threading.Lock()

    def count(self, server: Server) -> None:
        """Add what a server has found since its start."""
        metrics = server.client.metrics()
        with self._lock:
            for where in ("pool", "prefix", "host"):
                self.tokens[where] += int(metrics.value(f"vllm:pd_{where}_tokens_total"))


@pytest.fixture
def pool(tmp_path: Path) -> Iterator[MooncakeProcesses]:
    with closing(MooncakeProcesses(tmp_path, POOL_BYTES)) as processes:
        yield processes


def fleet(pool: MooncakeProcesses) -> dict[str, ServerSpec]:
    """Every server serves prefixes and shares the pool. Each P asks the other, and who has read a conversation."""
    ports = free_ports(4)
    times = (
        *leases(CHAOS_LEASE_TTL_S),
        *((name, CHAOS_PULL_TIMEOUT_S) for name in ("pull_timeout_s", "queue_timeout_s")),
    )

    def server(number: int, layout: Layout, ranks: int = 1, policy: LoadFailurePolicy = "fail") -> ServerSpec:
        is_prefill = number < 2
        options = {
            "pool": str(pool.address),
            "port": ports[number],
            "serve_prefixes": True,
            "peers": ("readers", f"127.0.0.1:{ports[1 - number]}") if is_prefill else (),
        }
        role: Role = "kv_producer" if is_prefill else "kv_consumer"
        spec = ServerSpec(role, layout=layout, tensor_parallel=ranks, load_failure_policy=policy, options=times)
        return with_host_memory(spec, *options.items())

    return {
        "P1": server(0, "LBHNC"),
        "P2": server(1, "BHLNC", ranks=2),
        "D1": server(2, "LBHNC"),
        "D2": server(3, "BHLNC", policy="recompute"),
    }


def talk(client: Client, number: int) -> Chat:
    """A conversation to its end. A turn that fails is asked again, as a client would."""
    chance, chat = random.Random(number), Chat()
    history = make_prompt(chance.randrange(300, 1300), ("chaos pool", number))
    while len(chat.turns) < TURNS:
        prompt = [*history, *make_prompt(chance.randrange(5, 100), (number, len(chat.turns)))]
        began = time.monotonic()
        answer = client.complete(prompt, ANSWER)
        chat.longest_s = max(chat.longest_s, time.monotonic() - began)
        if answer.status != 200:
            chat.other_ends[answer.status] += 1
            assert chat.other_ends.total() < ATTEMPTS, f"chat {number}: {chat.other_ends}"
            time.sleep(1.0)  # the fleet may have no decode server for a moment
            continue
        chat.turns.append((prompt, answer))
        history = [*prompt, *answer.tokens]
    return chat


def pool_works(server: Server) -> bool:
    """Whether a server asks the pool again."""
    return metrics_after_a_step(server).value("vllm:pd_pool_works") == 1


def assert_answers_right(chats: list[Chat], server: Server) -> None:
    """The answers are those that one server computes by itself."""
    turns = [turn for chat in chats for turn in chat.turns]
    with ThreadPoolExecutor(CLIENTS) as clients:
        computed = list(clients.map(lambda turn: server.client.compute(turn[0], ANSWER), turns))
    for (_, answer), reference in zip(turns, computed, strict=True):
        assert_same_output(answer, reference)


def test_conversations_in_trouble(cluster: Cluster, pool: MooncakeProcesses, figures: list[str]) -> None:
    specs = fleet(pool)
    servers = dict(zip(specs, cluster.start(specs.values()), strict=True))
    arguments = ["--without-prefill", "decode"]
    for name, server in servers.items():
        arguments += ["--prefill" if name.startswith("P") else "--decode", server.client.base_url]
    found = Found()
    with ProxyProcess(["-m", "pd_proxy", *arguments]) as proxy, closing(Client(proxy.url)) as client:
        with FleetTrouble(servers, cluster, pool, 5, found.count) as trouble, ThreadPoolExecutor(CLIENTS) as clients:
            chats = list(clients.map(lambda number: talk(client, number), range(CHATS)))
        for server in servers.values():
            wait_until_at_rest(server)
            wait_until_nothing_is_lent(server)
            found.count(server)
        ended = sum((chat.other_ends for chat in chats), Counter[int]())
        longest_s = max(chat.longest_s for chat in chats)
        figures.append(
            f"{CHATS} chats of {TURNS} turns, {dict(trouble.caused)}, asked again after {dict(ended)}, the longest "
            f"{longest_s:.1f} s, tokens found {dict(found.tokens)}"
        )
        assert {500, 502, 503, 504} >= set(ended)
        assert longest_s < 100.0
    for name, server in servers.items():
        assert "which is a bug" not in server.log_since(), name
        until(partial(pool_works, server), within_s=60)
    # Of either, there may be little: an engine is proven anew after each start, and the pool comes back empty.
    assert found.tokens["pool"] + found.tokens["prefix"] > 0, found.tokens
    pool.close()  # what is computed to compare would be put, too
    assert_answers_right(chats, servers["D1"])
    cluster.stop(servers.values())
