"""A request's way through both sides of a prefill and of a decode engine's connector.

The four are in one process, with the control channel between them and the in-process transfer engine.
"""

import json
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest.mock import create_autospec

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file
from vllm.v1.request import RequestStatus

from layout.geometry import WorkerGeometry
from layout.sharding import Source, choose_sources
from pd_connector.orders import Orders
from pd_connector.scheduler.decode.consumer import Consumer
from pd_connector.scheduler.host.tier import HostTier
from pd_connector.worker import peer
from tests.support.connector.requests import FakeRequest, a_prompt, allocated
from tests.support.connector.vllm_calls import NAMES_FAILED_REQUESTS, Results
from tests.support.connector.vllm_engine import BLOCK_TOKENS, LAYERS, SPEC, StartEngine, role_of
from tests.support.engine.in_process import Fault, InProcessFabric
from tests.support.waiting import until


@pytest.mark.parametrize(("role", "leg"), [("kv_consumer", "do_remote_decode"), ("kv_producer", "do_remote_prefill")])
def test_a_request_for_the_other_role_is_served_without_a_transfer(
    start: StartEngine, role: str, leg: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    connector = start(role).scheduler
    monkeypatch.setattr(logging.getLogger("pd_connector"), "propagate", True)
    request = FakeRequest("r", a_prompt(70), {leg: True}, status=RequestStatus.FINISHED_LENGTH_CAPPED)
    connector.on_new_request(request)
    assert connector.get_num_new_matched_tokens(request, 0) == (0, False)
    assert connector.request_finished_all_groups(request, ([1, 2, 3],)) == (False, None)
    assert f"request r asks for {leg}" in caplog.text


def test_a_prompt_is_computed_on_one_engine_and_used_on_the_other(start: StartEngine) -> None:
    p, d = start("kv_producer"), start("kv_consumer")
    frees_later, params = p.prefill("at p", [3, 1, 6])
    assert not frees_later
    assert p.held == [1, 3, 6]
    d.allocate(FakeRequest("at d", a_prompt(70), json.loads(json.dumps(params))), [2, 7, 4])
    untouched = {name: cache[[0, 1, 3, 5, 6]].clone() for name, cache in d.caches.items()}
    d.steps_until(lambda results: results.finished_recving)
    assert d.results == Results(finished_recving={"at d"})
    for name in LAYERS:
        assert torch.equal(d.caches[name][[2, 7, 4]], p.caches[name][[3, 1, 6]])
        assert torch.equal(d.caches[name][[0, 1, 3, 5, 6]], untouched[name])
    assert p.scheduler.has_pending_push_work()
    p.step()
    assert p.held == []
    assert not p.scheduler.has_pending_push_work()


def test_a_recipes_keys_change_nothing_but_a_warning(
    start: StartEngine, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = {"use_ascend_direct": True, "prefill": {"tp_size": 4, "pp_size": 1}, "decode": {"tp_size": 1}}
    p, d = start("kv_producer"), start("kv_consumer", **recipe)
    monkeypatch.setattr(logging.getLogger("pd_connector"), "propagate", True)
    d.allocate(FakeRequest("r", a_prompt(70), p.prefill("r", [3, 1, 6])[1]), [2, 7, 4])
    d.steps_until(lambda results: results.finished_recving)
    assert d.results == Results(finished_recving={"r"})
    assert "tp_size 4 (found: 1)" in caplog.text


@pytest.mark.parametrize("role", ["kv_consumer", "kv_both"])
def test_a_request_may_be_preempted_whatever_its_blocks(start: StartEngine, role: str) -> None:
    """vllm-ascend's recompute scheduler asks."""
    connector = start(role).scheduler
    assert connector.update_state_before_preempt(FakeRequest("r", a_prompt(70), None), ([1, 2],), 40) is True


def test_both_sides_count_what_happened(start: StartEngine) -> None:
    p, d = start("kv_producer"), start("kv_consumer")
    d.allocate(FakeRequest("r", a_prompt(70), p.prefill("r", [3, 1, 6])[1]), [2, 7, 4])
    d.steps_until(lambda results: results.finished_recving)
    pulled, leased = d.worker.get_kv_connector_stats(), p.scheduler.get_kv_connector_stats()
    assert pulled is not None
    assert leased is not None
    counts = pulled.data["counts"]
    assert (counts["pulls"], counts["pull_tokens"]) == (1, 69)
    assert counts["pull_bytes"] == 3 * len(LAYERS) * SPEC.page_size_bytes
    assert leased.data["counts"] == {"leases:granted": 1, "leases:released": 1}
    assert ("worker.get_transfer_results" if NAMES_FAILED_REQUESTS else "worker.get_finished") in pulled.data["calls"]
    assert "scheduler.request_finished_all_groups" in leased.data["calls"]


def test_a_failed_pull_is_reported_as_failed_and_as_finished(
    start: StartEngine, fabric: InProcessFabric, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    p, d = start("kv_producer"), start("kv_consumer", "recompute")
    monkeypatch.setattr(logging.getLogger("pd_connector"), "propagate", True)
    fabric.inject(1, Fault(settled=False))
    d.allocate(FakeRequest("r", a_prompt(70), p.prefill("r", [3, 1, 6])[1]), [2, 7, 4])
    d.steps_until(lambda results: results.failed_recving)
    assert d.results == Results(finished_recving={"r"}, failed_recving={"r"})
    assert "request r: pull from engine" in caplog.text
    assert "Its prompt is computed here instead" in caplog.text
    counted = d.worker.get_kv_connector_stats()
    assert counted is not None
    assert counted.data["counts"] == {"pull_failures:read": 1}


def test_what_host_memory_has_is_loaded_and_only_the_rest_is_pulled(start: StartEngine) -> None:
    p, d = start("kv_producer"), start("kv_consumer")
    tier = create_autospec(HostTier, instance=True)
    tier.must_wait.return_value = False
    tier.missing_tokens.return_value = tier.allocated.return_value = BLOCK_TOKENS
    tier.step_orders.return_value = Orders()
    d.scheduler._scheduler._roles.insert(0, tier)
    d.allocate(FakeRequest("r", a_prompt(70), p.prefill("r", [3, 1, 6])[1]), [2, 7, 4])
    (pull,) = d.scheduler._scheduler.step_orders({}).pulls
    assert (pull.first_token, pull.end_token) == (BLOCK_TOKENS, 69)


def test_params_that_cannot_be_used_fail_the_request_instead_of_hanging_it(start: StartEngine) -> None:
    d = start("kv_consumer")
    d.allocate(FakeRequest("r", a_prompt(70), {"do_remote_prefill": True}), [2, 7, 4])
    d.step()
    assert d.results == Results(finished_recving={"r"}, failed_recving={"r"})


def test_a_request_of_no_leg_is_not_touched(start: StartEngine) -> None:
    both = start("kv_both")
    request = FakeRequest("r", a_prompt(70), status=RequestStatus.FINISHED_STOPPED)
    both.scheduler.on_new_request(request)
    assert both.scheduler.get_num_new_matched_tokens(request, 0) == (0, False)
    both.step()
    assert both.results == Results()
    assert both.scheduler.request_finished_all_groups(request, ([1, 2],)) == (False, None)


def test_models_of_other_weights_are_told_apart(start: StartEngine, model: Path) -> None:
    p = start("kv_producer")
    save_file({"model.embed_tokens.weight": np.arange(256, 0, -1, dtype=np.int16)}, model / "model.safetensors")
    d = start("kv_consumer")
    params = p.prefill("r", [3, 1, 6])[1]
    d.allocate(FakeRequest("r", a_prompt(70), params), [2, 7, 4])
    d.steps_until(lambda results: results.failed_recving)
    counted = d.worker.get_kv_connector_stats()
    assert counted is not None
    assert counted.data["counts"] == {"pull_failures:incompatible": 1}


def test_decode_engines_begin_at_different_replicas(start: StartEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    turns: list[int] = []

    def recorded(local: WorkerGeometry, remotes: Sequence[WorkerGeometry], turn: int) -> tuple[Source, ...]:
        turns.append(turn)
        return choose_sources(local, remotes, turn)

    monkeypatch.setattr(peer, "choose_sources", recorded)
    p, first, second = start("kv_producer"), start("kv_consumer"), start("kv_consumer")
    for number, d in enumerate((first, second)):
        d.allocate(FakeRequest("r", a_prompt(70), p.prefill(f"r{number}", [3, 1, 6])[1]), [2, 7, 4])
        d.steps_until(lambda results: results.finished_recving)
    assert len(set(turns)) == 2


def test_a_late_sibling_is_computed_on_the_decode_engine(start: StartEngine) -> None:
    """One of ``n`` choices that arrives when the pull of the first has ended: its lease is spent."""
    p, d = start("kv_producer"), start("kv_consumer")
    params = p.prefill("r", [3, 1, 6])[1]
    d.allocate(FakeRequest("first", a_prompt(70), params), [2, 7, 4])
    d.steps_until(lambda results: results.finished_recving)
    sibling = FakeRequest("sibling", a_prompt(70), params)
    d.scheduler.on_new_request(sibling)
    assert d.scheduler.get_num_new_matched_tokens(sibling, 64) == (0, False)
    d.step()
    assert d.results == Results(finished_recving={"first"})


@pytest.mark.parametrize("leaves", [False, True], ids=["waits", "has left"])
def test_a_request_whose_lease_is_known_to_have_ended_fails_without_a_read(
    start: StartEngine,
    fabric: InProcessFabric,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    *,
    leaves: bool,
) -> None:
    """Where a client leaves, P may end its transfer before D's pull has ended: that is no failure."""
    p, d = start("kv_producer", lease_ttl_s=0.3, claim_timeout_s=0.3), start("kv_consumer")
    monkeypatch.setattr(logging.getLogger("pd_connector"), "propagate", True)
    request = FakeRequest("r", a_prompt(70), p.prefill("r", [3, 1, 6])[1])
    d.scheduler.on_new_request(request)
    p.scheduler.reset_cache()
    renewals = role_of(d, Consumer)._renewals
    until(lambda: renewals.lost("r") is not None)
    d.waiting["r"] = [2, 7, 4]
    d.scheduler.update_state_after_alloc(request, allocated([2, 7, 4]), 69)
    d.step(left={"r", "another"} if leaves else ())
    d.steps_until(lambda results: results.finished_recving)
    assert d.results == Results(finished_recving={"r"}, failed_recving={"r"})
    assert fabric.reads == 0
    assert ("has ended: it expired, was cancelled, or gave way to other requests" in caplog.text) is not leaves
    counted = d.worker.get_kv_connector_stats()
    assert (counted.data["counts"] if counted is not None else {}) == ({} if leaves else {"pull_failures:lease": 1})


# What a prefill engine holds


def test_an_expired_lease_frees_the_blocks_of_the_prefill_engine(start: StartEngine) -> None:
    p = start("kv_producer", lease_ttl_s=0.1, claim_timeout_s=0.1)
    p.prefill("r", [3, 1, 6])
    assert p.held == [1, 3, 6]
    p.steps_until(lambda _: not p.held)


def test_blocks_of_ended_leases_are_free_before_blocks_are_looked_for(start: StartEngine) -> None:
    p = start("kv_producer", lease_ttl_s=0.1, claim_timeout_s=0.1)
    p.prefill("r", [3, 1, 6])
    request = FakeRequest("next", a_prompt(70))
    until(lambda: p.scheduler.get_num_new_matched_tokens(request, 0) == (0, False) and not p.held)


def test_a_block_that_two_leases_hold_is_free_after_both(start: StartEngine) -> None:
    p = start("kv_producer")
    p.prefill("a", [3, 1])
    p.prefill("b", [3, 2])
    assert p.held == [1, 2, 3]
    p.scheduler.reset_cache()
    assert p.held == []
    assert p.pool.get_num_free_blocks() == 7


@pytest.mark.parametrize("status", [RequestStatus.FINISHED_ABORTED, RequestStatus.FINISHED_ERROR])
def test_a_prefill_that_did_not_complete_is_not_leased(start: StartEngine, status: Any) -> None:
    p = start("kv_producer")
    assert p.prefill("r", [3, 1, 6], status) == (False, None)
    assert p.held == []


def test_a_prefill_without_blocks_is_not_leased(start: StartEngine) -> None:
    assert start("kv_producer").prefill("r", []) == (False, None)
