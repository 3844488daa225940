import threading
from collections.abc import Iterator
from contextlib import closing

import pytest

from tests.support.connector.engines import Site


@pytest.fixture
def site() -> Iterator[Site]:
    before = set(threading.enumerate())
    with closing(Site()) as site:
        yield site
    assert set(threading.enumerate()) <= before
