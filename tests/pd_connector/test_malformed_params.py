"""Whatever a client sends as ``kv_transfer_params`` is the problem of its own request, never of the engine.

Covers: pd_connector.params, pd_connector.scheduler.request_params.
"""

import logging
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from vllm.v1.request import RequestStatus

from pd_connector.scheduler.decode.consumer import Consumer
from tests.support.connector.requests import FakeRequest, a_prompt, a_remote
from tests.support.connector.vllm_calls import all_failed
from tests.support.connector.vllm_engine import EngineUnderTest, StartEngine, role_of
from tests.support.process import free_port

_LEAVES = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from(["do_remote_prefill", -1, 2**70, float("nan"), float("inf")])
)
ANY_JSON = st.recursive(
    _LEAVES,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=6), inner, max_size=4),
    max_leaves=8,
)
PROMPT = a_prompt(70)
#: Nobody answers there.
GOOD = a_remote(PROMPT, remote_host="127.0.0.1", remote_port=free_port()).to_params()
FIELDS = st.sampled_from(sorted(GOOD.keys() - {"remote_host", "remote_port"}))  # those would make it call on strangers
ALTERED = st.builds(lambda field, value: GOOD | {field: value}, FIELDS, ANY_JSON)
NAMED = {"do_remote_prefill": True, "transfer_id": "T", "remote_host": "127.0.0.1", "remote_port": free_port()}
NAMED_FIELDS = st.sampled_from(["transfer_id", "remote_engine_id", "lease_id", "remote_block_ids"])
ALTERED_NAMED = st.builds(lambda field, value: NAMED | {field: value}, NAMED_FIELDS, ANY_JSON)
FLAGS_ONLY = st.builds(lambda flag, other: {**other, flag: True}, st.sampled_from(sorted(GOOD)[:2]), st.just({}))


def serve(engine: EngineUnderTest, request: Any) -> None:
    """What vLLM's scheduler calls for a request that arrives, gets its blocks, waits, is computed and ends."""
    scheduler = engine.scheduler
    scheduler.on_new_request(request)
    (request.kv_transfer_params or {}).get("do_remote_prefill")  # as vLLM reads them right after that call
    tokens, is_async = scheduler.get_num_new_matched_tokens(request, 0)
    if tokens is None:  # it waits for the other leg, until its client leaves
        scheduler.request_finished_all_groups(request, ([],))
        return
    blocks = SimpleNamespace(
        get_block_ids=lambda: ([2, 7, 4],), blocks=([engine.pool.blocks[block] for block in (2, 7, 4)],)
    )
    scheduler.update_state_after_alloc(request, blocks, tokens)
    orders = scheduler.build_connector_meta(SimpleNamespace(num_scheduled_tokens={})).orders
    waiting = {order.request_id for order in (*orders.refusals, *orders.pulls)}
    assert waiting == ({request.request_id} if is_async else set())
    scheduler.update_connector_output(all_failed(waiting))
    engine.tables[request.request_id] = [2, 7, 4]
    scheduler.request_finished_all_groups(request, ([2, 7, 4],))
    del engine.tables[request.request_id]


@pytest.mark.thorough
@pytest.mark.usefixtures("no_log")
@pytest.mark.parametrize("role", ["kv_producer", "kv_consumer", "kv_both"])
def test_no_params_whatever_end_the_engine(start: StartEngine, role: str) -> None:
    engine = start(role)

    @settings(suppress_health_check=[HealthCheck.too_slow], deadline=None)
    @given(params=ANY_JSON | ALTERED | ALTERED_NAMED | FLAGS_ONLY)
    def check(params: Any) -> None:
        # vLLM gives no two requests one id; a lease is good for one request.
        request = FakeRequest(f"r{next(numbers)}", PROMPT, params, status=RequestStatus.FINISHED_LENGTH_CAPPED)
        serve(engine, request)
        engine.scheduler.reset_cache()
        engine.scheduler._scheduler.check_integrity()

    numbers = iter(range(10**9))
    check()


@pytest.mark.parametrize("params", [[1, 2], "{}", 0, []])
def test_malformed_params_fail_their_own_request_with_a_reason(
    start: StartEngine, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, params: Any
) -> None:
    engine = start("kv_consumer")
    monkeypatch.setattr(logging.getLogger("pd_connector"), "propagate", True)
    engine.allocate(FakeRequest("r", PROMPT, params), [2, 7, 4])
    engine.steps_until(lambda results: results.finished_recving)
    assert engine.results.failed_recving == {"r"}
    assert "request r cannot pull its prompt: kv_transfer_params are not what a PDConnector" in caplog.text
    assert "Expected `object`" in caplog.text
    role_of(engine, Consumer).check_integrity()


def test_a_prefill_engine_serves_such_a_request_without_a_transfer(
    start: StartEngine, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = start("kv_producer")
    monkeypatch.setattr(logging.getLogger("pd_connector"), "propagate", True)
    request = FakeRequest("r", PROMPT, ["do_remote_decode"], status=RequestStatus.FINISHED_LENGTH_CAPPED)  # type: ignore[arg-type]
    serve(engine, request)
    assert "must be a JSON object, not ['do_remote_decode']" in caplog.text
    assert engine.held == []
