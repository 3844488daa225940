"""The worker half of the host tier under the real torch_npu on the simulated runtime: ``HostPool`` and ``HostCopies``.

Orders go in, blocks move between torch's tensors on the simulated device and host memory that the pool has pinned, and
ends come out, while the model's stream is late. The model is a queue of copies, as the simulation has no kernels.
Nothing here has run on an NPU.
"""

import ctypes
import logging
import signal
import threading
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch

from layout.geometry import Region
from layout.host_blocks import host_layout
from pd_connector.config import ConfigError
from pd_connector.orders import LoadOrder, StoreEnds, StoreOrder
from pd_connector.worker.host.device_copies import HostCopies, UnsettledLoadError
from pd_connector.worker.host.pool import HostPool
from tests.support.devices import npu_caches as tier
from tests.support.devices.npu_device import DeviceBytes, held
from tests.support.devices.npu_simulator import in_a_process
from tests.support.waiting import WAIT_S
from transfer.copies.batch.backends import Backend, open_copier
from transfer.copies.batch.base import Direction

Calls = Callable[[str], int]
SLOTS = 6


@pytest.fixture(params=[0, 1], ids=["npu:0", "npu:1"])
def device(request: pytest.FixtureRequest) -> Iterator[torch.device]:
    torch.npu.set_device(request.param)
    yield torch.device("npu", request.param)
    torch.npu.set_device(0)


@pytest.fixture
def memory(acl: ctypes.CDLL) -> DeviceBytes:
    return DeviceBytes(acl)


@pytest.fixture
def caches(device: torch.device, memory: DeviceBytes) -> tier.Caches:
    made = tier.keys_and_values(device, memory)
    made.fill(0)
    return made


@pytest.fixture
def pool(caches: tier.Caches) -> Iterator[HostPool]:
    made = tier.open_pool(caches, SLOTS)
    yield made
    made.join()


STORE, LOAD = Direction.DEVICE_TO_HOST, Direction.HOST_TO_DEVICE


def store(copies: HostCopies, *triples: tuple[int, int, int]) -> None:
    """Blocks of (group, block, slot), until they are stored."""
    copies.store(StoreOrder(0, tier.moves(*triples)))
    end, ends = tier.end_of_store(copies, 0)
    assert (end.failure, end.blocks, ends) == ("", len(triples), StoreEnds(1))


def load(copies: HostCopies, *triples: tuple[int, int, int]) -> None:
    """Blocks of (group, block, slot), until they are loaded."""
    copies.load(LoadOrder("request", tier.moves(*triples), tokens=0))
    end = tier.end_of_load(copies, "request")
    assert (end.failure, end.blocks) == ("", len(triples))


# Round trips


@pytest.mark.parametrize("form", tier.CACHE_FORMS)
def test_blocks_come_back_byte_for_byte(
    device: torch.device, memory: DeviceBytes, calls: Calls, form: tier.Form
) -> None:
    caches = form(device, memory)
    caches.fill(1)
    last = len(caches.groups()) - 1  # the group of some of the blocks
    stored = [(0, 3, 0), (0, 4, 1), (last, 9, 4), (0, 0, 5), (last, 11, 2)]
    loaded = [(0, 8, 0), (0, 3, 1), (last, 10, 4), (0, 4, 5), (last, 11, 2)]
    pool = tier.open_pool(caches, SLOTS)
    before = caches.now()
    store(pool.copies, *stored)
    assert tier.are_equal(caches.now(), before), "a store writes to the device"
    caches.fill(2)
    expected = caches.now()
    for (group, block, _), (_, to, _) in zip(stored, loaded, strict=True):
        for part in caches.groups()[group]:
            expected[part.allocation][part.place(to)] = before[part.allocation][part.place(block)]
    load(pool.copies, *loaded)
    assert tier.are_equal(caches.now(), expected)
    assert calls("pageable_copies") == 0, "the pool is not pinned"
    pool.close()


def test_more_runs_than_one_call_takes(device: torch.device, memory: DeviceBytes, calls: Calls) -> None:
    caches = tier.many_layers(device, memory)
    caches.fill(1)
    pool, before = tier.open_pool(caches, 10), [caches.block(block) for block in range(10)]
    tried = calls("batches") + calls("batches_v2"), calls("batch_entries")  # at start
    store(pool.copies, *((0, block, 9 - block) for block in range(10)))
    caches.fill(2)
    load(pool.copies, *((0, block, 9 - block) for block in range(10)))
    assert all(tier.are_equal(caches.block(block), before[block]) for block in range(10))
    assert calls("batches") + calls("batches_v2") - tried[0] == 2 * 2
    assert calls("batch_entries") - tried[1] == 2 * 10 * len(caches.parts) > 2 * 4096
    pool.close()


