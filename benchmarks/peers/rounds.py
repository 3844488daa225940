"""What is measured between right servers: tensor parallel sizes, layouts, lengths, alone and eight at once.

One round is one layout and one pair of tensor parallel sizes, with a pair of servers for each connector. Every prompt
goes to all of them, and to one server that computes it without disaggregation, whose answer is the right one.
"""

import random
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import get_args

from benchmarks.peers import connectors
from benchmarks.peers.budget import Budget
from benchmarks.peers.connectors import Connector, Legs, Pair
from benchmarks.peers.counters import Moved, moved_since, now
from benchmarks.peers.model import TOKEN_BYTES
from benchmarks.peers.sending import NO_ANSWER, Answer, Prompt, Router, a_prompt, at_once, failed
from benchmarks.peers.servers import CHUNK_TOKENS, Fleet, Layout, Shape
from benchmarks.peers.summary import ALONE, Case, Sample

LAYOUTS: tuple[Layout, ...] = get_args(Layout)
ANSWER_TOKENS, ONE_TOKEN_REPEATS, WARM_UP_TOKENS = 8, 9, 200
LEAST_REPEATS, LEAST_BURSTS = 2, 1
#: A way that has timed out so often is not asked again in this round; one that was left out before, after the first.
TIMEOUTS = 2
LEFT_OUT = "not sent: earlier ones timed out"
MANY_SHARE = 0.4  # of a round, for many at once; the rest is for its lengths


@dataclass(frozen=True)
class Round:
    """Servers that are measured together."""

    layout: Layout
    prefill_tp: int
    decode_tp: int
    lengths: tuple[int, ...] = ()  # of the plan's, those that are measured; all if none
    many_at_once: bool = True

    @property
    def name(self) -> str:
        """As it stands in results and on the command line."""
        return f"{self.layout}/{self.prefill_tp}-{self.decode_tp}"

    @property
    def shapes(self) -> tuple[Shape, Shape]:
        """P's and D's."""
        return Shape(self.prefill_tp, self.layout), Shape(self.decode_tp, self.layout)

    @classmethod
    def named(cls, name: str) -> "Round":
        """Return the round of that name.

        Raises:
            ValueError: it is none, or of another layout.
        """
        layout, _, sizes = name.partition("/")
        if layout not in LAYOUTS:
            raise ValueError(f"{name!r} is no round: LAYOUT/P-D, and the layouts are {', '.join(LAYOUTS)}")
        prefill_tp, decode_tp = sizes.split("-")
        return cls(layout, int(prefill_tp), int(decode_tp))

    def lengths_of(self, plan: "Plan") -> tuple[int, ...]:
        """Return the lengths of prompts, in tokens."""
        return tuple(each for each in plan.lengths if each in self.lengths) if self.lengths else plan.lengths


#: In an order in which most rounds keep half of the servers before them, also of those whose prefill servers are killed
#: and whose block sizes differ, which come after the second. All lengths, and many at once, in one of them,
#: and the other layout at TP 1 to 1 only: everything everywhere would take more time than a run has.
ROUNDS = (
    Round("LBHNC", 2, 1, (2000,), many_at_once=False),
    Round("LBHNC", 1, 1),
    Round("LBHNC", 1, 2, (2000,), many_at_once=False),
    Round("BHLNC", 1, 1, (2000, 3500), many_at_once=False),
)


@dataclass(frozen=True)
class Plan:
    """How much is measured."""

    rounds: tuple[Round, ...] = ROUNDS
    lengths: tuple[int, ...] = (500, 2000, 3500)
    repeats: int = 7  # prompts of each length, at most
    clients: int = 8
    burst_tokens: int = 500
    bursts: int = 2  # at most
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


Taken = tuple[Way, list[Answer], Moved]


