"""Which pairs of servers a test runs on, and which of them by default: ``pytest.mark.parametrize`` in short."""

import itertools
from collections.abc import Sequence

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
