"""Decode servers that cannot follow a transfer by its name, which nothing says: their legs go in turn."""

import logging
from typing import Any

import pytest

from pd_proxy.control import Address, CircuitBreaker
from tests.support.examples.fake_servers import (
    MESSAGE_START,
    NAMED_TRANSFER,
    ROLE_CHUNK,
    FakeServer,
    Received,
    Wire,
    answers,
    decodes,
    prefills_by_name,
    stalls,
)
from tests.support.examples.served_proxy import Proxy, ProxySetup
from tests.support.waiting import ManualClock

AT = Address("10.0.0.1", 8998)


def by_name(body: Any) -> bool:
    """Whether a decode leg was sent together with its prefill leg."""
    return "transfer_id" in body["kv_transfer_params"]


async def knows_no_names(received: Received, wire: Wire) -> None:
    """A decode server whose connector knows what a prefill server answers, and nothing else."""
    await (answers(500, b"Internal Server Error") if by_name(received.body) else decodes)(received, wire)


@pytest.fixture
def p(setup: ProxySetup) -> FakeServer:
    """A prefill server whose transfers can be followed by their names."""
    return setup.server(prefills_by_name)


def test_a_decode_server_that_knows_no_names_costs_two_requests(
    proxy: Proxy, p: FakeServer, d: FakeServer, caplog: pytest.LogCaptureFixture
) -> None:
    d.script = knows_no_names
    for number, status in enumerate([200, 500, 200, 500, 200, 200, 200]):
        response = proxy.http.post("/v1/completions", json={"prompt": "a"}, headers={"X-Request-Id": f"id-{number}"})
        assert response.status_code == status
    assert [by_name(body) for body in d.bodies] == [False, True, False, True, False, False, False]
    (line,) = [line for line in caplog.messages if "its legs go in turn for 300 s" in line]
    assert f"decode server {d.url} failed requests id-1 and id-3 with both legs at once" in line


@pytest.mark.parametrize(
    ("path", "begun", "error"),
    [
        ("/v1/completions", b"", b'data: {"error": {"code": 500}}\n\n'),
        ("/v1/chat/completions", 2 * ROLE_CHUNK, b'data: {"error": {"code": 500}}\n\n'),
        ("/v1/messages", MESSAGE_START, b'event: error\ndata: {"type": "error", "error": {}}\n\n'),
    ],
    ids=["completions", "chat", "messages"],
)
def test_one_whose_streams_begin_before_they_fail_costs_two_as_well(
    proxy: Proxy, d: FakeServer, path: str, begun: bytes, error: bytes
) -> None:
    async def begins_all(received: Received, wire: Wire) -> None:
        await wire.head()
        if begun:
            await wire.chunk(begun)
        await wire.chunk(error if by_name(received.body) else b"data: [DONE]\n\n")
        await wire.end()

    d.script = begins_all
    streams = [proxy.http.post(path, json={"prompt": "a", "stream": True}).content for _ in range(7)]
    assert streams == [begun + (error if by_name(body) else b"data: [DONE]\n\n") for body in d.bodies]
    assert [by_name(body) for body in d.bodies] == [False, True, False, True, False, False, False]
    assert "pd_proxy_broken_off_total 2" in proxy.http.get("/metrics").text


def test_a_decode_server_that_was_replaced_gets_both_legs_at_once_again(
    proxy: Proxy, d: FakeServer, caplog: pytest.LogCaptureFixture
) -> None:
    """One with another dtype fails whatever it is sent: nothing is wrong with the names."""
    caplog.set_level(logging.INFO)
    assert proxy.complete().status_code == 200
    d.script = answers(500, b"Internal Server Error")
    failed = [proxy.complete() for _ in range(3)]
    d.script = decodes
    assert [proxy.complete().status_code for _ in range(3)] == [200, 200, 200]
    assert [by_name(body) for body in d.bodies] == [False, True, False, False, False, True, True]
    assert "its legs go in turn" not in caplog.text
    identity = failed[0].headers["x-request-id"]
    assert f"decode server {d.url} failed request {identity} with both legs at once and has served one" in caplog.text


