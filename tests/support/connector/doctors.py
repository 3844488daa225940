"""Doctors on hosts of their own: ``pd-doctor`` in network namespaces, without the wait for its imports.

A process that has imported what the command does is forked for each of them, and enters its namespace. What the command
finds out of the machine alone, by a second process, is left out.
"""

import ctypes
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from tests.support.e2e.hosts import Hosts, enter
from tests.support.sources import ROOT
from tests.support.waiting import until

LISTENING = re.compile(r"^listening at (\S+);", re.MULTILINE)
NONE: Mapping[str, str] = MappingProxyType({})
_CLONE_NEWNS, _MS_BIND, _MS_REC, _MS_PRIVATE = 0x20000, 4096, 16384, 1 << 18
_TOKENS = "500"  # 16 MB: no system takes them all at once


@dataclass(frozen=True, slots=True)
class Visit:
    """What a doctor said of another one, and how long that took."""

    text: str
    seconds: float

    @property
    def failure(self) -> str:
        """The line of the check that failed; empty if none did."""
        return next((line for line in self.text.splitlines() if line.startswith("FAIL peer")), "")

    @property
    def has_pulled(self) -> bool:
        """Whether all that was pulled has the right checksums."""
        return bool(re.search(r"^ok   peer: pull: .* all checksums equal$", self.text, re.MULTILINE))


class Doctors:
    """Starts doctors on hosts. Owns the process that is forked."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._number = 0
        self._forked = subprocess.Popen(
            [sys.executable, "-m", __name__], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def close(self) -> None:
        """End the process; doctors that it has started have ended."""
        self._forked.communicate()

    @contextmanager
    def listening(
        self, hosts: Hosts, number: int, names: str = "", variables: Mapping[str, str] = NONE, **config: object
    ) -> Iterator[str]:
        """Yield the address of a doctor that listens on a host, or why it does not.

        ``names``: what the host has in /etc/hosts. ``variables``: of the doctor's environment.
        """
        arguments = ("--listen", "--config", json.dumps(config))
        output, process = self._start(hosts, number, names, *arguments, variables=variables)
        until(lambda: output.with_suffix(".rc").exists() or LISTENING.search(output.read_text()), within_s=60.0)
        found = LISTENING.search(output.read_text())
        try:
            yield found[1] if found else output.read_text()
        finally:
            if found:
                os.kill(process, signal.SIGTERM)
                assert self._end(output) == 0

    def visit(self, hosts: Hosts, number: int, address: str, names: str = "", **config: object) -> Visit:
        """Return what a doctor on a host says of one that listens."""
        began = time.monotonic()
        arguments = ("--peer", address, "--tokens", _TOKENS, "--config", json.dumps(config))
        output, _ = self._start(hosts, number, names, *arguments)
        self._end(output, within_s=240.0)
        return Visit(output.read_text(), time.monotonic() - began)

    def _start(
        self, hosts: Hosts, number: int, names: str, *arguments: str, variables: Mapping[str, str] = NONE
    ) -> tuple[Path, int]:
        self._number += 1
        output = self._directory / f"{self._number}.txt"
        output.touch()
        order = {
            "namespace": hosts.namespace(number), "names": names, "arguments": arguments, "output": str(output),
            "variables": dict(variables),
        }  # fmt: skip
        assert self._forked.stdin is not None
        assert self._forked.stdout is not None
        self._forked.stdin.write(json.dumps(order) + "\n")
        self._forked.stdin.flush()
        return output, int(self._forked.stdout.readline())

    @staticmethod
    def _end(output: Path, within_s: float = 60.0) -> int:
        """Wait for the end of a doctor, and return its exit status."""
        status = output.with_suffix(".rc")
        until(lambda: status.exists() and status.read_text() != "", within_s=within_s)
        return int(status.read_text())


def _enter(namespace: str, names: str, directory: Path) -> None:
    """Enter a network namespace, with these lines in /etc/hosts if there are any."""
    libc = ctypes.CDLL(None, use_errno=True)

    def check(code: int) -> None:
        if code:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))

    enter(namespace)
    if names:
        file = directory / f"hosts of {namespace}"
        file.write_text(names + "\n")
        check(libc.unshare(_CLONE_NEWNS))
        check(libc.mount(b"none", b"/", None, _MS_REC | _MS_PRIVATE, None))
        check(libc.mount(str(file).encode(), b"/etc/hosts", None, _MS_BIND, None))


def _run(order: dict[str, Any]) -> None:
    """Be a doctor, until it ends."""
    from pd_connector.doctor import __main__ as doctor  # noqa: PLC0415

    output, status = Path(order["output"]), 70
    try:
        with output.open("wb") as file:
            for stream in (1, 2):
                os.dup2(file.fileno(), stream)
        os.environ.update(order["variables"])
        _enter(order["namespace"], order["names"], output.parent)
        doctor._transfer_engine = lambda config: "left out"
        status = doctor.main(order["arguments"])
    finally:
        sys.stdout.flush()
        output.with_suffix(".rc").write_text(str(status))
        os._exit(status)


def main() -> None:
    """Fork a doctor for each line of standard input, and answer with its process id."""
    from tests.support.kernels import keep_compiled  # noqa: PLC0415

    keep_compiled()
    import torch  # noqa: F401, PLC0415
    import vllm.platforms  # noqa: PLC0415
    import vllm.utils.network_utils  # noqa: F401, PLC0415

    from layout import staging  # noqa: PLC0415
    from pd_connector.doctor.listener import _plane  # noqa: PLC0415
    from transfer.copies.checksums import block_checksums  # noqa: PLC0415
    from transfer.copies.reshape import reshape  # noqa: PLC0415

    block_checksums.warm_up([_plane(0)])
    staging.warm_up()
    reshape.warm_up()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    for line in sys.stdin:
        process = os.fork()
        if not process:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            _run(json.loads(line))
        sys.stdout.write(f"{process}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
