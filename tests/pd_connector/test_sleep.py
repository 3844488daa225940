"""Sleep mode: the caches are unmapped and mapped again while P and D know each other.

vLLM 0.33 calls the connector in the order of ``put_to_sleep`` and ``wake_up``. The sides of the connector and the bytes
are real; the transfer engine is the in-process one, and in one test Mooncake.
"""

import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorRole

from pd_connector.config import parse_config
from pd_connector.connector import PDConnector
from pd_connector.orders import BlockMoves, LoadOrder, Orders, RankEnds, StoreOrder
from pd_connector.params import parse_remote_prefill
from pd_connector.scheduler.prefill.producer import Producer
from pd_connector.stats import StatsRecorder
from pd_connector.vllm.engine_config import UnsupportedError
from pd_connector.worker import worker as worker_module
from pd_connector.worker.worker import ConnectorWorker
from tests.support.connector.engines import an_order
from tests.support.connector.requests import FakeRequest, a_prompt
from tests.support.connector.vllm_engine import (
    BLOCK_TOKENS,
    CACHES,
    LAYERS,
    EngineUnderTest,
    StartEngine,
    a_config,
    role_of,
)
from tests.support.engine.in_process import Fault, InProcessEngine, InProcessFabric
from tests.support.releases import before
from tests.support.waiting import until
from transfer.engine.interface import EngineStartError
from transfer.engine.mooncake import MooncakeEngine, MooncakeOptions

THEIRS, OURS = [3, 1, 6], [2, 7, 4]
GONE = 7.0  # what the caches hold after they have been mapped again


def put_to_sleep(engine: EngineUnderTest) -> None:
    """``EngineCore.sleep``, and ``Worker.sleep`` behind it."""
    engine.scheduler.reset_cache()
    engine.worker.unregister_kv_caches()
    for cache in engine.caches.values():
        cache.fill_(GONE)


def wake_up(engine: EngineUnderTest) -> None:
    """``EngineCore.wake_up``, and ``Worker.wake_up`` behind it."""
    engine.worker.restore_kv_caches()
    engine.scheduler.set_xfer_handshake_metadata_pp_aware({(0, 0): engine.worker.get_handshake_metadata()})


def fill(engine: EngineUnderTest, blocks: list[int]) -> None:
    """What a prefill does."""
    for cache in engine.caches.values():
        cache[blocks] = torch.rand(cache[blocks].shape)


def pull(d: EngineUnderTest, request_id: str, params: Any, blocks: list[int] = OURS) -> bool:
    """Whether a decode leg arrives."""
    d.allocate(FakeRequest(request_id, a_prompt(70), params), blocks)
    d.steps_until(lambda results: request_id in results.finished_recving)
    return request_id not in d.results.failed_recving


def assert_pulls_right(p: EngineUnderTest, d: EngineUnderTest, request_id: str) -> None:
    fill(p, THEIRS)
    assert pull(d, request_id, p.prefill(request_id, THEIRS)[1])
    p.step()
    for name in LAYERS:
        assert torch.equal(d.caches[name][OURS], p.caches[name][THEIRS])


# P sleeps


def test_a_lease_from_before_the_sleep_is_void_and_one_from_after_it_is_pulled(start: StartEngine) -> None:
    p, d = start("kv_producer"), start("kv_consumer", "recompute")
    assert_pulls_right(p, d, "acquainted")
    old, older = (p.prefill(name, blocks)[1] for name, blocks in (("a", [3, 1, 6]), ("b", [2, 5, 7])))
    put_to_sleep(p)
    assert p.held == [], "vLLM unmaps what nobody holds"
    before = {name: cache.clone() for name, cache in d.caches.items()}
    assert not pull(d, "while it sleeps", old)
    wake_up(p)
    assert not pull(d, "after it has woken", older)
    assert all(torch.equal(d.caches[name], before[name]) for name in LAYERS)
    assert_pulls_right(p, d, "new")


def test_peers_know_a_woken_engine_by_another_name(start: StartEngine) -> None:
    p = start("kv_producer")
    names: list[str] = []
    for _ in range(3):
        names.append(p.prefill(f"r{len(names)}", THEIRS)[1]["remote_engine_id"])
        put_to_sleep(p)
        wake_up(p)
    assert len(set(names)) == 3


