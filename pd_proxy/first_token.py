"""P's own token as the beginning of the answer: the client has it when P has, and D goes on behind it.

P samples a token to end its leg, which is thrown away otherwise. D computes the last prompt token itself and samples
the same one, if sampling is greedy and nothing but the prompt shapes it. So P's token is sent to the client at once,
and the same text is taken off the beginning of what D answers. It is compared: where D begins differently, the answer
is broken off. That cannot be excluded altogether: where two tokens are almost equally likely, kernels that add up in
another order may rank them differently on P and D.

``may_begin`` knows the requests for which P's token is D's. All others are left alone, among them all chats: how a
chat's first token is shown depends on the server's reasoning and tool parsers, which treat whole answers, as P gives
them, differently from streams.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Collection, Mapping
from http import HTTPStatus
from typing import Any

from pd_proxy.apis import Body
from pd_proxy.error_answers import LegFailed
from pd_proxy.headers import event_stream
from pd_proxy.http_client import Client

#: Which cannot change what is sampled greedily, or how it is shown, whatever their values: vLLM then ignores ``top_p``
#: and its like.
HARMLESS = frozenset(
    {
        "model",
        "prompt",
        "stream",
        "max_tokens",
        "ignore_eos",
        "seed",
        "top_p",
        "top_k",
        "min_p",
        "temperature",
        "add_special_tokens",
        "truncate_prompt_tokens",
        "truncation_side",
        "cache_salt",
        "user",
        "request_id",
        "session_id",
        "priority",
        "stream_options",
        "kv_transfer_params",
    }
)
#: Which shape the first token or could end the text with it, and their values that do neither.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "echo": (False,),
    "suffix": ("",),
    "stop": ([], ""),
    "stop_token_ids": ([],),
    "include_stop_str_in_output": (False, True),
    "min_tokens": (0,),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "length_penalty": (0, 1),
    "logit_bias": ({},),
    "bad_words": ([],),
    "use_beam_search": (False,),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "return_token_ids": (False,),
    "return_tokens_as_token_ids": (False,),
}


def may_begin(body: Body) -> bool:
    """Return whether P's token is the first of D's answer, by what the client asked for in a completion."""
    temperature, limit = body.get("temperature"), body.get("max_tokens")
    if isinstance(temperature, bool) or temperature not in (0, 0.0):
        return False  # not greedy, or as the server's own default says
    if limit is not None and (not isinstance(limit, int) or limit < 2):
        return False  # D would have nothing to add, or refuses
    return is_plain(body, HARMLESS, NEUTRAL)


def is_plain(body: Body, harmless: Collection[str], neutral: Mapping[str, tuple[Any, ...]]) -> bool:
    """Return whether a request is for a stream, has parameters of these names and values alone, and counts at the end.

    Args:
        body: of the client.
        harmless: names whose values do not matter.
        neutral: the values that do not matter, by name.
    """
    options = body.get("stream_options") or {}
    if body.get("stream") is not True or not isinstance(options, dict) or options.get("continuous_usage_stats"):
        return False
    return all(name in harmless or value is None or value in neutral.get(name, ()) for name, value in body.items())


class FirstToken:
    """The first token of one answer, from P's answer to the client, and D's stream behind it."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._text = ""
        self._sent = asyncio.Event()

    async def send(self, answer: Body) -> None:
        """Begin the client's answer with the text of P's token, unless D has begun it.

        A token may have no text yet: it is a part of a character. That is left to D. So is a prompt of which P has left
        the last token to D: its answer's token is none of the text.
        """
        try:
            text = answer["choices"][0]["text"]
        except (KeyError, IndexError, TypeError):
            return
        params = answer.get("kv_transfer_params")
        if isinstance(params, dict) and params.get("prompt_is_cut"):
            return
        if self._client.started or not isinstance(text, str) or not text:
            return
        event = {name: answer.get(name) for name in ("id", "object", "created", "model")}
        event["choices"] = [{"index": 0, "text": text, "logprobs": None, "finish_reason": None, "stop_reason": None}]
        self._text = text
        self._client.record.first_token = True
        await self._client.start(HTTPStatus.OK, event_stream(self._client.record.identity))
        await self._client.send_piece(event_of(event))
        self._sent.set()

    async def is_sent(self) -> bool:
        """Return whether the answer has begun with P's token, which the client then has been sent."""
        if not self._text:
            return False
        await self._sent.wait()
        return True

    async def continued(self, url: str, pieces: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
        """Yield D's stream without the text that the client has.

        Raises:
            LegFailed: D begins with another text, or with an error.
        """
        missing, buffered = self._text, b""
        async for piece in pieces:
            buffered += piece
            while missing and b"\n\n" in buffered:
                raw, _, buffered = buffered.partition(b"\n\n")
                missing, rest = self._without(url, missing, raw)
                if rest:
                    yield rest
            if not missing and buffered:
                yield buffered
                buffered = b""
        if missing or buffered:
            raise self._differs(url, buffered)

    def _without(self, url: str, missing: str, raw: bytes) -> tuple[str, bytes]:
        """Return what is missing behind an event of D's, and what is left of the event."""
        try:
            event = json.loads(raw.removeprefix(b"data: "))
            if "error" in event:
                raise LegFailed(HTTPStatus.BAD_GATEWAY, "decode", url, "failed", f"{event['error']!r:.500}")
            choice = event["choices"][0]
            text, ends = choice["text"], choice["finish_reason"] is not None
        except (ValueError, KeyError, IndexError, TypeError):  # the end, or nothing that vLLM sends
            raise self._differs(url, raw) from None
        taken = min(len(missing), len(text))
        if missing[:taken] != text[:taken] or (ends and taken < len(missing)):
            raise self._differs(url, raw)
        choice["text"] = text[taken:]
        return missing[taken:], event_of(event) if choice["text"] or ends else b""

    def _differs(self, url: str, raw: bytes) -> LegFailed:
        shown = raw[:300].decode("utf-8", "replace")
        self._client.record.first_token_differs = True
        what = "does not begin with the prefill server's token"
        return LegFailed(HTTPStatus.BAD_GATEWAY, "decode", url, what, f"{self._text!r}: {shown}")


def event_of(content: object) -> bytes:
    """Return an event of a stream, as vLLM writes it."""
    return b"data: " + json.dumps(content, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"
