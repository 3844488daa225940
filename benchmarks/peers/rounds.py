"""What is measured between right servers: tensor parallel sizes, layouts, lengths, alone and eight at once.

One round is one layout and one pair of tensor parallel sizes, with a pair of servers for each connector. Every prompt
goes to all of them, and to one server that computes it without disaggregation, whose answer is the right one.
"""

import random
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count

from benchmarks.peers import connectors
from benchmarks.peers.connectors import Connector, Legs, Pair
from benchmarks.peers.counters import Moved, moved_since, now
from benchmarks.peers.model import TOKEN_BYTES
from benchmarks.peers.sending import Answer, Prompt, Router, a_prompt, at_once
from benchmarks.peers.servers import Fleet, Layout, Shape
from benchmarks.peers.summary import Case, Sample

#: P's and D's tensor parallel size, in an order in which every round keeps half of the last one's servers.
SIZES = ((2, 1), (1, 1), (1, 2))
LAYOUTS: tuple[Layout, ...] = ("LBHNC", "BHLNC")
ANSWER_TOKENS, ONE_TOKEN_REPEATS, WARM_UP_TOKENS, LEAST_REPEATS = 8, 9, 200, 3
ALONE = "alone"


@dataclass(frozen=True)
class Plan:
    """How much is measured."""

    lengths: tuple[int, ...] = (500, 2000, 3500)
    repeats: int = 7  # prompts of each length, at most
    round_s: float = 80.0  # in which all lengths of a round should be done: fewer repeats, but no less than three
    clients: int = 8
    burst_tokens: int = 500
    bursts: int = 2
    sizes: tuple[tuple[int, int], ...] = SIZES
    layouts: tuple[Layout, ...] = LAYOUTS
    connectors: tuple[Connector, ...] = connectors.ALL


@dataclass(frozen=True)
class Way:
    """One way to have a prompt answered."""

    connector: Connector | None  # None: one server computes all of it
    legs: Legs
    pair: Pair
    least_s: float

    @property
    def key(self) -> str:
        """The connector's, or ``ALONE``."""
        return self.connector.key if self.connector else ALONE


