"""The command line: ``pd-doctor``, or ``python -m pd_connector.doctor``."""

import argparse
import json
import logging
import os
import signal
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass

from pd_connector.config import ConfigError, ConnectorConfig, parse_config
from pd_connector.doctor.decode import Sizes
from pd_connector.doctor.findings import Check, CheckFailed, CheckSkipped, Examination, Outcome, Verdict
from pd_connector.doctor.http import BadPeerError, HttpServer, base_url
from pd_connector.doctor.machine import Machine
from pd_connector.doctor.software import Software
from pd_connector.doctor.standin import Listener, serve_apart
from pd_connector.doctor.visit import Visit, Wishes
from transfer.control.errors import ControlStartError
from transfer.engine.base import EngineStartError

_KEY_VARIABLE = "VLLM_API_KEY"
_PREFILL_TIMEOUT_S = 120.0  # for P's answer to a request; it may have others
_LOCAL_PULL_BYTES = 48 << 20


@dataclass(frozen=True, slots=True)
class LocalEnd:
    """What an engine on this machine would take."""

    host: str
    protocol: str
    is_guessed: bool = False  # without vLLM, which knows both


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the checks; return 0 if nothing has failed, 1 if something has. Bad arguments leave with 2."""
    parser = _parser()
    options = parser.parse_args(arguments)
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    try:
        config = _config(options.config)
        wishes = Wishes(Sizes(options.tensor_parallel_size, options.block_size), options.tokens, options.pull_bytes)
        url = base_url(options.peer) if options.peer else ""
    except (ValueError, BadPeerError) as error:
        parser.error(str(error))
    if options.tokens < 2 or options.pull_bytes < 1:
        parser.error(f"--tokens is {options.tokens} and --pull-bytes {options.pull_bytes}; at least 2 and 1 are needed")
    place = _place(config)
    if options.listen:
        return _listen(config, place, options.port)
    report = Examination(lambda _: None) if options.json else Examination(lambda line: _print(str(line)))
    _examine(report, config, place, wishes)
    if url:
        key = options.api_key if options.api_key is not None else os.environ.get(_KEY_VARIABLE) or None
        visit = Visit(HttpServer(url, key, _PREFILL_TIMEOUT_S), config, place.host, place.protocol, wishes)
        try:
            report.run_chain([(f"peer: {name}" if name != "peer" else name, check) for name, check in visit.checks])
        finally:
            visit.close()
    _print(report.as_json() if options.json else f"\n{report.summary()}")
    return 0 if report.passed else 1


def _examine(report: Examination, config: ConnectorConfig, place: LocalEnd, wishes: Wishes) -> None:
    """Check this machine."""
    if place.is_guessed:
        said = f"vLLM, which chooses host and protocol, cannot be imported; taken are {place.host} and {place.protocol}"
        report.add("vllm's choices", Verdict(said, outcome=Outcome.WARN))
    for name, check in (*Software().checks, *Machine(config, place.host, place.protocol).checks):
        report.run(name, check)
    report.run("two processes", _two_processes(config, place, wishes))


def _two_processes(config: ConnectorConfig, place: LocalEnd, wishes: Wishes) -> Check:
    """Return the check that another process on this machine can be read like a P."""

    def check() -> Verdict:
        if place.protocol == "ascend":
            raise CheckSkipped(
                "the Ascend transport does not read host memory; python -m pd_connector.vllm.npu_check checks the NPU"
            )
        with serve_apart(config, place.host, place.protocol) as address:
            server = HttpServer(base_url(address), None, _PREFILL_TIMEOUT_S)
            plain = config.model_copy(update={"allowed_peers": None})
            larger = Wishes(Sizes(), wishes.tokens, _LOCAL_PULL_BYTES)
            visit, inner = Visit(server, plain, place.host, place.protocol, larger), Examination()
            try:
                inner.run_chain([one for one in visit.checks if one[0] != "plan"])
            finally:
                visit.close()
        if not inner.passed:
            (failed,) = (line for line in inner.lines if line.verdict.outcome is Outcome.FAIL)
            raise CheckFailed(f"{failed.name}: {failed.verdict.text}")
        found = {line.name: line.verdict for line in inner.lines}
        text = f"{found['link'].text}; {found['pull'].text}"
        return Verdict(text, {"link": found["link"].values, "pull": found["pull"].values})

    return check


def _listen(config: ConnectorConfig, place: LocalEnd, port: int) -> int:
    """Serve in P's place until a signal comes."""
    stopping = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stopping.set())
    try:
        listener = Listener(config, place.host, place.protocol, port)
    except (EngineStartError, ControlStartError, ConfigError, OSError) as error:
        _print(f"cannot listen: {error}")
        return 1
    _print(f"listening at {listener.address}; on the other machine: pd-doctor --peer {listener.address}")
    stopping.wait()
    listener.close()
    return 0


def _place(config: ConnectorConfig) -> LocalEnd:
    """Return what an engine here would take, as vLLM says; without vLLM, TCP on loopback."""
    try:
        from pd_connector.vllm.platform import host_address  # noqa: PLC0415  imports vLLM: seconds
        from pd_connector.worker.transfer_engine import transport  # noqa: PLC0415

        return LocalEnd(config.host or host_address(), transport(config))
    except ImportError:
        protocol = "tcp" if config.protocol == "auto" else config.protocol
        return LocalEnd(config.host or "127.0.0.1", protocol, is_guessed=True)


def _config(text: str) -> ConnectorConfig:
    """Return the settings of a JSON object.

    Raises:
        ValueError: it is none, or a setting is wrong.
    """
    try:
        settings = json.loads(text)
    except ValueError as error:
        raise ValueError(f"--config is not JSON: {error}") from error
    if not isinstance(settings, dict):
        raise ValueError("--config must be a JSON object, as kv_connector_extra_config is")
    return parse_config(settings)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="pd-doctor",
        description="Checks a machine, and a running prefill server, before P/D disaggregation is served on it.",
        epilog="Exit status: 0 if nothing has failed, 1 if something has, 2 for bad arguments.",
        allow_abbrev=False,
    )
    wishes = Wishes()
    add = parser.add_argument
    add(
        "--config",
        default="{}",
        metavar="JSON",
        help="the engines' kv_connector_extra_config (host, protocol, devices, secret_file and so on)",
    )
    add("--json", action="store_true", help="print one JSON object instead of lines")
    add("--peer", metavar="HOST[:PORT]", help="HTTP address of a running prefill server, or of another --listen")
    add(
        "--api-key",
        metavar="KEY",
        help=f"the prefill server's key; prefer the environment variable {_KEY_VARIABLE}, which others cannot see",
    )
    add(
        "--tokens",
        type=int,
        default=wishes.tokens,
        metavar="N",
        help="length of the prompt whose pull is predicted (default %(default)s)",
    )
    add(
        "--pull-bytes",
        type=int,
        default=wishes.pull_bytes,
        metavar="N",
        help="how much is really pulled from the peer, about (default %(default)s)",
    )
    add("--tensor-parallel-size", type=int, default=1, metavar="N", help="of the decode engine (default %(default)s)")
    add("--block-size", type=int, default=0, metavar="N", help="of the decode engine (default: the prefill engine's)")
    add("--listen", action="store_true", help="answer a doctor on another machine in P's place, until Ctrl-C")
    add("--port", type=int, default=0, metavar="PORT", help="of --listen; 0, the default, for any")
    return parser


def _print(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
