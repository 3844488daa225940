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
#: The Python of an environment whose pip finds all packages only with the index http://torch/, which it can reach.
_WANTS_INDEX = """#!/bin/sh
echo "$@" >> "$0.calls"
case "$*" in *http://torch/*) ;; *"pip install"*|*http*) exit 1;; esac
"""


def make(environment: Path, stamp: str, *variables: str) -> int:
    """Return make's exit status for a stamp of an environment."""
    alone = {name: value for name, value in os.environ.items() if name not in ("MAKEFLAGS", "MAKELEVEL")}
    command = ["make", f"VENV={environment}", *variables, f"{environment}/.stamps/{stamp}"]
    return subprocess.run(command, cwd=ROOT, env=alone, capture_output=True, check=False).returncode


def test_an_environment_without_pip_is_not_taken_for_one(tmp_path: Path) -> None:
    python, environment = tmp_path / "python", tmp_path / "environment"
    python.write_text(_NO_PIP)
    python.chmod(0o755)
    for _ in range(2):
        assert make(environment, "venv", f"PYTHON={python}") != 0
    assert not (environment / ".stamps" / "venv").exists()


@pytest.mark.parametrize("is_reached", [True, False])
def test_only_an_index_that_answers_is_asked_for_all_packages(tmp_path: Path, is_reached: bool) -> None:
    python, stamps = tmp_path / "bin" / "python", tmp_path / ".stamps"
    for directory in (python.parent, stamps):
        directory.mkdir()
    python.write_text(_WANTS_INDEX)
    python.chmod(0o755)
    (stamps / "venv").touch()
    (stamps / "libraries").touch()
    index = "http://torch/" if is_reached else "http://nowhere/"
    assert make(tmp_path, "installed", f"TORCH_INDEX={index}") == (0 if is_reached else 2)
    calls = Path(f"{python}.calls").read_text().splitlines()
    assert [f"--extra-index-url {index}" in call for call in calls if "pip install" in call] == [False, True][
        : 1 + is_reached
    ]
    assert (stamps / "installed").exists() == is_reached


def test_an_environment_that_the_disk_cannot_hold_is_not_begun(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=10**9))
    monkeypatch.setattr(environment, "_PYTHON", sys.version_info[:2])
    assert environment.main([str(tmp_path / "environment"), "0.30"]) == 1
    assert "wants 5 GB, and 1.0 GB of its disk are free" in capsys.readouterr().err
    assert not (tmp_path / "environment").exists()
