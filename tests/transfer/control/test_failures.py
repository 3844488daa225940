"""What a peer writes is one line of the log.

Covers: transfer/control/failures.py, transfer/errors.py.
"""

from transfer.control.failures import PeerRefused


def test_the_words_of_a_peer_are_one_printable_line() -> None:
    words = "no\r\n2026-01-01 ERROR: \x1b[31mfalse\u202e\u2028end"
    refused = PeerRefused(host="::1", port=8998, request_type="find", code="a\nb", reason=words)
    assert str(refused) == "[::1]:8998 refused 'find': a b: no  2026-01-01 ERROR:  [31mfalse  end"
    assert refused.reason.isprintable()
