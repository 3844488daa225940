"""Hosts of their own on this machine: network namespaces at a switch, with addresses, ports and a loopback each.

Where servers run in two of them, everything between them goes over the switch, which can part them or slow them down.
This machine is at the switch as well, so that tests and routers reach all hosts whatever is between these.
"""

import ctypes
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache

#: Of RFC 2544, for tests of networks: nobody routes them. Another one in each process.
_NETWORK = f"198.18.{os.getpid() % 256}"
THIS_MACHINE = 254  # at the switch, beside the hosts
_LONGEST_NAME = 15  # of a network device
_CLONE_NEWNET = 0x40000000


@cache
def why_not() -> str:
    """Return why no hosts can be made here; empty if they can."""
    for tool, package in (("ip", "iproute2"), ("bridge", "iproute2"), ("tc", "iproute2")):
        if shutil.which(tool) is None:
            return f"{tool} is missing (Debian: apt-get install {package})"
    if os.geteuid() != 0:
        return "only root can make network namespaces"
    hosts = Hosts()
    try:
        hosts.prefix(1)
        with hosts.parted(1), hosts.slowed(1, "1gbit"):
            return ""
    except subprocess.CalledProcessError as error:
        return f"{' '.join(error.cmd)}: {error.stderr.strip()}"
    finally:
        hosts.close()


