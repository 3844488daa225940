"""A process that has imported vLLM and compiled the kernels, and forks servers: half of what a start costs.

``ForkServer`` starts it, and asks it for servers. This module is that process, too: run with a socket's descriptor. It
has one thread. What libraries read of the environment when they are imported, they read of its own.
"""

import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import BinaryIO

from tests.support.e2e.hosts import enter

_MESSAGE_BYTES = 1 << 20
#: What a server imports, as far as the release has it.
_IMPORTS = (
    "vllm.entrypoints.launchers.api_server.entry",
    "vllm.entrypoints.generate.api_router",
    "vllm.v1.executor.multiproc_executor",
    "vllm.v1.worker.cpu_worker",
    "vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors",
    "torch._inductor.compile_fx",
    "pd_connector.connector",
)


class ForkedProcess:
    """A process that a ``ForkServer`` has forked, to be used as ``subprocess.Popen`` is."""

    def __init__(self, pid: int, status: socket.socket) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._status = status  # says how the process has ended

    def poll(self) -> int | None:
        """Return the exit status, negative for a signal; None while the process lives."""
        with suppress(subprocess.TimeoutExpired):
            return self.wait(0)
        return None

    def wait(self, timeout: float | None = None) -> int:
        """Return the exit status when the process has ended.

        Raises:
            subprocess.TimeoutExpired: it lives after ``timeout`` seconds.
        """
        if self.returncode is None:
            if not select.select([self._status], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0.0)
            with self._status:
                self.returncode = _receive(self._status)
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Send a signal, unless the process has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        """Send SIGTERM, unless the process has ended."""
        self.send_signal(signal.SIGTERM)


def _receive(status: socket.socket) -> int:
    message = status.recv(_MESSAGE_BYTES)
    if not message:
        raise RuntimeError("the process that forks servers has ended; standard error says why")
    return int(message)


class ForkServer:
    """Starts the process when it is first needed; ends it, but not the servers, when it is closed."""

    def __init__(self, env: Mapping[str, str], *, knows_vllm: bool = True) -> None:
        self._env = env  # of the process, while it imports
        self._options = ["vllm"] if knows_vllm else []
        self._process: subprocess.Popen[bytes] | None = None
        self._requests: socket.socket | None = None

    def spawn(
        self, command: Sequence[str], env: Mapping[str, str], output: BinaryIO, namespace: str = ""
    ) -> ForkedProcess:
        """Run a module in a new process, the first of its process group.

        Args:
            command: its name and its arguments.
            env: its variables.
            output: what it writes to.
            namespace: of a host, whose network it has; empty for that of this process.
        """
        requests = self._requests or self._start()
        status, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            request = json.dumps([*command, dict(env), namespace]).encode()
            socket.send_fds(requests, [request], [output.fileno(), theirs.fileno()])
        return ForkedProcess(_receive(status), status)

    def _start(self) -> socket.socket:
        self._requests, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            command = [sys.executable, "-m", __name__, str(theirs.fileno()), *self._options]
            self._process = subprocess.Popen(
                command, env=self._env, stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()], process_group=0
            )
        return self._requests

    def close(self) -> None:
        """End the process."""
        if self._requests is not None and self._process is not None:
            self._requests.close()
            self._process.wait()


def _prepare() -> None:
    """Import and compile what servers and their workers would each import and compile."""
    from vllm.utils import system_utils  # noqa: PLC0415

    from tests.support.e2e.forked_server import forking  # noqa: PLC0415
    from tests.support.kernels import keep_compiled  # noqa: PLC0415

    system_utils.get_mp_context = forking  # first: modules keep what they import from there
    keep_compiled()
    for name in _IMPORTS:
        with suppress(ImportError):
            importlib.import_module(name)
    from layout import staging  # noqa: PLC0415
    from layout.geometry import Plane  # noqa: PLC0415
    from transfer.copies.checksums import block_checksums  # noqa: PLC0415
    from transfer.copies.reshape import reshape  # noqa: PLC0415

    staging.warm_up()
    reshape.warm_up()
    block_checksums.warm_up([Plane("k", ("a",), 0, 1, 1, 1, 4, 1, 0, 0, 0, 0, 0, 0)])
    # It looks for the place of the title beside the first environment, which a server replaces.
    importlib.import_module("setproctitle").getproctitle()
    gc.freeze()  # no collection in a server looks at all this


def _serve(requests: socket.socket) -> list[str]:
    """Fork a process for each request. Returns in such a process, with its module and its arguments."""
    alive: dict[int, tuple[int, socket.socket]] = {}  # by pidfd
    while True:
        for ready in select.select([requests.fileno(), *alive], [], [])[0]:
            if ready in alive:
                pid, status = alive.pop(ready)
                os.close(ready)
                with status, suppress(BrokenPipeError):  # nobody wants to know
                    status.send(b"%d" % os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
            elif command := _fork(requests, alive):
                return command


def _fork(requests: socket.socket, alive: dict[int, tuple[int, socket.socket]]) -> list[str]:
    """Fork the process that is asked for. Returns its module and its arguments in it, and nothing here."""
    message, descriptors, _, _ = socket.recv_fds(requests, _MESSAGE_BYTES, 2)
    if not message:
        os._exit(0)  # at a usual exit, libraries complain of what they leak
    output, status = descriptors[0], socket.socket(fileno=descriptors[1])
    command: list[str]
    *command, environment, namespace = json.loads(message)
    threads = os.listdir("/proc/self/task")
    assert len(threads) == 1, f"a fork loses {len(threads) - 1} threads"
    pid = os.fork()
    os.setpgid(pid, pid)  # in both: neither goes on without
    if pid:
        os.close(output)
        status.send(b"%d" % pid)
        alive[os.pidfd_open(pid)] = pid, status
        return []
    for sink in (1, 2):
        os.dup2(output, sink)
    os.close(output)
    for descriptor in alive:  # the sockets close with the last reference, when ``_serve`` returns
        os.close(descriptor)
    os.environ.clear()
    os.environ.update(environment)
    if namespace:
        enter(namespace)
    return command


if __name__ == "__main__":
    if sys.argv[2:]:
        _prepare()
    sys.argv = _serve(socket.socket(fileno=int(sys.argv[1])))
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
