"""A prefill server and two decode servers on one GPU: handovers, reads, and what they cost those who compute."""

import itertools
import json
import secrets
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks import legs, pair
from benchmarks.cuda.copies import Place, copy_seconds
from benchmarks.pair import Model, Pair, Side, a_prompt, counted
from benchmarks.peers.servers import NAME

#: As large as those of a served model, in a model that is not: 96 KiB of cache a token.
LAYERS, KV_HEADS, HEAD_SIZE = 24, 8, 128
CONFIG = pair.MODEL | {
    "num_hidden_layers": LAYERS, "num_attention_heads": 2 * KV_HEADS, "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD_SIZE, "max_position_embeddings": 1 << 15, "torch_dtype": "bfloat16",
}  # fmt: skip
COUNT_TIMEOUT_S = 20.0
AT_ONCE = 2  # streams of pulls, or of loads, beside the stream whose gaps are measured
ALONE, PULLS, LOADS = "alone", "pulls and stores", "loads"


def _made() -> Path:
    directory = pair.DIRECTORY / "cuda"
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(CONFIG))
    return directory


#: As users' servers decode; vLLM takes the last of words that contradict each other.
CUDA_GRAPHS = (
    *("--no-enforce-eager", "--compilation-config"),
    '{"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": [1, 2, 4, 8]}',
)
GPU_MODEL = Model(
    _made, LAYERS * KV_HEADS * HEAD_SIZE * 2 * 2, 0, 16, 1 << 15,
    ("--load-format", "dummy", "--dtype", "bfloat16", "--gpu-memory-utilization", "0.02",
     "--max-num-batched-tokens", "2048", *CUDA_GRAPHS),
)  # fmt: skip


@dataclass(frozen=True)
class Plan:
    """How much is measured."""

    lengths: tuple[int, ...]  # of prompts, in tokens
    repeats: int
    beside_tokens: int  # of the prompts that are pulled or loaded beside a stream
    stream_tokens: int
    protocol: str
    is_mapped: bool  # whether reads over CUDA IPC are measured, too


def measure(place: Place, model: Model, plan: Plan) -> Iterator[dict[str, Any]]:
    """Yield figures, part by part."""
    options = {"protocol": plan.protocol}
    # P has one prompt more, that it computes while another is read.
    prefill, decode = (
        Side(cache_bytes=model.cache_bytes(model.longest + more), longest=model.longest, options=options)
        for more in (plan.lengths[-1], 1024)
    )
    # Two and a half of the prompts that are loaded in turn, of which there are four: each is gone when it comes again.
    short = 2 * plan.beside_tokens
    host_bytes = 8 * model.cache_bytes(plan.beside_tokens)
    busy = Side(
        cache_bytes=model.cache_bytes(short + plan.beside_tokens // 2), longest=short,
        options=options | {"cpu_bytes_to_use": host_bytes},
    )  # fmt: skip
    with pair.running(prefill, decode, busy, model=model) as (plain, with_host_memory):
        yield {"handover": legs.handovers(plain, model, plan.lengths, plan.repeats, 0)}
        yield {"lengths": {str(tokens): _reads(place, plain, tokens, plan.repeats) for tokens in plan.lengths}}
        yield {"gaps": _gaps(with_host_memory, plan)}
    if plan.is_mapped:
        yield {"mapped": _mapped_reads(place, model, plan, prefill, decode)}


def _mapped_reads(place: Place, model: Model, plan: Plan, *sides: Side) -> dict[str, dict[str, float]]:
    """Return how D reads prompts of P, whose memory it maps, and the handovers.

    Raises:
        RuntimeError: it is not mapped.
    """
    secret = {"PD_CONNECTOR_SECRET": secrets.token_hex(32)}
    prefill, decode = (replace(side, options={"protocol": "auto"}, variables=secret) for side in sides)
    print("  over CUDA IPC")
    with pair.running(prefill, decode, model=model) as (mapping,):
        before = _pulled(mapping)
        found = legs.handovers(mapping, model, plan.lengths, plan.repeats, 0)
        for tokens in plan.lengths:
            found[str(tokens)] |= _reads(place, mapping, tokens, plan.repeats)
        read, mapped = (_pulled(mapping)[name] - before[name] for name in ("bytes", "mapped_bytes"))
    if mapped < read:
        raise RuntimeError(f"D has read {mapped / 1e6:.0f} of {read / 1e6:.0f} MB over CUDA IPC; its log says why")
    return found


def _reads(place: Place, servers: Pair, tokens: int, repeats: int) -> dict[str, float]:
    """Return how D reads prompts of P, and what P's prefills take alone and meanwhile."""
    before = _pulled(servers)
    for _ in range(repeats):
        servers.in_turn(a_prompt(tokens), 1)
    deadline = time.monotonic() + COUNT_TIMEOUT_S
    while (after := _pulled(servers))["pulls"] < before["pulls"] + repeats:
        if time.monotonic() > deadline:
            raise RuntimeError(f"D has counted {after['pulls'] - before['pulls']:g} of {repeats} pulls: see its log")
        time.sleep(0.1)
    size, seconds = ((after[name] - before[name]) / repeats for name in ("bytes", "seconds"))
    alone_ms, beside_ms = _prefills(servers, tokens, repeats)
    found = {
        "megabytes": size / 1e6, "read_ms": 1e3 * seconds, "gb_per_s": size / seconds / 1e9,
        "device_copy_ms": 1e3 * copy_seconds(place, int(size)),
        "prefill_ms": alone_ms, "prefill_beside_read_ms": beside_ms,
    }  # fmt: skip
    print(f"  {tokens:,} tokens: " + ", ".join(f"{name} {value:.1f}" for name, value in found.items()))
    return found


def _pulled(servers: Pair) -> dict[str, float]:
    return {
        "pulls": counted(servers.decode, "vllm:pd_pulls_total"),
        "bytes": counted(servers.decode, "vllm:pd_pull_bytes_total"),
        "mapped_bytes": counted(servers.decode, "vllm:pd_pull_bytes_over_ipc_total"),
        "seconds": counted(servers.decode, "vllm:pd_pull_seconds_sum", phase="read"),
    }


def _prefills(servers: Pair, tokens: int, repeats: int) -> tuple[float, float]:
    """Return P's median time for a prompt that nobody pulls, alone and while D reads another, in milliseconds."""
    alone, beside = [], []
    with ThreadPoolExecutor(1) as reader:
        for _ in range(repeats):
            alone.append(_ms(lambda: servers.complete(servers.prefill, a_prompt(tokens), 1, None)))
            read = a_prompt(tokens)
            params = servers.complete(servers.prefill, read, 1, {"do_remote_decode": True})["kv_transfer_params"]
            reading = reader.submit(servers.complete, servers.decode, read, 1, params)
            beside.append(_ms(lambda: servers.complete(servers.prefill, a_prompt(tokens), 1, None)))
            reading.result()
    return statistics.median(alone), statistics.median(beside)


def _ms(action: Callable[[], object]) -> float:
    start = time.perf_counter()
    action()
    return 1e3 * (time.perf_counter() - start)


def _gaps(servers: Pair, plan: Plan) -> dict[str, Any]:
    """Return the gaps between the tokens of a stream on D, by what D's device and host memory do meanwhile."""
    asked = [a_prompt(plan.beside_tokens) for _ in range(4)]
    turns = itertools.cycle(asked)
    ways: Mapping[str, Callable[[], object]] = {
        ALONE: lambda: time.sleep(0.01),
        PULLS: lambda: servers.in_turn(a_prompt(plan.beside_tokens), 1),
        LOADS: lambda: servers.complete(servers.decode, next(turns), 1, None),
    }
    found = {}
    for name, action in ways.items():
        if name == LOADS:
            for prompt in asked:  # they are computed, and stored in host memory
                servers.complete(servers.decode, prompt, 1, None)
        before = _moved(servers)
        with _meanwhile(action):
            gaps = _stream_gaps_ms(servers, plan.stream_tokens)
        moved = {what: (value - before[what]) / 1e9 for what, value in _moved(servers).items()}
        percentiles = statistics.quantiles(gaps, n=100)
        found[name] = {"p50_ms": percentiles[49], "p99_ms": percentiles[98], "moved_gb": moved}
        print(f"  gaps of a stream, {name}: {percentiles[49]:.2f} ms, p99 {percentiles[98]:.2f}; GB moved {moved}")
    return found


def _moved(servers: Pair) -> dict[str, float]:
    host = {event: counted(servers.decode, "vllm:pd_host_bytes_total", event=event) for event in ("stored", "loaded")}
    return {"pulled": counted(servers.decode, "vllm:pd_pull_bytes_total"), **host}


@contextmanager
def _meanwhile(action: Callable[[], object]) -> Iterator[None]:
    """Repeat an action on some threads, beginning before the context, until it is left. Its errors are raised then."""
    over = threading.Event()

    def repeat() -> None:
        while not over.is_set():
            action()

    with ThreadPoolExecutor(AT_ONCE) as threads:
        running = [threads.submit(repeat) for _ in range(AT_ONCE)]
        try:
            time.sleep(0.5)
            yield
        finally:
            over.set()
        for each in running:
            each.result()


def _stream_gaps_ms(servers: Pair, tokens: int) -> Sequence[float]:
    body = {"model": NAME, "prompt": a_prompt(16), "max_tokens": tokens, "temperature": 0.0, "ignore_eos": True,
            "detokenize": False, "return_token_ids": True, "stream": True}  # fmt: skip
    times = []
    with servers.http.stream("POST", f"{servers.decode}/v1/completions", json=body) as answer:
        answer.raise_for_status()
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                times.append(time.perf_counter())
    return [1e3 * (later - earlier) for earlier, later in itertools.pairwise(times)]
