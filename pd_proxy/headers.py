"""Which HTTP headers pass through the proxy, in both directions, and the request id. No I/O."""

import re
import uuid
from collections.abc import Iterable

from starlette.datastructures import Headers

#: A character for each byte (Latin-1), as Starlette has them.
HeaderList = list[tuple[str, str]]

REQUEST_ID = "x-request-id"
#: By which vLLM lets a request choose among the data-parallel ranks behind one URL.
RANK = "x-data-parallel-rank"

#: Headers that belong to one connection (RFC 9110, section 7.6.1), not to the message.
_HOP_BY_HOP = frozenset({
    "connection", "expect", "keep-alive", "proxy-authenticate", "proxy-authorization", "proxy-connection", "te",
    "trailer", "transfer-encoding", "upgrade",
})  # fmt: skip
#: Set by the proxy itself. A rank names an engine inside one server: the client knows neither of the legs' servers.
_OWN_REQUEST = _HOP_BY_HOP | {"host", "content-length", "content-type", "accept-encoding", REQUEST_ID, RANK}
_OWN_RESPONSE = _HOP_BY_HOP | {"date", "server", REQUEST_ID}

#: Control characters, which stand in no header (RFC 9110, section 5.5), though some HTTP servers let them pass.
_CONTROLS = re.compile(r"[\x00-\x08\x0a-\x1f\x7f]")

_USABLE_ID = re.compile(r"[\x21-\x7e]{1,256}")


def request_id(headers: Headers, body: dict[str, object], otherwise: str = "") -> str:
    """The client's id (header first, as in vLLM, then the body's ``request_id``), or the one given, or a new one.

    An id that could not stand in a header or would break the access line is replaced.
    """
    for candidate in (headers.get(REQUEST_ID), body.get("request_id")):
        if isinstance(candidate, str) and _USABLE_ID.fullmatch(candidate):
            return candidate
    return otherwise or uuid.uuid4().hex


def to_server(headers: Headers, identity: str, api_key: str | None, *, relayed: bool) -> HeaderList:
    """Return a client's headers as they are sent to a server.

    Args:
        headers: the client's.
        identity: the request id.
        api_key: takes the place of the client's Authorization; None passes that on.
        relayed: the answer's bytes go to the client as they come, so the server may use the encodings that the client
            takes. Otherwise the proxy reads the answer itself and wants it plain.
    """
    dropped = _OWN_REQUEST | _named_by_connection(headers.getlist("connection"))
    if api_key is not None:
        dropped |= {"authorization"}
    kept = [(name, value) for name, value in headers.items() if name not in dropped]
    # Always set: the HTTP client would offer encodings of its own.
    encodings = headers.get("accept-encoding", "identity") if relayed else "identity"
    kept += [("accept-encoding", encodings), ("content-type", "application/json"), (REQUEST_ID, identity)]
    return kept if api_key is None else [*kept, ("authorization", f"Bearer {api_key}")]


def as_text(value: str) -> str:
    """Return a header's value, a character for each byte, as text that is to be written in UTF-8.

    What is not UTF-8, and control characters, are replaced by U+FFFD.
    """
    if value.isascii() and value.isprintable():
        return value
    return _CONTROLS.sub("\ufffd", value.encode("latin-1").decode("utf-8", "replace"))


def to_client(raw: Iterable[tuple[bytes, bytes]], identity: str) -> list[tuple[bytes, bytes]]:
    """A server's headers as they are sent to the client."""
    pairs = [(name.lower(), value) for name, value in raw]
    listed = [value.decode("latin-1") for name, value in pairs if name == b"connection"]
    dropped = _OWN_RESPONSE | _named_by_connection(listed)
    kept = [(name, value) for name, value in pairs if name.decode("latin-1") not in dropped]
    return [*kept, (REQUEST_ID.encode(), identity.encode())]


def with_length(headers: Iterable[tuple[bytes, bytes]], length: int) -> list[tuple[bytes, bytes]]:
    """Return an answer's headers with another length of its body, in bytes."""
    kept = [(name, value) for name, value in headers if name != b"content-length"]
    return [*kept, (b"content-length", b"%d" % length)]


def _named_by_connection(values: Iterable[str]) -> set[str]:
    return {name.strip().lower() for value in values for name in value.split(",")}
