"""The control protocol between a decode engine (D) and the prefill engines (P) that it pulls from.

The story. A client's request is prefilled on P. P's scheduler grants a *lease* over the request's KV blocks, and sends
the lease id, the block ids and the address of its control endpoint along with the response. D's scheduler keeps the
lease alive (renew) until its workers have read the blocks. Every D worker that takes part sends a release once it has
read its share, and learns whether the lease was still valid at that moment: only then may the data be used. A D that
will never read sends a cancel. P frees the blocks when all readers have released, when the lease is cancelled, or when
it was not renewed for its time to live.

What a worker needs later it may read in a second part, as another reader: the lease ends when both are released.

D learns what to read by way of a router and a client. A release therefore carries a digest of what was read, which P
compares with what it leased. If somebody altered the block ids or the prompt on the way, the pull fails: D never uses
another request's blocks.

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

A router may send both legs at once, under a name of its choice, the *transfer id*. Nobody has told D then what to read;
D asks P for the transfer by its name. P answers as soon as there is more to say, and says with each answer how much of
the prompt is *complete*: computed by every rank, so that its blocks can be read. The lease has begun with the prompt,
and the release confirms all that was read since. If P had to start over (its scheduler preempted the request and reused
the blocks), a new *attempt* begins, and D starts over too: what it has read counts for nothing.

    D scheduler, D worker                      P scheduler process
       | follow {transfer_id, attempt, tokens} --> |
       |                                           |   (waits until there is more than ``tokens``, or ``wait_s``)
       | <---- followed {state, tokens, blocks}    |
       | (reads what is complete)                  |
       | follow {...} ---------------------------> |   until the state is "complete": the lease is then granted
       | <---- followed {state: complete, ...}     |

P may move what is leased to its host memory when its device is short of blocks (a setting; its welcome then describes
that memory as well). A D worker therefore asks where a lease lies before it reads, and says in its release where it has
read. From the answer on, the lease stays where it is; one that nobody has asked about may move. So a D that does not
ask may still read from the device, and its release is valid only if the lease has not moved. Of a prompt that it
follows, it asks once that is complete; if the lease has moved by then, it reads all again.

    D worker                                   P scheduler process
       | locate {lease_id} ----------------------> |   once per pull, if the welcome has ``host_workers``
       | <---- located {place, slots, reason}      |   place "host": read the slots of these numbers instead of blocks

A P that drafts grants its leases when the prompt is computed, and its device may still write the draft layers then. Its
welcome says so (``locates``): it answers when they are written, ``not_ready`` if that takes long, and a release without
that question is not valid. A prompt that is followed is "complete" when they are written.

A prompt that P finds in its host memory is copied to the device before P computes the rest. A worker that follows it
need not wait for the copy: if it says so (``host_tokens``), the answer names the slots, which stay as they are for as
long as the attempt and the lease that it becomes.

An engine may also look for the beginning of a prompt in another engine's caches, whatever that one has computed it for.
Blocks are named by the hashes that vLLM's prefix cache finds them by, which both must make alike. What is found is
leased, and read and released like a prompt:

    any scheduler                              another engine's scheduler process
       | find {find_id, hashes} ---------------> |   of the prompt's blocks, from the first one on
       | <---- found {lease_id, blocks, tokens}  |   with the end of its step; a repetition gets the same answer

If both sides verify (a setting, for commissioning), P's workers take checksums of blocks as soon as they are leased. A
D worker asks for them between its read and its release, and compares them with those of what has arrived:

    D worker                                   P scheduler process
       | checksums {lease_id, worker, ...} ------> |   for each P rank and cache group that it has read from
       | <---- checksummed {sums, reason}          |   reason "pending": they are not there yet, ask again

Format. One ZeroMQ frame per message (DEALER at D, ROUTER at P), in MessagePack: the array
``[version, message_id, body]``. ``version`` is ``PROTOCOL_VERSION``. It and ``message_id`` keep their positions in all
future versions, so a mismatch can always be answered. ``message_id`` is a positive integer below 2**63, chosen by the
client and returned in the reply. ``body`` is a map whose key ``type`` names the message; all other keys are the fields
of the classes below. Any MessagePack library can speak the protocol. Unknown keys are ignored, so fields may be added.

Reliability. Each request is idempotent and answered. The client resends it with the same ``message_id`` until the reply
comes or the timeout expires. Messages may be lost, repeated, late or reordered.

Errors. A request that cannot be served is answered with ``error``, whose ``code`` is one of ``ErrorCode``, or one of a
later version. A frame that is not a well-formed message is counted and dropped, or answered with ``error`` if its
``message_id`` is readable. Every request carries the engine id that the client expects: a restarted engine has a new id
and answers ``unknown_engine``. Only who asks for a transfer by its name, or for a prefix, may leave it empty.
"""

