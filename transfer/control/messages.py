"""The control protocol between a decode engine (D) and the prefill engines (P) that it pulls from.

The story. A client's request is prefilled on P. P's scheduler grants a *lease* over the request's KV blocks
and sends its id, the block ids and the address of its control endpoint along with the response. D's
scheduler keeps that lease alive (renew) until its workers have read the blocks. Every D worker that takes
part says release when it has read its share, and learns whether the lease was still valid at that moment:
only then may the data be used. A D that will never read says cancel. P frees the blocks when all readers
have released, when the lease is cancelled, or when it was not renewed for its time to live.

What D reads, it was told by way of a router and a client. A release therefore names, as a digest, what it
has read; P compares that with what it leased, so that whoever altered the block ids or the prompt on their way
gets a failed pull and never another request's blocks.

    D worker                                   P scheduler process
       | hello {engine_id} ----------------------> |
       | <---- welcome {model, workers}            |   once per P engine: the geometry of every P rank
       |                                           |
       | (reads the blocks through the transfer engine; P's process takes no part)
       |                                           |
       | release {lease_id, reader, readers, ...}-> |
       | <---- released {valid, reason}            |   valid: the blocks were unchanged all the time

    D scheduler
       | renew {lease_ids} ----------------------> |   every third of the time to live
       | <---- renewed {valid}                     |   the ids that are still valid; the others have ended for good
       | cancel {lease_ids} ---------------------> |   the request left before it was pulled
       | <---- cancelled {}                        |

Where both sides verify (a setting, for commissioning), P's workers take checksums of the blocks as soon as they are
leased. A D worker asks for them between its read and its release, and compares them with those of what has arrived:

    D worker                                   P scheduler process
       | checksums {lease_id, worker, ...} ------> |   for each P rank and cache group that it has read from
       | <---- checksummed {sums, reason}          |   reason "pending": they are not there yet, ask again

Format. One ZeroMQ frame per message (DEALER at D, ROUTER at P), MessagePack: the array
``[version, message_id, body]``. ``version`` is ``PROTOCOL_VERSION``; it and ``message_id`` come first and keep their
places in every future version, so that a mismatch can always be answered. ``message_id`` is a positive integer below
2**63, chosen by the asker and returned in the answer. ``body`` is a map whose key ``type`` names the message; all
other keys are the fields of the classes below. Any MessagePack library can speak it; unknown keys are ignored, so
fields may be added.

Reliability. Each request is idempotent and answered; the asker resends it with the same ``message_id`` until the
answer comes or its time is out. Messages may be lost, repeated, late or reordered.

Errors. A request that cannot be served is answered with ``error``, whose ``code`` is one of ``ErrorCode``. A frame
that is not a well-formed message is dropped and counted, or answered with ``error`` where its ``message_id`` could be
read. Every request names the engine id that it believes to talk to: a restarted engine has a new one and answers
``unknown_engine``.
"""

from enum import StrEnum
from typing import Annotated, Any

import msgspec

from layout.geometry import ModelIdentity, WorkerGeometry

PROTOCOL_VERSION = 1

#: Replies above this size are dropped unread. The largest message is a welcome: a few hundred bytes a layer
#: and rank.
MAX_FRAME_BYTES = 16 * 1024 * 1024

#: Requests above this size are refused: it bounds what a peer can make an engine hold. A renew of 20,000 leases fits.
MAX_REQUEST_BYTES = 1024 * 1024

_MAX_REASON_CHARACTERS = 300  # of a decoder's words, which may quote the frame


class ErrorCode(StrEnum):
    """Why a request was not served."""

    MALFORMED = "malformed"  # not a message of this protocol
    VERSION = "version"  # another protocol version; the message names both
    UNKNOWN_ENGINE = "unknown_engine"  # the engine id is not this engine's: it has restarted, or the address is wrong
    NOT_READY = "not_ready"  # the engine is still starting; ask again
    INTERNAL = "internal"  # the handler failed; its log says why


class InvalidReason(StrEnum):
    """Why a release was not valid."""

    EXPIRED = "expired"  # the lease was not renewed in time
    CANCELLED = "cancelled"  # D let go of it, or P's caches were reset
    RELEASED = "released"  # all readers had released it before: it is good for one pull
    UNKNOWN = "unknown"  # the engine never granted it, or it ended so long ago that it was forgotten
    READERS = "readers"  # the reader is not one of the readers, or another reader named another number of them
    CONTENTS = "contents"  # what was read is not what the lease holds: kv_transfer_params were altered on their way


class NoChecksums(StrEnum):
    """Why checksums were not given."""

    PENDING = "pending"  # the workers are still at it: ask again
    OFF = "off"  # the engine takes none
    UNKNOWN = "unknown"  # the lease has ended, or the engine never granted it
    PLACE = "place"  # there is no such worker or cache group
    SIZE = "size"  # more than ``MAX_SUMS`` numbers: ask for fewer tokens, or with fewer borders
    FAILED = "failed"  # a worker could not read its blocks; its log says why


class Hello(msgspec.Struct, frozen=True, tag="hello"):
    """Ask for the geometry of all workers of an engine."""

    engine_id: str


class Welcome(msgspec.Struct, frozen=True, tag="welcome"):
    """The geometry of all workers of an engine, and its model."""

    engine_id: str
    model: ModelIdentity
    workers: tuple[WorkerGeometry, ...]
    verify: bool = False  # whether ``checksums`` are taken of what is leased


class Renew(msgspec.Struct, frozen=True, tag="renew"):
    """Keep leases alive for another time to live, counted on P's clock from when this arrives."""

    engine_id: str
    lease_ids: tuple[str, ...]


class Renewed(msgspec.Struct, frozen=True, tag="renewed"):
    """The leases of a renew that were still valid; the others have ended."""

    valid: tuple[str, ...]


