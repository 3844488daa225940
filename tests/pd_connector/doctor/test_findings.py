"""Reports: a line for each check, whatever a check does."""

import pytest

from pd_connector.doctor.findings import Check, CheckFailed, CheckSkipped, CheckWarned, Examination, Finding


def fails() -> str:
    raise CheckFailed("it is broken")


def skips() -> str:
    raise CheckSkipped("there is none here")


def breaks() -> str:
    raise ZeroDivisionError("by zero")


def warns() -> str:
    raise CheckWarned("slow")


def works() -> str:
    return "fast"


@pytest.mark.parametrize(
    ("check", "line", "passed"),
    [
        (works, "ok   one: fast", True),
        (warns, "WARN one: slow", True),
        (skips, "skip one: there is none here", True),
        (fails, "FAIL one: it is broken", False),
        (breaks, "FAIL one: ZeroDivisionError: by zero", False),
    ],
)
def test_a_check_is_a_line(check: Check, line: str, passed: bool) -> None:
    written: list[Finding] = []
    report = Examination(written.append)
    report.run("one", check)
    assert [str(one) for one in written] == [line]
    assert report.passed is passed


def test_a_chain_ends_at_its_first_failure() -> None:
    report = Examination()
    report.run_chain([("a", works), ("b", warns), ("c", fails), ("d", works), ("e", works)])
    assert [str(finding)[:4].strip() for finding in report.findings] == ["ok", "WARN", "FAIL", "skip", "skip"]
    assert str(report.findings[-1]) == "skip e: not checked: 'c' has failed"
    assert report.summary() == "Failed: c."


def test_a_chain_ends_at_what_cannot_be_checked() -> None:
    report = Examination()
    report.run_chain([("a", skips), ("b", works)])
    assert [str(finding) for finding in report.findings] == [
        "skip a: there is none here",
        "skip b: not checked: 'a' was not checked",
    ]
    assert report.passed


def test_the_summary_names_what_to_look_at() -> None:
    report = Examination()
    report.run_chain([("a", works), ("b", warns)])
    assert report.summary() == "Nothing has failed. Look at: b."
