"""What can go wrong on the way through the proxy, and how a client is told: in the error shape of its API."""

import json
from enum import Enum, auto
from http import HTTPStatus

from starlette.responses import JSONResponse, Response

from pd_proxy.usage import PromptDetails

#: Ends each event of a stream.
EVENT_END = b"\n\n"
#: Begins what is no event of a stream: vLLM's ``--sse-keep-alive-interval`` sends such while there is nothing to tell.
COMMENT = b":"
#: Beginnings of the events with which vLLM ends a stream that it could not compute.
FAILED = (b"event: error\n", b"event: response.failed\n", b'data: {"error"')
#: Of a server that takes no requests for now, or no more: it computes nothing of this one.
FULL = HTTPStatus.SERVICE_UNAVAILABLE


class Retry(Enum):
    """Whether another server may get a request that one has failed."""

    NO = auto()  # another would fail as well, or time is up
    ONCE = auto()  # the request may have been the reason, so that it must not go round
    FREELY = auto()  # the server has not seen the request


class ErrorShape(Enum):
    """Whose form the error answers of an API have."""

    OPENAI = auto()
    ANTHROPIC = auto()


#: Anthropic's names of errors; all others are its ``api_error``.
_ANTHROPIC_TYPES = {
    HTTPStatus.BAD_REQUEST: "invalid_request_error",
    HTTPStatus.UNAUTHORIZED: "authentication_error",
    HTTPStatus.FORBIDDEN: "permission_error",
    HTTPStatus.NOT_FOUND: "not_found_error",
    HTTPStatus.REQUEST_ENTITY_TOO_LARGE: "request_too_large",
    HTTPStatus.TOO_MANY_REQUESTS: "rate_limit_error",
    HTTPStatus.SERVICE_UNAVAILABLE: "overloaded_error",
    HTTPStatus.GATEWAY_TIMEOUT: "timeout_error",
}


class RequestError(Exception):
    """The client's request cannot be used; the message says why. Answered with 400."""


class LegFailed(Exception):  # noqa: N818  named after the event
    """A server could not be reached, fell silent, broke off, or gave an answer that cannot be used."""

    def __init__(
        self, status: HTTPStatus, leg: str, url: str, what: str, detail: str = "", retry: Retry = Retry.NO
    ) -> None:
        """Note what a server did.

        Args:
            status: for the client.
            leg: of the server.
            url: of the server; no client is told.
            what: it did, with a verb at the beginning, without addresses and without anything that it wrote.
            detail: what the server or the network told, or what to do about it, made one line; no client is told.
            retry: whether another server may get the request.
        """
        self.cause = f"{leg} server {url} {what}"
        # What ends a line, moves a terminal's cursor or turns text around is none of the log's.
        shown = "".join(each if each.isprintable() else " " for each in detail)
        super().__init__(f"{self.cause}: {' '.join(shown.split())}" if detail else self.cause)
        self.status = status
        self.retry = retry
        self.told = f"a {leg} server {what}"  # for clients


#: vLLM's finish reasons. Anything else is what a server wrote, and not for clients.
_FINISH_REASONS = ("stop", "length", "abort", "error", "repetition")


class NothingHandedOver(LegFailed):
    """The prefill server answered well, without ``kv_transfer_params``."""

    def __init__(self, url: str, finish_reason: object, details: PromptDetails) -> None:
        """``finish_reason``: whatever the answer has in its place; None if it has none. ``details``: of the prompt."""
        detail = "is it started with --kv-transfer-config and a kv_role of kv_producer or kv_both?"
        if finish_reason is None:
            shown = "missing"
        elif finish_reason in _FINISH_REASONS:
            shown = f"'{finish_reason}'"
        else:
            shown, detail = "unknown", f"the reason is {repr(finish_reason)[:500]}; {detail}"
        odd = "" if finish_reason == "length" else f" (finish reason {shown}, expected 'length')"
        super().__init__(HTTPStatus.BAD_GATEWAY, "prefill", url, f"returned no kv_transfer_params{odd}", detail)
        self.finish_reason = finish_reason
        self.details = details


class LegRefused(Exception):  # noqa: N818
    """The prefill server answered with an error. Its status and message are for the client."""

    def __init__(self, status: int, headers: list[tuple[bytes, bytes]], content: bytes) -> None:
        super().__init__(f"status {status}")
        self.status = status
        self.headers = headers
        self.content = content
        self.retry = retry_of(status)


def retry_of(status: int) -> Retry:
    """Return whether another server may get a request that one has answered with this error."""
    return Retry.ONCE if status >= HTTPStatus.INTERNAL_SERVER_ERROR else Retry.NO


def error_response(status: HTTPStatus, message: str, shape: ErrorShape = ErrorShape.OPENAI) -> Response:
    """An error of the proxy's own, in the shape that vLLM uses for an API; in OpenAI's, the code is the HTTP status."""
    if shape is ErrorShape.ANTHROPIC:
        kind = _ANTHROPIC_TYPES.get(status, "api_error")
        return JSONResponse({"type": "error", "error": {"type": kind, "message": message}}, status_code=status.value)
    kind = "".join(status.phrase.title().split()) + ("Error" if "Error" not in status.phrase.title() else "")
    error = {"message": message, "type": kind, "param": None, "code": status.value}
    return JSONResponse({"error": error}, status_code=status.value)


def error_event(status: HTTPStatus, message: str, shape: ErrorShape = ErrorShape.OPENAI) -> bytes:
    """An error of the proxy's own as an event of a stream that has begun, as vLLM tells of its own there."""
    named = b"event: error\n" if shape is ErrorShape.ANTHROPIC else b""
    return b"%sdata: %s%s" % (named, bytes(error_response(status, message, shape).body), EVENT_END)


def is_error(content: bytes) -> bool:
    """Whether a body is a JSON object with an ``error`` member, as the clients of all APIs expect."""
    try:
        body = json.loads(content)
    except (ValueError, RecursionError):
        return False
    return isinstance(body, dict) and "error" in body


def let_go_of_bodies(error: BaseException | None) -> None:
    """Drop the traceback of an error, and of those that caused it.

    Its frames hold the request's bodies, and some the error itself: the collector of such circles seldom runs here. To
    clear them would not do: since Python 3.12 they hold those of their callers too, which run on.
    """
    while error is not None:
        error.__traceback__ = None
        error = error.__cause__ or error.__context__