class Release(msgspec.Struct, frozen=True, tag="release"):
    """A reader has finished reading (or will not read) its share of a lease's blocks."""

    engine_id: str
    lease_id: str
    reader: int  # which of the readers, 0 <= reader < readers
    readers: int  # how many readers will release this lease
    pull_id: str  # of the read that has ended: tells a repeated release from that of a second read
    contents: str  # digest of what was read, which must be the one that P made when it granted the lease


class Released(msgspec.Struct, frozen=True, tag="released"):
    """Whether the lease was valid when the release arrived. If not, what was read must not be used."""

    valid: bool
    #: Empty if valid, else one of ``InvalidReason``, or what a later version adds to them.
    reason: Annotated[str, msgspec.Meta(max_length=64)] = ""


class Cancel(msgspec.Struct, frozen=True, tag="cancel"):
    """End leases at once, whoever still reads. Unknown ids are ignored."""

    engine_id: str
    lease_ids: tuple[str, ...]


class Cancelled(msgspec.Struct, frozen=True, tag="cancelled"):
    """The leases have ended."""


class Checksums(msgspec.Struct, frozen=True, tag="checksums"):
    """Ask for the checksums of a lease's blocks, as ``layout.checksums`` defines them, for runs of its tokens."""

    engine_id: str
    lease_id: str
    worker: Annotated[int, msgspec.Meta(ge=0)]  # by its place in the welcome
    group: Annotated[int, msgspec.Meta(ge=0)]  # by its place in the worker
    #: Token numbers, ascending: the sums of what begins between each and the next are wanted.
    borders: tuple[Annotated[int, msgspec.Meta(ge=0, lt=2**31)], ...]


class Checksummed(msgspec.Struct, frozen=True, tag="checksummed"):
    """The checksums, or why there are none."""

    #: For each plane of the group in turn, by run of tokens, then by layer, then by KV head.
    sums: tuple[Annotated[int, msgspec.Meta(ge=0)], ...] = ()
    #: Empty if they are there, else one of ``NoChecksums``, or what a later version adds to them.
    reason: Annotated[str, msgspec.Meta(max_length=64)] = ""


class Error(msgspec.Struct, frozen=True, tag="error"):
    """The request was not served."""

    code: ErrorCode
    message: str  # for people: names the values and the rule


Request = Hello | Renew | Release | Cancel | Checksums
Reply = Welcome | Renewed | Released | Cancelled | Checksummed | Error


class Envelope(msgspec.Struct, frozen=True, array_like=True):
    """What every frame holds. The body stays undecoded until the version is known to be ours."""

    version: int
    message_id: Annotated[int, msgspec.Meta(ge=1, le=2**63 - 1)]
    body: msgspec.Raw


class MalformedMessage(ValueError):  # noqa: N818
    """A frame is not a message of this protocol. ``message_id`` is 0 where it could not be read."""

    def __init__(self, reason: str, *, code: ErrorCode = ErrorCode.MALFORMED, message_id: int = 0) -> None:
        super().__init__(reason)
        self.code = code
        self.message_id = message_id


_encoder = msgspec.msgpack.Encoder()
_envelopes = msgspec.msgpack.Decoder(Envelope)
_requests = msgspec.msgpack.Decoder(Request)
_replies = msgspec.msgpack.Decoder(Reply)

# What the decoder raises on bytes of a stranger's choice: besides its own errors, deep nesting and invalid UTF-8.
_DECODE_ERRORS = (msgspec.MsgspecError, RecursionError, UnicodeDecodeError)


def encode(message_id: int, body: Request | Reply) -> bytes:
    """One frame."""
    return _encoder.encode(Envelope(PROTOCOL_VERSION, message_id, msgspec.Raw(_encoder.encode(body))))


def decode_request(frame: bytes) -> tuple[int, Request]:
    """The message id and body of a frame that P received.

    Raises:
        MalformedMessage: the frame is too large, not MessagePack, of another version, or not a request.
    """
    return _decode(frame, _requests, MAX_REQUEST_BYTES)


def decode_reply(frame: bytes) -> tuple[int, Reply]:
    """The message id and body of a frame that D received.

    Raises:
        MalformedMessage: as for ``decode_request``.
    """
    return _decode(frame, _replies, MAX_FRAME_BYTES)


def message_id_of(frame: bytes) -> int:
    """The message id of a frame of any version, 0 where it cannot be read."""
    try:
        return _envelope(frame).message_id
    except MalformedMessage:
        return 0


def _envelope(frame: bytes) -> Envelope:
    try:
        return _envelopes.decode(frame)
    except _DECODE_ERRORS as error:
        raise MalformedMessage(f"not a message of this protocol: {_reason(error)}") from error


def _decode(frame: bytes, bodies: msgspec.msgpack.Decoder[Any], max_bytes: int) -> tuple[int, Any]:
    envelope = _envelope(frame)
    if len(frame) > max_bytes:
        raise MalformedMessage(
            f"frame of {len(frame)} bytes; at most {max_bytes} are accepted", message_id=envelope.message_id
        )
    if envelope.version != PROTOCOL_VERSION:
        raise MalformedMessage(
            f"protocol version {envelope.version}; this side speaks {PROTOCOL_VERSION}",
            code=ErrorCode.VERSION,
            message_id=envelope.message_id,
        )
    try:
        return envelope.message_id, bodies.decode(envelope.body)
    except _DECODE_ERRORS as error:
        raise MalformedMessage(f"bad message body: {_reason(error)}", message_id=envelope.message_id) from error


def _reason(error: Exception) -> str:
    text = str(error)
    return text if len(text) <= _MAX_REASON_CHARACTERS else f"{text[:_MAX_REASON_CHARACTERS]}..."
