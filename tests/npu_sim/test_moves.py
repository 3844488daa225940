"""Leases that move to host memory and prompts that have landed there, while the device lags: a worker's half of both.

``ConnectorWorker`` gets the orders and tells the scheduler when they have ended; what the scheduler then does is done
here: it gives the device's blocks to another prompt, or lets the request run. The real torch_npu on the simulated
runtime: nothing here has run on an NPU.
"""

import ctypes
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from pd_connector.config import ConnectorConfig
from pd_connector.orders import LoadOrder, Orders, StoreEnds, StoreOrder
from pd_connector.stats import StatsRecorder
from pd_connector.worker.host.pool import HostPool
from pd_connector.worker.worker import ConnectorWorker
from tests.support.devices import npu_caches as tier
from tests.support.devices.npu_device import DeviceBytes, held
from tests.support.memory import Bytes, noise
from tests.support.waiting import holds_for, until
from transfer.copies.batch.base import Direction

MOVE = -1  # ids of moves are negative
PLACES = ((3, 4), (4, 0), (5, 2))  # (block, slot) of the prompt that moves or has landed
BLOCKS = [block for block, _ in PLACES]
SPARE = 6  # blocks from here on hold nothing
SLOTS = 6


@pytest.fixture(params=[tier.keys_and_values, tier.cross_layer])
def caches(request: pytest.FixtureRequest, acl: ctypes.CDLL) -> tier.Caches:
    torch.npu.set_device(0)
    form: tier.Form = request.param
    made = form(torch.device("npu", 0), DeviceBytes(acl))
    made.fill(0)
    return made


@pytest.fixture(params=[False, True], ids=["default stream", "a stream of its own"])
def model(request: pytest.FixtureRequest, caches: tier.Caches) -> Iterator[int]:
    """The handle of the stream that the model works on: the current one while the test runs."""
    stream = torch.npu.Stream() if request.param else torch.npu.default_stream()
    with torch.npu.stream(stream):
        yield int(stream.npu_stream)
        torch.npu.synchronize()


OpenWorker = Callable[..., tuple[ConnectorWorker, HostPool]]


@pytest.fixture
def open_worker(caches: tier.Caches, monkeypatch: pytest.MonkeyPatch) -> Iterator[OpenWorker]:
    """Open a worker with host memory, and no transfer engine."""
    pools: list[HostPool] = []
    # vLLM, which this environment has not, would say whether MultiConnector is around this connector.
    monkeypatch.setattr("pd_connector.vllm.engine_config._outer", lambda config: config.kv_transfer_config)

    def opened(*, waits: bool = True) -> tuple[ConnectorWorker, HostPool]:
        pools.append((tier.open_pool if waits else tier.open_pool_without_marks)(caches, SLOTS))
        transfer = SimpleNamespace(
            is_kv_producer=True, is_kv_consumer=True, kv_load_failure_policy="fail", kv_connector_extra_config={}
        )
        config: Any = SimpleNamespace(kv_transfer_config=transfer)
        nothing: Any = None
        worker = ConnectorWorker(config, nothing, ConnectorConfig(protocol="tcp"), StatsRecorder())
        worker._roles = [pools[-1]]
        return worker, pools[-1]

    yield opened
    for pool in pools:
        pool.join()


def stream_of(pool: HostPool, way: Direction) -> int:
    """The handle of the stream on which the pool's copies are made."""
    copies = pool.copies
    copier: Any = copies._store_copier if way is Direction.DEVICE_TO_HOST else copies._load_copier
    return int(copier._backend._stream.handle())


# Moves


def compute(caches: tier.Caches, seed: int, blocks: Sequence[int]) -> list[list[Bytes]]:
    """Queue the writing of blocks on the model's stream; what they will hold."""
    contents = [caches.contents(100 * seed + block) for block in blocks]
    for block, values in zip(blocks, contents, strict=True):
        caches.write(block, values)
    return [tier.as_bytes(values) for values in contents]


def order_move(worker: ConnectorWorker) -> None:
    worker.execute(Orders(stores=(StoreOrder(MOVE, tier.moves(*((0, *place) for place in PLACES))),)))


def await_move(worker: ConnectorWorker) -> None:
    """Ask as the model's thread does at each step, until the scheduler is told."""
    assert until(lambda: worker.take_report().stores) == {MOVE: StoreEnds(1)}


def in_slots(caches: tier.Caches, pool: HostPool) -> list[list[Bytes]]:
    """What the slots of the lease hold: they are loaded to blocks that are free."""
    torch.npu.synchronize()
    pool.copies.load(LoadOrder("probe", tier.moves(*((0, SPARE + n, slot) for n, (_, slot) in enumerate(PLACES))), 0))
    assert not tier.end_of_load(pool.copies, "probe").failure
    return [caches.block(SPARE + n) for n in range(len(PLACES))]


def right(found: Sequence[Sequence[Bytes]], expected: Sequence[Sequence[Bytes]]) -> list[bool]:
    return [tier.are_equal(block, other) for block, other in zip(found, expected, strict=True)]


