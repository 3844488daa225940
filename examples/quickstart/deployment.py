"""The command lines of the three servers: prefill (P), decode (D) and the proxy before them."""

import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path

from examples.quickstart.servers import Server, free_ports

_HOST = "127.0.0.1"
_ROOT = Path(__file__).resolve().parents[2]  # `python -m pd_proxy` is found from here
_BLOCK_TOKENS = 32
_KV_CACHE_BYTES = 1 << 30
_CONTEXT_TOKENS = 4096
SERVED_NAME = "demo"


@dataclass(frozen=True, slots=True)
class Settings:
    """What the servers are started with."""

    model: Path
    dtype: str
    prefill_tp: int
    decode_tp: int
    max_context: int  # tokens that the model can see
    logs: Path


@dataclass(frozen=True, slots=True)
class Deployment:
    """The three servers, not started."""

    prefill: Server
    decode: Server
    proxy: Server


def build(settings: Settings) -> Deployment:
    """The servers of ``settings`` on free loopback ports."""
    prefill_port, decode_port, proxy_port = free_ports(3, _HOST)
    prefill = _vllm(settings, "prefill", "kv_producer", prefill_port, settings.prefill_tp)
    decode = _vllm(settings, "decode", "kv_consumer", decode_port, settings.decode_tp)
    command = [sys.executable, "-m", "pd_proxy", "--host", _HOST, "--port", str(proxy_port)]
    command += ["--prefill", prefill.url, "--decode", decode.url]
    proxy = Server("proxy", command, url=f"http://{_HOST}:{proxy_port}", log=settings.logs / "proxy.log", cwd=_ROOT)
    return Deployment(prefill, decode, proxy)


def _vllm(settings: Settings, name: str, role: str, port: int, tp: int) -> Server:
    context = min(_CONTEXT_TOKENS, settings.max_context)
    options = {
        "model": settings.model,
        "served-model-name": SERVED_NAME,
        "host": _HOST,
        "port": port,
        "dtype": settings.dtype,
        "tensor-parallel-size": tp,
        "block-size": _BLOCK_TOKENS,
        "kv-cache-memory-bytes": _KV_CACHE_BYTES,
        # Both servers prefill every prompt in one piece: other pieces would round other sums.
        "max-model-len": context,
        "max-num-batched-tokens": max(context, 2048),
        "kv-transfer-config": json.dumps(
            {
                "kv_connector": "PDConnector",
                "kv_connector_module_path": "pd_connector",
                "kv_role": role,
                "kv_connector_extra_config": {"host": _HOST},
            }
        ),
    }
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--enforce-eager"]
    for option, value in options.items():
        command += [f"--{option}", str(value)]
    return Server(
        f"{name} server",
        command,
        url=f"http://{_HOST}:{port}",
        log=settings.logs / f"{name}.log",
        environment=_environment(settings),
        cwd=_ROOT,
    )


def _environment(settings: Settings) -> dict[str, str]:
    # One thread a core over the ranks of both servers. More only steal from each other, and the same number
    # on both sides makes the same sums.
    cores = len(os.sched_getaffinity(0))
    threads = max(1, cores // (settings.prefill_tp + settings.decode_tp))
    return {
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(threads)),
        "PYTHONUNBUFFERED": "1",
    }
