"""Sockets that wait for a peer's system to answer are found, and those who wait for them can be woken."""

import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from tests.support.waiting import until
from transfer.engine.connecting import connecting_to


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


def test_those_that_wait_are_found_with_the_peers_address_and_no_others(full: Full) -> None:
    until(lambda: len(full.waiting()) == 3)
    found = set()
    for each, ip in connecting_to(full.port):
        with each:
            assert ip == full.host
            found.add(each.getsockname())
    assert found == {each.getsockname() for each in full.waiting()}
    assert list(connecting_to(full.port + 1)) == []


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
    for each, _ in connecting_to(full.port):
        with each:
            each.shutdown(socket.SHUT_RDWR)
    thread.join(30.0)
    assert failures
    assert not isinstance(failures[0], TimeoutError)
    assert list(connecting_to(full.port)) == []
