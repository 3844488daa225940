"""Several prompts in one text completion: each is a request of its own, with both legs, and the client has one answer.

``kv_transfer_params`` belong to one prompt. So the endpoint serves each prompt as if a client had sent it alone, under
the request's id and the prompt's number. Their answers become one here: the index of a choice is its own and ``n``
times the number of its prompt, figures of the usage are added up, and events of streams are passed on as they come.

The first prompt that fails ends the others. Its error is the answer, or ends the stream that has begun.
"""

import asyncio
import json
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial, reduce
from http import HTTPStatus
from typing import Any

from starlette.types import ASGIApp, Message, Scope

from pd_proxy.apis import COMPLETIONS, SEVERAL, Body, encoded, parsed
from pd_proxy.error_answers import EVENT_END, is_error
from pd_proxy.headers import REQUEST_ID
from pd_proxy.http_client import Client
from pd_proxy.moves import NOT_VLLMS, event_of
from pd_proxy.parameters import undivided_reason

#: How many prompts of one request are under way at once, so that one client does not take all the servers.
_AT_ONCE = 16
_ID = REQUEST_ID.encode()
_LONGEST_ID = 240  # with a number behind it, the endpoint takes it as it is
#: Headers that are not the same for the whole and for each prompt. Answers are read here, so they are wanted plain.
_OWN = frozenset({b"content-length", b"transfer-encoding", b"accept-encoding", _ID})


def can_part(reason: str | None, body: Body, *, is_cut: bool) -> bool:
    """Return whether several prompts are all the ``reason`` why a request would be D's alone."""
    if reason != SEVERAL or not isinstance(body.get("stream"), bool | None):
        return False
    prompts = body["prompt"]
    are_texts = all(isinstance(prompt, str) for prompt in prompts)
    are_ids = all(isinstance(prompt, list) and all(type(token) is int for token in prompt) for prompt in prompts)
    is_usual = undivided_reason(COMPLETIONS, body | {"prompt": prompts[0]}, is_cut=is_cut) is None
    return (are_texts or are_ids) and is_usual


@dataclass(slots=True)
class _Part:
    """What the endpoint has answered to one prompt."""

    number: int
    status: int = 0
    headers: list[tuple[bytes, bytes]] = field(default_factory=list)
    content: bytes = b""  # of a stream, what is no whole event yet
    is_whole: bool = False
    error: bytes = b""  # as an event


