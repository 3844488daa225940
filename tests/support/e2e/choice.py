"""Which pairs of servers a test runs on, and which of them by default: ``pytest.mark.parametrize`` in short."""

import itertools
from collections.abc import Iterable, Sequence

import pytest
from _pytest.mark.structures import ParameterSet

from tests.support.e2e.deployments import Deployment


def rarely(value: object) -> ParameterSet:
    """A value of a parameter with which a test is slow."""
    return pytest.param(value, marks=pytest.mark.slow, id="-".join(value) if isinstance(value, tuple) else str(value))


def pairs(
    deployment: Deployment, names: Sequence[tuple[str, str]], values: Sequence[object] | None = None
) -> list[ParameterSet]:
    """Pairs of servers of a deployment by their names, each with each of the values."""
    if values is None:
        return [pytest.param(deployment, each, id=f"{deployment.name}-{'-'.join(each)}") for each in names]
    return [
        pytest.param(deployment, each, value, id=f"{deployment.name}-{'-'.join(each)}-{value}")
        for each, value in itertools.product(names, values)
    ]


def on_pairs(*chosen: Sequence[ParameterSet], value: str | None = None) -> pytest.MarkDecorator:
    """The test runs on each of what ``pairs`` has returned. ``value`` names the parameter for their values."""
    names = ("deployment", "pair") if value is None else ("deployment", "pair", value)
    return pytest.mark.parametrize(names, [one for each in chosen for one in each], indirect=["deployment", "pair"])


def on_servers(*chosen: tuple[Deployment, str]) -> pytest.MarkDecorator:
    """The test runs on each of these servers, named by deployment and name."""
    named = [pytest.param(*one, id=f"{one[0].name}-{one[1]}") for one in chosen]
    return pytest.mark.parametrize(("deployment", "server"), named, indirect=True)


def deployment_of(item: pytest.Item) -> Deployment | None:
    """The deployment that the test runs on, if it names one."""
    params = item.callspec.params if isinstance(item, pytest.Function) and hasattr(item, "callspec") else {}
    wanted = params.get("deployment")
    return wanted if isinstance(wanted, Deployment) else None


def put_together(items: Iterable[pytest.Item]) -> list[pytest.Item]:
    """The tests in their order, but those of a deployment together: its servers are started once."""
    ranks: dict[str, int] = {}
    places = []
    for item in items:
        wanted = deployment_of(item)
        places.append((ranks.setdefault(item.nodeid if wanted is None else wanted.name, len(ranks)), item))
    return [item for _, item in sorted(places, key=lambda place: place[0])]
