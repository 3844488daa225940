"""One request in two legs, as a router sends it, and when what came back."""

import contextlib
import json
import random
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import httpx

from benchmarks.peers.connectors import Connector, Legs, Pair
from benchmarks.peers.model import VOCABULARY
from benchmarks.peers.servers import NAME

REQUEST_TIMEOUT_S = 20.0  # the longest take a few seconds, eight at once ten
#: Of a server's first request, with which vLLM compiles what tensor parallel models look tokens up by, eager or not.
FIRST_TIMEOUT_S = 120.0
Prompt = list[int]


@dataclass(frozen=True)
class Answer:
    """Of one request, in seconds since the client sent it. ``error`` says what came instead of tokens."""

    prefilled_s: float = 0.0
    first_token_s: float = 0.0
    total_s: float = 0.0
    tokens: tuple[int, ...] = ()
    error: str = ""
    timed_out: bool = False


class RefusedError(Exception):
    """A server answered with an error; the message is its status and the beginning of its words."""


#: What comes instead of an answer: an error, nothing, or not what a connector's contract is made of.
NO_ANSWER = (httpx.HTTPError, RefusedError, LookupError, ValueError)


def failed(error: Exception, total_s: float = 0.0) -> Answer:
    """Return what is known of a request that one of ``NO_ANSWER`` has ended."""
    said = str(error)
    named = said if said and isinstance(error, (httpx.HTTPError, RefusedError)) else f"{type(error).__name__}: {said}"
    return Answer(total_s=total_s, error=named.removesuffix(": "), timed_out=isinstance(error, httpx.TimeoutException))


def a_prompt(chance: random.Random, tokens: int) -> Prompt:
    """Return a prompt of random tokens."""
    return [chance.randrange(2, VOCABULARY) for _ in range(tokens)]


class Router:
    """Sends requests, and gives up those of which nothing comes for ``timeout_s``. Used from many threads at once."""

    def __init__(self, timeout_s: float = REQUEST_TIMEOUT_S) -> None:
        limits = httpx.Limits(max_connections=64, keepalive_expiry=2)  # vLLM closes idle ones after 5 s
        self._http = httpx.Client(timeout=timeout_s, limits=limits, trust_env=False)

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    def alone(self, url: str, prompt: Prompt, tokens: int, salt: str) -> Answer:
        """Have one server compute the prompt and answer it."""
        return self._timed(lambda start: self._stream(url, prompt, tokens, salt, None, start))

    def send(self, connector: Connector, pair: Pair, legs: Legs, prompt: Prompt, tokens: int, salt: str) -> Answer:
        """Send both legs of a request, and return what came of it, an error too."""
        send = self._in_turn if legs == "in turn" else self._together
        return self._timed(lambda start: send(connector, pair, prompt, tokens, salt, start))

    def _timed(self, send: Any) -> Answer:
        start = time.perf_counter()
        try:
            answer: Answer = send(start)
        except NO_ANSWER as error:
            return failed(error, time.perf_counter() - start)
        return answer

    def _in_turn(
        self, connector: Connector, pair: Pair, prompt: Prompt, tokens: int, salt: str, start: float
    ) -> Answer:
        contract = connector.contract(pair, "in turn")
        params = self._prefill(pair.prefill_url, prompt, salt, contract.for_prefill)
        prefilled_s = time.perf_counter() - start
        for_decode = params if contract.for_decode is None else contract.for_decode
        answer = self._stream(pair.decode_url, prompt, tokens, salt, for_decode, start)
        return Answer(prefilled_s, answer.first_token_s, answer.total_s, answer.tokens)

    def _together(
        self, connector: Connector, pair: Pair, prompt: Prompt, tokens: int, salt: str, start: float
    ) -> Answer:
        contract = connector.contract(pair, "together")

        def prefill() -> float:
            self._prefill(pair.prefill_url, prompt, salt, contract.for_prefill)
            return time.perf_counter() - start

        with ThreadPoolExecutor(1) as thread:
            prefilled = thread.submit(prefill)
            answer = self._stream(pair.decode_url, prompt, tokens, salt, contract.for_decode, start)
            return Answer(prefilled.result(), answer.first_token_s, answer.total_s, answer.tokens)

    def prefill(self, pair: Pair, prompt: Prompt, salt: str, params: dict[str, Any]) -> dict[str, Any] | None:
        """Send the prefill leg, and return the parameters that P answers.

        Raises:
            RefusedError: P answered with an error.
            httpx.HTTPError: it did not answer.
        """
        return self._prefill(pair.prefill_url, prompt, salt, params)

    def decode(self, pair: Pair, prompt: Prompt, tokens: int, salt: str, params: dict[str, Any] | None) -> Answer:
        """Send the decode leg, and return what came of it, an error too."""
        return self._timed(lambda start: self._stream(pair.decode_url, prompt, tokens, salt, params, start))

    def _prefill(self, url: str, prompt: Prompt, salt: str, params: dict[str, Any]) -> dict[str, Any] | None:
        response = self._http.post(f"{url}/v1/completions", json=_body(prompt, 1, salt, params))
        if response.status_code != 200:
            raise RefusedError(f"P: HTTP {response.status_code}: {_message(response.text)}")
        answered: dict[str, Any] | None = response.json()["kv_transfer_params"]
        return answered

    def _stream(
        self, url: str, prompt: Prompt, tokens: int, salt: str, params: dict[str, Any] | None, start: float
    ) -> Answer:
        body = _body(prompt, tokens, salt, params) | {"stream": True}
        received: list[int] = []
        first_token_s = 0.0
        with self._http.stream("POST", f"{url}/v1/completions", json=body) as response:
            if response.status_code != 200:
                response.read()
                raise RefusedError(f"HTTP {response.status_code}: {_message(response.text)}")
            for line in response.iter_lines():
                if not line.startswith("data: {"):
                    continue
                event = json.loads(line.removeprefix("data: "))
                if "error" in event:
                    raise RefusedError(f"HTTP 200, then: {_message(line.removeprefix('data: '))}")
                for choice in event["choices"]:
                    received += choice.get("token_ids") or ()
                first_token_s = first_token_s or (time.perf_counter() - start if received else 0.0)
        if len(received) != tokens:
            raise RefusedError(f"HTTP 200 with {len(received)} of {tokens} tokens")
        return Answer(0.0, first_token_s, time.perf_counter() - start, tuple(received))


def at_once(sends: Sequence[Any]) -> list[Answer]:
    """Return what comes of requests that are sent at the same moment."""
    with ThreadPoolExecutor(len(sends)) as clients:
        return [each.result() for each in [clients.submit(send) for send in sends]]


def _message(text: str) -> str:
    """Return what an error says, without its JSON."""
    with contextlib.suppress(ValueError, KeyError, TypeError):
        text = str(json.loads(text)["error"]["message"])
    return text[:300]


def _body(prompt: Prompt, tokens: int, salt: str, params: dict[str, Any] | None) -> dict[str, Any]:
    return {"model": NAME, "prompt": prompt, "max_tokens": tokens, "temperature": 0.0, "ignore_eos": True,
            "detokenize": False, "return_token_ids": True, "cache_salt": salt,
            "kv_transfer_params": params}  # fmt: skip
