"""Bursts of requests through pd-proxy, and what one costs it: ``python -m benchmarks.proxy``.

A prefill and a decode server that compute nothing (uvicorn, as vLLM's, each in a process of its own) behind a proxy in
another. All requests of a burst are sent at once, each on a connection of its own. Reported are the requests that
failed, the proxy's processor time, and how long the longer bursts took: on a machine with few cores that is the
servers' time and this process's, too.

Bursts of short and of long streams take turns. Their difference is the time for a chunk that D streams, and what is
left of the short ones without their chunks the time for a request, both legs. Where the proxy is busy all the time, it
passes several chunks on as one, so that a chunk is cheaper.

``--vllm-router COMMAND`` puts vllm-router before the same servers, its legs in turn, as a third way.

There is a pause between bursts, so that each finds idle connections of another age: vLLM's server closes them after
5 s.
"""

import argparse
import asyncio
import json
import os
import re
import resource
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from http import HTTPStatus
from pathlib import Path
from typing import Any

import httpx
import psutil
import uvicorn
from starlette.types import Receive, Scope, Send

from examples.quickstart.servers import free_ports

ROOT = Path(__file__).resolve().parents[1]
HOST = "127.0.0.1"
WAYS = ("together", "in-turn")
ROUTER = "vllm-router"
TRANSFER = {"remote_host": HOST, "remote_port": 9, "remote_attempt": 0, "lease_id": "none"}
EVENT = {"id": "cmpl-0", "object": "text_completion", "created": 0, "model": "none",
         "choices": [{"index": 0, "text": " token", "logprobs": None, "finish_reason": None}]}  # fmt: skip
REQUEST_MS, CHUNK_MS = 1.0, 0.15  # the targets


class FakeServer:
    """P or D without a model: an ASGI application."""

    def __init__(self, leg: str, wait_s: float) -> None:
        self._leg, self._wait_s = leg, wait_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        body, more = b"", True
        while more:
            message = await receive()
            body, more = body + message.get("body", b""), message.get("more_body", False)
        if not body:  # whether it is well, which vllm-router asks
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body"})
            return
        await asyncio.sleep(self._wait_s)
        kind = b"application/json" if self._leg == "prefill" else b"text/event-stream"
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", kind)]})
        if self._leg == "prefill":
            answer = {"choices": [{"text": " token", "finish_reason": "length"}], "kv_transfer_params": TRANSFER}
            await send({"type": "http.response.body", "body": json.dumps(answer).encode()})
            return
        event = b"data: %s\n\n" % json.dumps(EVENT).encode()
        for _ in range(json.loads(body)["max_tokens"]):
            await send({"type": "http.response.body", "body": event, "more_body": True})
            await asyncio.sleep(0.01)
        await send({"type": "http.response.body", "body": b"data: [DONE]\n\n"})


@contextmanager
def process(*words: str) -> Iterator[tuple[str, int]]:
    """Run a server; yield its URL and process id when it listens."""
    with subprocess.Popen(
        [sys.executable, "-m", *words], cwd=ROOT, env=os.environ, stderr=subprocess.PIPE, text=True
    ) as running:
        assert running.stderr is not None
        try:
            for line in running.stderr:
                if found := re.search(r"(?:running|listening) on (http://[\d.]+:\d+)", line):
                    break
            else:
                raise RuntimeError(f"{words} has ended")
            # Its log is read to its end by nobody who costs processor time here.
            with subprocess.Popen(["cat"], stdin=running.stderr, stdout=subprocess.DEVNULL) as reader:
                try:
                    yield found[1], running.pid
                finally:
                    running.terminate()
                    running.wait()
                    reader.wait()
        finally:
            running.kill()


async def ask(port: int, chunks: int) -> str:
    """Ask for a stream of so many chunks; return what is wrong with the answer, if anything."""
    body = json.dumps({"model": "none", "prompt": "a question " * 100, "max_tokens": chunks, "stream": True}).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nHost: proxy\r\nConnection: close\r\n"
    head += b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n"
    try:
        reader, writer = await asyncio.open_connection(HOST, port)
        try:
            writer.write(head % len(body) + body)
            answer = await asyncio.wait_for(reader.read(), 120)
        finally:
            writer.close()
    except (OSError, TimeoutError) as error:
        return repr(error)
    whole = answer.startswith(b"HTTP/1.1 200") and answer.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
    return "" if whole else repr(answer[:40] + b" ... " + answer[-200:])


async def burst(port: int, requests: int, chunks: int) -> list[str]:
    """Send so many requests at once; return what was wrong, of each that failed."""
    return [wrong for wrong in await asyncio.gather(*(ask(port, chunks) for _ in range(requests))) if wrong]


