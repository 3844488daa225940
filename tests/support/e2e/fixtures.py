"""Fixtures of tests with real servers: started once a deployment, checked around every test, logs shown on failure.

A test names its deployment and servers with ``on``; pytest runs the tests of a deployment together. A conftest module
imports all of ``__all__``.
"""

from collections.abc import Generator, Iterator, Sequence
from pathlib import Path
from typing import TypeAlias

import pytest

from tests.support.e2e.client import MODEL_NAME
from tests.support.e2e.cluster import Cluster, Server, tail
from tests.support.e2e.deployments import Deployment
from tests.support.e2e.pair import Pair, wait_until_at_rest

__all__ = [
    "acquainted",
    "cluster",
    "deployed",
    "deployment",
    "figures",
    "pair",
    "pytest_runtest_makereport",
    "pytest_terminal_summary",
    "server",
    "servers",
]

#: The processes of P and D, how often D has been reset, after which it forgets whom it met, and the model's name.
Acquaintance: TypeAlias = tuple[int, int, int, str]

_LOG_MARKS = pytest.StashKey[dict[Path, int]]()
_FIGURES = pytest.StashKey[list[str]]()


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Every server of the session; all are gone when it ends."""
    cluster = Cluster(tmp_path_factory.mktemp("servers"))
    yield cluster
    cluster.close()


@pytest.fixture(scope="session")
def deployed() -> dict[Deployment, dict[str, Server]]:
    """The servers of the deployment that runs, by name; no two run at the same time."""
    return {}


def start_all(
    deployments: Sequence[Deployment], cluster: Cluster, figures: list[str]
) -> dict[Deployment, dict[str, Server]]:
    """Start the servers of all deployments at the same time; none is left, and a figure says why, if one fails."""
    try:
        started = iter(cluster.start(spec for each in deployments for _, spec in each.servers))
    except Exception as error:  # whatever it is, each deployment may start by itself
        figures.append(f"servers of {len(deployments)} deployments did not start at once: {error!r:.200}")
        return {}
    return {each: {name: next(started) for name, _ in each.servers} for each in deployments}


@pytest.fixture(scope="session")
def deployment(
    request: pytest.FixtureRequest, cluster: Cluster, deployed: dict[Deployment, dict[str, Server]]
) -> dict[str, Server]:
    """The servers of a ``Deployment``, by name. They run until a test wants those of another one.

    pytest ends this fixture with each test whose mark has parameters of narrower fixtures, too (``on_pairs``).
    """
    wanted: Deployment = request.param
    if wanted not in deployed:
        for servers in deployed.values():
            cluster.stop(servers.values())
        deployed.clear()
        started = cluster.start(spec for _, spec in wanted.servers)
        deployed[wanted] = dict(zip((name for name, _ in wanted.servers), started, strict=True))
    return deployed[wanted]


@pytest.fixture
def servers(request: pytest.FixtureRequest, cluster: Cluster, deployment: dict[str, Server]) -> dict[str, Server]:
    """The servers of the test's deployment, all healthy: those that an earlier test has ended are started again."""
    for server in deployment.values():
        if not server.client.is_healthy():
            cluster.restart(server)
    request.node.stash[_LOG_MARKS] = {server.log: server.log_size for server in deployment.values()}
    return deployment


@pytest.fixture
def server(request: pytest.FixtureRequest, servers: dict[str, Server]) -> Iterator[Server]:
    """The one server that the test names. After it it must be healthy and hold nothing."""
    server = servers[request.param]
    yield server
    assert server.client.is_healthy(), f"the test has ended {server.spec.name}"
    wait_until_at_rest(server)


@pytest.fixture(scope="session")
def acquainted() -> set[Acquaintance]:
    """The pairs of servers that have met."""
    return set()


def meet(pair: Pair, acquainted: set[Acquaintance], model: str = MODEL_NAME) -> None:
    """Have D meet P, for requests that name ``model``, unless they have met and D has not been reset since."""
    met = pair.prefill.process.pid, pair.decode.process.pid, pair.decode.client.resets, model
    if met not in acquainted:
        pair.get_acquainted(model)
        acquainted.add(met)


@pytest.fixture
def pair(request: pytest.FixtureRequest, servers: dict[str, Server], acquainted: set[Acquaintance]) -> Iterator[Pair]:
    """The prefill and decode server that the test names. After it both must be healthy and hold nothing."""
    prefill, decode = request.param
    pair = Pair(servers[prefill], servers[decode])
    meet(pair, acquainted)
    yield pair
    for server in (pair.prefill, pair.decode):
        assert server.client.is_healthy(), f"the test has ended {server.spec.name}"
    pair.wait_until_at_rest()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Show what the servers logged during a failed test."""
    report = yield
    if report.failed:
        for path, offset in item.stash.get(_LOG_MARKS, {}).items():
            with path.open("rb") as file:
                file.seek(offset)
                log = tail(file.read().decode(errors="replace"))
            if log:
                report.sections.append((f"{path.name} during this test", log))
    return report


@pytest.fixture(scope="session")
def figures(pytestconfig: pytest.Config) -> list[str]:
    """Lines that a test wants shown at the end of the run."""
    return pytestconfig.stash.setdefault(_FIGURES, [])


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Show the figures that were measured."""
    for line in config.stash.get(_FIGURES, []):
        terminalreporter.write_line(f"measured: {line}")