def test_a_move_waits_for_what_the_device_writes(
    caches: tier.Caches, model: int, open_worker: OpenWorker, acl: ctypes.CDLL
) -> None:
    worker, pool = open_worker()
    with held(acl, model) as go_on:
        prompt = compute(caches, 1, BLOCKS)
        order_move(worker)
        holds_for(lambda: not worker.take_report().stores, 0.05)
        go_on.set()
        await_move(worker)
    assert all(right(in_slots(caches, pool), prompt))


def test_without_its_mark_a_move_would_overtake_the_device(
    caches: tier.Caches, model: int, open_worker: OpenWorker, acl: ctypes.CDLL
) -> None:
    """The hazard is there, so that the test above can fail."""
    worker, pool = open_worker(waits=False)
    stale = [caches.block(block) for block in BLOCKS]
    with held(acl, model):
        prompt = compute(caches, 1, BLOCKS)
        order_move(worker)
        await_move(worker)
    found = in_slots(caches, pool)
    assert not any(right(found, prompt))
    assert all(right(found, stale))


@pytest.mark.parametrize("waits", [True, False], ids=["told of the end", "not told"])
def test_a_move_has_ended_when_the_next_prompt_may_have_its_blocks(
    caches: tier.Caches, model: int, open_worker: OpenWorker, acl: ctypes.CDLL, *, waits: bool
) -> None:
    """Who did not wait for the worker's word would put the next prompt's bytes under the lease."""
    worker, pool = open_worker()
    prompt = compute(caches, 1, BLOCKS)
    with held(acl, stream_of(pool, Direction.DEVICE_TO_HOST)) as go_on:
        order_move(worker)
        if waits:
            holds_for(lambda: not worker.take_report().stores, 0.05)
            go_on.set()
            await_move(worker)
        following = compute(caches, 2, BLOCKS)
        torch.npu.current_stream().synchronize()
    if not waits:
        await_move(worker)
    assert right(in_slots(caches, pool), prompt) == [waits] * len(BLOCKS)
    assert all(right([caches.block(block) for block in BLOCKS], following))


# Landings


def land(pool: HostPool) -> tuple[Orders, list[tuple[int, Bytes]]]:
    """Put bytes into slots past the device, as a pull does; the order that loads them, and what is then where on it."""
    moves = tier.moves(*((0, *place) for place in PLACES))
    copies = pool.copies.layout.loads(pool.region, moves.groups, moves.blocks, moves.slots)
    expected = []
    for number, (to, start, size) in enumerate(zip(copies.destinations, copies.sources, copies.sizes, strict=True)):
        values = noise(int(size), number)
        ctypes.memmove(int(start), values.ctypes.data, values.nbytes)
        expected.append((int(to), values))
    return Orders(loads=(LoadOrder("request", moves, tokens=len(PLACES) * tier.TOKENS),)), expected


def await_request(worker: ConnectorWorker) -> None:
    """Ask as the model's thread does at each step, until vLLM lets the request run."""
    assert until(lambda: found if (found := worker.take_results())[0] else None) == ({"request"}, set())


def are_there(caches: tier.Caches, expected: Sequence[tuple[int, Bytes]]) -> list[bool]:
    return [np.array_equal(caches.memory.at(address, values.nbytes), values) for address, values in expected]


def test_a_landed_prompt_waits_for_what_the_device_still_writes_to_its_blocks(
    caches: tier.Caches, model: int, open_worker: OpenWorker, acl: ctypes.CDLL
) -> None:
    worker, pool = open_worker()
    orders, expected = land(pool)
    with held(acl, model) as go_on:
        compute(caches, 1, BLOCKS)  # for a request that has just left
        worker.execute(orders)
        holds_for(lambda: worker.take_results() == (set(), set()), 0.05)
        go_on.set()
        await_request(worker)
    assert all(are_there(caches, expected))


def test_without_its_mark_it_would_be_overwritten(
    caches: tier.Caches, model: int, open_worker: OpenWorker, acl: ctypes.CDLL
) -> None:
    """The hazard is there, so that the test above can fail."""
    worker, pool = open_worker(waits=False)
    orders, expected = land(pool)
    with held(acl, model):
        compute(caches, 1, BLOCKS)
        worker.execute(orders)
        await_request(worker)
    assert not any(are_there(caches, expected))


def test_a_request_is_reported_when_all_that_has_landed_is_on_the_device(
    caches: tier.Caches, model: int, open_worker: OpenWorker, acl: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before that, it would find what was there before."""
    worker, pool = open_worker()
    orders, expected = land(pool)
    with held(acl, stream_of(pool, Direction.HOST_TO_DEVICE)) as go_on:
        worker.execute(orders)
        holds_for(lambda: worker.take_results() == (set(), set()), 0.05)
        assert not any(are_there(caches, expected))
        monkeypatch.setenv("SIMACL_COPY_US", "5000")
        go_on.set()
        await_request(worker)
        assert all(are_there(caches, expected)), "copies were under way after the request was reported"
