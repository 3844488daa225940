"""What the images' HEALTHCHECK asks, and whom: a real proxy, and servers in the place of vLLM."""

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest

from deploy.healthcheck import complaint, question, words_of
from tests.support.certificates import own_authority
from tests.support.examples.fake_servers import answers, prefills
from tests.support.examples.harness import FakeServers, ProxyProcess, unused_url

ENGINE = "/opt/venv/bin/python3 /opt/venv/bin/vllm serve /models/a"


@pytest.fixture
def servers() -> Iterator[FakeServers]:
    with ExitStack() as stack:
        yield FakeServers(stack)


@pytest.mark.parametrize(
    ("line", "url"),
    [
        (ENGINE, "http://127.0.0.1:8000/health"),
        (f"{ENGINE} --port 8100 --host 0.0.0.0", "http://127.0.0.1:8100/health"),
        (f"{ENGINE} --port=8100 --host=10.0.0.1", "http://10.0.0.1:8100/health"),
        (f"{ENGINE} --host :: --port 8100 --port 8200", "http://127.0.0.1:8200/health"),
        (f"{ENGINE} --host fd00::1", "http://[fd00::1]:8000/health"),
        (f"{ENGINE} --ssl-certfile a.pem", "https://127.0.0.1:8000/health"),
        ("/sbin/docker-init -- vllm serve a", "http://127.0.0.1:8000/health"),
        ("python3 -m vllm.entrypoints.openai.api_server --model a", "http://127.0.0.1:8000/health"),
        (f"{ENGINE} --nnodes 2 --headless", ""),
        ("/usr/bin/python3 /usr/local/bin/pd-proxy --port=80", "http://127.0.0.1:80/healthcheck"),
        ("python3 -m pd_proxy --prefill http://p:8100", "http://127.0.0.1:8000/healthcheck"),
        ("bash", ""),
        ("/opt/venv/bin/pd-doctor --peer p:8100", ""),
    ],
)
def test_the_command_line_says_whom_to_ask(line: str, url: str) -> None:
    assert question(line.split()) == url


def test_a_shells_one_argument_is_the_command_line_of_a_server() -> None:
    line = "sh\0-c\0. /etc/env; exec vllm serve a --port 8100\0"
    assert question(words_of(line)) == "http://127.0.0.1:8100/health"


@pytest.mark.parametrize("option", ["--port $PORT", "--port ${PORT:-8100}", "--port 8100;", "--host $IP"])
def test_what_only_a_shell_can_read_is_not_asked(option: str) -> None:
    assert not question(words_of(f"sh\0-c\0vllm serve a {option} | tee log\0"))


def words(line: str, url: str) -> list[str]:
    """The command line of a server that listens at a URL."""
    return [*line.split(), "--port", url.rpartition(":")[2]]


def test_an_engine_is_well_while_it_says_so(servers: FakeServers) -> None:
    assert complaint(words(ENGINE, servers.start(prefills).url)) == ""
    assert "503" in complaint(words(ENGINE, servers.start(answers(503, b"")).url))
    assert "404" in complaint(words(ENGINE, servers.start(answers(404, b"")).url))
    assert "refused" in complaint(words(ENGINE, unused_url()))


def test_what_listens_nowhere_is_well() -> None:
    assert complaint(["sleep", "60"]) == ""


def test_the_environments_proxy_is_not_asked(servers: FakeServers, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", unused_url())
    assert complaint(words(ENGINE, servers.start(prefills).url)) == ""


def test_an_engine_with_https_is_asked_without_knowing_its_ca(servers: FakeServers, tmp_path: Path) -> None:
    _, context = own_authority(tmp_path)
    url = servers.start(prefills, tls=context).url
    assert complaint([*words(ENGINE, url), "--ssl-certfile", "server.pem"]) == ""
    assert complaint(words(ENGINE, url)) != ""


def test_the_proxy_is_well_without_its_servers() -> None:
    with ProxyProcess(["-m", "pd_proxy", "--prefill", unused_url(), "--decode", unused_url()]) as proxy:
        assert httpx.get(f"{proxy.url}/health", trust_env=False).status_code == 503
        assert complaint(words("pd-proxy", proxy.url)) == ""
    assert complaint(words("pd-proxy", proxy.url)) != ""
