"""What the comparison with other connectors makes of its samples, and the table that it writes."""

from dataclasses import replace

import pytest

from benchmarks import record
from benchmarks.peers import table
from benchmarks.peers.connectors import ALL, HOST, MOONCAKE, NIXL, OURS, Pair, Ports
from benchmarks.peers.counters import Moved, moved_since
from benchmarks.peers.sending import Answer
from benchmarks.peers.summary import Case, Sample, rows

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


class TestTable:
    def result(self, cases: list[dict[str, object]], trouble: list[dict[str, object]]) -> dict[str, object]:
        figures = {"labels": {each.key: each.label for each in ALL}, "cases": cases, "trouble": trouble}
        machine = {"processor": "a processor", "cores": 2, "memory_gib": 24}
        return {
            "date": "2026-01-02", "machine": machine, "versions": {"vllm": "0.32.0"}, "command": "python -m x",
            "figures": figures,
        }  # fmt: skip

    def test_a_row_says_how_long_how_much_and_how_often_wrong(self) -> None:
        text = table.markdown(self.result(rows([sample(0.01), sample(0.01, wrong=True)]), []))
        assert "2026-01-02, a processor, 2 cores, 24 GiB; vllm 0.32.0" in text
        (row,) = [line for line in text.splitlines() if line.startswith("| 500")]
        cells = "500 | 1 | pd-connector | in turn | 10 / 10 / 10 | 1015 / 1015 / 1015 | 1200 / 1200 / 1200"
        assert row == f"| {cells} | 16 | 12 | 1,200 | 0 | 1 | 2 |"

    def test_errors_fit_a_cell_and_stand_under_the_table(self) -> None:
        failed = sample(0, answer=Answer(error="HTTP 500:\n a | b " + 200 * "x"), moved=Moved())
        text = table.markdown(self.result(rows([failed]), []))
        assert "- pd-connector, in turn, 500 tokens, 1 at once: `HTTP 500: a / b xxx" in text
        assert max(len(line) for line in text.splitlines() if line.startswith("- ")) < 240

    def test_wrong_answers_between_servers_that_do_not_fit_stand_out(self) -> None:
        row: dict[str, object] = {
            "case": "block size 32 to 64", "connector": "nixl", "requests": 3, "right": 0, "wrong": 3, "errors": 0,
            "longest_s": 0.5,
        }  # fmt: skip
        text = table.markdown(self.result([], [row]))
        assert "| block size 32 to 64 | vLLM's NixlConnector | 3 | 0 | **3** | 0 | 0.5 s |  |" in text


def test_the_table_in_the_results_is_that_of_the_figures() -> None:
    path = record.RESULTS / "peers.md"
    if path.exists() or (record.RESULTS / "peers.json").exists():
        assert path.read_text() == table.markdown(record.read("peers"))
