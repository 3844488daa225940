"""What can go wrong on the way through the proxy, and how a client is told: always in OpenAI's error shape."""

import json
from enum import Enum, auto
from http import HTTPStatus

from starlette.responses import JSONResponse, Response


class Retry(Enum):
    """Whether another server may get a request that one has failed."""

    NO = auto()  # another would fail as well, or time is up
    ONCE = auto()  # the request may have been the reason, so that it must not go round
    FREELY = auto()  # the server has not seen the request


class RequestError(Exception):
    """The client's request cannot be used; the message says why. Answered with 400."""


class LegFailed(Exception):  # noqa: N818  named after the event
    """A server could not be reached, fell silent, broke off, or gave an answer that cannot be used."""

    def __init__(self, status: HTTPStatus, message: str, retry: Retry = Retry.NO, *, cause: str = "") -> None:
        super().__init__(message)
        self.status = status
        self.retry = retry
        self.cause = cause or message  # without anything that the server wrote


class NothingHandedOver(LegFailed):
    """The prefill server answered well, without ``kv_transfer_params``."""

    def __init__(self, status: HTTPStatus, message: str, *, text_ended: bool) -> None:
        super().__init__(status, message)
        self.text_ended = text_ended  # with its one token


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


def error_response(status: HTTPStatus, message: str) -> Response:
    """An error of the proxy's own, in the shape that vLLM uses: the code is the HTTP status."""
    kind = "".join(status.phrase.title().split()) + ("Error" if "Error" not in status.phrase.title() else "")
    error = {"message": message, "type": kind, "param": None, "code": status.value}
    return JSONResponse({"error": error}, status_code=status.value)


def is_openai_error(content: bytes) -> bool:
    """Whether a body is a JSON object with an ``error`` member, as OpenAI clients expect."""
    try:
        body = json.loads(content)
    except (ValueError, RecursionError):
        return False
    return isinstance(body, dict) and "error" in body
