"""Addresses of control endpoints: checked once, written in one way. Opens no sockets.

Hosts come from configuration and, through routers, from the clients of the service, so nothing of them reaches
ZeroMQ unchecked: its endpoint syntax gives a meaning to ``;``, ``*`` and interface names.
"""

import ipaddress
import re
import socket
from dataclasses import dataclass

from transfer.control.errors import BadAddress

_LABEL = r"[A-Za-z0-9_](?:[A-Za-z0-9_-]{0,62})"
_HOST_NAME = re.compile(rf"(?=.{{1,253}}\Z){_LABEL}(?:\.{_LABEL})*\.?")
_SCOPE = re.compile(r"[A-Za-z0-9._-]{1,32}")
MAX_PORT = 65535


@dataclass(frozen=True, slots=True)
class Address:
    """A checked host (IPv4, IPv6 without brackets, or a name) and port."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def endpoint(self) -> str:
        """What ZeroMQ connects to or binds."""
        return f"tcp://{self}"


def peer_address(host: object, port: object) -> Address:
    """The address of a peer to connect to.

    Raises:
        BadAddress: not a host that can be reached (empty, malformed, a wildcard) or not a port in 1..65535.
    """
    checked = _host(host)
    ip = numeric(checked)
    if ip is not None and ip.is_unspecified:
        raise BadAddress(
            f"control host {host!r} is an address to listen on, not one to reach: the peer must announce the address "
            "of one of its network interfaces"
        )
    return Address(checked, _port(port, lowest=1))


def listen_address(host: object, port: object) -> Address:
    """The address to bind; port 0 lets the OS choose, ``0.0.0.0`` and ``::`` mean every interface.

    Raises:
        BadAddress: not a host, or not a port in 0..65535.
    """
    return Address(_host(host), _port(port, lowest=0))


def numeric(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """The IP address that ``host`` spells, None if it is a name."""
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None


def resolve(host: str) -> str:
    """The IP address of ``host``: IPv4 if it has one, so that both ends choose alike. DNS may take many seconds.

    Raises:
        OSError: the name has no address.
    """
    if numeric(host) is not None:
        return host
    found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    found.sort(key=lambda entry: entry[0] != socket.AF_INET)
    return str(found[0][4][0])


def _host(host: object) -> str:
    if not isinstance(host, str):
        raise BadAddress(f"control host {host!r} is not a string")
    bare = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    ip = numeric(bare)
    if isinstance(ip, ipaddress.IPv6Address):
        if ip.scope_id is None or _SCOPE.fullmatch(ip.scope_id):
            return bare
    elif bare == host and _HOST_NAME.fullmatch(host):
        return host
    raise BadAddress(
        f"control host {host[:300]!r} is neither an IPv4 address, an IPv6 address (with or without brackets) nor a "
        "host name; a port or a scheme is not part of it"
    )


def _port(port: object, *, lowest: int) -> int:
    if isinstance(port, bool) or not isinstance(port, int) or not lowest <= port <= MAX_PORT:
        raise BadAddress(f"control port {port!r} is not an integer in {lowest}..{MAX_PORT}")
    return port
