"""A conversation goes on at another server, which pulls what the first one holds of it instead of computing it."""

from itertools import count

import pytest

from tests.support.e2e.choice import on_pairs, pairs
from tests.support.e2e.deployments import LANDINGS, MIXED
from tests.support.e2e.host_memory import evict, wait_until_nothing_is_lent
from tests.support.e2e.pair import Pair, assert_same_output, control_address, make_prompt
from tests.support.waiting import until

pytestmark = [pytest.mark.equality]

TURN, ANSWER = 1300, 70
#: A prefix is waited for no longer than computing it takes. The first pull from an engine takes longer, and one that
#: was late is not asked for a while.
PATIENCE_S = 60


def goes_on_elsewhere(pair: Pair, attempt: int, *, in_host: bool = False) -> bool:
    """Check a conversation that goes on at D; return whether D pulled what P holds of it before it had computed it.

    ``in_host``: P's device has forgotten it.
    """
    hint = {"prefixes_at": control_address(pair)}
    first = make_prompt(TURN, ("conversation", pair.name, attempt))
    answer = pair.prefill.client.complete(first, ANSWER)
    second = [*first, *answer.tokens, *make_prompt(20, "question")]
    if in_host:
        evict(pair.prefill, ("prefixes", attempt))
    with pair.traffic() as traffic:
        completion = pair.decode.client.complete(second, kv_transfer_params=hint)
    unit = max(pair.prefill.spec.block_size, pair.decode.spec.block_size)
    held = (len(first) + len(answer.tokens) - 1) // unit * unit
    assert traffic.decode is not None
    computed = traffic.source("local_compute")
    assert computed in {len(second) - held, len(second)}
    if traffic.decode.value("vllm:pd_prefixes_total", event="late"):  # found all the same, if it came just after that
        computed = len(second)
    if computed < len(second):
        assert traffic.pulled("prefix_tokens") == held
        assert (traffic.pulled("pull_bytes_from_host") > 0) == in_host
    assert traffic.leases("granted") == traffic.leases("released") <= 1
    assert traffic.failures() == 0
    assert_same_output(completion, pair.decode.client.compute(second))
    return computed < len(second)


@on_pairs(pairs(MIXED, [("TP2", "TP1"), ("TP1", "TP2")]))
def test_what_was_decoded_is_pulled_in_the_next_turn(pair: Pair) -> None:
    attempts = count()
    until(lambda: goes_on_elsewhere(pair, next(attempts)), within_s=PATIENCE_S)


@on_pairs(pairs(LANDINGS, [("B", "D auto")]))
def test_what_only_host_memory_holds_is_pulled_from_there(pair: Pair) -> None:
    attempts = count()
    until(lambda: goes_on_elsewhere(pair, next(attempts), in_host=True), within_s=PATIENCE_S)
    wait_until_nothing_is_lent(pair.prefill)
