"""What happens where two servers do not fit, when the prefill server dies, and to hybrids: answers, errors, times."""

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from benchmarks.peers.connectors import Connector, Pair
from benchmarks.peers.rounds import ANSWER_TOKENS, Rounds
from benchmarks.peers.sending import NO_ANSWER, Answer, Router, a_prompt, failed
from benchmarks.peers.servers import Fleet, Shape
from benchmarks.peers.summary import percentiles

REQUESTS, WARM_REQUESTS, TOKENS, TIMEOUT_S = 3, 12, 500, 15.0
Outcomes = dict[str, dict[str, Any]]


@dataclass(frozen=True)
class Situation:
    """Servers to which something happens, or that differ in what pulling depends on."""

    name: str
    prefill: Shape
    decode: Shape

    @property
    def shapes(self) -> tuple[Shape, Shape]:
        """P's and D's."""
        return self.prefill, self.decode


KILLED = Situation("killed", Shape(), Shape())
BLOCK_SIZES = Situation(
    "block size 32 to 64", Shape(), Shape(block_tokens=64)
)  # keeps the prefill servers of ``KILLED``
TYPES = Situation("float16 to bfloat16", Shape(dtype="float16"), Shape(dtype="bfloat16"))
#: In blocks that hold a state at both sizes.
_HYBRID = Shape(block_tokens=96, model="hybrid")
HYBRIDS = (
    Situation("hybrid, TP 1 to 1", _HYBRID, _HYBRID),
    Situation("hybrid, TP 1 to 2", _HYBRID, replace(_HYBRID, tensor_parallel=2)),
)


class Trouble:
    """Tries what should not go wrong silently. Results are by case and connector."""

    def __init__(self, fleet: Fleet, rounds: Rounds, chance: random.Random, compared: Sequence[Connector]) -> None:
        self._fleet, self._rounds, self._chance, self._compared = fleet, rounds, chance, compared
        self._router = Router(TIMEOUT_S)

    def close(self) -> None:
        """Close the connections."""
        self._router.close()

    def misfit(self, misfit: Situation, say: Callable[[str], None]) -> dict[str, Outcomes]:
        """Return what comes of requests between servers that differ."""
        say(f"{misfit.name}: starting servers")
        pairs = self._rounds.become(self._compared, misfit.prefill, misfit.decode)
        say(f"{misfit.name}: asking")
        return {misfit.name: self._outcomes(pairs, self._warm if misfit in HYBRIDS else self._cold)}

    def killed(self, say: Callable[[str], None]) -> dict[str, Outcomes]:
        """Return what comes of a decode leg whose P was killed, and of requests after P is back.

        Each connector's P is killed after it has answered its leg and before D's is sent. Then all start again at once.
        """
        say("prefill servers killed: starting servers")
        pairs = self._rounds.become(self._compared, *KILLED.shapes)
        died: Outcomes = {key: {"error": reason} for key, reason in self._fleet.failures.items()}
        alive = [connector for connector in self._compared if connector.key in pairs]
        for connector in alive:
            say(f"prefill server of {connector.label} killed")
            pair = pairs[connector.key]
            self._rounds.introduce(connector, pair)
            died[connector.key] = outcome([self._left_alone(connector, pair)])
        say("the killed prefill servers start again")
        back = self._fleet.restart_prefill(alive)
        return {"P killed": died, "after P's restart": self._outcomes(back, self._cold)}

    def _outcomes(self, pairs: Mapping[str, Pair], of: Callable[[Connector, Pair], dict[str, Any]]) -> Outcomes:
        """Return what comes of each connector's requests; of those whose servers do not run, why."""
        outcomes: Outcomes = {key: {"error": reason} for key, reason in self._fleet.failures.items()}
        for connector in self._compared:
            if connector.key in pairs:
                outcomes[connector.key] = of(connector, pairs[connector.key])
        return outcomes

    def _cold(self, connector: Connector, pair: Pair) -> dict[str, Any]:
        """Return what comes of the first few requests."""
        return outcome(self._several(connector, pair, REQUESTS))

    def _warm(self, connector: Connector, pair: Pair) -> dict[str, Any]:
        """Return what comes of more requests after the first ones, with their handover times."""
        reason = self._rounds.introduce(connector, pair)
        least_s = self._rounds.one_token_s(pair)
        row = outcome(self._several(connector, pair, WARM_REQUESTS), least_s)
        return row | ({"error": reason} if reason else {})

    def _several(self, connector: Connector, pair: Pair, requests: int) -> list[tuple[Answer, tuple[int, ...]]]:
        """Send some requests, and no more after one that has timed out."""
        answers: list[tuple[Answer, tuple[int, ...]]] = []
        self._fleet.attend(pair)
        while len(answers) < requests and not any(answer.timed_out for answer, _ in answers):
            answers.append(self._asked(connector, pair))
        return answers

    def _left_alone(self, connector: Connector, pair: Pair) -> tuple[Answer, tuple[int, ...]]:
        """Return what D answers when P has died between the legs, and what is right."""
        prompt, salt = a_prompt(self._chance, TOKENS), self._rounds.salt()
        right = self._router.alone(pair.decode_url, prompt, ANSWER_TOKENS, self._rounds.salt()).tokens
        try:
            contract = connector.contract(pair, "in turn")
            params = self._router.prefill(pair, prompt, salt, contract.for_prefill)
        except NO_ANSWER as error:
            return failed(error), right
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


def outcome(answers: Sequence[tuple[Answer, tuple[int, ...]]], least_s: float | None = None) -> dict[str, Any]:
    """Return a row of the results, of answers with what is right.

    With handover times where it is known what a request of one token takes at the decode server.
    """
    errors = [answer.error for answer, _ in answers if answer.error]
    wrong = sum(not answer.error and answer.tokens != right for answer, right in answers)
    row: dict[str, Any] = {
        "requests": len(answers), "right": len(answers) - len(errors) - wrong, "wrong": wrong, "errors": len(errors),
        "longest_s": round(max((answer.total_s for answer, _ in answers), default=0.0), 2),
    }  # fmt: skip
    if least_s is not None and len(answers) > len(errors):
        row["handover_ms"] = percentiles(
            answer.first_token_s - answer.prefilled_s - least_s for answer, _ in answers if not answer.error
        )
    return row | ({"error": errors[0]} if errors else {})
