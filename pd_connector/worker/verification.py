"""Compare what a pull has brought with what the prefill engine leased, by checksums, before anything is used.

Runs on the thread of the pull. The tokens that were pulled are compared, no others.
"""

import math
import threading
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from layout.checksums import PlaneSums, UInt64Array, run_tokens
from layout.compatibility import IncompatibleCachesError
from layout.geometry import WorkerGeometry
from layout.plan import BlockTable
from layout.sharding import Share, Source
from pd_connector.orders import Cause, PullOrder, block_table
from pd_connector.worker.checksums import CacheChecksums, Interrupted
from pd_connector.worker.pull_end import PullFailed, cause_of
from transfer.control.client import ControlClient
from transfer.control.messages import Checksummed, Checksums, NoChecksums
from transfer.errors import TransferError

#: Numbers of one answer, about: long prompts are compared in longer stretches instead.
_SUMS_AT_ONCE = 2**15
_STRETCHES_AT_ONCE = 2**11
#: The first and the longest pause before checksums that are still being taken are asked for again.
_PAUSES_S = 0.005, 0.25


@dataclass(frozen=True, slots=True)
class _Question:
    """What is asked of one prefill rank about one of its cache groups."""

    source: int  # the rank's number
    shares: tuple[Share, ...]  # what was read there, all of one cache group on either side
    borders: tuple[int, ...]
    wanted: npt.NDArray[np.bool_]  # [borders - 1]: which stretches were pulled; the others are holes


@dataclass(frozen=True, slots=True)
class _Difference:
    """A checksum that is not the same on both sides."""

    layer: str
    part: str
    head: int
    tokens: tuple[int, int]  # first, and one past the last
    here: int
    there: int
    source: int

    def __str__(self) -> str:
        return (
            f"layer {self.layer!r}, part {self.part!r}, KV head {self.head}, tokens {self.tokens[0]} to "
            f"{self.tokens[1] - 1}: {self.here:016x} here, {self.there:016x} when prefill rank {self.source} leased it"
        )


