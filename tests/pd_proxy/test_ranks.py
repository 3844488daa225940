"""Several engines behind one URL of P: vLLM's data-parallel ranks, of which the proxy chooses one, and others."""

import itertools
import logging
import threading
from typing import Any

import pytest

from pd_proxy.control import Address, ControlAddresses, Engine
from pd_proxy.servers import Server
from tests.support.examples.fake_servers import (
    NAMED_TRANSFER,
    FakeServer,
    Received,
    Wire,
    answers,
    decodes,
    drops,
    opened,
    stalls,
)
from tests.support.examples.harness import RawClient
from tests.support.examples.served_proxy import Proxy, ProxySetup
from tests.support.waiting import ManualClock, until

FIRST_PORT = 9000
#: Requests after which all of two ranks are known: three tell that there are several, one how many, two where.
INTRODUCTIONS = 6


class DataParallel:
    """A prefill server of so many engines, each with a control address of its own, that balances in turn."""

    def __init__(self, ranks: int, *, takes_rank: bool = True) -> None:
        """``takes_rank``: whether it looks at the header."""
        self.ranks = ranks
        self.first_port = FIRST_PORT
        self.refusal = 400  # the status for a rank that is not there
        self.silent: set[int] = set()
        self.chosen: list[int] = []
        self._takes_rank = takes_rank
        self._balance = itertools.count()

    async def __call__(self, received: Received, wire: Wire) -> None:
        """Answer as vLLM does."""
        named = received.headers.get("x-data-parallel-rank") if self._takes_rank else None
        rank = next(self._balance) % self.ranks if named is None else int(named)
        if rank >= self.ranks:
            told = f"data_parallel_rank {rank} is out of range [0, {self.ranks})."
            await wire.json(self.refusal, {"error": {"message": told, "type": "BadRequestError", "code": self.refusal}})
            return
        self.chosen.append(rank)
        if rank in self.silent:
            await stalls(received, wire)
        transfer = NAMED_TRANSFER | {"remote_port": self.first_port + rank}
        usage = {"prompt_tokens": 2, "input_tokens": 2, "output_tokens": 1}
        finish = {"choices": [{"finish_reason": "length"}], "status": "incomplete", "usage": usage}
        await wire.json(200, finish | {"kv_transfer_params": transfer})


@pytest.fixture
def engines() -> DataParallel:
    """Two ranks behind one URL."""
    return DataParallel(2)


@pytest.fixture
def p(setup: ProxySetup, engines: DataParallel) -> FakeServer:
    """The server that they are."""
    return setup.server(engines)


@pytest.fixture
def known(proxy: Proxy, p: FakeServer, d: FakeServer, engines: DataParallel) -> Proxy:
    """A proxy that knows both ranks."""
    return introduced(proxy, p, d, engines)


def introduced(
    proxy: Proxy, p: FakeServer, d: FakeServer, engines: DataParallel, requests: int = INTRODUCTIONS
) -> Proxy:
    """The proxy, after so many requests, which the servers then forget."""
    assert [proxy.complete().status_code for _ in range(requests)] == [200] * requests
    for seen in (p.received, d.received, engines.chosen):
        seen.clear()
    return proxy


def legs_of(d: FakeServer) -> list[tuple[bool, int]]:
    """Of each of D's legs, whether it went together with P's, and the port of the engine that it was to pull from."""
    params: list[dict[str, Any]] = [body["kv_transfer_params"] for body in d.bodies]
    return [("transfer_id" in one, one["remote_port"]) for one in params]


def test_the_legs_go_at_once_to_the_rank_that_the_proxy_chooses(
    known: Proxy, p: FakeServer, d: FakeServer, engines: DataParallel
) -> None:
    for _ in range(4):
        assert known.complete().status_code == 200
    assert engines.chosen == [0, 1, 0, 1]
    assert legs_of(d) == [(True, FIRST_PORT + rank) for rank in engines.chosen]
    assert all("x-data-parallel-rank" not in one.headers for one in d.received), "D is free to choose its own"


