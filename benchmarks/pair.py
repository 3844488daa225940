"""Prefill and decode servers on CPU for benchmarks, and requests of two legs.

The models are random. One has 24 layers (1 KiB of cache for each layer and token), the other is the hybrid of the
benchmarks beside peers: one such layer, and three with states. Prompts are computed in chunks of 512 tokens.
"""

import json
import random
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families

from benchmarks.hosts import Hosts, what_lacks
from benchmarks.peers.model import make
from benchmarks.peers.servers import NAME
from examples.quickstart.servers import Server, Servers, free_ports

ROOT = Path(__file__).resolve().parents[1]
DIRECTORY = ROOT / ".cache" / "benchmarks"
HOST = "127.0.0.1"
READY_TIMEOUT_S, REQUEST_TIMEOUT_S = 600.0, 120.0
#: vLLM closes idle connections after 5 s, at the moment perhaps when a request is sent.
CONNECTIONS = httpx.Limits(max_connections=64, keepalive_expiry=2)
LAYERS, KV_HEADS, HEAD_SIZE, VOCABULARY = 24, 4, 32, 512
CHUNK, BLOCK_TOKENS, CACHE_BYTES, LONGEST = 512, 32, 768 << 20, 8192
MODEL = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "vocab_size": VOCABULARY, "hidden_size": 256,
    "intermediate_size": 512, "num_hidden_layers": LAYERS, "num_attention_heads": 8, "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD_SIZE, "max_position_embeddings": LONGEST, "rms_norm_eps": 1e-6, "tie_word_embeddings": False,
    "torch_dtype": "float32", "bos_token_id": 0, "eos_token_id": 1,
}  # fmt: skip


@dataclass(frozen=True)
class Model:
    """What servers serve, and how they are told."""

    make: Callable[[], Path]  # write it where it is not there yet; its directory
    token_bytes: int  # of cache
    state_bytes: int  # of a request
    block_tokens: int
    longest: int  # tokens of a request
    words: tuple[str, ...]  # for vLLM

    def cache_bytes(self, tokens: int) -> int:
        """Return what a prompt's cache takes."""
        return tokens * self.token_bytes + self.state_bytes


def _without_weights() -> Path:
    directory = DIRECTORY / "model"
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(MODEL))
    return directory


ATTENTION = Model(
    _without_weights, LAYERS * KV_HEADS * HEAD_SIZE * 2 * 4, 0, BLOCK_TOKENS, LONGEST, ("--load-format", "dummy")
)
#: vLLM makes its blocks as large as a state. On CPU it finds no prefixes of such layers.
HYBRID = Model(
    lambda: make(DIRECTORY / "hybrid", "hybrid"),
    KV_HEADS * HEAD_SIZE * 2 * 4,
    3 * 72448,
    96,
    4096,
    ("--no-enable-prefix-caching",),
)


@dataclass(frozen=True)
class Side:
    """What is particular to a server."""

    layout: str = ""  # of its cache; empty: vLLM's choice
    cache_bytes: int = CACHE_BYTES
    longest: int = LONGEST  # tokens of a request
    options: Mapping[str, object] = field(default_factory=dict)  # the connector's
    variables: Mapping[str, str] = field(default_factory=dict)  # of the environment


@dataclass(frozen=True)
class Times:
    """Of one request, in seconds since the client sent it."""

    prefilled: float
    ended: float  # with all of its tokens


@dataclass(frozen=True)
class Pair:
    """A prefill and a decode server, and where the prefill server's control channel is."""

    http: httpx.Client
    prefill: str
    decode: str
    control: dict[str, Any]

    def complete(self, url: str, prompt: list[int], tokens: int, params: dict[str, Any] | None) -> dict[str, Any]:
        """Return a server's answer."""
        body = {"model": NAME, "prompt": prompt, "max_tokens": tokens, "temperature": 0.0, "ignore_eos": True,
                "detokenize": False, "return_token_ids": True, "kv_transfer_params": params}  # fmt: skip
        answer = self.http.post(f"{url}/v1/completions", json=body)
        answer.raise_for_status()
        result: dict[str, Any] = answer.json()
        return result

    def in_turn(self, prompt: list[int], tokens: int) -> Times:
        """Send the prefill leg, and the decode leg when it is answered."""
        start = time.perf_counter()
        params = self.complete(self.prefill, prompt, 1, {"do_remote_decode": True})["kv_transfer_params"]
        prefilled = time.perf_counter() - start
        self.complete(self.decode, prompt, tokens, params)
        return Times(prefilled, time.perf_counter() - start)

    def together(self, prompt: list[int], tokens: int) -> Times:
        """Send both legs at once."""
        name = uuid.uuid4().hex
        start = time.perf_counter()

        def leg(url: str, number: int, params: dict[str, Any]) -> float:
            self.complete(url, prompt, number, params)
            return time.perf_counter() - start

        with ThreadPoolExecutor(2) as threads:
            for_p = {"do_remote_decode": True, "transfer_id": name}
            prefilled: Future[float] = threads.submit(leg, self.prefill, 1, for_p)
            ended = threads.submit(
                leg, self.decode, tokens, {"do_remote_prefill": True, "transfer_id": name} | self.control
            )
            return Times(prefilled.result(), ended.result())


