"""Streams that are under way while their decode server is drained: the text is the one that it would have been.

The model writes bytes at random, so that the text is full of halves of characters.
"""

import json
import re
import statistics
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.e2e.client import MODEL_NAME
from tests.support.e2e.cluster import Server
from tests.support.e2e.deployments import PATIENT, Deployment, decode, on, prefill
from tests.support.e2e.models import CHATS
from tests.support.e2e.pair import make_prompt, make_text
from tests.support.examples.harness import ProxyProcess
from tests.support.waiting import until

_P = prefill()
_P = replace(_P, arguments=CHATS, options=(*_P.options, ("peers", ("readers",))))
_D = decode("fail", patient=True)
_D = replace(_D, arguments=CHATS, options=(*PATIENT, ("serve_prefixes", True), ("peers", ())))
MOVES = Deployment("moves", (("P", _P), ("D", _D), ("D other", _D)), slow=True)

pytestmark = [pytest.mark.routers, on(MOVES), pytest.mark.timeout(1800)]

PROMPT = 700  # tokens
#: An answer, and what of it is there before its server is drained: more than P would rather compute.
TOKENS, WRITTEN = 1000, 200
#: P or D waits for what a D holds no longer than computing it takes. The first pull from an engine takes longer.
ATTEMPTS = 5
#: Streams at once, and how often one of both decode servers is drained: each is proven to the other the first time.
STREAMS, DRAINS = 6, 4
LOADED_S = 300.0
PULL = "vllm:pd_pull_seconds"
OPTIONS: dict[str, Any] = {
    "model": MODEL_NAME,
    "stream": True,
    "max_tokens": TOKENS,
    "temperature": 0,
    "ignore_eos": True,
    "stream_options": {"include_usage": True},
}


def question(path: str, seed: object) -> dict[str, Any]:
    """A prompt of some blocks."""
    if "chat" in path:
        return {"messages": [{"role": "user", "content": make_text(PROMPT, seed)}]}
    return {"prompt": make_prompt(PROMPT, seed)}


def events(url: str, path: str, seed: object, **options: str) -> Iterator[dict[str, Any]]:
    """The events of a stream, to its end."""
    body = question(path, seed) | OPTIONS | options
    with httpx.stream("POST", url + path, json=body, timeout=120, trust_env=False) as response:
        lines = (line.removeprefix("data: ") for line in response.iter_lines() if line)
        while (line := next(lines)) != "[DONE]":
            yield json.loads(line)


def text_of(stream: list[dict[str, Any]]) -> str:
    """The text in all events."""
    choices = [choice for event in stream for choice in event["choices"]]
    return "".join(choice["text"] if "text" in choice else choice["delta"]["content"] for choice in choices)


@contextmanager
def running(servers: dict[str, Server], file: Path) -> Iterator[ProxyProcess]:
    """The proxy before all servers, of which those in the file are drained."""
    arguments = ["--prefill", servers["P"].client.base_url, "--draining", str(file), "--plain-chats"]
    for name in ("D", "D other"):
        arguments += ["--decode", servers[name].client.base_url]
    with ProxyProcess(["-m", "pd_proxy", *arguments]) as proxy:
        yield proxy


@dataclass
class Stream:
    """What came of an answer, and when."""

    events: list[dict[str, Any]] = field(default_factory=list)
    times: list[float] = field(default_factory=list)

    def read(self, url: str, seed: object) -> None:
        for event in events(url, "/v1/completions", seed):
            self.times.append(time.perf_counter())
            self.events.append(event)

    def pause_ms(self, since: float) -> float:
        return 1e3 * max((after - before for before, after in pairwise(self.times) if after > since), default=0.0)


def pulls(server: Server) -> tuple[float, float]:
    """The seconds of all pulls of a server without their waits, and how many there were."""
    samples = server.client.metrics().samples
    seconds, count = (
        sum(value for name, labels, value in samples if (name, labels.get("phase")) == (f"{PULL}_{each}", "total"))
        for each in ("sum", "count")
    )
    return seconds, count


def found_at(server: Server) -> str:
    """Where the prefixes that a decode server holds are found."""
    return str(re.findall(r"answers on the control channel at (\S+)", server.log_since())[-1])


