"""P, D and the proxy by one command: its words on every platform, its end in every way, and once in earnest."""

import json
import os
import shlex
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest

from examples.quickstart.metrics import scrape
from examples.quickstart.servers import free_ports
from pd_connector.secret import load_keys
from tests.support.examples.run_scripts import PLATFORMS, Machine, Run
from tests.support.sources import ROOT
from tests.support.waiting import until

SCRIPTS = [ROOT / "examples" / f"run_pd_{platform}.sh" for platform in PLATFORMS]
DEVICES = {"cuda": "CUDA_VISIBLE_DEVICES", "npu": "ASCEND_RT_VISIBLE_DEVICES"}
Start = Callable[..., Run]
#: The values of a case that is left out of most runs: each takes seconds.
slow = partial(pytest.param, marks=pytest.mark.slow)


def ports() -> dict[str, str]:
    """Variables with free ports."""
    return two_of_ports()[0]


def two_of_ports() -> list[dict[str, str]]:
    """The same for two scripts, whose servers need not listen yet."""
    found = list(map(str, free_ports(6)))
    return [
        dict(zip(("PROXY_PORT", "PREFILL_PORT", "DECODE_PORT"), each, strict=True)) for each in (found[:3], found[3:])
    ]


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


@pytest.fixture
def start(machine: Machine, tmp_path: Path) -> Iterator[Start]:
    """Starts a platform's script with the stand-in for vLLM."""
    with ExitStack() as stack:

        def starter(platform: str, *arguments: str, **variables: str) -> Run:
            output = tmp_path / "output"
            run = Run(platform, *arguments, output=output, variables=machine.variables | ports() | variables)
            return stack.enter_context(run)

        yield starter


# The commands


@pytest.mark.parametrize("script", [*SCRIPTS, ROOT / "examples/run_pd.sh"], ids=lambda path: path.name)
def test_a_shell_can_read_it(script: Path) -> None:
    subprocess.run(["bash", "-n", script], check=True)
    assert os.access(script, os.X_OK) == (script in SCRIPTS)


