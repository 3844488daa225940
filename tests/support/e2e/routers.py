"""Routers as they come: their processes, and the APIs through which clients ask them."""

import json
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

from tests.support.e2e.client import MODEL_NAME

#: Paths below /v1.
CHATS_TOO = ("chat/completions", "responses", "messages")
APIS = ("completions", *CHATS_TOO)
_TOKENS = 16  # of an answer


@contextmanager
def running(command: Sequence[str], log: Path, env: Mapping[str, str] | None = None) -> Iterator[Callable[[], bool]]:
    """Run a process; yields what says whether it still runs, and fails with its log if it does not."""
    with log.open("wb") as output, subprocess.Popen(command, stdout=output, stderr=output, env=env) as process:

        def alive() -> bool:
            assert process.poll() is None, log.read_text()
            return True

        try:
            yield alive
        finally:
            process.terminate()
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()


def answer(url: str, api: str, prompt: str, *, stream: bool = False) -> str:
    """Return the text of the greedy answer to a text, which is the whole chat where the API is for chats."""
    said = [{"role": "user", "content": prompt}]
    own: dict[str, dict[str, Any]] = {
        "completions": {"prompt": prompt, "max_tokens": _TOKENS, "ignore_eos": True},
        "chat/completions": {"messages": said, "max_completion_tokens": _TOKENS, "ignore_eos": True},
        "responses": {"input": prompt, "max_output_tokens": _TOKENS},
        "messages": {"messages": said, "max_tokens": _TOKENS},
    }
    body = {"model": MODEL_NAME, "temperature": 0.0, "stream": stream, **own[api]}
    response = httpx.post(f"{url}/v1/{api}", json=body, timeout=120, trust_env=False)
    assert response.status_code == 200, response.text
    if not stream:
        return text_answered(api, response.json())
    events = (line.removeprefix("data: ") for line in response.text.splitlines() if line.startswith("data: {"))
    return "".join(_text_of_event(api, json.loads(event)) for event in events)


def text_answered(api: str, answer: dict[str, Any]) -> str:
    """The text of a whole answer."""
    if api == "completions":
        return str(answer["choices"][0]["text"])
    if api == "chat/completions":
        return str(answer["choices"][0]["message"]["content"])
    content = answer["output"][0]["content"] if api == "responses" else answer["content"]
    return "".join(part["text"] for part in content)


def _text_of_event(api: str, event: dict[str, Any]) -> str:
    if api == "completions":
        return "".join(choice["text"] for choice in event["choices"])
    if api == "chat/completions":
        return "".join(choice["delta"].get("content") or "" for choice in event["choices"])
    if api == "responses":
        return str(event["delta"]) if event["type"] == "response.output_text.delta" else ""
    return str(event["delta"].get("text", "")) if event["type"] == "content_block_delta" else ""
