import logging
import time

import pytest

from transfer.control.throttle import ThrottledWarnings

logger = logging.getLogger("test")


def test_the_first_of_a_cause_is_logged_and_the_others_are_counted(caplog: pytest.LogCaptureFixture) -> None:
    warnings = ThrottledWarnings(logger, interval_s=0.05)
    for _ in range(10):
        warnings.warn("malformed", "bad frame 100%")
    warnings.warn("version", "old peer")
    time.sleep(0.06)
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
