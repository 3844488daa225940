"""Reports: a line for each check, whatever a check does, and the same as JSON."""

import json

import pytest

from pd_connector.doctor.findings import CheckFailed, CheckSkipped, Examination, Line, Outcome, Verdict


def fails() -> Verdict:
    raise CheckFailed("it is broken")


def skips() -> Verdict:
    raise CheckSkipped("there is none here")


def breaks() -> Verdict:
    raise ZeroDivisionError("by zero")


def warns() -> Verdict:
    return Verdict("slow", outcome=Outcome.WARN)


def works() -> Verdict:
    return Verdict("fast", {"speed": 3})


@pytest.mark.parametrize(
    ("check", "line", "goes_on", "passed"),
    [
        (works, "ok   one: fast", True, True),
        (warns, "WARN one: slow", True, True),
        (skips, "skip one: there is none here", False, True),
        (fails, "FAIL one: it is broken", False, False),
        (breaks, "FAIL one: ZeroDivisionError: by zero", False, False),
    ],
)
def test_a_check_is_a_line(check: object, line: str, goes_on: bool, passed: bool) -> None:
    written: list[Line] = []
    report = Examination(written.append)
    assert report.run("one", check) is goes_on  # type: ignore[arg-type]
    assert [str(one) for one in written] == [line]
    assert report.passed is passed


def test_a_chain_ends_at_its_first_failure() -> None:
    report = Examination()
    report.run_chain([("a", works), ("b", warns), ("c", fails), ("d", works), ("e", works)])
    assert [str(line)[:4].strip() for line in report.lines] == ["ok", "WARN", "FAIL", "skip", "skip"]
    assert str(report.lines[-1]) == "skip e: not checked: 'c' has failed"
    assert report.summary() == "Failed: c."


def test_a_chain_ends_at_what_cannot_be_checked() -> None:
    report = Examination()
    report.run_chain([("a", skips), ("b", works)])
    assert [str(line) for line in report.lines] == [
        "skip a: there is none here",
        "skip b: not checked: 'a' was not checked",
    ]
    assert report.passed


def test_the_summary_names_what_to_look_at() -> None:
    report = Examination()
    report.run_chain([("a", works), ("b", warns)])
    assert report.summary() == "Nothing has failed. Look at: b."


def test_json_has_the_same() -> None:
    report = Examination()
    report.run_chain([("a", works), ("b", fails)])
    assert json.loads(report.as_json()) == {
        "passed": False,
        "checks": [
            {"name": "a", "outcome": "ok", "text": "fast", "values": {"speed": 3}},
            {"name": "b", "outcome": "fail", "text": "it is broken", "values": {}},
        ],
    }
