"""Pulls through staging: the same bytes in fewer descriptors, whatever the size of the buffer, and no slot given away
while a read may still write to it.

Real control channel, real leases and real bytes; the transfer engine is the in-process one, told where to fail. What
is done on a device is done on CPU tensors here.
"""

import mmap
import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace

import numpy as np
import pytest
import torch

from layout.copies import Copies
from layout.geometry import Region
from layout.staging import Schedule
from pd_connector.worker.remote_reader import SLOTS, RemoteReader
from tests.support.connector.engines import OURS, PREFILL, THEIRS, Site, an_order, pull_once
from tests.support.connector.staging import TCP, TWO_RANKS, stage
from tests.support.engine.in_process import Fault, InProcessLink
from tests.support.layout.oracle import Model
from tests.support.waiting import holds_for, until
from transfer.copies.reshape.reshape import run_copies
from transfer.engine.interface import GivenUp, Link, never
from transfer.memory import HostMemory, SlotPool

#: Big enough for several windows of two pages.
WIDE = Model(kv_heads=4, contents=(60, 100), item_size=4, groups=((0, 1, 2),), windows=(0,))


@pytest.mark.parametrize("on_device", [False, True])
def test_a_staged_pull_brings_the_same_bytes_in_fewer_descriptors(site: Site, on_device: bool) -> None:
    prefill = site.prefill(TWO_RANKS)
    plain, staged = site.decode()[0], site.decode()[0]
    stage(staged, 1 << 20, on_device=on_device)
    ends = [pull_once(site, prefill.prefill(f"r{n}", THEIRS), worker) for n, worker in enumerate((plain, staged))]
    assert [end.cause for end in ends] == ["", ""]
    assert plain.holds([(OURS, 0, 69)], TWO_RANKS)
    assert staged.holds([(OURS, 0, 69)], TWO_RANKS)
    assert ends[1].copied_bytes == ends[0].copied_bytes
    assert ends[1].descriptors < ends[0].descriptors / 2


@pytest.mark.parametrize("pages", [1, 2, 3, 64])
def test_a_pull_that_does_not_fit_the_buffer_comes_in_windows(site: Site, pages: int) -> None:
    prefill, (worker,) = site.prefill(TWO_RANKS, model=WIDE), site.decode(model=WIDE)
    stage(worker, pages * mmap.PAGESIZE)
    assert pull_once(site, prefill.prefill("r", THEIRS), worker).cause == ""
    assert worker.holds([(OURS, 0, 69)], TWO_RANKS)


@pytest.mark.parametrize("device_bytes", [4096, 100 << 20])
def test_memory_on_a_device_is_two_mebibytes_aligned_at_both_ends(device_bytes: int) -> None:
    cache = torch.zeros(64)
    pool = RemoteReader.with_device_staging(TCP, (Region(cache.data_ptr(), 256),), device_bytes, [cache]).staging
    assert pool is not None
    assert pool.region.address % (2 << 20) == pool.region.size % (2 << 20) == 0
    assert device_bytes <= pool.region.size < device_bytes + (2 << 20)


def test_a_device_without_room_for_the_buffer_says_what_to_change() -> None:
    cache = torch.zeros(64)
    with pytest.raises(MemoryError, match=r"cpu has no \d+ bytes left .* tuning.staging_bytes \(0 reads everything"):
        RemoteReader.with_device_staging(TCP, (Region(cache.data_ptr(), 256),), 1 << 60, [cache])


def test_whatever_is_read_is_on_the_device_before_it_is_copied_or_counts(site: Site) -> None:
    steps: list[str] = []

    def copy(copies: Copies) -> None:
        steps.append("copied")
        run_copies(copies)

    prefill, (worker,) = site.prefill(TWO_RANKS), site.decode()
    regions = worker.rank.geometry.regions
    worker.reads = RemoteReader(TCP, regions, stage(worker, 1 << 20), copy, land=lambda: steps.append("landed"))
    assert pull_once(site, prefill.prefill("staged", THEIRS), worker).cause == ""
    assert steps[0] == "landed"
    assert steps.count("landed") >= steps.count("copied") > 0
    steps.clear()
    worker.reads = RemoteReader(TCP, regions, land=lambda: steps.append("landed"))
    assert pull_once(site, prefill.prefill("direct", THEIRS), worker).cause == ""
    assert steps == ["landed"] * 2, "of each rank"


def test_a_copy_that_fails_fails_the_pull(site: Site) -> None:
    def broken(copies: Copies) -> None:
        raise RuntimeError(f"the device lost {len(copies)} copies")

    prefill, (worker,) = site.prefill(TWO_RANKS), site.decode()
    pool = stage(worker, 1 << 20)
    worker.reads = RemoteReader(TCP, worker.rank.geometry.regions, pool, broken)
    end = pull_once(site, prefill.prefill("r", THEIRS), worker)
    assert end.cause == "internal"
    assert "the device lost" in end.reason
    with ExitStack() as stack:
        assert None not in [stack.enter_context(pool.borrow()) for _ in range(SLOTS)]