def commands(platform: str, *arguments: str, **variables: str) -> list[list[str]]:
    """The words of the commands that a dry run prints: P's, D's, the proxy's."""
    run = subprocess.run(
        [f"examples/run_pd_{platform}.sh", *arguments],
        env={"PATH": os.environ["PATH"], "DRY_RUN": "1", "LOG_DIR": "/nowhere/logs", **variables},
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    assert run.stderr == ""
    return [shlex.split(line) for line in run.stdout.splitlines()]


def connector(command: list[str]) -> Any:
    return json.loads(command[command.index("--kv-transfer-config") + 1])


@pytest.mark.parametrize("platform", PLATFORMS)
def test_a_dry_run_prints_the_three_commands_and_needs_nothing(platform: str) -> None:
    prefill, decode, proxy = commands(platform, "some/model", "--max-model-len", "64", PYTHON="py")
    for command, port in ((prefill, "8100"), (decode, "8200")):
        assert command[command.index("some/model") :][:5] == ["some/model", "--host", "127.0.0.1", "--port", port]
        assert command[-2:] == ["--max-model-len", "64"]
    assert connector(prefill) == {
        "kv_connector": "PDConnector",
        "kv_connector_module_path": "pd_connector",
        "kv_role": "kv_producer",
        "kv_connector_extra_config": {"host": "127.0.0.1"} if platform == "cpu" else {},
    }
    assert connector(decode) == connector(prefill) | {"kv_role": "kv_consumer", "kv_load_failure_policy": "recompute"}
    legs = ["--prefill", "http://127.0.0.1:8100", "--decode", "http://127.0.0.1:8200"]
    may_compute = ["--without-prefill", "decode"]  # as D with this policy
    assert proxy == ["py", "-m", "pd_proxy", "--host", "127.0.0.1", "--port", "8000", *legs, *may_compute]


def test_cpu_servers_share_the_cores_and_start_as_the_cpu_build_can() -> None:
    cores = len(os.sched_getaffinity(0))
    prefill, decode, _ = commands("cpu", "model", PYTHON="py", KV_CACHE_BYTES="4096")
    assert prefill[:4] == ["env", f"OMP_NUM_THREADS={max(1, cores // 2)}", "VLLM_CPU_OMP_THREADS_BIND=nobind", "py"]
    api_server = "-m vllm.entrypoints.openai.api_server --enforce-eager --block-size 32"
    assert prefill[4:13] == [*api_server.split(), "--kv-cache-memory-bytes", "4096", "--model", "model"]
    assert prefill[:13] == decode[:13]
    assert commands("cpu", "model", OMP_NUM_THREADS="7")[0][1] == "OMP_NUM_THREADS=7"


@pytest.mark.parametrize("platform", DEVICES)
def test_each_server_sees_devices_of_its_own(platform: str) -> None:
    name = DEVICES[platform]
    prefill, decode, _ = commands(platform, "model")
    assert prefill[:5] == ["env", f"{name}=0", "vllm", "serve", "model"]
    assert decode[:5] == ["env", f"{name}=1", "vllm", "serve", "model"]
    prefill, decode, _ = commands(platform, "model", PREFILL_DEVICES="0,1", DECODE_DEVICES="2,3")
    assert (prefill[1], decode[1]) == (f"{name}=0,1", f"{name}=2,3")


@pytest.mark.parametrize("platform", PLATFORMS)
def test_what_a_user_gives_arrives(platform: str) -> None:
    prefill, decode, proxy = commands(
        platform,
        "a model",
        "--chat-template",
        "with 'quotes' and $HOME",
        PREFILL_ARGS="--tensor-parallel-size 2",
        DECODE_ARGS="--max-num-seqs  8",
        CONNECTOR_CONFIG='{"protocol": "tcp", "lease_ttl_s": 9.5}',
        LOAD_FAILURE_POLICY="fail",
        PROXY_HOST="0.0.0.0",
        PROXY_PORT="1",
        PREFILL_PORT="2",
        DECODE_PORT="3",
    )
    shared = ["--chat-template", "with 'quotes' and $HOME"]
    assert prefill[-4:] == [*shared, "--tensor-parallel-size", "2"]
    assert decode[-4:] == [*shared, "--max-num-seqs", "8"]
    for command in (prefill, decode):
        assert "a model" in command
        assert connector(command)["kv_connector_extra_config"] == {"protocol": "tcp", "lease_ttl_s": 9.5}
    assert connector(decode)["kv_load_failure_policy"] == "fail"
    assert [prefill[prefill.index("--port") + 1], decode[decode.index("--port") + 1]] == ["2", "3"]
    assert proxy[3:] == shlex.split("--host 0.0.0.0 --port 1 --prefill http://127.0.0.1:2 --decode http://127.0.0.1:3")


@pytest.mark.parametrize("platform", PLATFORMS)
@pytest.mark.parametrize(("arguments", "status"), [((), 2), (("--help",), 0)], ids=["nothing", "help"])
def test_usage_is_the_headers_of_both_files(platform: str, arguments: tuple[str, ...], status: int) -> None:
    command = [f"examples/run_pd_{platform}.sh", *arguments]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert run.returncode == status
    assert f"examples/run_pd_{platform}.sh" in run.stdout
    assert "PREFILL_PORT=8100" in run.stdout
    assert "shellcheck" not in run.stdout


@pytest.mark.parametrize("platform", DEVICES)
def test_what_was_not_run_on_hardware_says_so(platform: str) -> None:
    assert "Not yet run on hardware" in (ROOT / f"examples/run_pd_{platform}.sh").read_text()


# What cannot be started


@pytest.mark.parametrize(
    ("platform", "model", "variables", "told"),
    [
        ("cpu", "/no/such/model", {}, "there is no model at /no/such/model"),
        ("cuda", "./no/such/model", {}, "there is no model at ./no/such/model"),
        ("cuda", "model", {"PYTHON": "/nowhere/python"}, "there is no command '/nowhere/python' here"),
        ("cpu", "model", {"PREFILL_PORT": "80x0"}, "PREFILL_PORT is '80x0'; it must be a whole number"),
        ("npu", "model", {"STOP_TIMEOUT": "-1"}, "STOP_TIMEOUT is '-1'; it must be a whole number"),
        ("npu", "model", {"PREFILL_PORT": "77", "DECODE_PORT": "77"}, "PREFILL_PORT and DECODE_PORT must differ"),
        ("npu", "model", {"LOG_DIR": "/proc/nowhere"}, "choose one with LOG_DIR"),
    ],
    ids=str,
)
def test_what_is_missing_is_named_before_anything_starts(
    start: Start, platform: str, model: str, variables: dict[str, str], told: str
) -> None:
    run = start(platform, model, **variables)
    assert run.wait() == 2
    assert told in run.output
    assert run.processes() == []


def test_a_missing_vllm_is_named(start: Start, machine: Machine) -> None:
    Path(machine.variables["PATH"].split(":")[0], "vllm").unlink()
    path = ":".join(one for one in machine.variables["PATH"].split(":") if not Path(one, "vllm").exists())
    run = start("cuda", "model", PATH=path)
    assert run.wait() == 2
    assert "there is no command 'vllm' here: install it, or activate the environment that has it" in run.output


def test_missing_packages_are_named_with_the_extra_that_brings_them(start: Start, tmp_path: Path) -> None:
    bare = tmp_path / "bare-python"
    bare.write_text('#!/bin/sh\nexec /usr/bin/env python3 -I -S "$@"\n')
    bare.chmod(0o755)
    run = start("cpu", "model", PYTHON=str(bare))
    assert run.wait() == 2
    lacks = "aiohttp msgspec starlette uvicorn vllm mooncake"
    assert f"{bare} has no {lacks}: run pip install '.[cpu,proxy]'" in run.output


@pytest.mark.parametrize("name", ["PROXY_PORT", "PREFILL_PORT", "DECODE_PORT"])
def test_a_port_that_is_taken_is_named(start: Start, name: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        run = start("cuda", "model", **{name: str(port)})
        assert run.wait() == 2
    assert f"something listens on port {port} already; choose another one with {name}" in run.output


# Life and end


def assert_one_session(run: Run, servers: list[int]) -> None:
    """They are process groups of one session.

    Linux may schedule sessions as groups: with one each, vLLM's busy waiting would starve its own other threads.
    """
    assert {os.getsid(pid) for pid in servers} == {os.getsid(run.process.pid)}
    assert len({os.getpgid(pid) for pid in (*servers, run.process.pid)}) == 3


@pytest.mark.parametrize("platform", [one if one == "cuda" else slow(one) for one in PLATFORMS])
def test_all_three_serve_and_ctrl_c_ends_them(start: Start, machine: Machine, platform: str) -> None:
    run = start(platform, "model")
    run.wait_until_all_serve()
    (line,) = [line for line in run.output.splitlines() if "curl http" in line and "/v1/completions" in line]
    url = shlex.split(line)[1]
    assert httpx.get(url.removesuffix("/v1/completions") + "/health", trust_env=False).status_code == 200
    assert machine.variables["LOG_DIR"] in run.output
    assert "D has proven P: both compute the same keys and values" in run.output.partition("All three serve")[0]
    assert_one_session(run, [machine.seen(leg)["pid"] for leg in ("prefill", "decode")])
    for leg, device in (("prefill", "0"), ("decode", "1")):
        seen = machine.seen(leg)
        assert seen["variables"]["PYTHONPATH"].split(":")[0] == str(ROOT)
        if platform in DEVICES:
            assert seen["variables"][DEVICES[platform]] == device
    assert len(run.processes()) >= 6  # the script, two servers with a helper each, the proxy
    assert run.press(signal.SIGINT) == 130
    assert run.processes() == []
    assert [machine.log(leg).splitlines()[-1] for leg in ("prefill", "decode")] == ["tidied up"] * 2


@pytest.mark.parametrize(
    ("platform", "variables"),
    [
        ("cuda", {}),
        slow("cuda", {"PD_CONNECTOR_SECRET": "a secret of somebody's"}),
        slow("cuda", {"CONNECTOR_CONFIG": '{"secret_file": "/a/file"}'}),
        slow("npu", {}),
    ],
    ids=str,
)
def test_servers_on_gpus_share_a_secret_with_which_d_copies_from_the_gpu_of_p(
    start: Start, machine: Machine, monkeypatch: pytest.MonkeyPatch, platform: str, variables: dict[str, str]
) -> None:
    monkeypatch.delenv("PD_CONNECTOR_SECRET", raising=False)
    run = start(platform, "model", **variables)
    run.wait_until_all_serve()
    given = {machine.seen(leg)["variables"].get("PD_CONNECTOR_SECRET") for leg in ("prefill", "decode")}
    if (platform, variables) == ("cuda", {}):
        (secret,) = given
        assert load_keys(None, {"PD_CONNECTOR_SECRET": secret})
        assert secret not in "".join(run.processes()) + run.output
    else:
        assert given == {variables.get("PD_CONNECTOR_SECRET")}


@pytest.mark.parametrize(
    ("variables", "told"),
    [
        slow({}, "D has proven P: both compute the same keys and values"),  # as where all three serve
        slow({"VLLM_API_KEY": "a-key"}, "D has proven P"),
        ({"FAKE_CANARY": "differs"}, "D has NOT proven P, which computes other keys and values: see {logs}/decode.log"),
        slow({"FAKE_CANARY": "left"}, "D has not proven P with the first prompt (left); the next"),
        slow({"FAKE_PREFILL": "short"}, "D will prove P with the first prompt of 17 tokens (AMX: a block) or more"),
        ({"CONNECTOR_CONFIG": '{"canary": "off"}'}, ""),
    ],
    ids=str,
)
def test_d_proves_p_before_anything_else_and_what_came_out_is_said(
    start: Start, machine: Machine, variables: dict[str, str], told: str
) -> None:
    run = start("cuda", "model", **variables)
    run.wait_until_all_serve()
    before, _, _ = run.output.partition("All three serve")
    assert told.format(logs=machine.variables["LOG_DIR"]) in before
    assert before.count("proven P") + before.count("prove P") == bool(told)
    if told and "FAKE_PREFILL" not in variables:
        (body,), (on_d,) = machine.asked("prefill"), machine.asked("decode")
        assert len(body["prompt"].split()) > 300
        assert (on_d["prompt"], on_d["max_tokens"]) == (body["prompt"], 1)


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 143), slow(signal.SIGHUP, 129)])
def test_other_signals_end_them_too(start: Start, number: signal.Signals, status: int) -> None:
    run = start("cuda", "model")
    run.wait_until_all_serve()
    run.process.send_signal(number)
    assert run.wait() == status
    assert run.processes() == []