def test_finding_the_ranks_costs_no_client_anything_but_time(proxy: Proxy, p: FakeServer, d: FakeServer) -> None:
    assert [proxy.complete().status_code for _ in range(INTRODUCTIONS)] == [200] * INTRODUCTIONS
    named = [one.headers.get("x-data-parallel-rank") for one in p.received]
    assert named == [None, None, None, "65535", None, "0", "1"]
    assert p.bodies[3] == p.bodies[4], "the request that asked for a rank of which there is none is served all the same"
    assert legs_of(d)[-3:] == [(False, FIRST_PORT + 1), (False, FIRST_PORT), (False, FIRST_PORT + 1)]


def test_the_rank_with_the_fewest_requests_in_flight_gets_the_next(
    known: Proxy, d: FakeServer, engines: DataParallel
) -> None:
    engines.silent, d.script = {0}, stalls
    busy = [RawClient.completing(known, b'{"prompt": "a", "stream": true}')]
    until(lambda: engines.chosen == [0])
    d.script = decodes
    assert [known.complete().status_code for _ in range(3)] == [200] * 3
    assert engines.chosen == [0, 1, 1, 1]
    busy.pop().leave()
    until(lambda: known.in_flight() == 0)
    engines.silent = set()
    assert [known.complete().status_code for _ in range(2)] == [200] * 2
    assert engines.chosen[4:] == [0, 1]


def test_vllm_023_refuses_a_rank_of_messages_with_status_500(
    proxy: Proxy, p: FakeServer, engines: DataParallel
) -> None:
    engines.refusal = 500
    asked = [proxy.http.post("/v1/messages", json={"messages": []}).status_code for _ in range(INTRODUCTIONS)]
    assert asked == [200] * INTRODUCTIONS
    assert [one.headers.get("x-data-parallel-rank") for one in p.received][-2:] == ["0", "1"]


def test_a_rank_that_is_refused_in_other_words_is_no_clients_error(proxy: Proxy, p: FakeServer) -> None:
    """Nor does a client's own text, in an error, tell how many ranks there are."""

    async def refuses(received: Received, wire: Wire) -> None:
        if "x-data-parallel-rank" in received.headers:
            await wire.json(400, {"error": {"message": "'data_parallel_rank 1 is out of range [0, 9)' is no number"}})
        else:
            await balanced(received, wire)

    balanced, p.script = DataParallel(2), refuses
    assert [proxy.complete().status_code for _ in range(8)] == [200] * 8
    named = [one.headers.get("x-data-parallel-rank") for one in p.received]
    assert named == [None, None, None, "65535", *[None] * 5]


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/responses"])
def test_a_client_cannot_name_a_rank(proxy: Proxy, p: FakeServer, d: FakeServer, path: str) -> None:
    """It knows neither which P gets its request, nor which D."""
    asked = proxy.http.post(path, json={"prompt": "a", "input": "a"}, headers={"X-data-parallel-rank": "7"})
    assert asked.status_code == 200
    assert all("x-data-parallel-rank" not in one.headers for one in (*p.received, *d.received))


def test_a_server_that_comes_back_with_fewer_ranks_costs_no_request(
    known: Proxy, p: FakeServer, d: FakeServer, engines: DataParallel
) -> None:
    engines.ranks, engines.first_port = 1, FIRST_PORT + 10

    async def follows(received: Received, wire: Wire) -> None:
        is_there = received.body["kv_transfer_params"]["remote_port"] == FIRST_PORT + 10
        await (decodes if is_there else stalls)(received, wire)

    d.script = follows
    assert [known.complete().status_code for _ in range(4)] == [200] * 4
    assert [one.headers.get("x-data-parallel-rank") for one in p.received] == ["0", "1", None, None, None]


def test_ranks_that_come_back_at_other_addresses_cost_a_second_leg(
    known: Proxy, d: FakeServer, engines: DataParallel
) -> None:
    engines.first_port = FIRST_PORT + 10

    async def follows(received: Received, wire: Wire) -> None:
        is_there = received.body["kv_transfer_params"]["remote_port"] >= FIRST_PORT + 10
        await (decodes if is_there else stalls)(received, wire)

    d.script = follows
    assert [known.complete().status_code for _ in range(4)] == [200] * 4
    assert legs_of(d) == [
        (True, FIRST_PORT), (False, FIRST_PORT + 10), (True, FIRST_PORT + 1), (False, FIRST_PORT + 11),
        (True, FIRST_PORT + 10), (True, FIRST_PORT + 11),
    ]  # fmt: skip


