"""Real servers on one CUDA GPU, or on the CPU for a dry run: CONTRIBUTING.md says how."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.support.e2e.cluster import Cluster, Server
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
    start_all,
)
from tests.support.gpu_machine import is_on_cpu, lacking

#: The modules that run first: those of most features.
FIRST = ("test_same_host.py", "test_unequal.py")


@pytest.fixture(scope="session")
def deployed(
    request: pytest.FixtureRequest,
    cluster: Cluster,  # noqa: F811
    figures: list[str],  # noqa: F811
) -> dict[Deployment, dict[str, Server]]:
    """On a GPU, the servers of all deployments that tests want; none yet on a CPU, and where one has not started."""
    return {} if is_on_cpu() else start_all(wanted(request.session.items), cluster, figures)


def wanted(items: Sequence[pytest.Item]) -> list[Deployment]:
    """The deployments of the tests that are not skipped, in their order."""
    tests = [item for item in items if isinstance(item, pytest.Function) and hasattr(item, "callspec")]
    run = [test for test in tests if not any(mark.args[0] for mark in test.iter_markers("skipif"))]
    deployments = (test.callspec.params.get("deployment") for test in run)
    return list(dict.fromkeys(each for each in deployments if isinstance(each, Deployment)))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests of this directory, order its modules, and skip them where they cannot run."""
    here = [item for item in items if Path(__file__).parent in item.path.parents]
    here.sort(key=lambda item: (*FIRST, item.path.name).index(item.path.name))
    items[:] = [*(item for item in items if item not in here), *here]
    missing = lacking() if here and not is_on_cpu() else ""
    for item in here:
        item.add_marker(pytest.mark.e2e)
        item.add_marker(pytest.mark.cuda)
        if missing:
            item.add_marker(pytest.mark.skip(missing))
