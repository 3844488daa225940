"""Both legs at once: when they are sent so, what each is told, and who ends whom."""

import asyncio
import logging
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from tests.support.examples.fake_servers import (
    MESSAGE_START,
    NAMED_TRANSFER,
    ROLE_CHUNK,
    FakeServer,
    Received,
    Script,
    Wire,
    answers,
    decodes,
    drops,
    opened,
    prefills_by_name,
    stalls,
    waits,
)
from tests.support.examples.harness import RawClient
from tests.support.examples.served_proxy import Proxy, ProxySetup
from tests.support.waiting import until

REQUEST = b'{"model": "tiny", "prompt": "a", "stream": true}'
WELL = {"choices": [{"text": " the answer"}]}


@pytest.fixture
def p(setup: ProxySetup) -> FakeServer:
    """A prefill server whose transfers can be followed by their names."""
    return setup.server(prefills_by_name)


@pytest.fixture
def known(proxy: Proxy, p: FakeServer, d: FakeServer) -> Proxy:
    """A proxy that has had an answer of ``p``."""
    return introduced(proxy, p, d)


@pytest.fixture
def together_line(caplog: pytest.LogCaptureFixture) -> Callable[[], str]:
    """Waits for the access line of a request whose legs were sent at once."""
    caplog.set_level(logging.INFO)
    return lambda: until(lambda: next((line for line in caplog.messages if " legs=together " in line), ""))


def introduced(proxy: Proxy, *servers: FakeServer, requests: int = 1) -> Proxy:
    """The proxy, after so many requests, which the servers then forget."""
    for _ in range(requests):
        assert proxy.complete().status_code == 200
    for server in servers:
        server.received.clear()
    return proxy


def answers_as(host: str, port: int) -> Script:
    """A prefill server whose control channel is there."""

    async def script(_: Received, wire: Wire) -> None:
        transfer = NAMED_TRANSFER | {"remote_host": host, "remote_port": port}
        await wire.json(200, {"choices": [{"finish_reason": "length"}], "kv_transfer_params": transfer})

    return script


async def gives_up(_: Received, wire: Wire) -> None:
    """A prefill server that is told to stop."""
    await wire.json(200, {"choices": [{"finish_reason": "abort"}], "kv_transfer_params": None})


def name_of(body: Any) -> str:
    """The transfer id in a leg's body."""
    return str(body["kv_transfer_params"]["transfer_id"])


# When


def test_the_first_request_goes_in_turn_and_the_next_as_both_legs_at_once(
    proxy: Proxy, p: FakeServer, d: FakeServer, access_lines: Callable[[int], list[str]]
) -> None:
    assert proxy.complete().json() == WELL
    assert "transfer_id" not in p.bodies[0]["kv_transfer_params"]
    assert d.bodies[0]["kv_transfer_params"] == NAMED_TRANSFER
    gate = threading.Event()
    p.script = waits(gate, prefills_by_name)  # P answers only when D has its leg

    def open_gate() -> None:
        d.wait(2)
        gate.set()

    thread = threading.Thread(target=open_gate)
    thread.start()
    assert proxy.complete().json() == WELL
    thread.join()
    asked = p.bodies[1]["kv_transfer_params"]
    assert (asked["do_remote_decode"], asked["do_remote_prefill"], p.bodies[1]["max_tokens"]) == (True, False, 1)
    assert d.bodies[1] == {
        "model": "tiny",
        "prompt": "a question",
        "kv_transfer_params": {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "transfer_id": asked["transfer_id"],
            "remote_host": NAMED_TRANSFER["remote_host"],
            "remote_port": NAMED_TRANSFER["remote_port"],
        },
    }
    assert [line.split(" legs=")[1].split()[0] for line in access_lines(2)] == ["in-turn", "together"]
    metrics = proxy.http.get("/metrics").text
    assert 'pd_proxy_legs_total{legs="in-turn"} 1' in metrics
    assert 'pd_proxy_legs_total{legs="together"} 1' in metrics
    assert 'pd_proxy_decode_first_byte_seconds_count{legs="together"} 1' in metrics


