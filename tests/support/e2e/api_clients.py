"""APIs beside OpenAI's text completions, asked by the clients that their users have."""

import json
from dataclasses import dataclass
from typing import Any

import httpx
import openai

from tests.support.e2e.client import MODEL_NAME, Chat
from tests.support.e2e.images import Image

_NO_KEY = "none"
_SCHEMA = {
    "type": "object",
    "properties": {"numbers": {"type": "array", "items": {"type": "integer"}, "minItems": 8}},
    "required": ["numbers"],
}
_CITIES = {"type": "object", "properties": {"city": {"enum": ["Paris", "Rome"]}}, "required": ["city"]}
_NAMED: dict[str, Any] = {"name": "look_up", "description": "Weather"}
_FORMAT: dict[str, Any] = {"type": "json_schema", "name": "numbers", "schema": _SCHEMA}

#: By API: one call of a tool, which the model cannot but make.
CALLS_OF_TOOLS: dict[str, dict[str, Any]] = {
    "chats": {
        "tools": [{"type": "function", "function": _NAMED | {"parameters": _CITIES}}],
        "tool_choice": "required", "parallel_tool_calls": False,
    },
    "responses": {
        "tools": [{"type": "function"} | _NAMED | {"parameters": _CITIES}],
        "tool_choice": "required", "parallel_tool_calls": False,
    },
    "messages": {
        "tools": [_NAMED | {"input_schema": _CITIES}],
        "tool_choice": {"type": "any", "disable_parallel_tool_use": True},
    },
}  # fmt: skip
#: By API: an answer by a schema, with log-probabilities where the API has any.
ANSWERS_BY_SCHEMA: dict[str, dict[str, Any]] = {
    "chats": {
        "response_format": {"type": "json_schema", "json_schema": {"name": "numbers", "schema": _SCHEMA}},
        "logprobs": True, "top_logprobs": 2,
    },
    "responses": {"text": {"format": _FORMAT}, "include": ["message.output_text.logprobs"], "top_logprobs": 2},
    "messages": {"output_config": {"format": {"type": "json_schema", "schema": _SCHEMA}}},
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Told:
    """What a client gets of an answer, in one piece or put together from a stream."""

    text: str
    reasoning: str = ""
    calls: tuple[tuple[str, str], ...] = ()  # of tools: name and arguments; their ids are random
    logprobs: tuple[float, ...] = ()


class ApiClient:
    """Asks a server, or a proxy, through one API at a time. Decoding is greedy; each answer has so many tokens."""

    def __init__(self, url: str, tokens: int = 16) -> None:
        self._url = url
        self._tokens = tokens

    def told(self, api: str, prompt: Chat, *, stream: bool, **changes: Any) -> Told:
        """Return what the client of an API, "chats", "responses" or "messages", gets; ``changes`` are of the body."""
        if api == "messages":
            return self._message(prompt, stream=stream, changes=changes)
        with openai.OpenAI(base_url=f"{self._url}/v1", api_key=_NO_KEY, max_retries=0) as client:
            return (self._chat if api == "chats" else self._response)(client, prompt, stream=stream, changes=changes)

    def _chat(self, client: openai.OpenAI, prompt: Chat, *, stream: bool, changes: dict[str, Any]) -> Told:
        asked: dict[str, Any] = {
            "model": prompt.model, "messages": [{"role": "user", "content": _text(prompt)}], "temperature": 0.0,
            "max_completion_tokens": self._tokens, "stream": stream, "extra_body": changes,
        }  # fmt: skip
        answer = client.chat.completions.create(**asked)
        choices = [choice for part in (answer if stream else [answer]) for choice in part.choices]
        pieces = [choice.delta if stream else choice.message for choice in choices]
        calls: dict[int, tuple[str, str]] = {}
        for number, call in ((number, call) for piece in pieces for number, call in enumerate(piece.tool_calls or ())):
            index = call.index if stream else number
            name, arguments = calls.get(index, ("", ""))
            calls[index] = name + (call.function.name or ""), arguments + (call.function.arguments or "")
        steps = [step for choice in choices if choice.logprobs for step in choice.logprobs.content or ()]
        return Told(
            "".join(piece.content or "" for piece in pieces),
            "".join(getattr(piece, "reasoning", None) or "" for piece in pieces),
            tuple(calls.values()),
            tuple(step.logprob for step in steps),
        )

    def _response(self, client: openai.OpenAI, prompt: Chat, *, stream: bool, changes: dict[str, Any]) -> Told:
        content = [
            {"type": "input_image", "image_url": part.url, "detail": "auto"}
            if isinstance(part, Image)
            else {"type": "input_text", "text": part}
            for part in prompt.parts
        ]
        asked: dict[str, Any] = {
            "model": prompt.model, "input": [{"role": "user", "content": content}], "temperature": 0.0,
            "max_output_tokens": self._tokens, "stream": stream, "extra_body": changes,
        }  # fmt: skip
        answer = client.responses.create(**asked)
        if not stream:
            parts = [part for item in answer.output if item.type == "message" for part in item.content]
            return Told(
                answer.output_text,
                "".join(part.text for item in answer.output if item.type == "reasoning" for part in item.content),
                tuple((item.name, item.arguments) for item in answer.output if item.type == "function_call"),
                tuple(step.logprob for part in parts for step in part.logprobs or ()),
            )
        events = list(answer)
        assert (events[0].type, events[-1].type) == ("response.created", "response.completed")
        shown = [event for event in events if event.type == "response.output_text.delta"]
        ended = [event.item for event in events if event.type == "response.output_item.done"]
        return Told(
            "".join(event.delta for event in shown),
            "".join(event.delta for event in events if event.type == "response.reasoning_text.delta"),
            tuple((item.name, item.arguments) for item in ended if item.type == "function_call"),
            tuple(step.logprob for event in shown for step in event.logprobs or ()),
        )

    def _message(self, prompt: Chat, *, stream: bool, changes: dict[str, Any]) -> Told:
        import anthropic  # noqa: PLC0415  seconds, which every collection of tests would take

        content = [_block(part) for part in prompt.parts]
        asked: dict[str, Any] = {
            "model": prompt.model, "messages": [{"role": "user", "content": content}], "max_tokens": self._tokens,
            "extra_body": {"temperature": 0.0} | changes,
        }  # fmt: skip
        with anthropic.Anthropic(base_url=self._url, api_key=_NO_KEY, max_retries=0) as client:
            if stream:
                with client.messages.stream(**asked) as events:
                    answer = events.get_final_message()
            else:
                answer = client.messages.create(**asked)
        return Told(
            "".join(block.text for block in answer.content if block.type == "text"),
            "".join(block.thinking for block in answer.content if block.type == "thinking"),
            tuple((block.name, json.dumps(block.input)) for block in answer.content if block.type == "tool_use"),
        )

    def generate(self, tokens: list[int], *, stream: bool) -> list[int]:
        """Return the token ids that /inference/v1/generate answers."""
        sampling = {"temperature": 0.0, "max_tokens": self._tokens, "ignore_eos": True}
        body = {"model": MODEL_NAME, "token_ids": tokens, "sampling_params": sampling, "stream": stream}
        response = httpx.post(f"{self._url}/inference/v1/generate", json=body, timeout=120, trust_env=False)
        assert response.status_code == 200, response.text
        if not stream:
            return [int(token) for token in response.json()["choices"][0]["token_ids"]]
        lines = [line.removeprefix("data: ") for line in response.text.splitlines() if line]
        assert lines.pop() == "[DONE]", response.text
        choices = [choice for line in lines for choice in json.loads(line)["choices"]]
        return [int(token) for choice in choices for token in choice["token_ids"]]


def _text(prompt: Chat) -> str:
    return "".join(part for part in prompt.parts if isinstance(part, str))


def _block(part: str | Image) -> dict[str, Any]:
    if isinstance(part, str):
        return {"type": "text", "text": part}
    kind, _, data = part.url.removeprefix("data:").partition(";base64,")
    return {"type": "image", "source": {"type": "base64", "media_type": kind, "data": data}}
