"""A conversation goes on at another server, which pulls what the first one holds of it instead of computing it."""

from itertools import count

import pytest

from tests.support.e2e.choice import on_pairs, pairs
from tests.support.e2e.conversations import goes_on_elsewhere
from tests.support.e2e.deployments import LANDINGS, MIXED
from tests.support.e2e.host_memory import wait_until_nothing_is_lent
from tests.support.e2e.pair import Pair
from tests.support.waiting import until

pytestmark = [pytest.mark.equality]

#: A prefix is waited for no longer than computing it takes. The first pull from an engine takes longer, and one that
#: was late is not asked for a while.
PATIENCE_S = 60


@on_pairs(pairs(MIXED, [("TP2", "TP1"), ("TP1", "TP2")]))
def test_what_was_decoded_is_pulled_in_the_next_turn(pair: Pair) -> None:
    attempts = count()
    until(lambda: goes_on_elsewhere(pair, next(attempts)), within_s=PATIENCE_S)


@on_pairs(pairs(LANDINGS, [("B", "D auto")]))
def test_what_only_host_memory_holds_is_pulled_from_there(pair: Pair) -> None:
    attempts = count()
    until(lambda: goes_on_elsewhere(pair, next(attempts), in_host=True), within_s=PATIENCE_S)
    wait_until_nothing_is_lent(pair.prefill)