@dataclass(slots=True, eq=False)
class Several:
    """One client's request with several prompts."""

    endpoint: ASGIApp  # of the API
    scope: Scope  # of the client's request
    client: Client
    body: Body
    _ended: asyncio.Event = field(default_factory=asyncio.Event)  # prompts that are under way are given up
    _answers: dict[int, Body] = field(default_factory=dict)  # by prompt; of a stream, its event with the usage
    _last: _Part = field(default_factory=lambda: _Part(0))  # the one that failed or, if none has, the last one

    async def serve(self) -> None:
        """Serve the request to its end.

        Raises:
            ClientDisconnect: the client left.
        """
        prompts = enumerate(self.body["prompt"])
        work = [asyncio.create_task(self._serve_prompts(prompts)) for _ in self.body["prompt"][:_AT_ONCE]]
        try:
            await asyncio.wait(work, return_when=asyncio.FIRST_EXCEPTION)
        finally:
            self._ended.set()
            await asyncio.wait(work)
        await asyncio.gather(*work)  # raises what the endpoint has raised
        await self._end(self._last)

    async def _serve_prompts(self, prompts: Iterator[tuple[int, object]]) -> None:
        """Serve the next prompt, and the next, until none is left or one has failed."""
        for number, prompt in prompts:
            part, content = _Part(number), [encoded(self.body | {"prompt": prompt})]
            identity = f"{self.client.record.identity[:_LONGEST_ID]}-{number}"
            scope = {**self.scope, "headers": _named(self.scope["headers"], identity)}
            await self.endpoint(scope, partial(self._receive, content), partial(self._take, part))
            if self._ended.is_set():
                return
            self._last = part
            if part.status != HTTPStatus.OK and is_error(part.content):
                part.error = event_of(parsed(part.content))
            if part.status != HTTPStatus.OK or not part.is_whole or part.error:
                self._ended.set()
                return

    async def _receive(self, content: list[bytes]) -> Message:
        """Give the endpoint a request, and then tell when its client has left."""
        if content:
            return {"type": "http.request", "body": content.pop()}
        await self._ended.wait()
        return {"type": "http.disconnect"}

    async def _take(self, part: _Part, message: Message) -> None:
        """Take a piece of the endpoint's answer, and send the client what it may have of it."""
        if message["type"] == "http.response.start":
            part.status, part.headers = message["status"], _named(message["headers"], self.client.record.identity)
            return
        part.content, part.is_whole = part.content + message["body"], not message["more_body"]
        if part.status == HTTPStatus.OK and self.client.record.streams:
            *events, part.content = part.content.split(EVENT_END)
            shown = b"".join(self._shown(part, raw) for raw in events)
            if not self.client.started:
                await self.client.start(part.status, part.headers)
            await self.client.send_piece(shown)
        elif part.status == HTTPStatus.OK and part.is_whole:
            with suppress(*NOT_VLLMS):
                self._answers[part.number] = self._numbered(part, part.content)
            part.is_whole = part.number in self._answers

    def _shown(self, part: _Part, raw: bytes) -> bytes:
        """Return what the client gets of an event; keep that with the usage until all of them are here."""
        try:
            event = self._numbered(part, raw.removeprefix(b"data: "))
        except NOT_VLLMS:  # a comment, an error, or the end
            if is_error(raw.removeprefix(b"data: ")):  # told when the other prompts have ended
                part.error = raw + EVENT_END
            return b"" if part.error or raw == b"data: [DONE]" else raw + EVENT_END
        if event["choices"]:
            return event_of(event)
        self._answers[part.number] = event
        return b""

    def _numbered(self, part: _Part, raw: bytes) -> Body:
        """Return what is told of one prompt, as it is told of one among several."""
        answer: Body = json.loads(raw)
        for choice in answer["choices"]:
            choice["index"] += part.number * (self.body.get("n") or 1)
        answer["id"] = answer["id"].removesuffix(f"-{part.number}")
        answer.pop("metrics", None)  # those of one prompt, which vLLM leaves out where there are several
        return answer

    def _whole(self) -> Body:
        """Return the answer to all prompts, or the last event of all their streams."""
        answers = [answer for _, answer in sorted(self._answers.items())]
        usage = reduce(_added, [answer.get("usage") for answer in answers])
        return answers[0] | {"choices": [choice for one in answers for choice in one["choices"]], "usage": usage}

    async def _end(self, last: _Part) -> None:
        """End the client's answer, by the last prompt, or by the one that has failed."""
        client, is_well = self.client, last.status == HTTPStatus.OK
        if last.error or not (is_well and last.is_whole):
            status = "" if is_well else f" with status {last.status}"
            client.record.problem = f"prompt {last.number} failed{status}"
        if client.started and last.error:
            client.record.broken_off = True
            await client.send_piece(last.error)
            if is_well and last.is_whole:  # as vLLM ends a stream with an error
                await client.send_piece(b"data: [DONE]" + EVENT_END)
                await client.end()
        elif not last.is_whole or (client.started and not is_well):
            await client.fail(HTTPStatus.BAD_GATEWAY, client.record.problem)
        elif client.started:
            usage = event_of(self._whole()) if self._answers else b""
            await client.send_piece(usage + b"data: [DONE]" + EVENT_END)
            await client.end()
        else:
            content = encoded(self._whole()) if is_well else last.content
            await client.send_whole(last.status, last.headers, content)


def _named(headers: Iterable[tuple[bytes, bytes]], identity: str) -> list[tuple[bytes, bytes]]:
    """Return headers with this request id, and without what says how long or how packed a body is."""
    return [pair for pair in headers if pair[0] not in _OWN] + [(_ID, identity.encode())]


def _added(one: Any, other: Any) -> Any:
    """Return the sum of the figures of two prompts, null where one does not tell."""
    if isinstance(one, dict) and isinstance(other, dict):
        return {name: _added(one.get(name), other.get(name)) for name in one | other}
    return None if one is None or other is None else one + other
