"""What happens where two servers do not fit, and when the prefill server dies: answers, errors, and after how long."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import httpx

from benchmarks.peers.connectors import Connector, Pair
from benchmarks.peers.rounds import ANSWER_TOKENS, Rounds
from benchmarks.peers.sending import Answer, RefusedError, Router, a_prompt
from benchmarks.peers.servers import Fleet, Shape

REQUESTS, TOKENS = 3, 500


@dataclass(frozen=True)
class Misfit:
    """Servers that differ in what pulling depends on."""

    name: str
    prefill: Shape
    decode: Shape


#: The first keeps the prefill servers of the last round.
BLOCK_SIZES = Misfit("block size 32 to 64", Shape(), Shape(block_tokens=64))
TYPES = Misfit("float16 to bfloat16", Shape(dtype="float16"), Shape(dtype="bfloat16"))


class Trouble:
    """Tries what should not go wrong silently."""

    def __init__(
        self, fleet: Fleet, router: Router, rounds: Rounds, chance: random.Random, compared: Sequence[Connector]
    ) -> None:
        self._fleet, self._router, self._rounds, self._chance = fleet, router, rounds, chance
        self._compared = compared

    def misfit(self, misfit: Misfit, say: Callable[[str], None]) -> list[dict[str, Any]]:
        """Return what comes of requests between servers that differ."""
        say(f"{misfit.name}: starting servers")
        pairs = self._fleet.become(self._compared, misfit.prefill, misfit.decode)
        rows = []
        for connector in self._compared:
            row: dict[str, Any] = {"case": misfit.name, "connector": connector.key}
            if connector.key in self._fleet.failures:
                rows.append(row | {"error": self._fleet.failures[connector.key]})
            else:
                rows.append(row | _outcome([self._asked(connector, pairs[connector.key]) for _ in range(REQUESTS)]))
        return rows

    def killed(self, say: Callable[[str], None]) -> list[dict[str, Any]]:
        """Return what comes of a decode leg whose P was killed, and of requests after P is back.

        Each connector's P is killed after it has answered its leg and before D's is sent.
        """
        say("prefill server killed: starting servers")
        pairs = self._fleet.become(self._compared, Shape(), Shape())
        rows = []
        for connector in self._compared:
            row: dict[str, Any] = {"case": "P killed", "connector": connector.key}
            if connector.key not in pairs:
                rows.append(row | {"error": self._fleet.failures[connector.key]})
                continue
            say(f"prefill server of {connector.label} killed")
            pair = pairs[connector.key]
            self._rounds.introduce(connector, pair)
            left = self._left_alone(connector, pair)
            rows.append(row | _outcome([left]))
            row["case"] = "after P's restart"
            back = self._fleet.restart_prefill(connector)
            if back is None:
                rows.append(row | {"error": self._fleet.failures[connector.key]})
            else:
                rows.append(row | _outcome([self._asked(connector, back) for _ in range(REQUESTS)]))
        return rows

    def _left_alone(self, connector: Connector, pair: Pair) -> tuple[Answer, tuple[int, ...]]:
        """Return what D answers when P has died between the legs, and what is right."""
        prompt, salt = a_prompt(self._chance, TOKENS), self._rounds.salt()
        right = self._router.alone(pair.decode_url, prompt, ANSWER_TOKENS, self._rounds.salt()).tokens
        contract = connector.contract(pair, "in turn")
        try:
            params = self._router.prefill(pair, prompt, salt, contract.for_prefill)
        except (httpx.HTTPError, RefusedError) as error:
            return Answer(error=str(error)), right
        finally:
            self._fleet.kill_prefill(connector)
        for_decode = params if contract.for_decode is None else contract.for_decode
        return self._router.decode(pair, prompt, ANSWER_TOKENS, salt, for_decode), right

    def _asked(self, connector: Connector, pair: Pair) -> tuple[Answer, tuple[int, ...]]:
        """Return what a request in two legs comes to, and what is right: what D computes alone."""
        prompt = a_prompt(self._chance, TOKENS)
        right = self._router.alone(pair.decode_url, prompt, ANSWER_TOKENS, self._rounds.salt())
        answer = self._router.send(connector, pair, "in turn", prompt, ANSWER_TOKENS, self._rounds.salt())
        return answer, right.tokens


def _outcome(answers: list[tuple[Answer, tuple[int, ...]]]) -> dict[str, Any]:
    errors = [answer.error for answer, _ in answers if answer.error]
    wrong = sum(not answer.error and answer.tokens != right for answer, right in answers)
    outcome: dict[str, Any] = {
        "requests": len(answers), "right": len(answers) - len(errors) - wrong, "wrong": wrong, "errors": len(errors),
        "longest_s": round(max(answer.total_s for answer, _ in answers), 2),
    }  # fmt: skip
    return outcome | ({"error": errors[0]} if errors else {})
