"""What the proxy is told when it starts, with defaults, checked. No argument parsing here."""

import math
import os
import re
import ssl
from dataclasses import dataclass, field
from enum import StrEnum
from urllib.parse import urlsplit

#: D computes short prompts by itself where that is sooner.
AUTO = "auto"

_USABLE_PATH = re.compile(r"/[A-Za-z0-9._~/-]+")
_OWN_PATHS = frozenset({"/health", "/healthcheck", "/metrics", "/status", "/status/events"})
_USABLE_KEY = re.compile(r"[\x21-\x7e]+")


class Legs(StrEnum):
    """When the decode leg of a request is sent."""

    TOGETHER = "together"  # with the prefill leg, wherever the prefill server's control address is known
    IN_TURN = "in-turn"  # after the prefill leg, with what that was answered


class FirstTokenFrom(StrEnum):
    """Which leg's token is the first that a client gets."""

    DECODE = "decode"
    PREFILL = "prefill"  # where it is the same, see ``first_token``


class WithoutPrefill(StrEnum):
    """What becomes of a request that no prefill server serves because they are down."""

    FAIL = "fail"  # the client is told
    DECODE = "decode"  # a decode server computes the prompt


@dataclass(frozen=True, slots=True)
class Settings:
    """Servers and limits of one proxy.

    Raises:
        ValueError: a leg has no server, a server is named twice or is not an ``http(s)://host[:port]`` URL, a limit is
            not positive, the shortest prompt for P is no number, a path to relay is none, there are no certificates of
            CAs where they should be, or the API key cannot stand in a header. The key itself is in no message.
    """

    prefill: tuple[str, ...]  # base URLs of the prefill servers, without /v1
    decode: tuple[str, ...]  # base URLs of the decode servers
    legs: Legs = Legs.TOGETHER
    first_token: FirstTokenFrom = FirstTokenFrom.PREFILL
    without_prefill: WithoutPrefill = WithoutPrefill.FAIL
    prefill_from: int | str = 0  # tokens of the shortest prompt that takes the detour over P, or AUTO
    relay: tuple[str, ...] = ()  # paths that go to a decode server as they are, beside those that the proxy knows
    draining: str | None = None  # file that names servers which are to be restarted, one URL a line
    plain_chats: bool = False  # no server has a parser of tools or reasoning, which may change or hold back text
    connect_timeout_s: float = 5.0  # longest wait for a TCP connection to a server
    request_timeout_s: float = 600.0  # longest silence of a server: to its answer, and between two pieces of it
    skip_s: float = 5.0  # how long a server that refused a connection, or keeps failing, is tried last
    max_body_bytes: int = 64 * 1024 * 1024  # of a client's request
    status_page: bool = False  # for whoever reaches the proxy's port; shows servers, request ids and times, no prompts
    traces_endpoint: str | None = None  # of a collector, OTLP over HTTP; None traces nothing
    ca_file: str | None = None  # of the CAs that https servers' certificates are checked with; None: the system's
    api_key: str | None = field(default=None, repr=False)  # the servers' own; None passes on what clients send

    def tls(self) -> ssl.SSLContext | None:
        """Return what the certificates of https servers are checked with; None if there is no such server.

        Raises:
            ValueError: the file that is to be trusted cannot be used.
        """
        if not any(urlsplit(url).scheme == "https" for url in self.prefill + self.decode):
            return None
        is_given = self.ca_file is not None
        named, path = ("--ca-file", self.ca_file) if is_given else ("SSL_CERT_FILE", os.environ.get("SSL_CERT_FILE"))
        try:
            context = ssl.create_default_context(cafile=self.ca_file)
            if path:
                context.load_verify_locations(path)  # which says more than OpenSSL does of its own variable
        except OSError as error:
            raise ValueError(
                f"{named} is {path!r}, which cannot be used ({error.strerror or error}); name a file with certificates "
                "of CAs, in PEM"
            ) from error
        return context

    def __post_init__(self) -> None:
        for leg, urls in (("prefill", self.prefill), ("decode", self.decode)):
            if not urls:
                raise ValueError(f"no {leg} server; name at least one, with --{leg} http://HOST:PORT")
            if len(set(urls)) != len(urls):
                raise ValueError(f"a {leg} server is named twice: {', '.join(urls)}")
            for url in urls:
                _check_url(leg, url)
        Legs(self.legs), FirstTokenFrom(self.first_token), WithoutPrefill(self.without_prefill)
        for name in ("connect_timeout_s", "request_timeout_s", "skip_s", "max_body_bytes"):
            value = getattr(self, name)
            if not (value > 0 and math.isfinite(value)):
                raise ValueError(f"{name} is {value}; it must be a positive number")
        _check_paths(self.relay)
        if self.prefill_from != AUTO and not (isinstance(self.prefill_from, int) and self.prefill_from >= 0):
            raise ValueError(
                f"--prefill-from is {self.prefill_from!r}; write a number of tokens, 0 for all, or {AUTO!r}"
            )
        self.tls()
        if self.traces_endpoint is not None and urlsplit(self.traces_endpoint).scheme not in ("http", "https"):
            raise ValueError(
                f"the endpoint for traces is {self.traces_endpoint!r}; write a URL of OTLP over HTTP, such as "
                "http://HOST:4318/v1/traces"
            )
        if self.api_key is not None and not _USABLE_KEY.fullmatch(self.api_key):
            raise ValueError("the API key is empty or has characters other than ASCII letters, digits and punctuation")


def _check_paths(paths: tuple[str, ...]) -> None:
    for path in paths:
        if not _USABLE_PATH.fullmatch(path) or not {".", ".."}.isdisjoint(path.split("/")):
            raise ValueError(f"the path to relay is {path!r}; write it as in a URL, such as /tokenizer_info")
        if path in _OWN_PATHS:
            raise ValueError(f"the path to relay is {path!r}, which the proxy serves itself")


def _check_url(leg: str, url: str) -> None:
    try:
        parts = urlsplit(url)
        usable = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0 and " " not in url
    except ValueError:  # a port that is no number, or beyond 65535; brackets around what is no IPv6 address
        usable = False
    if not usable or parts.path or parts.query or parts.fragment or parts.username is not None:
        raise ValueError(
            f"{leg} server {url!r} is not a base URL; write http://HOST:PORT or https://HOST:PORT, without /v1"
        )
