"""A prefill server whose token a client gets, and a decode server that begins with the same one: what they write."""

import json
from typing import Any

from pd_proxy.apis import Body
from tests.support.examples.fake_servers import NAMED_TRANSFER, FakeServer, Received, Script, Wire
from tests.support.examples.moving import DONE, PROMPT_IDS
from tests.support.examples.served_proxy import Proxy, ProxySetup

GREEDY: dict[str, Any] = {"prompt": "a", "stream": True, "temperature": 0, "max_tokens": 5}
A_CHAT: dict[str, Any] = GREEDY | {"messages": [{"role": "user", "content": "a"}]}
del A_CHAT["prompt"]
TOKEN_ID = 10


def prefilled(text: str, *, chat: bool = False, **transfer: Any) -> Body:
    """P's answer, as vLLM writes it for who asks for ids."""
    choice = {"index": 0, "finish_reason": "length", "token_ids": [TOKEN_ID]}
    told: Body = {"id": "cmpl-1", "object": "text_completion", "created": 7, "model": "tiny"}
    if chat:
        choice |= {"message": {"role": "assistant", "content": text}}
        told |= {"object": "chat.completion", "prompt_token_ids": PROMPT_IDS}
    else:
        choice |= {"text": text, "prompt_token_ids": PROMPT_IDS}
    return told | {"choices": [choice], "kv_transfer_params": NAMED_TRANSFER | transfer}


def completion_event(text: str, finish_reason: str | None = None) -> bytes:
    """One of D's, as vLLM writes it."""
    choice = {"index": 0, "text": text, "logprobs": None, "finish_reason": finish_reason, "stop_reason": None}
    body = {"id": "cmpl-1", "object": "text_completion", "created": 8, "model": "tiny", "choices": [choice]}
    return b"data: " + json.dumps(body, separators=(",", ":"), ensure_ascii=False).encode() + b"\n\n"


USAGE_EVENT = (
    b'data: {"id":"cmpl-1","choices":[],"usage":{"prompt_tokens":1,"completion_tokens":3,"total_tokens":4}}\n\n'
)
GREEDY_STREAM = (
    completion_event(" gr") + completion_event("ün") + completion_event(" dich", "length") + USAGE_EVENT + DONE
)


def completion_text(stream: bytes) -> str:
    """The text in all events of a stream."""
    events = [json.loads(one[6:]) for one in stream.split(b"\n\n") if one and one != b"data: [DONE]"]
    return "".join(choice["text"] for one in events for choice in one["choices"])


def prefills_as(text: str, finish_reason: str = "length") -> Script:
    """A prefill server whose token has this text."""

    async def script(_: Received, wire: Wire) -> None:
        answer = prefilled(text)
        answer["choices"][0]["finish_reason"] = finish_reason
        if finish_reason != "length":
            del answer["kv_transfer_params"]
        await wire.json(200, answer)

    return script


async def completes(_: Received, wire: Wire) -> None:
    await wire.head()
    await wire.chunk(GREEDY_STREAM)
    await wire.end()


def greedy_text(proxy: Proxy, **changed: Any) -> str:
    """The text of a whole stream."""
    response = proxy.http.post("/v1/completions", json=GREEDY | changed)
    assert response.status_code == 200
    return completion_text(response.content)


def greedy_proxy(setup: ProxySetup, p: FakeServer, d: FakeServer, legs: str) -> Proxy:
    """A proxy whose next request goes in either way, and servers that have forgotten what it has asked."""
    proxy = setup.proxy([p], [d], legs=legs)
    assert greedy_text(proxy) == " grün dich"
    for server in (p, d):
        server.received.clear()
    return proxy
