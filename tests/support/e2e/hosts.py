"""Hosts of their own on this machine, as benchmarks have them, and what can happen to their network.

This machine is at the switch as well, so that tests and routers reach all hosts whatever is between these.
"""

import ctypes
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

from benchmarks import hosts
from benchmarks.hosts import THIS_MACHINE, name_of, run, what_lacks

_CLONE_NEWNET = 0x40000000


@cache
def why_not() -> str:
    """Return why no hosts can be made here; empty if they can."""
    if lacks := what_lacks():
        return lacks
    tried = Hosts()
    try:
        tried.prefix(1)
        with tried.parted(1), tried.slowed(1, "1gbit"):
            return ""
    except subprocess.CalledProcessError as error:
        return f"{' '.join(error.cmd)}: {error.stderr.strip()}"
    finally:
        tried.close()


class Hosts(hosts.Hosts):
    """Hosts that can be parted, and whose addresses and ports can be closed."""

    def __init__(self) -> None:
        super().__init__()
        self._filtering: set[int] = set()

    def give_ipv6(self, number: int) -> None:
        """Give a host an IPv6 address, and a default route, beside those of IPv4; this machine, too."""
        commands = (f"address replace {self.ipv6(number)}/64 dev eth0 nodad", "-6 route add default dev eth0")
        self.configure(number, *commands)
        run("ip", "address", "replace", f"{self.ipv6(THIS_MACHINE)}/64", "dev", name_of("sw"), "nodad")

    @staticmethod
    def ipv6(number: int) -> str:
        """Return the IPv6 address that a host can be given."""
        return f"fd98:{os.getpid() % 256:x}::{number:x}"

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
            run(*self.prefix(number), "ip", *command.split())

    def lead(self, address: str, number: int) -> None:
        """Have this machine reach an address by way of a host, until that is gone."""
        run("ip", "route", "replace", address, "via", self.address(number))

    def join(self, one: int, other: int, device: str) -> None:
        """Join two hosts by a cable of their own, whose ends have the same name and no addresses yet."""
        ends = [self.namespace(number) for number in (one, other)]
        peer = ("type", "veth", "peer", "name", device, "netns", ends[1])
        run("ip", "link", "add", device, "netns", ends[0], *peer)
        for number in (one, other):
            self.configure(number, f"link set {device} up")

    def forward(self, number: int) -> None:
        """Let a host be a router, which also answers for packets that it does not take."""
        for setting in ("ipv4/ip_forward", "ipv6/conf/all/forwarding"):
            run(*self.prefix(number), "sh", "-c", f"echo 1 > /proc/sys/net/{setting}")

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
        shown = run(*self.prefix(of), "cat", "/sys/class/net/eth0/address")
        self.configure(number, "address flush dev eth0", f"link set eth0 address {shown.strip()}")
        self.configure(number, f"address add {self.address(of)}/24 dev eth0")

    @contextmanager
    def parted(self, *numbers: int) -> Iterator[None]:
        """No packet passes between these hosts. All reach this machine."""
        for number in numbers:
            run("bridge", "link", "set", "dev", name_of(f"p{number}"), "isolated", "on")
        try:
            yield
        finally:
            for number in numbers:
                run("bridge", "link", "set", "dev", name_of(f"p{number}"), "isolated", "off")

    @contextmanager
    def unplugged(self, number: int) -> Iterator[None]:
        """No packet reaches or leaves a host."""
        device = name_of(f"p{number}")
        run("ip", "link", "set", device, "nomaster")
        try:
            yield
        finally:
            run("ip", "link", "set", device, "master", name_of("sw"))

    @contextmanager
    def forbidden(self, number: int) -> Iterator[None]:
        """This machine refuses to send to a host, as a firewall of its own does."""
        route = ("prohibit", self.address(number))
        run("ip", "route", "add", *route)
        try:
            yield
        finally:
            run("ip", "route", "del", *route)

    def close(self) -> None:
        """Remove all. Idempotent."""
        super().close()
        self._filtering.clear()

    def _filter(self, number: int) -> None:
        """Have a host look at rules before it takes what is sent to it."""
        if number not in self._filtering:
            self._filtering.add(number)
            self.forward(number)
            for family in ("-4", "-6"):
                self.configure(number, f"{family} rule add pref 20 lookup local", f"{family} rule del pref 0")


def enter(namespace: str) -> None:
    """Give this thread the network of a namespace."""
    with open(f"/var/run/netns/{namespace}") as space:
        _set_network(space.fileno())


def _set_network(descriptor: int) -> None:
    if ctypes.CDLL(None, use_errno=True).setns(descriptor, _CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), "setns")
