"""What the comparison with other connectors makes of its samples, and the table that it writes."""

import json
import random
import re
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, get_args

import psutil
import pytest

from benchmarks import docs, record, tables
from benchmarks.peers import __main__ as main
from benchmarks.peers import model, plots, summary, table
from benchmarks.peers.budget import Budget, starts
from benchmarks.peers.connectors import ALL, HOST, MOONCAKE, NIXL, OURS, Connector, Pair, Ports
from benchmarks.peers.counters import Moved, moved_since
from benchmarks.peers.rounds import LEFT_OUT, Plan, Round, Rounds
from benchmarks.peers.sending import Answer, RefusedError, Router
from benchmarks.peers.servers import Fleet, Shape, Side, Started
from benchmarks.peers.summary import Case, Sample, by_name, rows
from benchmarks.peers.trouble import BLOCK_SIZES, HYBRIDS, TYPES, Trouble, outcome
from examples.quickstart.servers import Server
from tests.support.waiting import until

SIDES: tuple[Side, ...] = get_args(Side)
CASE = Case("BHLNC", 1, 1, 500, 1, "ours", "in turn")
MOVED = Moved(transfers=1, descriptors=16, bytes=12_000_000, seconds=0.01)


def sample(handover_s: float, **changes: object) -> Sample:
    """A right answer, ``handover_s`` after P's, at a server that takes 5 ms for one token."""
    answer = Answer(1.0, 1.005 + handover_s, 1.2, (1, 2))
    return replace(Sample(CASE, answer, wrong=False, least_s=0.005, moved=MOVED), **changes)  # type: ignore[arg-type]


class TestRows:
    def test_a_case_has_percentiles_and_what_was_moved(self) -> None:
        (row,) = rows(sample(milliseconds / 1e3) for milliseconds in range(10, 111))
        assert row["handover_ms"] == pytest.approx({"p50": 60, "p90": 100, "p99": 109})
        assert (row["requests"], row["errors"], row["wrong"]) == (101, 0, 0)
        assert (row["descriptors"], row["megabytes"], row["megabytes_per_s"]) == (16, 12, 1200)

    def test_an_error_is_counted_named_and_in_no_time(self) -> None:
        failed = sample(0, answer=Answer(total_s=60.0, error="HTTP 500: no"), moved=Moved())
        (row,) = rows([sample(0.01), failed, sample(0.01)])
        assert (row["errors"], row["error"], row["total_ms"]["p99"]) == (1, "HTTP 500: no", 1200)

    def test_a_wrong_answer_is_counted(self) -> None:
        (row,) = rows([sample(0.01), sample(0.01, wrong=True)])
        assert (row["errors"], row["wrong"]) == (0, 1)

    def test_what_a_burst_moved_is_of_all_its_requests(self) -> None:
        burst = [sample(0.01, case=replace(CASE, at_once=4), moved=moved) for moved in (MOVED, *[Moved()] * 3)]
        (row,) = rows(burst)
        assert (row["descriptors"], row["megabytes"]) == (4, 3)

    def test_where_all_fail_there_are_no_times(self) -> None:
        (row,) = rows([sample(0, answer=Answer(error="HTTP 500: no"), moved=Moved())])
        assert row["errors"] == row["requests"] == 1
        assert "total_ms" not in row


def test_the_counting_waits_for_what_is_late() -> None:
    counted = iter([Moved(), Moved(1, 4, 50, 0.1), Moved(2, 8, 100, 0.2)])
    assert moved_since(lambda: next(counted), Moved(), 100) == Moved(2, 8, 100, 0.2)


def test_the_legs_say_what_each_contract_wants() -> None:
    pair = Pair("http://p", "http://d", Ports(1, 2), record.ROOT, {"remote_host": HOST, "remote_port": 3})
    together = OURS.contract(pair, "together")
    assert together.for_decode is not None
    assert together.for_prefill["transfer_id"] == together.for_decode["transfer_id"]
    assert together.for_decode["remote_port"] == 3
    assert OURS.contract(pair, "in turn").for_decode is None
    assert NIXL.contract(pair, "in turn").for_decode is None
    pair.learnt["engine_id"] = "engine"
    mooncake = MOONCAKE.contract(pair, "in turn")
    assert mooncake.for_decode is not None
    assert mooncake.for_decode["remote_bootstrap_addr"] == f"http://{HOST}:1"
    assert mooncake.for_decode["transfer_id"] == mooncake.for_prefill["transfer_id"]