def test_copies_that_follow_the_last_read_are_a_phase_of_their_own(site: Site) -> None:
    def slow(copies: Copies) -> None:
        run_copies(copies)
        time.sleep(0.1)

    prefill, (worker,) = site.prefill(TWO_RANKS), site.decode()
    direct = pull_once(site, prefill.prefill("direct", THEIRS), worker)
    pool = stage(worker, 1 << 20)
    worker.reads = RemoteReader(TCP, worker.rank.geometry.regions, pool, slow)
    staged = pull_once(site, prefill.prefill("staged", THEIRS), worker)
    assert (direct.cause, staged.cause) == ("", "")
    assert "reshape" not in direct.seconds
    assert staged.seconds["reshape"] >= 0.05, "less by what is copied before the reader looks at the clock"
    assert staged.seconds["total"] >= staged.seconds["read"] + staged.seconds["reshape"]


def test_a_pull_that_finds_no_free_slot_reads_straight_to_its_place(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It waits no longer for a slot than what that would save: here some milliseconds at most."""
    prefill, (worker,) = site.prefill(TWO_RANKS), site.decode()
    pool = stage(worker, 1 << 20)
    waits: list[float] = []
    borrow = SlotPool.borrow

    def recorded(pool: SlotPool, patience_s: float = 0.0) -> AbstractContextManager[int | None]:
        waits.append(patience_s)
        return borrow(pool, patience_s)

    with ExitStack() as slots:
        for _ in range(SLOTS):
            slots.enter_context(pool.borrow())
        monkeypatch.setattr(SlotPool, "borrow", recorded)
        end = pull_once(site, prefill.prefill("r", THEIRS), worker)
    assert end.cause == ""
    assert worker.holds([(OURS, 0, 69)], TWO_RANKS)
    assert len(waits) == 2 * 2, "each rank asks at once, and then waits"
    assert 0.0 < max(waits) < 0.1


def test_a_pull_waits_for_a_slot_as_long_as_staging_would_save(site: Site) -> None:
    prefill, (worker,) = site.prefill(TWO_RANKS), site.decode()
    pool = stage(worker, 1 << 20)
    dear = replace(TCP, alpha=10.0)  # to read directly would take minutes
    worker.reads = RemoteReader(dear, worker.rank.geometry.regions, pool)
    with ExitStack() as slots:
        for _ in range(SLOTS):
            slots.enter_context(pool.borrow())
        remote = prefill.prefill("r", THEIRS)
        site.session(worker, remote).submit(an_order("r", remote, OURS))
        holds_for(lambda: site.fabric.reads == 0, 0.1)
    end = worker.next_end()
    assert end.cause == ""
    plain = pull_once(site, prefill.prefill("r2", THEIRS), site.decode()[0])
    assert end.descriptors < plain.descriptors / 2
    assert worker.holds([(OURS, 0, 69)], TWO_RANKS)
    pool.check_integrity()


def test_a_failed_read_into_staging_fails_the_pull_and_changes_no_block(site: Site) -> None:
    prefill, (worker,) = site.prefill(TWO_RANKS), site.decode()
    stage(worker, 1 << 20)
    for read in (1, 2):  # from both ranks, at once
        site.fabric.inject(read, Fault(settled=False, landed=1))
    assert pull_once(site, prefill.prefill("r", THEIRS), worker).cause == "read"
    assert worker.untouched
    assert site.fabric.deliver_late_bytes() == 0, "the link was not closed"


def test_a_slot_is_lent_to_nobody_while_a_read_into_it_is_under_way(site: Site) -> None:
    prefill, (worker,) = site.prefill(TWO_RANKS), site.decode()
    pool = stage(worker, 1 << 20)
    finish = threading.Event()
    for read in (1, 2):  # from both ranks, at once
        site.fabric.inject(read, Fault(until=finish, fails=False))
    remote = prefill.prefill("r", THEIRS)
    site.session(worker, remote).submit(an_order("r", remote, OURS))
    until(lambda: site.fabric.reads == 2)
    others = [pool.borrow() for _ in range(SLOTS)]
    addresses = [other.__enter__() for other in others]
    finish.set()
    assert worker.next_end().cause == ""
    for other in others:
        other.__exit__(None, None, None)
    assert addresses.count(None) == 2
    assert worker.holds([(OURS, 0, 69)], TWO_RANKS)


def test_more_prefill_ranks_than_slots_take_turns(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that finds no slot would need a descriptor for every run."""
    ranks = replace(PREFILL, layout="LBHNC", tp=4, pp=3)
    prefill, (worker,) = site.prefill(ranks), site.decode()
    stage(worker, 1 << 20)
    lent: list[int | None] = []
    borrow = SlotPool.borrow

    @contextmanager
    def recorded(pool: SlotPool) -> Iterator[int | None]:
        with borrow(pool) as address:
            lent.append(address)
            yield address

    monkeypatch.setattr(SlotPool, "borrow", recorded)
    assert pull_once(site, prefill.prefill("r", THEIRS), worker).cause == ""
    assert (len(lent), lent.count(None)) == (12, 0)
    assert worker.holds([(OURS, 0, 69)], ranks)


def test_a_slot_that_a_pull_does_not_need_is_lent_to_others_while_it_reads(site: Site) -> None:
    prefill, (worker,) = site.prefill(TWO_RANKS), site.decode()
    pool = stage(worker, 1 << 20)
    free_descriptors = replace(TCP, alpha=0.0)
    worker.reads = RemoteReader(free_descriptors, worker.rank.geometry.regions, pool)
    finish = threading.Event()
    for read in (1, 2):
        site.fabric.inject(read, Fault(until=finish, fails=False))
    remote = prefill.prefill("r", THEIRS)
    site.session(worker, remote).submit(an_order("r", remote, OURS))
    until(lambda: site.fabric.reads == 2)
    with ExitStack() as stack:
        assert None not in [stack.enter_context(pool.borrow()) for _ in range(SLOTS)]
    finish.set()
    assert worker.next_end().cause == ""


@pytest.mark.parametrize("pages", [64, 256])
def test_each_read_says_what_the_pull_reads_later_from_the_same_rank(
    site: Site, monkeypatch: pytest.MonkeyPatch, pages: int
) -> None:
    """By what is left, the transfer engine decides whose turn it is."""
    prefill, (worker,) = site.prefill(TWO_RANKS, model=WIDE), site.decode(model=WIDE)
    stage(worker, pages * mmap.PAGESIZE)
    said: dict[InProcessLink, list[tuple[int, int]]] = {}
    read = InProcessLink.read

    def recorded(link: InProcessLink, copies: Copies, timeout_s: float, later_bytes: int, given_up: GivenUp) -> None:
        said.setdefault(link, []).append((copies.total_bytes, later_bytes))
        read(link, copies, timeout_s, later_bytes, given_up)

    monkeypatch.setattr(InProcessLink, "read", recorded)
    assert pull_once(site, prefill.prefill("r", THEIRS), worker).cause == ""
    assert len(said) == 2
    for reads in said.values():
        assert len(reads) > 1
        sizes = [size for size, _ in reads]
        assert [later for _, later in reads] == [sum(sizes[number + 1 :]) for number in range(len(sizes))]


class NoLink(Link):
    """Fails the test that reads through it."""

    def read(self, copies: Copies, timeout_s: float, later_bytes: int = 0, given_up: GivenUp = never) -> None:
        pytest.fail(f"{len(copies)} descriptors were read within {timeout_s} s")

    def prove(self, timeout_s: float) -> None:
        pytest.fail(f"nothing was read that could be proven within {timeout_s} s")

    def close(self) -> None:
        """Nothing is open."""

    @property
    def settled(self) -> bool:
        return True


def test_a_copy_to_memory_that_is_not_a_cache_is_refused_before_anything_is_read() -> None:
    memory = HostMemory(SLOTS * mmap.PAGESIZE)
    pool = SlotPool(memory.region, SLOTS, memory)
    planner = RemoteReader(TCP, (Region(1 << 40, 4096),), pool)
    reads = _one(pool.region.address, 1 << 41, 64)
    moved = _one((1 << 40) + 4090, pool.region.address, 64)
    borders = np.array([[0, 0], [1, 1]])
    with pytest.raises(ValueError, match="destination is outside the memory registered here"):
        planner.carry_out(NoLink(), Schedule(_one(1 << 40, 1 << 41, 8), reads, moved, borders, 72, 0.0, 0.0), 1.0)


def _one(destination: int, source: int, size: int) -> Copies:
    return Copies(*(np.array([value], np.int64) for value in (destination, source, size)))


@pytest.mark.parametrize("on_device", [False, True])
@pytest.mark.parametrize("tokens", [1, 15, 16, 17, 33, 70])
def test_prompts_of_every_length_are_staged_exactly(site: Site, tokens: int, on_device: bool) -> None:
    prefill, (worker,) = site.prefill(TWO_RANKS), site.decode()
    stage(worker, 2 * mmap.PAGESIZE, on_device=on_device)
    remote = prefill.prefill("r", (THEIRS[0][: -(-tokens // 16)],), tokens)
    site.session(worker, remote).submit(an_order("r", remote, OURS, 0, tokens))
    assert worker.next_end().cause == ""
    assert worker.holds([(OURS, 0, tokens)], TWO_RANKS)
