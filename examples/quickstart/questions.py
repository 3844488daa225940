"""What the demonstration asks, and how: OpenAI requests over HTTP, answers with their timing."""

import asyncio
import itertools
import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

_REQUEST_TIMEOUT_S = 120.0


class QuestionFailed(Exception):  # noqa: N818  it is named after the event, like its message
    """A server refused a question or broke off; the message holds its words."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """One request: chat messages of alternating roles that start with the user's, or a text to be continued."""

    messages: tuple[str, ...] = ()
    text: str = ""
    max_tokens: int = 40

    @property
    def caption(self) -> str:
        """The request in few words: the last message, or the last line of the text."""
        return (self.messages[-1] if self.messages else self.text).splitlines()[-1]

    @property
    def path(self) -> str:
        """The endpoint that takes it."""
        return "/v1/chat/completions" if self.messages else "/v1/completions"

    def body(self) -> dict[str, Any]:
        """The part of the request's body that says what is asked."""
        if not self.messages:
            return {"prompt": self.text}
        roles = itertools.cycle(("user", "assistant"))
        pairs = zip(roles, self.messages, strict=False)
        return {"messages": [{"role": role, "content": content} for role, content in pairs]}


@dataclass(frozen=True, slots=True)
class Question:
    """One row of the table: prompts that are sent at the same time."""

    title: str
    prompts: tuple[Prompt, ...]
    stream: bool = False


@dataclass(frozen=True, slots=True)
class Answer:
    """What came back for one prompt."""

    text: str
    prompt_tokens: int
    total_s: float  # until the whole answer was here
    first_token_s: float | None  # until the first token was here; None where it was not streamed


def ask(url: str, model: str, question: Question, salt: str) -> list[Answer]:
    """Send all prompts of ``question`` to ``url`` at the same time; the answers in their order.

    ``salt`` keeps prefix caches apart: a request is served from a cache only by requests of the same salt.

    Raises:
        QuestionFailed: a prompt was not answered with 200 and a complete answer.
    """
    return asyncio.run(_ask_all(url, model, question, salt))


async def _ask_all(url: str, model: str, question: Question, salt: str) -> list[Answer]:
    async with httpx.AsyncClient(base_url=url, timeout=_REQUEST_TIMEOUT_S, trust_env=False) as client:
        send = _ask_streamed if question.stream else _ask_whole
        return await asyncio.gather(*(send(client, prompt, _body(model, prompt, salt)) for prompt in question.prompts))


def _body(model: str, prompt: Prompt, salt: str) -> dict[str, Any]:
    return {
        "model": model,
        "temperature": 0,
        "max_tokens": prompt.max_tokens,
        "cache_salt": salt,
        **prompt.body(),
    }


async def _ask_whole(client: httpx.AsyncClient, prompt: Prompt, body: dict[str, Any]) -> Answer:
    start = time.perf_counter()
    try:
        response = await client.post(prompt.path, json=body)
    except httpx.HTTPError as error:
        raise _broken_off(client, error) from error
    total_s = time.perf_counter() - start
    if response.status_code != 200:
        raise _refused(response, response.text)
    answer = response.json()
    return Answer(_text_of(answer["choices"][0], "message"), answer["usage"]["prompt_tokens"], total_s, None)


async def _ask_streamed(client: httpx.AsyncClient, prompt: Prompt, body: dict[str, Any]) -> Answer:
    body = {**body, "stream": True, "stream_options": {"include_usage": True}}
    start = time.perf_counter()
    first_token_s: float | None = None
    parts: list[str] = []
    prompt_tokens: int | None = None
    try:
        async with client.stream("POST", prompt.path, json=body) as response:
            if response.status_code != 200:
                raise _refused(response, (await response.aread()).decode(errors="replace"))
            async for event in _events(response):
                for choice in event["choices"]:
                    if part := _text_of(choice, "delta"):
                        first_token_s = first_token_s or time.perf_counter() - start
                        parts.append(part)
                if event.get("usage"):
                    prompt_tokens = event["usage"]["prompt_tokens"]
    except httpx.HTTPError as error:
        raise _broken_off(client, error) from error
    if prompt_tokens is None:
        raise QuestionFailed(f"{client.base_url} ended a streamed answer early, after {''.join(parts)!r}")
    return Answer("".join(parts), prompt_tokens, time.perf_counter() - start, first_token_s)


async def _events(response: httpx.Response) -> Any:
    """The JSON objects of a stream of server-sent events."""
    async for line in response.aiter_lines():
        if line.startswith("data: ") and line != "data: [DONE]":
            event = json.loads(line.removeprefix("data: "))
            if "choices" not in event:  # an error after the headers were sent
                raise _refused(response, line)
            yield event


def _text_of(choice: dict[str, Any], chat_key: str) -> str:
    text = choice[chat_key].get("content") if chat_key in choice else choice["text"]
    return str(text or "")


def _refused(response: httpx.Response, words: str) -> QuestionFailed:
    return QuestionFailed(f"{response.request.url} answered {response.status_code}: {words.strip()[:1000]}")


def _broken_off(client: httpx.AsyncClient, error: httpx.HTTPError) -> QuestionFailed:
    return QuestionFailed(f"{client.base_url} broke off: {type(error).__name__} {error}".rstrip())


# The licence has nothing to do with the transfer; it is a long text that every copy of this project holds.
_LICENCE = Path(__file__).resolve().parents[2] / "LICENSE"
_LICENCE_CHARACTERS = 7300  # about 1,500 tokens


def some_blocks() -> Question:
    """A prompt of some blocks."""
    return Question("some blocks", (Prompt(text=_licence(_LICENCE_CHARACTERS // 8), max_tokens=1),))


def _licence(characters: int) -> str:
    return " ".join(_LICENCE.read_text().split())[:characters]


def questions() -> tuple[Question, ...]:
    """The questions of the demonstration."""
    licence = _licence(_LICENCE_CHARACTERS)
    return (
        Question("a line", (Prompt(text="The capital of France is", max_tokens=16),)),
        Question(
            "a chat",
            (
                Prompt(
                    messages=(
                        "Hello! I am Ana and I am learning to sail.",
                        "Nice to meet you, Ana! What would you like to know about sailing?",
                        "What is a keel for? One sentence, please.",
                    )
                ),
            ),
        ),
        Question(
            "a long prompt",
            (
                Prompt(
                    messages=(
                        f"Here is a licence.\n{licence}\nIn one sentence, what does this licence allow me to do?",
                    )
                ),
            ),
        ),
        Question(
            "two at once",
            (
                Prompt(messages=("How many days are in a week?",)),
                Prompt(messages=("Write one sentence about a lighthouse.",)),
            ),
        ),
        Question("streamed", (Prompt(messages=("What do bees make?",)),), stream=True),
    )