def test_ctrl_c_ends_them_while_they_load(start: Start, machine: Machine) -> None:
    run = start("npu", "model", FAKE_PREFILL="loading")
    until(lambda: "starting P, D and the proxy" in run.output and len(run.processes()) >= 6)
    assert run.press(signal.SIGINT) == 130
    assert run.processes() == []


@pytest.mark.parametrize("name", ["LOG_DIR", "PREFILL_PORT"])
def test_another_run_is_told_what_the_first_one_uses_though_its_servers_do_not_listen_yet(
    start: Start, machine: Machine, tmp_path: Path, name: str
) -> None:
    taken, others = two_of_ports()
    taken |= {"LOG_DIR": str(tmp_path / "logs")}
    first = start("cuda", "model", FAKE_PREFILL="loading", **taken)
    until(lambda: "starting P, D and the proxy" in first.output)
    others |= {"LOG_DIR": str(tmp_path / "other logs")} | {name: taken[name]}
    with Run("cuda", "model", output=tmp_path / "second", variables=machine.variables | others) as second:
        assert second.wait() == 2
        assert f"error: another run of this script uses this {name} already ({taken[name]}); choose" in second.output
    assert first.press(signal.SIGINT) == 130
    assert first.processes() == []
    with Run("cuda", "model", output=tmp_path / "third", variables=machine.variables | taken) as third:
        third.wait_until_all_serve()