class Verifier:
    """What all pulls of a worker share to be compared."""

    def __init__(self, checksums: CacheChecksums, client: ControlClient) -> None:
        self._checksums = checksums
        self._client = client

    def check_peer(self, verifies: bool, workers: Sequence[WorkerGeometry], sources: Sequence[Source]) -> None:
        """Raise unless all that is read from a prefill engine can be compared.

        ``verifies`` and ``workers`` are from its welcome.

        Raises:
            IncompatibleCachesError: naming both values and the way out.
        """
        if not verifies:
            raise IncompatibleCachesError(
                "setting 'verify' is true here and false on the remote engine, which has no checksums to compare with: "
                'set "verify": true in its kv_connector_extra_config, or false in that of this engine'
            )
        for source in sources:
            for share in source.shares:
                ours = self._checksums.geometry.groups[share.local_group]
                run = run_tokens(workers[source.remote].groups[share.remote_group].planes[share.remote_plane])
                if ours.block_tokens % run:
                    raise IncompatibleCachesError(
                        f"block size is {ours.block_tokens} tokens here, and the remote engine takes checksums of "
                        f"{run} tokens, of which it must be a multiple to be compared: choose such a block size, or "
                        'set "verify": false on this engine'
                    )

    def verify(
        self,
        order: PullOrder,
        workers: Sequence[WorkerGeometry],
        sources: Sequence[Source],
        deadline: float,
        closing: threading.Event,
    ) -> None:
        """Return when all that was pulled is known to be what was leased. The lease must still be held.

        Raises:
            PullFailed: it is not, or that could not be learnt by ``deadline`` (on ``time.monotonic``).
            Interrupted: ``closing`` is set.
        """
        if order.end_token != order.remote.remote_num_tokens - 1:
            raise PullFailed(
                Cause.CHECKSUM,
                f"checksums are of {order.remote.remote_num_tokens - 1} tokens; this pull ends at {order.end_token}",
            )
        questions = list(self._questions(order, workers, sources))
        ours = self._checksums.sums(order.local_block_ids, order.first_token, order.end_token, closing)
        differing: list[_Difference] = []
        compared = 0
        for question in questions:
            theirs = self._ask(order, workers, question, deadline, closing)
            for difference, number in self._compare(question, workers, ours, theirs):
                differing += difference
                compared += number
        if differing:
            raise PullFailed(
                Cause.CHECKSUM,
                f"{len(differing)} of {compared} checksums of what has arrived differ from those of what was leased. "
                f"The first: {differing[0]}",
            )

    def _questions(
        self, order: PullOrder, workers: Sequence[WorkerGeometry], sources: Sequence[Source]
    ) -> Iterator[_Question]:
        local = self._checksums.geometry.groups
        for source in sources:
            by_group: dict[tuple[int, int], list[Share]] = defaultdict(list)
            for share in source.shares:
                by_group[share.local_group, share.remote_group].append(share)
            for (ours, theirs), shares in by_group.items():
                remote = workers[source.remote].groups[theirs]
                runs = (run_tokens(local[ours].planes[share.local_plane]) for share in shares)
                step = math.lcm(*runs, *(run_tokens(remote.planes[share.remote_plane]) for share in shares))
                numbers = sum(len(plane.layers) * plane.heads for plane in remote.planes)
                table = block_table(order.local_block_ids[ours])
                stretches = max(1, min(_SUMS_AT_ONCE // numbers, _STRETCHES_AT_ONCE))
                tokens = order.first_token, order.end_token
                borders, wanted = _stretches(table, local[ours].block_tokens, tokens, step, stretches)
                if wanted.any():
                    yield _Question(source.remote, tuple(shares), borders, wanted)

    def _ask(
        self,
        order: PullOrder,
        workers: Sequence[WorkerGeometry],
        question: _Question,
        deadline: float,
        closing: threading.Event,
    ) -> list[UInt64Array]:
        """The prefill rank's sums of each plane of the group, [stretches, layers, heads]."""
        remote, group = order.remote, question.shares[0].remote_group
        message = Checksums(remote.remote_engine_id, remote.lease_id, question.source, group, question.borders)
        pause, longest = _PAUSES_S
        while True:
            reply = self._request(order, message, deadline)
            if reply.reason != NoChecksums.PENDING:
                break
            if closing.wait(pause):
                raise Interrupted
            pause = min(2 * pause, longest)
        if reply.reason == NoChecksums.UNKNOWN:
            raise PullFailed(Cause.LEASE, f"lease {remote.lease_id} had ended before what was read could be compared")
        if reply.reason:
            raise PullFailed(
                Cause.CHECKSUM, f"prefill rank {question.source} has no checksums to compare with: {reply.reason!r}"
            )
        return _by_plane(question, workers, reply)

    def _request(self, order: PullOrder, message: Checksums, deadline: float) -> Checksummed:
        remaining = deadline - time.monotonic()
        if remaining <= 0:
            raise PullFailed(Cause.TIMEOUT, "the pull timeout was over before the checksums were there to compare with")
        try:
            answer = self._client.request(order.remote.remote_host, order.remote.remote_port, message, remaining)
            reply = answer.result()
        except TransferError as error:
            raise PullFailed(cause_of(error), f"what was read could not be compared: {error}") from error
        assert isinstance(reply, Checksummed)
        return reply

    def _compare(
        self,
        question: _Question,
        workers: Sequence[WorkerGeometry],
        ours: Sequence[Sequence[PlaneSums]],
        theirs: Sequence[UInt64Array],
    ) -> Iterator[tuple[list[_Difference], int]]:
        """Of each share, what differs, and how many checksums were compared."""
        tokens = np.array([question.borders[:-1], question.borders[1:]]).T[question.wanted].tolist()
        for share in question.shares:
            local = self._checksums.geometry.groups[share.local_group].planes[share.local_plane]
            remote = workers[question.source].groups[share.remote_group].planes[share.remote_plane]
            here = ours[share.local_group][share.local_plane].between(question.borders)
            here = _box(here, share, local.layers, local.head_start)[question.wanted]
            there = _box(theirs[share.remote_plane], share, remote.layers, remote.head_start)[question.wanted]
            yield (
                [
                    _Difference(
                        layer=share.layers[layer],
                        part=local.part,
                        head=share.head_start + head,
                        tokens=(tokens[stretch][0], tokens[stretch][1]),
                        here=int(here[stretch, layer, head]),
                        there=int(there[stretch, layer, head]),
                        source=question.source,
                    )
                    for stretch, layer, head in np.argwhere(here != there).tolist()
                ],
                here.size,
            )


def _stretches(
    table: BlockTable, block_tokens: int, tokens: tuple[int, int], step: int, count: int
) -> tuple[tuple[int, ...], npt.NDArray[np.bool_]]:
    """Borders that cut ``tokens`` into about ``count`` stretches at multiples of ``step``, and at every hole's edges.

    Also which of the stretches are not holes: every stretch is one, or has none in it.
    """
    first, end = tokens
    length = step * max(1, math.ceil((end - first) / step / count))
    held = table.block_ids[first // block_tokens - table.first_block : -(-end // block_tokens) - table.first_block] >= 0
    edges = (np.flatnonzero(held[1:] != held[:-1]) + 1 + first // block_tokens) * block_tokens
    borders = np.unique(np.concatenate([np.arange(first, end, length), edges, [end]]))
    return tuple(borders.tolist()), held[borders[:-1] // block_tokens - first // block_tokens]


def _by_plane(question: _Question, workers: Sequence[WorkerGeometry], reply: Checksummed) -> list[UInt64Array]:
    planes = workers[question.source].groups[question.shares[0].remote_group].planes
    forms = [(len(question.wanted), len(plane.layers), plane.heads) for plane in planes]
    sizes = [math.prod(form) for form in forms]
    if len(reply.sums) != sum(sizes) or max(reply.sums, default=0) >= 1 << 64:
        raise PullFailed(
            Cause.CHECKSUM,
            f"prefill rank {question.source} answered with {len(reply.sums)} checksums; {sum(sizes)} of 64 bits were "
            "asked for",
        )
    parts = np.split(np.array(reply.sums, np.uint64), np.cumsum(sizes)[:-1])
    return [part.reshape(form) for part, form in zip(parts, forms, strict=True)]


def _box(sums: UInt64Array, share: Share, layers: tuple[str, ...], head_start: int) -> UInt64Array:
    """The layers and heads of a share, [stretches, layers, heads]."""
    chosen = [layers.index(layer) for layer in share.layers]
    return sums[:, chosen, share.head_start - head_start : share.head_end - head_start]
