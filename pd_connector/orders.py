"""What the scheduler side orders in a step, and what workers report: all that passes between the two sides.

Holds plain frozen data only, which can be sent between processes. Imports no vLLM.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from operator import add
from typing import TypeVar

import msgspec
import numpy as np
from msgspec.structs import astuple

from layout.checksums import PlaneSums
from layout.copies import Int64Array, OwnArrays
from layout.geometry import ModelIdentity, WorkerGeometry
from layout.plan import BlockTable
from pd_connector.params import RemotePrefill
from transfer.control.failures import AuthenticationFailed, PeerRefused
from transfer.errors import PeerNotAllowed, TransferError

_Name = TypeVar("_Name", int, str)
_Ends = TypeVar("_Ends", "StoreEnds", "RankEnds", "CanaryEnds", "PoolEnds")


def block_table(block_ids: Sequence[int]) -> BlockTable:
    """Return a request's block table in the form that plans take: vLLM's null block, id 0, becomes a hole."""
    ids = np.array(block_ids, np.int64)
    return BlockTable.of(np.where(ids == 0, -1, ids))


class LeaseEnd(StrEnum):
    """How a lease ended. The values are labels of the metric."""

    RELEASED = "released"
    CANCELLED = "cancelled"
    EXPIRED = "expired"
    REVOKED = "revoked"


class Cause(StrEnum):
    """Why a pull failed. The values are labels of the metric."""

    NONE = ""  # it did not fail
    TRANSFER = (
        "transfer"  # the prefill engine has not computed the prompt of this transfer id: unknown, or aborted there
    )
    PREEMPTED = "preempted"  # the prefill engine has started the prompt over, and got no further in time
    PARAMS = "params"  # kv_transfer_params do not match the request or the prefill engine
    CANARY = "canary"  # the prefill engine computes other keys and values than this one, or that is not known in time
    LANDING = "landing"  # the prompt could not be pulled to host memory, as the log says before, or is gone from there
    QUEUE = "queue"  # longer than the queue timeout, it waited for blocks of its own, or in the prefill engine's queue
    UNREACHABLE = "unreachable"  # the prefill engine or its transfer engine does not answer
    DENIED = "denied"  # the two engines have different secrets, or allowed_peers excludes the address
    REFUSED = "refused"  # the engine that answers refuses, usually because it is another one: P has restarted
    INCOMPATIBLE = "incompatible"  # the prefill engine's caches cannot be used here
    READ = "read"  # the transfer engine did not deliver all bytes
    TIMEOUT = "timeout"  # the pull timeout expired before the read, or before checksums were ready
    CHECKSUM = "checksum"  # what arrived is not what was leased, or could not be compared with it
    LEASE = "lease"  # the lease ended before the read was done, or does not hold what was read
    UNCONFIRMED = "unconfirmed"  # whether the lease was still valid could not be determined
    INTERNAL = "internal"  # a bug in the connector, with its traceback in the log, or the system has no thread left

    @property
    def is_peer_wide(self) -> bool:
        """Whether nothing at all can be read from the prefill engine, so that its queued pulls fail as well."""
        return self in {Cause.UNREACHABLE, Cause.DENIED}

    @property
    def comes_of_leaving(self) -> bool:
        """Whether P gave the prompt up, or the lease has ended: as they do where the client leaves."""
        return self in {Cause.TRANSFER, Cause.LEASE}


def cause_of(error: TransferError, *, had_time: bool = True) -> Cause:
    """Return the cause of a pull's failure, given the error that a message to its prefill engine ended with.

    ``had_time``: whether the engine could have answered. If not, its silence says nothing of it: other pulls go on.
    """
    if isinstance(error, PeerRefused):
        return Cause.REFUSED
    if isinstance(error, AuthenticationFailed | PeerNotAllowed):
        return Cause.DENIED
    return Cause.UNREACHABLE if had_time else Cause.TIMEOUT


@dataclass(frozen=True)
class PullOrder:
    """Read a request's prompt tokens ``first_token`` to ``end_token`` (exclusive) from a prefill engine."""

    request_id: str
    remote: RemotePrefill
    local_block_ids: tuple[tuple[int, ...], ...]  # by cache group, the whole block table; 0 marks a hole
    first_token: int
    end_token: int
    pull_id: str  # the same on all ranks, unique to this pull
    #: Not empty if P still computes the prompt under this name: ``remote`` then holds only what was known to be
    #: complete when the pull was ordered, the first ``complete_tokens`` tokens, and the rest is to be followed.
    transfer_id: str = ""
    complete_tokens: int = 0
    traceparent: str = ""  # of the request's trace; empty if it has none, or tracing is off
    prefixes_at: str = ""  # where this engine serves prefixes, which P is told; empty if it serves none
    #: A lease may be pulled in two parts, each confirmed by itself: every rank is a reader for each of them. The second
    #: part is of states at borders of blocks alone: those of which ``local_block_ids`` has blocks.
    part: int = 0
    parts: int = 1


