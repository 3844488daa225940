"""Real servers for the end-to-end tests. Everything in this directory starts some, which takes a minute or two."""

from pathlib import Path

import pytest

from tests.support.e2e.deployments import Deployment
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


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark the tests of this directory, and put those of a deployment together: its servers are started once."""
    registered = [line.partition(":") for line in config.getini("markers")]
    features = {name for name, _, meaning in registered if meaning.strip().startswith("e2e feature:")}
    ranks: dict[str, int] = {}
    places = []
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.e2e)
            wanted = _deployment(item)
            if wanted is not None and wanted.slow:
                item.add_marker(pytest.mark.slow)
            if len(features & {marker.name for marker in item.iter_markers()}) != 1:
                raise pytest.UsageError(f"{item.nodeid}: mark it with one of {sorted(features)}")
            name = item.nodeid if wanted is None else wanted.name
            places.append((item, ranks.setdefault(name, len(ranks))))
    rank_of = dict(places)
    ordered = iter(sorted(rank_of, key=rank_of.__getitem__))
    items[:] = [next(ordered) if item in rank_of else item for item in items]


def _deployment(item: pytest.Item) -> Deployment | None:
    params = item.callspec.params if isinstance(item, pytest.Function) and hasattr(item, "callspec") else {}
    wanted = params.get("deployment")
    return wanted if isinstance(wanted, Deployment) else None