from enum import StrEnum
from typing import Annotated, Any, Generic, TypeVar, get_args

import msgspec

from layout.geometry import ModelIdentity, WorkerGeometry
from transfer.control.limits import MAX_BORDERS, MAX_HASHES, MAX_ID_CHARACTERS, MAX_LEASE_IDS, MAX_READERS

#: Changes with what a peer of another version would get wrong. From 2 on, identities tell what a model was built with,
#: prefill engines are proven, and a lease may have to be located before it is read. From 3 on, ranks may share the
#: tokens of a request.
PROTOCOL_VERSION = 3

#: Replies above this size are dropped unread. The largest message is a welcome: a few hundred bytes per layer and rank.
MAX_FRAME_BYTES = 16 * 1024 * 1024

#: Requests above this size are refused, which bounds what a peer makes an engine hold. A renew of 20,000 leases fits.
MAX_REQUEST_BYTES = 1024 * 1024

_MAX_REASON_CHARACTERS = 300  # of a decoder's message, which may quote the frame


class ErrorCode(StrEnum):
    """Why a request was not served."""

    MALFORMED = "malformed"  # not a message of this protocol
    VERSION = "version"  # another protocol version; the message names both
    UNKNOWN_ENGINE = "unknown_engine"  # the engine id is another one: the engine restarted, or the address is wrong
    NOT_READY = "not_ready"  # the engine is still starting; try again
    INTERNAL = "internal"  # the handler failed; its log says why


class InvalidReason(StrEnum):
    """Why a release was not valid."""

    EXPIRED = "expired"  # the lease was not renewed in time
    CANCELLED = "cancelled"  # D cancelled it, or P's caches were reset
    REVOKED = "revoked"  # it gave way to other requests: P was short of blocks, and nobody was reading these
    RELEASED = "released"  # all readers had already released it: a lease is valid for one pull
    UNKNOWN = "unknown"  # the engine never granted it, or forgot it long after its end
    READERS = "readers"  # ``reader`` is out of range, or another reader sent a different ``readers``
    CONTENTS = "contents"  # what was read is not what the lease holds: kv_transfer_params were altered on the way
    MOVED = "moved"  # what was leased has moved to another place than was read from
    EARLY = "early"  # it may have been read before it was written: nobody has asked where it lies


class Place(StrEnum):
    """Where the blocks of a lease lie."""

    DEVICE = "device"
    HOST = "host"  # in slots of host memory


class TransferState(StrEnum):
    """How far a prefill engine is with a named prompt."""

    UNKNOWN = "unknown"  # no request has brought this transfer id, or it has been forgotten
    QUEUED = "queued"  # the request waits for its first step
    COMPUTING = "computing"  # it has begun, and holds the blocks that it fills
    COMPLETE = "complete"  # the prompt is computed, and its blocks are leased
    ENDED = "ended"  # the request has ended without it; ``reason`` says how


class NoChecksums(StrEnum):
    """Why there are no checksums."""

    PENDING = "pending"  # the workers are still computing them: try again
    OFF = "off"  # the engine takes none
    UNKNOWN = "unknown"  # the lease has ended, or the engine never granted it
    PLACE = "place"  # there is no such worker or cache group
    SIZE = "size"  # more than ``MAX_SUMS`` numbers: ask for fewer tokens or fewer borders
    FAILED = "failed"  # a worker could not read its blocks; its log says why


#: Of an engine, a lease, a pull or the like, or a digest.
_Id = Annotated[str, msgspec.Meta(max_length=MAX_ID_CHARACTERS)]
_Ids = Annotated[tuple[_Id, ...], msgspec.Meta(max_length=MAX_LEASE_IDS)]
_Number = Annotated[int, msgspec.Meta(ge=0)]
_Int = Annotated[int, msgspec.Meta(ge=0, lt=2**31)]
_Size = Annotated[int, msgspec.Meta(ge=1, lt=2**31)]
_Slots = tuple[Annotated[int, msgspec.Meta(ge=-1, lt=2**31)], ...]  # of consecutive blocks; -1: the block is not held
_Word = Annotated[str, msgspec.Meta(max_length=64)]  # one of an enumeration, or of a later version's
_Text = Annotated[str, msgspec.Meta(max_length=512)]  # for people

