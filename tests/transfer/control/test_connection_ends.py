"""Who is told that the connection to a peer has ended, whatever ended it."""

from contextlib import closing

import pytest

from tests.support.control.samples import HELLO, WELCOME, Handler
from tests.support.waiting import until
from transfer.control.client import ControlClient
from transfer.control.peer_sockets import ClientSettings
from transfer.control.server import ControlServer

HERE = "127.0.0.1"


def test_who_waits_for_the_end_of_a_connection_is_told_when_the_server_goes(
    client: ControlClient, server: ControlServer, handler: Handler
) -> None:
    handler.answer = lambda _: WELCOME
    client.request(HERE, server.port, HELLO, 5).result()
    lost, unwanted = client.until_lost(HERE, server.port), client.until_lost(HERE, server.port)
    client.request(HERE, server.port, HELLO, 5).result()
    assert not lost.done()
    assert unwanted.cancel()
    server.close()
    assert lost.result(5) is None


def test_there_is_no_connection_to_whom_nothing_was_asked(client: ControlClient, server: ControlServer) -> None:
    assert client.until_lost(HERE, server.port).result(5) is None
    assert client.until_lost("no host", -1).result(5) is None


def test_a_connection_whose_end_is_waited_for_is_none_that_is_idle(server: ControlServer, handler: Handler) -> None:
    """What is mapped of the peer's memory lasts as long as the connection."""
    handler.answer = lambda _: WELCOME
    with closing(ControlClient(ClientSettings(idle_s=0.05))) as client:
        client.request(HERE, server.port, HELLO, 5).result()
        lost = client.until_lost(HERE, server.port)
        with pytest.raises(TimeoutError):
            lost.result(0.5)
        lost.cancel()
        until(lambda: client.counters.peers_closed == 1)


def test_the_connections_of_a_closed_client_end(server: ControlServer, handler: Handler) -> None:
    handler.answer = lambda _: WELCOME
    client = ControlClient()
    client.request(HERE, server.port, HELLO, 5).result()
    lost = client.until_lost(HERE, server.port)
    client.close()
    assert lost.result(5) is None
    assert client.until_lost(HERE, server.port).result(5) is None