def test_every_request_has_a_name_of_its_own(known: Proxy, p: FakeServer, d: FakeServer) -> None:
    for _ in range(3):
        known.http.post("/v1/chat/completions", json={"messages": []}, headers={"X-Request-Id": "the same"})
    names = [name_of(body) for body in p.bodies]
    assert len(set(names)) == 3
    assert [name_of(body) for body in d.bodies] == names


def test_a_prefill_server_is_known_on_all_paths(known: Proxy, p: FakeServer) -> None:
    known.http.post("/v1/chat/completions", json={"messages": []})
    assert name_of(p.bodies[0])


def test_in_turn_is_in_turn(setup: ProxySetup, p: FakeServer, d: FakeServer) -> None:
    proxy = setup.proxy([p], [d], legs="in-turn")
    for _ in range(3):
        assert proxy.complete().status_code == 200
    assert [body["kv_transfer_params"] for body in d.bodies] == [NAMED_TRANSFER] * 3


@pytest.mark.parametrize(
    "changed", [{"remote_host": None}, {"remote_port": "4711"}, {"remote_host": ""}, {"remote_port": True}], ids=str
)
def test_a_prefill_server_that_tells_no_address_stays_in_turn(
    proxy: Proxy, p: FakeServer, d: FakeServer, changed: dict[str, Any]
) -> None:
    told = NAMED_TRANSFER | changed

    async def tells(_: Received, wire: Wire) -> None:
        await wire.json(200, {"kv_transfer_params": told})

    p.script = tells
    introduced(proxy)
    assert proxy.complete().status_code == 200
    assert [body["kv_transfer_params"] for body in d.bodies] == [told] * 2


def test_a_request_that_cannot_be_divided_goes_to_decode_alone(known: Proxy, p: FakeServer, d: FakeServer) -> None:
    assert known.complete(use_beam_search=True).json() == WELL
    assert p.received == []
    assert "kv_transfer_params" not in d.bodies[0]


# An address that is no longer right


def test_a_prefill_server_with_a_new_address_costs_no_request(known: Proxy, p: FakeServer, d: FakeServer) -> None:
    async def follows(received: Received, wire: Wire) -> None:
        if received.body["kv_transfer_params"]["remote_port"] == NAMED_TRANSFER["remote_port"]:
            await stalls(received, wire)  # for a transfer of which nobody knows there
        await decodes(received, wire)

    p.script, d.script = answers_as("10.0.0.2", 17), follows
    assert known.complete().json() == WELL
    assert len(p.received) == 1
    assert d.received[0].left.wait(30)
    assert d.bodies[1]["kv_transfer_params"] == NAMED_TRANSFER | {"remote_host": "10.0.0.2", "remote_port": 17}
    assert known.complete().json() == WELL
    assert d.bodies[2]["kv_transfer_params"]["remote_port"] == 17
    assert name_of(d.bodies[2]) == name_of(p.bodies[1])
    assert len(d.received) == 3


def test_who_answers_from_the_address_that_d_was_told_is_not_asked_again(
    known: Proxy, p: FakeServer, d: FakeServer
) -> None:
    """Though another engine behind the same URL has answered meanwhile: D has pulled, and the lease is used up."""
    gate, first = threading.Event(), NAMED_TRANSFER["remote_port"]

    async def follows(received: Received, wire: Wire) -> None:
        if received.body["kv_transfer_params"]["remote_port"] == first:
            await (opened(gate) if received is d.received[0] else stalls(received, wire))
            await asyncio.sleep(0.5)  # P's answer comes first
        await decodes(received, wire)

    async def prefills(received: Received, wire: Wire) -> None:
        is_first = received is p.received[0]
        await (waits(gate, prefills_by_name) if is_first else answers_as("10.0.0.2", 17))(received, wire)

    p.script, d.script = prefills, follows
    with ThreadPoolExecutor(1) as other:
        answer = other.submit(known.complete)
        for server in (p, d):
            server.wait(1)
        assert known.complete().json() == WELL
        gate.set()
        assert answer.result().json() == WELL
    assert [body["kv_transfer_params"]["remote_port"] for body in d.bodies] == [first, first, 17]


