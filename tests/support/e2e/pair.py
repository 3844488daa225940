"""A prefill and a decode server seen as one: two-leg requests, and the books that must balance after them."""

import random
import string
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass

import pytest

from pd_connector.orders import LeaseEnd
from pd_connector.stats import LABELS
from tests.support.e2e.architectures import VOCABULARY
from tests.support.e2e.client import (
    LOGPROB_TOLERANCE,
    MODEL_NAME,
    TIE_TOLERANCE,
    AnyPrompt,
    Completion,
    KVTransferParams,
    Metrics,
)
from tests.support.e2e.cluster import Server
from tests.support.waiting import until
from transfer.control.client import ControlClient
from transfer.control.keys import ControlKeys
from transfer.control.messages import Cancel

AT_REST_TIMEOUT_S = 40.0
CANARY_OUTCOMES = LABELS["canaries"]


def make_prompt(tokens: int, seed: object) -> list[int]:
    """A random prompt; equal seeds give equal prompts, and one is the start of the longer other."""
    generator = random.Random(str(seed))
    return [generator.randrange(VOCABULARY) for _ in range(tokens)]


def make_text(characters: int, seed: object) -> str:
    """The same as text of letters, each of which is a token of the test models."""
    generator = random.Random(str(seed))
    return "".join(generator.choices(string.ascii_letters, k=characters))


@dataclass(slots=True)
class Traffic:
    """What both servers counted while a ``Pair.traffic`` block ran. Filled in when the block ends."""

    prefill: Metrics | None = None
    decode: Metrics | None = None

    def source(self, source: str) -> int:
        """The decode server's prompt tokens by source; see ``Metrics.prompt_tokens``."""
        assert self.decode is not None
        return self.decode.prompt_tokens(source)

    def pulled(self, what: str) -> int:
        """A counter of the decode server's pulls: pulls, pull_bytes, pull_descriptors, pull_tokens."""
        assert self.decode is not None
        return int(self.decode.value(f"vllm:pd_{what}_total"))

    def loaded(self, server: str = "decode") -> int:
        """Prompt tokens that a server, "prefill" or "decode", loaded from host memory."""
        metrics = self.decode if server == "decode" else self.prefill
        assert metrics is not None
        return int(metrics.value("vllm:pd_host_tokens_total"))

    def failures(self, cause: str | None = None) -> int:
        """Failed pulls, of one cause or of all."""
        assert self.decode is not None
        labels = {} if cause is None else {"cause": cause}
        return int(self.decode.value("vllm:pd_pull_failures_total", **labels))

    def leases(self, event: str) -> int:
        """The prefill server's leases: granted, released, cancelled or expired."""
        assert self.prefill is not None
        return int(self.prefill.value("vllm:pd_leases_total", event=event))


