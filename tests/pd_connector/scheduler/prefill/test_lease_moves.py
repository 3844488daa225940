"""Leases that move to host memory: with every byte that is copied, whatever readers, failures and the clock do."""

import logging

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pd_connector.orders import ChecksumOrder, ChecksumReport, StoreEnds
from pd_connector.scheduler.prefill import lease_moves
from tests.support.host_tier.leasing import BLOCKS, CONTENTS, SETUP, TOKENS, TTL_S, LeasingEngine
from transfer.control.messages import InvalidReason, Place, Release


def moved(most_leased: float = 0.0, prompts: int = 1) -> LeasingEngine:
    """An engine whose leases have been copied to host memory; their ends are still to be reported."""
    engine = LeasingEngine(most_leased)
    for number in range(prompts):
        assert engine.prefill(f"lease{number}", number)
    engine.is_short = True
    engine.step()
    return engine


def test_a_lease_that_nobody_reads_frees_the_device_and_is_found_in_host_memory() -> None:
    engine = moved()
    assert engine.blocks.leased == BLOCKS, "the device's blocks must not change while they are copied"
    (store,) = engine.under_way
    engine.end_store(store)
    assert engine.blocks.leased == 0
    assert engine.read("lease0") == [(0, number) for number in range(BLOCKS)]
    assert (engine.leases.in_host_memory, engine.counted()["lease_moves:short"]) == (1, 1)
    assert engine.lent == BLOCKS
    engine.release("lease0")
    engine.collect()
    assert engine.pool.references() == {}
    assert engine.lent == 0
    assert engine.pool.cached == 2, "its full blocks can be found by others"


def test_what_a_window_has_passed_is_a_hole_in_host_memory_too() -> None:
    engine = LeasingEngine(slots=5, groups=((4, 0), (4, 6)))
    assert engine.prefill("lease", 3)
    assert [table.count(0) for table in engine.tables["lease"]] == [0, 1]
    engine.is_short = True
    engine.step()
    (store,) = engine.under_way
    engine.end_store(store)
    assert engine.blocks.leased == 0
    slots = engine.leases.locate("lease").slots
    assert [[slot < 0 for slot in table] for table in slots] == [[False] * BLOCKS, [True, False, False]]
    engine.release("lease")
    engine.collect()
    assert engine.pool.references() == {}
    assert engine.pool.cached == 3, "the full blocks of both cache groups can be found by others"


@pytest.mark.parametrize("failing", [0, 1, None])
def test_a_lease_moves_when_the_last_rank_has_copied_it_and_stays_if_any_fails(failing: int | None) -> None:
    engine = moved()
    (store_id,) = engine.under_way
    for rank in range(SETUP.ranks):
        assert engine.blocks.leased == BLOCKS, "a rank still copies from the device"
        engine.end_on_a_rank(store_id, StoreEnds(1, failed=rank == failing))
    assert engine.blocks.leased == (0 if failing is None else BLOCKS)
    assert engine.leases.in_host_memory == (failing is None)


def test_a_copy_that_ends_twice_is_ignored(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logging.getLogger("pd_connector"), "propagate", True)
    engine = moved()
    (store_id,) = engine.under_way
    engine.end_store(store_id)
    assert "ended twice" not in caplog.text, "each role leaves the other's stores alone"
    for ended in (store_id, 7):  # of a lease, and of none
        engine.end_on_a_rank(ended, StoreEnds(1))
        assert caplog.text.count(f"store {ended} ended twice") == 1
    assert engine.leases.in_host_memory == 1


def test_a_second_lease_of_the_same_prompt_is_copied_only_as_far_as_host_memory_lacks_it() -> None:
    engine = moved()
    engine.end_store(engine.under_way[0])
    engine.prefill("again", 0)
    engine.step()
    engine.end_store(engine.under_way[0])
    counts = engine.counted()
    assert (counts["lease_blocks_moved:copied"], counts["lease_blocks_moved:present"]) == (BLOCKS + 1, 2)
    for name in ("lease0", "again"):
        engine.release(name)