class Hosts:
    """Makes hosts when they are asked for, and removes them. They are numbered from 1."""

    def __init__(self) -> None:
        self._made: set[int] = set()
        self._filtering: set[int] = set()

    @staticmethod
    def address(number: int) -> str:
        """Return the address of a host."""
        return f"{_NETWORK}.{number}"

    def namespace(self, number: int) -> str:
        """Return the name of a host's network namespace, which is made if it is not there."""
        if number not in self._made:
            self._make(number)
        return _name(f"h{number}")

    def give_ipv6(self, number: int) -> None:
        """Give a host an IPv6 address, and a default route, beside those of IPv4; this machine, too."""
        commands = (f"address replace {self.ipv6(number)}/64 dev eth0 nodad", "-6 route add default dev eth0")
        self.configure(number, *commands)
        _run("ip", "address", "replace", f"{self.ipv6(THIS_MACHINE)}/64", "dev", _name("sw"), "nodad")

    @staticmethod
    def ipv6(number: int) -> str:
        """Return the IPv6 address that a host can be given."""
        return f"fd98:{os.getpid() % 256:x}::{number:x}"

    def prefix(self, number: int) -> list[str]:
        """Return what a command begins with that runs on a host, which is made if it is not there."""
        return ["ip", "netns", "exec", self.namespace(number)]

    @contextmanager
    def entered(self, number: int) -> Iterator[None]:
        """This thread, and all that are started here, have the network of a host."""
        with open("/proc/thread-self/ns/net") as own:
            enter(self.namespace(number))
            try:
                yield
            finally:
                _set_network(own.fileno())

    def configure(self, number: int, *commands: str) -> None:
        """Run commands of ``ip`` on a host, such as "route del default"."""
        for command in commands:
            _run(*self.prefix(number), "ip", *command.split())

    def lead(self, address: str, number: int) -> None:
        """Have this machine reach an address by way of a host, until that is gone."""
        _run("ip", "route", "replace", address, "via", self.address(number))

    def join(self, one: int, other: int, device: str) -> None:
        """Join two hosts by a cable of their own, whose ends have the same name and no addresses yet."""
        ends = [self.namespace(number) for number in (one, other)]
        peer = ("type", "veth", "peer", "name", device, "netns", ends[1])
        _run("ip", "link", "add", device, "netns", ends[0], *peer)
        for number in (one, other):
            self.configure(number, f"link set {device} up")

    def forward(self, number: int) -> None:
        """Let a host be a router, which also answers for packets that it does not take."""
        for setting in ("ipv4/ip_forward", "ipv6/conf/all/forwarding"):
            _run(*self.prefix(number), "sh", "-c", f"echo 1 > /proc/sys/net/{setting}")

    def close_ports(self, number: int, ports: str, how: str) -> None:
        """Close TCP ports of a host, "15000-17000" say, as a firewall there does.

        ``how``: "blackhole" drops packets, "prohibit" refuses them by ICMP.
        """
        self._filter(number)
        for family in ("-4", "-6"):
            self.configure(number, f"{family} rule add pref 10 iif eth0 ipproto tcp dport {ports} {how}")

    @contextmanager
    def one_way(self, source: int, to: int, how: str = "blackhole") -> Iterator[None]:
        """What a host sends to another one does not arrive, by IPv4; what comes back does.

        ``how``: "blackhole" loses packets, "prohibit" has them refused by ICMP.
        """
        self._filter(to)
        rule = f"pref 10 iif eth0 from {self.address(source)} {how}"
        self.configure(to, f"rule add {rule}")
        try:
            yield
        finally:
            self.configure(to, f"rule del {rule}")

    def take_place(self, number: int, of: int) -> None:
        """Give a host the addresses of another one that is not there, as one that is started in its place has."""
        shown = _run(*self.prefix(of), "cat", "/sys/class/net/eth0/address")
        self.configure(number, "address flush dev eth0", f"link set eth0 address {shown.strip()}")
        self.configure(number, f"address add {self.address(of)}/24 dev eth0")

    @contextmanager
    def parted(self, *numbers: int) -> Iterator[None]:
        """No packet passes between these hosts. All reach this machine."""
        for number in numbers:
            _run("bridge", "link", "set", "dev", _name(f"p{number}"), "isolated", "on")
        try:
            yield
        finally:
            for number in numbers:
                _run("bridge", "link", "set", "dev", _name(f"p{number}"), "isolated", "off")

    @contextmanager
    def unplugged(self, number: int) -> Iterator[None]:
        """No packet reaches or leaves a host."""
        device = _name(f"p{number}")
        _run("ip", "link", "set", device, "nomaster")
        try:
            yield
        finally:
            _run("ip", "link", "set", device, "master", _name("sw"))

    @contextmanager
    def forbidden(self, number: int) -> Iterator[None]:
        """This machine refuses to send to a host, as a firewall of its own does."""
        route = ("prohibit", self.address(number))
        _run("ip", "route", "add", *route)
        try:
            yield
        finally:
            _run("ip", "route", "del", *route)

    @contextmanager
    def slowed(self, number: int, rate: str) -> Iterator[None]:
        """What a host is sent comes no faster: "200mbit", say."""
        device = _name(f"p{number}")
        _run("tc", "qdisc", "add", "dev", device, "root", "tbf", "rate", rate, "burst", "256kb", "latency", "50ms")
        try:
            yield
        finally:
            _run("tc", "qdisc", "del", "dev", device, "root")

    def close(self) -> None:
        """Remove all. Idempotent."""
        for number in self._made:
            with suppress(subprocess.CalledProcessError):
                _run("ip", "link", "del", _name(f"p{number}"))  # the system takes its time with those of a namespace
            with suppress(subprocess.CalledProcessError):
                _run("ip", "netns", "del", _name(f"h{number}"))
        if self._made:
            with suppress(subprocess.CalledProcessError):
                _run("ip", "link", "del", _name("sw"))
        self._made.clear()
        self._filtering.clear()

    def _filter(self, number: int) -> None:
        """Have a host look at rules before it takes what is sent to it."""
        if number not in self._filtering:
            self._filtering.add(number)
            self.forward(number)
            for family in ("-4", "-6"):
                self.configure(number, f"{family} rule add pref 20 lookup local", f"{family} rule del pref 0")

    def _make(self, number: int) -> None:
        if not self._made:
            _remove_those_of_ended_processes()
            _run("ip", "link", "add", _name("sw"), "type", "bridge")
            _run("ip", "address", "add", f"{self.address(THIS_MACHINE)}/24", "dev", _name("sw"))
            _run("ip", "link", "set", _name("sw"), "up")
        self._made.add(number)
        space, port = _name(f"h{number}"), _name(f"p{number}")
        _run("ip", "netns", "add", space)
        _run("ip", "link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", space)
        _run("ip", "link", "set", port, "master", _name("sw"), "up")
        inside = ("ip", "netns", "exec", space, "ip")
        _run(*inside, "link", "set", "lo", "up")
        _run(*inside, "address", "add", f"{self.address(number)}/24", "dev", "eth0")
        _run(*inside, "link", "set", "eth0", "up")
        _run(*inside, "route", "add", "default", "via", self.address(THIS_MACHINE))


def enter(namespace: str) -> None:
    """Give this thread the network of a namespace."""
    with open(f"/var/run/netns/{namespace}") as space:
        _set_network(space.fileno())


def _set_network(descriptor: int) -> None:
    if ctypes.CDLL(None, use_errno=True).setns(descriptor, _CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), "setns")


def _remove_those_of_ended_processes() -> None:
    """They are left where a process was killed."""
    for kind, names in (("netns", ("h",)), ("link", ("sw", "p"))):
        listed = subprocess.run(["ip", "-o", kind], capture_output=True, text=True, check=True).stdout
        for name, process in re.findall(rf"\b(pd(\d+)(?:{'|'.join(names)})\d*)\b", listed):
            if not os.path.exists(f"/proc/{process}"):
                subprocess.run(["ip", kind, "del", name], capture_output=True, check=False)


def _name(what: str) -> str:
    """Return the name of one of this process's devices and namespaces."""
    return f"pd{os.getpid()}{what}"[-_LONGEST_NAME:]


def _run(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout
