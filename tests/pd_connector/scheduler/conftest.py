from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.simulation.named_prefill import NamedPrefill, StartPrefill


@pytest.fixture
def start_prefill() -> Iterator[StartPrefill]:
    started: list[NamedPrefill] = []

    def start(*args: Any, **options: Any) -> NamedPrefill:
        started.append(NamedPrefill(*args, **options))
        return started[-1]

    yield start
    for engine in started:
        engine.close()