def result(cases: list[dict[str, Any]], trouble: dict[str, Any] | None = None) -> dict[str, Any]:
    """A results' file."""
    figures = {"labels": {each.key: each.label for each in ALL}, "cases": by_name(cases), "trouble": trouble or {}}
    machine = {"processor": "a processor", "cores": 2, "memory_gib": 24}
    return {
        "date": "2026-01-02", "machine": machine, "versions": {"vllm": "0.32.0"}, "command": "python -m x",
        "figures": figures,
    }  # fmt: skip


class TestTable:
    def test_a_row_says_how_long_how_much_and_how_often_wrong(self) -> None:
        text = table.markdown(result(rows([sample(0.01), sample(0.01, wrong=True)])))
        assert "2026-01-02, a processor, 2 cores, 24 GiB; vllm 0.32.0" in text
        (row,) = [line for line in text.splitlines() if line.startswith("| 500")]
        cells = "500 | 1 | pd-connector | in turn | 10 / 10 / 10 | 1015 / 1015 / 1015 | 1200 / 1200 / 1200"
        assert row == f"| {cells} | 16 | 12 | 1,200 | 2 | 0 | 1 | 2 |"

    def test_errors_fit_a_cell_and_stand_under_the_table(self) -> None:
        failed = sample(0, answer=Answer(error="HTTP 500:\n a | b " + 200 * "x"), moved=Moved())
        text = table.markdown(result(rows([failed])))
        assert "- pd-connector, in turn, 500 tokens, 1 at once: `HTTP 500: a / b xxx" in text
        assert max(len(line) for line in text.splitlines() if line.startswith("- ")) < 240

    def test_wrong_answers_between_servers_that_do_not_fit_stand_out(self) -> None:
        row = {"requests": 3, "right": 0, "wrong": 3, "errors": 0, "longest_s": 0.5}
        timed = row | {"handover_ms": {"p50": 7, "p90": 8, "p99": 9}}
        text = table.markdown(result([], {"block size 32 to 64": {"nixl": row, "ours": timed}}))
        assert "| block size 32 to 64 | vLLM's NixlConnector | 3 | 0 | **3** | 0 | 0.5 s |  |  |" in text
        assert "| block size 32 to 64 | pd-connector | 3 | 0 | **3** | 0 | 0.5 s | 7 / 8 / 9 |  |" in text

    def test_what_did_not_start_and_a_chat_that_failed_are_said(self) -> None:
        of = result([])
        of["figures"] |= {"failures": {"LBHNC/2-1": {"nixl": "no"}}, "chat": {"error": "a server\nended"}}
        text = table.markdown(of)
        assert "| LBHNC/2-1 | vLLM's NixlConnector | `no` |" in text
        assert "It failed: `a server ended`" in text

    def test_it_says_what_was_changed_in_a_peer_and_what_is_subtracted(self) -> None:
        text = " ".join(table.markdown(result([])).split())
        assert "`torch.accelerator.current_device_index`" in text
        assert "less what a request of one token takes at D" in text
        assert "Eight at once have 500 tokens each" in text


def test_a_page_can_name_any_row_of_the_results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record, "RESULTS", tmp_path)
    alone = sample(0.01, case=replace(CASE, connector="alone"))
    figures = {"cases": by_name(rows([sample(0.01), alone])), "trouble": {"P killed": {"ours": outcome([])}}}
    record.write("peers", ["benchmarks.peers"], figures)
    page = "0<!--peers:cases/BHLNC/1-1/500/1/ours, in turn/handover_ms/p50--> ms, "
    page += "0<!--peers:cases/BHLNC/1-1/500/1/alone/total_ms/p50--> ms, 7<!--peers:trouble/P killed/ours/wrong-->"
    assert re.sub("<.*?>", "", docs.written(page)) == "10 ms, 1,200 ms, 0"


