"""What a lease holds of a prompt's states: the one before the last token, and those at borders of blocks."""

import time

import pytest
from vllm.v1.request import RequestStatus

from layout.geometry import CacheGroup, WorkerGeometry
from pd_connector.scheduler.external_loads import ExternalLoads
from pd_connector.scheduler.prefill.drain import Drain
from pd_connector.scheduler.prefill.lease_service import LeaseService
from pd_connector.scheduler.prefill.leased_states import LeasedStates
from pd_connector.scheduler.prefill.leases import LeaseTable
from pd_connector.scheduler.prefill.producer import Producer
from pd_connector.vllm.block_pools import Leased
from pd_connector.vllm.engine_core import EngineLoop
from tests.support.connector.engines import IDENTITY
from tests.support.connector.prompts_with_states import BLOCK, StateEngine
from tests.support.releases import INSTALLED, module_needs

if INSTALLED < (0, 30):
    module_needs((0, 30), "states of recurrent layers")


def leased(engine: StateEngine) -> LeasedStates:
    return LeasedStates(engine.blocks, engine.retentions, engine.prompts)


@pytest.mark.parametrize("tokens", [2, BLOCK, BLOCK + 1, BLOCK + 2, 2 * BLOCK + 1, 23])
def test_the_state_before_the_last_token_is_leased(tokens: int) -> None:
    """Also where the prompt but its last token ends at the border of a block."""
    for mode in ("align", "none", "ring"):
        engine = StateEngine(mode)
        request = engine.request("r", tokens, is_cut=True)
        engine.compute(request)
        own = engine.tables(request)
        tables, _ = leased(engine).hold(request, own)
        running = (tokens - 2) // engine.retentions[1].block_tokens
        assert tables[0] == own[0]
        assert [table[-1] for table in tables[1:]] == [own[1][running], own[2][running]]
        assert all(len(table) == running + 1 for table in tables[1:])
        assert 0 not in {table[-1] for table in tables[1:]}


def test_states_at_borders_are_leased_that_the_request_no_longer_has() -> None:
    engine = StateEngine()
    request = engine.request("r", 22, is_cut=True)
    engine.compute(request, until=(8, 16))
    own = engine.tables(request)
    tables, held = leased(engine).hold(request, own)
    found = engine.blocks.found_states(request, 1, BLOCK)
    assert sorted(found) == [1, 3, 4]  # after 8, 16 and 20 tokens
    assert [bool(block) for block in tables[1]] == [False, True, False, True, True, True]
    assert {block.block_id for block in held} == {block for table in tables for block in table if block}
    engine.manager.free(request)
    assert all(engine.manager.block_pool.blocks[block].ref_cnt == 1 for table in tables for block in table if block)
    engine.blocks.release(held)


def test_a_prompt_that_was_not_cut_has_no_such_state() -> None:
    engine = StateEngine("none")
    request = engine.request("r", 22)
    engine.compute(request)
    tables, _ = leased(engine).hold(request, engine.tables(request))
    assert tables[1:] == [[0], [0]]


@pytest.mark.parametrize(("tokens", "borders"), [(23, 5), (24, 5), (25, 6)])
def test_states_behind_the_one_that_a_reader_needs_are_not_leased(tokens: int, borders: int) -> None:
    """Of a prompt that was not cut, which a longer one has computed up to the border at its end."""
    engine = StateEngine()
    engine.compute(engine.request("longer", 33), until=(4, 8, 12, 16, 20, 24))
    request = engine.request("r", tokens)
    engine.compute(request)
    tables, _ = leased(engine).hold(request, engine.tables(request))
    assert [bool(block) for block in tables[1]] == [number < borders for number in range((tokens - 1) // BLOCK + 1)]


def test_nor_has_one_whose_request_went_on() -> None:
    engine = StateEngine("none")
    request = engine.request("r", 22, is_cut=True)
    engine.compute(request)
    request.num_computed_tokens += 1
    tables, _ = leased(engine).hold(request, engine.tables(request))
    assert tables[1:] == [[0], [0]]


def test_a_state_is_not_leased_that_a_step_under_way_computes_for_another_request() -> None:
    """vLLM lets it be found when it schedules the step."""
    engine = StateEngine()
    request, other = engine.request("r", 14, is_cut=True), engine.request("other", 6)
    engine.compute(request, until=(8,))
    engine.compute(other)
    own = engine.tables(request)
    unfinished = {engine.blocks.found_states(request, group, BLOCK)[0].block_id for group in (1, 2)}
    assert unfinished <= {block for table in engine.tables(other) for block in table}

    def held(unfinished: set[int] | None) -> list[bool]:
        tables, blocks = leased(engine).hold(request, own, lambda: unfinished)
        engine.blocks.release(blocks)
        return [bool(block) for block in tables[1]]

    assert held(set()) == [True, True, True, True]
    assert held(unfinished) == [False, True, True, True]
    assert held(None) == [False, False, False, True]


def test_the_role_leases_no_state_that_its_engine_is_to_compute_for_another_request() -> None:
    engine, loop = StateEngine(), EngineLoop()
    groups = tuple(CacheGroup(BLOCK, 0, (), states=kept.states) for kept in engine.retentions)
    leases: LeaseTable[Leased] = LeaseTable(30.0, time.monotonic)
    service = LeaseService(leases, IDENTITY, 1, prompts=engine.prompts)
    service.set_workers((WorkerGeometry(0, 1, 0, 1, "host:1", groups, ()),))
    drain = Drain(5.0, 60.0, loop.is_stopping)
    external = ExternalLoads(engine.blocks, (), 2)
    role = Producer(service, "127.0.0.1", 0, engine.blocks, loop, drain, external, leased(engine))
    request, other = engine.request("r", 14, is_cut=True), engine.request("other", 6)
    request.kv_transfer_params = {"do_remote_decode": True}
    role.add(request)
    role.add(other)
    engine.compute(request, until=(8,))
    request.status = RequestStatus.FINISHED_LENGTH_CAPPED
    engine.compute(other)
    role.step_orders({"other": 6})
    other.num_in_flight_tokens = 6
    params = role.finish(request, engine.tables(request))
    role.close()
    assert params is not None
    assert [bool(block) for block in params["remote_block_ids"][1]] == [False, True, True, True]