_Reply_co = TypeVar("_Reply_co", bound="Reply", covariant=True)


class RequestFor(msgspec.Struct, Generic[_Reply_co], frozen=True):
    """A request that is answered with ``_Reply_co``, unless with an ``Error``."""


class Hello(RequestFor["Welcome"], frozen=True, tag="hello"):
    """Ask for the geometry of all workers of an engine."""

    engine_id: _Id


class Welcome(msgspec.Struct, frozen=True, tag="welcome"):
    """The geometry of all workers of an engine, and its model."""

    engine_id: str
    model: ModelIdentity
    workers: tuple[WorkerGeometry, ...]
    verify: bool = False  # whether the engine takes checksums of leased blocks
    #: Host memory of each of the workers, to which leases may move: its slots are the blocks. Empty if none moves.
    host_workers: tuple[WorkerGeometry, ...] = ()
    #: Whether a lease must be located before it is read, even if none moves: P writes draft layers a little later.
    locates: bool = False
    max_model_len: _Number = 0  # tokens of the longest prompt and answer; 0: not told


class Renew(RequestFor["Renewed"], frozen=True, tag="renew"):
    """Keep leases alive for another time to live, which starts on P's clock when this arrives.

    P may limit how often a lease is renewed, and may end one that is not being read when it is short of blocks.
    """

    engine_id: _Id
    lease_ids: _Ids
    reading: _Ids = ()  # those of ``lease_ids`` whose blocks are being read for the next time to live


class Renewed(msgspec.Struct, frozen=True, tag="renewed"):
    """The leases of a renew that are still valid; the others have ended."""

    valid: tuple[str, ...]


class Release(RequestFor["Released"], frozen=True, tag="release"):
    """A reader has finished reading (or will not read) its share of a lease's blocks."""

    engine_id: _Id
    lease_id: _Id
    reader: int  # 0 <= reader < readers
    readers: Annotated[int, msgspec.Meta(ge=1, le=MAX_READERS)]  # how many readers will release this lease
    pull_id: _Id  # of the finished read: tells a repeated release from the release of a second read
    contents: _Id  # digest of what was read; must equal the one that P computed when it granted the lease
    place: _Id = "device"  # one of ``Place``: where it was read, which must be where the lease lies
    #: Control channel of the reader's engine, host:port, which answers ``Find``; empty if it serves no prefixes.
    prefixes_at: Annotated[str, msgspec.Meta(max_length=300)] = ""


class Released(msgspec.Struct, frozen=True, tag="released"):
    """Whether the lease was valid when the release arrived. If not, what was read must not be used."""

    valid: bool
    #: Empty if valid, else one of ``InvalidReason``, or a reason of a later version.
    reason: _Word = ""


class Cancel(RequestFor["Cancelled"], frozen=True, tag="cancel"):
    """End leases at once, even if somebody still reads, or before they are granted. Unknown ids are ignored."""

    engine_id: _Id  # empty, with transfer ids only: of whichever engine this is
    lease_ids: _Ids
    transfer_ids: _Ids = ()  # whose leases to end; remembered if their requests are still to come


class Cancelled(msgspec.Struct, frozen=True, tag="cancelled"):
    """The leases have ended."""


class Follow(RequestFor["Followed"], frozen=True, tag="follow"):
    """Ask how far a named prompt is, beyond what is known. P answers when there is more, or after ``wait_s``."""

    engine_id: _Id  # empty: of whichever engine this is
    transfer_id: _Id
    attempt: Annotated[int, msgspec.Meta(ge=-1)] = -1  # to which ``tokens`` refer; -1: nothing is known
    tokens: _Number = 0  # known to be complete
    state: str = TransferState.UNKNOWN  # as last answered: a change of it is news, too
    wait_s: Annotated[float, msgspec.Meta(ge=0, le=30)] = 0.0
    #: Up to which token slots of host memory are known; -1: whoever asks does not read host memory.
    host_tokens: Annotated[int, msgspec.Meta(ge=-1)] = -1