def test_ranks_are_still_known_of_a_server_that_has_broken_off(
    known: Proxy, p: FakeServer, d: FakeServer, engines: DataParallel
) -> None:
    p.script, d.script = drops, stalls
    assert known.complete().status_code == 502
    p.script, d.script = engines, decodes
    d.received.clear()
    assert [known.complete().status_code for _ in range(4)] == [200] * 4
    assert sorted(legs_of(d)[:2]) == [(False, FIRST_PORT), (False, FIRST_PORT + 1)]
    assert sorted(legs_of(d)[2:]) == [(True, FIRST_PORT), (True, FIRST_PORT + 1)]


def test_a_rank_that_answers_nothing_holds_up_only_what_it_has(
    known: Proxy, d: FakeServer, engines: DataParallel
) -> None:
    """Its process has died, so that D finds nobody at its address either."""
    engines.silent, gate = {1}, threading.Event()

    async def follows(received: Received, wire: Wire) -> None:
        if received.body["kv_transfer_params"]["remote_port"] == FIRST_PORT + 1:
            await opened(gate)
            await answers(500, b"nobody is there")(received, wire)
        await decodes(received, wire)

    d.script = follows
    assert known.complete().status_code == 200
    dead = RawClient.completing(known, b'{"prompt": "a", "stream": true}')
    until(lambda: engines.chosen == [0, 1])
    assert [known.complete().status_code for _ in range(5)] == [200] * 5
    gate.set()
    assert dead.receive_until(b"nobody is there"), "D's error does not wait for P"
    dead.leave()
    assert [known.complete().status_code for _ in range(4)] == [200] * 4, "nothing new goes there for a while"
    assert engines.chosen.count(1) == 1


def test_a_decode_server_that_knows_no_names_is_found_out_behind_ranks_too(known: Proxy, d: FakeServer) -> None:
    async def knows_no_names(received: Received, wire: Wire) -> None:
        by_name = "transfer_id" in received.body["kv_transfer_params"]
        await (answers(500, b"Internal Server Error") if by_name else decodes)(received, wire)

    d.script = knows_no_names
    statuses = [known.complete().status_code for _ in range(16)]
    assert 2 <= statuses.count(500) <= 4, "two of each rank at most"
    assert statuses[-6:] == [200] * 6


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages", "/inference/v1/generate"])
def test_ranks_are_known_on_all_paths(known: Proxy, d: FakeServer, path: str) -> None:
    assert known.http.post(path, json={"messages": [], "prompt": "a"}).status_code == 200
    assert legs_of(d) == [(True, FIRST_PORT)]


def test_responses_go_in_turn_because_vllm_takes_no_rank_there(
    known: Proxy, p: FakeServer, d: FakeServer, engines: DataParallel
) -> None:
    for _ in range(3):
        assert known.http.post("/v1/responses", json={"input": "a"}).status_code == 200
    assert [is_at_once for is_at_once, _ in legs_of(d)] == [False] * 3
    assert all("x-data-parallel-rank" not in one.headers for one in p.received)


def test_legs_that_go_in_turn_anyway_are_left_to_vllms_own_balance(
    setup: ProxySetup, p: FakeServer, d: FakeServer
) -> None:
    proxy = setup.proxy([p], [d], legs="in-turn")
    assert [proxy.complete().status_code for _ in range(8)] == [200] * 8
    assert all("x-data-parallel-rank" not in one.headers for one in p.received)


@pytest.mark.parametrize("takes_rank", [False, True], ids=["no ranks", "one rank each"])
def test_other_engines_behind_one_url_are_served_in_turn(
    proxy: Proxy, p: FakeServer, d: FakeServer, takes_rank: bool
) -> None:
    """Servers behind a load balancer, each of which has one rank, or none that a header chooses."""
    servers = [DataParallel(1, takes_rank=takes_rank) for _ in range(3)]
    for number, server in enumerate(servers):
        server.first_port += number
    balance = itertools.cycle(servers)

    async def balanced(received: Received, wire: Wire) -> None:
        await next(balance)(received, wire)

    p.script = balanced
    assert [proxy.complete().status_code for _ in range(9)] == [200] * 9
    asked = sum(len(server.chosen) for server in servers)
    d.received.clear()
    assert [proxy.complete().status_code for _ in range(6)] == [200] * 6
    assert [is_at_once for is_at_once, _ in legs_of(d)] == [False] * 6
    assert sum(len(server.chosen) for server in servers) == asked + 6
    assert [one.headers.get("x-data-parallel-rank") for one in p.received].count("65535") == 1


