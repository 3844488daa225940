"""Threads and file descriptors: nothing is left after close.

Covers: transfer.control.polling.
"""

import os
import threading

import pytest

from tests.support.control.samples import HELLO, WELCOME, Handler
from tests.support.process import OpenResources, free_port
from tests.support.waiting import until
from transfer.control.client import ControlClient
from transfer.control.failures import ControlStartError
from transfer.control.polling import Wakeup
from transfer.control.server import ControlServer


def test_close_leaves_no_threads_and_no_descriptors(handler: Handler) -> None:
    before, threads_before = OpenResources.now(), set(threading.enumerate())
    for _ in range(10):
        servers = [ControlServer(handler, "127.0.0.1") for _ in range(2)]
        client = ControlClient()
        for server in servers:
            server.start()
            assert client.request("127.0.0.1", server.port, HELLO, 5).result() == WELCOME
        assert client.request("localhost", servers[0].port, HELLO, 5).result() == WELCOME
        client.request("127.0.0.1", free_port(), HELLO, 30)
        with pytest.raises(ControlStartError):
            ControlServer(handler, "127.0.0.1", servers[0].port).start()
        client.close()
        for server in servers:
            server.close()
    assert set(threading.enumerate()) <= threads_before
    until(lambda: OpenResources.now().files <= before.files)


def test_unreachable_peers_leave_no_descriptors(client: ControlClient, server: ControlServer) -> None:
    assert client.request("127.0.0.1", server.port, HELLO, 5).result() == WELCOME
    before = OpenResources.now()
    futures = [client.request("127.0.0.1", free_port(), HELLO, 0.1) for _ in range(20)]
    for future in futures:
        assert future.exception(5) is not None
    until(lambda: OpenResources.now().files <= before.files)


def test_a_wakeup_is_readable_from_set_to_clear_however_often_it_was_set() -> None:
    wakeup = Wakeup()
    for _ in range(100_000):  # more than the pipe holds
        wakeup.set()
    wakeup.clear()
    with pytest.raises(BlockingIOError):
        os.read(wakeup.fileno(), 1)
    wakeup.set()
    assert os.read(wakeup.fileno(), 10) == b"\0"
    wakeup.close()
    wakeup.close()
    wakeup.set()
    assert wakeup.fileno() == -1