def test_waking_up_an_engine_that_does_not_sleep_changes_nothing(start: StartEngine) -> None:
    p, d = start("kv_producer"), start("kv_consumer")
    params = p.prefill("r", THEIRS)[1]
    wake_up(p)
    wake_up(d)
    assert pull(d, "r", params)


def test_a_wake_up_that_fails_can_be_tried_again(
    start: StartEngine, fabric: InProcessFabric, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise EngineStartError("the transport refuses the memory")

    p, d = start("kv_producer"), start("kv_consumer")
    put_to_sleep(d)
    engines = fabric.addresses
    with monkeypatch.context() as patch:
        patch.setattr(d.worker._worker, "_register", refuse)
        with pytest.raises(EngineStartError):
            wake_up(d)
    assert fabric.addresses == engines, "an engine is left behind"
    wake_up(d)
    assert_pulls_right(p, d, "again")


def test_memory_that_a_read_may_still_touch_does_not_go_however_often_one_asks(
    start: StartEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def still_runs() -> None:
        raise RuntimeError("1 reads from prefill engines did not end")

    p, d = start("kv_producer"), start("kv_consumer")
    (pulls,) = d.worker._worker._roles
    with monkeypatch.context() as patch:
        patch.setattr(pulls, "check_ended", still_runs)
        for _ in range(2):
            with pytest.raises(RuntimeError, match="did not end") as raised:
                d.worker.unregister_kv_caches()
            assert raised.value.__notes__ == ["PDConnector transfers nothing until the engine sleeps, or starts again"]
    put_to_sleep(d)
    wake_up(d)
    assert_pulls_right(p, d, "again")


def test_nobody_reads_the_memory_of_an_engine_that_sleeps(start: StartEngine, fabric: InProcessFabric) -> None:
    p = start("kv_producer")
    handshake = p.worker.get_handshake_metadata()
    assert handshake is not None
    address = handshake.handshake.geometry.engine_address
    for _ in range(2):  # idempotent
        p.worker.unregister_kv_caches()
        assert fabric.find(address) is None
    for _ in range(2):
        p.worker.restore_kv_caches()
        handshake = p.worker.get_handshake_metadata()
        assert handshake is not None
        assert fabric.find(handshake.handshake.geometry.engine_address) is not None


def test_checksums_are_taken_after_a_sleep_too(start: StartEngine) -> None:
    p, d = start("kv_producer", verify=True), start("kv_consumer", verify=True)
    for request_id in ("before", "after"):
        fill(p, THEIRS)
        params = p.prefill(request_id, THEIRS)[1]
        d.allocate(FakeRequest(request_id, a_prompt(70), params), OURS)

        def arrived(request_id: str = request_id) -> bool:
            p.step()
            d.step()
            return request_id in d.results.finished_recving

        until(arrived)
        assert d.results.failed_recving == set()
        p.step()
        for engine in (p, d):
            put_to_sleep(engine)
            wake_up(engine)


# D sleeps


def test_a_read_under_way_ends_before_the_memory_goes_and_its_request_fails(
    start: StartEngine, fabric: InProcessFabric
) -> None:
    p, d = start("kv_producer"), start("kv_consumer")
    go_on = threading.Event()
    fabric.inject(1, Fault(landed=1, fails=False, until=go_on))
    d.allocate(FakeRequest("r", a_prompt(70), p.prefill("r", THEIRS)[1]), OURS)
    d.step()
    until(lambda: fabric.reads == 1)
    threading.Timer(0.2, go_on.set).start()
    put_to_sleep(d)
    wake_up(d)
    fabric.deliver_late_bytes()
    for cache in d.caches.values():
        assert (cache == GONE).all(), "something was written after the memory had been given up"
    d.step()
    assert d.results.failed_recving == {"r"}
    p.scheduler.reset_cache()
    assert_pulls_right(p, d, "after")


def test_what_has_arrived_but_was_not_reported_is_lost_with_the_memory(start: StartEngine) -> None:
    p, d = start("kv_producer"), start("kv_consumer")
    d.allocate(FakeRequest("r", a_prompt(70), p.prefill("r", THEIRS)[1]), OURS)
    d.worker.bind_connector_metadata(d.scheduler.build_connector_meta(SimpleNamespace(num_scheduled_tokens={})))
    until(lambda: not role_of(p, Producer)._leases.active)
    put_to_sleep(d)
    wake_up(d)
    d.step()
    assert d.results.failed_recving == {"r"}


@pytest.mark.parametrize("transfers", ["off", "always"])
def test_what_is_ordered_while_it_sleeps_fails_and_holds_nobody_up(
    start: StartEngine, model: Path, fabric: InProcessFabric, transfers: str
) -> None:
    """vLLM schedules nothing meanwhile. An order that comes all the same must not make its request wait for ever."""
    settings: dict[str, Any] = {"cpu_bytes_to_use": 64 << 20, "host_transfers": transfers}
    config = a_config(model, "kv_consumer", **settings)
    worker = ConnectorWorker(config, CACHES, parse_config(settings), StatsRecorder(), lambda _: InProcessEngine(fabric))
    worker.register_caches({name: torch.rand(8, 2, BLOCK_TOKENS, 128) for name in LAYERS})
    worker.unregister_caches()
    remote = parse_remote_prefill(start("kv_producer").prefill("r", THEIRS)[1])
    pull = an_order("r", remote, (tuple(OURS),))
    worker.execute(Orders(landings=(pull,)) if transfers == "always" else Orders(pulls=(pull,)))
    finished, failed = worker.take_results()
    landings = dict(worker.take_report().landings)
    if transfers == "always":
        assert (finished, landings) == (set(), {"r": RankEnds(1, failed=True)})
    else:
        assert (finished, failed, landings) == ({"r"}, {"r"}, {})
    worker.check_integrity()
    worker.shutdown()


def test_a_wake_up_that_fails_leaves_no_roles_behind(
    start: StartEngine, model: Path, fabric: InProcessFabric, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else they would carry out what is also reported as failed."""
    settings: dict[str, Any] = {"peers": ["127.0.0.1:1"]}
    config = a_config(model, "kv_consumer", **settings)
    worker = ConnectorWorker(config, CACHES, parse_config(settings), StatsRecorder(), lambda _: InProcessEngine(fabric))
    worker.register_caches({name: torch.rand(8, 2, BLOCK_TOKENS, 128) for name in LAYERS})
    worker.unregister_caches()
    before = threading.active_count()
    with monkeypatch.context() as patch:
        patch.setattr(worker_module, "canary_pulls", Mock(side_effect=EngineStartError("the transport refuses it")))
        with pytest.raises(EngineStartError):
            worker.restore_caches()
    assert threading.active_count() == before
    remote = parse_remote_prefill(start("kv_producer").prefill("r", THEIRS)[1])
    worker.execute(Orders(prefixes=(an_order("r", remote, (tuple(OURS),)),)))
    assert worker.take_report().prefixes == {"r": RankEnds(1, failed=True)}
    worker.restore_caches()
    worker.check_integrity()
    worker.shutdown()


def test_a_woken_worker_does_not_claim_the_weights_of_before_a_change(model: Path, fabric: InProcessFabric) -> None:
    config = a_config(model, "kv_producer")
    worker = ConnectorWorker(config, CACHES, parse_config({}), StatsRecorder(), lambda _: InProcessEngine(fabric))
    worker.register_caches({name: torch.rand(8, 2, BLOCK_TOKENS, 128) for name in LAYERS})
    told = []
    for changes in (0, 1):
        worker.execute(Orders(model_changes=changes))
        worker.unregister_caches()
        worker.restore_caches()
        handshake = worker.handshake()
        assert handshake is not None
        assert handshake.model is not None
        told.append(handshake.model.weights_digest)
    worker.shutdown()
    assert told[0]
    assert not told[1]


# Mooncake


def test_with_mooncake_a_pull_fails_while_p_sleeps_and_succeeds_when_both_have_woken(
    start: StartEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = MooncakeOptions("127.0.0.1", progress_timeout_s=2.0, connect_timeout_s=2.0)
    monkeypatch.setattr(worker_module, "open_engine", lambda config, **_: MooncakeEngine(options))
    settings = {"protocol": "tcp"}
    p, d = start("kv_producer", **settings), start("kv_consumer", **settings)
    assert_pulls_right(p, d, "before")
    params = p.prefill("asleep", THEIRS)[1]
    put_to_sleep(p)
    before = {name: cache.clone() for name, cache in d.caches.items()}
    assert not pull(d, "asleep", params)
    assert all(torch.equal(d.caches[name], before[name]) for name in LAYERS)
    put_to_sleep(d)
    wake_up(d)
    wake_up(p)
    assert_pulls_right(p, d, "after")


# Host memory


def test_host_memory_keeps_its_contents_and_copies_end_before_the_device_memory_goes(
    model: Path, fabric: InProcessFabric
) -> None:
    settings: dict[str, Any] = {"cpu_bytes_to_use": 64 << 20}
    config = a_config(model, "kv_producer", **settings)
    worker = ConnectorWorker(config, CACHES, parse_config(settings), StatsRecorder(), lambda _: InProcessEngine(fabric))
    caches = {name: torch.rand(8, 2, BLOCK_TOKENS, 128) for name in LAYERS}
    stored = {name: cache[THEIRS].clone() for name, cache in caches.items()}
    worker.register_caches(caches)
    slots = range(3)
    moves = BlockMoves.of([(0, block, slot) for block, slot in zip(THEIRS, slots, strict=True)])
    worker.execute(Orders(stores=(StoreOrder(1, moves),)))
    first = worker.handshake()
    assert first is not None
    worker.unregister_caches()
    for cache in caches.values():
        cache.fill_(GONE)
    worker.restore_caches()
    (ends,) = worker.take_report().stores.values()
    assert not ends.failed
    second = worker.handshake()
    assert second is not None
    assert second.host_slots == first.host_slots
    assert second.generation == first.generation + 1
    back = BlockMoves.of([(0, block, slot) for block, slot in zip(OURS, slots, strict=True)])
    worker.execute(Orders(loads=(LoadOrder("r", back, 96),)))
    arrived: set[str] = set()

    def all_arrived() -> bool:
        finished, failed = worker.take_results()
        assert not failed
        arrived.update(finished)
        return bool(arrived)

    until(all_arrived)
    assert arrived == {"r"}
    for name, cache in caches.items():
        assert torch.equal(cache[OURS], stored[name])
        assert (cache[THEIRS] == GONE).all()
    worker.check_integrity()
    worker.shutdown()


def test_a_worker_without_caches_has_nothing_to_let_go_of(model: Path) -> None:
    worker = ConnectorWorker(a_config(model), CACHES, parse_config({}), StatsRecorder())
    worker.unregister_caches()
    worker.restore_caches()
    assert worker.handshake() is None
    worker.shutdown()


# When it is allowed


@pytest.mark.parametrize(("protocol", "supported"), [("tcp", True), ("rdma", True), ("ascend", False), ("auto", True)])
def test_sleep_is_supported_where_the_transfer_engine_can_be_made_again(protocol: str, supported: bool) -> None:
    config = KVTransferConfig(
        kv_connector="PDConnector", kv_role="kv_both", kv_connector_extra_config={"protocol": protocol}
    )
    assert PDConnector.supports_sleep_mode(config) == supported


@before((0, 33), "calls that tell connectors of sleep")
@pytest.mark.parametrize("role", list(KVConnectorRole))
def test_a_vllm_that_does_not_tell_of_sleep_is_refused_with_it(model: Path, role: KVConnectorRole) -> None:
    config = a_config(model)
    config.model_config.enable_sleep_mode = True
    with pytest.raises(UnsupportedError, match=r"enable_sleep_mode: .* use vLLM 0\.33 or later"):
        PDConnector(config, role, CACHES)


def test_a_vllm_that_tells_of_sleep_may_sleep(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(KVConnectorBase_V1, "restore_kv_caches", lambda self: None, raising=False)
    config = a_config(model)
    config.model_config.enable_sleep_mode = True
    PDConnector(config, KVConnectorRole.SCHEDULER, CACHES).shutdown()
