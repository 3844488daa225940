"""Real servers: x P and y D on this machine, alike but for their role, with one thread for the kernels of each."""

import contextlib
import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil

from benchmarks import record
from benchmarks.fleet.constants import Cache
from benchmarks.pair import HEAD_SIZE, KV_HEADS, LAYERS, MODEL
from benchmarks.peers.connectors import HOST, OURS, Pair, Ports
from benchmarks.peers.servers import NAME
from examples.quickstart.servers import Server, Servers, free_ports

DIRECTORY = record.ROOT / ".cache" / "fleet"
READY_TIMEOUT_S = 600.0
CHUNK_TOKENS, BLOCK_TOKENS, LONGEST_TOKENS = 512, 32, 4096
CACHE_BYTES = 512 << 20  # of each server: what five of the longest prompts take
ITEM_BYTES = 4

_CACHE = Cache(LAYERS, KV_HEADS, HEAD_SIZE, ITEM_BYTES, BLOCK_TOKENS, 0)
CACHE = Cache(LAYERS, KV_HEADS, HEAD_SIZE, ITEM_BYTES, BLOCK_TOKENS, CACHE_BYTES // _CACHE.block_bytes)


@dataclass(frozen=True)
class Running:
    """Servers that are ready."""

    prefills: tuple[str, ...]
    decodes: tuple[str, ...]
    controls: tuple[dict[str, Any], ...]  # where the control channel of each P is
    processes: tuple[int, ...]  # that look after the servers', first those of P

    def pair(self, prefill: int, decode: int) -> Pair:
        """Return one P and one D as a router knows them."""
        return Pair(self.prefills[prefill], self.decodes[decode], Ports(0, 0), Path(), dict(self.controls[prefill]))


@contextmanager
def running(prefills: int, decodes: int) -> Iterator[Running]:
    """Yield x P and y D, ready; they end with the context.

    Raises:
        ServerFailed: one of them did not start.
    """
    model = DIRECTORY / "model"
    model.mkdir(parents=True, exist_ok=True)
    (model / "config.json").write_text(json.dumps(MODEL))
    roles = ["kv_producer"] * prefills + ["kv_consumer"] * decodes
    with Servers() as servers:
        started = [
            servers.start(_server(model, role, number, port))
            for number, (role, port) in enumerate(zip(roles, free_ports(len(roles), HOST), strict=True))
        ]
        servers.wait_ready(started, READY_TIMEOUT_S)
        urls = tuple(each.url for each in started)
        yield Running(
            urls[:prefills],
            urls[prefills:],
            tuple(_control(url) for url in urls[:prefills]),
            tuple(each.process_id for each in started),
        )


def _server(model: Path, role: str, number: int, port: int) -> Server:
    options: dict[str, object] = {
        "model": model, "served-model-name": NAME, "host": HOST, "port": port, "dtype": "float32",
        "load-format": "dummy", "block-size": BLOCK_TOKENS, "kv-cache-memory-bytes": CACHE_BYTES,
        "max-model-len": LONGEST_TOKENS, "max-num-batched-tokens": CHUNK_TOKENS,
        "kv-transfer-config": json.dumps(OURS.transfer_config(role)),
    }  # fmt: skip
    words = [str(word) for option, value in options.items() for word in (f"--{option}", value)]
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--enforce-eager",
               "--skip-tokenizer-init", *words]  # fmt: skip
    environment = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind",
                   "OMP_NUM_THREADS": "1"}  # fmt: skip
    log = DIRECTORY / f"{number}-{role}.log"
    return Server(f"{role} {number}", command, url=f"http://{HOST}:{port}", log=log, environment=environment,
                  cwd=record.ROOT)  # fmt: skip


def _control(url: str) -> dict[str, Any]:
    body = {"model": NAME, "prompt": list(range(2, 2 + BLOCK_TOKENS)), "max_tokens": 1, "detokenize": False,
            "kv_transfer_params": {"do_remote_decode": True}}  # fmt: skip
    answer = httpx.post(f"{url}/v1/completions", json=body, timeout=60.0, trust_env=False)
    answer.raise_for_status()
    params = answer.json()["kv_transfer_params"]
    return {name: params[name] for name in ("remote_host", "remote_port")}


def processor_s(process: int) -> float:
    """Return the processor time that all processes of a server have taken so far."""
    total = 0.0
    for each in psutil.Process(process).children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            times = each.cpu_times()
            total += times.user + times.system
    return total


def scraped(urls: Sequence[str]) -> tuple[int, int]:
    """Return the descriptors and bytes that these D have pulled so far."""
    counted = [OURS.counted(Pair("", url, Ports(0, 0), Path())) for url in urls]
    return sum(each.descriptors for each in counted), sum(each.bytes for each in counted)
