"""Hosts of their own on this machine: network namespaces at a switch, with addresses, ports and a loopback each.

Where servers run in two of them, everything between them goes over the switch, which can slow them down. This machine
is at the switch as well. Needs root and iproute2.
"""

import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Self

#: Of RFC 2544, for tests of networks: nobody routes them. Another one in each process.
_NETWORK = f"198.18.{os.getpid() % 256}"
THIS_MACHINE = 254  # at the switch, beside the hosts
_LONGEST_NAME = 15  # of a network device


def what_lacks() -> str:
    """Return what hosts need and is not here, as far as one can see without making any; empty if all is here."""
    for tool, package in (("ip", "iproute2"), ("bridge", "iproute2"), ("tc", "iproute2")):
        if shutil.which(tool) is None:
            return f"{tool} is missing (Debian: apt-get install {package})"
    return "" if os.geteuid() == 0 else "only root can make network namespaces"


class Hosts:
    """Makes hosts when they are asked for, and removes them. They are numbered from 1."""

    def __init__(self) -> None:
        self._made: set[int] = set()

    @staticmethod
    def address(number: int) -> str:
        """Return the address of a host."""
        return f"{_NETWORK}.{number}"

    def namespace(self, number: int) -> str:
        """Return the name of a host's network namespace, which is made if it is not there."""
        if number not in self._made:
            self._make(number)
        return name_of(f"h{number}")

    def prefix(self, number: int) -> list[str]:
        """Return what a command begins with that runs on a host, which is made if it is not there."""
        return ["ip", "netns", "exec", self.namespace(number)]

    @contextmanager
    def slowed(self, number: int, rate: str) -> Iterator[None]:
        """What a host is sent comes no faster: "200mbit", say."""
        device = name_of(f"p{number}")
        run("tc", "qdisc", "add", "dev", device, "root", "tbf", "rate", rate, "burst", "256kb", "latency", "50ms")
        try:
            yield
        finally:
            run("tc", "qdisc", "del", "dev", device, "root")

    def close(self) -> None:
        """Remove all. Idempotent."""
        for number in self._made:
            with suppress(subprocess.CalledProcessError):
                run("ip", "link", "del", name_of(f"p{number}"))  # the system takes its time with those of a namespace
            with suppress(subprocess.CalledProcessError):
                run("ip", "netns", "del", name_of(f"h{number}"))
        if self._made:
            with suppress(subprocess.CalledProcessError):
                run("ip", "link", "del", name_of("sw"))
        self._made.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _make(self, number: int) -> None:
        if not self._made:
            _remove_those_of_ended_processes()
            run("ip", "link", "add", name_of("sw"), "type", "bridge")
            run("ip", "address", "add", f"{self.address(THIS_MACHINE)}/24", "dev", name_of("sw"))
            run("ip", "link", "set", name_of("sw"), "up")
        self._made.add(number)
        space, port = name_of(f"h{number}"), name_of(f"p{number}")
        run("ip", "netns", "add", space)
        run("ip", "link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", space)
        run("ip", "link", "set", port, "master", name_of("sw"), "up")
        inside = ("ip", "netns", "exec", space, "ip")
        run(*inside, "link", "set", "lo", "up")
        run(*inside, "address", "add", f"{self.address(number)}/24", "dev", "eth0")
        run(*inside, "link", "set", "eth0", "up")
        run(*inside, "route", "add", "default", "via", self.address(THIS_MACHINE))


@contextmanager
def cut(number: int) -> Iterator[None]:
    """Nothing reaches one of this process's hosts, and nothing that it sends reaches another."""
    run("ip", "link", "set", name_of(f"p{number}"), "down")
    try:
        yield
    finally:
        run("ip", "link", "set", name_of(f"p{number}"), "up")


def _remove_those_of_ended_processes() -> None:
    """They are left where a process was killed."""
    for kind, names in (("netns", ("h",)), ("link", ("sw", "p"))):
        listed = subprocess.run(["ip", "-o", kind], capture_output=True, text=True, check=True).stdout
        for name, process in re.findall(rf"\b(pd(\d+)(?:{'|'.join(names)})\d*)\b", listed):
            if not os.path.exists(f"/proc/{process}"):
                subprocess.run(["ip", kind, "del", name], capture_output=True, check=False)


def name_of(what: str) -> str:
    """Return the name of one of this process's devices and namespaces."""
    return f"pd{os.getpid()}{what}"[-_LONGEST_NAME:]


def run(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout
