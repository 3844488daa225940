"""What users' own clients get through the proxy: reasoning and calls of tools, in streams and in one piece, as from D.

Each is asked twice, of the proxy and of D alone, and has to understand the same. D writes what vLLM does. Browsers ask
first whether a page may.
"""

import json
from collections.abc import Callable
from typing import Any

import openai
import pytest

from tests.support.examples.fake_servers import TRANSFER, FakeServer, Received, Wire, answers
from tests.support.examples.served_proxy import Proxy, ProxySetup

USAGE: dict[str, Any] = {"prompt_tokens": 9, "completion_tokens": 6, "total_tokens": 15}
CALL = {"id": "call_1", "type": "function", "function": {"name": "look_up", "arguments": '{"city": "Köln"}'}}
CHAT = {"id": "chatcmpl-1", "created": 8, "model": "tiny"}
DELTAS: list[dict[str, Any]] = [
    {"role": "assistant", "content": ""},
    {"reasoning": "I sho"},
    {"reasoning": "uld look."},
    {"content": "Let me look."},
    {"tool_calls": [CALL | {"index": 0, "function": {"name": "look_up", "arguments": ""}}]},
    {"tool_calls": [{"index": 0, "function": {"arguments": '{"city": '}}]},
    {"tool_calls": [{"index": 0, "function": {"arguments": '"Köln"}'}}]},
]
MESSAGE = {"role": "assistant", "reasoning": "I should look.", "content": "Let me look.", "tool_calls": [CALL]}
TOOL = {"name": "look_up", "description": "Weather", "parameters": {"type": "object", "properties": {}}}


async def chats(received: Received, wire: Wire) -> None:
    """D's answer to a chat with tools, from a server with parsers."""
    if not received.body["stream"]:
        choice = {"index": 0, "message": MESSAGE, "finish_reason": "tool_calls"}
        await wire.json(200, CHAT | {"object": "chat.completion", "choices": [choice], "usage": USAGE})
        return
    await wire.head()
    choices: list[dict[str, Any]] = [{"index": 0, "delta": delta, "finish_reason": None} for delta in DELTAS]
    choices += [{"index": 0, "delta": {}, "finish_reason": "tool_calls"}]
    tellings: list[dict[str, Any]] = [{"choices": [choice]} for choice in choices]
    for told in (*tellings, {"choices": [], "usage": USAGE}):
        await wire.chunk(b"data: %s\n\n" % json.dumps(CHAT | {"object": "chat.completion.chunk"} | told).encode())
    await wire.chunk(b"data: [DONE]\n\n")
    await wire.end()


OF_MESSAGE: dict[str, Any] = {"id": "chatcmpl-1", "type": "message", "role": "assistant", "model": "tiny"}
BLOCKS: list[tuple[dict[str, Any], list[dict[str, Any]]]] = [
    (
        {"type": "thinking", "thinking": "", "signature": ""},
        [{"type": "thinking_delta", "thinking": "I should "}, {"type": "thinking_delta", "thinking": "look."}],
    ),
    ({"type": "text", "text": ""}, [{"type": "text_delta", "text": "Let me look."}]),
    (
        {"type": "tool_use", "id": "call_1", "name": "look_up", "input": {}},
        [{"type": "input_json_delta", "partial_json": part} for part in ('{"city": ', '"Köln"}')],
    ),
]


async def speaks_anthropic(received: Received, wire: Wire) -> None:
    """D's answer to a message with tools."""
    usage = {"input_tokens": 9, "output_tokens": 6}
    if not received.body.get("stream"):
        content = [
            {"type": "thinking", "thinking": "I should look.", "signature": ""},
            {"type": "text", "text": "Let me look."},
            {"type": "tool_use", "id": "call_1", "name": "look_up", "input": {"city": "Köln"}},
        ]
        await wire.json(200, OF_MESSAGE | {"content": content, "stop_reason": "tool_use", "usage": usage})
        return
    begun = OF_MESSAGE | {"content": [], "stop_reason": None, "usage": usage | {"output_tokens": 0}}
    events: list[dict[str, Any]] = [{"type": "message_start", "message": begun}]
    for index, (block, deltas) in enumerate(BLOCKS):
        events.append({"type": "content_block_start", "index": index, "content_block": block})
        events += [{"type": "content_block_delta", "index": index, "delta": delta} for delta in deltas]
        events.append({"type": "content_block_stop", "index": index})
    events.append({"type": "message_delta", "delta": {"stop_reason": "tool_use"}, "usage": usage})
    events.append({"type": "message_stop"})
    await wire.head()
    for event in events:
        await wire.chunk(f"event: {event['type']}\ndata: {json.dumps(event)}\n\n".encode())
    await wire.end()


