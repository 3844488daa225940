"""The client spreads its repetitions at random, and leaves the numbers of its process alone.

Covers: transfer.control.client_loop.
"""

import random

from tests.support.control.samples import HELLO, Handler
from transfer.control.client import ControlClient
from transfer.control.server import ControlServer


def test_a_process_that_has_seeded_its_random_numbers_gets_those_of_its_seed(
    client: ControlClient, server: ControlServer, handler: Handler
) -> None:
    before = random.getstate()
    client.request("127.0.0.1", server.port, HELLO, 10.0).result()
    assert random.getstate() == before
