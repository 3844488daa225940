"""Counts the cases of the conversion matrix, because a property test that generated little proves little."""

from collections import Counter

import pytest

_CASES = pytest.StashKey[Counter[str]]()


def pytest_configure(config: pytest.Config) -> None:
    config.stash[_CASES] = Counter()


@pytest.fixture(scope="session")
def cases(pytestconfig: pytest.Config) -> Counter[str]:
    """Cases run, by name of the property; printed at the end of the session."""
    return pytestconfig.stash[_CASES]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    cases = config.stash[_CASES]
    if cases:
        named = ", ".join(f"{name} {count}" for name, count in sorted(cases.items()))
        terminalreporter.write_line(f"layout matrix: {cases.total()} cases ({named})")