@dataclass(frozen=True)
class RefuseOrder:
    """Report a request as failed: the scheduler side knows that it cannot be pulled, and why."""

    request_id: str
    cause: Cause
    reason: str  # for people
    traceparent: str = ""  # as of a ``PullOrder``


@dataclass(frozen=True, eq=False)
class BlockMoves(OwnArrays):
    """Pairs of a device block and a host slot to copy between. Arrays of shape [n], int64."""

    groups: Int64Array  # index of each device block's cache group
    blocks: Int64Array  # device block ids
    slots: Int64Array  # of the host pool

    @classmethod
    def of(cls, triples: Sequence[tuple[int, int, int]]) -> "BlockMoves":
        """Return the moves of (group, block, slot) triples."""
        groups, blocks, slots = np.array(triples, np.int64).reshape(-1, 3).T.copy()
        return cls(groups, blocks, slots)

    def __len__(self) -> int:
        return len(self.slots)


@dataclass(frozen=True)
class LoadOrder:
    """Copy a request's blocks from host memory to the device."""

    request_id: str
    moves: BlockMoves
    tokens: int


@dataclass(frozen=True)
class StoreOrder:
    """Copy blocks that earlier steps computed from the device to host memory."""

    store_id: int  # negative if it is of a lease that moves, whose blocks may be full or not
    moves: BlockMoves


@dataclass(frozen=True)
class StoreEnds:
    """How a store ended on the ranks that have reported it."""

    ranks: int
    failed: bool = False
    unsettled: bool = False  # the device may still write to the slots

    def __add__(self, other: "StoreEnds") -> "StoreEnds":
        return StoreEnds(self.ranks + other.ranks, self.failed or other.failed, self.unsettled or other.unsettled)


@dataclass(frozen=True, eq=False)
class PoolOrder(OwnArrays):
    """Put blocks of host memory into the pool, or fetch blocks from there to free slots."""

    pool_id: int
    namespace: str  # of the objects' keys
    groups: Int64Array  # shape [n]: the cache group of each block
    slots: Int64Array  # shape [n]
    hashes: tuple[bytes, ...]  # of each block, by which its objects are named
    timeout_s: float  # after which nothing touches the slots any more

    def __len__(self) -> int:
        return len(self.hashes)


@dataclass(frozen=True)
class PoolEnds:
    """How an order for the pool ended on the ranks that have reported it: nothing touches the slots any more."""

    ranks: int
    missing: frozenset[int] = frozenset()  # indices of blocks that were not fetched, or not put
    failed: bool = False  # the pool does not work

    @classmethod
    def nothing(cls, order: PoolOrder) -> "PoolEnds":
        """Return how an order ends on a rank where the pool does not work."""
        return cls(1, frozenset(range(len(order))), failed=True)

    def __add__(self, other: "PoolEnds") -> "PoolEnds":
        return PoolEnds(self.ranks + other.ranks, self.missing | other.missing, self.failed or other.failed)


