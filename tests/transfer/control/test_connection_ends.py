"""Who is told that the connection to a peer has ended, whatever ended it."""

from tests.support.control.samples import HELLO, WELCOME, Handler
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


def test_an_idle_connection_ends_too_and_so_do_those_of_a_closed_client(
    server: ControlServer, handler: Handler
) -> None:
    handler.answer = lambda _: WELCOME
    for settings, closes in ((ClientSettings(idle_s=0.2), False), (ClientSettings(), True)):
        client = ControlClient(settings)
        client.request(HERE, server.port, HELLO, 5).result()
        lost = client.until_lost(HERE, server.port)
        if closes:
            client.close()
        assert lost.result(5) is None
        client.close()
        assert client.until_lost(HERE, server.port).result(5) is None
