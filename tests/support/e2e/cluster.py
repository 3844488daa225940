"""Real vLLM servers on this machine: started together, watched, ended with everything that they started.

Every server is its own process group with its own log file. It is not its own session: Linux schedules sessions as
groups (``kernel.sched_autogroup_enabled``), and vLLM's processes, which wait for each other by calling ``sched_yield``
in a loop, then keep the other threads of their session from running for seconds on a small machine.

Nothing here knows the connector beyond its name and options; what is asked of the servers is in ``client``.
"""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, TypeAlias

from tests.support.e2e.client import MODEL_NAME, Client
from tests.support.e2e.fork_server import ForkedProcess, ForkServer
from tests.support.e2e.gates import DIRECTORY_VARIABLE, Gates
from tests.support.e2e.hosts import Hosts
from tests.support.e2e.models import DEFAULT_MODEL, ModelSpec, write_model
from tests.support.process import free_ports, is_free, stop
from tests.support.waiting import until

Role = Literal["kv_producer", "kv_consumer", "kv_both"]
Layout = Literal["LBHNC", "BLHNC", "BHLNC"]
LoadFailurePolicy = Literal["fail", "recompute"]
Platform = Literal["cpu", "cuda", "npu"]
Process: TypeAlias = subprocess.Popen[bytes] | ForkedProcess

BLOCK_SIZE = 32
KV_CACHE_BYTES = 96 * 1024 * 1024
#: In which all servers of a deployment start; longer where many of them share few cores with others.
START_TIMEOUT_S = float(os.environ.get("PD_CONNECTOR_START_TIMEOUT_S", "240"))
STOP_TIMEOUT_S = 10.0
_VARIABLES = {
    "HF_HUB_OFFLINE": "1",
    "NUMBA_NUM_THREADS": "1",  # vLLM's look for n-grams gives PyTorch as many threads as numba has
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
}
_FORKED = "tests.support.e2e.forked_server"
#: What stands in arguments for the directory of the model.
MODEL_DIRECTORY = "$MODEL"
#: Of a GPU that other servers use, too: vLLM does not start where less than this share is free.
_SHARED_GPU = ("--gpu-memory-utilization", "0.02")


@dataclass(frozen=True, slots=True)
class Sibling:
    """Another connector beside this one in MultiConnector, before it or behind it."""

    name: str
    module: str | None = None
    options: tuple[tuple[str, object], ...] = ()
    is_first: bool = False


