"""Questions over real HTTP, to a small stand-in for vLLM's OpenAI endpoints."""

import http.server
import json
import socketserver
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest

from examples.quickstart import __main__ as demo
from examples.quickstart.deployment import Deployment
from examples.quickstart.questions import Prompt, Question, QuestionFailed, ask, questions
from examples.quickstart.servers import Server

LINE = Prompt(text="The capital of France is", max_tokens=8)
CHAT = Prompt(messages=("Hello!", "Hello, Ana.", "What is\na keel?"))


class FakeVllm(socketserver.ThreadingTCPServer):
    """Answers every prompt with " Paris."; ``mode`` is how it fails."""

    daemon_threads = True
    request_queue_size = 32

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.bodies: list[dict[str, Any]] = []
        self.mode = "good"
        self.url = f"http://127.0.0.1:{self.server_address[1]}"


class _Handler(http.server.BaseHTTPRequestHandler):
    server: FakeVllm
    usage: ClassVar = {"prompt_tokens": 7}

    def log_message(self, *_: object) -> None:
        pass

    def do_GET(self) -> None:
        requests = len(self.server.bodies)
        self._answer(200, f'vllm:request_success_total 0\nvllm:request_success_total{{a="b"}} {requests}\n')

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.bodies.append(body)
        if self.server.mode == "refuse":
            self._answer(400, '{"error": {"message": "the prompt is too long"}}')
        elif body.get("stream"):
            self._answer(200, self._events(body))
        else:
            choice = {"message": {"content": " Paris."}} if "messages" in body else {"text": " Paris."}
            self._answer(200, json.dumps({"choices": [choice], "usage": self.usage}))

    def _events(self, body: dict[str, Any]) -> str:
        deltas = ({"role": "assistant"}, {"content": " Par"}, {"content": "is."})
        texts = [{"delta": delta} if "messages" in body else {"text": delta.get("content", "")} for delta in deltas]
        events: list[dict[str, Any]] = [{"choices": [choice]} for choice in texts]
        if self.server.mode == "good":
            events.append({"choices": [], "usage": self.usage})
        if self.server.mode == "late error":
            events.append({"error": {"message": "the decode server is gone"}})
        return "".join(f"data: {json.dumps(event)}\n\n" for event in events) + "data: [DONE]\n\n"

    def _answer(self, status: int, text: str) -> None:
        self.send_response(status)
        self.end_headers()
        self.wfile.write(text.encode())


@pytest.fixture
def vllm() -> Iterator[FakeVllm]:
    with FakeVllm() as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("prompt", [LINE, CHAT])
def test_an_answer_has_its_text_and_timing(vllm: FakeVllm, prompt: Prompt, stream: bool) -> None:
    (answer,) = ask(vllm.url, "demo", Question("one", (prompt,), stream), "salt")
    assert (answer.text, answer.prompt_tokens) == (" Paris.", 7)
    assert (answer.first_token_s is not None) is stream
    assert 0 < (answer.first_token_s or 1e-9) <= answer.total_s


def test_what_is_sent(vllm: FakeVllm) -> None:
    ask(vllm.url, "demo", Question("both", (LINE, CHAT)), "salt")
    line, chat = sorted(vllm.bodies, key=lambda body: "messages" in body)
    assert line == {
        "model": "demo",
        "prompt": "The capital of France is",
        "max_tokens": 8,
        "temperature": 0,
        "cache_salt": "salt",
    }
    assert [message["role"] for message in chat["messages"]] == ["user", "assistant", "user"]
    assert CHAT.caption == "a keel?"


@pytest.mark.parametrize("stream", [False, True])
def test_a_refusal_holds_the_servers_words(vllm: FakeVllm, stream: bool) -> None:
    vllm.mode = "refuse"
    with pytest.raises(QuestionFailed, match=r"answered 400: .*the prompt is too long"):
        ask(vllm.url, "demo", Question("one", (CHAT,), stream), "salt")


@pytest.mark.parametrize(("mode", "words"), [("late error", "the decode server is gone"), ("cut", "ended .* early")])
def test_a_stream_that_breaks_off_is_no_answer(vllm: FakeVllm, mode: str, words: str) -> None:
    vllm.mode = mode
    with pytest.raises(QuestionFailed, match=words):
        ask(vllm.url, "demo", Question("one", (CHAT,), stream=True), "salt")


def test_a_refusal_is_shown_with_what_the_servers_logged(vllm: FakeVllm, tmp_path: Path) -> None:
    server = Server("decode server", [], url=vllm.url, log=tmp_path / "log")
    server.log.write_text("(Worker pid=7) ERROR 11-21 11:02:34 [half.py:1] PDConnector: the pull failed\n")
    failure = demo._with_the_servers_words(QuestionFailed("answered 500"), Deployment(server, server, server))
    assert str(failure).startswith("answered 500\ndecode server: (Worker pid=7) ERROR")


def test_a_server_that_is_gone_is_named() -> None:
    with pytest.raises(QuestionFailed, match=r"http://127\.0\.0\.1:1 broke off: ConnectError"):
        ask("http://127.0.0.1:1", "demo", Question("one", (LINE,)), "salt")


def test_no_question_shares_a_salt_with_another_or_with_its_own_comparison(
    vllm: FakeVllm, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("examples.quickstart.metrics.work_since.__defaults__", (0.0,))
    server = Server("any", [], url=vllm.url, log=demo._LOGS)
    for _ in range(2):
        demo._ask_twice(Deployment(server, server, server), Question("one", (LINE,)), decode_tp=1)
    assert len({body["cache_salt"] for body in vllm.bodies}) == 4


def test_the_questions_cover_every_kind() -> None:
    asked = questions()
    assert any(question.stream for question in asked)
    assert any(len(question.prompts) == 2 for question in asked)
    prompts = [prompt for question in asked for prompt in question.prompts]
    assert any(prompt.text for prompt in prompts)
    assert any(len(prompt.messages) > 1 for prompt in prompts)
    assert any(len(prompt.messages[0]) > 7000 for prompt in prompts if prompt.messages)
