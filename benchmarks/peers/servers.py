"""A prefill and a decode server for each connector: started together, replaced one side at a time, killed.

All connectors' servers have the same arguments but for the connector's own.
"""

import json
import signal
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Self

import psutil

from benchmarks.peers.connectors import HOST, TRANSFERS, Connector, Pair, Ports
from benchmarks.peers.model import Model
from examples.quickstart.servers import Server, ServerFailed, free_ports

ROOT = Path(__file__).resolve().parents[2]
NAME = "peers"
READY_TIMEOUT_S = 300.0  # six servers that start at once on two cores take a third of it
LONGEST_TOKENS, CHUNK_TOKENS = 4096, 512
CACHE_BYTES = 256 << 20  # of each worker: two of the longest prompts and what eight short ones take

#: What the processes of a server say that end because another one has.
CONSEQUENCES = ("initialization failed", "died unexpectedly", "failed to start")

Layout = Literal["LBHNC", "BHLNC"]
Side = Literal["prefill", "decode"]
ROLES = {"prefill": "kv_producer", "decode": "kv_consumer"}
#: The address of a host, and what commands that run there begin with.
Place = tuple[str, Sequence[str]]
HERE: Place = (HOST, ())


@dataclass(frozen=True)
class Shape:
    """Of one server."""

    tensor_parallel: int = 1
    layout: Layout = "LBHNC"
    block_tokens: int = 32
    dtype: str = "float32"
    model: Model = "attention"


