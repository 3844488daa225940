"""A conversation goes on at another server on simulated NPUs, which pulls what the first one holds of it."""

from itertools import count

import pytest

from tests.support.ascend.servers import SEVERAL_RANKS
from tests.support.e2e.conversations import goes_on_elsewhere
from tests.support.e2e.deployments import on
from tests.support.e2e.pair import Pair
from tests.support.waiting import until

#: As of servers on the CPU: a prefix that is late is not asked for a while.
PATIENCE_S = 180


@on(SEVERAL_RANKS)
@pytest.mark.parametrize("pair", [("TP2", "TP1"), ("TP1", "TP2")], indirect=True, ids="-".join)
def test_what_was_decoded_is_pulled_in_the_next_turn(pair: Pair) -> None:
    attempts = count()
    until(lambda: goes_on_elsewhere(pair, next(attempts)), within_s=PATIENCE_S)
