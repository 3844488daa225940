"""The first pull of a process finds everything ready: kernels compiled, staging memory there."""

import json
import subprocess
import sys

import pytest


@pytest.mark.thorough  # another process imports all of it, and compiles
def test_the_first_pull_compiles_nothing_and_finds_its_staging_memory() -> None:
    module = "tests.support.connector.first_pull"
    done = subprocess.run([sys.executable, "-m", module], capture_output=True, text=True, check=True)
    found = json.loads(done.stdout.splitlines()[-1])  # vLLM may have logged something
    assert found["kernels"] > 0
    assert (found["cause"], found["new"], found["missing_pages"]) == ("", [], 0)
