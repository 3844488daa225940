"""What may be asked for in one message, what is remembered of it, and how often warnings are logged."""

import logging
import time

import pytest

from tests.support.control.samples import ENGINE, pack
from transfer.control.limits import (
    MAX_BORDERS,
    MAX_HASHES,
    MAX_ID_CHARACTERS,
    MAX_LEASE_IDS,
    MAX_READERS,
    LastFew,
    ThrottledWarnings,
)
from transfer.control.messages import (
    PROTOCOL_VERSION,
    Cancel,
    Checksums,
    Find,
    Follow,
    Hello,
    Locate,
    MalformedMessage,
    Release,
    Renew,
    Request,
    decode_request,
    encode,
)

logger = logging.getLogger("test")


LONG = "x" * (MAX_ID_CHARACTERS + 1)


@pytest.mark.parametrize(
    ("request_", "words"),
    [
        (Hello(LONG), "length <= 128 - at `$.engine_id`"),
        (Renew(ENGINE, ("lease",) * (MAX_LEASE_IDS + 1)), "length <= 20000 - at `$.lease_ids`"),
        (Renew(ENGINE, (), ("lease",) * (MAX_LEASE_IDS + 1)), "length <= 20000 - at `$.reading`"),
        (Cancel(ENGINE, ("lease",) * (MAX_LEASE_IDS + 1)), "length <= 20000 - at `$.lease_ids`"),
        (Cancel(ENGINE, (), ("id",) * (MAX_LEASE_IDS + 1)), "length <= 20000 - at `$.transfer_ids`"),
        (Renew(ENGINE, ("lease", LONG)), "length <= 128 - at `$.lease_ids[1]`"),
        (Follow(ENGINE, LONG), "length <= 128 - at `$.transfer_id`"),
        (Locate(ENGINE, LONG), "length <= 128 - at `$.lease_id`"),
        (Release(ENGINE, LONG, 0, 1, "pull", "c"), "length <= 128 - at `$.lease_id`"),
        (Release(ENGINE, "lease", 0, 1, LONG, "c"), "length <= 128 - at `$.pull_id`"),
        (Release(ENGINE, "lease", 0, 1, "pull", LONG), "length <= 128 - at `$.contents`"),
        (Release(ENGINE, "lease", 0, MAX_READERS + 1, "pull", "c"), "<= 65536 - at `$.readers`"),
        (Checksums(ENGINE, LONG, 0, 0, (0, 16)), "length <= 128 - at `$.lease_id`"),
        (Checksums(ENGINE, "lease", 0, 0, (0,) * (MAX_BORDERS + 1)), "length <= 4096 - at `$.borders`"),
        (
            Find("", "find", "sha256:00ff", 16, tuple(b"%d" % n for n in range(MAX_HASHES + 1))),
            "length <= 16384 - at `$.hashes`",
        ),
    ],
)
def test_what_is_above_a_limit_is_named(request_: Request, words: str) -> None:
    with pytest.raises(MalformedMessage) as refused:
        decode_request(encode(7, request_))
    assert words in str(refused.value)
    assert refused.value.message_id == 7


def test_a_hash_that_comes_twice_is_refused() -> None:
    body = {"type": "find", "engine_id": "", "find_id": "f", "hashing": "sha256:00ff", "hash_tokens": 16}
    frame = pack([PROTOCOL_VERSION, 7, body | {"hashes": [b"a", b"b", b"a"]}])
    with pytest.raises(MalformedMessage, match="a hash comes twice"):
        decode_request(frame)


@pytest.mark.parametrize(
    "request_",
    [
        Renew("e" * MAX_ID_CHARACTERS, ("l" * 32,) * MAX_LEASE_IDS),
        Release(ENGINE, "l" * MAX_ID_CHARACTERS, 0, MAX_READERS, "pull", "c"),
        Checksums(ENGINE, "lease", 0, 0, (0,) * MAX_BORDERS),
    ],
    ids=lambda request: type(request).__name__,
)
def test_the_limits_themselves_are_within(request_: Request) -> None:
    assert decode_request(encode(7, request_)) == (7, request_)


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


def test_what_was_set_longest_ago_is_forgotten() -> None:
    last: LastFew[str, int] = LastFew(2)
    for number, key in enumerate(("a", "b", "a", "c")):
        last[key] = number
    assert [*last.items()] == [("a", 2), ("c", 3)]