def test_a_load_balancer_before_servers_with_ranks_is_served_in_turn(
    proxy: Proxy, p: FakeServer, d: FakeServer
) -> None:
    """The same rank of each is another engine."""
    servers = [DataParallel(2), DataParallel(2)]
    servers[1].first_port += 2
    balance = itertools.count()

    async def balanced(received: Received, wire: Wire) -> None:
        await servers[next(balance) // 2 % 2](received, wire)

    p.script = balanced
    assert [proxy.complete().status_code for _ in range(24)] == [200] * 24
    d.received.clear()
    assert [proxy.complete().status_code for _ in range(6)] == [200] * 6
    assert [is_at_once for is_at_once, _ in legs_of(d)] == [False] * 6


def test_the_log_says_how_many_ranks_were_found(proxy: Proxy, p: FakeServer, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    assert [proxy.complete().status_code for _ in range(8)] == [200] * 8
    assert f"prefill server {p.url} has 2 data-parallel ranks to choose from" in caplog.messages


# Without servers


def learn(addresses: ControlAddresses, engine: Engine, port: int) -> None:
    addresses.learn(engine, NAMED_TRANSFER | {"remote_host": "10.0.0.1", "remote_port": port})


def test_an_engine_that_comes_back_at_a_port_of_before_is_one_after_a_while() -> None:
    clock, server = ManualClock(), Server("http://p")
    addresses = ControlAddresses(clock)
    engine = addresses.choose(server, by_rank=False)

    def told(port: int) -> Address | None:
        learn(addresses, engine, port)
        return engine.address

    assert [told(port) for port in (1, 2)] == [Address("10.0.0.1", 1), Address("10.0.0.1", 2)]
    assert [told(port) for port in (1, 1)] == [None, None], "several engines behind one URL do that, too"
    clock.advance(299.0)
    assert told(1) is None
    clock.advance(2.0)
    assert told(1) == Address("10.0.0.1", 1)
    assert told(2) == Address("10.0.0.1", 2)


def test_the_ranks_are_counted_again_after_a_while() -> None:
    """A server may come back with more, unseen, and at the addresses of before."""
    clock, server = ManualClock(), Server("http://p")
    addresses = ControlAddresses(clock)
    for port in (1, 2, 1):
        learn(addresses, addresses.choose(server, by_rank=True), port)
    addresses.choose(server, by_rank=True)
    addresses.count(server, 2)
    for _ in range(2):
        rank = addresses.choose(server, by_rank=True)
        learn(addresses, rank, 1 + (rank.rank or 0))
    assert addresses.of(server) == [Address("10.0.0.1", 1), Address("10.0.0.1", 2)]
    clock.advance(299.0)
    assert [addresses.choose(server, by_rank=True).rank for _ in range(2)] == [0, 1]
    clock.advance(2.0)
    assert str(addresses.choose(server, by_rank=True)) == "http://p rank 65535"
    addresses.count(server, 3)
    assert [each.port for each in addresses.of(server)] == [1, 2], "what is known stays known"
    chosen = []
    for _ in range(3):
        clock.advance(1.0)
        chosen.append(addresses.choose(server, by_rank=True).rank)
    assert chosen == [2, 0, 1]


def test_a_server_of_ranks_is_never_one_engine_for_those_that_name_none() -> None:
    """Few do, and may meet the same rank for a while."""
    clock, server = ManualClock(), Server("http://p")
    addresses = ControlAddresses(clock)
    whole = addresses.choose(server, by_rank=False)
    for port in (1, 2, 1):
        learn(addresses, whole, port)
    addresses.count(server, 2)
    clock.advance(301.0)
    learn(addresses, whole, 1)
    assert addresses.choose(server, by_rank=False).address is None
    addresses.count(server, 1)
    assert addresses.choose(server, by_rank=False).address == Address("10.0.0.1", 1)
