"""Sockets that wait for a peer's system to answer are found, and who waits for them can be woken. Others are probed."""

import os
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack, closing, suppress

import numpy as np
import pytest

from layout.copies import Copies
from tests.support.memory import Memory
from tests.support.waiting import until
from transfer.engine.connecting import connections_to
from transfer.engine.mooncake import MooncakeEngine, MooncakeOptions


class Full:
    """A port that takes no more connections: the system drops what asks for one."""

    def __init__(self, host: str, stack: ExitStack) -> None:
        self.host, self._stack = host, stack
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listener = stack.enter_context(socket.create_server((host, 0), family=family, backlog=0))
        self.port = listener.getsockname()[1]
        self.asking = [self._ask(family) for _ in range(4)]

    def _ask(self, family: socket.AddressFamily) -> socket.socket:
        asking = self._stack.enter_context(socket.socket(family))
        asking.setblocking(False)
        asking.connect_ex((self.host, self.port))
        return asking

    def waiting(self) -> list[socket.socket]:
        found = []
        for asking in self.asking:
            try:
                asking.getpeername()
            except OSError:
                found.append(asking)
        return found


@pytest.fixture(params=["127.0.0.1", "::1"])
def full(request: pytest.FixtureRequest) -> Iterator[Full]:
    if ":" in request.param and not socket.has_dualstack_ipv6():
        pytest.skip("no IPv6 here")
    with ExitStack() as stack:
        yield Full(request.param, stack)


def test_those_that_are_connected_or_wait_are_found_with_the_peers_address_and_no_others(full: Full) -> None:
    until(lambda: len(full.waiting()) == 3)
    found = [(each.getsockname(), ip) for each, ip in connections_to(full.port)]
    assert sorted(found) == sorted((each.getsockname(), full.host) for each in full.asking)
    assert list(connections_to(full.port + 1)) == []


def test_who_waits_for_one_is_woken(full: Full) -> None:
    until(lambda: len(full.waiting()) == 3)
    one = full.waiting()[0]
    failures: list[OSError] = []

    def connect() -> None:
        one.settimeout(60.0)
        try:
            one.connect((full.host, full.port))
        except OSError as error:
            failures.append(error)

    thread = threading.Thread(target=connect)
    thread.start()
    for each, _ in connections_to(full.port):
        each.shutdown(socket.SHUT_RDWR)
    thread.join(30.0)
    assert failures
    assert not isinstance(failures[0], TimeoutError)
    assert len(list(connections_to(full.port))) == 1  # that which was connected


def test_connections_to_an_engine_end_when_their_machine_has_vanished() -> None:
    """The system sees to it, if it is told to: Mooncake would keep them, and their files, for ever."""
    near, far = (Memory(4096) for _ in range(2))
    with ExitStack() as stack:
        here, there = (stack.enter_context(closing(MooncakeEngine(MooncakeOptions("127.0.0.1")))) for _ in range(2))
        here.register([near.region])
        there.register([far.region])
        link = stack.enter_context(closing(here.open(there.address, [far.region], there.identity)))
        link.read(Copies(*(np.array([each]) for each in (near.region.address, far.region.address, 4096))), 10.0)
        own = [stack.enter_context(each) for each in _tcp_sockets()]
        listening = {each.getsockname()[1] for each in own if each.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)}
        accepted = [each for each in own if _is_connected(each) and each.getsockname()[1] in listening]
        assert accepted
        assert all(each.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) for each in accepted)


def _tcp_sockets() -> Iterator[socket.socket]:
    """Duplicates of this process's own."""
    for entry in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            if os.readlink(f"/proc/self/fd/{entry}").startswith("socket:"):
                found = socket.socket(fileno=os.dup(int(entry)))
                if found.family in (socket.AF_INET, socket.AF_INET6) and found.type == socket.SOCK_STREAM:
                    yield found
                else:
                    found.close()


def _is_connected(one: socket.socket) -> bool:
    with suppress(OSError):
        return bool(one.getpeername())
    return False
