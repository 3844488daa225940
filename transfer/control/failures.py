"""Exceptions of the control channel, of both client and server. No logic beyond the wording."""

from transfer.errors import TransferError, printable
from transfer.peers import Address


class ControlError(TransferError):
    """Base class of the exceptions that only the control channel raises."""


class ControlStartError(ControlError):
    """The control endpoint cannot start; the message names the values, the cause and what to do."""


class ClientClosed(ControlError):  # noqa: N818
    """The client was closed before the request was made or answered."""


class BadRequest(ControlError, ValueError):  # noqa: N818
    """The request cannot be encoded, or is too large for a frame; nothing was sent."""


class TooManyPeers(ControlError):  # noqa: N818
    """The client already waits for as many peers as it may, or cannot look up a host name now; nothing was sent."""


class PeerUnreachable(ControlError):  # noqa: N818
    """No answer came in time. Whether the peer acted on the request is unknown.

    ``attempts``: how often the request was sent over a connection; 0 if no connection could be made.
    """

    def __init__(
        self, *, host: str, port: int, request_type: str, tried_s: float, attempts: int, reason: str = ""
    ) -> None:
        self.attempts = attempts
        if not reason and attempts:
            reason = "it was sent over a connection but never answered: the engine may be stopped or overloaded"
        elif not reason:
            reason = "no connection could be made: check that the engine runs and that its control port is reachable"
        sent = f"in {tried_s:.2f} s, sent {attempts} times"
        super().__init__(f"{Address(host, port)} did not answer {request_type!r} {sent}: {reason}")


class AuthenticationFailed(ControlError):  # noqa: N818
    """The secrets differ, or only one side has one; the message names the peer and says which."""


class PeerRefused(ControlError):  # noqa: N818
    """The peer answered with an error. ``code`` says which, ``reason`` is the peer's own text, made printable."""

    def __init__(self, *, host: str, port: int, request_type: str, code: str, reason: str) -> None:
        self.code = code
        self.reason = printable(reason)
        super().__init__(f"{Address(host, port)} refused {request_type!r}: {printable(code)}: {self.reason}")
