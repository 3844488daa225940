"""The questions to a server's HTTP port. Only what the checks need; proxies of the environment are not used."""

import http.client
import json
import time
import urllib.error
import urllib.request
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from typing import Any
from urllib.parse import urlsplit

from pd_connector.doctor.findings import CheckFailed

#: vLLM's own default.
DEFAULT_PORT = 8000
_MAX_TEXT = 300  # characters of an error's body that are shown


class BadPeerError(ValueError):
    """``--peer`` is no address of an HTTP server."""


def base_url(peer: str) -> str:
    """Return the URL of ``HOST``, ``HOST:PORT`` or an ``http(s)://`` URL.

    Raises:
        BadPeerError: it is none of these.
    """
    text = peer if "://" in peer else f"http://{peer}"
    parts = urlsplit(text)
    try:
        port = parts.port
    except ValueError:
        port = 0
    if parts.scheme not in ("http", "https") or not parts.hostname or port == 0 or parts.path not in ("", "/"):
        raise BadPeerError(f"--peer is {peer!r}; write HOST, HOST:PORT or http://HOST:PORT of a prefill server")
    host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
    return f"{parts.scheme}://{host}:{port or (DEFAULT_PORT if '://' not in peer else _port(parts.scheme))}"


def _port(scheme: str) -> int:
    return 443 if scheme == "https" else 80


@dataclass(frozen=True, slots=True)
class Answer:
    """A server's answer of status 200."""

    body: dict[str, Any]
    seconds: float  # from the question to the whole answer
    clock_offset_s: float | None  # the server's wall clock beyond this machine's; None if it does not tell it


class HttpServer:
    """A prefill server's HTTP port."""

    def __init__(self, url: str, api_key: str | None, timeout_s: float) -> None:
        self.url = url
        self._headers = {"Content-Type": "application/json"}
        if api_key is not None:
            self._headers["Authorization"] = f"Bearer {api_key}"
        self._timeout_s = timeout_s
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))

    def ask(self, path: str, body: dict[str, Any] | None = None) -> Answer:
        """Return the answer to a GET, or to a POST of ``body``.

        Raises:
            CheckFailed: there is none, or it is not a JSON object with status 200.
        """
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, self._headers)  # noqa: S310  the scheme is checked
        begun = time.perf_counter()
        try:
            with self._opener.open(request, timeout=self._timeout_s) as answer:
                text, date = answer.read(), answer.headers["Date"]
        except urllib.error.HTTPError as error:
            raise CheckFailed(_refused(self.url + path, error)) from error
        except (OSError, http.client.HTTPException) as error:
            reason = getattr(error, "reason", None) or error
            raise CheckFailed(
                f"{self.url} does not answer ({reason}): is the prefill server up, and is this its HTTP port?"
            ) from error
        seconds = time.perf_counter() - begun
        try:
            parsed = json.loads(text)
        except ValueError:
            parsed = None
        if not isinstance(parsed, dict):
            raise CheckFailed(f"{self.url}{path} answers with no JSON object: is it a vLLM server?")
        return Answer(parsed, seconds, _offset(date))


def _refused(url: str, error: urllib.error.HTTPError) -> str:
    text = " ".join(error.read().decode(errors="replace").split())[:_MAX_TEXT]
    hint = "; pass the server's key with --api-key or VLLM_API_KEY" if error.code in (401, 403) else ""
    return f"{url} answers with status {error.code}{hint}: {text}"


def _offset(date: str | None) -> float | None:
    """Return how far a server's ``Date``, which has whole seconds, is ahead of this machine's clock."""
    if date is None:
        return None
    try:
        return parsedate_to_datetime(date).timestamp() + 0.5 - time.time()
    except (ValueError, TypeError):
        return None