class Rounds:
    """Measures round by round."""

    def __init__(
        self, fleet: Fleet, router: Router, plan: Plan, chance: random.Random, budget: Budget, patient: Router
    ) -> None:
        """``patient``: sends the first request to a server."""
        self._fleet, self._router, self._plan, self._chance, self._budget = fleet, router, plan, chance, budget
        self._patient = patient
        self._salts = count()
        self._timeouts: Counter[tuple[str, Legs]] = Counter()
        #: Connectors that have failed in this round: their servers may no longer be what they were.
        self._ailing: set[str] = set()
        #: Servers that did not start and first requests that were refused: by round and connector, why.
        self.failures: dict[str, dict[str, str]] = {}

    def run(self, number: int, say: Callable[[str], None]) -> Iterator[Sample]:
        """Yield what was measured in a round of the plan, a sample for each request.

        The longest prompts come last, and a connector that fails has new servers afterwards: what one request breaks
        does not count against those that have nothing to do with it.
        """
        plan, measured = self._plan, self._plan.rounds[number]
        say(f"{measured.name}: starting servers")
        self._ailing.clear()
        pairs = self.become(plan.connectors, *measured.shapes)
        self._failed(measured, self._fleet.failures)
        #: Those that were left out in the last round have one more attempt.
        self._timeouts = Counter({way: TIMEOUTS - 1 for way, times in self._timeouts.items() if times >= TIMEOUTS})
        ways = self._ways(measured, pairs)
        share_s = self._budget.share_s(len(plan.rounds) - number)
        begin = time.monotonic()
        ends = begin + share_s
        say(f"{measured.name}: {share_s:.0f} s to measure")
        case = partial(Case, measured.layout, measured.prefill_tp, measured.decode_tp)
        if measured.many_at_once:
            say(f"{measured.name}: {plan.clients} at once")
            yield from self._bursts(ways, partial(case, plan.burst_tokens, plan.clients), begin + MANY_SHARE * share_s)
        lengths = measured.lengths_of(plan)
        for place, tokens in enumerate(lengths):
            say(f"{measured.name}: {tokens} tokens")
            part = tokens / sum(lengths[place:])
            until = time.monotonic() + part * max(0.0, ends - time.monotonic())
            yield from self._lengths(ways, partial(case, tokens, 1), tokens, until)
        for key in sorted(self._ailing):
            self._fleet.retire(key)

    def become(self, compared: Sequence[Connector], prefill: Shape, decode: Shape) -> dict[str, Pair]:
        """Have servers of these shapes, and keep how long they took to start."""
        begin, before = time.monotonic(), self._fleet.starts
        pairs = self._fleet.become(compared, prefill, decode)
        self._budget.started(self._fleet.starts - before, time.monotonic() - begin)
        return pairs

    def _failed(self, measured: Round, reasons: Mapping[str, str]) -> None:
        if reasons:
            self.failures.setdefault(measured.name, {}).update(reasons)

    def salt(self) -> str:
        """Return a salt that keeps a request from finding another's blocks."""
        return f"request {next(self._salts)}"

    def introduce(self, connector: Connector, pair: Pair) -> str:
        """Send first requests, and keep what P says of itself, as a router knows it.

        Returns:
            Why one of them failed, or nothing.
        """
        self._fleet.attend(pair)
        prompt = a_prompt(self._chance, WARM_UP_TOKENS)
        if connector is connectors.OURS:
            salt = self.salt()
            try:
                params = self._patient.prefill(pair, prompt, salt, {"do_remote_decode": True})
            except NO_ANSWER as error:
                self._ailing.add(connector.key)
                return f"the first request: {failed(error).error}"
            pair.learnt.update(params or {})
            self._patient.decode(pair, prompt, 2, salt, params)  # which ends the lease
        for legs in connector.legs:
            answer = self._patient.send(connector, pair, legs, prompt, 2, self.salt())
            self._noted(connector.key, legs, [answer])
            if answer.error:
                return f"the first request, both legs {legs}: {answer.error}"
        return ""

    def _noted(self, key: str, legs: Legs, answers: Sequence[Answer]) -> None:
        if key != ALONE and any(answer.error for answer in answers):
            self._ailing.add(key)
        self._timeouts[key, legs] += sum(answer.timed_out for answer in answers)

    def _ways(self, measured: Round, pairs: Mapping[str, Pair]) -> list[Way]:
        """Return all ways, the servers warm. One whose first request fails is asked all the same: it may recover."""
        ways: list[Way] = []
        for connector in self._plan.connectors:
            if connector.key in pairs:
                pair = pairs[connector.key]
                if reason := self.introduce(connector, pair):
                    self._failed(measured, {connector.key: reason})
                least_s = self.one_token_s(pair)
                ways += [Way(connector, legs, pair, least_s) for legs in connector.legs]
        return ways + ([Way(None, "in turn", ways[0].pair, 0.0)] if ways else [])

    def one_token_s(self, pair: Pair) -> float:
        """Return the median of what a request of one token takes at the decode server."""
        answers = [
            self._router.alone(pair.decode_url, a_prompt(self._chance, 1), 1, self.salt())
            for _ in range(ONE_TOKEN_REPEATS)
        ]
        return statistics.median([answer.first_token_s for answer in answers if not answer.error] or [0.0])

    def _lengths(self, ways: Sequence[Way], case: Callable[..., Case], tokens: int, until: float) -> Iterator[Sample]:
        """Send a prompt each time to all ways in turn, another one first each time, until the time is over.

        The first is not counted. It has only as many tokens as bring the same chunks.
        """
        self._asked(ways, [a_prompt(self._chance, min(tokens, CHUNK_TOKENS + tokens % CHUNK_TOKENS))], 0)
        for number in range(1, self._plan.repeats + 1):
            if number > LEAST_REPEATS and time.monotonic() > until:
                return
            yield from self._samples(self._asked(ways, [a_prompt(self._chance, tokens)], number), case)

    def _bursts(self, ways: Sequence[Way], case: Callable[..., Case], until: float) -> Iterator[Sample]:
        """Send as many prompts as there are clients at once, to all ways in turn; the first burst is not counted."""
        for number in range(self._plan.bursts + 1):
            if number > LEAST_BURSTS and time.monotonic() > until:
                return
            prompts = [a_prompt(self._chance, self._plan.burst_tokens) for _ in range(self._plan.clients)]
            taken = self._asked(ways, prompts, number)
            if number:
                yield from self._samples(taken, case)

    def _asked(self, ways: Sequence[Way], prompts: Sequence[Prompt], number: int) -> list[Taken]:
        """Return what all ways answer, another one first each time."""
        first = number % max(len(ways), 1)
        return [(way, *self._measure(way, prompts)) for way in (*ways[first:], *ways[:first])]

    def _samples(self, taken: Sequence[Taken], case: Callable[..., Case]) -> Iterator[Sample]:
        right = [answers for way, answers, _ in taken if way.connector is None]
        for way, answers, moved in taken:
            of = case(way.key, way.legs)
            for index, (answer, reference) in enumerate(zip(answers, right[0], strict=True)):
                wrong = not answer.error and not reference.error and answer.tokens != reference.tokens
                yield Sample(of, answer, wrong, way.least_s, moved if index == 0 else Moved())

    def _measure(self, way: Way, prompts: Sequence[Prompt]) -> tuple[list[Answer], Moved]:
        """Have prompts answered at once, or say that a way is left out which has timed out before."""
        connector, pair = way.connector, way.pair
        if self._timeouts[way.key, way.legs] >= TIMEOUTS:
            return [Answer(error=LEFT_OUT)] * len(prompts), Moved()
        self._fleet.attend(pair)
        if connector is None:
            sends = [partial(self._router.alone, pair.decode_url, each, ANSWER_TOKENS, self.salt()) for each in prompts]
            answers = at_once(sends)
            self._noted(way.key, way.legs, answers)
            return answers, Moved()
        counted = partial(connector.counted, pair)
        before = now(counted)
        answers = at_once([
            partial(self._router.send, connector, pair, way.legs, prompt, ANSWER_TOKENS, self.salt())
            for prompt in prompts
        ])  # fmt: skip
        self._noted(way.key, way.legs, answers)
        complete = sum(len(prompt) for prompt, answer in zip(prompts, answers, strict=True) if not answer.error)
        # Less the last block of each, which may be moved as far as it is filled.
        expected = max(complete - 64 * len(prompts), 0) * TOKEN_BYTES
        return answers, moved_since(counted, before, expected)