class TestPlots:
    def cases(self) -> list[dict[str, Any]]:
        """Two pairs of sizes, a way that fails with longer prompts, and bursts."""
        first = replace(CASE, prefill_tp=2)
        nixl = replace(CASE, connector="nixl")
        long = replace(CASE, prompt_tokens=2000)
        return rows([sample(0.01, case=case) for case in (first, CASE, nixl, long, replace(CASE, at_once=8))])

    def test_equal_sizes_are_drawn_with_a_name_at_each_line_and_what_is_subtracted(self, tmp_path: Path) -> None:
        handover, at_once = plots.draw(result(self.cases()), tmp_path)
        assert (handover.name, at_once.name) == ("peers-handover-BHLNC.svg", "peers-at-once-BHLNC.svg")
        drawn = handover.read_text()
        assert "TP 1 to 1, BHLNC: " in drawn
        assert "Handover time" in drawn
        assert "pd-connector, in turn<" in drawn
        assert "vLLM's NIXL, in turn;<" in drawn
        assert "longer ones failed" in drawn
        assert "less what one token takes at D" in drawn

    def test_bursts_alone_are_drawn_and_nothing_without_rows(self, tmp_path: Path) -> None:
        bursts = [row for row in self.cases() if row["at_once"] > 1]
        assert [path.name for path in plots.draw(result(bursts), tmp_path)] == ["peers-at-once-BHLNC.svg"]
        assert plots.draw(result([]), tmp_path) == []

    def test_equal_results_give_equal_files(self, tmp_path: Path) -> None:
        (tmp_path / "again").mkdir()
        one, other = (plots.draw(result(self.cases()), place) for place in (tmp_path, tmp_path / "again"))
        assert [path.read_bytes() for path in one] == [path.read_bytes() for path in other]


class TestBudget:
    def test_servers_are_started_where_a_side_changes(self) -> None:
        small, large = Shape(), Shape(tensor_parallel=2)
        assert starts([(large, small), (small, small), (small, large), (small, large)], 3) == 12

    def test_what_is_left_is_shared_after_what_starts_take(self) -> None:
        now = [0.0]
        budget = Budget(800, 20, 60, clock=lambda: now[0])
        now[0] = 100.0
        budget.started(10, 100.0)
        assert budget.share_s(2) == (800 - 100 - 10 * 10 - 60) / 2
        now[0] = 790.0
        assert budget.share_s(1) == 0


class TestFleet:
    def test_idle_servers_are_stopped_and_end_all_the_same(self, tmp_path: Path) -> None:
        fleet, pairs = Fleet({}, tmp_path, 1), {}
        for connector in (OURS, NIXL):
            started = [self.started(connector, side, tmp_path) for side in SIDES]
            fleet._started |= {(connector.key, one.side): one for one in started}
            urls = [one.server.url for one in started]
            pairs[connector.key] = Pair(urls[0], urls[1], Ports(1, 2), tmp_path)
        with fleet:
            ours, nixl = (
                [self.process(one) for (key, _), one in fleet._started.items() if key == connector.key]
                for connector in (OURS, NIXL)
            )
            for running, stopped, pair in ((ours, nixl, pairs["ours"]), (nixl, ours, pairs["nixl"])):
                fleet.attend(pair)
                for one in stopped:
                    until(partial(self.has_stopped, one), f"{one} to be stopped")
                assert not any(map(self.has_stopped, running))
        assert not any(one.is_running() for one in (*ours, *nixl))

    @staticmethod
    def started(connector: Connector, side: Side, directory: Path) -> Started:
        command = [sys.executable, "-c", "import time; time.sleep(60)"]
        name = f"{connector.key} {side}"
        server = Server(name, command, url=f"http://{name}", log=directory / name)
        server.start()
        return Started(server, connector, side, Shape(), 1)

    @staticmethod
    def has_stopped(process: psutil.Process) -> bool:
        return bool(process.status() == psutil.STATUS_STOPPED)

    @staticmethod
    def process(started: Started) -> psutil.Process:
        guard = psutil.Process(started.server.process_id)
        until(guard.children, f"{started.server.name} to run")
        return guard.children()[0]


class TestOrder:
    def test_what_happens_to_fitting_servers_follows_their_round(self) -> None:
        names = [step.name for step in main.in_order(Plan(), main.PARTS)]
        assert names == ["LBHNC/2-1", "LBHNC/1-1", "killed", "block size 32 to 64", "LBHNC/1-2", "BHLNC/1-1",
                         "float16 to bfloat16", "hybrid, TP 1 to 1", "hybrid, TP 1 to 2"]  # fmt: skip

    def test_parts_may_be_left_out(self) -> None:
        assert [step.name for step in main.in_order(Plan(), ["killed"])] == ["killed"]
        assert main.in_order(Plan(), ["misfits"]) == [BLOCK_SIZES, TYPES]
        assert main.in_order(Plan(), ["rounds"]) == list(Plan().rounds)