@contextmanager
def running(
    prefill: Side,
    *decodes: Side,
    others: Sequence[Side] = (),
    threads: int = 1,
    mbit_per_s: int = 0,
    model: Model = ATTENTION,
) -> Iterator[tuple[Pair, ...]]:
    """Yield the prefill server with each of the decode servers, then each of the others; they end with the context.

    Args:
        prefill: server.
        decodes: servers.
        others: prefill servers.
        threads: of each server's kernels.
        mbit_per_s: of the network between the servers, each on a host of its own; 0: all are on this one.
        model: that they serve.

    Raises:
        ServerFailed: one of them did not start.
        RuntimeError: no hosts can be made here.
    """
    served = ["--model", str(model.make()), "--block-size", str(model.block_tokens), *model.words]
    environment = {
        "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": str(threads),
    }  # fmt: skip
    prefills = (prefill, *others)
    sides = [*(("kv_producer", each) for each in prefills), *(("kv_consumer", each) for each in decodes)]
    with (
        hosts_for(len(sides), mbit_per_s) as places,
        Servers() as servers,
        httpx.Client(timeout=REQUEST_TIMEOUT_S, limits=CONNECTIONS, trust_env=False) as http,
    ):
        started = []
        ports = free_ports(len(sides), HOST)
        for number, ((role, side), (host, prefix), port) in enumerate(zip(sides, places, ports, strict=True)):
            own = environment | dict(side.variables) | ({"VLLM_KV_CACHE_LAYOUT": side.layout} if side.layout else {})
            log, url = DIRECTORY / f"{number}-{role}.log", f"http://{host}:{port}"
            command = [*prefix, *_command(role, side, host, port), *served]
            started.append(
                servers.start(Server(f"{role} {number}", command, url=url, log=log, environment=own, cwd=ROOT))
            )
        servers.wait_ready(started, READY_TIMEOUT_S)
        urls = [each.url for each in started]
        pairs = tuple(pair for url in urls[: len(prefills)] for pair in _pairs(http, url, urls[len(prefills) :]))
        for number, pair in enumerate(pairs):
            pair.complete(pair.decode, a_prompt(64), 1, None)
            _prove(pair, number // len(decodes) + 1)
        yield pairs


def _pairs(http: httpx.Client, prefill: str, decodes: Sequence[str]) -> Iterator[Pair]:
    alone = Pair(http, prefill, prefill, {})
    params = alone.complete(prefill, a_prompt(64), 1, {"do_remote_decode": True})["kv_transfer_params"]
    control = {name: params[name] for name in ("remote_host", "remote_port")}
    return (Pair(http, prefill, decode, control) for decode in decodes)


@contextmanager
def hosts_for(servers: int, mbit_per_s: int) -> Iterator[list[tuple[str, list[str]]]]:
    """Yield the address of each server, and what its command begins with.

    Args:
        servers: how many.
        mbit_per_s: of the network between them, each on a host of its own; 0: all are on this one.

    Raises:
        RuntimeError: no hosts can be made here.
    """
    if not mbit_per_s:
        yield [(HOST, [])] * servers
        return
    if lacks := what_lacks():
        raise RuntimeError(f"a network of {mbit_per_s} Mbit/s: {lacks}")
    with Hosts() as hosts, ExitStack() as slowed:
        places = [(hosts.address(number), hosts.prefix(number)) for number in range(1, servers + 1)]
        for number in range(1, servers + 1):
            slowed.enter_context(hosts.slowed(number, f"{mbit_per_s}mbit"))
        yield places


def _prove(pair: Pair, number: int) -> None:
    """Have a decode server compute its first prompt and pull it as well, so that all others are pulled.

    ``number``: of prefill servers that it has proven then.

    Raises:
        RuntimeError: the prefill server is not proven in time, for example because it computes something else.
    """
    pair.in_turn(a_prompt(4 * BLOCK_TOKENS), 1)
    prove(pair.decode, pair.prefill, number)


def prove(by: str, other: str, number: int = 1) -> None:
    """Wait until a server has proven another one, its ``number``-th, of which it has a prompt to compute and to pull.

    Raises:
        RuntimeError: it has not in time, for example because the other one computes something else.
    """
    deadline = time.monotonic() + READY_TIMEOUT_S
    while counted(by, "vllm:pd_canaries_total", outcome="proven") < number:
        if time.monotonic() > deadline:
            raise RuntimeError(f"{by} has not proven {other}; its log in {DIRECTORY} says why")
        time.sleep(0.1)


def _command(role: str, side: Side, host: str, port: int) -> list[str]:
    connector = {"kv_connector": "PDConnector", "kv_connector_module_path": "pd_connector", "kv_role": role,
                 "kv_connector_extra_config": {"host": host, **side.options}}  # fmt: skip
    options: dict[str, object] = {
        "served-model-name": NAME, "host": host, "port": port, "dtype": "float32",
        "kv-cache-memory-bytes": side.cache_bytes,
        "max-model-len": side.longest, "max-num-batched-tokens": CHUNK, "kv-transfer-config": json.dumps(connector),
    }  # fmt: skip
    words = [str(word) for option, value in options.items() for word in (f"--{option}", value)]
    return [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--enforce-eager", "--skip-tokenizer-init",
            *words]  # fmt: skip


def a_prompt(tokens: int) -> list[int]:
    """Return a prompt that no cache holds."""
    return [random.randrange(2, VOCABULARY) for _ in range(tokens)]


def counted(url: str, name: str, **labels: str) -> float:
    """Return a counter or gauge of a server, summed over all of its labels but these."""
    return sum(value for own, value in _samples(url, name) if labels.items() <= own.items())


def longest_calls_ms(url: str) -> dict[str, float]:
    """Return the longest time that vLLM's threads ever spent in each connector call of a server, in milliseconds."""
    return {labels["call"]: value * 1e3 for labels, value in _samples(url, "vllm:pd_connector_call_seconds_max")}


def _samples(url: str, name: str) -> list[tuple[dict[str, str], float]]:
    text = httpx.get(f"{url}/metrics", timeout=REQUEST_TIMEOUT_S, trust_env=False).raise_for_status().text
    samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    return [(dict(sample.labels), float(sample.value)) for sample in samples if sample.name == name]