@dataclass(frozen=True, slots=True)
class ServerSpec:
    """One server.

    ``layout`` None leaves the choice to the server. ``options`` are the connector's (``kv_connector_extra_config``).
    """

    role: Role
    model: ModelSpec = DEFAULT_MODEL
    layout: Layout | None = "LBHNC"
    tensor_parallel: int = 1
    dtype: str = "float32"
    load_failure_policy: LoadFailurePolicy = "fail"
    block_size: int = BLOCK_SIZE
    kv_cache_bytes: int = KV_CACHE_BYTES  # of the device, for each worker
    stages: tuple[int, ...] = ()  # of pipeline parallelism, by their layers; empty for one stage
    arguments: tuple[str, ...] = ()  # more of vLLM's own, with ``MODEL_DIRECTORY`` for that of the model
    variables: tuple[tuple[str, str], ...] = ()  # of the environment
    options: tuple[tuple[str, object], ...] = ()
    secret: str = ""  # of the control channel; empty for none
    python: str = sys.executable  # of an environment with vLLM and this project
    sibling: Sibling | None = None
    is_gated: bool = False  # whether its workers stop where a test has closed a gate, see ``gates``
    platform: Platform = "cpu"
    #: Whether ``vllm serve`` starts it, as for users: it wants a distribution of that name. Else the API server's
    #: module does, and on CPU it is forked, see ``fork_server``, as are its processes, unless it has another vLLM.
    by_command: bool = False
    module: str = ""  # that starts it in the place of the API server's
    start_timeout_s: float = START_TIMEOUT_S
    #: The number of the host that it runs on, see ``hosts``, where it finds its address by itself; 0: this machine.
    host: int = 0
    #: Of the hosts that have further nodes of the server, each with an equal part of its ranks.
    more_hosts: tuple[int, ...] = ()

    @property
    def address(self) -> str:
        """Where others reach it."""
        return Hosts.address(self.host) if self.host else "127.0.0.1"

    @property
    def name(self) -> str:
        """For log files and messages."""
        size = f"tp{self.tensor_parallel}" + (f"-pp{len(self.stages)}" if self.stages else "")
        return (
            f"{self.role}-{self.model.name}-{self.layout or 'own'}-{size}-{self.dtype}"
            f"-{self.load_failure_policy}-{self.block_size}"
        )

    @property
    def ranks(self) -> int:
        """How many workers the server has."""
        return self.tensor_parallel * max(len(self.stages), 1)

    def command(self, model: Path, port: int, node: int = 0) -> list[str]:
        """The command line that serves the model in the directory ``model``, on one of the server's nodes."""
        connector: dict[str, object] = {
            "kv_connector": "PDConnector",
            "kv_connector_module_path": "tests.support.e2e.gated_connector" if self.is_gated else "pd_connector",
            "kv_role": self.role,
            "kv_load_failure_policy": self.load_failure_policy,
            "kv_connector_extra_config": ({} if self.host else {"host": "127.0.0.1"}) | dict(self.options),
        }
        if self.sibling is not None:
            connector = self._in_multi_connector(connector, self.sibling)
        is_forked = self.platform == "cpu" and self.python == sys.executable
        module = self.module or (_FORKED if is_forked else "vllm.entrypoints.openai.api_server")
        if node:
            module = "tests.support.e2e.headless_node"
        start = (
            ("vllm.entrypoints.cli.main", "serve", str(model)) if self.by_command else (module, "--model", str(model))
        )
        return [
            *(self.python, "-m", *start, "--served-model-name", MODEL_NAME, "--dtype", self.dtype),
            *("--host", self.address, "--port", str(port)),
            *("--enforce-eager", "--block-size", str(self.block_size)),
            *("--kv-cache-memory-bytes", str(self.kv_cache_bytes)),
            *("--tensor-parallel-size", str(self.tensor_parallel)),
            *(self._stage_arguments if self.stages else ()),
            *(self._node_arguments(node) if self.more_hosts else ()),
            *(self.model.cpu_arguments if self.platform == "cpu" else ()),
            *(_SHARED_GPU if self.platform == "cuda" else ()),
            *self.model.adapter_arguments(model),
            *(argument.replace(MODEL_DIRECTORY, str(model)) for argument in self.arguments),
            *("--kv-transfer-config", json.dumps(connector)),
        ]

    @property
    def _stage_arguments(self) -> tuple[str, ...]:
        size = ("--pipeline-parallel-size", str(len(self.stages)))
        worker = ("--worker-cls", "tests.support.e2e.staged_worker.StagedWorker")
        return (*size, *(worker if self.platform == "cpu" else ()))

    def _node_arguments(self, node: int) -> tuple[str, ...]:
        place = ("--nnodes", str(1 + len(self.more_hosts)), "--node-rank", str(node), "--master-addr", self.address)
        return (*place, "--headless") if node else place

    def _in_multi_connector(self, ours: dict[str, object], sibling: Sibling) -> dict[str, object]:
        """MultiConnector with this connector, by its registered name alone, and another one."""
        children = [
            {name: value for name, value in ours.items() if name != "kv_connector_module_path"},
            {
                "kv_connector": sibling.name,
                "kv_connector_module_path": sibling.module,
                "kv_role": self.role,
                "kv_connector_extra_config": dict(sibling.options),
            },
        ]
        return {
            "kv_connector": "MultiConnector",
            "kv_role": self.role,
            "kv_load_failure_policy": self.load_failure_policy,
            "kv_connector_extra_config": {"connectors": children[::-1] if sibling.is_first else children},
        }

    def environment(self) -> dict[str, str]:
        """The server's environment: this one's, with vLLM kept offline and to one thread a worker."""
        wanted = {
            "VLLM_KV_CACHE_LAYOUT": self.layout,
            "VLLM_PP_LAYER_PARTITION": ",".join(map(str, self.stages)),
            "PD_CONNECTOR_SECRET": self.secret,
            "GLOO_SOCKET_IFNAME": "eth0" if self.more_hosts else "",  # else what the machine's name stands for
        }
        return (
            {**os.environ, **_VARIABLES}
            | {name: value for name, value in wanted.items() if value}
            | dict(self.variables)
        )