def test_two_devices_at_once(memory: DeviceBytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each worker has its own device, current in its threads only, and gets its own bytes."""
    monkeypatch.setenv("SIMACL_COPY_US", "100")
    start, errors = threading.Barrier(2), []

    def work(number: int) -> None:
        try:
            torch.npu.set_device(number)
            caches = tier.keys_and_values(torch.device("npu", number), memory)
            pool = tier.open_pool(caches, SLOTS)
            start.wait(WAIT_S)
            for turn in range(10):
                contents = caches.contents(1000 * number + turn)
                caches.write(turn, contents)
                store(pool.copies, (0, turn, turn % SLOTS))
                load(pool.copies, (0, turn + 1, turn % SLOTS))
                assert tier.are_equal(caches.block(turn + 1), tier.as_bytes(contents))
            pool.close()
        except BaseException as error:
            errors.append(error)
            start.abort()

    threads = [threading.Thread(target=work, args=(number,)) for number in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors


# Order: what the model's stream was given before an order


def wrong_stores(pool: HostPool, caches: tier.Caches, rounds: int, *, until_wrong: bool = False) -> int:
    """Compute a block, order its store at once, bring it back; how often that is not what was computed."""
    contents, wrong = [caches.contents(seed) for seed in (1, 2)], 0
    for turn in range(rounds):
        for _ in range(4):  # keeps the task queue busy
            caches.write(3, contents[1 - turn % 2])
        caches.write(3, contents[turn % 2])
        store(pool.copies, (0, 3, 2))
        load(pool.copies, (0, 7, 2))
        wrong += not tier.are_equal(caches.block(7), tier.as_bytes(contents[turn % 2]))
        if wrong and until_wrong:
            break
    return wrong


@pytest.mark.parametrize("copy_us", ["0", "200"])
@pytest.mark.parametrize("own_stream", [False, True], ids=["default stream", "a stream of its own"])
def test_a_store_waits_for_what_the_model_writes(
    caches: tier.Caches, pool: HostPool, device: torch.device, own_stream: bool, copy_us: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setenv("SIMACL_COPY_US", copy_us)
    models = torch.npu.Stream(device) if own_stream else torch.npu.default_stream(device)
    with torch.npu.stream(models):
        assert wrong_stores(pool, caches, 20) == 0


def test_without_its_mark_a_store_would_not(caches: tier.Caches, monkeypatch: pytest.MonkeyPatch) -> None:
    """The hazard is there, so that the test above can fail."""
    monkeypatch.setenv("SIMACL_COPY_US", "200")
    pool = tier.open_pool_without_marks(caches, SLOTS)
    assert wrong_stores(pool, caches, 100, until_wrong=True) > 0
    pool.close()


def seen_by_late_reader(pool: HostPool, caches: tier.Caches) -> tuple[bool, bool]:
    """Load a block that a step still reads: whether the step has seen what it should, and the block is new."""
    loaded, old, new = caches.block(5), caches.contents(1), caches.contents(2)
    caches.write(3, old)
    store(pool.copies, (0, 5, 0))
    for _ in range(4):
        caches.write(8, new)
    seen = caches.read(3)
    load(pool.copies, (0, 3, 0))
    torch.npu.synchronize()
    return tier.are_equal(tier.as_bytes(seen), tier.as_bytes(old)), tier.are_equal(caches.block(3), loaded)


def test_a_load_waits_for_what_the_model_still_reads(
    caches: tier.Caches, pool: HostPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SIMACL_COPY_US", "1000")
    assert seen_by_late_reader(pool, caches) == (True, True)


def test_without_its_mark_a_load_would_not(caches: tier.Caches, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SIMACL_COPY_US", "1000")
    pool = tier.open_pool_without_marks(caches, SLOTS)
    assert not all(seen_by_late_reader(pool, caches)[0] for _ in range(20))
    pool.close()


def test_the_mark_is_on_the_caches_device_whatever_the_threads(
    memory: DeviceBytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.npu.set_device(0)
    caches = tier.keys_and_values(torch.device("npu:1"), memory)
    caches.fill(0)
    pool = tier.open_pool(caches, SLOTS)
    monkeypatch.setenv("SIMACL_COPY_US", "200")
    assert torch.npu.current_device() == 0
    assert wrong_stores(pool, caches, 5) == 0
    pool.close()


def test_the_models_thread_never_waits(caches: tier.Caches, pool: HostPool, acl: ctypes.CDLL) -> None:
    contents = caches.contents(1)
    with held(acl, torch.npu.current_stream().npu_stream) as go_on:
        caches.write(3, contents)
        pool.copies.store(StoreOrder(1, tier.moves((0, 3, 0))))
        pool.copies.load(LoadOrder("request", tier.moves((0, 4, 1)), tokens=tier.TOKENS))
        assert (pool.copies.take_stores(), pool.copies.take_loads()) == ({}, {})
        go_on.set()
        assert tier.end_of_store(pool.copies, 1)[1] == StoreEnds(1)
        assert not tier.end_of_load(pool.copies, "request").failure


def test_an_order_is_submitted_once_however_often_it_is_asked_for(
    caches: tier.Caches, pool: HostPool, calls: Calls, monkeypatch: pytest.MonkeyPatch
) -> None:
    caches.write(3, caches.contents(1))
    monkeypatch.setenv("SIMACL_COPY_US", "5000")
    pool.copies.store(StoreOrder(1, tier.moves((0, 3, 0))))
    tier.end_of_store(pool.copies, 1)
    for _ in range(3):
        assert pool.copies.take_stores() == {}
    assert calls("batches") + calls("batches_v2") == 1


# Failures


def test_a_store_that_fails_half_way_is_reported_and_the_next_one_is_not(
    caches: tier.Caches, pool: HostPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = caches.block(3)
    monkeypatch.setenv("SIMACL_FAIL_AT", "4")
    pool.copies.store(StoreOrder(1, tier.moves((0, 3, 0))))
    end, ends = tier.end_of_store(pool.copies, 1)
    assert ends == StoreEnds(1, failed=True, unsettled=False)
    assert (end.blocks, end.copied_bytes) == (1, 0)
    assert "acl, device to host: aclrtMemcpyAsync refused copy 4 " in end.failure
    assert "107000 ACL_ERROR_RT_PARAM_INVALID" in end.failure
    monkeypatch.delenv("SIMACL_FAIL_AT")
    store(pool.copies, (0, 3, 0))
    load(pool.copies, (0, 7, 0))
    assert tier.are_equal(caches.block(7), before)


def test_a_load_that_failed_writes_no_more_when_it_is_reported(
    caches: tier.Caches, pool: HostPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    store(pool.copies, (0, 3, 0))
    monkeypatch.setenv("SIMACL_FAIL_AT", "4")
    monkeypatch.setenv("SIMACL_COPY_US", "5000")
    pool.copies.load(LoadOrder("request", tier.moves((0, 7, 0)), tokens=tier.TOKENS))
    end = tier.end_of_load(pool.copies, "request")
    at_once = caches.block(7)
    assert "acl, host to device: aclrtMemcpyAsync refused copy 4 " in end.failure
    assert (end.blocks, end.copied_bytes) == (1, 0)
    torch.npu.synchronize()
    assert tier.are_equal(caches.block(7), at_once), "copies were under way after the load was reported"


def test_a_block_that_is_not_there_is_a_failed_copy(pool: HostPool) -> None:
    pool.copies.load(LoadOrder("request", tier.moves((0, tier.BLOCKS, 0)), tokens=tier.TOKENS))
    assert "block 12 does not exist" in tier.end_of_load(pool.copies, "request").failure
    pool.copies.store(StoreOrder(1, tier.moves((0, 3, SLOTS))))
    end, ends = tier.end_of_store(pool.copies, 1)
    assert "host slot 6 does not exist" in end.failure
    assert ends == StoreEnds(1, failed=True)


def test_a_device_that_is_lost_leaves_slots_unsettled_and_ends_the_engine(
    pool: HostPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SIMACL_COPY_US", "2000")
    pool.copies.store(StoreOrder(1, tier.moves((0, 3, 0))))
    pool.copies.load(LoadOrder("request", tier.moves((0, 4, 1)), tokens=tier.TOKENS))
    monkeypatch.setenv("SIMACL_LOST", "1")
    end, ends = tier.end_of_store(pool.copies, 1)
    assert ends == StoreEnds(1, failed=True, unsettled=True)
    assert "507010" in end.failure
    with pytest.raises(UnsettledLoadError, match=r"blocks of request request could not be loaded: .*507010"):
        tier.end_of_load(pool.copies, "request")
    monkeypatch.delenv("SIMACL_LOST")
    torch.npu.synchronize()


def test_a_driver_without_batches_copies_one_by_one(
    caches: tier.Caches, pool: HostPool, calls: Calls, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("SIMACL_BATCH_UNSUPPORTED", "1")
    contents = caches.contents(1)
    caches.write(3, contents)
    for _ in range(2):
        store(pool.copies, (0, 3, 0))
        load(pool.copies, (0, 7, 0))
        assert tier.are_equal(caches.block(7), tier.as_bytes(contents))
    assert calls("batches") + calls("batches_v2") == 2, "asked again"
    assert calls("batch_entries") == 0
    assert caplog.text.count("(207000 ACL_ERROR_RT_FEATURE_NOT_SUPPORT)") == 2  # once for stores, once for loads


def test_a_driver_without_batches_is_told_of_before_anything_is_stored(
    caches: tier.Caches, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("SIMACL_BATCH_UNSUPPORTED", "1")
    before = [seen.copy() for seen in caches.now()]
    opened = tier.open_pool(caches, SLOTS)
    assert caplog.text.count("(207000 ACL_ERROR_RT_FEATURE_NOT_SUPPORT)") == 2  # once for stores, once for loads
    assert tier.are_equal(caches.now(), before)
    monkeypatch.delenv("SIMACL_BATCH_UNSUPPORTED")  # would be taken now, and is not tried again
    store(opened.copies, (0, 3, 0))
    assert caplog.text.count("(207000 ") == 2
    opened.join()


def test_a_device_that_takes_single_copies_only_is_found_out_at_start(
    caches: tier.Caches, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("SIMACL_REFUSE_BATCHES", "1")
    opened = tier.open_pool(caches, SLOTS)
    assert caplog.text.count("refused a batch of 1 copies (107000 ") == 2  # once for stores, once for loads
    contents = caches.contents(1)
    caches.write(3, contents)
    store(opened.copies, (0, 3, 0))
    load(opened.copies, (0, 7, 0))
    assert tier.are_equal(caches.block(7), tier.as_bytes(contents))
    opened.join()


def test_a_device_that_refuses_copies_is_refused_at_start(caches: tier.Caches, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SIMACL_FAIL_AT", "0")
    with pytest.raises(ConfigError, match=r"cpu_bytes_to_use = \d+: acl, host to device: aclrtMemcpyAsync"):
        tier.open_pool(caches, SLOTS)


# Host memory


def test_the_pool_says_what_it_is(caches: tier.Caches, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        pool = tier.open_pool(caches, SLOTS)
    block_bytes = sum(part.rows(0).numel() * 2 for part in caches.parts)
    assert f"6 host blocks of {block_bytes} bytes (0.00 GiB) on this worker, copied by the acl backend" in caplog.text
    pool.close()


def test_memory_that_is_not_pinned_is_copied_too(caches: tier.Caches, device: torch.device, calls: Calls) -> None:
    layout = host_layout(caches.geometry)
    pageable = np.zeros(SLOTS * layout.slot_bytes, np.uint8)
    region = Region(pageable.ctypes.data, pageable.nbytes)
    stores, loads = (open_copier(Backend.ACL, way, device.index) for way in (STORE, LOAD))
    copies, before = HostCopies(layout, region, stores, loads, lambda: None), caches.block(3)
    for _ in range(2):
        store(copies, (0, 3, 0))
        load(copies, (0, 7, 0))
    assert tier.are_equal(caches.block(7), before)
    assert calls("pageable_copies") == 4 * len(caches.parts)
    copies.close()


# The end


CLOSING = """
import os, time
from pd_connector.orders import StoreOrder
from tests.support.devices import npu_caches as tier; from tests.support.devices.npu_device import DeviceBytes
torch.npu.set_device(0)
caches = tier.keys_and_values(torch.device("npu:0"), DeviceBytes(acl))
pool = tier.open_pool(caches, 4)
os.environ["SIMACL_COPY_US"] = "100000"
pool.copies.store(StoreOrder(1, tier.moves((0, 3, 0), (0, 5, 1))))
while acl.simacl_count(b"batch_entries") < 12: time.sleep(0.001)
print("under way", flush=True)
"""


def test_closing_awaits_the_copies_and_then_frees_the_memory() -> None:
    done = in_a_process(CLOSING + "pool.close(); print('closed')")
    assert (done.returncode, done.stdout.split("\n")[-3:]) == (0, ["under way", "closed", ""]), done.stderr


def test_memory_that_is_freed_before_the_copies_have_ended_is_written_to() -> None:
    """The other order ends the process, so that the test above can fail."""
    done = in_a_process(CLOSING + "pool._memory.close(); pool.copies.close(); print('closed')")
    assert (done.returncode, done.stdout.split("\n")[-2:]) == (-signal.SIGSEGV, ["under way", ""]), done.stderr
