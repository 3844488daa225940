"""The simulator of fleets: what it counts adds up, agrees with closed formulas, and is the same for equal seeds."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
import simpy

from benchmarks import record
from benchmarks.fleet import calibrate, control, plots, validate
from benchmarks.fleet.constants import (
    Cache,
    Constants,
    EngineCosts,
    PullCosts,
    linked,
    measured,
    slowed,
    with_blocks,
)
from benchmarks.fleet.links import Link, Links
from benchmarks.fleet.memory import HostMemory, Memory
from benchmarks.fleet.node import Legs, Settings
from benchmarks.fleet.prefill import Prefill
from benchmarks.fleet.real import CACHE as CACHE_HERE
from benchmarks.fleet.simulation import Fleet, Outcome, simulate
from benchmarks.fleet.traces import Arrival, Mix, faster, synthetic
from benchmarks.pair import CHUNK

CACHE = Cache(layers=32, kv_heads=8, head_size=64, item_bytes=4, block_tokens=32, blocks=512)
TOKEN_S, STEP_S = 1e-3, 10e-3
ENGINE = EngineCosts(
    prefill_step_s=0.0, prefill_token_s=TOKEN_S, prefill_pair_s=0.0, decode_step_s=STEP_S, decode_request_s=0.0,
    decode_context_s=0.0, request_s=0.0,
)  # fmt: skip
CONSTANTS = Constants(CACHE, ENGINE, PullCosts(0.0, 0.0, 1e-9), chunk_tokens=512)
SLOW_LINK = 0.512  # gigabits a second: a chunk of 512 tokens takes twice as long to read as to compute
LEGS: tuple[Legs, ...] = ("in turn", "together")


def equal(count: int, every_s: float, tokens: int, answer: int) -> list[Arrival]:
    """Requests at even distances, of which no two have a beginning in common."""
    blocks = -(-tokens // 512)
    return [
        Arrival(number * every_s, tokens, answer, tuple(range(number * blocks, (number + 1) * blocks)))
        for number in range(count)
    ]


class TestEverything:
    """What holds of every run, whatever is asked."""

    @pytest.mark.parametrize("legs", LEGS)
    @pytest.mark.parametrize("seed", range(3))
    @pytest.mark.parametrize(("blocks", "host_blocks"), [(512, 0), (200, 0), (200, 1000)])
    def test_every_request_ends_and_all_bytes_are_those_of_its_blocks(
        self, legs: Legs, seed: int, blocks: int, host_blocks: int
    ) -> None:
        constants = with_blocks(CONSTANTS, blocks)
        arrivals = synthetic(Mix(60, 3.0, 900, 20, longest=4000), seed)
        fleet = Fleet(constants, Settings(legs=legs, host_blocks=host_blocks, host_byte_s=1e-9), 2, 2)
        ran = fleet.run(arrivals)
        assert len(ran.outcomes) == len(arrivals)
        assert [each.failed for each in ran.outcomes if each.failed] == []
        for each in ran.outcomes:
            assert 0 < each.prefilled_s <= each.total_s
            assert each.prefilled_s <= each.first_token_s <= each.total_s
            assert each.pulled_tokens % 512 == (each.input_tokens - 1) % 512  # all but what the prefix cache has
            blocks_read = math.ceil(each.pulled_tokens / CACHE.block_tokens)
            assert each.bytes == blocks_read * CACHE.block_bytes
            assert 0 < each.reads <= blocks_read
        for decode in fleet.decodes:
            assert decode.is_idle
            assert decode.memory.free == blocks
            assert decode.host.free == host_blocks
        for prefill in fleet.prefills:
            prefill.leases.cancel_all()
            events = prefill.leases.take_counts()
            assert events["granted"] == events["released"] > 0
            assert prefill.leases.active == 0

    def test_the_prefix_cache_saves_what_prompts_share(self) -> None:
        first = Arrival(0.0, 2000, 4, (1, 2, 3, 4))
        second = Arrival(60.0, 2000, 4, (1, 2, 3, 5))
        one, other = simulate([first, second], CONSTANTS, Settings(legs="in turn")).outcomes
        assert one.pulled_tokens == 1999
        assert other.pulled_tokens == 1999 - 3 * 512
        assert other.prefilled_s == pytest.approx(one.prefilled_s - 3 * 512 * TOKEN_S)
        without = simulate([first, second], CONSTANTS, Settings(legs="in turn", prefix_cache=False)).outcomes[1]
        assert without.pulled_tokens == 1999

    def test_equal_seeds_give_equal_runs_and_others_do_not(self) -> None:
        runs = [simulate(synthetic(Mix(40, 2.0, 900, 20), seed), CONSTANTS, Settings(), 2, 2) for seed in (1, 1, 2)]
        assert runs[0] == runs[1]
        assert runs[0] != runs[2]

    def test_what_no_engine_can_hold_fails_by_name_and_keeps_nobody_waiting(self) -> None:
        arrivals = [replace(equal(1, 1.0, 512 * 40, 4)[0]), *equal(3, 1.0, 500, 4)]
        outcomes = simulate(arrivals, CONSTANTS, Settings()).outcomes
        assert outcomes[0].failed == "20484 tokens: an engine has 512 blocks of 32 tokens"
        assert [each.failed for each in outcomes[1:]] == ["", "", ""]


class TestFormulas:
    """Cases simple enough for a formula."""

    @pytest.mark.parametrize("legs", LEGS)
    def test_below_capacity_no_request_waits(self, legs: Legs) -> None:
        """D/D/1: each is served in the same time, because the next comes when it has left."""
        tokens, answer = 400, 8
        for each in simulate(equal(20, 0.6, tokens, answer), CONSTANTS, Settings(legs=legs)).outcomes:
            pull_s = 13 * CACHE.block_bytes * 1e-9
            assert each.prefilled_s == pytest.approx(tokens * TOKEN_S)
            assert each.first_token_s == pytest.approx(tokens * TOKEN_S + pull_s + STEP_S)
            assert each.total_s == pytest.approx(tokens * TOKEN_S + pull_s + answer * STEP_S)

    def test_above_capacity_the_nth_request_waits_for_those_before_it(self) -> None:
        """D/D/1 with service S and arrivals every T < S: the n-th waits (n - 1) * (S - T)."""
        service, every = 512 * TOKEN_S, 0.3
        outcomes = simulate(equal(30, every, 512, 1), CONSTANTS, Settings(legs="in turn")).outcomes
        for number, each in enumerate(outcomes):
            assert each.prefilled_s == pytest.approx(service + number * (service - every))

    def test_two_prefills_serve_twice_as_much(self) -> None:
        arrivals = equal(20, 0.0, 512, 1)
        for prefills in (1, 2, 4):
            ran = simulate(arrivals, CONSTANTS, Settings(legs="in turn"), prefills)
            last = max(each.prefilled_s for each in ran.outcomes)
            assert last == pytest.approx(512 * TOKEN_S * math.ceil(20 / prefills))

    def test_together_only_the_last_chunk_is_left_to_read(self) -> None:
        constants = linked(CONSTANTS, SLOW_LINK)
        tokens = 2048
        found = {legs: simulate(equal(1, 1.0, tokens, 1), constants, Settings(legs=legs)).outcomes[0] for legs in LEGS}
        byte_s = constants.pull.byte_s
        chunk_s = 512 * CACHE.token_bytes * byte_s
        assert chunk_s > 512 * TOKEN_S, "reading is what takes long"
        in_turn, together = (found[legs].first_token_s for legs in LEGS)
        assert in_turn == pytest.approx(tokens * TOKEN_S + 4 * chunk_s + STEP_S)
        assert together == pytest.approx(512 * TOKEN_S + 4 * chunk_s + STEP_S)

    def test_two_pulls_share_a_link(self) -> None:
        constants = linked(CONSTANTS, SLOW_LINK)
        both = simulate(equal(2, 0.0, 512, 1), constants, Settings(legs="in turn"), 2, 2).outcomes
        one = simulate(equal(1, 0.0, 512, 1), constants, Settings(legs="in turn")).outcomes[0]
        assert [each.first_token_s for each in both] == [pytest.approx(one.first_token_s)] * 2
        at_one = simulate(equal(2, 0.0, 512, 1), constants, Settings(legs="in turn"), 2, 1).outcomes
        read_s = 512 * CACHE.token_bytes * constants.pull.byte_s
        assert max(each.first_token_s for each in at_one) == pytest.approx(one.first_token_s + read_s)

    def test_a_machine_of_half_the_speed_takes_twice_as_long(self) -> None:
        constants = linked(CONSTANTS, SLOW_LINK)
        alone, half_alone = (
            simulate(equal(1, 0.0, 512, 8), each, Settings(legs="in turn")).outcomes[0].total_s
            for each in (constants, slowed(constants, 2.0))
        )
        assert half_alone == pytest.approx(2 * alone)


class TestLeases:
    """The connector's own rules, in simulated time."""

    def test_a_lease_is_renewed_as_long_as_its_request_waits(self) -> None:
        """D is full for longer than a lease lives."""
        constants = with_blocks(CONSTANTS, 40)
        arrivals = equal(3, 0.0, 512, 600)
        settings = Settings(legs="in turn", lease_ttl_s=3.0)
        found = simulate(arrivals, constants, settings, prefills=3).outcomes
        assert [each.failed for each in found] == ["", "", ""]
        assert max(each.first_token_s for each in found) > 4 * 3.0

    def test_a_request_that_waits_too_long_is_given_up(self) -> None:
        constants = with_blocks(CONSTANTS, 40)
        settings = Settings(legs="in turn", lease_ttl_s=3.0, queue_timeout_s=5.0)
        outcomes = simulate(equal(4, 0.0, 512, 600), constants, settings, prefills=4).outcomes
        assert [each.failed for each in outcomes].count("") == 1
        assert {each.failed for each in outcomes} == {"", "queue"}

    def test_no_more_is_pulled_ahead_than_the_limit_says(self) -> None:
        arrivals = equal(6, 0.0, 2048, 1)
        one, many = (
            simulate(arrivals, CONSTANTS, Settings(max_pulls_ahead=number), 6, 1).outcomes for number in (1, 6)
        )
        assert sum(each.reads for each in one) < sum(each.reads for each in many)

    def test_host_memory_at_p_lets_the_next_prompt_begin(self) -> None:
        constants = linked(with_blocks(CONSTANTS, 20), SLOW_LINK)
        arrivals = equal(2, 0.0, 512, 1)
        without, with_host = (
            simulate(arrivals, constants, Settings(legs="in turn", host_blocks=blocks, host_byte_s=1e-12)).outcomes
            for blocks in (0, 100)
        )
        assert with_host[1].prefilled_s == pytest.approx(2 * 512 * TOKEN_S, rel=1e-2)
        assert without[1].prefilled_s > with_host[1].prefilled_s + 1.0