def quiet(_what: str) -> None:
    """Say nothing."""


class TestModels:
    def test_a_hybrid_of_one_group_is_made_once(self, tmp_path: Path) -> None:
        directory = model.make(tmp_path / "hybrid", "hybrid")
        made = {path: path.stat().st_mtime_ns for path in directory.iterdir()}
        assert json.loads((directory / "config.json").read_text())["mamba_n_groups"] == 1
        assert {path: path.stat().st_mtime_ns for path in model.make(directory, "hybrid").iterdir()} == made

    def test_its_servers_find_no_prefixes(self, tmp_path: Path) -> None:
        models: dict[model.Model, Path] = {"attention": tmp_path / "attention", "hybrid": tmp_path / "hybrid"}
        fleet = Fleet(models, tmp_path, 1)
        words = {name: fleet._command(OURS, "prefill", Shape(model=name), 1) for name in models}
        assert all(str(models[name]) in words[name] for name in models)
        assert [name for name in models if "--no-enable-prefix-caching" in words[name]] == ["hybrid"]


def test_servers_run_on_the_hosts_that_are_given(tmp_path: Path) -> None:
    fleet = Fleet({"attention": tmp_path}, tmp_path, 1, ("198.18.0.1", ["ip", "netns"]), ("198.18.0.2", []))
    commands = {side: fleet._command(OURS, side, Shape(), 1) for side in SIDES}
    assert commands["prefill"][:3] == ["ip", "netns", sys.executable]
    assert [words[words.index("--host") + 1] for words in commands.values()] == ["198.18.0.1", "198.18.0.2"]
    for connector in ALL:
        own = [connector.environment(Ports(1, 2, "of P", "of D"), prefill) for prefill in (True, False)]
        assert "of P" in own[0].values()
        assert "of D" in own[1].values()
    apart = Pair("http://p", "http://d", Ports(1, 2, "198.18.0.1"), tmp_path, {"engine_id": "engine"})
    for_decode = MOONCAKE.contract(apart, "in turn").for_decode
    assert for_decode is not None
    assert for_decode["remote_bootstrap_addr"] == "http://198.18.0.1:1"


