"""Addresses of peers, checked and in one canonical form, and which of them may be contacted. Opens no connection.

Hosts come from the configuration and, through routers, from clients of the service. They are checked before a transport
sees them: ZeroMQ's endpoint syntax, for one, gives a meaning to ``;``, ``*`` and interface names.
"""

import errno
import ipaddress
import logging
import re
import socket
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass

import psutil

from transfer.errors import BadAddress, PeerNotAllowed

logger = logging.getLogger(__name__)

Network = ipaddress.IPv4Network | ipaddress.IPv6Network
IPAddress = ipaddress.IPv4Address | ipaddress.IPv6Address

_LABEL = r"[A-Za-z0-9_](?:[A-Za-z0-9_-]{0,62})"
_HOST_NAME = re.compile(rf"(?=.{{1,253}}\Z){_LABEL}(?:\.{_LABEL})*\.?")
_SCOPE = re.compile(r"[A-Za-z0-9._-]{1,32}")
MAX_PORT = 65535

#: For how long the addresses of a name in ``AllowedPeers`` are not looked up again: all links to an engine ask.
_KNOWN_S = 30.0
#: Of that, the end, in which an address counts as not known for whoever must not wait: it may take a moment.
_MARGIN_S = 5.0

#: What a name service says of a name that has no address. Any other error says nothing of the name.
_NO_ADDRESS = (socket.EAI_NONAME, socket.EAI_NODATA)

#: What the system says of an address that nothing can be sent to: no route, no address to send from, or no such family.
_NO_ROUTE = (errno.ENETUNREACH, errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT)