class TestParts:
    def test_memory_counts_what_is_shared_once_and_evicts_the_longest_unused(self) -> None:
        memory = Memory(100, 16)
        first = memory.take((1, 2), 40)
        assert first is not None
        memory.publish(first)
        second = memory.take((1, 2, 3), 50)
        assert second is not None
        assert memory.free == 100 - 40 - (50 - 32)
        memory.publish(second)
        memory.give_back(first)
        memory.give_back(second)
        memory.check_integrity()
        assert (memory.free, memory.found((1, 2, 3))) == (100, 3)
        third = memory.take((), 60)
        assert third is not None
        assert memory.found((1, 2, 3)) == 2  # a prompt's end goes before its beginning
        memory.check_integrity()
        assert memory.take((), 41) is None
        assert memory.take((1, 2), 41) is None
        assert memory.take((1, 2), 40) is not None
        assert memory.free == 0

    def test_host_memory_gives_out_no_more_than_it_has(self) -> None:
        host = HostMemory(10)
        assert host.take(6)
        assert not host.take(5)
        host.give_back(6)
        assert host.take(10)
        host.check_integrity()

    def test_reads_that_share_a_link_slow_down_and_all_of_them_end(self) -> None:
        env = simpy.Environment()
        links, shared = Links(env), Link()
        ends: list[tuple[str, float]] = []

        def read(name: str, at_s: float, seconds: float) -> Any:
            yield env.timeout(at_s)
            yield links.read(seconds, shared, Link())
            ends.append((name, env.now))

        for name, at_s, seconds in (("long", 0.0, 3.0), ("short", 1.0, 1.0), ("late", 10.0, 1.0)):
            env.process(read(name, at_s, seconds))
        env.run()
        assert [name for name, _ in ends] == ["short", "long", "late"]
        assert [end for _, end in ends] == [pytest.approx(each) for each in (3.0, 4.0, 11.0)]

    def test_calibration_finds_the_costs_that_made_the_samples(self) -> None:
        engine = EngineCosts(0.01, 3e-4, 2e-8, 0.012, 1e-3, 1e-6, 0.005)
        pull = PullCosts(0.004, 0.001, 1e-9)
        wanted = Constants(CACHE_HERE, engine, pull, CHUNK)

        def handover_s(tokens: int) -> float:
            return pull.fixed_s + pull.message_s + math.ceil((tokens - 1) / 32) * CACHE_HERE.block_bytes * pull.byte_s

        samples = calibrate.Samples(
            {tokens: 1e3 * wanted.prompt_s(tokens) for tokens in calibrate.LENGTHS},
            {
                f"{number} of {tokens}": 1e3 * engine.decode_s([tokens + calibrate.ANSWER_TOKENS // 2] * number)
                for number in calibrate.AT_ONCE
                for tokens in calibrate.CONTEXTS
            },
            {tokens: 1e3 * handover_s(tokens) for tokens in calibrate.LENGTHS},
        )
        found = calibrate.fit(samples, pull.message_s)
        assert msgspec.structs.asdict(found.engine) == pytest.approx(msgspec.structs.asdict(engine), rel=1e-6)
        assert msgspec.structs.asdict(found.pull) == pytest.approx(msgspec.structs.asdict(pull), rel=1e-6)

    def test_the_recorded_constants_are_those_of_the_recorded_samples(self) -> None:
        recorded = record.read("fleet_calibration")["figures"]
        samples = msgspec.convert(recorded["samples"], calibrate.Samples, strict=False)
        found = calibrate.fit(samples, recorded["control"]["round_trip_ms"] / 1e3)
        for name in ("engine", "pull"):
            assert msgspec.to_builtins(getattr(found, name)) == pytest.approx(
                recorded["constants"][name], rel=5e-3, abs=1e-9
            )
        assert recorded["constants"]["cache"] == msgspec.to_builtins(CACHE_HERE)

    def test_the_recorded_runs_are_simulated_as_recorded(self) -> None:
        recorded = record.read("fleet_validation")["figures"]
        by_pace = validate.traces(recorded["offered_per_s"])
        assert set(recorded["cases"]) == set(validate.CASES)
        for name, case in recorded["cases"].items():
            legs, pace = validate.CASES[name]
            again = validate.compare(case, legs, by_pace[pace], measured())
            assert again["simulated"] == pytest.approx(case["simulated"], rel=1e-3)
            assert again["deviation"] == pytest.approx(case["deviation"], abs=1e-3)
        assert validate.overall(recorded["cases"]) == pytest.approx(
            {name: recorded[name] for name in ("median_off", "most_off", "runs_apart")}, rel=1e-3
        )

    def test_the_median_of_real_runs_counts_and_every_failure(self, monkeypatch: pytest.MonkeyPatch) -> None:
        times = iter([1.0, 9.0, 2.0])

        def replay(*_: object) -> list[Outcome]:
            slower = next(times)
            answered = [Outcome(at_s, 10, 10, 0.5 * slower, slower, 2 * slower) for at_s in (0.0, 1.0)]
            return [*answered, Outcome(0.0, 10, 10, failed="lease")]

        monkeypatch.setattr(validate, "replay", replay)
        pair: Any = None
        found = validate.run(pair, "in turn, paced", [], 3, lambda: 0.1)
        assert found["real"] == pytest.approx({"first_token_s": 2.0, "total_s": 4.0, "requests_per_s": 2 / 5})
        assert found["runs"]["total_s"] == {"least": 2.0, "most": 18.0}
        assert (found["failed"], found["probe_s"]) == (3, pytest.approx(0.1))


class TestControl:
    def test_every_kind_of_message_is_served_and_costs_something(self) -> None:
        found = control.measure(connections=8, rounds=2)
        assert set(found["cost_us"]) == {"renew", "renew_many", "follow", "release", "hello"}
        assert all(0 < cost < 1e5 for cost in found["cost_us"].values())

    def test_a_server_is_busy_with_what_an_engine_sends(self) -> None:
        cost_us = {"renew_many": 3e6, "follow": 0.0, "release": 0.0}
        assert control.busy(1.0, 2, cost_us) == pytest.approx(3 * 3 / 30.0)
        cost_us = {"renew_many": 0.0, "follow": 1e3, "release": 1e4}
        assert control.busy(0.5, 2, cost_us) == pytest.approx(0.5 * (17 * 1e-3 + 8 * 1e-2))


def test_faster_requests_are_the_same_requests() -> None:
    arrivals = synthetic(Mix(60, 0.8, 1000, 32), 3)
    quick = faster(arrivals, 10.0)
    assert [each.hash_ids for each in quick] == [each.hash_ids for each in arrivals]
    assert quick[-1].at_s == pytest.approx(arrivals[-1].at_s / 10)


def test_a_p_that_is_told_nothing_sleeps() -> None:
    """An idle fleet ends its run at once: nothing polls for ever."""
    fleet = Fleet(CONSTANTS, Settings(), 2, 2)
    assert isinstance(fleet.prefills[0], Prefill)
    fleet.run(equal(1, 0.0, 64, 1))
    assert fleet.env.now < 0.2


@pytest.mark.thorough
def test_the_plots_in_the_results_are_those_of_the_figures(tmp_path: Path) -> None:
    drawn = {
        path.name: path.read_text()
        for path in plots.draw(record.read("fleet")["figures"], record.read("fleet_calibration"), tmp_path)
    }
    assert drawn == {path.name: path.read_text() for path in record.RESULTS.glob("fleet-*.svg")}
