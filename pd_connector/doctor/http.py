"""The questions to a server's HTTP port. Only what the checks need; proxies of the environment are not used."""

import http.client
import json
import re
import ssl
import urllib.error
import urllib.request
from typing import Any
from urllib.parse import urlsplit

from pd_connector.doctor.findings import CheckFailed
from transfer.peers import no_route, resolve

#: vLLM's own default.
DEFAULT_PORT = 8000
_SCHEMES = {"http": 80, "https": 443}
_MAX_TEXT = 300  # characters of an error's body that are shown
_QUESTION_S = 10.0  # for a server's answer to a GET, which it gives at once, however busy it is
#: What a header can carry: a key that was read from a file may end with its line.
_USABLE_KEY = re.compile(r"[\x21-\x7e]+")


def base_url(peer: str) -> str:
    """Return the URL of ``HOST``, ``HOST:PORT`` or an ``http(s)://`` URL.

    Raises:
        ValueError: it is none of these.
    """
    is_url = "://" in peer
    parts = urlsplit(peer if is_url else f"http://{peer}")
    try:
        port = parts.port
    except ValueError:
        port = 0
    if parts.scheme not in _SCHEMES or not parts.hostname or port == 0 or parts.path not in ("", "/"):
        raise ValueError(
            f"--peer is {peer!r}; write HOST, HOST:PORT or http://HOST:PORT of a prefill server, an IPv6 "
            "address in brackets"
        )
    host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
    return f"{parts.scheme}://{host}:{port or (_SCHEMES[parts.scheme] if is_url else DEFAULT_PORT)}"


def usable_key(key: str | None) -> str | None:
    """Return an API key, if there is one.

    Raises:
        ValueError: no header can carry it.
    """
    if key is not None and not _USABLE_KEY.fullmatch(key):
        raise ValueError("the API key has blanks, line ends or characters beyond ASCII, which no header can carry")
    return key


class HttpServer:
    """A prefill server's HTTP port. ``timeout_s``: for the answer to a POST."""

    def __init__(self, url: str, api_key: str | None, timeout_s: float) -> None:
        self.url = url
        self._headers = {"Content-Type": "application/json"}
        if api_key is not None:
            self._headers["Authorization"] = f"Bearer {api_key}"
        self._timeout_s = timeout_s
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))

    def ask(self, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        """Return the answer to a GET, or to a POST of ``body``.

        Raises:
            CheckFailed: there is none, or it is not a JSON object with status 200.
        """
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, self._headers)  # noqa: S310  the scheme is checked
        try:
            with self._opener.open(request, timeout=self._timeout_s if data else _QUESTION_S) as answer:
                parsed = _json(answer.read())
        except urllib.error.HTTPError as error:
            raise CheckFailed(_refused(self.url + path, error)) from error
        except (OSError, http.client.HTTPException) as error:
            reason = getattr(error, "reason", None) or error
            ask = "is the prefill server up, is this its HTTP port, and does a firewall let this machine reach it?"
            why = self._no_route() or ask
            if isinstance(reason, ssl.SSLCertVerificationError):
                why = "if your own CA has signed its certificate, name that in the environment variable SSL_CERT_FILE"
            raise CheckFailed(f"{self.url} does not answer ({reason}): {why}") from error
        if not isinstance(parsed, dict):
            raise CheckFailed(f"{self.url}{path} answers with no JSON object: is it a vLLM server?")
        return parsed

    def _no_route(self) -> str:
        """Return why this machine can send the server nothing, empty if it can."""
        try:
            return no_route(resolve(str(urlsplit(self.url).hostname)))
        except OSError:
            return ""


def _json(text: bytes) -> Any:
    """Return what a text says, None if it is no JSON."""
    try:
        return json.loads(text)
    except ValueError:
        return None


def _refused(url: str, error: urllib.error.HTTPError) -> str:
    text = " ".join(error.read().decode(errors="replace").split())[:_MAX_TEXT]
    hint = "; pass the server's key with --api-key or VLLM_API_KEY" if error.code in (401, 403) else ""
    return f"{url} answers with status {error.code}{hint}: {text}"
