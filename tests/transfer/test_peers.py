"""Addresses of peers: what is one, and how it is written. The hosts allowed are in control/test_allowed_peers.

Covers: transfer.errors.
"""

import re
import socket

import pytest

from transfer.errors import BadAddress, PeerNotAllowed, TransferError
from transfer.peers import Address, AllowedPeers, listen_address, parse_address, peer_address, resolve


@pytest.mark.parametrize(
    ("host", "endpoint"),
    [
        ("10.0.0.5", "tcp://10.0.0.5:5600"),
        ("::1", "tcp://[::1]:5600"),
        ("[::1]", "tcp://[::1]:5600"),
        ("fe80::1%eth0", "tcp://[fe80::1%eth0]:5600"),
        ("prefill-0.svc.local", "tcp://prefill-0.svc.local:5600"),
        ("node_7", "tcp://node_7:5600"),
    ],
)
def test_hosts_that_can_be_reached(host: str, endpoint: str) -> None:
    assert peer_address(host, 5600).endpoint == endpoint


def test_both_spellings_of_an_ipv6_host_are_one_peer() -> None:
    assert peer_address("[::1]", 1) == peer_address("::1", 1) == Address("::1", 1)


@pytest.mark.parametrize(
    "host",
    [
        "",
        " ",
        "*",
        "10.0.0.5:5600",
        "tcp://10.0.0.5",
        "eth0;10.0.0.5",
        "host/path",
        "a b",
        "host\n",
        "[10.0.0.5]",
        "[host]",
        "[::1",
        "::1%a;b",
        "-host",
        "a..b",
        "x" * 64,
        "a." * 200,
        "h\u00f6st",
        None,
        7,
        b"10.0.0.5",
    ],
)
def test_what_is_not_a_host_is_named(host: object) -> None:
    with pytest.raises(BadAddress) as caught:
        peer_address(host, 5600)
    assert repr(host)[:100] in str(caught.value)


@pytest.mark.parametrize("port", [0, -1, 65536, "5600", 5600.0, None, True])
def test_what_is_not_a_port_is_named(port: object) -> None:
    with pytest.raises(BadAddress, match=rf"port {port!r} is not an integer in 1\.\.65535"):
        peer_address("10.0.0.5", port)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "[::]"])
def test_a_wildcard_can_be_listened_on_but_not_reached(host: str) -> None:
    assert listen_address(host, 0).port == 0
    with pytest.raises(BadAddress, match="an address to listen on, not one to connect to"):
        peer_address(host, 5600)


@pytest.mark.parametrize(
    "port",
    ["", "x", "-1", "٣", "9" * 6, "9" * 5000],
    ids=["none", "word", "negative", "other digits", "large", "endless"],
)
def test_what_is_not_a_written_address_is_shown(port: str) -> None:
    """Python itself refuses to read a number of 5,000 digits, by another error."""
    with pytest.raises(BadAddress, match=r"address 'a:.*' is not host:port"):
        parse_address(f"a:{port}")


def test_a_name_with_both_families_resolves_to_ipv4(monkeypatch: pytest.MonkeyPatch) -> None:
    ipv6 = (socket.AF_INET6, socket.SOCK_STREAM, 6, "", ("2001:db8::1", 0, 0, 0))
    ipv4 = (socket.AF_INET, socket.SOCK_STREAM, 6, "", ("10.0.0.5", 0))
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: [ipv6, ipv4])
    assert resolve("prefill-0") == "10.0.0.5"


def test_a_numeric_host_is_not_looked_up() -> None:
    assert resolve("::1") == "::1"
    assert resolve("10.0.0.5") == "10.0.0.5"


# Transfer engines, which peers name


@pytest.mark.parametrize("address", ["10.0.0.5:15000", "[fd00::1]:15000", "p.internal:15000", "P.internal:1"])
def test_an_engine_at_an_allowed_address_may_be_contacted(address: str) -> None:
    AllowedPeers(["10.0.0.0/8", "fd00::/8", "p.internal"]).check_engine(address)


@pytest.mark.parametrize("address", ["10.0.0.5:15000", "in-process:1", "anything"])
def test_without_rules_every_engine_may_be_contacted(address: str) -> None:
    AllowedPeers(None).check_engine(address)


@pytest.mark.parametrize(
    ("address", "words"),
    [
        ("192.0.2.1:15000", "192.0.2.1 may not be contacted: allowed_peers names 10.0.0.0/8, p.internal"),
        ("[::1]:15000", "::1 may not be contacted"),
        ("evil.example:15000", "'evil.example' is neither an IP address nor a host name of allowed_peers"),
        ("10.0.0.5", "'' is neither"),
        ("", "'' is neither"),
    ],
)
def test_any_other_engine_may_not(address: str, words: str) -> None:
    with pytest.raises(PeerNotAllowed, match=re.escape(words)):
        AllowedPeers(["10.0.0.0/8", "p.internal"]).check_engine(address)


def test_what_is_wrong_with_a_peer_is_caught_with_all_else_that_the_package_raises_on_purpose() -> None:
    with pytest.raises(TransferError):
        peer_address("10.0.0.5", 0)
    with pytest.raises(ValueError, match="port"):  # what a caller gave
        peer_address("10.0.0.5", 0)
    with pytest.raises(TransferError):
        AllowedPeers(["10.0.0.0/8"]).check_engine("192.0.2.1:15000")
