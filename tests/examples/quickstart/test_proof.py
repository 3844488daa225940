"""A decode server proves its prefill server before anything is counted, or the demonstration says what came of it."""

import http.server
import json
import socketserver
import threading
from collections.abc import Iterator

import pytest

from examples.quickstart import proof
from examples.quickstart.questions import QuestionFailed


class Servers(socketserver.ThreadingTCPServer):
    """Proxy and decode server in one. A prompt that is answered brings a canary to an end, in ``outcome``."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.url = f"http://127.0.0.1:{self.server_address[1]}"
        self.outcome = "proven"
        self.ended = {"proven": 1, "differs": 0}  # before
        self.prompts: list[str] = []


class _Handler(http.server.BaseHTTPRequestHandler):
    server: Servers

    def log_message(self, *_: object) -> None:
        pass

    def do_GET(self) -> None:
        lines = [f'vllm:pd_canaries_total{{outcome="{name}"}} {n}' for name, n in self.server.ended.items()]
        self._answer("\n".join(["# TYPE vllm:pd_canaries_total counter", *lines, ""]))

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.prompts.append(body["prompt"])
        if self.server.outcome:
            self.server.ended[self.server.outcome] = self.server.ended.get(self.server.outcome, 0) + 1
        self._answer(json.dumps({"choices": [{"text": "x"}], "usage": {"prompt_tokens": 200}}))

    def _answer(self, text: str) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text.encode())


@pytest.fixture
def servers() -> Iterator[Servers]:
    with Servers() as servers:
        thread = threading.Thread(target=servers.serve_forever)
        thread.start()
        yield servers
        servers.shutdown()
        thread.join()


def test_a_prompt_of_some_blocks_is_asked_and_what_came_of_it_awaited(servers: Servers) -> None:
    proof.prove(servers.url, servers.url, "demo")
    (prompt,) = servers.prompts
    assert len(prompt.split()) > 100, "blocks have up to 128 tokens"


@pytest.mark.parametrize("outcome", ["differs", "failed", "left"])
def test_any_other_outcome_is_said(servers: Servers, outcome: str) -> None:
    servers.outcome = outcome
    with pytest.raises(QuestionFailed, match=f"computes the same keys and values: its canary ended as '{outcome}'"):
        proof.prove(servers.url, servers.url, "demo")


def test_a_proof_that_does_not_come_is_said(servers: Servers, monkeypatch: pytest.MonkeyPatch) -> None:
    servers.outcome = ""
    monkeypatch.setattr(proof, "_TIMEOUT_S", 0.3)
    with pytest.raises(QuestionFailed, match="its canary has not ended"):
        proof.prove(servers.url, servers.url, "demo")
