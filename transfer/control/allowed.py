"""Which hosts an engine may contact on the word of a request. Looks names up; opens no connection."""

import ipaddress
import logging
import socket
import threading
from collections.abc import Sequence

from transfer.control.address import numeric, peer_address
from transfer.control.errors import BadAddress, PeerNotAllowed

logger = logging.getLogger(__name__)

Network = ipaddress.IPv4Network | ipaddress.IPv6Network
IPAddress = ipaddress.IPv4Address | ipaddress.IPv6Address


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

    @property
    def are_all(self) -> bool:
        """Whether every host may be contacted."""
        return self._rules is None

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