@pytest.mark.parametrize(
    ("path", "by"), [("/v1/completions", "P"), ("/v1/chat/completions", "P"), ("/v1/completions", "D")]
)
def test_the_text_is_what_it_would_have_been_and_what_was_written_is_pulled(
    servers: dict[str, Server], tmp_path: Path, figures: list[str], path: str, by: str
) -> None:
    file, decoders = tmp_path / "draining", [servers["D"], servers["D other"]]
    pulled: list[float] = []
    with running(servers, file) as proxy:
        while len(pulled) < ATTEMPTS and not any(pulled):
            seed = by, len(pulled)  # not what another test has left in prefix caches
            unmoved = list(events(decoders[0].client.base_url, path, seed, cache_salt="unmoved"))
            before = {name: server.client.metrics() for name, server in servers.items()}
            moved = []
            for event in events(proxy.url, path, seed):
                moved.append(event)
                if len(moved) == WRITTEN:
                    leaving = _busy(decoders)
                    file.write_text(f"{leaving.client.base_url} {found_at(leaving) if by == 'D' else ''}")
            until(lambda: proxy.log.count(" moved=http") == len(pulled) + 1)
            file.write_text("")
            until(lambda: proxy.log.count("is back") == len(pulled) + 1)
            assert text_of(moved) == text_of(unmoved)
            assert moved[-1]["usage"] == unmoved[-1]["usage"]
            assert moved[-2]["choices"][0]["finish_reason"] == "length"
            since = {name: server.client.metrics().since(before[name]) for name, server in servers.items()}
            assert since["P"].value("vllm:request_success_total") == (2 if by == "P" else 1)
            pullers = ["P"] if by == "P" else ["D", "D other"]
            pulled.append(sum(since[name].value("vllm:pd_prefix_tokens_total") for name in pullers))
    known = PROMPT if by == "D" else 0  # the other D has had no part of the prompt, either
    assert pulled[-1] - known >= WRITTEN // 2, pulled
    figures.append(f"{path}, moved: {by} pulled {pulled[-1] - known:.0f} tokens of what had been written")


def test_no_stream_fails_that_moves_under_load(servers: dict[str, Server], tmp_path: Path, figures: list[str]) -> None:
    decoders = [servers["D"], servers["D other"]]
    with running(servers, tmp_path / "draining") as proxy:
        for number in range(DRAINS):
            leaving, other = decoders[:: -1 if number % 2 else 1]
            figures.append(drain(proxy, tmp_path / "draining", leaving, other, number))


def drain(proxy: ProxyProcess, file: Path, leaving: Server, other: Server, number: int) -> str:
    """What became of streams, some of which moved."""
    streams, moved_before = [Stream() for _ in range(STREAMS)], proxy.log.count(" moved=http")
    with ThreadPoolExecutor(STREAMS) as clients:
        read = [clients.submit(each.read, proxy.url, (number, seed)) for seed, each in enumerate(streams)]
        until(lambda: all(len(each.events) >= WRITTEN for each in streams), within_s=LOADED_S)
        before, pulled_before, since = other.client.metrics(), pulls(other), time.perf_counter()
        file.write_text(f"{leaving.client.base_url} {found_at(leaving)}")
        for each in read:
            each.result()
    file.write_text("")
    until(lambda: proxy.log.count("is back") == number + 1)
    moved = proxy.log.count(" moved=http") - moved_before
    assert moved >= 1
    assert {each.events[-2]["choices"][0]["finish_reason"] for each in streams} == {"length"}
    assert {each.events[-1]["usage"]["completion_tokens"] for each in streams} == {TOKENS}
    pauses = sorted(each.pause_ms(since) for each in streams)[-moved:]
    tokens = other.client.metrics().since(before).value("vllm:pd_prefix_tokens_total")
    seconds, count = (now - earlier for now, earlier in zip(pulls(other), pulled_before, strict=True))
    return (
        f"{moved} of {STREAMS} streams moved: pauses {statistics.median(pauses):.0f} ms, at most {pauses[-1]:.0f}; the "
        f"other D pulled {tokens:.0f} tokens; {count:.0f} pulls, {1e3 * seconds / max(count, 1):.0f} ms each"
    )


def _busy(decoders: list[Server]) -> Server:
    """The decode server that has the only request."""
    return next(one for one in decoders if one.client.metrics().value("vllm:num_requests_running"))