class SlotRange(msgspec.Struct, frozen=True):
    """Tokens of a prompt that lie in slots of host memory, complete on every rank."""

    first_token: _Number
    end_token: _Number  # exclusive
    first_blocks: tuple[_Int, ...]  # by cache group: whose slot comes first
    #: By cache group, the slots of consecutive blocks; -1 marks one that is not held.
    slots: tuple[_Slots, ...]


class Followed(msgspec.Struct, frozen=True, tag="followed"):
    """How far a named prompt is. All but ``engine_id`` and ``state`` is empty before the prompt is being computed."""

    engine_id: _Id
    #: One of ``TransferState``, or a state of a later version, which is to be taken for ``ENDED``.
    state: _Word
    lease_id: str = ""
    lease_ttl_s: float = 0.0  # from when the prompt is complete; until then, the request itself holds the blocks
    #: How many times the prompt was started over, so that its blocks were reused.
    attempt: _Number = 0
    prompt_tokens: int = 0
    prompt_digest: str = ""
    block_sizes: tuple[int, ...] = ()  # of each cache group, in tokens
    #: How many of the prompt's tokens have their KV cache in the blocks, on every rank.
    tokens: _Number = 0
    #: By cache group, the part of the block table that begins with block ``first_blocks[group]``; 0 marks a block that
    #: is not held. Of a complete prompt the whole table, because the windows of some layers have moved.
    block_ids: tuple[tuple[int, ...], ...] = ()
    first_blocks: tuple[int, ...] = ()
    reason: _Text = ""
    #: Tokens, perhaps beyond ``tokens``, that can be read in host memory already. Only for who asks for more of them.
    in_host: SlotRange | None = None
    #: Names of each cache group's layers; empty if one group holds all and keeps every token.
    layers: tuple[tuple[str, ...], ...] = ()
    #: By cache group, the first token of what will be held once the prompt is complete: windows move.
    first_tokens: tuple[int, ...] = ()
    adapter_digest: str = ""  # of what the prompt's LoRA adapter holds; empty if it has none, or that is unknown
    media_digest: str = ""  # how P hashes images and other media, a colon, and those of the prompt


class Checksums(RequestFor["Checksummed"], frozen=True, tag="checksums"):
    """Ask for the checksums of a lease's blocks, as ``layout.checksums`` defines them, for runs of its tokens."""

    engine_id: _Id
    lease_id: _Id
    worker: _Number  # index in the welcome
    group: _Number  # index in the worker
    #: Token numbers, ascending. Asks for one sum of the runs that begin between each two neighbours.
    borders: Annotated[tuple[_Int, ...], msgspec.Meta(max_length=MAX_BORDERS)]


class Checksummed(msgspec.Struct, frozen=True, tag="checksummed"):
    """The checksums, or why there are none."""

    #: Plane by plane of the group; within a plane by token range, then by layer, then by KV head.
    sums: tuple[_Number, ...] = ()
    #: Empty if there are sums, else one of ``NoChecksums``, or a reason of a later version.
    reason: _Word = ""


class Locate(RequestFor["Located"], frozen=True, tag="locate"):
    """Ask where the blocks of a lease lie, to read them now. They stay there until the lease ends."""

    engine_id: _Id
    lease_id: _Id


class Located(msgspec.Struct, frozen=True, tag="located"):
    """Where the blocks of a lease lie."""

    place: str = ""  # one of ``Place``; empty if the lease has ended
    #: By cache group, the slots of host memory, for each entry of the block table; -1 marks a block that is not held.
    slots: tuple[_Slots, ...] = ()
    #: If the lease has ended, one of ``InvalidReason``, or a reason of a later version.
    reason: _Word = ""


class Find(RequestFor["Found"], frozen=True, tag="find"):
    """Ask for a lease over the longest beginning of a prompt whose blocks this engine holds on its device."""

    engine_id: _Id  # empty: of whichever engine this is
    find_id: _Id  # of this question
    hashing: _Id  # how the hashes are made, which the engine must do alike
    hash_tokens: _Size  # of which there is a hash each
    #: Of consecutive blocks of the prompt from its first token on; each is of all tokens up to its block's end.
    hashes: Annotated[
        tuple[Annotated[bytes, msgspec.Meta(min_length=1, max_length=64)], ...], msgspec.Meta(max_length=MAX_HASHES)
    ]
    least_tokens: _Int = 0  # fewer are of no use, and not leased
    unit_tokens: _Size = 1  # nor what is no multiple of this


