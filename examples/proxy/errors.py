"""What can go wrong on the way through the proxy, and how a client is told: always in OpenAI's error shape."""

import json
from http import HTTPStatus

from starlette.responses import JSONResponse, Response


class RequestError(Exception):
    """The client's request cannot be used; the message says why. Answered with 400."""


class LegFailed(Exception):  # noqa: N818  named after the event
    """A server could not be reached, fell silent, broke off, or gave an answer that cannot be used."""

    def __init__(self, status: HTTPStatus, message: str) -> None:
        super().__init__(message)
        self.status = status


class LegRefused(Exception):  # noqa: N818
    """The prefill server answered with an error. Its status and message are for the client."""

    def __init__(self, status: int, headers: list[tuple[bytes, bytes]], content: bytes) -> None:
        super().__init__(f"status {status}")
        self.status = status
        self.headers = headers
        self.content = content


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
