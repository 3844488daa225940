"""What a test asks of a server: completions in one leg or two, and the counters that say how they were made.

Prompts are token ids, or chats with images or for an adapter. Decoding is greedy and never stops early, so that equal
prompts have equal outputs.
"""

import http.client
import itertools
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families

from tests.support.e2e.architectures import IMAGE_TOKENS
from tests.support.e2e.images import Image

MODEL_NAME = "tiny"
REQUEST_TIMEOUT_S = 120.0
#: What two float32 runs of the same prompt may differ by in a logprob. Measured: 0 for equal batches, below 2e-5
#: between tensor parallel sizes.
LOGPROB_TOLERANCE = 1e-3
#: Up to this, whose tokens differ is a tie: other contents of a block change logprobs by far more.
TIE_TOLERANCE = 2e-5

KVTransferParams = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Chat:
    """A prompt that is not a list of token ids: text and images in any order, for the model or for an adapter of it.

    Its length is in tokens, of which text has one a byte.
    """

    parts: tuple[str | Image, ...]
    model: str = MODEL_NAME

    def __len__(self) -> int:
        """Count the tokens."""
        return sum(len(part.encode()) if isinstance(part, str) else IMAGE_TOKENS for part in self.parts)


AnyPrompt = list[int] | Chat


@dataclass(frozen=True, slots=True)
class Completion:
    """The answer to one request. ``tokens`` and ``logprobs`` are empty where ``status`` is not 200."""

    status: int
    body: str
    tokens: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    kv_transfer_params: KVTransferParams | None = None

    def logprob_difference(self, other: "Completion") -> float:
        """The largest difference of a logprob, up to and with the first token that differs."""
        differences = []
        for a, b in zip(self._steps(), other._steps(), strict=True):
            differences.append(abs(a[1] - b[1]))
            if a[0] != b[0]:
                break
        return max(differences)

    def _steps(self) -> list[tuple[int, float]]:
        return list(zip(self.tokens, self.logprobs, strict=True))


class Client:
    """Completions and metrics of one server. May be used from many threads at once."""

    def __init__(self, base_url: str, headers: Mapping[str, str] | None = None) -> None:
        self.base_url = base_url
        limits = httpx.Limits(max_connections=64, keepalive_expiry=2)  # vLLM closes idle ones after 5 s
        self._http = httpx.Client(base_url=base_url, timeout=REQUEST_TIMEOUT_S, limits=limits, headers=headers)
        self._salts = itertools.count()
        self.resets = 0

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    def complete(self, prompt: AnyPrompt, max_tokens: int = 16, **options: object) -> Completion:
        """One request, whatever becomes of it."""
        if isinstance(prompt, Chat):
            response = self._http.post("/v1/chat/completions", json=_chat_request(prompt, max_tokens, options))
        else:
            response = self._http.post("/v1/completions", json=_request(prompt, max_tokens, options))
        if response.status_code != 200:
            return Completion(response.status_code, response.text)
        answer = response.json()
        (choice,) = answer["choices"]
        logprobs = choice["logprobs"]
        return Completion(
            status=200,
            body=response.text,
            tokens=tuple(choice["token_ids"]),
            logprobs=tuple(
                [step["logprob"] for step in logprobs["content"]]
                if isinstance(prompt, Chat)
                else logprobs["token_logprobs"]
            ),
            kv_transfer_params=answer["kv_transfer_params"],
        )

    def compute(self, prompt: AnyPrompt, max_tokens: int = 16) -> Completion:
        """The reference: this server computes the whole prompt itself, its prefix cache kept out by a fresh salt."""
        completion = self.complete(prompt, max_tokens, cache_salt=f"reference {next(self._salts)}")
        assert completion.status == 200, completion.body
        return completion

    def prefill(self, prompt: AnyPrompt, **options: object) -> KVTransferParams:
        """The prefill leg: what the decode leg has to be told."""
        completion = self.complete(prompt, 1, kv_transfer_params={"do_remote_decode": True}, **options)
        assert completion.status == 200, completion.body
        assert completion.kv_transfer_params is not None, "the prefill server returned no kv_transfer_params"
        return completion.kv_transfer_params

    def choices(self, prompt: list[int], count: int, max_tokens: int = 16, **options: object) -> list[tuple[int, ...]]:
        """The tokens of every choice of one request with ``n = count``; vLLM wants sampling switched on for it."""
        response = self._http.post("/v1/completions", json=_request(prompt, max_tokens, {**options, "n": count}))
        assert response.status_code == 200, response.text
        return [tuple(choice["token_ids"]) for choice in response.json()["choices"]]

    @contextmanager
    def stream(self, prompt: list[int], max_tokens: int, **options: object) -> Iterator[Iterator[str]]:
        """A streamed request: yields its ``data:`` lines. Leaving the block early disconnects."""
        request = _request(prompt, max_tokens, {**options, "stream": True})
        with self._http.stream("POST", "/v1/completions", json=request) as response:
            yield (line for line in response.iter_lines() if line.startswith("data:"))

    def abandon(self, prompt: list[int], after_s: float, max_tokens: int = 16, **options: object) -> bool:
        """Send a request and disconnect after ``after_s`` without an answer; tells whether it came to that."""
        with httpx.Client(base_url=self.base_url, timeout=httpx.Timeout(REQUEST_TIMEOUT_S, read=after_s)) as http:
            try:
                http.post("/v1/completions", json=_request(prompt, max_tokens, options))
            except httpx.ReadTimeout:
                return True
        return False

    @contextmanager
    def leaving(self, prompt: list[int], max_tokens: int = 16, **options: object) -> Iterator[None]:
        """Send a request whose answer nobody waits for, and disconnect when the block ends."""
        body = json.dumps(_request(prompt, max_tokens, options)).encode()
        connection = http.client.HTTPConnection(self._http.base_url.host, self._http.base_url.port or 80)
        try:
            connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
            yield
        finally:
            connection.close()

    def reset_prefix_cache(self) -> bool:
        """Have the server, in development mode, forget all cached blocks, the connector's too; whether it did.

        vLLM 0.23 does not say; the caller sees that it did by what comes after.
        """
        response = self._http.post("/reset_prefix_cache", params={"reset_external": "true"})
        assert response.status_code == 200, response.text
        self.resets += 1
        return bool(response.json()["success"]) if response.content else True

    def is_healthy(self) -> bool:
        """Whether the server answers and its engine lives."""
        try:
            return self._http.get("/health", timeout=10.0).status_code == 200
        except httpx.HTTPError:
            return False

    def cache_blocks(self) -> int:
        """KV cache blocks of the server."""
        (info,) = [labels for name, labels, _ in self.metrics().samples if name == "vllm:cache_config_info"]
        return int(info["num_gpu_blocks"])

    def metrics(self) -> "Metrics":
        """All counters and gauges as they are now."""
        response = self._http.get("/metrics")
        response.raise_for_status()
        families = list(text_string_to_metric_families(response.text))
        samples = [
            (sample.name, dict(sample.labels), float(sample.value)) for family in families for sample in family.samples
        ]
        return Metrics(frozenset(family.name for family in families), samples)