class Found(msgspec.Struct, frozen=True, tag="found"):
    """What the engine holds of a prompt: without a lease id nothing, or ``reason`` says why it cannot tell."""

    engine_id: str
    hashing: str = ""  # of the engine
    hash_tokens: _Int = 0  # of the engine: who asks may hash anew
    reason: _Text = ""
    lease_id: str = ""
    lease_ttl_s: float = 0.0
    tokens: _Number = 0
    block_ids: tuple[tuple[int, ...], ...] = ()  # by cache group; 0 marks a block that is not held
    block_sizes: tuple[int, ...] = ()  # of each cache group, in tokens
    layers: tuple[tuple[str, ...], ...] = ()  # as in ``Followed``


class Error(msgspec.Struct, frozen=True, tag="error"):
    """The request was not served."""

    code: _Word
    message: str  # human-readable: names the values and the rule


Request = Hello | Renew | Release | Cancel | Follow | Checksums | Locate | Find
Reply = Welcome | Renewed | Released | Cancelled | Followed | Checksummed | Located | Found | Error

#: The class of the reply to each kind of request, as ``RequestFor`` names it.
REPLY_NAMES: dict[type, str] = {each: get_args(each.__orig_bases__[0])[0].__forward_arg__ for each in get_args(Request)}


class Envelope(msgspec.Struct, frozen=True, array_like=True):
    """The contents of every frame. The body is decoded only after the version was checked."""

    version: int
    message_id: Annotated[int, msgspec.Meta(ge=1, le=2**63 - 1)]
    body: msgspec.Raw


class MalformedMessage(ValueError):  # noqa: N818
    """The frame is not a message of this protocol. ``message_id`` is 0 if it could not be read."""

    def __init__(self, reason: str, *, code: ErrorCode = ErrorCode.MALFORMED, message_id: int = 0) -> None:
        super().__init__(reason)
        self.code = code
        self.message_id = message_id


_encoder = msgspec.msgpack.Encoder()
_envelopes = msgspec.msgpack.Decoder(Envelope)
_requests = msgspec.msgpack.Decoder(Request)
_replies = msgspec.msgpack.Decoder(Reply)

# What the decoder raises on arbitrary input: besides its own errors, those for deep nesting and invalid UTF-8.
_DECODE_ERRORS = (msgspec.MsgspecError, RecursionError, UnicodeDecodeError, MemoryError)


def encode(message_id: int, body: RequestFor[Any] | Reply) -> bytes:
    """Return the message as one frame."""
    return enveloped(message_id, encode_body(body))


def encode_body(body: RequestFor[Any] | Reply) -> msgspec.Raw:
    """Return what a message says, for ``enveloped``."""
    return msgspec.Raw(_encoder.encode(body))


def enveloped(message_id: int, body: msgspec.Raw) -> bytes:
    """Return as one frame the message whose body is encoded already."""
    return _encoder.encode(Envelope(PROTOCOL_VERSION, message_id, body))


def decode_request(frame: bytes) -> tuple[int, Request]:
    """Return the message id and body of a frame that P received.

    Raises:
        MalformedMessage: the frame is too large, not MessagePack, of another protocol version, or not a request.
    """
    message_id, request = _decode(frame, _requests, MAX_REQUEST_BYTES)
    if isinstance(request, Find) and len(set(request.hashes)) < len(request.hashes):  # else a block is lent twice
        text = "bad message body: a hash comes twice; those of one prompt's blocks are all different"
        raise MalformedMessage(text, message_id=message_id)
    return message_id, request


def decode_reply(frame: bytes) -> tuple[int, Reply]:
    """Return the message id and body of a frame that D received.

    Raises:
        MalformedMessage: the frame is too large, not MessagePack, of another protocol version, or not a reply.
    """
    return _decode(frame, _replies, MAX_FRAME_BYTES)


def message_id_of(frame: bytes) -> int:
    """Return the message id of a frame of any version, 0 if it cannot be read."""
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
            f"a frame of {len(frame)} bytes; at most {max_bytes} are accepted", message_id=envelope.message_id
        )
    if envelope.version != PROTOCOL_VERSION:
        raise MalformedMessage(
            f"protocol version {envelope.version}; this side speaks {PROTOCOL_VERSION}: run the same version of "
            "pd-connector on both",
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
