"""The command line: ``python -m examples.proxy --prefill URL --decode URL``."""

import argparse
import logging
from collections.abc import Sequence

import uvicorn

from examples.proxy.app import create_app
from examples.proxy.settings import Settings

#: How long streams may go on after Ctrl-C or SIGTERM, in seconds.
_GRACE_S = 2


def main(arguments: Sequence[str] | None = None) -> None:
    """Serve until a signal comes."""
    parser = _parser()
    options = parser.parse_args(arguments)
    try:
        settings = Settings(
            prefill=tuple(url.rstrip("/") for url in options.prefill),
            decode=tuple(url.rstrip("/") for url in options.decode),
            connect_timeout_s=options.connect_timeout,
            request_timeout_s=options.request_timeout,
        )
    except ValueError as error:
        parser.error(str(error))
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    # The proxy writes one access line a request itself.
    logging.getLogger("httpx").setLevel(logging.WARNING)
    uvicorn.run(
        create_app(settings),
        host=options.host,
        port=options.port,
        access_log=False,
        log_config=None,
        server_header=False,
        timeout_graceful_shutdown=_GRACE_S,
    )


def _parser() -> argparse.ArgumentParser:
    defaults = Settings(prefill=("http://localhost",), decode=("http://localhost",))
    parser = argparse.ArgumentParser(
        prog="python -m examples.proxy",
        description="OpenAI-compatible proxy in front of vLLM prefill and decode servers.",
    )
    for leg in ("prefill", "decode"):
        parser.add_argument(
            f"--{leg}", action="append", required=True, metavar="URL", help=f"base URL of a {leg} server; repeatable"
        )
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default %(default)s)")
    parser.add_argument("--port", type=int, default=8000, help="port to listen on, 0 for any (default %(default)s)")
    parser.add_argument(
        "--connect-timeout",
        type=float,
        default=defaults.connect_timeout_s,
        metavar="SECONDS",
        help="longest wait for a connection to a server (default %(default)g)",
    )
    parser.add_argument(
        "--request-timeout",
        type=float,
        default=defaults.request_timeout_s,
        metavar="SECONDS",
        help="longest silence of a server, before its answer and inside it (default %(default)g)",
    )
    return parser


if __name__ == "__main__":
    main()