def _request(prompt: list[int], max_tokens: int, options: dict[str, object]) -> dict[str, object]:
    return {
        "model": MODEL_NAME,
        "prompt": prompt,
        "max_tokens": max_tokens,
        "temperature": 0.0,
        "ignore_eos": True,
        "logprobs": 1,
        "return_token_ids": True,
        **options,
    }


def _chat_request(prompt: Chat, max_tokens: int, options: dict[str, object]) -> dict[str, object]:
    content = [
        {"type": "text", "text": part}
        if isinstance(part, str)
        else {"type": "image_url", "image_url": {"url": part.url}}
        for part in prompt.parts
    ]
    return {
        "model": prompt.model,
        "messages": [{"role": "user", "content": content}],
        "max_tokens": max_tokens,
        "temperature": 0.0,
        "ignore_eos": True,
        "logprobs": True,
        "return_token_ids": True,
        **options,
    }


@dataclass(frozen=True, slots=True)
class Metrics:
    """A server's Prometheus samples at one moment, or what was added between two."""

    families: frozenset[str]
    samples: list[tuple[str, dict[str, str], float]]
    start: "Metrics | None" = field(default=None)

    def since(self, start: "Metrics") -> "Metrics":
        """The same samples, told as what was added since ``start``."""
        return Metrics(self.families, self.samples, start)

    def value(self, name: str, **labels: str) -> float:
        """The sum of all samples of that name and those labels; 0 where a label has not occurred yet.

        Raises:
            KeyError: the server does not know the metric, so that a misspelt one does not read as 0.
        """
        if name.removesuffix("_total") not in self.families:
            raise KeyError(f"the server has no metric {name!r}")
        total = sum(v for own_name, own, v in self.samples if own_name == name and labels.items() <= own.items())
        return total - (self.start.value(name, **labels) if self.start else 0.0)

    def prompt_tokens(self, source: str) -> int:
        """Prompt tokens by where their KV came from: local_compute, local_cache_hit or external_kv_transfer."""
        return int(self.value("vllm:prompt_tokens_by_source_total", source=source))
