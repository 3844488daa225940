"""Conversations that go on at another server."""

from tests.support.e2e.host_memory import evict
from tests.support.e2e.pair import Pair, assert_same_output, control_address, make_prompt

#: A server pulls only what leaves its device room for the whole prompt beside it.
_TURN, _ANSWER = 1000, 70


def goes_on_elsewhere(pair: Pair, attempt: int, *, in_host: bool = False) -> bool:
    """Check a conversation that goes on at D; return whether D pulled what P holds of it before it had computed it.

    ``in_host``: P's device has forgotten it.
    """
    hint = {"prefixes_at": control_address(pair)}
    first = make_prompt(_TURN, ("conversation", pair.name, attempt))
    answer = pair.prefill.client.complete(first, _ANSWER)
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