@dataclass(frozen=True)
class RankEnds:
    """How a pull for which no request waits ended on the ranks that have reported it: nothing writes there any more."""

    ranks: int
    failed: bool = False
    #: Of what was ordered, the states that the prefill engine does not have: cache groups and entries of their tables.
    lacking_states: frozenset[tuple[int, int]] = frozenset()

    def __add__(self, other: "RankEnds") -> "RankEnds":
        ranks, failed = self.ranks + other.ranks, self.failed or other.failed
        return RankEnds(ranks, failed, self.lacking_states | other.lacking_states)


@dataclass(frozen=True)
class CanaryReference:
    """What this engine has computed of a canary's prompt, to be compared with what is pulled of it."""

    request_id: str
    #: By cache group, the whole block table; 0 marks a hole. They stay as they are until every rank has reported. Empty
    #: if the prompt will not be computed: then nothing is compared.
    block_ids: tuple[tuple[int, ...], ...] = ()


@dataclass(frozen=True)
class CanaryEnds:
    """How a canary ended on the ranks that have reported it: nothing reads or writes its blocks there any more."""

    ranks: int
    samples: int = 0  # how many layers' parts were compared
    cause: Cause = Cause.NONE  # of the failure of a pull
    failure: str = ""  # why nothing was compared, for people; empty if it was
    difference: str = ""  # in which layer and part the two engines differ, and by how much; empty if they agree

    def __add__(self, other: "CanaryEnds") -> "CanaryEnds":
        failed = self if self.failure else other
        return CanaryEnds(
            self.ranks + other.ranks,
            self.samples + other.samples,
            failed.cause,
            failed.failure,
            self.difference or other.difference,
        )


@dataclass(frozen=True)
class CanaryRoom:
    """What a worker has for canaries."""

    tokens: int  # of a prompt, at most
    prompts: int  # at a time
    border: int  # tokens at whose multiples one begins
    least: int  # tokens from there on that show something of every plane


@dataclass(frozen=True)
class Destinations:
    """The device blocks into which tokens of a request arrive, whatever brings them."""

    request_id: str
    block_ids: tuple[int, ...]


@dataclass(frozen=True)
class ChecksumOrder:
    """Take checksums of a leased prompt's tokens before ``end_token``."""

    lease_id: str
    block_ids: tuple[tuple[int, ...], ...]  # by cache group, the whole block table; 0 marks a hole
    end_token: int


@dataclass(frozen=True, eq=False)
class ChecksumReport:
    """A worker's checksums of a leased prompt."""

    lease_id: str
    worker: int  # index among the engine's workers
    groups: tuple[tuple[PlaneSums, ...], ...] | None  # by cache group and plane; None if taking them failed


class Orders(msgspec.Struct, frozen=True):
    """The orders of a scheduler step, of one role or of all."""

    pulls: tuple[PullOrder, ...] = ()
    borders: tuple[PullOrder, ...] = ()  # second parts of earlier pulls. ``request_id`` is that of the pull
    landings: tuple[PullOrder, ...] = ()  # to host memory: blocks are the host pool's, slot s is block s + 1
    #: To blocks of the device that no request has. ``request_id`` is that of the pull.
    prefixes: tuple[PullOrder, ...] = ()
    canaries: tuple[PullOrder, ...] = ()  # to scratch memory, whose blocks these are
    references: tuple[CanaryReference, ...] = ()  # of canaries that were ordered before, each once
    refusals: tuple[RefuseOrder, ...] = ()
    loads: tuple[LoadOrder, ...] = ()
    stores: tuple[StoreOrder, ...] = ()
    fetches: tuple[PoolOrder, ...] = ()
    puts: tuple[PoolOrder, ...] = ()
    checksums: tuple[ChecksumOrder, ...] = ()
    #: Numbers of this step, ascending over steps: at most one, if somebody waits for what it computes. Every worker
    #: returns it in the report of the same step, ``Report.steps``.
    steps: tuple[int, ...] = ()
    #: Of the requests that begin to wait, if vLLM is told of failures by block ids. Not of a role.
    destinations: tuple[Destinations, ...] = ()
    #: How often the model has changed since the last step. What is known of it, and proven of others, does not hold.
    model_changes: int = 0
    #: Not 0 if workers are to report their handshakes again. Not of a role.
    asked_handshakes: int = 0

    def __add__(self, other: "Orders") -> "Orders":
        if not any(theirs := astuple(other)):  # as of most roles in most steps
            return self
        return Orders(*map(add, astuple(self), theirs))

    def served_at(self, prefixes_at: str) -> "Orders":
        """Return these orders, whose pulls of whole prompts tell P where this engine serves prefixes."""
        pulls, landings, canaries = (
            tuple(replace(order, prefixes_at=prefixes_at) for order in orders)
            for orders in (self.pulls, self.landings, self.canaries)
        )
        return msgspec.structs.replace(self, pulls=pulls, landings=landings, canaries=canaries)


