"""Has a decode server prove its prefill server, so that everything that is asked afterwards is pulled.

It computes the first prompt from there itself, pulls it as well, and compares the two.
"""

import secrets
import time

from examples.quickstart import metrics, questions

_TIMEOUT_S = 30.0
_POLL_S = 0.1
_OUTCOMES = ("proven", "differs", "failed", "left")


def prove(proxy: str, decode: str, model: str) -> None:
    """Ask the proxy something, and return when the decode server behind it has proven the prefill server.

    Args:
        proxy: URL of the proxy, in front of one prefill server and the decode server.
        decode: URL of the decode server.
        model: its name there.

    Raises:
        QuestionFailed: it is not proven, or the question was not answered.
    """
    before = metrics.scrape(decode)
    questions.ask(proxy, model, questions.some_blocks(), secrets.token_hex(8))
    outcome = _outcome(decode, before)
    if outcome != "proven":
        raise questions.QuestionFailed(
            "D has not found that P computes the same keys and values: its canary "
            + (f"ended as {outcome!r}" if outcome else f"has not ended within {_TIMEOUT_S:.0f} s")
        )


def _outcome(decode: str, before: metrics.Snapshot) -> str:
    """How the first canary since ``before`` has ended; empty if none has in time."""
    name, deadline = "vllm:pd_canaries_total", time.monotonic() + _TIMEOUT_S
    while time.monotonic() < deadline:
        after = metrics.scrape(decode)
        for outcome in _OUTCOMES:
            if after.total(name, outcome=outcome) > before.total(name, outcome=outcome):
                return outcome
        time.sleep(_POLL_S)
    return ""
