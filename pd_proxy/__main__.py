"""The command line: ``pd-proxy --prefill URL --decode URL``."""

import argparse
import gc
import logging
import os
import socket
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import MISSING, asdict, dataclass, fields

import uvicorn
from starlette.applications import Starlette

from pd_proxy.app import create_app
from pd_proxy.connection_pool import probe, raise_file_limit
from pd_proxy.control import Address
from pd_proxy.servers import Leg
from pd_proxy.settings import AUTO, FirstTokenFrom, Legs, Settings, WithoutPrefill

logger = logging.getLogger(__name__)

#: vLLM's own name for its servers' key. Not OPENAI_API_KEY: that one is often the key of another service.
_KEY_VARIABLE = "VLLM_API_KEY"

#: How vLLM's example proxies call a server of a leg, and what they take where only hosts or only ports are given.
_NAMES = {Leg.PREFILL: "prefiller", Leg.DECODE: "decoder"}
_DEFAULT_HOST = "localhost"
_DEFAULT_PORTS = {Leg.PREFILL: 8100, Leg.DECODE: 8200}


@dataclass(frozen=True, slots=True)
class Server:
    """Where to listen, and how to end."""

    host: str = "127.0.0.1"
    port: int = 8000  # 0 for any
    shutdown_timeout_s: int = 2  # how long requests may go on after Ctrl-C or SIGTERM


def main(arguments: Sequence[str] | None = None) -> None:
    """Serve until a signal comes."""
    settings, server = parse(arguments)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    raise_file_limit()
    try:
        app = create_app(settings)
    except ModuleNotFoundError as missing:
        sys.exit(str(missing))
    _look_for_garbage_seldom()
    if settings.api_key is not None:
        logger.info("the API key goes to the servers in the place of clients' Authorization; clients are not checked")
    config = uvicorn_config(app, server)
    running = uvicorn.Server(config)
    with suppress(KeyboardInterrupt):
        running.run(listeners(server, config.backlog))
    if not running.started:
        sys.exit(1)


def uvicorn_config(app: Starlette, server: Server) -> uvicorn.Config:
    """How uvicorn serves the proxy."""
    return uvicorn.Config(
        app,
        # Whatever else is installed: httptools loses the body of a request that offers another protocol (``Upgrade:
        # h2c``), as Java's HttpClient does in each, and sends chunks to clients of HTTP/1.0.
        http="h11",
        h11_max_incomplete_event_size=1 << 16,  # bytes of a head
        lifespan="on",
        access_log=False,
        log_config=None,
        server_header=False,
        proxy_headers=False,
        # Of a client's idle connection: longer than most load balancers keep theirs, some for ten minutes. They answer
        # 502 where they send a request while it is being closed here.
        timeout_keep_alive=620,
        timeout_graceful_shutdown=server.shutdown_timeout_s,
    )


