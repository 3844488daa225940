"""vLLM's own load generator at proxy, P and D, and at one server of twice the memory: ``python -m benchmarks.serving``.

P and D each have half of the KV cache and half of the threads that the one server has. All are alive together and take
turns, rate by rate. The load is that of ``vllm bench serve``: prompts of random words, arrivals by chance at a mean
rate. Goodput is what it counts: requests a second that keep both bounds, of the first token and of the later ones.

What two shared cores can show: that nothing fails or waits for ever under a load that is not ours, and what long
prompts do to the answers beside them, which D does not compute. What they cannot: whether two machines serve more than
one of twice the size. P and D share the cores and the memory's bandwidth here, computing a prompt takes far longer than
moving it, and over loopback both ends of the move take processor time from the models.
"""

import argparse
import json
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from examples.quickstart import model, proof
from examples.quickstart.servers import Server, ServerFailed, Servers, free_ports

ROOT = Path(__file__).resolve().parents[1]
MODEL = ROOT / ".cache" / "models" / "SmolLM2-135M-Instruct"
DIRECTORY = ROOT / ".cache" / "serving"
HOST, NAME = "127.0.0.1", "served"
READY_TIMEOUT_S, LOAD_TIMEOUT_S = 600.0, 900.0
P, PAIR, ONE = "P", "proxy, P and D", "one server"
#: ``vllm bench serve`` without the command ``vllm``, which asks for a distribution of that name.
LOAD = """
import sys
from vllm.benchmarks.serve import add_cli_args, main
from vllm.utils.argparse_utils import FlexibleArgumentParser
parser = FlexibleArgumentParser()
add_cli_args(parser)
main(parser.parse_args(sys.argv[1:]))
"""
KEPT = ("completed", "failed", "request_throughput", "request_goodput", "output_throughput")
TIMES = ("ttft", "tpot", "e2el")


