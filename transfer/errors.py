"""Exceptions that all parts of ``transfer`` share, and their wording. That of a single part is defined in that part."""


class TransferError(Exception):
    """Base class of all exceptions of this package."""


def printable(text: str) -> str:
    """Return a peer's words for the log: spaces for what would end a line, steer a terminal or turn text around."""
    return "".join(each if each.isprintable() else " " for each in text)


class BadAddress(TransferError, ValueError):  # noqa: N818  named after what it is
    """The host or port cannot be a peer's address; the message names the value and the rule."""


class PeerNotAllowed(TransferError):  # noqa: N818
    """This engine may not contact the host; nothing was sent. The message names host, rules and setting."""
