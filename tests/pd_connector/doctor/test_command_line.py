"""The doctor as its users run it: lines, exit statuses, and two of them that talk to each other.

Covers: pd_connector.doctor.__main__.
"""

import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from pd_connector.doctor import __main__ as module
from pd_connector.doctor import npu
from pd_connector.doctor.__main__ import main
from pd_connector.doctor.findings import CheckFailed, CheckWarned
from pd_connector.doctor.machine import Machine
from pd_connector.doctor.software import Software
from pd_connector.vllm import platform
from pd_connector.worker import transfer_engine
from tests.support.engine.peer_process import environment_with
from tests.support.process import free_port
from tests.support.sources import ROOT

COMMAND = [sys.executable, "-m", "pd_connector.doctor"]
CONFIG = ["--config", '{"host": "127.0.0.1"}']


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--peer", "http://x/y"], "--peer is 'http://x/y'; write HOST, HOST:PORT"),
        (["--config", "{"], "--config is not JSON"),
        (["--config", "[]"], "--config must be a JSON object"),
        (["--config", '{"protocoll": "tcp"}'], "unknown key 'protocoll', did you mean 'protocol'?"),
        (["--tokens", "1"], "--tokens is 1"),
        (["--listen", "--port", "65536"], "--port is 65536; it must be in 0..65535"),
        (["--peer", "P", "--api-key", "key\n"], "the API key has blanks, line ends"),
        (["--pool", "P"], "--pool: address 'P' is not host:port"),
        (
            ["--peer", "P", "--port", "8100"],
            "--port is of --listen; a prefill server's is",
        ),
        (["--pull", "1"], "unrecognized arguments"),
    ],
)
def test_bad_arguments(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(arguments)
    assert end.value.code == 2
    assert said in capsys.readouterr().err


def test_over_the_ascend_transport_only_a_server_can_be_visited(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--listen", "--config", '{"host": "127.0.0.1", "protocol": "ascend"}']) == 1
    assert "over the Ascend transport peers read an NPU's memory only" in capsys.readouterr().out


@pytest.fixture
def well(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """A machine of which nothing but what the test says is checked."""
    monkeypatch.setattr(Software, "checks", [("vllm", lambda: "a release")])
    monkeypatch.setattr(Machine, "checks", [])
    monkeypatch.setattr(module, "installed", lambda _: None)
    monkeypatch.setattr(module, "_transfer_engine", lambda config: f"{config.protocol} at {config.host}")
    return monkeypatch


def said(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, list[str]]:
    status = main([*CONFIG, *arguments])
    return status, capsys.readouterr().out.splitlines()


@pytest.mark.usefixtures("well")
def test_what_is_well_is_a_line_for_each_check(capsys: pytest.CaptureFixture[str]) -> None:
    assert said(capsys) == (
        0,
        ["ok   vllm: a release", "ok   transfer engine: tcp at 127.0.0.1", "", "Nothing has failed."],
    )


@pytest.mark.usefixtures("well")
def test_a_failure_is_a_line_and_an_exit_status(capsys: pytest.CaptureFixture[str]) -> None:
    status, lines = said(capsys, "--peer", f"127.0.0.1:{free_port()}")
    assert status == 1
    assert re.fullmatch(r"FAIL peer: http://127\.0\.0\.1:\d+ does not answer .*", lines[2])
    assert lines[3] == "skip peer: handshake: not checked: 'peer' has failed"
    assert lines[-1] == "Failed: peer."


@pytest.mark.usefixtures("well")
@pytest.mark.parametrize("by", ["--pool", "--config"])
def test_a_pool_is_checked_that_is_named_or_set(by: str, capsys: pytest.CaptureFixture[str]) -> None:
    pool = f"127.0.0.1:{free_port()}"
    given = pool if by == "--pool" else f'{{"host": "127.0.0.1", "pool": "{pool}", "cpu_bytes_to_use": 1048576}}'
    status, lines = said(capsys, by, given)
    assert status == 1
    assert lines[2].startswith(f"FAIL pool: no mooncake_client listens at {pool} ")
    assert lines[-1] == "Failed: pool."


@pytest.mark.parametrize(
    "error",
    [
        ImportError("No module named 'vllm'"),
        RuntimeError("Failed to load the backend extension: torch_npu"),
        OSError("libcudart.so.13: cannot open shared object file"),
    ],
    ids=["no vLLM", "torch_npu without CANN", "torch without a library"],
)
def test_without_vllm_it_is_tcp_on_loopback(
    error: Exception, well: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def lacking() -> str:
        raise error

    for where, name in ((platform, "host_address"), (transfer_engine, "default_protocol")):
        well.setattr(where, name, lacking)
    assert main([]) == 0
    assert "ok   transfer engine: tcp at 127.0.0.1" in capsys.readouterr().out


def fails() -> str:
    raise CheckFailed("107002")


def warns() -> str:
    raise CheckWarned("slow")


def test_npus_are_checked_where_their_software_is(well: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    well.setattr(module, "installed", {"torch-npu": "2.10.0"}.get)
    well.setattr(npu, "device", lambda: "2 devices")
    well.setattr(npu, "CHECKS", (("batched copies", fails), ("ACL functions", warns)))
    status, lines = said(capsys)
    assert status == 1
    assert lines[2:] == [
        "ok   npu: 2 devices",
        "FAIL batched copies: 107002",
        "WARN ACL functions: slow",
        "",
        "Failed: batched copies.",
    ]


def test_without_a_device_nothing_else_is_asked_of_an_npu(
    well: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    well.setattr(module, "installed", {"torch-npu": "2.10.0"}.get)
    well.setattr(npu, "device", fails)
    assert said(capsys)[1][2:] == ["FAIL npu: 107002", "", "Failed: npu."]


@contextmanager
def listening(config: str) -> Iterator[str]:
    """A doctor that listens, in a process of its own; its address."""
    command = [*COMMAND, "--config", config, "--listen"]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        line = re.match(r"listening at (\S+); on the other machine: pd-doctor --peer \1$", process.stdout.readline())
        assert line is not None
        yield line[1]
    finally:
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
        process.stdout.close()


def visited(address: str, ipv6: str | None = None) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [*COMMAND, *CONFIG, "--peer", address, "--tokens", "100"],
        cwd=ROOT, env=environment_with(ipv6), capture_output=True, text=True, timeout=250, check=False,
    )  # fmt: skip


@pytest.mark.slow
def test_two_doctors() -> None:
    """One listens, the other examines this machine and visits it: with the real transfer engine, in three processes."""
    with listening('{"host": "127.0.0.1"}') as address:
        done = visited(address)
    assert done.returncode == 0, done.stdout + done.stderr
    found = dict(line[5:].split(": ", 1) for line in done.stdout.splitlines() if line.startswith("ok   "))
    assert found.keys() >= {"pd-connector", "vllm", "torch", "mooncake", "port", "devices", "memory"}
    assert found["transfer engine"].startswith("tcp reads from another process here: 511 tokens, 16.8 MB in ")
    assert found["transfer engine"].endswith("all checksums equal")
    assert "ok   peer: pull: 99 tokens, 3.7 MB in 1 descriptors, by 1 workers: " in done.stdout
    assert "WARN address: 127.0.0.1 is of this machine only" in done.stdout
    assert done.stdout.splitlines()[-1] == "Nothing has failed. Look at: address."


@pytest.mark.slow
@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="no sockets for both families here")
def test_doctors_of_two_address_families() -> None:
    """One listens at an IPv6 address; visitors with an IPv4 address speak both, or only that."""
    with listening('{"host": "::1"}') as address:
        both, ipv4 = (visited(address, ipv6).stdout for ipv6 in ("1", "0"))
    assert "ok   peer: pull: " in both
    assert "FAIL peer: pull: unreachable: " in ipv4
    assert "that is an IPv6 address, and the transfer engine here speaks IPv4 only" in ipv4


@pytest.mark.slow
def test_a_transfer_engine_that_does_not_start_is_a_failure() -> None:
    """192.0.2.1 is of no machine."""
    done = subprocess.run(
        [*COMMAND, "--config", '{"host": "192.0.2.1"}'],
        cwd=ROOT, capture_output=True, text=True, timeout=250, check=False,
    )  # fmt: skip
    assert done.returncode == 1
    assert "FAIL address: 192.0.2.1 is not an address of this machine" in done.stdout
    assert "FAIL transfer engine: tcp does not start: ConfigError: " in done.stdout
