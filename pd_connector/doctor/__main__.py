"""The command line: ``pd-doctor``, or ``python -m pd_connector.doctor``."""

import argparse
import json
import logging
import os
import signal
import sys
import threading
from collections.abc import Sequence
from contextlib import closing

from pd_connector.config import ConfigError, ConnectorConfig, parse_config
from pd_connector.doctor import npu
from pd_connector.doctor.findings import Examination, Outcome
from pd_connector.doctor.http import HttpServer, base_url, usable_key
from pd_connector.doctor.listener import Listener, serve_apart
from pd_connector.doctor.machine import Machine
from pd_connector.doctor.peer_check import LEAST_TOKENS, PeerCheck
from pd_connector.doctor.pool_check import PoolCheck
from pd_connector.doctor.same_host import SameHost, has_gpu
from pd_connector.doctor.software import Software, installed
from transfer.control.failures import ControlStartError
from transfer.engine.interface import EngineStartError
from transfer.peers import MAX_PORT, Address, parse_address

_KEY_VARIABLE = "VLLM_API_KEY"
_PREFILL_TIMEOUT_S = 120.0  # for P's answer to a request; it may have others
_TOKENS = 512  # of a canary, too


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the checks; return 0 if nothing has failed, 1 if something has, 130 after Ctrl-C.

    Bad arguments leave with 2.
    """
    try:
        return _run(arguments)
    except KeyboardInterrupt:
        _print("\ninterrupted")
        return 130


def _run(arguments: Sequence[str] | None) -> int:
    parser = _parser()
    options = parser.parse_args(arguments)
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    try:
        asked = _config(options.config)
        pool = _pool(options.pool or asked.pool)
        url = base_url(options.peer) if options.peer else ""
        key = usable_key(options.api_key if options.api_key is not None else os.environ.get(_KEY_VARIABLE) or None)
    except ValueError as error:
        parser.error(str(error))
    if not 0 <= options.port <= MAX_PORT:
        parser.error(f"--port is {options.port}; it must be in 0..{MAX_PORT}")
    if options.port and not options.listen:
        parser.error(f"--port is of --listen; a prefill server's is behind its host: --peer HOST:{options.port}")
    if options.tokens < LEAST_TOKENS:
        parser.error(f"--tokens is {options.tokens}; at least {LEAST_TOKENS} are needed")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")  # it logs to standard output
    config = _as_engines_would(asked)
    if options.listen:
        return _listen(config, options.port)
    report = Examination(lambda finding: _print(str(finding)))
    _examine(report, config, by_auto=asked.protocol == "auto")
    if pool is not None:
        with closing(PoolCheck(pool)) as pool_check:
            report.run_chain(pool_check.checks)
    if url:
        with closing(PeerCheck(HttpServer(url, key, _PREFILL_TIMEOUT_S), config, options.tokens)) as peer_check:
            report.run_chain(peer_check.checks)
    _print(f"\n{report.summary()}")
    return 0 if report.passed else 1


def _examine(report: Examination, config: ConnectorConfig, *, by_auto: bool) -> None:
    """Check this machine."""
    for name, check in (*Software().checks, *Machine(config, by_auto=by_auto).checks):
        report.run(name, check)
    report.run("transfer engine", lambda: _transfer_engine(config))
    if has_gpu():
        report.run("same host", SameHost(config, by_auto=by_auto).check)
    if installed("torch-npu") and report.run("npu", npu.device).outcome is Outcome.OK:
        for name, check in npu.CHECKS:
            report.run(name, check)


def _transfer_engine(config: ConnectorConfig) -> str:
    """Check that the transfer engine starts, and that another process on this machine can be read like a P."""
    with serve_apart(config) as address:
        if config.protocol == "ascend":
            return f"ascend starts at {address}, with memory of the first NPU; it reads no host memory: none was read"
        here = config.model_copy(update={"allowed_peers": None})
        with closing(PeerCheck(HttpServer(base_url(address), None, _PREFILL_TIMEOUT_S), here, _TOKENS)) as peer_check:
            said = [check() for _, check in peer_check.checks]
    return f"{config.protocol} reads from another process here: {said[-1]}"


def _listen(config: ConnectorConfig, port: int) -> int:
    """Serve in P's place until a signal comes."""
    if config.protocol == "ascend":
        _print(
            "cannot listen: over the Ascend transport peers read an NPU's memory only, and the doctor has none; start "
            "the prefill server here, and visit it with --peer"
        )
        return 1
    stopping = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stopping.set())
    try:
        listener = Listener(config, port)
    except (EngineStartError, ControlStartError, ConfigError, ImportError, OSError) as error:
        _print(f"cannot listen: {error}")
        return 1
    _print(f"listening at {listener.address}; on the other machine: pd-doctor --peer {listener.address}")
    stopping.wait()
    listener.close()
    return 0


def _as_engines_would(config: ConnectorConfig) -> ConnectorConfig:
    """Return the settings with the host and the protocol that engines would take; without vLLM, TCP on loopback."""
    try:
        from pd_connector.vllm.platform import host_address  # noqa: PLC0415  imports vLLM: seconds
        from pd_connector.worker.transfer_engine import transport  # noqa: PLC0415

        host, protocol = config.host or host_address(), transport(config)
    except Exception:  # with whatever torch cannot be imported: a finding of its own
        host, protocol = config.host or "127.0.0.1", "tcp" if config.protocol == "auto" else config.protocol
    return config.model_copy(update={"host": host, "protocol": protocol})


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


def _pool(client: str | None) -> Address | None:
    """Return where a pool's client is.

    Raises:
        ValueError: it is no address.
    """
    try:
        return None if client is None else parse_address(client)
    except ValueError as error:
        raise ValueError(f"--pool: {error}") from error


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="pd-doctor",
        description="Checks a machine, and a running prefill server, before P/D disaggregation is served on it.",
        epilog="Exit status: 0 if nothing has failed, 1 if something has, 2 for bad arguments.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    settings = "the engines' kv_connector_extra_config (host, protocol, devices, secret_file and so on)"
    add("--config", default="{}", metavar="JSON", help=settings)
    add("--peer", metavar="HOST[:PORT]", help="HTTP address of a running prefill server, or of another --listen")
    key = f"the prefill server's key; prefer the environment variable {_KEY_VARIABLE}, which others cannot see"
    add("--api-key", metavar="KEY", help=key)
    length = "length of the prompts that are pulled (default %(default)s)"
    add("--tokens", type=int, default=_TOKENS, metavar="N", help=length)
    client = "this machine's mooncake_client, to put objects there and get them back (default: pool of --config)"
    add("--pool", metavar="HOST:PORT", help=client)
    add("--listen", action="store_true", help="answer a doctor on another machine in P's place, until Ctrl-C")
    add("--port", type=int, default=0, metavar="PORT", help="of --listen; 0, the default, for any")
    return parser


def _print(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