def test_several_engines_behind_one_url_are_served_in_turn(proxy: Proxy, p: FakeServer, d: FakeServer) -> None:
    """Until that is known, a request may need a second leg of D, and all are served."""
    for turn in range(9):
        p.script = answers_as("10.0.0.2", 17 + turn % 3)
        assert proxy.complete().json() == WELL
    d.received.clear()
    for turn in range(4):
        p.script = answers_as("10.0.0.2", 17 + turn % 2)
        assert proxy.complete().json() == WELL
    assert ["transfer_id" in body["kv_transfer_params"] for body in d.bodies] == [False] * 4


def test_a_prefill_server_that_could_not_be_reached_begins_in_turn(
    setup: ProxySetup, d: FakeServer, closed_port: str
) -> None:
    port = int(closed_port.rsplit(":", 1)[1])
    p = setup.server(prefills_by_name, port)
    proxy = introduced(setup.proxy([p], [d]), d)
    setup.stop(p)
    assert proxy.complete().status_code == 502
    setup.server(prefills_by_name, port)
    d.received.clear()
    until(lambda: proxy.complete().status_code == 200)
    assert d.bodies[-1]["kv_transfer_params"] == NAMED_TRANSFER


def test_an_error_of_the_decode_server_makes_the_next_request_go_in_turn(
    known: Proxy, p: FakeServer, d: FakeServer
) -> None:
    p.script, d.script = stalls, answers(500, b"unknown transfer")
    assert known.complete().text == "unknown transfer"
    p.script, d.script = prefills_by_name, decodes
    assert known.complete().status_code == 200
    assert d.bodies[1]["kv_transfer_params"] == NAMED_TRANSFER


# P's fault


@pytest.mark.parametrize("status", [400, 404, 429, 500])
def test_an_error_of_the_prefill_server_does_not_wait_for_the_decode_server(
    known: Proxy, p: FakeServer, d: FakeServer, status: int
) -> None:
    told = b'{"error": {"message": "max_model_len is 4096"}}'
    p.script, d.script = answers(status, told, Content_Type="application/json"), stalls
    response = known.complete(stream=True)
    assert (response.status_code, response.content) == (status, told)
    assert all(one.left.wait(30) for one in d.received)
    until(lambda: known.in_flight() == 0)


def test_a_useless_answer_of_the_prefill_server_is_an_error_at_once(known: Proxy, p: FakeServer, d: FakeServer) -> None:
    p.script, d.script = answers(200, b"<html>"), stalls
    response = known.complete()
    assert response.status_code == 502
    assert response.json()["error"]["message"] == "a prefill server answered with invalid JSON"


@pytest.mark.parametrize("script", [decodes, answers(500, b"the transfer has ended")], ids=["answers", "fails"])
def test_where_the_prefill_server_hands_nothing_over_the_decode_server_decides(
    known: Proxy, p: FakeServer, d: FakeServer, caplog: pytest.LogCaptureFixture, script: Script
) -> None:
    """It may have given the transfer up and computes the prompt itself, or is told that there will be none."""
    caplog.set_level(logging.INFO)
    gate = threading.Event()
    p.script, d.script = answers(200, b'{"choices": []}'), waits(gate, script)
    client = RawClient.completing(known, REQUEST)
    until(lambda: any("returned no kv_transfer_params" in line for line in caplog.messages))
    gate.set()
    assert client.receive_until(b"the answer" if script is decodes else b"the transfer has ended")
    p.script = prefills_by_name
    d.script = decodes
    assert known.complete().status_code == 200
    assert d.bodies[-1]["kv_transfer_params"] == NAMED_TRANSFER
    client.leave()


async def begins_and_stalls(received: Received, wire: Wire) -> None:
    await wire.head()  # vLLM says 200 before it computes
    await stalls(received, wire)


