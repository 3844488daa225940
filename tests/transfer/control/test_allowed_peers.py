"""Which hosts may be contacted: what a list says, and that nothing is sent to any other.

Covers: transfer.control.look_ups.
"""

import logging
import socket
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest

from tests.support.control.samples import HELLO, WELCOME
from tests.support.waiting import ManualClock, until
from transfer import peers as peers_module
from transfer.control.client import ControlClient
from transfer.control.failures import PeerUnreachable, TooManyPeers
from transfer.control.peer_sockets import ClientSettings
from transfer.control.server import ControlServer
from transfer.errors import BadAddress, PeerNotAllowed
from transfer.peers import AllowedPeers

HERE = "127.0.0.1"


@pytest.fixture
def names(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[str]]:
    """A name service: the addresses of every name that there is."""
    known: dict[str, list[str]] = {}

    def look_up(name: str, *rest: object, **options: object) -> list[Any]:
        if name not in known:
            raise socket.gaierror(-2, "Name or service not known")
        return [(socket.AF_INET, 1, 6, "", (ip, 0)) for ip in known[name]]

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    return known


@pytest.mark.parametrize(
    ("rule", "ip"),
    [
        ("10.0.0.5", "10.0.0.5"),
        ("10.1.0.0/16", "10.1.255.3"),
        ("fd00::/8", "fd12::1"),
        ("[fd00::1]", "fd00::1"),
        ("fe80::/10", "fe80::1%eth0"),
        ("10.1.0.0/16", "::ffff:10.1.0.7"),
    ],
)
def test_what_a_rule_allows(rule: str, ip: str) -> None:
    AllowedPeers(["192.0.2.1", rule]).check(ip, ip)


@pytest.mark.parametrize(
    ("rule", "ip"),
    [("10.0.0.5", "10.0.0.50"), ("10.1.0.0/16", "10.2.0.1"), ("fd00::/8", "fe80::1"), ("0.0.0.0/0", "::1")],
)
def test_what_it_does_not(rule: str, ip: str) -> None:
    with pytest.raises(PeerNotAllowed) as refusal:
        AllowedPeers(["192.0.2.1", rule]).check(ip, ip)
    assert f"{ip} may not be contacted: allowed_peers names 192.0.2.1, {rule}" in str(refusal.value)


@pytest.mark.parametrize("rule", ["", "10.0.0.0/33", "10.0.0.1/8", "http://p", "10.0.0.5:80", "a b", "*"])
def test_what_is_no_rule_is_named(rule: str) -> None:
    with pytest.raises(BadAddress, match="allowed_peers: ") as refusal:
        AllowedPeers([rule])
    assert repr(rule) in str(refusal.value)


def test_a_name_allows_the_addresses_that_it_has_now(names: dict[str, list[str]]) -> None:
    peers = AllowedPeers(["prefill.internal"])
    names["prefill.internal"] = ["10.0.0.1", "10.0.0.2"]
    peers.check("10.0.0.2", "10.0.0.2")
    with pytest.raises(PeerNotAllowed):
        peers.check("10.0.0.3", "10.0.0.3")
    names["prefill.internal"] = ["10.0.0.3"]
    peers.check("10.0.0.3", "10.0.0.3")