@dataclass(frozen=True)
class WorkerHandshake:
    """A worker's caches, which the scheduler side describes to decode engines."""

    geometry: WorkerGeometry
    host_slots: int = 0  # capacity of this worker's host pool, in blocks; 0 if it has none
    host: WorkerGeometry | None = None  # its host pool, if peers can read it: its slots are the blocks
    canary: CanaryRoom | None = None  # None if it takes no canaries
    generation: int = 0  # how many times the caches have been registered anew, after the engine has slept
    #: Fingerprint of the control channel's secret, empty without one. Never logged, nor sent to peers.
    secret: str = field(default="", repr=False)
    model: ModelIdentity | None = None  # as this worker has loaded it; None if that is not known
    arithmetic: str = ""  # in which it computes, if its blocks go to a pool


#: A worker's place: its pipeline-parallel rank, and its number in that stage.
WorkerRanks = tuple[int, int]


class Report(msgspec.Struct, frozen=True, eq=False):
    """What workers report to the scheduler side in a step, besides the requests that vLLM waits for."""

    stores: Mapping[int, StoreEnds] = {}  # by store id
    landings: Mapping[str, RankEnds] = {}  # by request id
    prefixes: Mapping[str, RankEnds] = {}  # by the ids in their orders, as are the borders
    borders: Mapping[str, RankEnds] = {}
    canaries: Mapping[str, CanaryEnds] = {}  # by request id
    fetches: Mapping[int, PoolEnds] = {}  # by pool id, as are the puts
    puts: Mapping[int, PoolEnds] = {}
    checksums: tuple[ChecksumReport, ...] = ()
    handshakes: Mapping[WorkerRanks, WorkerHandshake] = {}  # that vLLM does not pass on
    #: Requests whose wait has ended in failure on a rank, if vLLM does not pass them on.
    failed: frozenset[str] = frozenset()
    steps: Mapping[int, int] = {}  # number of ranks that have computed each step that was asked

    def __bool__(self) -> bool:
        return any(astuple(self))

    def __add__(self, other: "Report") -> "Report":
        if not other:  # as of most roles in most steps
            return self
        summed = {
            name: _sums(getattr(self, name), getattr(other, name))
            for name in ("stores", "landings", "prefixes", "borders", "canaries", "fetches", "puts")
        }
        return Report(
            **summed,
            checksums=self.checksums + other.checksums,
            handshakes={**self.handshakes, **other.handshakes},
            failed=self.failed | other.failed,
            steps=dict(Counter(self.steps) + Counter(other.steps)),
        )


def _sums(ours: Mapping[_Name, _Ends], theirs: Mapping[_Name, _Ends]) -> dict[_Name, _Ends]:
    """Return the ends of two reports, added where both have one."""
    return {**ours, **{name: ours[name] + ends if name in ours else ends for name, ends in theirs.items()}}
