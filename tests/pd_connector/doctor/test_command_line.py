"""The doctor as its users run it: lines, JSON, exit statuses, and two of them that talk to each other.

Covers: pd_connector.doctor.__main__.
"""

import json
import re
import signal
import socket
import subprocess
import sys
from typing import Any

import pytest

from pd_connector.doctor.__main__ import main
from tests.support.engine.peer_process import environment_with
from tests.support.process import free_port
from tests.support.sources import ROOT

COMMAND = [sys.executable, "-m", "pd_connector.doctor"]
CONFIG = ["--config", '{"host": "127.0.0.1", "tuning": {"staging_bytes": 1048576}}']


def doctor(*arguments: str) -> "subprocess.CompletedProcess[str]":
    command = [*COMMAND, *CONFIG, *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=250, check=False)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--peer", "http://x/y"], "--peer is 'http://x/y'; write HOST, HOST:PORT"),
        (["--config", "{"], "--config is not JSON"),
        (["--config", "[]"], "--config must be a JSON object"),
        (["--config", '{"protocoll": "tcp"}'], "unknown key 'protocoll', did you mean 'protocol'?"),
        (["--tensor-parallel-size", "0"], "tensor parallel size 0"),
        (["--tokens", "1"], "--tokens is 1"),
        (["--pull", "1"], "unrecognized arguments"),
    ],
)
def test_bad_arguments(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(arguments)
    assert end.value.code == 2
    assert said in capsys.readouterr().err


@pytest.mark.slow
def test_two_doctors() -> None:
    """One listens, the other examines this machine and visits it."""
    listening = subprocess.Popen([*COMMAND, *CONFIG, "--listen"], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert listening.stdout is not None
    try:
        said = re.match(r"listening at (\S+); on the other machine: pd-doctor --peer \1$", listening.stdout.readline())
        assert said is not None
        done = doctor("--json", "--peer", said[1], "--pull-bytes", "1000000")
    finally:
        listening.send_signal(signal.SIGTERM)
        assert listening.wait(60) == 0
        listening.stdout.close()
    assert done.returncode == 0, done.stdout + done.stderr
    report: dict[str, Any] = json.loads(done.stdout)
    found = {check["name"]: check for check in report["checks"]}
    assert report["passed"] is True
    assert found["two processes"]["outcome"] == "ok"
    assert found["two processes"]["values"]["pull"]["verified"] is True
    assert found["protocol tcp"]["values"] | {"register_ms": 0} == {"used": True, "starts": True, "register_ms": 0}
    assert found["peer: pull"]["values"]["bytes"] == 1 << 20
    assert found["vllm"]["outcome"] == found["torch"]["outcome"] == found["mooncake"]["outcome"] == "ok"


@pytest.mark.slow
@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="no sockets for both families here")
def test_doctors_of_two_address_families() -> None:
    """One listens at an IPv6 address; visitors with an IPv4 address speak both, or only that."""
    listening = subprocess.Popen(
        [*COMMAND, "--config", '{"host": "::1"}', "--listen"], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    assert listening.stdout is not None
    try:
        said = re.match(r"listening at (\S+);", listening.stdout.readline())
        assert said is not None
        visits = [
            subprocess.run(
                [*COMMAND, *CONFIG, "--json", "--peer", said[1], "--pull-bytes", "1000000"],
                cwd=ROOT, env=environment_with(ipv6), capture_output=True, text=True, timeout=250, check=False,
            )
            for ipv6 in ("1", "0")
        ]  # fmt: skip
    finally:
        listening.send_signal(signal.SIGTERM)
        assert listening.wait(60) == 0
        listening.stdout.close()
    both, ipv4 = ({check["name"]: check for check in json.loads(each.stdout)["checks"]} for each in visits)
    assert both["peer: pull"]["outcome"] == "ok"
    assert ipv4["peer: link"]["outcome"] == "fail"
    assert "that is an IPv6 address, and the transfer engine here speaks IPv4 only" in json.dumps(ipv4["peer: link"])


@pytest.mark.slow
def test_a_failure_is_a_line_and_an_exit_status() -> None:
    done = doctor("--peer", f"127.0.0.1:{free_port()}")
    assert done.returncode == 1
    lines = done.stdout.splitlines()
    assert re.fullmatch(r"FAIL peer: http://127\.0\.0\.1:\d+ does not answer .*", lines[-10])
    assert lines[-9] == "skip peer: lease: not checked: 'peer' has failed"
    assert lines[-1] == "Failed: peer."
    assert any(line.startswith("ok   two processes: ranks [0] of 1 connected") for line in lines)
