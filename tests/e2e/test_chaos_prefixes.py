"""Conversations whose prefixes P pulls from D, while both die and stop: no wrong token, no request that does not end.

Neither device has room for all of them: P forgets them, and much of what D is asked for lies in its host memory. Nobody
tells P whom to ask: it remembers who has read a conversation.
"""

import random
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field

import httpx
import pytest

from tests.support.e2e.client import Completion
from tests.support.e2e.cluster import Cluster
from tests.support.e2e.deployments import on
from tests.support.e2e.pair import Pair, make_prompt
from tests.support.e2e.prefix_deployments import CHAOS_PREFIXES
from tests.support.e2e.trouble import Side, Trouble
from tests.support.waiting import until

CHATS, TURNS, CLIENTS, ANSWER = 40, 4, 5, 40
KILLS: tuple[Side, ...] = ("decode", "prefill")
ATTEMPTS = 6

pytestmark = [pytest.mark.chaos, pytest.mark.slow, pytest.mark.timeout(1500), on(CHAOS_PREFIXES)]


@dataclass
class Chat:
    """What was asked in one conversation, and the answers."""

    turns: list[tuple[list[int], Completion]] = field(default_factory=list)
    other_ends: Counter[str] = field(default_factory=Counter)  # of turns that were then asked again
    longest_s: float = 0.0


def turn(trouble: Trouble, prompt: list[int]) -> Completion | None:
    """Both legs of a request in turn; None if a server was killed meanwhile."""
    pair = trouble.router.pair
    with suppress(httpx.HTTPError):
        prefilled = pair.prefill.client.complete(prompt, 1, kv_transfer_params={"do_remote_decode": True})
        if prefilled.status != 200:
            return prefilled
        return pair.decode_leg(prompt, prefilled.kv_transfer_params or {}, ANSWER)
    return None


def talk(trouble: Trouble, number: int) -> Chat:
    """A conversation to its end. A turn that fails is asked again, as a client would."""
    chance, chat = random.Random(number), Chat()
    history = make_prompt(chance.randrange(500, 1300), ("chaos prefixes", number))
    while len(chat.turns) < TURNS:
        prompt = [*history, *make_prompt(chance.randrange(5, 100), (number, len(chat.turns)))]
        trouble.wait_for_servers()
        began = time.monotonic()
        answer = turn(trouble, prompt)
        chat.longest_s = max(chat.longest_s, time.monotonic() - began)
        if answer is None or answer.status != 200:
            chat.other_ends["killed" if answer is None else str(answer.status)] += 1
            assert chat.other_ends.total() < ATTEMPTS, f"chat {number}: {chat.other_ends}"
            continue
        chat.turns.append((prompt, answer))
        history = [*prompt, *answer.tokens]
    return chat


@pytest.mark.parametrize("pair", [("P", "D")], indirect=True, ids="-".join)
def test_conversations_in_trouble(pair: Pair, cluster: Cluster, figures: list[str]) -> None:
    with Trouble(pair, cluster, 3, KILLS) as trouble, ThreadPoolExecutor(CLIENTS) as clients:
        chats = list(clients.map(lambda number: talk(trouble, number), range(CHATS)))
    for server in (pair.prefill, pair.decode):
        until(server.client.is_healthy, f"{server.spec.name} answers again")
    pair.wait_until_at_rest()
    ended = sum((chat.other_ends for chat in chats), Counter[str]())
    found = pair.prefill.client.metrics()
    tokens, in_host = (found.value(f"vllm:pd_{name}_total") for name in ("prefix_tokens", "pull_bytes_from_host"))
    figures.append(
        f"{CHATS} chats of {TURNS} turns, {dict(trouble.caused)}, asked again after {dict(ended)}; since P's restart "
        f"it pulled {tokens:.0f} tokens of prefixes, {in_host / 2**20:.0f} MiB in all from host memory"
    )
    assert trouble.caused["killed prefill"] == trouble.caused["killed decode"] == 1
    assert set(ended) <= {"killed"}
    assert max(chat.longest_s for chat in chats) < 100.0
    for chat in chats:
        for prompt, answer in chat.turns:
            pair.assert_right(answer, prompt)
    assert tokens > 0