def test_once_a_reader_was_told_where_a_lease_lies_it_stays_there() -> None:
    engine = moved()
    assert engine.read("lease0") is not None
    engine.end_store(engine.under_way[0])
    assert (engine.blocks.leased, engine.counted()["lease_moves:read"]) == (BLOCKS, 1)
    assert engine.leases.locate("lease0").place == Place.DEVICE
    engine.step()
    assert engine.under_way == []
    assert engine.pool.references() == {}


def test_what_was_read_where_a_lease_lies_no_longer_is_not_valid() -> None:
    engine = moved()
    engine.end_store(engine.under_way[0])
    release = Release("", "lease0", 0, 1, "pull", CONTENTS, Place.DEVICE)
    assert engine.leases.release(release).reason == "moved"
    engine.collect()
    assert engine.leases.release(release).reason == "moved"


@pytest.mark.parametrize("unsettled", [False, True])
def test_a_copy_that_fails_leaves_the_lease_on_the_device(*, unsettled: bool) -> None:
    engine = moved()
    engine.end_store(engine.under_way[0], failed=True, unsettled=unsettled)
    assert engine.read("lease0") == [(0, number) for number in range(BLOCKS)]
    assert engine.leases.locate("lease0").place == Place.DEVICE
    assert len(engine.pool.references()) == (BLOCKS if unsettled else 0), "slots that may still be written to are lost"


def test_a_lease_whose_copy_has_failed_is_copied_again_after_a_while() -> None:
    engine = moved()
    engine.end_store(engine.under_way[0], failed=True)
    engine.step()
    assert engine.under_way == [], "it would be tried again and again"
    engine.clock.advance(1.0)
    engine.step()
    engine.end_store(engine.under_way[0])
    assert engine.leases.in_host_memory == 1


def test_a_lease_that_ends_while_it_is_copied_gives_everything_back() -> None:
    engine = moved()
    engine.leases.cancel(["lease0"])
    engine.step()
    engine.end_store(engine.under_way[0])
    assert engine.counted()["lease_moves:ended"] == 1
    assert (engine.blocks.leased, engine.pool.references(), engine.pool.cached) == (0, {}, 0)


def test_host_memory_that_is_full_of_leases_takes_no_more_until_one_has_ended() -> None:
    engine = moved(prompts=3)
    for store in [*engine.under_way]:
        engine.end_store(store)
    assert (engine.leases.in_host_memory, engine.blocks.leased) == (2, BLOCKS)
    assert engine.counted()["lease_moves:full"] == 1
    assert not engine.moves.is_due(), "it would be tried again and again"
    engine.release("lease0")
    engine.clock.advance(1.0)
    engine.step()
    engine.end_store(engine.under_way[0])
    assert (engine.leases.in_host_memory, engine.blocks.leased) == (2, 0)


def test_of_leases_that_have_no_room_a_step_tries_the_first_only() -> None:
    engine = moved(prompts=5)
    assert (engine.ordered, engine.counted()["lease_moves:full"]) == ([2 * BLOCKS], 1)


def test_a_lease_stays_until_every_rank_has_taken_its_checksums() -> None:
    engine = LeasingEngine()
    engine.checksums.enabled = True
    engine.checksums.set_workers(SETUP.ranks)
    assert engine.prefill("lease", 0)
    engine.checksums.order(ChecksumOrder("lease", engine.tables["lease"], TOKENS - 1))
    assert len(engine.checksums.take_orders()) == 1
    engine.is_short = True
    for rank in range(SETUP.ranks):
        engine.step()
        assert engine.under_way == [], f"rank {rank} still reads the device"
        engine.checksums.add(ChecksumReport("lease", rank, ()))
    engine.step()
    assert len(engine.under_way) == 1


def test_leases_that_move_already_count_as_gone_from_the_device() -> None:
    engine = LeasingEngine(most_leased=0.3)
    for number in range(2):
        assert engine.prefill(f"lease{number}", number)
    assert 0 < engine.blocks.leased - 0.3 * engine.blocks.total < BLOCKS, "one of them is too much"
    engine.clock.advance(1.0)
    engine.step()
    engine.step()
    assert engine.ordered == [BLOCKS]
    assert not engine.moves.is_due()


