"""Real servers on one CUDA GPU, or on the CPU for a dry run: CONTRIBUTING.md says how."""

from pathlib import Path

import pytest

from tests.support.e2e.fixtures import (  # noqa: F401  pytest finds fixtures and hooks here
    acquainted,
    cluster,
    deployed,
    deployment,
    figures,
    pair,
    pytest_runtest_makereport,
    pytest_terminal_summary,
    server,
    servers,
)
from tests.support.gpu_machine import is_on_cpu, lacking


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests of this directory, and skip them where they cannot run."""
    here = [item for item in items if Path(__file__).parent in item.path.parents]
    missing = lacking() if here and not is_on_cpu() else ""
    for item in here:
        item.add_marker(pytest.mark.e2e)
        item.add_marker(pytest.mark.cuda)
        if missing:
            item.add_marker(pytest.mark.skip(missing))