def listeners(server: Server, backlog: int) -> list[socket.socket]:
    """Return a socket for each address to listen on; ends the process if one of them cannot be had.

    Of ``::``, it takes IPv4 connections too, as that of vLLM's servers does. uvicorn's own would take IPv6 only.
    """
    try:
        found = socket.getaddrinfo(server.host, server.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        listening = [
            socket.create_server(address, family=family, backlog=backlog, dualstack_ipv6=address[0] == "::")
            for family, _, _, _, address in found
        ]
    except (OSError, OverflowError, ValueError) as error:  # ValueError: the system has no such sockets
        sys.exit(f"cannot listen on {Address(server.host, server.port)}: {error}; name another --host or --port")
    for each in listening:
        probe(each)  # and so all whom it accepts: a client that has vanished would stay for ever
        logger.info("listening on http://%s", Address(server.host, each.getsockname()[1]))
    return listening


def _look_for_garbage_seldom() -> None:
    """Let Python look for reference cycles in new objects only, and not before there are half a million.

    A thousand requests under way are 400,000, and a look at all of them takes a tenth of a second. It finds little:
    only failures leave cycles, and Python 3.11 five objects of each connection that is closed (1 KB).
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(500_000, 2, 20)


def parse(arguments: Sequence[str] | None = None) -> tuple[Settings, Server]:
    """Return what a command line means. Leave with status 2 and a message where it cannot work."""
    parser = _parser()
    options = parser.parse_args(arguments)
    try:
        options.prefill = _leg_urls(Leg.PREFILL, options.prefill, options.prefiller_hosts, options.prefiller_ports)
        options.decode = _leg_urls(Leg.DECODE, options.decode, options.decoder_hosts, options.decoder_ports)
        options.relay = tuple(options.relay)
        settings = Settings(**{one.name: getattr(options, one.name) for one in fields(Settings)})
    except ValueError as error:
        parser.error(str(error))
    if not 0 <= options.port <= 65535:  # the socket would take the rest of a division by 65536
        parser.error(f"--port is {options.port}; it must be in 0..65535")
    if options.shutdown_timeout_s < 0:
        parser.error(f"--shutdown-timeout is {options.shutdown_timeout_s}; it must be 0 or more seconds")
    return settings, Server(options.host, options.port, options.shutdown_timeout_s)


def _leg_urls(leg: Leg, urls: list[str], hosts: list[str], ports: list[int]) -> tuple[str, ...]:
    """Return the base URLs of a leg's servers, which are given as URLs, or as hosts and ports as in vLLM."""
    if not (hosts or ports):
        return tuple(url.rstrip("/") for url in urls)
    name = _NAMES[leg]
    if urls:
        raise ValueError(
            f"{leg} servers are named twice, by --{leg} and by --{name}-hosts or --{name}-ports; use one way"
        )
    hosts = hosts or [_DEFAULT_HOST] * len(ports)
    ports = ports or [_DEFAULT_PORTS[leg]] * len(hosts)
    if len(hosts) != len(ports):
        raise ValueError(
            f"--{name}-hosts names {len(hosts)} and --{name}-ports {len(ports)}; give one port for each host, in order"
        )
    for host in hosts:
        if not host or host.count(":") == 1 or not set(host).isdisjoint("/[]@?# "):
            raise ValueError(f"--{name}-hosts has {host!r}; write a host name or an IP address there, or --{leg} URL")
    return tuple(f"http://{Address(host, port)}" for host, port in zip(hosts, ports, strict=True))


def _parser() -> argparse.ArgumentParser:
    about = "Proxy in front of vLLM prefill and decode servers."
    parser = argparse.ArgumentParser("pd-proxy", description=about, allow_abbrev=False)
    for leg in Leg:
        _add_servers(parser, leg)
    parser.add_argument("--host", help="address to listen on; :: for all of IPv6 and IPv4 (default %(default)s)")
    parser.add_argument("--port", type=int, help="port to listen on, 0 for any (default %(default)s)")
    parser.add_argument(
        "--legs",
        choices=[*map(str, Legs)],
        help="together: the decode leg is sent with the prefill leg, so that decode servers read what prefill servers "
        "have computed while these go on; in turn while a prefill server's control address is not known, which its "
        "answers tell. in-turn: the decode leg is sent when the prefill leg is answered (default %(default)s)",
    )
    parser.add_argument(
        "--first-token",
        choices=[*map(str, FirstTokenFrom)],
        help="prefill: streams of greedy text completions (--plain-chats: and chats) begin with the prefill server's "
        "own token, as soon as it has answered, and a decode server goes on behind it. decode: the whole answer is "
        "decode servers' (default %(default)s)",
    )
    parser.add_argument(
        "--without-prefill",
        choices=[*map(str, WithoutPrefill)],
        help="what becomes of a request if no prefill server can be reached, or the only one that took it failed. "
        "fail: the client gets an error. decode: a decode server computes the prompt itself. It is an error either way "
        "if two prefill servers failed it, or one was silent for longer than --request-timeout (default %(default)s)",
    )
    parser.add_argument(
        "--prefill-from",
        type=lambda text: int(text) if text.isdecimal() else text,
        metavar=f"TOKENS|{AUTO}",
        help="prompts of fewer tokens are computed by a decode server, without the detour over a prefill server. auto: "
        "only prompts of at most 512 tokens, where that has been sooner, and at most a tenth of all prompt tokens, "
        "because it delays the streams of the decode server (default %(default)s: all take the detour)",
    )
    parser.add_argument(
        "--relay",
        action="append",
        metavar="PATH",
        help="send requests for PATH to a decode server as they are, beside those that the proxy knows and does not "
        "divide; repeatable. Whoever reaches the proxy can then use it: name no administrative path (default: none)",
    )
    parser.add_argument(
        "--draining",
        metavar="FILE",
        help="names servers to be restarted, a URL a line, behind it where prefixes of a decode server are found; may "
        "change at any time. They get new requests only while no other takes connections; text completions go on at "
        "another decode server (default: none)",
    )
    parser.add_argument(
        "--plain-chats",
        action="store_true",
        help="chats of text alone are served as text completions are: they may begin with the prefill server's "
        "token, and go on with --draining. Only where no server has a --tool-call-parser or --reasoning-parser: "
        "these may hold text back, which would be lost (default: one decode server answers)",
    )
    parser.add_argument(
        "--api-key",
        metavar="KEY",
        help="the servers' key, sent in the place of clients' Authorization. Other users of this machine can see a "
        f"command line: prefer the environment variable {_KEY_VARIABLE} (default: pass clients' Authorization on)",
    )
    parser.add_argument(
        "--ca-file",
        metavar="FILE",
        help="certificates of the CAs that signed those of https servers, in PEM, in the place of the system's "
        "(default: the system's, or those that the environment variable SSL_CERT_FILE names)",
    )
    parser.add_argument(
        "--status-page",
        action="store_true",
        help="serve /status, a live page of servers, requests and failures. Whoever reaches the proxy's port can see "
        "it: addresses of servers, request ids and times, but no prompts, answers or keys (default: off)",
    )
    parser.add_argument(
        "--otlp-traces-endpoint",
        dest="traces_endpoint",
        metavar="URL",
        help="send OpenTelemetry spans of requests and their legs there, as protobuf over HTTP, such as "
        "http://127.0.0.1:4318/v1/traces (default: none)",
    )
    for name, kind, text in (
        ("connect", float, "longest wait for a connection to a server (default %(default)g)"),
        ("request", float, "longest silence of a server, before its answer and inside it (default %(default)g)"),
        ("shutdown", int, "how long requests may go on after Ctrl-C or SIGTERM (default %(default)s)"),
    ):
        parser.add_argument(f"--{name}-timeout", type=kind, dest=f"{name}_timeout_s", metavar="SECONDS", help=text)
    defaults = {one.name: one.default for one in fields(Settings) if one.default is not MISSING}
    key = os.environ.get(_KEY_VARIABLE) or None  # as in vLLM, an empty variable is none
    parser.set_defaults(**defaults | asdict(Server()) | {"relay": [], "api_key": key})
    return parser


def _add_servers(parser: argparse.ArgumentParser, leg: Leg) -> None:
    group = parser.add_argument_group(f"{leg} servers")
    group.add_argument(f"--{leg}", action="append", default=[], metavar="URL", help="base URL of a server; repeatable")
    hosts = f"as in vLLM's example proxies, instead of --{leg} (default {_DEFAULT_HOST}, if ports are given)"
    ports = f"one for each host, in the same order (default {_DEFAULT_PORTS[leg]}, if hosts are given)"
    for what, kind, text in (("host", str, hosts), ("port", int, ports)):
        names = f"--{_NAMES[leg]}-{what}s", f"--{_NAMES[leg]}-{what}"
        group.add_argument(*names, nargs="+", action="extend", type=kind, default=[], metavar=what.upper(), help=text)


if __name__ == "__main__":
    main()