@dataclass(slots=True)
class Server:
    """A started server. Its owner calls ``stop``; ``kill`` and ``pause`` are faults that a test injects."""

    spec: ServerSpec
    model: Path
    port: int
    log: Path
    process: Process
    client: Client = field(init=False)
    gates: Gates = field(init=False)
    _guard: subprocess.Popen[bytes] = field(init=False)

    def __post_init__(self) -> None:
        self.gates = Gates(_gates_directory(self.log))
        self.client = Client(f"http://{self.spec.address}:{self.port}")
        self.revive(self.process)

    def revive(self, process: Process) -> None:
        """Take over a new process in the place of one that has ended.

        The client stays. A thread that waits at a socket which another one closes waits at whatever file gets its
        number next.
        """
        self.process = process
        self._guard = _spawn_guard(process.pid)

    @property
    def is_running(self) -> bool:
        """Whether the API server's process lives."""
        return self.process.poll() is None

    def log_since(self, offset: int = 0) -> str:
        """What the server has logged after the first ``offset`` bytes."""
        with self.log.open("rb") as file:
            file.seek(offset)
            return file.read().decode(errors="replace")

    @property
    def log_size(self) -> int:
        """Bytes logged so far: a mark for ``log_since``."""
        return self.log.stat().st_size

    def processes(self, title: str) -> list[int]:
        """The ids of the server's processes that vLLM calls ``title``, e.g. "EngineCore" or "Worker"; all if empty."""
        known_as = f"VLLM::{title}" if title else ""
        return [pid for pid, command in _group_members(self.process.pid) if known_as in command]

    def worker_process(self, tp_rank: int, pp_rank: int = 0) -> int:
        """The id of the process that a worker's model runs in: on a device, a single worker's is the engine core's.

        Unless the server's arguments have it apart.
        """
        stage = f"_PP{pp_rank}" if self.spec.stages else ""
        place = stage + (f"_TP{tp_rank}" if self.spec.tensor_parallel > 1 else "")
        title = f"Worker{place}" if place or self.processes("Worker") else "EngineCore"
        (process,) = self.processes(title)
        return process

    def signal(self, number: signal.Signals, title: str = "") -> None:
        """Send a signal to those of the server's processes whose command line contains ``title``."""
        for pid in self.processes(title):
            with contextlib.suppress(ProcessLookupError):
                stop(pid) if number is signal.SIGSTOP else os.kill(pid, number)

    def kill(self) -> None:
        """End every process of the server at once, without warning."""
        assert self._guard.stdin is not None
        self._guard.stdin.close()
        self._guard.wait(STOP_TIMEOUT_S)
        self.process.wait(STOP_TIMEOUT_S)
        # What it has forked has its listening socket, and may need longer to go.
        until(lambda: not self.processes(""), f"all processes of {self.spec.name} to end", within_s=STOP_TIMEOUT_S)

    def stop(self) -> None:
        """Ask the server to end, and end by force what is left of its process group."""
        if self.is_running:
            self.process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(STOP_TIMEOUT_S)
        self.kill()


@dataclass(frozen=True, slots=True)
class Footprint:
    """What one server's processes hold.

    A prefill server's workers are left out of the memory: they compute prompts of ever new shapes, for each of which
    oneDNN keeps a kernel (400 MB after 1,500 requests, with the connector or without), and take no part in a pull.
    """

    resident_mb: float
    threads: int
    descriptors: int

    @classmethod
    def of(cls, server: Server) -> "Footprint":
        computing = server.processes("Worker") if server.spec.role == "kv_producer" else []
        pages = threads = descriptors = 0
        for pid in server.processes(""):
            with contextlib.suppress(FileNotFoundError, ProcessLookupError, PermissionError):
                directory = Path(f"/proc/{pid}")
                if pid not in computing:
                    pages += int((directory / "statm").read_text().split()[1])
                threads += len(list((directory / "task").iterdir()))
                descriptors += len(list((directory / "fd").iterdir()))
        return cls(pages * os.sysconf("SC_PAGESIZE") / 1e6, threads, descriptors)


