"""Addresses of peers, checked and written in one way, and which of them may be contacted. Opens no connection.

Hosts come from configuration and, through routers, from the clients of the service, so nothing of them reaches a
transport unchecked: ZeroMQ's endpoint syntax, for one, gives a meaning to ``;``, ``*`` and interface names.
"""

import ipaddress
import logging
import re
import socket
import threading
from collections.abc import Sequence
from dataclasses import dataclass

from transfer.errors import BadAddress, PeerNotAllowed

logger = logging.getLogger(__name__)

Network = ipaddress.IPv4Network | ipaddress.IPv6Network
IPAddress = ipaddress.IPv4Address | ipaddress.IPv6Address

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


class AllowedPeers:
    """A list of addresses, networks and host names; everything else is not contacted. Safe to use from any thread."""

    def __init__(self, rules: Sequence[str] | None = None) -> None:
        """``rules``: e.g. ``10.0.0.5``, ``10.1.0.0/16``, ``fd00::/8``, ``prefill.internal``. None allows every host.

        A name allows the addresses that it has at the moment of the contact.

        Raises:
            BadAddress: a rule is none of these; names it.
        """
        self._rules = None if rules is None else tuple(rules)
        self._networks: list[Network] = []
        self._names: list[str] = []
        self._lock = threading.Lock()
        self._warned = False
        for rule in self._rules or ():
            self._add(rule)

    def names(self, host: str) -> bool:
        """Whether a rule is this very host name, so that any address it has is allowed."""
        return _bare(host) in self._names

    def needs_names(self, ip: str) -> bool:
        """Whether ``check`` of this address has to look names up, which may take seconds."""
        return bool(self._names) and not self._in_networks(_address(ip))

    def check(self, host: str, ip: str) -> None:
        """Let ``host``, which has the address ``ip``, be contacted, or not.

        Raises:
            PeerNotAllowed: no rule allows it; names the host and the rules.
        """
        if self._rules is None:
            self._log_first_contact(host, ip)
            return
        address = _address(ip)
        if (
            self._in_networks(address)
            or self.names(host)
            or any(address in _addresses_of(name) for name in self._names)
        ):
            return
        what = host if host == ip else f"{host} ({ip})"
        allowed = ", ".join(self._rules) or "nothing"
        raise PeerNotAllowed(
            f"{what} may not be contacted: allowed_peers names {allowed}. If it is one of your prefill engines, add "
            "it there; if not, somebody sent kv_transfer_params that are none of this deployment"
        )

    def check_engine(self, address: str) -> None:
        """Let a transfer engine, named by a peer as ``host:port``, be contacted, or not.

        A name is allowed only if it is one of the rules itself: the transfer engine looks it up again, and could get
        another answer than we did.

        Raises:
            PeerNotAllowed: no rule allows it; names the host.
        """
        host = address.rpartition(":")[0].removeprefix("[").removesuffix("]")
        if numeric(host) is not None:
            self.check(host, host)
        elif self._rules is not None and not self.names(host):
            raise PeerNotAllowed(
                f"{host!r} is neither an IP address nor a host name of allowed_peers: add it there, or set host to an "
                "IP address on the prefill engine"
            )

    def _add(self, rule: str) -> None:
        try:
            self._networks.append(ipaddress.ip_network(rule))
            return
        except ValueError as error:
            if "/" in rule:
                raise BadAddress(f"allowed_peers: {rule!r} is no network: {error}") from error
        try:
            host = peer_address(rule, 1).host
        except BadAddress as error:
            raise BadAddress(f"allowed_peers: {rule!r} is no IP address, network or host name") from error
        ip = numeric(host)
        if ip is None:
            self._names.append(_bare(host))
        else:  # an IPv6 address in brackets
            self._networks.append(ipaddress.ip_network(ip))

    def _in_networks(self, address: IPAddress) -> bool:
        return any(address in network for network in self._networks)

    def _log_first_contact(self, host: str, ip: str) -> None:
        if _address(ip).is_loopback:
            return
        with self._lock:
            first, self._warned = not self._warned, True
        if first:
            logger.warning(
                "contacting %s because a request says so; every host may be named in kv_transfer_params. Set "
                "allowed_peers to the addresses of your prefill engines, or see that only your router reaches this one",
                host,
            )


def _bare(name: str) -> str:
    return name.lower().removesuffix(".")


def _address(ip: str) -> IPAddress:
    """An address as rules see it: an IPv4 address that is written as IPv6 is that IPv4 address; a scope is ignored."""
    address = ipaddress.ip_address(ip.partition("%")[0])
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return mapped or address


def _addresses_of(name: str) -> set[IPAddress]:
    try:
        found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except OSError as error:
        logger.warning("allowed_peers: %s could not be looked up and allows nothing now: %s", name, error)
        return set()
    return {_address(str(entry[4][0])) for entry in found}
