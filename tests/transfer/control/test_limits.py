"""What may be asked for in one message, and how often warnings are logged."""

import logging
import time

import pytest

from tests.support.control.samples import ENGINE, REQUESTS
from transfer.control.limits import (
    MAX_BORDERS,
    MAX_ID_CHARACTERS,
    MAX_LEASE_IDS,
    MAX_READERS,
    ThrottledWarnings,
    exceeded_limit,
)
from transfer.control.messages import Cancel, Checksums, Find, Hello, Release, Renew, Request

logger = logging.getLogger("test")


@pytest.mark.parametrize("request_", REQUESTS, ids=lambda request: type(request).__name__)
def test_usual_requests_are_within_the_limits(request_: Request) -> None:
    assert exceeded_limit(request_) == ""


LONG = "x" * (MAX_ID_CHARACTERS + 1)


@pytest.mark.parametrize(
    ("request_", "words"),
    [
        (Hello(LONG), "an id of 129 characters"),
        (Renew(ENGINE, ("lease",) * (MAX_LEASE_IDS + 1)), "20001 lease ids; at most 20000"),
        (Cancel(ENGINE, ("lease",) * (MAX_LEASE_IDS + 1)), "20001 lease ids; at most 20000"),
        (Renew(ENGINE, ("lease", LONG)), "an id of 129"),
        (Release(ENGINE, LONG, 0, 1, "pull", "c"), "an id of 129"),
        (Release(ENGINE, "lease", 0, 1, LONG, "c"), "an id of 129"),
        (Release(ENGINE, "lease", 0, 1, "pull", LONG), "an id of 129"),
        (Release(ENGINE, "lease", 0, MAX_READERS + 1, "pull", "c"), "65537 readers"),
        (Checksums(ENGINE, LONG, 0, 0, (0, 16)), "an id of 129"),
        (Checksums(ENGINE, "lease", 0, 0, (0,) * (MAX_BORDERS + 1)), "4097 borders; at most 4096"),
        (Find("", "find", "sha256:00ff", 16, (b"a", b"b", b"a"), 17), "a hash comes twice"),
    ],
)
def test_what_is_above_a_limit_is_named(request_: Request, words: str) -> None:
    assert words in exceeded_limit(request_)


def test_the_limits_themselves_are_within() -> None:
    assert not exceeded_limit(Renew("e" * MAX_ID_CHARACTERS, ("l" * MAX_ID_CHARACTERS,) * MAX_LEASE_IDS))
    assert not exceeded_limit(Release(ENGINE, "lease", 0, MAX_READERS, "pull", "c"))
    assert not exceeded_limit(Checksums(ENGINE, "lease", 0, 0, (0,) * MAX_BORDERS))


def test_the_first_of_a_cause_is_logged_and_the_others_are_counted(caplog: pytest.LogCaptureFixture) -> None:
    warnings = ThrottledWarnings(logger, interval_s=0.5)
    for _ in range(10):
        warnings.warn("malformed", "bad frame 100%")
    warnings.warn("version", "old peer")
    time.sleep(0.55)
    warnings.warn("malformed", "bad frame 100%")
    assert [record.message for record in caplog.records] == [
        "bad frame 100%",
        "old peer",
        "bad frame 100% (and 9 more like it since the last such line)",
    ]


def test_an_error_is_logged_with_its_traceback(caplog: pytest.LogCaptureFixture) -> None:
    warnings = ThrottledWarnings(logger, interval_s=60)
    try:
        raise KeyError("lease")
    except KeyError as error:
        warnings.warn("handler", "it failed", error=error)
    assert "KeyError: 'lease'" in caplog.text