def command(port: int, role: str, megabytes: int, settings: Mapping[str, object] | None = None) -> list[str]:
    """Return the command line of a server, which transfers nothing without a role. ``settings``: the connector's."""
    options: dict[str, object] = {
        "model": MODEL, "served-model-name": NAME, "host": HOST, "port": port, "dtype": "float32", "block-size": 32,
        "kv-cache-memory-bytes": megabytes << 20, "max-model-len": 2048, "max-num-batched-tokens": 512,
    }  # fmt: skip
    if role:
        connector = {"kv_connector": "PDConnector", "kv_connector_module_path": "pd_connector", "kv_role": role,
                     "kv_connector_extra_config": {"host": HOST, **(settings or {})}}  # fmt: skip
        options["kv-transfer-config"] = json.dumps(connector)
    words = [str(word) for option, value in options.items() for word in (f"--{option}", value)]
    return [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--enforce-eager", *words]


@contextmanager
def running(megabytes: int, proxies: Mapping[str, Sequence[str]], *, beside: bool) -> Iterator[dict[str, str]]:
    """Yield the addresses of P, of proxies before P and D, and of the one server if it is to be ``beside``, ready.

    Args:
        megabytes: of P's and of D's KV cache. The one server has twice that, and twice the threads.
        proxies: their arguments, by their names.
        beside: whether to start the one server.
    """
    prefill, decode, one, *ports = free_ports(3 + len(proxies), HOST)
    common = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    with Servers() as servers:

        def start(name: str, port: int, words: list[str], threads: int = 1) -> Server:
            environment = common | {"OMP_NUM_THREADS": str(threads)}
            log = DIRECTORY / f"{name}.log"
            return servers.start(
                Server(name, words, url=f"http://{HOST}:{port}", log=log, environment=environment, cwd=ROOT)
            )

        started = [
            start("prefill", prefill, command(prefill, "kv_producer", megabytes)),
            start("decode", decode, command(decode, "kv_consumer", megabytes)),
        ]
        if beside:
            started.append(start("one", one, command(one, "", 2 * megabytes), 2))
        servers.wait_ready(started, READY_TIMEOUT_S)
        urls = {P: started[0].url} | ({ONE: started[2].url} if beside else {})
        for (name, arguments), port in zip(proxies.items(), ports, strict=True):
            legs = [f"--prefill={started[0].url}", f"--decode={started[1].url}"]
            words = [sys.executable, "-m", "pd_proxy", "--host", HOST, "--port", str(port), *legs, *arguments]
            proxy = start(f"proxy {port}", port, words)
            servers.wait_ready([proxy], READY_TIMEOUT_S)
            urls[name] = proxy.url
        if proxies:
            proof.prove(urls[next(iter(proxies))], started[1].url, NAME)
        yield urls


def load(url: str, rate: float, arguments: argparse.Namespace, requests: int) -> dict[str, Any]:
    """Return what ``vllm bench serve`` reports of a system under load.

    Raises:
        RuntimeError: it has failed; the message ends with what it said.
    """
    result = DIRECTORY / "result.json"
    result.unlink(missing_ok=True)
    options: Mapping[str, object] = {
        "backend": "openai", "base-url": url, "model": NAME, "tokenizer": MODEL, "dataset-name": "random",
        "random-input-len": arguments.prompt_tokens, "random-output-len": arguments.answer_tokens,
        "num-prompts": requests, "request-rate": rate, "seed": round(rate * 1000), "num-warmups": 1,
        "percentile-metrics": ",".join(TIMES), "metric-percentiles": "50,90,99",
        "result-dir": DIRECTORY, "result-filename": result.name,
    }  # fmt: skip
    words = [str(word) for option, value in options.items() for word in (f"--{option}", value)]
    goodput = ["--goodput", f"ttft:{arguments.first_token_ms}", f"tpot:{arguments.token_ms}"]
    ended = subprocess.run(
        [sys.executable, "-c", LOAD, *words, "--ignore-eos", "--save-result", "--disable-tqdm", *goodput],
        capture_output=True, text=True, timeout=LOAD_TIMEOUT_S, check=False,
    )  # fmt: skip
    if ended.returncode or not result.is_file():
        raise RuntimeError(f"vllm bench serve ended with status {ended.returncode}: {ended.stderr[-2000:]}")
    reported = json.loads(result.read_text())
    times = {
        f"{name}_ms": {f"p{rank}": reported[f"p{rank}_{name}_ms"] for rank in (50, 90, 99)} for name in TIMES
    }  # fmt: skip
    return {name: reported[name] for name in KEPT if name in reported} | times


def line(rate: float, name: str, row: Mapping[str, Any]) -> str:
    """Return a line of the table."""
    cells = "  ".join(
        f"{row[f'{time}_ms']['p50']:7.0f} {row[f'{time}_ms']['p90']:7.0f} {row[f'{time}_ms']['p99']:7.0f}"
        for time in TIMES
    )
    return (
        f"{rate:5.2f} {name:16} {row['completed']:4} {row.get('failed', 0):4} {row['request_goodput']:7.2f}  {cells}"
    )  # fmt: skip


def main(words: Sequence[str] | None = None) -> dict[str, Any]:
    """Print a table, and return the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rates", type=float, nargs="+", default=[0.2, 0.4, 0.6], help="requests a second")
    parser.add_argument("--requests", type=int, default=20, help="at each rate")
    parser.add_argument("--prompt-tokens", type=int, default=800)
    parser.add_argument("--answer-tokens", type=int, default=24)
    parser.add_argument("--megabytes", type=int, default=256, help="of P's and of D's KV cache; the one has twice that")
    parser.add_argument("--first-token-ms", type=int, default=4000, help="in which it is good")
    parser.add_argument("--token-ms", type=int, default=250, help="in which each later one is good")
    arguments = parser.parse_args(words)
    with started(arguments.megabytes, {PAIR: ()}, beside=True) as urls:
        return measure({name: urls[name] for name in (PAIR, ONE)}, arguments)


@contextmanager
def started(megabytes: int, proxies: Mapping[str, Sequence[str]], *, beside: bool = False) -> Iterator[dict[str, str]]:
    """As ``running``, with the model that it needs; end the program with a message where one of them cannot start."""
    try:
        if not model.is_made(MODEL):
            model.make(MODEL)
        DIRECTORY.mkdir(parents=True, exist_ok=True)
        with running(megabytes, proxies, beside=beside) as urls:
            yield urls
    except model.ModelError as error:
        sys.exit(str(error))
    except ServerFailed as error:
        sys.exit(f"{error}. The end of its log in {DIRECTORY}:\n{error.log_tail}")


def measure(systems: Mapping[str, str], arguments: argparse.Namespace) -> dict[str, Any]:
    """Load both systems at each rate, in turn."""
    for url in systems.values():
        load(url, 10.0, arguments, 2)  # kernels are built at the first request of a size
    print(f"prompts of {arguments.prompt_tokens} tokens, answers of {arguments.answer_tokens}; goodput: first token in "
          f"{arguments.first_token_ms} ms, each later one in {arguments.token_ms} ms")  # fmt: skip
    columns = "  ".join(f"{name + ' ms p50 p90 p99':>23}" for name in TIMES)
    print(f"{'rate':>5} {'':16} {'done':>4} {'fail':>4} {'goodput':>7}  {columns}")
    rates: dict[str, Any] = {}
    for number, rate in enumerate(arguments.rates):
        order = list(systems.items())[:: -1 if number % 2 else 1]
        rows = {name: load(url, rate, arguments, arguments.requests) for name, url in order}
        for name in systems:
            print(line(rate, name, rows[name]))
        rates[f"{rate:g}"] = {name: rows[name] for name in systems}
    return {"rates": rates}


if __name__ == "__main__":
    main()