@contextmanager
def router(command: str, prefill: str, decode: str) -> Iterator[tuple[str, int]]:
    """Run vllm-router before P and D; yield its URL and process id when it is well."""
    port, metrics_port = free_ports(2, HOST)
    words = [command, "--host", HOST, "--port", str(port), "--prometheus-port", str(metrics_port)]
    words += ["--vllm-pd-disaggregation", "--kv-connector", "nixl", "--policy", "round_robin", "--log-level", "warning"]
    words += ["--max-concurrent-requests", "4096", "--prefill", prefill, "--decode", decode]
    with subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as running:
        url = f"http://{HOST}:{port}"
        try:
            while running.poll() is None:
                with suppress(httpx.HTTPError):
                    if httpx.get(f"{url}/health", trust_env=False).status_code == HTTPStatus.OK:
                        break
                time.sleep(0.1)
            else:
                raise RuntimeError(f"{words} has ended")
            yield url, running.pid
        finally:
            running.kill()


def measure(way: str, requests: int, options: argparse.Namespace) -> dict[str, float]:
    """Return what bursts of so many requests cost a new proxy."""
    with ExitStack() as stack:
        each = ["--wait-s", str(options.wait_s)]
        servers = [
            stack.enter_context(process("benchmarks.proxy", "--serve", leg, *each)) for leg in ("prefill", "decode")
        ]
        legs = ["--prefill", servers[0][0], "--decode", servers[1][0], "--legs", way]
        own = process("pd_proxy", "--port", "0", *legs)
        started = own if way != ROUTER else router(options.vllm_router, servers[0][0], servers[1][0])
        url, pid = stack.enter_context(started)
        port, proxy = int(url.rpartition(":")[2]), psutil.Process(pid)
        few, many = options.chunks
        asyncio.run(burst(port, 20, few))
        failed, took_s = list[str](), []
        cpu_ms: dict[int, list[float]] = {few: [], many: []}
        for chunks in (few, many) * options.rounds:
            time.sleep(options.pause_s)
            before, start = sum(proxy.cpu_times()[:2]), time.monotonic()
            failed += asyncio.run(burst(port, requests, chunks))
            took_s += [time.monotonic() - start] if chunks == many else []
            cpu_ms[chunks].append((sum(proxy.cpu_times()[:2]) - before) / requests * 1e3)
    short_ms, long_ms = (statistics.median(cpu_ms[chunks]) for chunks in (few, many))
    chunk_ms = (long_ms - short_ms) / (many - few)
    sent = 2 * options.rounds * requests
    figures = {"sent": float(sent), "failed": float(len(failed)), "request_ms": short_ms - few * chunk_ms,
               "chunk_ms": chunk_ms, "took_s": statistics.median(took_s)}  # fmt: skip
    print(f"{way:>11} {requests:>9,} {sent:>7,} {len(failed):>7} {figures['request_ms']:>14.2f} "
          f"{figures['chunk_ms']:>12.3f} {figures['took_s']:>9.1f}")  # fmt: skip
    for wrong, times in Counter(failed).most_common(3):
        print(f"{times} times: {wrong}")
    return figures


def serve(leg: str, wait_s: float) -> None:
    """Be one of the servers, until a signal comes."""
    uvicorn.run(FakeServer(leg, wait_s), host=HOST, port=0, log_level="info", access_log=False)


def main(words: Sequence[str] | None = None) -> dict[str, Any]:
    """Print a table, and return the figures by how the legs are sent and by the requests of a burst."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, nargs="+", default=[100, 1000], help="of a burst")
    parser.add_argument("--rounds", type=int, default=3, help="bursts of short streams, and of long ones")
    parser.add_argument("--chunks", type=int, nargs=2, default=[1, 33], help="of a short stream, and of a long one")
    parser.add_argument("--pause-s", type=float, default=1.5, help="between bursts")
    parser.add_argument("--wait-s", type=float, default=0.05, help="of a server before it answers")
    parser.add_argument("--vllm-router", metavar="COMMAND", help="that is measured beside it")
    parser.add_argument("--serve", choices=["prefill", "decode"], help=argparse.SUPPRESS)
    options = parser.parse_args(words)
    if options.serve:
        serve(options.serve, options.wait_s)
        return {}
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
    print(f"load average of a minute before, on {os.cpu_count()} cores: {os.getloadavg()[0]:.1f}")
    print(f"processor time of the proxy, medians; targets: nothing fails, {REQUEST_MS:g} ms a request, {CHUNK_MS:g} ms "
          "a streamed chunk")  # fmt: skip
    print(f"{'legs':>11} {'at once':>9} {'sent':>7} {'failed':>7} {'request, ms':>14} {'chunk, ms':>12} {'took, s':>9}")
    ways = (*WAYS, ROUTER) if options.vllm_router else WAYS
    return {way: {str(many): measure(way, many, options) for many in options.requests} for way in ways}


if __name__ == "__main__":
    main()
