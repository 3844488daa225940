"""Environments that ``make`` has begun to make."""

import os
import subprocess
from pathlib import Path

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
