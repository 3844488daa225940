"""What a check says, and a report of many: a line each."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum


class Outcome(StrEnum):
    """How a check ended, as its line begins."""

    OK = "ok"
    WARN = "WARN"  # it may work, or work badly
    FAIL = "FAIL"
    SKIP = "skip"  # not checked; the text says why


class CheckFailed(Exception):  # noqa: N818  named after the event
    """What was checked will not work; the message says what was found and the way out."""

    outcome = Outcome.FAIL


class CheckWarned(CheckFailed):
    """What was checked may not work, or work badly; the message says why."""

    outcome = Outcome.WARN


class CheckSkipped(CheckFailed):
    """This cannot be checked here; the message says why."""

    outcome = Outcome.SKIP


#: Returns what was found. Raises ``CheckFailed`` or one of its kinds if that is not good; whatever else it raises is a
#: failure, too.
Check = Callable[[], str]


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of a report."""

    name: str
    text: str
    outcome: Outcome = Outcome.OK

    def __str__(self) -> str:
        return f"{self.outcome:<4} {self.name}: {self.text}"


class Examination:
    """Runs checks one after another, and keeps what they have found."""

    def __init__(self, write: Callable[[Finding], object] = lambda _: None) -> None:
        """``write`` is called with every finding as soon as it is known."""
        self.findings: list[Finding] = []
        self._write = write

    def run(self, name: str, check: Check) -> Finding:
        """Run a check; return what it has found."""
        try:
            return self.add(Finding(name, check()))
        except CheckFailed as reason:
            return self.add(Finding(name, str(reason), reason.outcome))
        except Exception as error:  # whatever it is: the report must go on
            return self.add(Finding(name, f"{type(error).__name__}: {error}", Outcome.FAIL))

    def run_chain(self, checks: Sequence[tuple[str, Check]]) -> None:
        """Run checks of which each needs those before it; skip the rest when one has failed or was skipped."""
        missing = ""
        for name, check in checks:
            if missing:
                self.add(Finding(name, f"not checked: {missing}", Outcome.SKIP))
            elif (outcome := self.run(name, check).outcome) in (Outcome.FAIL, Outcome.SKIP):
                missing = f"{name!r} {'has failed' if outcome is Outcome.FAIL else 'was not checked'}"

    def add(self, finding: Finding) -> Finding:
        """Add what is known already, and return it."""
        self.findings.append(finding)
        self._write(finding)
        return finding

    def names(self, outcome: Outcome) -> list[str]:
        """Return the names of the checks that ended so."""
        return [finding.name for finding in self.findings if finding.outcome is outcome]

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
