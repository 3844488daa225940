"""What a check says, and a report of many: a line each, or JSON."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any


class Outcome(StrEnum):
    """How a check ended, as a line begins."""

    OK = "ok"
    WARN = "WARN"  # it may work, or work badly
    FAIL = "FAIL"
    SKIP = "skip"  # not checked; the text says why


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a check has found: a text for people, and its numbers for programs."""

    text: str
    values: dict[str, Any] = field(default_factory=dict)
    outcome: Outcome = Outcome.OK


class CheckFailed(Exception):  # noqa: N818  named after the event
    """What was checked will not work; the message says what was found and the way out."""


class CheckSkipped(Exception):  # noqa: N818
    """This cannot be checked here; the message says why."""


Check = Callable[[], Verdict]


@dataclass(frozen=True, slots=True)
class Line:
    """One line of a report."""

    name: str
    verdict: Verdict

    def __str__(self) -> str:
        return f"{self.verdict.outcome:<4} {self.name}: {self.verdict.text}"


class Examination:
    """Runs checks one after another, and keeps what they have found."""

    def __init__(self, write: Callable[[Line], object] = lambda _: None) -> None:
        """``write`` is called with every line as soon as it is known."""
        self.lines: list[Line] = []
        self._write = write

    def run(self, name: str, check: Check) -> bool:
        """Run a check; return whether what depends on it can be checked too."""
        try:
            verdict = check()
        except CheckSkipped as reason:
            verdict = Verdict(str(reason), outcome=Outcome.SKIP)
        except CheckFailed as reason:
            verdict = Verdict(str(reason), outcome=Outcome.FAIL)
        except Exception as error:  # whatever it is: the report must go on
            verdict = Verdict(f"{type(error).__name__}: {error}", outcome=Outcome.FAIL)
        self.add(name, verdict)
        return verdict.outcome in (Outcome.OK, Outcome.WARN)

    def run_chain(self, checks: Sequence[tuple[str, Check]]) -> None:
        """Run checks of which each needs what those before it have found; skip the rest when one has not passed."""
        missing = ""
        for name, check in checks:
            if missing:
                self.add(name, Verdict(f"not checked: {missing}", outcome=Outcome.SKIP))
            elif not self.run(name, check):
                how = "has failed" if self.lines[-1].verdict.outcome is Outcome.FAIL else "was not checked"
                missing = f"{name!r} {how}"

    def add(self, name: str, verdict: Verdict) -> None:
        """Add what is known already."""
        self.lines.append(Line(name, verdict))
        self._write(self.lines[-1])

    def names(self, outcome: Outcome) -> list[str]:
        """Return the names of the checks that ended so."""
        return [line.name for line in self.lines if line.verdict.outcome is outcome]

    @property
    def passed(self) -> bool:
        """Whether nothing has failed."""
        return not self.names(Outcome.FAIL)

    def summary(self) -> str:
        """Return the last line of the report."""
        failed, warned = self.names(Outcome.FAIL), self.names(Outcome.WARN)
        if failed:
            return f"Failed: {', '.join(failed)}."
        return "Nothing has failed." + (f" Look at: {', '.join(warned)}." if warned else "")

    def as_json(self) -> str:
        """Return the report as one JSON object."""
        checks = [
            {
                "name": line.name,
                "outcome": line.verdict.outcome.lower(),
                "text": line.verdict.text,
                "values": line.verdict.values,
            }
            for line in self.lines
        ]
        return json.dumps({"passed": self.passed, "checks": checks}, indent=2)
