"""The handover on the proxy's ``/metrics``: of which requests it is, and what of their time."""

import re
import threading
import time
from typing import Literal

import pytest

from pd_proxy.journal import Journal, Record
from tests.support.examples.fake_servers import FakeServer, Received, Wire, answers, opened, prefills_by_name, waits
from tests.support.examples.harness import RawClient
from tests.support.examples.served_proxy import Proxy, ProxySetup
from tests.support.waiting import until

WAYS = pytest.mark.parametrize("legs", ["in-turn", "together"])
#: Seconds that a server waits on purpose: what is measured must have them, or must not.
A_WHILE = 0.2
TOKEN = b'data: {"choices": [{"text": " a"}]}\n\n'


async def streams(_: Received, wire: Wire) -> None:
    """A decode server that sends a token, and then the end."""
    await wire.head()
    await wire.chunk(TOKEN)
    await wire.chunk(b"data: [DONE]\n\n")
    await wire.end()


def proxy_of(setup: ProxySetup, p: FakeServer, d: FakeServer, legs: str) -> Proxy:
    """A proxy that knows P, and sends the next request's legs in this way."""
    p.script = prefills_by_name
    proxy = setup.proxy([p], [d], legs=legs)
    assert proxy.complete().status_code == 200  # in turn, and not a stream
    return proxy


def summary(proxy: Proxy, name: str, legs: str) -> tuple[float, float]:
    """Sum and count of a summary, 0 where there is none."""
    text = proxy.http.get("/metrics").text
    found = re.findall(rf'^pd_proxy_{name}_seconds_(?:sum|count){{legs="{legs}"}} (\S+)$', text, re.MULTILINE)
    total, count = map(float, found or (0, 0))
    return total, count


def counted(proxy: Proxy, legs: str) -> float:
    """The sum of the handovers, once there is one."""
    until(lambda: summary(proxy, "handover", legs)[1] == 1)
    return summary(proxy, "handover", legs)[0]


@WAYS
def test_it_is_there_from_the_start(setup: ProxySetup, p: FakeServer, d: FakeServer, legs: str) -> None:
    shown = setup.proxy([p], [d]).http.get("/metrics").text
    assert f'pd_proxy_handover_seconds_count{{legs="{legs}"}} 0' in shown


@WAYS
def test_a_stream_has_one_and_an_answer_in_one_piece_has_none(
    setup: ProxySetup, p: FakeServer, d: FakeServer, legs: str
) -> None:
    proxy = proxy_of(setup, p, d, legs)
    proxy.complete()
    until(lambda: summary(proxy, "decode_first_byte", legs)[1] > 0)
    assert summary(proxy, "handover", legs) == (0.0, 0)
    d.script = streams
    proxy.complete(stream=True)
    counted(proxy, legs)


@WAYS
def test_the_time_of_p_is_not_in_it_and_the_time_of_d_is(
    setup: ProxySetup, p: FakeServer, d: FakeServer, legs: Literal["in-turn", "together"]
) -> None:
    proxy = proxy_of(setup, p, d, legs)
    p_done, d_begins = threading.Event(), threading.Event()
    p.script, d.script = waits(p_done, prefills_by_name), waits(d_begins, streams)
    asked = threading.Thread(target=proxy.complete, kwargs={"stream": True})
    asked.start()
    p.wait(2)
    if legs == "together":
        d.wait(2)  # the decode leg runs while P computes
    time.sleep(A_WHILE)
    p_done.set()
    d.wait(2)
    time.sleep(A_WHILE)
    d_begins.set()
    asked.join()
    handover = counted(proxy, legs)
    assert handover > 0
    if legs == "together":
        assert summary(proxy, "decode_first_byte", legs)[0] - handover >= A_WHILE
    else:
        assert handover >= A_WHILE


def test_it_is_nothing_where_d_was_first(setup: ProxySetup, p: FakeServer, d: FakeServer) -> None:
    proxy = proxy_of(setup, p, d, "together")
    client_has_it = threading.Event()

    async def streams_first(_: Received, wire: Wire) -> None:
        await wire.head()
        await wire.chunk(TOKEN)
        await opened(client_has_it)
        await wire.end()

    p.script, d.script = waits(client_has_it, prefills_by_name), streams_first
    client = RawClient.completing(proxy, b'{"prompt": "a question", "stream": true}')
    assert client.receive_until(TOKEN)
    client_has_it.set()
    assert counted(proxy, "together") == 0.0
    client.leave()


@WAYS
def test_requests_that_fail_or_that_d_serves_alone_have_none(
    setup: ProxySetup, p: FakeServer, d: FakeServer, legs: str
) -> None:
    proxy = proxy_of(setup, p, d, legs)
    d.script = streams
    assert proxy.complete(stream=True, use_beam_search=True).status_code == 200
    until(lambda: summary(proxy, "decode_first_byte", "decode-alone")[1] == 1)
    d.script = answers(500, b"no")
    assert proxy.complete(stream=True).status_code == 500
    until(lambda: 'pd_proxy_requests_total{status="500"} 1' in proxy.http.get("/metrics").text)
    assert summary(proxy, "handover", legs) == (0.0, 0)


@pytest.mark.parametrize(
    ("legs", "decode_at", "first_byte_s", "handover_s"),
    [
        ("in-turn", 12.25, 0.5, 0.75),  # the proxy's own quarter of a second is in it
        ("together", 10.0, 2.5, 0.5),
        ("together", 10.0, 1.5, 0.0),  # D was first
    ],
)
def test_it_runs_from_the_end_of_the_prefill_leg_to_the_first_byte_of_the_decode_leg(
    legs: str, decode_at: float, first_byte_s: float, handover_s: float
) -> None:
    journal = Journal()
    record: Record = journal.open("/v1/completions")
    record.legs, record.streams, record.status = legs, True, 200
    record.prefill_at, record.prefill_s = 10.0, 2.0
    record.decode_at, record.first_byte_s = decode_at, first_byte_s
    journal.close(record)
    shown = journal.exposition([])
    assert f'pd_proxy_handover_seconds_sum{{legs="{legs}"}} {handover_s:.6f}' in shown
    assert f'pd_proxy_handover_seconds_count{{legs="{legs}"}} 1' in shown