class Cluster:
    """Owner of all servers of a test session, of their models and of their logs."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._models: dict[ModelSpec, Path] = {}
        self._servers: list[Server] = []
        self._started = 0
        self._nodes: list[Process] = []  # beside the first of a server
        self._fork_server = ForkServer({**os.environ, **_VARIABLES})
        self.hosts = Hosts()

    def start(self, specs: Iterable[ServerSpec]) -> list[Server]:
        """Start servers at the same time; returns them in the order of ``specs``, all of them ready to serve.

        Raises:
            RuntimeError: one has ended or is not healthy in time; the message ends with its log. All are stopped.
        """
        specs = list(specs)
        begin = time.monotonic()
        servers = [self._launch(spec, port) for spec, port in zip(specs, free_ports(len(specs)), strict=True)]
        try:
            for server in servers:
                _wait_until_ready(server, begin + server.spec.start_timeout_s)
        except BaseException:
            self.stop(servers)
            raise
        return servers

    def restart(self, server: Server) -> None:
        """Start a server that has ended again: the same specification, the same port, the same log file."""
        server.stop()
        if not server.spec.host:
            until(lambda: is_free(server.port), f"port {server.port} to be free again", within_s=STOP_TIMEOUT_S)
        server.revive(self._spawn(server.spec, server.model, server.port, server.log, "ab"))
        _wait_until_ready(server, time.monotonic() + server.spec.start_timeout_s)

    def stop(self, servers: Iterable[Server]) -> None:
        """Stop servers, all at the same time."""
        servers = list(servers)
        for server in servers:
            if server.is_running:
                server.process.terminate()
        for server in servers:
            server.stop()
            server.client.close()
            self._servers.remove(server)

    def close(self) -> None:
        """Stop every server that still runs."""
        self.stop(list(self._servers))
        for node in self._nodes:
            node.wait(STOP_TIMEOUT_S)
        self._fork_server.close()
        self.hosts.close()

    @property
    def servers(self) -> tuple[Server, ...]:
        """The servers that have been started and not stopped."""
        return tuple(self._servers)

    def _launch(self, spec: ServerSpec, port: int) -> Server:
        self._started += 1
        model = self._model(spec)
        path = self._directory / f"{self._started:02}-{spec.name}.log"
        server = Server(spec, model, port, path, self._spawn(spec, model, port, path, "wb"))
        self._servers.append(server)
        return server

    def _spawn(self, spec: ServerSpec, model: Path, port: int, log: Path, mode: Literal["wb", "ab"]) -> Process:
        """Start a server, whose further nodes are in its process group, and log to the same file."""
        first, *others = (spec.host, *spec.more_hosts)
        with log.open(mode):
            process = self._spawn_node(spec, spec.command(model, port), first, log, 0)
        for node, host in enumerate(others, 1):
            self._nodes.append(self._spawn_node(spec, spec.command(model, port, node), host, log, process.pid))
        return process

    def _spawn_node(self, spec: ServerSpec, command: list[str], host: int, log: Path, process_group: int) -> Process:
        environment = spec.environment() | {DIRECTORY_VARIABLE: str(_gates_directory(log))}
        with log.open("ab") as file:
            # Other libraries than vLLM read their variables when they are imported.
            is_usual = not spec.more_hosts and all(name.startswith("VLLM_") for name, _ in spec.variables)
            if _FORKED in command and is_usual:
                namespace = self.hosts.namespace(host) if host else ""
                return self._fork_server.spawn(command[command.index(_FORKED) :], environment, file, namespace)
            return subprocess.Popen(
                (self.hosts.prefix(host) if host else []) + command,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                process_group=process_group,
            )

    def _model(self, spec: ServerSpec) -> Path:
        model = spec.model
        if model not in self._models:
            self._models[model] = write_model(self._directory / model.name, model, spec.environment())
        return self._models[model]


def _gates_directory(log: Path) -> Path:
    return log.with_suffix(".gates")


def _spawn_guard(group: int) -> subprocess.Popen[bytes]:
    """A process that ends a process group as soon as we close its input, or die in whatever way."""
    script = 'read -r _; kill -s KILL -- "-$1"'
    return subprocess.Popen(
        ["/bin/sh", "-c", script, "guard", str(group)],
        stdin=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        process_group=0,
    )


def _wait_until_ready(server: Server, deadline: float) -> None:
    while not server.client.is_healthy():
        if not server.is_running or time.monotonic() > deadline:
            state = "ended" if not server.is_running else f"is not healthy after {server.spec.start_timeout_s:.0f} s"
            raise RuntimeError(f"{server.spec.name} {state}; the end of {server.log}:\n{tail(server.log_since(), 300)}")
        time.sleep(0.2)
    # The first request of a process builds kernels: not a part of what a test measures or times out on.
    server.client.compute([1, 2, 3], max_tokens=2)


def tail(log: str, lines: int = 60) -> str:
    """The last lines of a log, without the noise of a server's start and of health checks."""
    kept = [line for line in log.splitlines() if not re.search(r"Route: /|leaked |GET /(health|metrics)", line)]
    return "\n".join(kept[-lines:])


def _group_members(group: int) -> list[tuple[int, str]]:
    """(process id, command line) of every process of a process group, but for those that have ended."""
    members = []
    for directory in Path("/proc").glob("[0-9]*"):
        try:
            fields = (directory / "stat").read_text().rpartition(")")[2].split()
            command = (directory / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except (FileNotFoundError, ProcessLookupError):
            continue
        if int(fields[2]) == group and fields[0] not in "ZX":
            members.append((int(directory.name), command))
    return members