def test_a_step_begins_moves_of_so_many_blocks_and_the_next_ones_of_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lease_moves, "_BLOCKS_AT_ONCE", BLOCKS + 1)
    engine = LeasingEngine(slots=5 * BLOCKS)
    for number in range(5):
        assert engine.prefill(f"lease{number}", number)
    engine.clock.advance(0.3)
    while engine.moves.is_due():
        engine.step()
    assert engine.ordered == [2 * BLOCKS, 2 * BLOCKS, BLOCKS], "leases are whole"
    assert engine.moves.frees_blocks_soon, "leases hold the device's blocks which are about to be free"
    engine.report({store: StoreEnds(SETUP.ranks) for store in engine.under_way})
    assert (engine.leases.in_host_memory, engine.blocks.leased) == (5, 0)
    assert not engine.moves.frees_blocks_soon
    for number in range(5):
        assert engine.read(f"lease{number}") == engine.right(f"lease{number}")


def test_leases_of_which_host_memory_has_all_blocks_move_at_once() -> None:
    engine = LeasingEngine(slots=5 * BLOCKS)
    engine.is_short = True
    engine.prefill("stored", 0, tokens=8)  # full blocks only
    engine.step()
    engine.end_store(engine.under_way[0])
    for name in ("a", "b", "c"):
        engine.prefill(name, 0, tokens=8)
    engine.step()
    assert engine.ordered == [2], "what host memory has is copied again"
    assert (engine.leases.in_host_memory, engine.blocks.leased) == (4, 0)


def test_what_has_moved_is_not_found_after_the_caches_were_reset() -> None:
    engine = moved()
    engine.end_store(engine.under_way[0])
    assert engine.pool.cached == BLOCKS - 1, "the last one is not full"
    engine.reset()
    engine.collect()
    assert (engine.blocks.leased, engine.pool.references(), engine.pool.cached) == (0, {}, 0)


def test_a_lease_too_large_for_host_memory_holds_up_no_smaller_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lease_moves, "_CHOSEN_AT_ONCE", 1)
    engine = LeasingEngine(slots=6)
    engine.prefill("large", 0, tokens=7 * 4)
    engine.prefill("small", 1)
    engine.prefill("smaller", 2, tokens=7)
    engine.is_short = True
    engine.step()
    engine.step()  # the first one has looked at one lease only
    for store in [*engine.under_way]:
        engine.end_store(store)
    places = {name: engine.leases.locate(name).place for name in ("large", "small", "smaller")}
    assert places == {"large": Place.DEVICE, "small": Place.HOST, "smaller": Place.HOST}
    assert engine.counted()["lease_moves:full"] == 1


def test_while_a_lease_has_no_room_smaller_ones_are_tried_that_come_later_and_larger_ones_are_not() -> None:
    engine = LeasingEngine(slots=4)
    engine.prefill("large", 0, tokens=5 * 4)
    engine.is_short = True
    engine.step()
    assert not engine.moves.is_due()
    engine.prefill("larger", 1, tokens=6 * 4)
    assert not engine.moves.is_due()
    engine.prefill("small", 2)
    assert engine.moves.is_due()
    engine.step()
    engine.end_store(engine.under_way[0])
    assert engine.leases.locate("small").place == Place.HOST
    engine.leases.cancel(["large"])
    engine.clock.advance(1.0)
    assert engine.moves.is_due(), "all are tried again after a while"


@pytest.mark.parametrize(
    ("slots", "why"),
    [(4, "which has 4 blocks in all"), (8, "because leases and loads use its blocks")],
    ids=["never", "not now"],
)
def test_the_log_says_whether_a_lease_will_ever_have_room(
    slots: int, why: str, caplog: pytest.LogCaptureFixture
) -> None:
    engine = LeasingEngine(slots=slots)
    engine.is_short = True
    if slots == 8:
        engine.prefill("first", 1, tokens=4 * 4)
        engine.step()
    engine.prefill("lease", 0, tokens=5 * 4)
    engine.step()
    assert f"a lease of 5 blocks stays on the device: host memory has no room for it, {why}" in caplog.text
    assert "cpu_bytes_to_use" in caplog.text


