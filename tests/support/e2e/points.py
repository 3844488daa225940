"""Requests that a test has brought to a chosen point, and what then happens to one of the servers."""

import signal
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import Literal, Self

import httpx

from tests.support.e2e.client import Completion, KVTransferParams
from tests.support.e2e.cluster import Cluster, Server
from tests.support.e2e.deployments import CHAOS_LEASE_TTL_S, CHAOS_PULL_TIMEOUT_S
from tests.support.e2e.host_memory import wait_until_nothing_is_lent
from tests.support.e2e.pair import Pair, make_prompt
from tests.support.e2e.trouble import Side, stopped
from tests.support.waiting import until

#: More than half of a decode server's device blocks, and more than leases may hold of a prefill server's.
TOKENS = 700
#: Short against every timeout, and longer than any of them.
SHORT_S, LONG_S = 2.0, max(CHAOS_LEASE_TTL_S, CHAOS_PULL_TIMEOUT_S) + 6.0
#: After the incident is over: the timeouts of a decode leg one after the other.
ENDS_WITHIN_S = 60.0


@dataclass(frozen=True, slots=True)
class Incident:
    """What happens to a server, or to the one of its processes that has the title ``process``."""

    side: Side
    kind: Literal["stop", "kill", "restart"]
    seconds: float = 0.0  # of a stop
    process: str = ""

    def __str__(self) -> str:
        seconds = f" {self.seconds:g} s" if self.seconds else ""
        return f"{self.kind} {'P' if self.side == 'prefill' else 'D'}{self.process and ' ' + self.process}{seconds}"

    @property
    def is_short(self) -> bool:
        """Whether nothing may come of it."""
        return self.kind == "stop" and self.seconds <= SHORT_S

    @property
    def ends_decode(self) -> bool:
        """Whether the decode server dies, and all of its requests with it."""
        return self.side == "decode" and self.kind != "stop"


@dataclass(slots=True)
class Sent:
    """A request whose decode leg is under way."""

    prompt: list[int]
    answer: "Future[Completion | None]"  # None if the server has died
    #: Whether it cannot succeed after an incident that is not short, because it needs its lease to the end.
    is_lost: bool = True
    is_answered: bool = False  # before the incident
    may_be_late: bool = False  # it reads only when another has given up P, whose stop may be over by then


class Scene:
    """Requests of a pair of servers that are held at gates."""

    def __init__(self, pair: Pair, seed: object) -> None:
        """Send none yet. Equal seeds give equal prompts."""
        self.pair = pair
        self.sent: list[Sent] = []
        self.opened = threading.Event()
        self._seed = seed
        self._threads = ThreadPoolExecutor(8)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.open()
        self._threads.shutdown()

    def prompt(self, which: str, tokens: int = TOKENS) -> list[int]:
        """Return a prompt that no other scene has."""
        return make_prompt(tokens, (self._seed, self.pair.name, which))

    def send(self, prompt: list[int], params: KVTransferParams | None = None, max_tokens: int = 16) -> Sent:
        """Send a decode leg, or a request that needs no prefill server."""
        if params is None:
            return self.start(prompt, lambda: self.pair.decode.client.complete(prompt, max_tokens), is_lost=False)
        return self.start(prompt, lambda: self.pair.decode_leg(prompt, params, max_tokens))

    def disaggregate(self, which: str, max_tokens: int = 16) -> Sent:
        """Prefill a prompt and send its decode leg."""
        prompt = self.prompt(which)
        return self.send(prompt, self.pair.prefill.client.prefill(prompt), max_tokens)

    def start(self, prompt: list[int], ask: Callable[[], Completion], *, is_lost: bool = True) -> Sent:
        """Ask in a thread of its own."""

        def answer() -> Completion | None:
            with suppress(httpx.HTTPError):  # of a server that has died
                return ask()
            return None

        self.sent.append(Sent(prompt, self._threads.submit(answer), is_lost))
        return self.sent[-1]

    def fill_decode(self) -> Sent:
        """Have a pull hold the blocks of D's device, so that there is no room for another prompt."""
        self.pair.decode.gates.close("pulling")
        filler = self.disaggregate("filler")
        self.pair.decode.gates.wait_for("pulling")
        return filler

    def finish(self, sent: Sent) -> None:
        """Let a request that is held at a gate of D's pulls end as it should."""
        self.pair.decode.gates.open("pulling")
        answer = sent.answer.result(ENDS_WITHIN_S)
        assert answer is not None
        assert answer.status == 200, answer.body
        sent.is_lost, sent.is_answered = False, True

    def open(self) -> None:
        """Hold nothing any more."""
        for server in (self.pair.prefill, self.pair.decode):
            server.gates.open()
        self.opened.set()

    def suffer(self, incident: Incident, cluster: Cluster) -> list[Completion | None]:
        """Let something happen to a server, and the requests go on meanwhile. Returns their answers."""
        server: Server = getattr(self.pair, incident.side)
        if incident.kind == "stop":
            with stopped(server, *([incident.process] if incident.process else [])):
                self.open()
                time.sleep(incident.seconds)
            return self._answers()
        self._kill(server, incident.process)
        if incident.kind == "restart":
            cluster.restart(server)
            self.open()
            return self._answers()
        self.open()
        answers = self._answers()
        cluster.restart(server)
        return answers

    def settle(self) -> None:
        """Wait until both servers answer, hold nothing, and answer the next request right."""
        for server in (self.pair.prefill, self.pair.decode):
            until(server.client.is_healthy, f"{server.spec.name} answers again")
        self.pair.wait_until_at_rest()
        for server in (self.pair.prefill, self.pair.decode):
            wait_until_nothing_is_lent(server)
        prompt = self.prompt("next")
        self.pair.assert_right(self.pair.disaggregate(prompt), prompt)

    def assert_answers(self, incident: Incident, answers: Sequence[Completion | None]) -> None:
        """What needed no lease any more is answered right, and so is all if the incident was short.

        The rest ends as the failure policy says.
        """
        recomputes = self.pair.decode.spec.load_failure_policy == "recompute"
        for sent, answer in zip(self.sent, answers, strict=True):
            if incident.ends_decode and not sent.is_answered:
                assert answer is None or answer.status == 500, f"{answer.status} from a server that has died"
                continue
            assert answer is not None, "the connection has ended"
            is_lost = sent.is_lost and not incident.is_short
            is_late = sent.may_be_late and incident.kind == "stop" and incident.side == "prefill"
            if answer.status == 200:
                assert recomputes or not is_lost or is_late, "used, though nobody can have confirmed it"
                self.pair.assert_right(answer, sent.prompt)
            else:
                assert answer.status == 500, f"{answer.status} {answer.body}"
                assert is_lost, answer.body
                assert not recomputes, answer.body

    def _answers(self) -> list[Completion | None]:
        deadline = time.monotonic() + ENDS_WITHIN_S
        return [sent.answer.result(max(deadline - time.monotonic(), 0.0)) for sent in self.sent]

    @staticmethod
    def _kill(server: Server, process: str) -> None:
        """Kill a server; if it is only one of its processes, wait until the server has noticed."""
        if not process:
            server.kill()
            return
        server.signal(signal.SIGKILL, process)
        until(lambda: not server.client.is_healthy(), f"{server.spec.name} has ended")