@pytest.mark.parametrize("waiting", [stalls, begins_and_stalls])
@pytest.mark.parametrize(
    "script", [drops, answers(500, b"Internal Server Error"), gives_up], ids=["drops", "500", "gives up"]
)
def test_a_prefill_server_that_fails_is_followed_by_another_under_another_name(
    setup: ProxySetup, p: FakeServer, d: FakeServer, waiting: Script, script: Script
) -> None:
    other = setup.server(answers_as("10.0.0.2", 17))
    proxy = introduced(setup.proxy([p, other], [d]), p, d, other, requests=2)

    async def decodes_of_the_other(received: Received, wire: Wire) -> None:
        of_other = received.body["kv_transfer_params"]["remote_port"] == 17
        await (decodes if of_other else waiting)(received, wire)

    p.script, d.script = script, decodes_of_the_other
    assert proxy.complete().json() == WELL
    assert (len(p.received), len(other.received)) == (1, 1)
    until(lambda: len(d.received) == 2 or p.received[0].left.is_set())
    assert name_of(other.bodies[0]) == name_of(d.bodies[-1])
    assert name_of(other.bodies[0]) != name_of(p.bodies[0])
    assert all(one.left.wait(30) for one in d.received[:-1])
    until(lambda: proxy.in_flight() == 0)


def test_two_failing_prefill_servers_are_enough(setup: ProxySetup, p: FakeServer, d: FakeServer) -> None:
    three = [p, setup.server(prefills_by_name), setup.server(prefills_by_name)]
    proxy = introduced(setup.proxy(list(three), [d]), *three, requests=3)
    d.script = stalls
    for one in three:
        one.script = drops
    assert proxy.complete().status_code == 502
    assert sorted(len(one.received) for one in three) == [0, 1, 1]


def test_an_error_of_the_decode_server_gives_way_to_the_prefill_servers_that_caused_it(
    setup: ProxySetup, p: FakeServer, d: FakeServer
) -> None:
    other = setup.server(answers_as("10.0.0.2", 17))
    proxy = introduced(setup.proxy([p, other], [d]), p, d, other, requests=2)
    gate = threading.Event()

    async def fails_with_p(received: Received, wire: Wire) -> None:
        if received.body["kv_transfer_params"]["remote_port"] == 17:
            await decodes(received, wire)
        else:
            await answers(500, b"the prefill engine is gone")(received, wire)
            gate.set()

    p.script, d.script = waits(gate, drops), fails_with_p
    assert proxy.complete().json() == WELL
    assert len(other.received) == 1


@pytest.mark.parametrize(
    ("path", "begun"),
    [("/v1/completions", b""), ("/v1/chat/completions", ROLE_CHUNK), ("/v1/messages", MESSAGE_START)],
    ids=["completions", "chat", "messages"],
)
def test_an_error_with_which_ds_stream_begins_gives_way_too(
    setup: ProxySetup, p: FakeServer, d: FakeServer, path: str, begun: bytes
) -> None:
    """vLLM has said 200 when it tells of an error in a stream."""
    other = setup.server(answers_as("10.0.0.2", 17))
    proxy = introduced(setup.proxy([p, other], [d]), p, d, other, requests=2)
    gate = threading.Event()

    async def fails_with_p(received: Received, wire: Wire) -> None:
        if received.body["kv_transfer_params"]["remote_port"] == 17:
            await decodes(received, wire)
            return
        await wire.head()
        await wire.chunk(begun + b'data: {"error": {"message": "the pull failed", "code": 500}}\n\ndata: [DONE]\n\n')
        gate.set()
        await stalls(received, wire)

    p.script, d.script = waits(gate, drops), fails_with_p
    assert proxy.http.post(path, json={"prompt": "a", "stream": True}).json() == WELL
    assert len(other.received) == 1


def test_a_prefill_server_that_fails_when_the_answer_has_begun_does_not_end_it(
    known: Proxy, p: FakeServer, d: FakeServer, caplog: pytest.LogCaptureFixture
) -> None:
    begun, failed = threading.Event(), threading.Event()

    async def streams(_: Received, wire: Wire) -> None:
        await wire.head()
        await wire.chunk(b"data: 1\n\n")
        await opened(failed)
        await wire.chunk(b"data: 2\n\n")
        await wire.end()

    p.script, d.script = waits(begun, drops), streams
    with known.http.stream("POST", "/v1/completions", json={"prompt": "a"}) as response:
        pieces = response.iter_raw()
        assert next(pieces) == b"data: 1\n\n"
        begun.set()
        until(lambda: any("after D had answered" in message for message in caplog.messages))
        failed.set()
        assert list(pieces) == [b"data: 2\n\n"]


