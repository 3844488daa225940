"""Decode servers that go on with each other's answers, and a proxy that has such answers move.

What such a server writes follows from its prompt: the rest of one text.
"""

import asyncio
import json
import re
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx

from pd_proxy.apis import CHAT, COMPLETIONS, Api
from tests.support.examples.fake_servers import (
    FakeServer,
    Received,
    Script,
    Wire,
    decodes,
    opened,
    prefills_by_name,
    stalls,
)
from tests.support.examples.served_proxy import ProxySetup
from tests.support.waiting import until

PROMPT_IDS = [7, 8, 9]
#: Tokens that every decode server writes behind the prompt, with the text that comes with each: 12 and 13 are one
#: character.
TEXT = [(10, " a"), (11, " b"), (12, ""), (13, "ü"), (14, " c"), (15, " d")]
WHOLE = " a bü c d"
DONE = b"data: [DONE]\n\n"
BODIES: dict[str, dict[str, Any]] = {
    COMPLETIONS.path: {"prompt": "a question"},
    CHAT.path: {"messages": [{"role": "user", "content": "a question"}]},
}


def event(name: str, **members: Any) -> bytes:
    """One of D's, as vLLM writes it."""
    known = {"id": name, "object": "text_completion", "created": 8, "model": "tiny"}
    return b"data: " + json.dumps(known | members, separators=(",", ":"), ensure_ascii=False).encode() + b"\n\n"


def tokens(first: int, last: int, *, chat: bool = False, name: str = "x", begins: bool = False) -> bytes:
    """The event of some tokens of ``TEXT``; one that ``begins`` an answer has the ids of its prompt."""
    text, ids = "".join(text for _, text in TEXT[first:last]), [token for token, _ in TEXT[first:last]]
    choice: dict[str, Any] = {"index": 0} | ({"delta": {"content": text}} if chat else {"text": text})
    choice |= {"logprobs": None, "finish_reason": "length" if last == len(TEXT) else None}
    told = {} if chat else {"prompt_token_ids": PROMPT_IDS + [token for token, _ in TEXT[:first]] if begins else None}
    return event(name, choices=[choice | told | {"token_ids": ids}])


def role(name: str = "x") -> bytes:
    """The first event of a chat."""
    choice = {"index": 0, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}
    return event(name, choices=[choice], prompt_token_ids=PROMPT_IDS)


class Decoder:
    """A decode server that goes on with ``TEXT`` where its prompt ends.

    Args:
        name: the id of its answers.
        waits_at: so many tokens, for its gate. Behind it comes one event, and then no more unless the answer ``stays``.
        breaks_at: so many tokens.
    """

    def __init__(self, name: str, waits_at: int = -1, *, stays: bool = False, breaks_at: int = -1) -> None:
        self.gate = threading.Event()
        self._name = name
        self._waits_at = waits_at
        self._stays = stays
        self._breaks_at = breaks_at

    async def __call__(self, received: Received, wire: Wire) -> None:
        if received.path == "/v1/models":
            await decodes(received, wire)
            return
        body, chat = received.body, received.path == CHAT.path
        begin = len(body["prompt"]) - len(PROMPT_IDS) if isinstance(body.get("prompt"), list) else 0
        end = min(len(TEXT), begin + (body["max_tokens"] or len(TEXT)))
        await wire.head()
        if chat:
            await wire.chunk(role(self._name))
        for at in range(begin, end):
            if at == self._waits_at:
                await opened(self.gate)
            if at == self._breaks_at:
                wire.drop()
                return
            told, ends = tokens(at, at + 1, chat=chat, name=self._name, begins=at == begin), at + 1 == end
            await wire.chunk(told.replace(b'"finish_reason":null', b'"finish_reason":"length"') if ends else told)
            if at == self._waits_at and not ends and not self._stays:
                await stalls(received, wire)
            await asyncio.sleep(0.005)  # so that the next event is a piece of its own
        usage = {"prompt_tokens": len(PROMPT_IDS) + begin, "completion_tokens": end - begin, "total_tokens": 99}
        await wire.chunk(event(self._name, choices=[], usage=usage) + DONE)
        await wire.end()


class Moving:
    """A proxy and decode servers with these scripts, of which the first one gets the next request."""

    def __init__(self, setup: ProxySetup, p: FakeServer, file: Path, *scripts: Script, **options: Any) -> None:
        self.p, self.file = p, file
        p.script = prefills_by_name
        servers = [setup.server(decodes) for _ in scripts]
        options.setdefault("plain_chats", True)
        self.proxy = setup.proxy([p], list(servers), draining=str(file), status_page=True, **options)
        assert self.proxy.complete().status_code == 200  # so that P's control address is known
        p.received.clear()
        servers[0].received.clear()
        self.servers = [*servers[1:], servers[0]]
        for server, script in zip(self.servers, scripts, strict=True):
            server.script = script

    def answer(self, *then: Callable[[], None], api: Api = COMPLETIONS, **changes: Any) -> bytes:
        """The answer to a stream, as far as it came. ``then``: when the client has " a", and "ü"."""
        body, got = {"stream": True, "max_tokens": 6} | BODIES[api.path] | changes, b""
        calls = list(zip((b" a", "ü".encode()), then, strict=False))
        with suppress(httpx.RemoteProtocolError), self.proxy.http.stream("POST", api.path, json=body) as response:
            for piece in response.iter_raw():
                got += piece
                while calls and calls[0][0] in got:
                    calls.pop(0)[1]()
        return got

    def drain(self, *leaving: FakeServer, found_at: str = "") -> None:
        """Name these servers in the file, and where prefixes are found; wait until the proxy has seen it."""
        self.write("".join(f"{server.url}/ {found_at}\n" for server in leaving).encode())
        names = {server.url for server in leaving}
        until(lambda: {one["url"] for one in self.status()["servers"] if one["state"] == "leaving"} == names)

    def write(self, content: bytes) -> None:
        """Replace what the file has: the proxy never sees it half written."""
        new = self.file.with_suffix(".new")
        new.write_bytes(content)
        new.replace(self.file)

    def drained(self, decoder: Decoder, found_at: str = "", **changes: Any) -> bytes:
        """The answer to a stream whose decode server is drained when the client has the first text."""

        def then() -> None:
            self.drain(self.servers[0], found_at=found_at)
            decoder.gate.set()

        return self.answer(then, **changes)

    def status(self) -> Any:
        """What the status page is told."""
        with self.proxy.http.stream("GET", "/status/events") as stream:
            return json.loads(next(line for line in stream.iter_lines() if line.startswith("data: "))[6:])

    def counted(self) -> list[tuple[str, str]]:
        """How many answers have moved and gone on, and how many could not."""
        until(lambda: self.proxy.in_flight() == 0)
        return re.findall(r'^pd_proxy_moved_total{result="(\w+)"} (\d+)$', self.proxy.http.get("/metrics").text, re.M)


def events_of(stream: bytes) -> list[dict[str, Any]]:
    """The events of an answer but the last one."""
    return [json.loads(one[6:]) for one in stream.split(b"\n\n") if one and one != b"data: [DONE]"]


def text_of(stream: bytes) -> str:
    """The text in all events."""
    choices = [choice for one in events_of(stream) for choice in one.get("choices", [])]
    return "".join(choice["delta"]["content"] if "delta" in choice else choice["text"] for choice in choices)
