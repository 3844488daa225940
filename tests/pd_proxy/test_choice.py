"""Which of several servers gets a request."""

import threading
import time

import pytest

from tests.support.examples.fake_servers import TRANSFER, FakeServer, answers, decodes, prefills, stalls
from tests.support.examples.harness import RawClient
from tests.support.examples.served_proxy import Proxy, ProxySetup
from tests.support.waiting import until

REQUEST = b'{"model": "tiny", "prompt": "a"}'


def test_idle_servers_take_turns(setup: ProxySetup, p: FakeServer, d: FakeServer) -> None:
    more_p, more_d = setup.server(prefills), setup.server(decodes)
    proxy = setup.proxy([p, more_p], [d, more_d])
    for _ in range(6):
        assert proxy.complete().status_code == 200
    assert [len(one.received) for one in (p, more_p, d, more_d)] == [3, 3, 3, 3]


@pytest.mark.parametrize("leg", ["prefill", "decode"])
def test_the_server_with_the_fewest_requests_in_flight_is_chosen(
    setup: ProxySetup, p: FakeServer, d: FakeServer, leg: str
) -> None:
    busy = setup.server(stalls)
    idle = p if leg == "prefill" else d
    proxy = setup.proxy([busy, p], [d]) if leg == "prefill" else setup.proxy([p], [busy, d])
    hanging = RawClient.completing(proxy, REQUEST)
    busy.wait()
    for _ in range(3):
        assert proxy.complete().status_code == 200
    assert (len(busy.received), len(idle.received)) == (1, 3)
    hanging.leave()
    until(lambda: proxy.in_flight() == 0)


def test_a_refusing_prefill_server_is_skipped_for_a_while(
    setup: ProxySetup, p: FakeServer, d: FakeServer, closed_port: str, caplog: pytest.LogCaptureFixture
) -> None:
    proxy = setup.proxy([closed_port, p], [d], skip_s=0.5)
    first = time.monotonic()
    assert proxy.complete().status_code == 200
    (warning,) = caplog.messages
    assert f"prefill server {closed_port} cannot be reached" in warning
    assert proxy.complete().status_code == 200
    assert len(caplog.messages) == 1 or time.monotonic() - first > 0.5
    until(lambda: proxy.complete().status_code == 200 and len(caplog.messages) >= 2)


def test_one_request_finds_out_whether_a_server_that_refused_is_back(
    setup: ProxySetup, p: FakeServer, d: FakeServer, closed_port: str
) -> None:
    proxy = setup.proxy([closed_port, p], [d], skip_s=1)
    assert proxy.complete().status_code == 200  # the first one is refused there
    p.script = stalls
    clients = [RawClient.completing(proxy, REQUEST) for _ in range(3)]
    until(lambda: len(p.received) == 4)
    back = setup.server(stalls, port=int(closed_port.rpartition(":")[2]))
    time.sleep(1.1)  # from now on it may be asked, and it has fewer in flight than the other one
    clients += [RawClient.completing(proxy, REQUEST) for _ in range(3)]
    until(lambda: len(p.received) + len(back.received) == 7)
    time.sleep(1.1)  # it has not answered yet
    clients += [RawClient.completing(proxy, REQUEST) for _ in range(2)]
    until(lambda: len(p.received) + len(back.received) == 9)
    assert len(back.received) == 1
    for client in clients:
        client.leave()
    until(lambda: proxy.in_flight() == 0)
    p.script = back.script = prefills  # nobody has found out: the next one does
    until(lambda: proxy.complete().status_code == 200 and len(back.received) == 2)


@pytest.mark.parametrize("leg", ["prefill", "decode"])
def test_a_server_that_fails_at_once_does_not_draw_all_requests(
    setup: ProxySetup, p: FakeServer, d: FakeServer, leg: str
) -> None:
    """It always has the fewest in flight."""
    failing, well = setup.server(answers(503, b"no")), p if leg == "prefill" else d
    of_prefill, of_decode = ([p, failing], [d]) if leg == "prefill" else ([p], [d, failing])
    proxy = setup.proxy([*of_prefill], [*of_decode], skip_s=60)
    script, well.script = well.script, stalls
    hanging = RawClient.completing(proxy, REQUEST)
    well.wait()
    well.script = script
    statuses = [proxy.complete().status_code for _ in range(10)]
    assert len(failing.received) == 3
    assert statuses.count(200) >= 7
    hanging.leave()


def test_a_server_that_does_not_know_what_is_asked_has_not_failed(
    setup: ProxySetup, p: FakeServer, d: FakeServer
) -> None:
    refusing = setup.server(answers(501, b"no"))
    proxy = setup.proxy([p], [refusing, d], skip_s=60)
    for _ in range(10):
        proxy.complete()
    assert len(refusing.received) == 5


def test_a_decode_server_that_never_saw_the_request_is_replaced_without_a_second_prefill(
    setup: ProxySetup, p: FakeServer, d: FakeServer, closed_port: str
) -> None:
    assert setup.proxy([p], [closed_port, d]).complete().status_code == 200
    assert len(p.received) == 1
    assert d.bodies[0]["kv_transfer_params"] == TRANSFER


def test_a_server_that_is_back_is_used_at_once_where_no_other_is_left(
    setup: ProxySetup, p: FakeServer, closed_port: str
) -> None:
    proxy = setup.proxy([p], [closed_port], skip_s=60)
    assert proxy.complete().status_code == 502
    setup.server(decodes, port=int(closed_port.rsplit(":", 1)[1]))
    assert proxy.complete().status_code == 200


def test_a_failed_leg_gives_its_place_in_the_count_back(setup: ProxySetup, p: FakeServer, closed_port: str) -> None:
    proxy: Proxy = setup.proxy([p], [closed_port])
    threads = [threading.Thread(target=proxy.complete) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    until(lambda: proxy.in_flight() == 0)
