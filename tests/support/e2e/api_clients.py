"""APIs beside OpenAI's completions, asked by the clients that their users have."""

import json
from typing import Any, cast

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


class ApiClient:
    """Asks a server, or a proxy, through one API at a time. Decoding is greedy; each answer has so many tokens."""

    def __init__(self, url: str, tokens: int = 16) -> None:
        self._url = url
        self._tokens = tokens

    def responses(self, prompt: Chat, *, stream: bool) -> str:
        """Return the text that OpenAI's client gets of /v1/responses."""
        content = [
            {"type": "input_image", "image_url": part.url, "detail": "auto"}
            if isinstance(part, Image)
            else {"type": "input_text", "text": part}
            for part in prompt.parts
        ]
        asked: dict[str, Any] = {
            "model": prompt.model, "input": [{"role": "user", "content": content}], "temperature": 0.0,
            "max_output_tokens": self._tokens, "extra_body": {"ignore_eos": True},
        }  # fmt: skip
        with openai.OpenAI(base_url=f"{self._url}/v1", api_key=_NO_KEY, max_retries=0) as client:
            if not stream:
                return str(client.responses.create(**asked).output_text)
            events = list(client.responses.create(stream=True, **asked))
        assert (events[0].type, events[-1].type) == ("response.created", "response.completed")
        return "".join(event.delta for event in events if event.type == "response.output_text.delta")

    def structured_response(self, prompt: Chat) -> str:
        """Return the beginning of the JSON that OpenAI's client gets of /v1/responses, by a schema."""
        wanted = {"format": {"type": "json_schema", "name": "numbers", "schema": _SCHEMA}}
        with openai.OpenAI(base_url=f"{self._url}/v1", api_key=_NO_KEY, max_retries=0) as client:
            answer = client.responses.create(
                model=prompt.model, input=_text(prompt), temperature=0.0, max_output_tokens=self._tokens,
                text=cast("Any", wanted),
            )  # fmt: skip
        return str(answer.output_text)

    def structured_chat(self, prompt: Chat) -> tuple[str, list[float]]:
        """Return the beginning of the JSON that OpenAI's client gets of a chat, by a schema, with log-probabilities."""
        wanted = {"type": "json_schema", "json_schema": {"name": "numbers", "schema": _SCHEMA}}
        with openai.OpenAI(base_url=f"{self._url}/v1", api_key=_NO_KEY, max_retries=0) as client:
            (choice,) = client.chat.completions.create(
                model=prompt.model, messages=[{"role": "user", "content": _text(prompt)}], temperature=0.0,
                max_completion_tokens=self._tokens, logprobs=True, top_logprobs=2, response_format=cast("Any", wanted),
            ).choices  # fmt: skip
        assert choice.logprobs is not None
        return str(choice.message.content), [step.logprob for step in choice.logprobs.content or ()]

    def messages(self, prompt: Chat, *, stream: bool) -> str:
        """Return the text that Anthropic's client gets of /v1/messages."""
        import anthropic  # noqa: PLC0415  seconds, which every collection of tests would take

        content = [_block(part) for part in prompt.parts]
        asked: dict[str, Any] = {
            "model": prompt.model, "messages": [{"role": "user", "content": content}], "max_tokens": self._tokens,
            "extra_body": {"temperature": 0.0},
        }  # fmt: skip
        with anthropic.Anthropic(base_url=self._url, api_key=_NO_KEY, max_retries=0) as client:
            if stream:
                with client.messages.stream(**asked) as events:
                    return "".join(events.text_stream)
            return "".join(block.text for block in client.messages.create(**asked).content if block.type == "text")

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
