"""Real servers for the end-to-end tests. Everything in this directory starts some, which takes a minute or two."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.support.e2e.deployments import Deployment
from tests.support.e2e.fixtures import (  # noqa: F401  pytest finds fixtures and hooks here
    acquainted,
    cluster,
    deployment,
    figures,
    pair,
    pytest_runtest_makereport,
    pytest_terminal_summary,
    server,
    servers,
)


def pytest_collection_modifyitems(items: Sequence[pytest.Item]) -> None:
    """Mark the tests of this directory."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.e2e)
            if _is_slow(item):
                item.add_marker(pytest.mark.slow)


def _is_slow(item: pytest.Item) -> bool:
    params = item.callspec.params if isinstance(item, pytest.Function) and hasattr(item, "callspec") else {}
    wanted = params.get("deployment")
    return isinstance(wanted, Deployment) and wanted.slow
