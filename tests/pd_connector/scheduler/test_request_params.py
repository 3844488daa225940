"""Requests that ask an engine for what its role does not do."""

import logging

import pytest

from pd_connector.scheduler.request_params import RequestParams
from pd_connector.stats import StatsRecorder
from pd_connector.vllm.engine_config import EngineRole
from tests.support.connector.requests import FakeRequest, a_prompt

PREFILLS = EngineRole(produces=True, consumes=False, recomputes=False, is_read=True, reads=False)
DECODES = EngineRole(produces=False, consumes=True, recomputes=False, is_read=False, reads=True)


@pytest.mark.parametrize(
    ("role", "asked", "wanted"),
    [(PREFILLS, "do_remote_prefill", "kv_consumer"), (DECODES, "do_remote_decode", "kv_producer")],
)
def test_legs_for_another_role_are_named_in_one_warning(
    role: EngineRole, asked: str, wanted: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("pd_connector"), "propagate", True)
    params = RequestParams(role, StatsRecorder())
    for number in range(3):
        params.check(FakeRequest(f"r{number}", a_prompt(70), {asked: True}))
    (message,) = [record.getMessage() for record in caplog.records]
    assert f"request r0 asks for {asked}, which needs kv_role {wanted} or kv_both" in message
