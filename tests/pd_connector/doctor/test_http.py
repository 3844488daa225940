"""Addresses that ``--peer`` takes, and what a server's answers mean."""

import socket
import ssl
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from pd_connector.doctor import http
from pd_connector.doctor.findings import CheckFailed
from pd_connector.doctor.http import HttpServer, base_url, usable_key
from tests.support.certificates import own_authority
from tests.support.process import free_port


@pytest.mark.parametrize(
    ("peer", "url"),
    [
        ("p1", "http://p1:8000"),
        ("10.0.0.5:8100", "http://10.0.0.5:8100"),
        ("[fd00::5]:8100", "http://[fd00::5]:8100"),
        ("http://p1:8100/", "http://p1:8100"),
        ("http://p1", "http://p1:80"),
        ("https://p1", "https://p1:443"),
    ],
)
def test_addresses(peer: str, url: str) -> None:
    assert base_url(peer) == url


@pytest.mark.parametrize("peer", ["", ":8100", "p1:0", "p1:99999", "p1:x", "ftp://p1", "http://p1/v1", "fd00::1"])
def test_what_is_no_address(peer: str) -> None:
    with pytest.raises(ValueError, match=r"write HOST, HOST:PORT or http://HOST:PORT of .*IPv6 address in brackets"):
        base_url(peer)


def test_a_port_that_takes_no_question_is_not_waited_for_as_long_as_a_prefill(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "_QUESTION_S", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        server = HttpServer(f"http://127.0.0.1:{silent.getsockname()[1]}", None, 120.0)
        with pytest.raises(CheckFailed, match="does not answer \\(timed out\\)"):
            server.ask("/v1/models")


def test_a_certificate_of_an_unknown_ca_is_told_from_a_wrong_port(tmp_path: Path) -> None:
    _, context = own_authority(tmp_path)
    with (
        socket.create_server(("127.0.0.1", 0)) as plain,
        context.wrap_socket(plain, server_side=True) as listener,
        ThreadPoolExecutor(1) as pool,
    ):
        accepted = pool.submit(listener.accept)
        with pytest.raises(CheckFailed, match="SSL_CERT_FILE"):
            HttpServer(f"https://127.0.0.1:{listener.getsockname()[1]}", None, 1.0).ask("/v1/models")
        with pytest.raises(ssl.SSLError, match="unknown ca"):
            accepted.result()


class Handler(BaseHTTPRequestHandler):
    """Answers by the path: /STATUS/BODY."""

    def do_GET(self) -> None:
        self._answer()

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self._answer()

    def _answer(self) -> None:
        _, status, body = self.path.split("/", 2)
        content = (body or f'{{"key": "{self.headers["Authorization"]}"}}').encode()
        self.send_response(int(status))
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()
        thread.join()


def test_an_answer_is_read(url: str) -> None:
    assert HttpServer(url, "k", 10.0).ask("/200/", {"a": 1}) == {"key": "Bearer k"}
    assert HttpServer(url, None, 10.0).ask("/200/") == {"key": "None"}


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("/401/go%20away", "answers with status 401; pass the server's key with --api-key or VLLM_API_KEY: go%20away"),
        ("/500/" + "x" * 400, "answers with status 500: " + "x" * 300),
        ("/200/[1]", "answers with no JSON object: is it a vLLM server?"),
        ("/200/nothing", "answers with no JSON object"),
    ],
)
def test_bad_answers(url: str, path: str, said: str) -> None:
    with pytest.raises(CheckFailed, match=r".") as failure:
        HttpServer(url, None, 10.0).ask(path)
    assert str(failure.value).endswith(said) or said in str(failure.value)


@pytest.mark.parametrize("key", ["key\r", "key\n", "a key", "kéy", ""])
def test_a_key_that_no_header_carries_is_refused(key: str) -> None:
    with pytest.raises(ValueError, match="which no header can carry"):
        usable_key(key)


def test_nobody_there() -> None:
    with pytest.raises(CheckFailed, match=r"does not answer \(.*refused.*\): is the prefill server up"):
        HttpServer(f"http://127.0.0.1:{free_port()}", None, 10.0).ask("/v1/models")