def test_one_that_was_replaced_twice_is_not_put_down_to_names(
    proxy: Proxy, d: FakeServer, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(3):
        d.script = decodes
        assert [proxy.complete().status_code for _ in range(3)] == [200, 200, 200]
        d.script = answers(500, b"Internal Server Error")
        assert proxy.complete().status_code == 500
    assert "its legs go in turn" not in caplog.text


def test_others_get_both_legs_at_once_beside_it(setup: ProxySetup, p: FakeServer, d: FakeServer) -> None:
    old = setup.server(knows_no_names)
    proxy = setup.proxy([p], [d, old])
    assert [proxy.complete().status_code for _ in range(16)].count(500) == 2
    assert [by_name(body) for body in d.bodies[-3:]] == [True] * 3
    assert [by_name(body) for body in old.bodies[-3:]] == [False] * 3


def test_what_the_prefill_server_has_caused_is_not_put_down_to_the_decode_server(
    proxy: Proxy, p: FakeServer, d: FakeServer
) -> None:
    assert proxy.complete().status_code == 200
    p.script, d.script = answers(500, b"no more memory"), answers(500, b"the transfer has ended")
    assert proxy.complete().status_code == 500
    p.script, d.script = prefills_by_name, decodes
    assert [proxy.complete().status_code for _ in range(2)] == [200, 200]
    assert by_name(d.bodies[-1])


@pytest.mark.parametrize("full", ["p", "d"])
def test_a_server_that_is_full_is_put_down_to_nothing(
    proxy: Proxy, p: FakeServer, d: FakeServer, caplog: pytest.LogCaptureFixture, full: str
) -> None:
    """It says so at once, and its connector has heard nothing. Others are under way meanwhile, and served."""
    assert proxy.complete().status_code == 200
    for _ in range(3):
        p.script = answers(503, b'{"error": {}}') if full == "p" else stalls
        d.script = answers(503, b'{"error": {}}') if full == "d" else stalls
        assert (proxy.complete().status_code, proxy.complete(stream=True).status_code) == (503, 503)
        p.script, d.script = prefills_by_name, decodes
        assert proxy.complete().status_code == 200
    assert [by_name(body) for body in p.bodies] == [False] + [True] * 9
    assert "both legs at once" not in caplog.text


def test_nor_is_one_that_says_so_in_a_stream_of_messages(
    proxy: Proxy, d: FakeServer, caplog: pytest.LogCaptureFixture
) -> None:
    """Such a stream has names of errors, and no codes."""
    asked = {"max_tokens": 5, "messages": [{"role": "user", "content": "a"}], "stream": True}
    full = b'event: error\ndata: {"type":"error","error":{"type":"overloaded_error","message":"paused"}}\n\n'
    assert proxy.complete().status_code == 200
    for _ in range(3):
        d.script = answers(200, full, content_type="text/event-stream")
        assert b"overloaded_error" in proxy.http.post("/v1/messages", json=asked).content
        d.script = decodes
        assert proxy.complete().status_code == 200
    assert "both legs at once" not in caplog.text


@pytest.mark.parametrize(
    ("reason", "in_turn"), [("length", [0, 5]), ("error", [0, 2, 4, 5])], ids=["unwanted", "for another reason"]
)
def test_a_prefill_server_that_hands_nothing_over_is_a_new_one_if_it_does_so_again(
    proxy: Proxy, p: FakeServer, caplog: pytest.LogCaptureFixture, reason: str, in_turn: list[int]
) -> None:
    """Once is no sign of that where its answer is whole: D has all of a prompt, or has given its transfer up."""
    caplog.set_level(logging.INFO)
    nothing = answers(200, b'{"choices": [{"finish_reason": "%b"}], "kv_transfer_params": null}' % reason.encode())
    for script in (prefills_by_name, nothing, prefills_by_name, nothing, nothing, prefills_by_name, prefills_by_name):
        p.script = script
        proxy.complete()
    assert [number for number, body in enumerate(p.bodies) if not by_name(body)] == in_turn
    lines = [line for line in caplog.messages if "by name: it may need nothing" in line]
    assert len(lines) == (3 if reason == "length" else 2)


def test_an_address_that_was_wrong_is_not_put_down_to_the_decode_server() -> None:
    breaker = CircuitBreaker()
    for _ in range(3):
        breaker.failed_at_once("d", "p", AT, "id")
        assert breaker.go_in_turn("d", "p")
        breaker.served_in_turn("d", "p", Address(NAMED_TRANSFER["remote_host"], 17))
        assert not breaker.go_in_turn("d", "p")


def test_a_decode_server_is_tried_again_after_a_while() -> None:
    clock = ManualClock()
    breaker = CircuitBreaker(clock)
    for _ in range(2):
        assert not breaker.go_in_turn("d", "another p")
        breaker.failed_at_once("d", "p", AT, "id")
        breaker.served_in_turn("d", "p", AT)
    assert breaker.go_in_turn("d", "another p")
    clock.advance(301)
    assert not breaker.go_in_turn("d", "p")


def test_one_that_serves_both_legs_at_once_is_not_doubted_any_more() -> None:
    breaker = CircuitBreaker()
    for _ in range(3):
        breaker.failed_at_once("d", "p", AT, "id")
        breaker.served_in_turn("d", "p", AT)
        breaker.served_at_once("d", "p")
        assert not breaker.go_in_turn("d", "p")