def test_addresses_of_a_name_are_kept_for_half_a_minute(
    names: dict[str, list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or each link to an engine would wait for the name service."""
    clock = ManualClock()
    monkeypatch.setattr(peers_module, "time", SimpleNamespace(monotonic=clock))
    peers, asked = AllowedPeers(["prefill.internal"]), MagicMock(side_effect=socket.getaddrinfo)
    monkeypatch.setattr(socket, "getaddrinfo", asked)
    names["prefill.internal"] = ["10.0.0.1"]
    assert peers.needs_lookup("10.0.0.1")
    for _ in range(3):
        peers.check("10.0.0.1", "10.0.0.1")
        assert not peers.needs_lookup("10.0.0.1")
    assert asked.call_count == 1
    names["prefill.internal"] = []
    clock.advance(26.0)
    assert peers.needs_lookup("10.0.0.1"), "it would be looked up where nobody may wait"
    peers.check("10.0.0.1", "10.0.0.1")
    clock.advance(4.0)
    with pytest.raises(PeerNotAllowed):
        peers.check("10.0.0.1", "10.0.0.1")


def test_a_name_keeps_its_addresses_while_no_name_service_answers(
    names: dict[str, list[str]], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Engines that have been proven would be denied. That a name is gone is an answer."""
    clock, error = ManualClock(), socket.EAI_AGAIN
    monkeypatch.setattr(peers_module, "time", SimpleNamespace(monotonic=clock))
    peers = AllowedPeers(["prefill.internal"])
    names["prefill.internal"] = ["10.0.0.1"]
    peers.check("10.0.0.1", "10.0.0.1")

    def fail(*_: object, **__: object) -> None:
        raise socket.gaierror(error, "failed")

    monkeypatch.setattr(socket, "getaddrinfo", fail)
    for _ in range(3):
        clock.advance(31.0)
        for _ in range(3):
            peers.check("10.0.0.1", "10.0.0.1")
    warning = "allowed_peers: prefill.internal could not be looked up and allows what it had last for now"
    assert [record.message.partition(": [Errno")[0] for record in caplog.records] == 3 * [warning]
    with pytest.raises(PeerNotAllowed):
        peers.check("10.0.0.2", "10.0.0.2")
    error = socket.EAI_NONAME
    clock.advance(31.0)
    with pytest.raises(PeerNotAllowed):
        peers.check("10.0.0.1", "10.0.0.1")


def test_a_name_that_is_a_rule_itself_is_allowed_at_any_address(names: dict[str, list[str]]) -> None:
    AllowedPeers(["Prefill.internal"]).check("prefill.INTERNAL.", "10.0.0.9")


def test_a_rule_that_has_no_address_allows_nothing_and_says_so(
    names: dict[str, list[str]], caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(PeerNotAllowed):
        AllowedPeers(["gone.internal"]).check("10.0.0.1", "10.0.0.1")
    assert "gone.internal could not be looked up" in caplog.text


def test_every_host_is_allowed_without_rules_which_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    peers = AllowedPeers()
    peers.check("127.0.0.1", "127.0.0.1")
    assert not caplog.records
    for _ in range(3):
        peers.check("p.example", "192.0.2.1")
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert "contacting p.example" in record.message
    assert "allowed_peers" in record.message


# The client


def _listener() -> socket.socket:
    listener = socket.create_server((HERE, 0))
    listener.settimeout(0.2)
    return listener


def _was_contacted(listener: socket.socket) -> bool:
    try:
        listener.accept()[0].close()
    except TimeoutError:
        return False
    return True


@pytest.mark.parametrize(
    ("host", "rules", "words"),
    [
        (HERE, ["10.0.0.0/8"], "127.0.0.1 may not be contacted"),
        (HERE, ["10.0.0.0/8", "elsewhere.internal"], "127.0.0.1 may not be contacted"),
        ("evil.example", ["10.0.0.0/8"], r"evil\.example \(127\.0\.0\.1\) may not be contacted"),
    ],
    ids=["address", "address and rules with names", "name"],
)
def test_nothing_is_sent_to_a_host_that_is_not_allowed(
    names: dict[str, list[str]], host: str, rules: list[str], words: str
) -> None:
    names |= {"evil.example": [HERE], "elsewhere.internal": ["10.0.0.1"]}
    client = ControlClient(allowed=AllowedPeers(rules))
    with _listener() as listener:
        with pytest.raises(PeerNotAllowed, match=words):
            client.request(host, listener.getsockname()[1], HELLO, 10).result()
        assert not _was_contacted(listener)
    client.close()


@pytest.mark.parametrize("host", [HERE, "p.internal"])
@pytest.mark.parametrize("rules", [["127.0.0.0/8"], ["p.internal"], ["10.0.0.1", "p.internal"]])
def test_an_allowed_host_is_asked(
    names: dict[str, list[str]], server: ControlServer, host: str, rules: list[str]
) -> None:
    names["p.internal"] = [HERE]
    client = ControlClient(allowed=AllowedPeers(rules))
    assert client.request(host, server.port, HELLO, 10).result() == WELCOME
    client.close()


def test_what_is_checked_is_what_is_connected_to(
    names: dict[str, list[str]], monkeypatch: pytest.MonkeyPatch, server: ControlServer
) -> None:
    """A name service that answers differently the second time cannot lead a client past its rules."""
    answers = iter(["10.0.0.1", HERE, HERE])
    look_up: Callable[..., list[Any]] = lambda *rest, **options: [(socket.AF_INET, 1, 6, "", (next(answers), 0))]  # noqa: E731
    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    client = ControlClient(allowed=AllowedPeers(["10.0.0.0/8"]))
    with pytest.raises(PeerUnreachable):  # at 10.0.0.1, which is the one that was checked
        client.request("rebinding.example", server.port, HELLO, 0.3).result()
    client.close()
    assert server.counters.requests == 0


class SlowNames:
    """A name service that answers only when it is told to. Every name has this host's address."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.asked = 0
        self.answers = threading.Semaphore(0)
        monkeypatch.setattr(socket, "getaddrinfo", self.look_up)

    def look_up(self, name: str, *rest: object, **options: object) -> list[Any]:
        self.asked += 1
        self.answers.acquire(timeout=10)
        return [(socket.AF_INET, 1, 6, "", (HERE, 0))]

    def has(self, waiting: Sequence[Future[Any]], answered: int, asked: int) -> bool:
        return self.asked == asked and sum(each.done() for each in waiting) == answered


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> SlowNames:
    return SlowNames(monkeypatch)


def test_more_hosts_at_once_than_are_looked_up_at_once_wait_for_their_turn(
    slow: SlowNames, server: ControlServer
) -> None:
    client = ControlClient(ClientSettings(max_resolvers=2))
    waiting = [client.request(f"p{number}.internal", server.port, HELLO, 10) for number in range(1, 6)]
    until(lambda: slow.asked == 2)
    for answered in range(1, 6):
        slow.answers.release()
        until(partial(slow.has, waiting, answered, min(answered + 2, 5)))
    assert [each.result() for each in waiting] == 5 * [WELCOME]
    client.close()


def test_who_has_stopped_waiting_is_not_looked_up(slow: SlowNames) -> None:
    client = ControlClient(ClientSettings(max_resolvers=1))
    first = client.request("p1.internal", 9, HELLO, 10)
    until(lambda: slow.asked == 1)
    late = [client.request("p2.internal", port, HELLO, 0.1) for port in (9, 10)]
    for each in late:
        with pytest.raises(PeerUnreachable, match="are still being looked up: check DNS"):
            each.result(5)
    last = client.request("p3.internal", 9, HELLO, 10)
    slow.answers.release(5)
    until(lambda: slow.asked == 2 and not client._loop._peers._look_ups._threads)
    assert not first.done()
    assert not last.done()
    client.close()
    assert slow.asked == 2


def test_a_turn_for_which_there_is_no_thread_fails_alone(monkeypatch: pytest.MonkeyPatch, slow: SlowNames) -> None:
    client = ControlClient(ClientSettings(max_resolvers=1))
    first, second, third = (client.request(f"p{number}.internal", 9, HELLO, 10) for number in (1, 2, 3))
    until(lambda: client.counters.requests == 3)
    start = threading.Thread.start

    def refuse(thread: threading.Thread) -> None:
        if thread.name.endswith("p2.internal"):
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refuse)
    slow.answers.release(5)
    with pytest.raises(TooManyPeers, match=r"p2\.internal cannot be looked up now: can't start new thread"):
        second.result(5)
    until(lambda: slow.asked == 2)
    assert not first.done()
    assert not third.done()
    client.close()
