"""Results' files say what was measured, when, where and with what."""

from pathlib import Path

import pytest

from benchmarks import record


def test_figures_that_are_worked_out_again_keep_where_and_when_they_were_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(record, "RESULTS", tmp_path)
    record.write("sample", ["benchmarks.sample"], {"ms": 1.0}, "one", seconds=7)
    measured_then = record.read("sample")
    record.rewrite("sample", ["benchmarks.again"], {"ms": 2.0})
    again = record.read("sample")
    assert again.pop("again")["command"] == "python -m benchmarks.again"
    assert again == measured_then | {"figures": {"ms": 2.0}}
    record.rewrite("sample", ["benchmarks.again"], {"ms": 2.0}, "two")
    assert record.read("sample")["printed"] == ["two"]
