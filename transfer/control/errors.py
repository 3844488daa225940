"""What the control channel raises on purpose, at both ends. No logic beyond the wording."""

from transfer.control.messages import ErrorCode
from transfer.errors import TransferError


class ControlError(TransferError):
    """Base of what only the control channel raises on purpose."""


class ControlStartError(ControlError):
    """The control endpoint could not be bound; the message names host and port, the cause and the way out."""


class ClientClosed(ControlError):  # noqa: N818
    """The request was made, or still pending, when the client was closed."""


class BadRequest(ControlError, ValueError):  # noqa: N818
    """The request cannot be written, or is too large for a frame; nothing was sent."""


class TooManyPeers(ControlError):  # noqa: N818
    """As many peers as the client may hold are being asked already; nothing was sent."""


class PeerUnreachable(ControlError):  # noqa: N818
    """No answer came in time. Whether the peer acted on the request is unknown.

    Attributes: ``host``, ``port``, ``request_type`` (e.g. "renew"), ``tried_s`` seconds, ``attempts``: how often the
    request was handed to a connection, 0 where none could be made.
    """

    def __init__(
        self, *, host: str, port: int, request_type: str, tried_s: float, attempts: int, reason: str = ""
    ) -> None:
        self.host = host
        self.port = port
        self.request_type = request_type
        self.tried_s = tried_s
        self.attempts = attempts
        if not reason and attempts:
            reason = "it was sent over a connection but never answered: the engine may be stopped or overloaded"
        elif not reason:
            reason = "no connection could be made: check that the engine runs and that its control port is open to us"
        where = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        super().__init__(f"{where} did not answer {request_type!r} in {tried_s:.2f} s, {attempts} times sent: {reason}")


class AuthenticationFailed(ControlError):  # noqa: N818
    """The peer holds another secret, or only one side has one; the message names the peer and says which."""


class PeerRefused(ControlError):  # noqa: N818
    """The peer answered with an error. ``code`` says which, ``reason`` is the peer's own text."""

    def __init__(self, *, host: str, port: int, request_type: str, code: ErrorCode, reason: str) -> None:
        self.host = host
        self.port = port
        self.request_type = request_type
        self.code = code
        self.reason = reason
        where = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        super().__init__(f"{where} refused {request_type!r}: {code.value}: {reason}")