class Rounds:
    """Measures round by round."""

    def __init__(self, fleet: Fleet, router: Router, plan: Plan, chance: random.Random) -> None:
        self._fleet, self._router, self._plan, self._chance = fleet, router, plan, chance
        self._salts = count()
        #: Servers that did not start, by what they should have been.
        self.failures: list[dict[str, object]] = []

    def run(self, say: Callable[[str], None]) -> Iterator[Sample]:
        """Yield what was measured, a sample for each request."""
        for layout in self._plan.layouts:
            for prefill_tp, decode_tp in self._plan.sizes:
                say(f"{layout}, TP {prefill_tp} to {decode_tp}: starting servers")
                prefill, decode = Shape(prefill_tp, layout), Shape(decode_tp, layout)
                pairs = self._fleet.become(self._plan.connectors, prefill, decode)
                for key, reason in self._fleet.failures.items():
                    self.failures.append({"layout": layout, "prefill_tp": prefill_tp, "decode_tp": decode_tp,
                                          "connector": key, "error": reason})  # fmt: skip
                ways = self._ways(pairs)
                for tokens in self._plan.lengths:
                    say(f"{layout}, TP {prefill_tp} to {decode_tp}: {tokens} tokens")
                    yield from self._one_by_one(ways, partial(Case, layout, prefill_tp, decode_tp, tokens, 1), tokens)
                say(f"{layout}, TP {prefill_tp} to {decode_tp}: {self._plan.clients} at once")
                case = partial(Case, layout, prefill_tp, decode_tp, self._plan.burst_tokens, self._plan.clients)
                yield from self._bursts(ways, case)

    def salt(self) -> str:
        """Return a salt that keeps a request from finding another's blocks."""
        return f"request {next(self._salts)}"

    def introduce(self, connector: Connector, pair: Pair) -> None:
        """Send a first request, and keep what P says of itself, as a router knows it."""
        prompt = a_prompt(self._chance, WARM_UP_TOKENS)
        if connector is connectors.OURS:
            salt = self.salt()
            params = self._router.prefill(pair, prompt, salt, {"do_remote_decode": True})
            pair.learnt.update(params or {})
            self._router.decode(pair, prompt, 2, salt, params)
        for legs in connector.legs:
            self._router.send(connector, pair, legs, prompt, 2, self.salt())

    def _ways(self, pairs: Mapping[str, Pair]) -> list[Way]:
        """Return all ways, the servers warm."""
        ways: list[Way] = []
        for connector in self._plan.connectors:
            if connector.key in pairs:
                pair = pairs[connector.key]
                self.introduce(connector, pair)
                least_s = self._one_token_s(pair)
                ways += [Way(connector, legs, pair, least_s) for legs in connector.legs]
        return ways + ([Way(None, "in turn", ways[0].pair, 0.0)] if ways else [])

    def _one_token_s(self, pair: Pair) -> float:
        """Return the median of what a request of one token takes at the decode server."""
        answers = [
            self._router.alone(pair.decode_url, a_prompt(self._chance, 1), 1, self.salt())
            for _ in range(ONE_TOKEN_REPEATS)
        ]
        return statistics.median(answer.first_token_s for answer in answers)

    def _one_by_one(self, ways: Sequence[Way], case: Callable[..., Case], tokens: int) -> Iterator[Sample]:
        """Send a prompt each time to all ways in turn, another one first each time; the first is not counted."""
        ends = time.monotonic() + self._plan.round_s * tokens / sum(self._plan.lengths)
        for number in range(self._plan.repeats + 1):
            if number > LEAST_REPEATS and time.monotonic() > ends:
                return
            prompt = a_prompt(self._chance, tokens)
            first = number % max(len(ways), 1)
            taken = [(way, *self._measure(way, [prompt])) for way in (*ways[first:], *ways[:first])]
            right = [answers for way, answers, _ in taken if way.connector is None]
            if number:
                yield from self._samples(taken, right, case)

    def _bursts(self, ways: Sequence[Way], case: Callable[..., Case]) -> Iterator[Sample]:
        """Send as many prompts as there are clients at once, to all ways in turn; the first burst is not counted."""
        for number in range(self._plan.bursts + 1):
            prompts = [a_prompt(self._chance, self._plan.burst_tokens) for _ in range(self._plan.clients)]
            first = number % max(len(ways), 1)
            taken = [(way, *self._measure(way, prompts)) for way in (*ways[first:], *ways[:first])]
            right = [answers for way, answers, _ in taken if way.connector is None]
            if number:
                yield from self._samples(taken, right, case)

    def _samples(
        self, taken: Sequence[tuple[Way, list[Answer], Moved]], right: Sequence[list[Answer]], case: Callable[..., Case]
    ) -> Iterator[Sample]:
        for way, answers, moved in taken:
            of = case(way.key, way.legs)
            for index, (answer, reference) in enumerate(zip(answers, right[0], strict=True)):
                wrong = not answer.error and not reference.error and answer.tokens != reference.tokens
                yield Sample(of, answer, wrong, way.least_s, moved if index == 0 else Moved())

    def _measure(self, way: Way, prompts: Sequence[Prompt]) -> tuple[list[Answer], Moved]:
        """Have prompts answered at once."""
        connector, pair = way.connector, way.pair
        if connector is None:
            sends = [partial(self._router.alone, pair.decode_url, each, ANSWER_TOKENS, self.salt()) for each in prompts]
            return at_once(sends), Moved()
        counted = partial(connector.counted, pair)
        before = now(counted)
        answers = at_once([
            partial(self._router.send, connector, pair, way.legs, prompt, ANSWER_TOKENS, self.salt())
            for prompt in prompts
        ])  # fmt: skip
        complete = sum(len(prompt) for prompt, answer in zip(prompts, answers, strict=True) if not answer.error)
        # Less the last block of each, which may be moved as far as it is filled.
        expected = max(complete - 64 * len(prompts), 0) * TOKEN_BYTES
        return answers, moved_since(counted, before, expected)
