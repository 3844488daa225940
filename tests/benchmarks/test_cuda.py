"""The benchmark on a CUDA GPU as far as the CPU goes, and the table that its results make."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from benchmarks import pair, record
from benchmarks.cuda import copies, servers, table
from benchmarks.cuda.__main__ import DIRECTIONS, main, result_name
from benchmarks.cuda.copies import Place
from benchmarks.pair import ATTENTION, Pair, Side

PLACE = Place("cpu", 4 << 20, 1)


@pytest.fixture
def results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(record, "RESULTS", tmp_path)
    return tmp_path


def write(results: Path, name: str, figures: dict[str, Any]) -> None:
    versions = {"vllm": "0.32.0", "commit": "abc"}
    card = {"card": {"name": name}, "protocol": "tcp"}
    result = {"date": "2026-11-29", "versions": versions, "figures": card | figures}
    (results / f"{result_name(name, 'tcp')}.json").write_text(json.dumps(result))


@pytest.mark.usefixtures("results")
def test_without_results_there_are_the_goals() -> None:
    head, _, *rows = table.measured().splitlines()
    assert head == "| what | goal |"
    assert len(rows) == sum(bool(goal) for _, goal, *_ in table.ROWS) < len(table.ROWS)
    assert "| read over CUDA IPC, ms | ≤1.25 device copies |" in rows


def test_a_card_has_a_column_and_what_it_has_not_measured_is_not_run(results: Path) -> None:
    write(results, "NVIDIA H200", {"lengths": {"2000": {"read_ms": 111.4}, "30000": {"read_ms": 1732.0}}})
    write(results, "NVIDIA L4", {"gaps": {"loads": {"p50_ms": 8.04, "p99_ms": 21.96}}})
    head, _, *rows = table.measured().splitlines()
    told = "tcp, vLLM 0.32.0, 2026-11-29, abc"
    assert head == f"| what | goal | NVIDIA H200, {told} | NVIDIA L4, {told} |"
    assert "| read of 2,000/8,000/30,000 tokens, ms |  | 111 / not run / 1,732 | not run |" in rows
    assert "| D's tokens beside loads, gaps p50/p99, ms | p99 ≤1.10 alone | not run | 8.0 / 22.0 |" in rows


def test_a_card_s_file_is_named_after_it() -> None:
    assert result_name("NVIDIA H200", "tcp") == "cuda-h200"
    assert result_name("NVIDIA GeForce RTX 4090", "rdma") == "cuda-geforce-rtx-4090-rdma"


def test_batches_are_measured_under_the_names_that_the_table_wants(results: Path) -> None:
    found = {"batches": {each.value: copies.batches(PLACE, each) for each in DIRECTIONS}}
    write(results, "a card", found)
    cells = [row.split(" | ")[2].split(" / ") for row in table.measured().splitlines() if "| batches" in row]
    assert [len(row) for row in cells] == [6, 6]
    assert not any("not run" in cell for row in cells for cell in row)


def test_the_kernel_is_left_to_gpus(capsys: pytest.CaptureFixture[str]) -> None:
    assert copies.reshape(PLACE) == {}
    assert "needs a GPU: not run" in capsys.readouterr().out


class Servers:
    """Both servers' answers, and the counters that D would have."""

    def __init__(self) -> None:
        self.pulls = 0
        self.decodes: list[Side] = []
        self.mapped_bytes = 1e6  # of a pull
        self.pair = Pair(httpx.Client(transport=httpx.MockTransport(self._answer)), "http://p", "http://d", {})

    @contextmanager
    def running(self, _: object, *decodes: Side, **__: object) -> Iterator[tuple[Pair, ...]]:
        self.decodes += decodes
        yield (self.pair,) * len(decodes)

    def counted(self, url: str, name: str, **labels: str) -> float:
        assert url == self.pair.decode
        each = {"vllm:pd_pulls_total": 1.0, "vllm:pd_pull_bytes_total": 1e6, "vllm:pd_pull_seconds_sum": 1e-3}
        each["vllm:pd_pull_bytes_over_ipc_total"] = self.mapped_bytes
        return self.pulls * each.get(name, 0.0)

    def _answer(self, request: httpx.Request) -> httpx.Response:
        asked = json.loads(request.content)
        if asked.get("stream"):
            return httpx.Response(200, text="".join(f"data: {{{each}}}\n\n" for each in range(asked["max_tokens"])))
        self.pulls += bool((asked["kv_transfer_params"] or {}).get("do_remote_prefill"))
        return httpx.Response(200, json={"kv_transfer_params": {"do_remote_prefill": True}})


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Servers:
    fake = Servers()
    monkeypatch.setattr(pair, "running", fake.running)
    monkeypatch.setattr(servers, "counted", fake.counted)
    return fake


def measured() -> dict[str, Any]:
    """What ``fake`` comes to."""
    plan = servers.Plan((2000, 8000, 30000), 2, 100, 20, "tcp", is_mapped=True)
    found: dict[str, Any] = {}
    for part in servers.measure(PLACE, ATTENTION, plan):
        found |= part
    return found


def test_servers_are_measured_under_the_names_that_the_table_wants(results: Path, fake: Servers) -> None:
    found = measured()
    *others, mapping = fake.decodes
    assert [(each.options["protocol"], bool(each.variables)) for each in others] == [("tcp", False)] * 2
    assert mapping.options == {"protocol": "auto"}
    assert "PD_CONNECTOR_SECRET" in mapping.variables
    assert found["lengths"]["8000"]["gb_per_s"] == pytest.approx(1.0)
    write(results, "a card", found)
    rows = [row for row in table.measured().splitlines()[2:] if not row.startswith(("| reshape", "| batches"))]
    assert [row for row in rows if "not run" in row] == []
    assert len(rows) == len(table.ROWS) - 3


def test_reads_that_do_not_take_the_way_that_is_measured_are_none(fake: Servers) -> None:
    fake.mapped_bytes = 0
    with pytest.raises(RuntimeError, match=r"D has read 0 of \d+ MB over CUDA IPC"):
        measured()


def test_servers_on_a_gpu_decode_with_graphs() -> None:
    command = [*pair._command("kv_consumer", Side(), pair.HOST, 1), *servers.GPU_MODEL.words]
    assert command.index("--enforce-eager") < command.index("--no-enforce-eager")
    assert tuple(command[-3:]) == servers.CUDA_GRAPHS


@pytest.mark.usefixtures("results")
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_nothing_is_measured_but_dry_runs(results: Path) -> None:
    with pytest.raises(SystemExit, match="PyTorch sees no CUDA GPU here"):
        main(["--parts", "copies"])
    main(["--dry-run", "--parts", "copies"])
    assert list(results.iterdir()) == []
