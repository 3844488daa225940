"""Environments that ``make`` has begun to make."""

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.support.ascend import environment
from tests.support.sources import ROOT

#: Like Debian's without python3-venv: it fails when the environment's Python is there, and pip is not.
_NO_PIP = """#!/bin/sh
[ "$1" = -m ] || exit 0
mkdir -p "$3/bin"
cp "$0" "$3/bin/python"
exit 1
"""


def test_an_environment_without_pip_is_not_taken_for_one(tmp_path: Path) -> None:
    python, environment = tmp_path / "python", tmp_path / "environment"
    python.write_text(_NO_PIP)
    python.chmod(0o755)
    alone = {name: value for name, value in os.environ.items() if name not in ("MAKEFLAGS", "MAKELEVEL")}
    command = ["make", f"VENV={environment}", f"PYTHON={python}", f"{environment}/.stamps/venv"]
    made = [subprocess.run(command, cwd=ROOT, env=alone, capture_output=True, check=False) for _ in range(2)]
    assert all(one.returncode for one in made)
    assert not (environment / ".stamps" / "venv").exists()


def test_an_environment_that_the_disk_cannot_hold_is_not_begun(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=10**9))
    monkeypatch.setattr(environment, "_PYTHON", sys.version_info[:2])
    assert environment.main([str(tmp_path / "environment"), "0.30"]) == 1
    assert "wants 5 GB, and 1.0 GB of its disk are free" in capsys.readouterr().err
    assert not (tmp_path / "environment").exists()