@pytest.mark.parametrize("leg", ["prefill", slow("decode")])
def test_a_server_that_cannot_start_stops_the_others(start: Start, leg: str) -> None:
    run = start("cuda", "model", **{f"FAKE_{leg.upper()}": "fails"})
    assert run.wait() == 1
    assert f"error: {leg} has ended with status 7; the end of its log:" in run.output
    assert "  no weights in this directory" in run.output
    assert run.processes() == []


@pytest.mark.parametrize("leg", [slow("prefill"), "decode"])
def test_a_server_that_dies_later_stops_the_others(start: Start, machine: Machine, leg: str) -> None:
    run = start("npu", "model")
    run.wait_until_all_serve()
    os.kill(machine.seen(leg)["pid"], signal.SIGKILL)
    assert run.wait() == 1
    assert f"error: {leg} has ended with status 137" in run.output
    assert run.processes() == []


def test_the_proxy_may_listen_at_an_ipv6_address(start: Start) -> None:
    run = start("cuda", "model", PROXY_HOST="::1")
    run.wait_until_all_serve()
    assert "  curl http://[::1]:" in run.output


def test_a_proxy_that_cannot_start_stops_the_servers(start: Start) -> None:
    run = start("cuda", "model", PROXY_HOST="192.0.2.1")  # nobody's
    assert run.wait() == 1
    assert "error: proxy has ended with status" in run.output
    assert run.processes() == []


