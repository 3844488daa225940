"""The secret of a deployment is changed: all engines get the new file and are restarted, and no request fails.

Between the first restart and the last, pulls fail with cause ``denied``, and D computes those prompts.
"""

import secrets
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from tests.support.e2e.cluster import Cluster
from tests.support.e2e.deployments import PATIENT, decode, prefill
from tests.support.e2e.pair import Pair, assert_failed_pull, make_prompt
from tests.support.waiting import until

pytestmark = [pytest.mark.slow, pytest.mark.security, pytest.mark.timeout(1800)]

PROMPT_TOKENS = 200


@dataclass(frozen=True, slots=True)
class Keyed:
    """P and D, and the file that both read their secret from when they start."""

    pair: Pair
    file: Path

    def change(self) -> str:
        """Write another secret; return it."""
        secret = secrets.token_urlsafe(32)
        self.file.write_text(secret)
        return secret


@pytest.fixture
def keyed(cluster: Cluster, tmp_path: Path) -> Iterator[Keyed]:
    file = tmp_path / "secret"
    file.touch(mode=0o600)
    file.write_text(secrets.token_urlsafe(32))
    named = (("secret_file", str(file)),)
    specs = [
        replace(prefill(), options=(*prefill().options, *named)),
        replace(decode("recompute", patient=True), options=(*PATIENT, *named)),
    ]
    servers = cluster.start(specs)
    yield Keyed(Pair(*servers), file)
    cluster.stop(servers)


def meet_in_vain(pair: Pair) -> None:
    """The first prompt from an engine is computed, as its canary, which cannot be pulled."""
    before = pair.decode.client.metrics()
    pair.disaggregate(make_prompt(PROMPT_TOKENS, ("in vain", time.monotonic())))
    until(lambda: pair.decode.client.metrics().since(before).value("vllm:pd_canaries_total", outcome="failed") > 0)


def test_no_request_fails_while_the_secret_changes(keyed: Keyed, cluster: Cluster) -> None:
    pair = keyed.pair
    pair.get_acquainted()
    for change, order in enumerate(((pair.prefill, pair.decode), (pair.decode, pair.prefill))):
        new = keyed.change()
        pair.assert_pulls_right(make_prompt(PROMPT_TOKENS, ("both have the old one", change)))
        cluster.restart(order[0])
        meet_in_vain(pair)
        prompt = make_prompt(PROMPT_TOKENS, ("one has the new one", change))
        assert_failed_pull(pair, prompt, pair.prefill.client.prefill(prompt), "denied", ("secrets",))
        cluster.restart(order[1])
        pair.get_acquainted()
        pair.assert_pulls_right(make_prompt(PROMPT_TOKENS, ("both have the new one", change)))
        assert all(new not in server.log_since() for server in order)