# D's fault


@pytest.mark.parametrize("status", [400, 404, 429])
def test_an_error_of_the_decode_server_takes_the_request_from_the_prefill_server(
    known: Proxy, p: FakeServer, d: FakeServer, status: int
) -> None:
    p.script, d.script = stalls, answers(status, b'{"error": {}}', Retry_After="7")
    response = known.complete(stream=True)
    assert (response.status_code, response.content) == (status, b'{"error": {}}')
    assert response.headers["retry-after"] == "7"
    assert p.wait().left.wait(30)


async def begins_and_drops(_: Received, wire: Wire) -> None:
    await wire.head()
    wire.drop()


async def breaks_a_stream(_: Received, wire: Wire) -> None:
    await wire.head()
    await wire.chunk(b"data: 1\n\n")
    wire.drop()


@pytest.mark.parametrize("script", [drops, begins_and_drops])
def test_a_decode_server_that_breaks_off_is_an_error_and_the_prefill_server_is_freed(
    known: Proxy, p: FakeServer, d: FakeServer, script: Script
) -> None:
    p.script, d.script = stalls, script
    response = known.complete(stream=True)
    assert response.status_code == 502
    assert response.json()["error"]["message"] == "a decode server broke off"
    assert p.wait().left.wait(30)


def test_an_answer_that_breaks_off_never_looks_complete(
    together_line: Callable[[], str], known: Proxy, p: FakeServer, d: FakeServer
) -> None:
    p.script, d.script = stalls, breaks_a_stream
    with known.http.stream("POST", "/v1/completions", json={"prompt": "a"}) as response:
        pieces = response.iter_raw()
        assert next(pieces) == b"data: 1\n\n"
        with pytest.raises(httpx.RemoteProtocolError):
            list(pieces)
    assert p.wait().left.wait(30)
    assert f"problem: decode server {d.url}" in together_line()


def test_a_decode_server_that_cannot_be_reached_is_followed_by_another_under_the_same_name(
    setup: ProxySetup, p: FakeServer, d: FakeServer, closed_port: str
) -> None:
    proxy = introduced(setup.proxy([p], [closed_port, d], skip_s=0.001), p, d)
    assert proxy.complete().json() == WELL
    assert [name_of(body) for body in d.bodies] == [name_of(body) for body in p.bodies]


def test_without_a_decode_server_the_prefill_server_is_freed(
    setup: ProxySetup, p: FakeServer, closed_port: str
) -> None:
    d = setup.server(decodes, int(closed_port.rsplit(":", 1)[1]))
    proxy = introduced(setup.proxy([p], [d]), p)
    setup.stop(d)
    p.script = stalls
    assert proxy.complete().status_code == 502
    until(lambda: proxy.in_flight() == 0)
    assert all(one.left.wait(30) for one in p.received)


# A client that leaves


@pytest.mark.parametrize("pieces", [0, 1])
def test_a_client_that_leaves_takes_the_request_from_both(
    together_line: Callable[[], str], known: Proxy, p: FakeServer, d: FakeServer, pieces: int
) -> None:
    async def begins(received: Received, wire: Wire) -> None:
        await wire.head()
        for _ in range(pieces):
            await wire.chunk(b"data: 1\n\n")
        await stalls(received, wire)

    p.script, d.script = stalls, begins
    client = RawClient.completing(known, REQUEST)
    both = (p.wait(), d.wait())
    if pieces:
        client.receive_until(b"data: 1\n\n")
    client.leave()
    assert all(one.left.wait(30) for one in both)
    assert f"status=499 P={p.url} D={d.url} legs=together" in together_line()
    until(lambda: known.in_flight() == 0)
    p.script, d.script = prefills_by_name, decodes
    assert known.complete().json() == WELL


def test_a_client_has_the_whole_answer_without_waiting_for_the_prefill_server(known: Proxy, p: FakeServer) -> None:
    p.script = stalls
    client = RawClient.completing(known, REQUEST)
    assert b"the answer" in client.receive_until(b"}]}")
    assert p.wait().left.wait(30)  # a moment later
    client.leave()
