"""Runs examples/run_pd_*.sh, with a stand-in for vLLM or without, and knows every process that they have started."""

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

from tests.support.sources import ROOT
from tests.support.waiting import until

PLATFORMS = ("cpu", "cuda", "npu")
MARK = "RUN_PD_TEST"

# Listens as vLLM would, with a helper that has no wish to end. FAKE_PREFILL and FAKE_DECODE say what goes wrong,
# FAKE_CANARY how D's comparison with P ends.
FAKE_VLLM = """
import http.server, json, os, pathlib, signal, subprocess, sys, threading

arguments = sys.argv[1:]
given = {name: value for name, value in zip(arguments, arguments[1:]) if name.startswith("--")}
role = json.loads(given["--kv-transfer-config"])["kv_role"]
leg = {"kv_producer": "prefill", "kv_consumer": "decode"}[role]
fault = os.environ.get(f"FAKE_{leg.upper()}", "")
helper = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(60)"
subprocess.Popen([sys.executable, "-S", "-c", helper])
seen = {"pid": os.getpid(), "arguments": arguments, "variables": dict(os.environ)}
pathlib.Path(os.environ["FAKE_SEEN"], leg).write_text(json.dumps(seen))
print("loading", flush=True)
if fault == "fails":
    print("no weights in this directory", flush=True)
    os._exit(7)


def tidy_up(*_):
    print("tidied up", flush=True)
    os._exit(0)


signal.signal(signal.SIGTERM, signal.SIG_IGN if fault == "deaf" else tidy_up)


asked = []


class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        ended = os.environ.get("FAKE_CANARY", "proven") if asked else ""
        lines = [
            f'vllm:pd_canaries_total{{engine="0",outcome="{one}"}} {float(one == ended)}'
            for one in ("proven", "differs", "failed", "left")
        ]
        self.answer(503 if fault == "loading" else 200, "\\n".join(lines) if self.path == "/metrics" else "")

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        key = os.environ.get("VLLM_API_KEY")
        if key and self.headers["Authorization"] != f"Bearer {key}":
            self.answer(401, "{}")
        elif fault == "short":
            self.answer(400, json.dumps({"error": {"message": "the prompt is too long"}}))
        else:
            asked.append(body)
            choices = [{"text": "a", "finish_reason": "length"}]
            self.answer(200, json.dumps({"choices": choices, "kv_transfer_params": {"from": "P"}}))
        pathlib.Path(os.environ["FAKE_SEEN"], f"{leg} asked").write_text(json.dumps(asked))

    def answer(self, status, text):
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *_):
        pass


http.server.ThreadingHTTPServer(("127.0.0.1", int(given["--port"])), Handler).serve_forever()
"""


class Machine:
    """A directory with a stand-in for vLLM, and the variables by which a script finds it."""

    def __init__(self, directory: Path) -> None:
        self._seen = directory / "seen"
        self._seen.mkdir()
        binaries = directory / "bin"
        binaries.mkdir()
        fake = directory / "fake_vllm.py"
        fake.write_text(FAKE_VLLM)
        _write_script(binaries / "vllm", f'exec "{sys.executable}" -S "{fake}" "$@"')
        python = binaries / "python-with-vllm"
        choice = f"""
            case "$*" in
            "-m vllm.entrypoints.openai.api_server "*) shift 2; exec "{sys.executable}" -S "{fake}" "$@" ;;
            esac
            exec "{sys.executable}" "$@"
        """
        _write_script(python, textwrap.dedent(choice))
        self.variables = {
            "PATH": f"{binaries}:{os.environ['PATH']}",
            "PYTHON": str(python),
            "LOG_DIR": str(directory / "logs"),
            "FAKE_SEEN": str(self._seen),
        }

    def seen(self, leg: str) -> Any:
        """What the server of a leg was started with: its pid, arguments and variables."""
        return json.loads((self._seen / leg).read_text())

    def asked(self, leg: str) -> Any:
        """The bodies of the requests that the server of a leg has taken."""
        return json.loads((self._seen / f"{leg} asked").read_text())

    def log(self, leg: str) -> str:
        """What the server of a leg has written."""
        return Path(self.variables["LOG_DIR"], f"{leg}.log").read_text()


class Run:
    """One run of a platform's script in a process group of its own. Leaving the context ends what is left of it."""

    def __init__(self, platform: str, *arguments: str, output: Path, variables: Mapping[str, str]) -> None:
        self._output = output
        self._mark = uuid.uuid4().hex
        # A background job of a shell ignores SIGINT, and one under nohup SIGHUP, and so would all that we start.
        command = ["env", "--default-signal=INT,HUP", str(ROOT / f"examples/run_pd_{platform}.sh"), *arguments]
        with output.open("wb") as file:
            self.process = subprocess.Popen(
                command,
                env={**os.environ, **variables, MARK: self._mark},
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                process_group=0,
            )

    @property
    def output(self) -> str:
        """What it has said so far."""
        return self._output.read_text()

    def wait_until_all_serve(self, timeout_s: float = 60) -> None:
        """Wait for what it says then."""
        until(lambda: "All three serve" in self.output or self.process.poll() is not None, within_s=timeout_s)
        assert "All three serve" in self.output, self.output

    def press(self, number: signal.Signals) -> int:
        """Send a signal to the script and to what runs in its foreground, like a terminal; the exit status."""
        os.killpg(self.process.pid, number)
        return self.wait()

    def wait(self, timeout_s: float = 60) -> int:
        """The exit status."""
        return self.process.wait(timeout_s)

    def processes(self) -> list[str]:
        """The command lines of all living processes that the script has started, in whatever group or session."""
        return [command for _, command in self._living()]

    def _living(self) -> list[tuple[int, str]]:
        living = []
        for directory in Path("/proc").glob("[0-9]*"):
            try:
                if f"{MARK}={self._mark}".encode() in (directory / "environ").read_bytes().split(b"\0"):
                    command = (directory / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                    living.append((int(directory.name), command))
            except OSError:  # it has ended, or is not ours
                continue
        return living

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        deadline = time.monotonic() + 10
        while (living := self._living()) and time.monotonic() < deadline:
            for pid, _command in living:
                os.kill(pid, signal.SIGKILL)
            time.sleep(0.02)
        self.process.wait()


def _write_script(path: Path, body: str) -> None:
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)
