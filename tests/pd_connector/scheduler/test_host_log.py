"""The line of log about host memory: what has moved and landed since the last one, and where leases lie."""

import logging
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, cast

import pytest

from layout.geometry import WorkerGeometry
from pd_connector.orders import StoreEnds, WorkerHandshake
from pd_connector.scheduler.decode.landings import Landings
from pd_connector.scheduler.host_log import INTERVAL_S, HostLog
from pd_connector.scheduler.prefill.leases import LeaseTable
from pd_connector.scheduler.scheduler import ConnectorScheduler
from tests.support.host_tier.leasing import LeasingEngine
from tests.support.host_tier.setup import Setup, make_manager
from tests.support.waiting import ManualClock

BEGINNING = "PDConnector: host memory, since the last such line: "


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> Callable[[], list[str]]:
    """Returns the lines since it was last asked, without what they begin with."""
    monkeypatch.setattr(logging.getLogger("pd_connector"), "propagate", True)
    caplog.set_level(logging.INFO, "pd_connector")

    def take() -> list[str]:
        said = [record.getMessage() for record in caplog.records]
        caplog.clear()
        return [line.removeprefix(BEGINNING) for line in said if line.startswith(BEGINNING)]

    return take


def end_all(engine: LeasingEngine, **ends: bool) -> None:
    for store in [*engine.under_way]:
        engine.end_store(store, **ends)


def test_it_says_which_leases_have_moved_and_why_with_how_many_blocks_and_where_all_lie(
    lines: Callable[[], list[str]],
) -> None:
    engine = LeasingEngine(slots=20)
    log = HostLog(engine.leases, engine.clock)

    def write() -> None:
        log.write(engine.moves, None)
        engine.counted()

    for number, prompt in enumerate((0, 1, 2)):
        engine.prefill(f"lease{number}", prompt)
    write()
    assert lines() == [], "nothing has moved"
    engine.clock.advance(0.3)
    engine.step()
    assert engine.read("lease2")
    end_all(engine)
    engine.prefill("again", 0)
    engine.is_short = True
    engine.step()
    end_all(engine)
    write()
    assert lines() == [
        "9 blocks of 3 leases have moved there (short 1, share 2; 7 copied, 2 present), 1 moves came to nothing "
        "(full 0, read 1, ended 0, failed 0), now 1 leases lie on the device and 3 in host memory"
    ]


def test_it_is_written_once_in_a_while_and_tells_of_nothing_twice(lines: Callable[[], list[str]]) -> None:
    engine = LeasingEngine(slots=30)
    engine.is_short = True
    log = HostLog(engine.leases, engine.clock)
    told = []
    for number in range(3):
        engine.prefill(f"lease{number}", number)
        engine.step()
        engine.report({store: StoreEnds(2) for store in engine.under_way[-1:]})
        log.write(engine.moves, None)
        engine.counted()
        told.append(len(lines()))
    assert told == [1, 0, 0]
    engine.clock.advance(INTERVAL_S - 0.01)
    log.write(engine.moves, None)
    assert lines() == []
    engine.clock.advance(0.02)
    log.write(engine.moves, None)
    (line,) = lines()
    assert line.startswith("6 blocks of 2 leases have moved there (short 2, share 0;")
    engine.clock.advance(INTERVAL_S)
    log.write(engine.moves, None)
    assert lines() == [], "nothing new"


@dataclass
class Counted:
    """What a line tells of landings."""

    counts: Counter[tuple[str, str]] = field(default_factory=Counter)
    under_way: int = 0


def test_it_says_what_landings_came_to(lines: Callable[[], list[str]]) -> None:
    clock = ManualClock()
    log = HostLog(LeaseTable(8.0, clock), clock)
    landings = Counted(under_way=5)
    log.write(None, cast("Landings", landings))
    assert lines() == []
    landings.counts.update({("landings", "landed"): 7, ("landings", "failed"): 2, ("landings", "left"): 1})
    landings.counts.update({("landing_fallbacks", "full"): 3, ("landing_fallbacks", "too_large"): 1})
    log.write(None, cast("Landings", landings))
    assert lines() == [
        "7 prompts have landed there, 2 failed, 1 left, 5 are under way, 4 were pulled to the device instead "
        "(full 3, too_large 1)"
    ]
    landings.counts = Counter({("landings", "landed"): 1})
    clock.advance(INTERVAL_S)
    log.write(None, cast("Landings", landings))
    assert lines()[0].startswith("1 prompts have landed there, 0 failed")


@pytest.mark.parametrize(
    ("kv_role", "settings", "parts"),
    [
        ("kv_producer", {"host_transfers": "auto"}, ["leases have moved"]),
        ("kv_consumer", {"host_transfers": "auto"}, ["prompts have landed"]),
        ("kv_both", {"host_transfers": "always"}, ["leases have moved", "prompts have landed"]),
        ("kv_both", {}, []),
    ],
)
def test_an_engine_writes_of_what_its_role_does_in_one_line(
    side_of: Callable[..., ConnectorScheduler],
    lines: Callable[[], list[str]],
    kv_role: str,
    settings: dict[str, Any],
    parts: list[str],
) -> None:
    side = side_of(kv_role, cpu_bytes_to_use=1 << 20, **settings)
    side.bind_cache_manager(make_manager(Setup()))
    side.set_workers({(0, 0): WorkerHandshake(WorkerGeometry(0, 1, 0, 1, "10.0.0.5:15000", (), ()), 99)})
    side.update_stats()
    assert lines() == []
    for role, metric in ((side._moves, "lease_moves"), (side._landings, "landings")):
        if role is not None:
            role.counts[metric, "failed"] += 1
    side.update_stats()
    said = lines()
    assert len(said) == bool(parts)
    wanted = {"leases have moved", "prompts have landed"}
    assert [{part for part in wanted if part in line} for line in said] == ([set(parts)] if parts else [])
