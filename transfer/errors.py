"""What every part of ``transfer`` may raise on purpose. Errors of one part alone are defined in that part."""


class TransferError(Exception):
    """Base of everything that this package raises on purpose."""


class BadAddress(TransferError, ValueError):  # noqa: N818  reads as what it is
    """A host or port that cannot be a peer's address; the message names the value and the rule."""


class PeerNotAllowed(TransferError):  # noqa: N818
    """The host is not one that this engine may contact; nothing was sent. The message names host, rules and setting."""