@dataclass(frozen=True, slots=True)
class Pair:
    """A prefill server and a decode server of the same model."""

    prefill: Server
    decode: Server

    @property
    def decode_ranks(self) -> int:
        """The ranks of the decode server: its pull counters are sums over them."""
        return self.decode.spec.ranks

    @property
    def name(self) -> str:
        """Of both servers: a part of a prompt's seed that keeps it out of the prefix caches of other pairs' tests."""
        return f"{self.prefill.log.stem} {self.decode.log.stem}"

    @property
    def is_parallel(self) -> bool:
        """Whether either server has more than one worker."""
        return max(self.prefill.spec.ranks, self.decode.spec.ranks) > 1

    def get_acquainted(self, model: str = MODEL_NAME, attempts: int = 4) -> None:
        """Have D meet P, which takes a prompt that is computed there and pulled as well: P is then proven, or refused.

        ``model``: as requests name it; each adapter is proven by itself.

        On two cores, the busy waiting of several workers can keep their threads from running until a lease has ended.
        That canary then fails, and the next one serves.
        """
        start = self.decode.client.metrics()

        def came_to() -> dict[str, int]:
            added = self.decode.client.metrics().since(start)
            counts = {each: added.value("vllm:pd_canaries_total", outcome=each) for each in CANARY_OUTCOMES}
            counts |= {each: added.value(f"vllm:pd_{each}_total") for each in ("pulls", "pull_failures")}
            return {name: int(count) for name, count in counts.items() if count}

        for attempt in range(attempts):
            tokens = 2 * max(self.decode.spec.block_size, self.decode.spec.model.unit_tokens) + 33
            prompt = make_prompt(tokens, ("acquainted", self.name, attempt, time.monotonic()))  # in no prefix cache
            before = came_to()
            self.decode_leg(prompt, self.prefill.client.prefill(prompt, model=model), model=model)
            until(lambda before=before: came_to() != before)  # type: ignore[misc]
            self.wait_until_at_rest()
            if came_to().keys() - {"failed", "left"}:
                return
        pytest.fail(f"{self.name}: {attempts} requests came to {came_to()}")

    def disaggregate(self, prompt: AnyPrompt, max_tokens: int = 16, **options: object) -> Completion:
        """Both legs of a request, as a router sends them. Both succeed."""
        completion = self.decode_leg(prompt, self.prefill.client.prefill(prompt), max_tokens, **options)
        assert completion.status == 200, completion.body
        return completion

    def prompt_and_answer(self, tokens: int, seed: object, max_tokens: int = 16) -> tuple[list[int], Completion]:
        """A prompt that ends with what D answers to the rest of it, and D's answer from there on.

        D has computed the last token alone then, as that of a prompt that it pulls.
        """
        start = make_prompt(tokens - 1, (self.name, tokens, seed))
        answer = self.decode.client.compute(start, 1 + max_tokens)
        return [*start, answer.tokens[0]], Completion(200, "", answer.tokens[1:], answer.logprobs[1:])

    def decode_leg(
        self, prompt: AnyPrompt, params: KVTransferParams, max_tokens: int = 16, **options: object
    ) -> Completion:
        """The second leg alone."""
        return self.decode.client.complete(prompt, max_tokens, kv_transfer_params=params, **options)

    def assert_pulls_right(self, prompt: AnyPrompt, max_tokens: int = 16) -> Traffic:
        """A prompt that the decode server holds nothing of is pulled as ``assert_pulls_all`` says, and gives the right
        output. Returns what was counted.
        """
        traffic, completion = self.assert_pulls_all(prompt, max_tokens)
        self.assert_right(completion, prompt)
        return traffic

    def assert_pulls_all(self, prompt: AnyPrompt, max_tokens: int = 16) -> tuple[Traffic, Completion]:
        """A prompt that the decode server holds nothing of is pulled once, whole but for the token that is always
        computed there. Returns what was counted, and the output.
        """
        with self.traffic() as traffic:
            completion = self.disaggregate(prompt, max_tokens)
        assert traffic.source("external_kv_transfer") == len(prompt) - 1
        assert traffic.source("local_compute") == 1
        assert traffic.pulled("pulls") == self.decode_ranks
        assert traffic.pulled("pull_tokens") == (len(prompt) - 1) * self.decode_ranks
        assert traffic.failures() == 0
        assert (traffic.leases("granted"), traffic.leases("released")) == (1, 1)
        return traffic, completion

    def assert_concurrent_pulls_right(self, count: int) -> None:
        """Prompts of different lengths that are sent at the same time are all pulled and give the right outputs."""
        self.assert_all_pull_right(
            [make_prompt(40 + 368 * i // count, (i, self.name, "concurrent")) for i in range(count)]
        )

    def assert_all_pull_right(self, prompts: Sequence[AnyPrompt]) -> None:
        """Prompts that the servers do not know are sent at the same time, are all pulled and give the right outputs."""
        count = len(prompts)
        with self.traffic() as traffic, ThreadPoolExecutor(count) as pool:
            completions = list(pool.map(self.disaggregate, prompts))
        assert traffic.source("local_compute") == count
        assert traffic.pulled("pulls") == count * self.decode_ranks
        assert traffic.leases("released") == count
        for prompt, completion in zip(prompts, completions, strict=True):
            self.assert_right(completion, prompt)

    def assert_pulls_the_rest(self, prompt: list[int], computed_before: int) -> None:
        """Of a prompt whose first ``computed_before`` tokens the decode server has seen, it pulls only what lies behind
        the last whole block of them, and gives the right output.
        """
        self.assert_pulls_behind(prompt[:computed_before], prompt)

    def assert_pulls_behind(
        self, before: AnyPrompt, prompt: AnyPrompt, expected: Completion | None = None, max_tokens: int = 16
    ) -> None:
        """The same where the decode server has seen ``before``, a prompt that ``prompt`` begins with."""
        self.disaggregate(before, max_tokens)
        with self.traffic() as traffic:
            completion = self.disaggregate(prompt, max_tokens)
        held = len(before) // self.decode.spec.block_size * self.decode.spec.block_size
        assert traffic.source("local_cache_hit") == held
        assert traffic.source("external_kv_transfer") == len(prompt) - 1 - held
        assert traffic.source("local_compute") == 1
        assert traffic.pulled("pull_tokens") == (len(prompt) - 1 - held) * self.decode_ranks
        self.assert_right(completion, prompt, expected)

    def assert_next_turn_pulls_the_rest(self, turn: list[int], computed_before: int, border_tokens: int) -> None:
        """Of a turn whose first tokens both servers have seen, each finds those up to the last border of states."""
        self.disaggregate(turn[:computed_before])
        with self.traffic() as traffic:
            completion = self.disaggregate(turn)
        self.assert_right(completion, turn)
        held = computed_before // border_tokens * border_tokens
        assert traffic.source("local_cache_hit") == held
        assert traffic.source("external_kv_transfer") == len(turn) - 1 - held
        assert traffic.prefill is not None
        assert traffic.prefill.prompt_tokens("local_cache_hit") == held

    def assert_nothing_is_left(self, prompt: list[int], moments: int = 16) -> None:
        """Clients leave the decode leg of a prompt at ever later moments, up to a sixth of a second. No lease expires:
        somebody knows that each is over.
        """
        with self.traffic() as traffic:
            for number in range(moments):
                params = self.prefill.client.prefill(prompt)
                self.decode.client.abandon(
                    prompt, 0.001 * 1.4**number, 100, kv_transfer_params=params, cache_salt=f"left after {number}"
                )
        assert traffic.leases("granted") == moments
        assert traffic.leases("expired") == 0

    def assert_right(self, completion: Completion, prompt: AnyPrompt, expected: Completion | None = None) -> None:
        """The tokens and logprobs are those ``expected``, or that the decode server computes from the prompt itself."""
        assert completion.status == 200, completion.body
        assert_same_output(completion, expected or self.decode.client.compute(prompt, len(completion.tokens)))

    @contextmanager
    def traffic(self) -> Iterator[Traffic]:
        """Count what the servers do in this block. Ends when both are at rest again."""
        self.wait_until_at_rest()
        prefill, decode = self.prefill.client.metrics(), self.decode.client.metrics()
        traffic = Traffic()
        yield traffic
        self.wait_until_at_rest()
        traffic.prefill = self.prefill.client.metrics().since(prefill)
        traffic.decode = self.decode.client.metrics().since(decode)

    def wait_until_at_rest(self) -> None:
        """Wait until no request, no block and no lease is held on either side."""
        for server in (self.prefill, self.decode):
            wait_until_at_rest(server)


def wait_until_at_rest(server: Server) -> None:
    """Wait until a server holds no request, no block and no lease; fail with what it still holds.

    The time allows for the expiry of a lease, which only tests of expiry may depend on.
    """
    books: list[str] = []

    def balanced() -> bool:
        books[:] = open_books(server.client.metrics())
        return not books

    until(balanced, lambda: f"{server.spec.name} at rest: it still has {', '.join(books)}", within_s=AT_REST_TIMEOUT_S)


def assert_same_output(a: Completion, b: Completion) -> None:
    """Equal tokens, and logprobs equal but for rounding.

    Where the two likeliest tokens are as likely as each other, rounding decides between them, and all that follows is
    another text.
    """
    difference = a.logprob_difference(b)
    assert a.tokens == b.tokens or difference < TIE_TOLERANCE, f"outputs differ, logprobs by up to {difference:.6f}"
    assert difference < LOGPROB_TOLERANCE


def open_books(metrics: Metrics) -> list[str]:
    """What a server still holds, for people; empty when it is at rest."""
    counts = {
        name: metrics.value(f"vllm:{name}")
        for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
    }
    granted = metrics.value("vllm:pd_leases_total", event="granted")
    ended = sum(metrics.value("vllm:pd_leases_total", event=end) for end in LeaseEnd)
    counts["leases"] = granted - ended
    return [f"{name} = {value:g}" for name, value in counts.items() if value]


def assert_failed_pull(
    pair: Pair, prompt: AnyPrompt, params: KVTransferParams, cause: str, logged: tuple[str, ...]
) -> None:
    """The decode leg fails or recomputes, as the server's policy says; its cause is counted, its values are logged."""
    mark = pair.decode.log_size
    before = pair.decode.client.metrics()
    completion = pair.decode_leg(prompt, params)
    wait_until_at_rest(pair.decode)
    counted = pair.decode.client.metrics().since(before)
    log = pair.decode.log_since(mark)
    if pair.decode.spec.load_failure_policy == "recompute":
        pair.assert_right(completion, prompt)
        assert counted.prompt_tokens("local_compute") == len(prompt)
    else:
        assert completion.status == 500, f"{completion.status} {completion.body}"
        assert "error" in completion.body
    assert counted.value("vllm:pd_pull_failures_total", cause=cause) == pair.decode_ranks
    assert counted.value("vllm:pd_pull_failures_total") == pair.decode_ranks
    for word in logged:
        assert any(word in line for line in log.splitlines() if "PDConnector" in line), f"{word!r} is not in:\n{log}"


def control_keys(server: Server) -> ControlKeys | None:
    """The keys of a server's control channel; None where it has no secret."""
    return ControlKeys.derive(server.spec.secret.encode()) if server.spec.secret else None


def end_lease(params: KVTransferParams, keys: ControlKeys | None = None) -> None:
    """Do what a decode server cannot do that does not know the lease: cancel it instead of waiting for its expiry."""
    client = ControlClient(keys=keys)
    cancel = Cancel(params["remote_engine_id"], (params["lease_id"],))
    client.request(params["remote_host"], params["remote_port"], cancel, 10.0).result()
    client.close()


def control_address(pair: Pair) -> str:
    """The address of the prefill server's control channel."""
    params = pair.prefill.client.prefill(make_prompt(3, "where"))
    end_lease(params, control_keys(pair.prefill))
    return f"{params['remote_host']}:{params['remote_port']}"