def test_a_server_that_never_serves_runs_out_of_time(start: Start) -> None:
    run = start("cuda", "model", FAKE_DECODE="loading", READY_TIMEOUT="6")  # in which P and the proxy serve
    assert run.wait() == 1
    assert "error: decode did not serve within READY_TIMEOUT=6 s; the end of its log:\n  loading" in run.output
    assert run.processes() == []


def test_a_server_that_is_deaf_is_killed_after_the_time_to_stop(start: Start) -> None:
    run = start("npu", "model", FAKE_PREFILL="deaf", STOP_TIMEOUT="1")
    run.wait_until_all_serve()
    assert run.press(signal.SIGINT) == 130
    assert run.processes() == []


@pytest.mark.e2e
@pytest.mark.slow
@pytest.mark.scripts
def test_d_pulls_from_p_on_cpu(tmp_path: Path) -> None:
    from tests.support.e2e.models import DEFAULT_MODEL, write_model  # noqa: PLC0415  imports what only vLLM brings

    model = write_model(tmp_path / "model", DEFAULT_MODEL)
    settings = ports()
    variables = {
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "KV_CACHE_BYTES": str(96 * 1024 * 1024),
        "LOG_DIR": str(tmp_path / "logs"),
        "PYTHON": sys.executable,
    }
    output = tmp_path / "output"
    arguments = ("--dtype", "float32", "--max-model-len", "2048")
    with Run("cpu", str(model), *arguments, output=output, variables=variables | settings) as run:
        run.wait_until_all_serve(240)
        (line,) = [line for line in run.output.splitlines() if "curl http" in line and "/v1/completions" in line]
        answer = subprocess.run(["bash", "-c", line], capture_output=True, text=True, check=True, timeout=60)
        assert len(json.loads(answer.stdout)["choices"]) == 1
        assert "D has proven P" in run.output
        decode = scrape(f"http://127.0.0.1:{settings['DECODE_PORT']}")
        assert decode.total("vllm:pd_pulls_total") == 1
        assert run.press(signal.SIGINT) == 130
        assert run.processes() == []
