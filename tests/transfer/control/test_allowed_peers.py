"""Which hosts may be contacted: what a list says, and that nothing is sent to any other."""

import logging
import socket
from collections.abc import Callable
from typing import Any

import pytest

from tests.support.control.samples import HELLO, WELCOME
from transfer.control.client import ControlClient
from transfer.control.failures import PeerUnreachable
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
    assert client.counters.not_allowed == 1
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