def asked(setup: ProxySetup, d: FakeServer, p: FakeServer, ask: Callable[[str], Any]) -> Any:
    """What a client gets through the proxy, which is what it gets from D alone. P's answers have no use for it."""
    p.script = answers(200, json.dumps({"choices": [{"text": "P"}], "kv_transfer_params": TRANSFER}).encode())
    got = ask(setup.proxy([p], [d], plain_chats=True).url)
    assert "kv_transfer_params" in d.bodies[-1]
    assert ask(d.url) == got
    return got


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_openais_client_gets_reasoning_and_calls_of_tools(setup: ProxySetup, p: FakeServer, stream: bool) -> None:
    request: dict[str, Any] = {
        "model": "tiny", "messages": [{"role": "user", "content": "a question"}], "stream": stream, "temperature": 0.0,
        "tools": [{"type": "function", "function": TOOL}],
    }  # fmt: skip

    def ask(url: str) -> list[dict[str, Any]]:
        with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
            answer = client.chat.completions.create(**request)
            return [event.model_dump() for event in (answer if stream else [answer])]

    got = asked(setup, setup.server(chats), p, ask)
    name = "delta" if stream else "message"
    told = [choice[name] for event in got for choice in event["choices"]]
    assert "".join(one.get("reasoning") or "" for one in told) == "I should look."
    assert "".join(one["content"] or "" for one in told) == "Let me look."
    calls = [call["function"] for one in told for call in one["tool_calls"] or ()]
    assert json.loads("".join(call["arguments"] for call in calls)) == {"city": "Köln"}
    assert got[-1]["usage"]["total_tokens"] == 15


@pytest.mark.thorough
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_anthropics_client_gets_thinking_and_calls_of_tools(setup: ProxySetup, p: FakeServer, stream: bool) -> None:
    import anthropic  # noqa: PLC0415  seconds, which every collection of tests would take

    request: dict[str, Any] = {
        "model": "tiny", "max_tokens": 40, "messages": [{"role": "user", "content": "a question"}],
        "tools": [{"name": "look_up", "input_schema": {"type": "object"}}],
    }  # fmt: skip

    def ask(url: str) -> Any:
        with anthropic.Anthropic(base_url=url, api_key="none", max_retries=0) as client:
            if not stream:
                return client.messages.create(**request).model_dump()
            with client.messages.stream(**request) as events:
                return events.get_final_message().model_dump()

    got = asked(setup, setup.server(speaks_anthropic), p, ask)
    assert [block["type"] for block in got["content"]] == ["thinking", "text", "tool_use"]
    assert [got["content"][0]["thinking"], got["content"][2]["input"]] == ["I should look.", {"city": "Köln"}]
    assert got["stop_reason"] == "tool_use"


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages", "/v1/embeddings"])
def test_a_browser_is_told_by_d_which_pages_may_ask(proxy: Proxy, p: FakeServer, d: FakeServer, path: str) -> None:
    d.script = answers(200, b"OK", Access_Control_Allow_Origin="*")
    asked = {"Origin": "http://page", "Access-Control-Request-Method": "POST"}
    response = proxy.http.options(path, headers=asked)
    assert (response.status_code, response.headers["access-control-allow-origin"]) == (200, "*")
    (received,) = d.received
    assert (received.method, received.path, received.headers["origin"]) == ("OPTIONS", path, "http://page")
    assert received.headers["access-control-request-method"] == "POST"
    assert p.received == []