@dataclass(frozen=True)
class Started:
    """A server, and what it was started with."""

    server: Server
    connector: Connector
    side: Side
    shape: Shape
    port: int

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to every process of the server."""
        with suppress(psutil.NoSuchProcess):
            for process in psutil.Process(self.server.process_id).children(recursive=True):
                with suppress(psutil.NoSuchProcess):
                    process.send_signal(number)


class Fleet:
    """The servers of all connectors that are alive. Leaving the context ends them.

    Servers that nobody asks may keep cores busy all the same. Only the pair that is asked runs: the others are stopped
    (SIGSTOP), also those that are ready while others still start.
    """

    def __init__(
        self, models: Mapping[Model, Path], directory: Path, threads: int, prefill: Place = HERE, decode: Place = HERE
    ) -> None:
        """``prefill``, ``decode``: where all servers of that side run."""
        self._models, self._directory, self._threads = models, directory, threads
        self._places: dict[Side, Place] = {"prefill": prefill, "decode": decode}
        self._started: dict[tuple[str, Side], Started] = {}
        self._ports: dict[str, Ports] = {}
        self._stopped: set[tuple[str, Side]] = set()
        #: Servers that were started so far.
        self.starts = 0
        #: Why a connector's servers are not there, by its key: what ended as it started.
        self.failures: dict[str, str] = {}

    def become(self, connectors: Iterable[Connector], prefill: Shape, decode: Shape) -> dict[str, Pair]:
        """Have servers of these shapes: those that are there already, and new ones.

        Returns:
            The pairs by connector, of those whose servers both run. ``failures`` says why others do not.
        """
        wanted = {
            (connector.key, side): (connector, shape)
            for connector in connectors
            for side, shape in _sides(prefill, decode)
        }
        self._end([key for key, one in self._started.items() if key not in wanted or one.shape != wanted[key][1]])
        self.failures = {}
        fresh = [key for key in wanted if key not in self._started]
        for key in sorted({key for key, _ in fresh} - set(self._ports)):
            first, second = free_ports(2, HOST)
            self._ports[key] = Ports(first, second, *(host for host, _ in self._places.values()))
        for one, port in zip(fresh, free_ports(len(fresh), HOST), strict=True):
            self._start(wanted[one][0], one[1], wanted[one][1], port)
        self._wait()
        return {each.key: self._pair(each) for each in connectors if each.key not in self.failures}

    def attend(self, pair: Pair) -> None:
        """Let these servers run, and stop the others."""
        for key, started in self._started.items():
            self._run(key, started.server.url in {pair.prefill_url, pair.decode_url})

    def _run(self, key: tuple[str, Side], wanted: bool) -> None:
        if wanted is (key not in self._stopped):
            return
        self._started[key].signal(signal.SIGCONT if wanted else signal.SIGSTOP)
        (self._stopped.discard if wanted else self._stopped.add)(key)

    def retire(self, connector: str) -> None:
        """End both servers of a connector, by its key. ``become`` starts others in their place."""
        self._end([key for key in self._started if key[0] == connector])

    def kill_prefill(self, connector: Connector) -> None:
        """End every process of a prefill server at once, without warning."""
        started = self._started[connector.key, "prefill"]
        for process in psutil.Process(started.server.process_id).children(recursive=True):
            process.kill()
        started.server.stop()

    def restart_prefill(self, connectors: Iterable[Connector]) -> dict[str, Pair]:
        """Start prefill servers again that were killed, all at once and at their old ports.

        Returns:
            The pairs by connector, of those that start; ``failures`` says why others do not.
        """
        killed = list(connectors)
        for connector in killed:
            old = self._started.pop((connector.key, "prefill"))
            self._stopped.discard((connector.key, "prefill"))
            self._start(connector, "prefill", old.shape, old.port)
        self._wait()
        return {each.key: self._pair(each) for each in killed if each.key not in self.failures}

    def close(self) -> None:
        """End all servers, at the same time."""
        self._end(list(self._started))

    def _end(self, keys: Iterable[tuple[str, Side]]) -> None:
        """End servers, which are continued first: stopped ones would not hear of it."""
        keys = list(keys)
        for key in keys:
            self._run(key, True)
        ended = [self._started.pop(key).server for key in keys]
        for server in ended:
            server.request_stop()
        for server in ended:
            server.stop()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _pair(self, connector: Connector) -> Pair:
        prefill, decode = (self._started[connector.key, side].server.url for side in ("prefill", "decode"))
        return Pair(prefill, decode, self._ports[connector.key], self._transfers(connector))

    def _transfers(self, connector: Connector) -> Path:
        return self._directory / f"{connector.key}-transfers.jsonl"

    def _start(self, connector: Connector, side: Side, shape: Shape, port: int) -> None:
        self.starts += 1
        log = self._directory / f"{self.starts:02}-{connector.key}-{side}.log"
        environment = {
            "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "OMP_NUM_THREADS": str(self._threads), "VLLM_KV_CACHE_LAYOUT": shape.layout,
            "VLLM_SSM_CONV_STATE_LAYOUT": "DS",  # NIXL serves no other
            TRANSFERS: str(self._transfers(connector)),
        } | connector.environment(self._ports[connector.key], side == "prefill")  # fmt: skip
        server = Server(
            f"{side} server of {connector.label}", self._command(connector, side, shape, port),
            url=f"http://{self._places[side][0]}:{port}", log=log, environment=environment, cwd=ROOT,
        )  # fmt: skip
        server.start()
        self._started[connector.key, side] = Started(server, connector, side, shape, port)

    def _command(self, connector: Connector, side: Side, shape: Shape, port: int) -> list[str]:
        host, prefix = self._places[side]
        options: Mapping[str, object] = {
            "model": self._models[shape.model], "served-model-name": NAME, "host": host, "port": port,
            "dtype": shape.dtype, "block-size": shape.block_tokens, "kv-cache-memory-bytes": CACHE_BYTES,
            "tensor-parallel-size": shape.tensor_parallel, "max-model-len": LONGEST_TOKENS,
            "max-num-batched-tokens": CHUNK_TOKENS,
            "kv-transfer-config": json.dumps(connector.transfer_config(ROLES[side])),
        }  # fmt: skip
        words = [str(word) for option, value in options.items() for word in (f"--{option}", value)]
        # On CPU, vLLM's Mamba2 computes no states at the borders of blocks, by which prefixes of hybrids are found.
        words += ["--no-enable-prefix-caching"] if shape.model == "hybrid" else []
        return [*prefix, sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--enforce-eager",
                "--skip-tokenizer-init", *words]  # fmt: skip

    def _wait(self) -> None:
        """Wait until all servers are ready, and end those of connectors of which one is not."""
        waiting, until = dict(self._started), time.monotonic() + READY_TIMEOUT_S  # those that are kept are old
        while waiting:
            for key, started in list(waiting.items()):
                try:
                    if key in self._stopped or started.server.ready():
                        waiting.pop(key)
                        self._run(key, False)
                    elif time.monotonic() > until:
                        raise ServerFailed(f"not ready within {READY_TIMEOUT_S:.0f} s", started.server.log_tail())
                except ServerFailed as error:
                    self._give_up(key[0], started, error)
                    waiting = {other: one for other, one in waiting.items() if other[0] != key[0]}
            time.sleep(0.2 if waiting else 0)

    def _give_up(self, connector: str, started: Started, error: ServerFailed) -> None:
        said = [line for line in started.server.errors(lines=50) if not any(words in line for words in CONSEQUENCES)]
        causes = said or [str(error)]
        self.failures[connector] = f"the {started.side} server ended as it started: {causes[-1]}"
        self.retire(connector)


def _sides(prefill: Shape, decode: Shape) -> tuple[tuple[Side, Shape], tuple[Side, Shape]]:
    return ("prefill", prefill), ("decode", decode)