@dataclass(frozen=True, slots=True)
class Address:
    """A checked host (IPv4 address, IPv6 address without brackets, or name) and port."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def endpoint(self) -> str:
        """The ZeroMQ endpoint to connect to or to bind."""
        return f"tcp://{self}"


def peer_address(host: object, port: object) -> Address:
    """Return the checked address of a peer to connect to.

    Raises:
        BadAddress: the host cannot be reached (empty, malformed, a wildcard) or the port is not in 1..65535.
    """
    checked = _host(host)
    ip = parse_ip(checked)
    if ip is not None and ip.is_unspecified:
        raise BadAddress(
            f"host {host!r} is an address to listen on, not one to connect to: the peer must announce the "
            "address of one of its network interfaces"
        )
    return Address(checked, _port(port, lowest=1))


def parse_address(text: str) -> Address:
    """Return the checked address of a peer that is written as ``host:port``, an IPv6 address in brackets.

    Raises:
        BadAddress: it is not; the message says what is wrong with it.
    """
    host, colon, port = text.rpartition(":")
    is_number = port.isascii() and port.isdecimal() and len(port) <= len(str(MAX_PORT))
    if not (colon and is_number) or (":" in host and not host.startswith("[")):
        raise BadAddress(f"address {text[:300]!r} is not host:port, with an IPv6 address in brackets")
    return peer_address(host, int(port))


def listen_address(host: object, port: object) -> Address:
    """Return the checked address to bind; port 0 lets the OS choose, ``0.0.0.0`` and ``::`` mean every interface.

    Raises:
        BadAddress: the host is malformed or the port is not in 0..65535.
    """
    return Address(_host(host), _port(port, lowest=0))


def parse_ip(host: str) -> IPAddress | None:
    """Return ``host`` as an IP address, None if it is a name."""
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None


def resolve(host: str) -> str:
    """Return the IP address of ``host``: IPv4 if it has one, so that both ends choose alike. DNS may take many seconds.

    Raises:
        OSError: the name has no address.
    """
    if parse_ip(host) is not None:
        return host
    found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    found.sort(key=lambda entry: entry[0] != socket.AF_INET)
    return str(found[0][4][0])


def is_own_address(host: str) -> bool:
    """Return whether peers reach this machine at ``host``, an address or a name. Looks names up in DNS.

    vLLM's own choice is 0.0.0.0 where there is no default route.
    """
    try:
        ip = resolve(host)
        if ipaddress.ip_address(ip.partition("%")[0]).is_unspecified:
            return False
        with socket.socket(socket.AF_INET6 if ":" in ip else socket.AF_INET, socket.SOCK_STREAM) as trial:
            trial.bind((ip, 0))
    except OSError:
        return False
    return True


def loopback_of(host: str) -> str:
    """Return the loopback address that this machine takes a name for; empty if it is another, or no name.

    Debian has the machine's own name in /etc/hosts, as 127.0.1.1.

    Raises:
        OSError: the name has no address.
    """
    ip = host if host == "localhost" or parse_ip(host) is not None else resolve(host)
    return ip if ip != host and ipaddress.ip_address(ip.partition("%")[0]).is_loopback else ""


def no_route(ip: str) -> str:
    """Return why this machine can send nothing to an address, with the families of both; empty if it can. Sends none.

    An engine that has IPv6 addresses only does not reach one that has IPv4 addresses only.
    """
    try:
        with socket.socket(socket.AF_INET6 if ":" in ip else socket.AF_INET, socket.SOCK_DGRAM) as trial:
            trial.connect((ip, 9))  # a datagram socket: only the route is looked up
    except OSError as error:
        if error.errno in _NO_ROUTE:
            version, ours = ipaddress.ip_address(ip).version, _own_versions()
            why = f"this machine has no route to {ip} (IPv{version})"
            if version in ours or not ours:
                return f"{why}: check its addresses and routes"
            return (
                f"{why}, as its own addresses are IPv{ours[0]} only: let the setting host name addresses of one "
                "family on both sides"
            )
    return ""


def _own_versions() -> list[int]:
    """Return the versions of IP in which this machine has addresses that others may reach."""
    own = {
        ipaddress.ip_address(entry.address.partition("%")[0])
        for entries in psutil.net_if_addrs().values()
        for entry in entries
        if entry.family in (socket.AF_INET, socket.AF_INET6)
    }
    return sorted({ip.version for ip in own if not ip.is_loopback and not ip.is_link_local})


def _host(host: object) -> str:
    if not isinstance(host, str):
        raise BadAddress(f"host {host!r} is not a string")
    bare = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    ip = parse_ip(bare)
    if isinstance(ip, ipaddress.IPv6Address):
        if ip.scope_id is None or _SCOPE.fullmatch(ip.scope_id):
            return bare
    elif bare == host and _HOST_NAME.fullmatch(host):
        return host
    raise BadAddress(
        f"host {host[:300]!r} is neither an IPv4 address, an IPv6 address (with or without brackets) nor a "
        "host name; give it without port and scheme"
    )


def _port(port: object, *, lowest: int) -> int:
    if isinstance(port, bool) or not isinstance(port, int) or not lowest <= port <= MAX_PORT:
        raise BadAddress(f"port {port!r} is not an integer in {lowest}..{MAX_PORT}")
    return port


class AllowedPeers:
    """An allowlist of addresses, networks and host names. Safe to use from any thread."""

    def __init__(self, rules: Sequence[str] | None = None) -> None:
        """Parse rules such as ``10.0.0.5``, ``10.1.0.0/16``, ``fd00::/8`` or ``prefill.internal``.

        A name allows the addresses that it has at the moment of contact or had half a minute before. If no name service
        can be asked, it allows those that it had last. None as ``rules`` allows every host.

        Raises:
            BadAddress: a rule is none of these. The message names it.
        """
        self._rules = None if rules is None else tuple(rules)
        self._networks: list[Network] = []
        self._names: list[str] = []
        self._lock = threading.Lock()
        self._warned = False
        self._known: dict[str, tuple[float, set[IPAddress]]] = {}  # by name: until when, and the last answer
        for rule in self._rules or ():
            self._add(rule)

    def has_name(self, host: str) -> bool:
        """Return whether ``host`` itself is a rule, so that any address it has is allowed."""
        return _normalized(host) in self._names

    def excludes(self, host: str) -> bool:
        """Return whether ``host`` is an IP address that no rule allows, whatever addresses names have."""
        if self._rules is None or self._names or parse_ip(host) is None:
            return False
        return not self._in_networks(_address(host))

    def needs_lookup(self, ip: str) -> bool:
        """Return whether ``check`` of this address must look up names, which may take seconds."""
        address = _address(ip)
        is_known = self._in_networks(address) or self._is_known(address, _MARGIN_S)
        return bool(self._names) and not is_known

    def check(self, host: str, ip: str) -> None:
        """Raise unless ``host``, which has the address ``ip``, may be contacted.

        Raises:
            PeerNotAllowed: no rule allows it. The message names the host and the rules.
        """
        if self._rules is None:
            self._log_first_contact(host, ip)
            return
        address = _address(ip)
        if (
            self._in_networks(address)
            or self.has_name(host)
            or self._is_known(address)
            or any(address in self._look_up(name) for name in self._names)
        ):
            return
        what = host if host == ip else f"{host} ({ip})"
        allowed = ", ".join(self._rules) or "nothing"
        raise PeerNotAllowed(
            f"{what} may not be contacted: allowed_peers names {allowed}. If it is one of your prefill engines, add it "
            "to allowed_peers; if not, somebody sent kv_transfer_params that do not belong to this deployment"
        )

    def check_engine(self, address: str) -> None:
        """Raise unless a transfer engine that a peer names as ``host:port`` may be contacted.

        A name is allowed only if it is itself a rule: the transfer engine looks it up again and could get another
        address than this check did.

        Raises:
            PeerNotAllowed: no rule allows it. The message names the host.
        """
        host = address.rpartition(":")[0].removeprefix("[").removesuffix("]")
        if parse_ip(host) is not None:
            self.check(host, host)
        elif self._rules is not None and not self.has_name(host):
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
                raise BadAddress(f"allowed_peers: {rule!r} is not a network: {error}") from error
        try:
            host = peer_address(rule, 1).host
        except BadAddress as error:
            raise BadAddress(f"allowed_peers: {rule!r} is not an IP address, network or host name") from error
        ip = parse_ip(host)
        if ip is None:
            self._names.append(_normalized(host))
        else:  # an IPv6 address in brackets
            self._networks.append(ipaddress.ip_network(ip))

    def _in_networks(self, address: IPAddress) -> bool:
        return any(address in network for network in self._networks)

    def _is_known(self, address: IPAddress, for_s: float = 0.0) -> bool:
        """Return whether a name is known to have this address, and will be for so long."""
        until = time.monotonic() + for_s
        with self._lock:
            return any(until < known_until and address in found for known_until, found in self._known.values())

    def _look_up(self, name: str) -> set[IPAddress]:
        """Return the addresses that a name has now or, if no name service can be asked, those that it had."""
        with self._lock:
            _, found = self._known.get(name, (0.0, set()))
        try:
            found = {_address(str(entry[4][0])) for entry in socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)}
        except OSError as error:
            found = set() if error.errno in _NO_ADDRESS else found
            allowed = "what it had last" if found else "nothing"
            logger.warning("allowed_peers: %s could not be looked up and allows %s for now: %s", name, allowed, error)
        with self._lock:
            self._known[name] = (time.monotonic() + _KNOWN_S, found)
        return found

    def _log_first_contact(self, host: str, ip: str) -> None:
        if _address(ip).is_loopback:
            return
        with self._lock:
            first, self._warned = not self._warned, True
        if first:
            logger.warning(
                "contacting %s because a request says so: kv_transfer_params may name any host. Set allowed_peers to "
                "the addresses of your prefill engines, or make sure that only your router can reach this engine",
                host,
            )


def _normalized(name: str) -> str:
    return name.lower().removesuffix(".")


def _address(ip: str) -> IPAddress:
    """Parse an address for comparison with rules: an IPv4-mapped IPv6 address counts as IPv4, a scope is ignored."""
    address = ipaddress.ip_address(ip.partition("%")[0])
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return mapped or address