def test_without_need_only_what_exceeds_the_share_moves_and_not_at_once() -> None:
    engine = LeasingEngine(most_leased=0.25)  # of 15 blocks
    for number in range(2):
        engine.prefill(f"lease{number}", number)
    engine.step()
    assert engine.under_way == []
    engine.clock.advance(0.3)
    engine.step()
    engine.end_store(engine.under_way[0])
    assert [engine.leases.locate(f"lease{number}").place for number in range(2)] == [Place.HOST, Place.DEVICE]
    assert engine.counted()["lease_moves:share"] == 1


#: Cache groups: block tokens, and window or 0. The window has passed the first block of a prompt.
GROUPS = {
    "full attention": ((4, 0),),
    "full attention and a window": ((4, 0), (4, 6)),
    "blocks of two sizes": ((8, 0), (4, 6)),
}
ACTIONS = (
    "prefill", "step", "busy step", "short", "end", "fail", "read", "read unasked", "release", "release again",
    "release late", "cancel", "wait", "reset",
)  # fmt: skip


class Course:
    """What happens to an engine, one action at a time."""

    def __init__(self, groups: tuple[tuple[int, int], ...]) -> None:
        self.engine = LeasingEngine(slots=SETUP.slots * len(groups), groups=groups)
        self.released: dict[str, str] = {}  # leases that were released as valid, and where they were read
        self.unasked: dict[str, list[tuple[int, int]]] = {}  # what one has read on the device who has not asked

    def act(self, number: int, action: str, choice: int) -> None:
        engine = self.engine
        if action == "prefill":
            engine.prefill(f"r{number}", choice % 4)
        elif action in ("step", "busy step"):
            engine.step(tokens=int(action == "busy step"))
        elif action == "short":
            engine.is_short = bool(choice % 2)
        elif action == "wait":
            engine.clock.advance((0.3, 1.0, 3.0, TTL_S)[choice % 4])
        elif action == "reset":  # as of weights that have changed
            engine.reset()
        elif action in ("end", "fail"):
            if engine.under_way:
                engine.end_store(engine.under_way[choice % len(engine.under_way)], failed=action == "fail")
        elif engine.prompts:
            self.act_on(sorted(engine.prompts)[choice % len(engine.prompts)], action)

    def act_on(self, name: str, action: str) -> None:
        engine = self.engine
        right = engine.right(name)
        if action == "cancel":
            engine.leases.cancel([name])
        elif action == "release":
            if place := engine.leases.locate(name).place:
                self.released[name] = place
            engine.release(name)
        elif action == "release again":
            if name in self.released:
                answer = engine.leases.release(Release("", name, 0, 1, "pull", CONTENTS, self.released[name]))
                assert answer.valid or answer.reason == InvalidReason.UNKNOWN, "a repetition is answered otherwise"
        elif action == "read unasked":
            self.read_unasked(name)
        elif action == "release late":
            late = self.read_unasked(name)
            if engine.leases.release(Release("", name, 0, 1, "late pull", CONTENTS, Place.DEVICE)).valid:
                assert late == right, "a valid read, and wrong"
        elif (found := engine.read(name)) is not None:
            assert found == right

    def read_unasked(self, name: str) -> list[tuple[int, int]]:
        """What lies where the lease began when it is first read so. Others have written to every block that is free."""
        engine = self.engine
        for block in engine.manager.block_pool.blocks:
            if block.ref_cnt == 0:
                engine.device[block.block_id] = (-1, -1)
        return self.unasked.setdefault(name, engine.on_device(name))


@pytest.mark.parametrize("groups", GROUPS.values(), ids=GROUPS)
@settings(max_examples=100, deadline=None, derandomize=True, database=None, suppress_health_check=[*HealthCheck])
@given(st.lists(st.tuples(st.sampled_from(ACTIONS), st.integers(0, 11)), max_size=80))
def test_no_valid_read_is_wrong_and_no_block_is_lost_whatever_happens(
    groups: tuple[tuple[int, int], ...], actions: list[tuple[str, int]]
) -> None:
    course = Course(groups)
    engine = course.engine
    for number, (action, choice) in enumerate(actions):
        course.act(number, action, choice)
        engine.check()
    engine.leases.cancel_all()
    for store in [*engine.under_way]:
        engine.end_store(store)
    engine.is_short = False
    for _ in range(100):
        engine.step()
        if not engine.moves.wants_step:
            break
    engine.check()
    assert (engine.blocks.leased, engine.pool.references()) == (0, {})