class Slow:
    """A router that never answers one connector, and that P refuses another."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def alone(self, *_: object) -> Answer:
        return Answer(0.0, 0.001, 0.002, (1,))

    def prefill(self, *_: object) -> None:
        raise RefusedError("P: HTTP 500: no")

    def send(self, connector: Connector, *_: object) -> Answer:
        self.asked.append(connector.key)
        if connector is NIXL:
            return Answer(error="timed out", timed_out=True)
        return Answer(0.001, 0.002, 0.003, (1,))


class Servers:
    """Servers that all run."""

    def __init__(self) -> None:
        self.failures: dict[str, str] = {}
        self.starts = 0
        self.retired: list[str] = []

    def retire(self, connector: str) -> None:
        self.retired.append(connector)

    def become(self, compared: tuple[Connector, ...], *_: Shape) -> dict[str, Pair]:
        return {each.key: Pair("http://p", "http://d", Ports(1, 2), record.ROOT / "none") for each in compared}

    def attend(self, pair: Pair) -> None:
        """All run anyway."""


class TestRounds:
    @pytest.fixture
    def router(self, monkeypatch: pytest.MonkeyPatch) -> Slow:
        monkeypatch.setattr("benchmarks.peers.rounds.now", lambda _: Moved())
        monkeypatch.setattr("benchmarks.peers.rounds.moved_since", lambda *_: Moved())
        return Slow()

    def rounds(self, router: Slow, budget_s: float) -> Rounds:
        self.servers = Servers()
        plan = Plan(rounds=(Round("LBHNC", 1, 1),) * 2, repeats=5)
        budget = Budget(budget_s, 0, 0)
        self.patient = Slow()
        return Rounds(self.servers, router, plan, random.Random(1), budget, self.patient)  # type: ignore[arg-type]

    def test_a_way_that_times_out_is_left_out_and_its_requests_are_errors(self, router: Slow) -> None:
        rounds = self.rounds(router, 1000)
        (row, *others) = [row for row in summary.rows(rounds.run(0, quiet)) if row["connector"] == "nixl"]
        asked = Plan().clients
        assert router.asked.count("nixl") == asked, "those of the burst that is not counted"
        assert all(each["errors"] == each["requests"] for each in (row, *others))
        assert row["error"] == LEFT_OUT
        list(rounds.run(1, quiet))
        assert router.asked.count("nixl") == asked, "the next round has the first request only, which failed again"

    def test_who_waits_for_a_compiler_sends_the_first_requests(self, router: Slow) -> None:
        next(iter(self.rounds(router, 1000).run(0, quiet)))
        assert self.patient.asked == ["mooncake"] * len(MOONCAKE.legs) + ["nixl"]

    def test_what_failed_has_other_servers_afterwards(self, router: Slow) -> None:
        rounds = self.rounds(router, 1000)
        samples = rounds.run(0, quiet)
        next(samples)
        assert self.servers.retired == [], "not while they are measured"
        list(samples)
        assert self.servers.retired == ["nixl", "ours"], "whose first request was refused"

    def test_many_at_once_and_then_longer_and_longer_prompts(self, router: Slow) -> None:
        cases = [(each.case.at_once, each.case.prompt_tokens) for each in self.rounds(router, 1000).run(0, quiet)]
        assert list(dict.fromkeys(cases)) == [(8, 500), (1, 500), (1, 2000), (1, 3500)]

    def test_a_first_request_that_is_refused_is_kept_and_the_others_go_on(self, router: Slow) -> None:
        rounds = self.rounds(router, 1000)
        samples = list(rounds.run(0, quiet))
        assert rounds.failures["LBHNC/1-1"]["ours"] == "the first request: P: HTTP 500: no"
        assert {each.case.connector for each in samples} == {"ours", "mooncake", "nixl", "alone"}

    def test_when_the_time_is_used_up_each_way_has_two_repeats(self, router: Slow) -> None:
        found = {(row["at_once"], row["repeats"]) for row in summary.rows(self.rounds(router, 0).run(0, quiet))}
        assert found == {(1, 2), (8, 1)}
        found = {(row["at_once"], row["repeats"]) for row in summary.rows(self.rounds(router, 1000).run(0, quiet))}
        assert found == {(1, 5), (8, 2)}


class TestTrouble:
    def test_all_prefill_servers_are_killed_and_start_again_at_once(self, monkeypatch: pytest.MonkeyPatch) -> None:
        happened: list[str] = []

        class Killed(Servers):
            def kill_prefill(self, connector: Connector) -> None:
                happened.append(connector.key)

            def restart_prefill(self, killed: list[Connector]) -> dict[str, Pair]:
                happened.append("restart")
                self.failures = {"mooncake": "no memory"}
                return {key: pair for key, pair in self.become(tuple(killed)).items() if key != "mooncake"}

        monkeypatch.setattr("benchmarks.peers.trouble.Router", lambda _: Slow())
        fleet = Killed()
        rounds = Rounds(fleet, Slow(), Plan(), random.Random(1), Budget(0, 0, 0), Slow())  # type: ignore[arg-type]
        trouble = Trouble(fleet, rounds, random.Random(1), ALL)  # type: ignore[arg-type]
        found = trouble.killed(quiet)
        assert happened == ["ours", "mooncake", "nixl", "restart"]
        assert "P: HTTP 500: no" in found["P killed"]["nixl"]["error"]
        after = found["after P's restart"]
        assert after["mooncake"] == {"error": "no memory"}
        assert (after["ours"]["requests"], after["ours"]["right"]) == (3, 3)
        assert (after["nixl"]["requests"], after["nixl"]["errors"]) == (1, 1), "no more after one that timed out"

    def test_hybrids_are_asked_more_often_once_they_are_warm(self, monkeypatch: pytest.MonkeyPatch) -> None:
        router, patient = Slow(), Slow()
        monkeypatch.setattr("benchmarks.peers.trouble.Router", lambda _: router)
        rounds = Rounds(Servers(), router, Plan(), random.Random(1), Budget(0, 0, 0), patient)  # type: ignore[arg-type]
        trouble = Trouble(Servers(), rounds, random.Random(1), ALL)  # type: ignore[arg-type]
        found = trouble.misfit(HYBRIDS[0], quiet)["hybrid, TP 1 to 1"]
        assert (found["mooncake"]["right"], router.asked.count("mooncake")) == (12, 12)
        assert patient.asked.count("mooncake") == len(MOONCAKE.legs)
        assert found["mooncake"]["handover_ms"]["p50"] == pytest.approx(0), "1 ms, which a request of one token takes"
        assert found["ours"]["error"] == "the first request: P: HTTP 500: no"
        assert "handover_ms" not in found["nixl"]


def test_what_a_contract_lacks_is_an_answer_s_error() -> None:
    pair = Pair("http://p", "http://d", Ports(1, 2), record.ROOT)
    answer = Router().send(OURS, pair, "together", [1], 1, "salt")
    assert answer.error == "KeyError: 'remote_host'"
    assert not answer.timed_out


def test_hybrids_have_a_file_of_their_own_and_a_row_beside_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("record.RESULTS", "record.ROOT", "peers.__main__.DIRECTORY"):
        monkeypatch.setattr(f"benchmarks.{name}", tmp_path)
    monkeypatch.setattr(record, "versions", lambda: {"vllm": "0"})
    row = {"requests": 2, "right": 1, "wrong": 1, "errors": 0, "longest_s": 0.5}
    record.write(
        "peers", ["benchmarks.peers"], {"trouble": {"P killed": dict.fromkeys(("ours", "mooncake", "nixl"), row)}}
    )
    before = (tmp_path / "peers.json").read_text()

    def measures(_plan: object, _arguments: object, _results: object, of_hybrids: main.Results) -> None:
        with of_hybrids.part("hybrid, TP 1 to 2"):
            timed = row | {"handover_ms": {"p50": 7, "p90": 8, "p99": 9}}
            of_hybrids.figures["trouble"] = {"hybrid, TP 1 to 2": {"ours": timed, "nixl": {"error": "no"}}}

    monkeypatch.setattr(main, "measure", measures)
    main.main(["--parts", "hybrid"])
    assert (tmp_path / "peers.json").read_text() == before
    killed, hybrid = tables.trouble().splitlines()[2:]
    assert killed == "| P killed | 1 right, 1 wrong, 0.5 s | 1 right, 1 wrong, 0.5 s | 1 right, 1 wrong, 0.5 s |"
    assert hybrid == "| hybrid, TP 1 to 2 | 1 right, 1 wrong, 0.5 s | does not start | does not start |"


def test_a_failing_part_costs_nothing_of_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record, "RESULTS", tmp_path)
    monkeypatch.setattr(record, "ROOT", tmp_path)
    monkeypatch.setattr(main, "DIRECTORY", tmp_path)
    monkeypatch.setattr(record, "versions", lambda: {"vllm": "0"})

    def fails(_plan: object, _arguments: object, results: main.Results, _hybrids: object) -> None:
        with results.part("LBHNC/1-1"):
            results.measured([sample(0.01)], {})
        raise RuntimeError("the second round")

    monkeypatch.setattr(main, "measure", fails)
    with pytest.raises(RuntimeError, match="the second round"):
        main.main([])
    assert record.read("peers")["figures"]["took_s"].keys() == {"LBHNC/1-1"}
    assert "| 500 |" in (tmp_path / "peers.md").read_text()
    assert (tmp_path / "peers-handover-BHLNC.svg").exists()


def test_a_chat_that_ends_the_program_is_an_error_in_the_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    def ends(_words: object) -> None:
        sys.exit("a server ended")

    monkeypatch.setattr("benchmarks.multi_turn.main", ends)
    assert main.chat() == {"error": "a server ended"}


def test_the_table_of_hybrids_is_that_of_the_figures() -> None:
    assert (record.RESULTS / "peers_hybrid.md").read_text() == table.markdown(record.read("peers_hybrid"))


def test_table_and_plots_in_the_results_are_those_of_the_figures(tmp_path: Path) -> None:
    if not (record.RESULTS / "peers.json").exists():
        assert list(record.RESULTS.glob("peers*")) == [], "what is drawn has its figures beside it"
        pytest.skip("nothing was recorded yet: make bench-peers")
    found = record.read("peers")
    assert (record.RESULTS / "peers.md").read_text() == table.markdown(found)
    drawn = {path.name: path.read_text() for path in plots.draw(found, tmp_path)}
    assert drawn == {path.name: path.read_text() for path in record.RESULTS.glob("peers-*.svg")}
