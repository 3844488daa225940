"""The proxy as a process of its own."""

import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.examples.proxy.conftest import Setup
from tests.examples.proxy.fakes import FakeServer, Received, Wire, stalls

ROOT = Path(__file__).parents[3]
COMMAND = [sys.executable, "-m", "examples.proxy"]


@pytest.fixture
def running(p: FakeServer, d: FakeServer) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A proxy process and its URL."""
    arguments = [*COMMAND, "--prefill", p.url + "/", "--decode", d.url, "--port", "0"]
    with subprocess.Popen(arguments, cwd=ROOT, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stderr is not None
            url = None
            while url is None:
                line = process.stderr.readline()
                assert line, "the proxy ended before it listened"
                url = re.search(r"running on (http://\S+)", line)
            yield process, url[1]
        finally:
            process.kill()


def test_it_serves_and_a_signal_ends_it_though_a_stream_is_open(
    running: tuple[subprocess.Popen[str], str], d: FakeServer
) -> None:
    process, url = running
    assert httpx.post(f"{url}/v1/completions", json={"prompt": "a"}, trust_env=False).status_code == 200

    async def begins(received: Received, wire: Wire) -> None:
        await wire.head()
        await wire.chunk(b"data: 1\n\n")
        await stalls(received, wire)

    d.script = begins
    with httpx.stream("POST", f"{url}/v1/completions", json={"prompt": "a"}, trust_env=False) as response:
        pieces = response.iter_raw()
        assert next(pieces) == b"data: 1\n\n"
        process.send_signal(signal.SIGTERM)
        process.wait(60)
        with pytest.raises(httpx.RemoteProtocolError):
            next(pieces)
    assert d.wait(2).left.wait(30)
    assert process.stderr is not None
    log = process.stderr.read()
    assert "the proxy is shutting down" in log
    assert "Traceback" not in log


def test_arguments_that_cannot_work_are_explained(setup: Setup) -> None:
    wrong = [*COMMAND, "--prefill", "localhost:8000", "--decode", "http://localhost:8001"]
    ended = subprocess.run(wrong, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 2
    assert "prefill server 'localhost:8000' is not a base URL" in ended.stderr


def test_it_imports_nothing_of_the_connector() -> None:
    code = "import sys, examples.proxy.__main__; print({'pd_connector', 'transfer', 'layout', 'vllm'} & {*sys.modules})"
    ended = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60, check=True
    )
    assert ended.stdout.strip() == "set()"
