"""Compares what a pull read with what the prefill engine leased, by checksums, before anything is used.

Runs on the thread of the pull. Only the tokens that were pulled are compared.
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
from layout.context_parallel import TokenSplit
from layout.geometry import Plane, WorkerGeometry
from layout.plan import BlockTable
from layout.sharding import Share, Source
from layout.states import state_entries
from pd_connector.engine_limits import ENGINE_LIMITS
from pd_connector.orders import Cause, PullOrder, block_table, cause_of
from pd_connector.worker.lease_checksums import CacheChecksums, Interrupted
from pd_connector.worker.pull_end import MIN_ANSWER_S, PullFailed
from transfer.control.client import ControlClient
from transfer.control.limits import MAX_SUMS
from transfer.control.messages import Checksummed, Checksums, NoChecksums
from transfer.errors import TransferError

#: Approximate limits of one answer. Long prompts are compared in longer token ranges instead.
_SUMS_PER_ANSWER = 2**15
_RANGES_PER_ANSWER = 2**11
#: The first and the longest pause before checksums that are not ready yet are requested again.
_PAUSES_S = 0.005, 0.25


@dataclass(frozen=True, slots=True)
class _Query:
    """The checksums to request from a prefill rank for one of its cache groups."""

    source: int  # index of the rank
    shares: tuple[Share, ...]  # what was read from it, all of one cache group and one split of tokens on either side
    borders: tuple[int, ...]  # of the token ranges; of a state, its entry in the table there, and the next
    wanted: npt.NDArray[np.bool_]  # [borders - 1]: which ranges were pulled; the others are holes
    state: tuple[int, int] | None = None  # its entry in the table here, and after how many tokens it is


@dataclass(frozen=True, slots=True)
class _Difference:
    """A checksum that differs between the two sides."""

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
    """Compares the pulls of a worker. Thread-safe."""

    def __init__(self, checksums: CacheChecksums, client: ControlClient) -> None:
        self._checksums = checksums
        self._client = client

    def check_peer(self, verifies: bool, workers: Sequence[WorkerGeometry], sources: Sequence[Source]) -> None:
        """Raise unless everything that is read from a prefill engine can be compared.

        ``verifies`` and ``workers`` are those of its welcome.

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
                if ours.states:
                    _check_states(workers[source.remote].groups[share.remote_group].planes)
                    continue
                here, there = _planes(share, self._checksums.geometry, workers[source.remote])
                run, held = run_tokens(there), ours.block_tokens // here.tokens.ranks
                if here.tokens != there.tokens:
                    _check_shared_runs(here, there)
                elif held % run:
                    raise IncompatibleCachesError(
                        f"block size is {held} tokens here, which is not a multiple of {run} tokens, over "
                        "which the remote engine takes each checksum: choose such a block size, or set "
                        '"verify": false on this engine'
                    )

    def verify(
        self,
        order: PullOrder,
        workers: Sequence[WorkerGeometry],
        sources: Sequence[Source],
        deadline: float,
        closing: threading.Event,
    ) -> None:
        """Return once all that was pulled is known to be what was leased. The lease must still be held.

        Raises:
            PullFailed: it is not, or this could not be determined by ``deadline`` (on ``time.monotonic``).
            Interrupted: ``closing`` is set.
        """
        if order.end_token != order.remote.remote_num_tokens - 1:
            raise PullFailed(
                Cause.CHECKSUM,
                f"checksums are of {order.remote.remote_num_tokens - 1} tokens; this pull ends at {order.end_token}",
            )
        queries = list(self._queries(order, workers, sources))
        ours = self._checksums.sums(order.local_block_ids, order.first_token, order.end_token, closing)
        differing: list[_Difference] = []
        compared = 0
        for query in queries:
            theirs = self._fetch(order, workers, query, deadline, closing)
            for difference, number in self._compare(query, workers, ours, theirs):
                differing += difference
                compared += number
        if differing:
            raise PullFailed(
                Cause.CHECKSUM,
                f"{len(differing)} of {compared} checksums of what has arrived differ from those of what was leased. "
                f"The first: {differing[0]}",
            )

    def _queries(
        self, order: PullOrder, workers: Sequence[WorkerGeometry], sources: Sequence[Source]
    ) -> Iterator[_Query]:
        """Yield what to request: together, of a rank, what is of the same two groups and split alike between ranks."""
        local = self._checksums.geometry
        for source in sources:
            remote = workers[source.remote]
            alike: dict[tuple[int, int, TokenSplit, TokenSplit], list[Share]] = defaultdict(list)
            for share in source.shares:
                here, there = _planes(share, local, remote)
                alike[share.local_group, share.remote_group, here.tokens, there.tokens].append(share)
            for shares in alike.values():
                of_them = _of_states if local.groups[shares[0].local_group].states else _of_tokens
                yield from of_them(order, source.remote, tuple(shares), local, remote)

    def _fetch(
        self,
        order: PullOrder,
        workers: Sequence[WorkerGeometry],
        query: _Query,
        deadline: float,
        closing: threading.Event,
    ) -> list[UInt64Array]:
        """Return the prefill rank's sums of each plane of the group, [ranges, layers, heads]."""
        remote, group = order.remote, query.shares[0].remote_group
        message = Checksums(remote.remote_engine_id, remote.lease_id, query.source, group, query.borders)
        pause, longest = _PAUSES_S
        while True:
            reply = self._request(order, message, deadline)
            if reply.reason != NoChecksums.PENDING:
                break
            if closing.wait(pause):
                raise Interrupted
            pause = min(2 * pause, longest)
        if reply.reason == NoChecksums.UNKNOWN:
            raise PullFailed(Cause.LEASE, f"lease {remote.lease_id} ended before what was read could be compared")
        if reply.reason:
            raise PullFailed(
                Cause.CHECKSUM, f"prefill rank {query.source} has no checksums to compare with: {reply.reason!r}"
            )
        return _by_plane(query, workers, reply)

    def _request(self, order: PullOrder, message: Checksums, deadline: float) -> Checksummed:
        remaining, longest_s = deadline - time.monotonic(), ENGINE_LIMITS.handshake_timeout_s
        if remaining <= 0:
            raise PullFailed(Cause.TIMEOUT, "the pull timeout was over before the checksums were there to compare with")
        try:
            timeout_s = max(remaining, MIN_ANSWER_S)
            answer = self._client.request(order.remote.remote_host, order.remote.remote_port, message, timeout_s)
            return answer.result()
        except TransferError as error:
            cause = cause_of(error, had_time=remaining >= longest_s)
            raise PullFailed(cause, f"what was read could not be compared: {error}") from error

    def _compare(
        self,
        query: _Query,
        workers: Sequence[WorkerGeometry],
        ours: Sequence[Sequence[PlaneSums]],
        theirs: Sequence[UInt64Array],
    ) -> Iterator[tuple[list[_Difference], int]]:
        """Yield for each share the differences, and how many checksums were compared."""
        tokens = np.array([query.borders[:-1], query.borders[1:]]).T[query.wanted].tolist()
        for share in query.shares:
            local, remote = _planes(share, self._checksums.geometry, workers[query.source])
            borders = query.borders
            if query.state is not None:
                entry, after = query.state
                borders, tokens = (entry, entry + 1), [(0, after)]
            here = ours[share.local_group][share.local_plane].between(borders)
            here = _select(here, share, local.layers, local.head_start)[query.wanted]
            there = _select(theirs[share.remote_plane], share, remote.layers, remote.head_start)[query.wanted]
            yield (
                [
                    _Difference(
                        layer=share.layers[layer],
                        part=local.part,
                        head=share.head_start + head,
                        tokens=(tokens[number][0], tokens[number][1]),
                        here=int(here[number, layer, head]),
                        there=int(there[number, layer, head]),
                        source=query.source,
                    )
                    for number, layer, head in np.argwhere(here != there).tolist()
                ],
                here.size,
            )


def _planes(share: Share, local: WorkerGeometry, remote: WorkerGeometry) -> tuple[Plane, Plane]:
    """Return what is compared: the plane that was written, and the one that it was read from."""
    here, there = local.groups[share.local_group], remote.groups[share.remote_group]
    return here.planes[share.local_plane], there.planes[share.remote_plane]


def _of_tokens(
    order: PullOrder, source: int, shares: tuple[Share, ...], local: WorkerGeometry, remote: WorkerGeometry
) -> Iterator[_Query]:
    """Yield the queries for the tokens that were pulled and that both ranks hold."""
    pairs = [_planes(share, local, remote) for share in shares]
    here, there = (plane.tokens for plane in pairs[0])  # the shares' planes are split alike
    table = block_table(order.local_block_ids[shares[0].local_group])
    block_tokens = local.groups[shares[0].local_group].block_tokens
    tokens = order.first_token, order.end_token
    # A rank answers for the whole group, whichever of its planes were read.
    numbers = sum(len(plane.layers) * plane.heads for plane in remote.groups[shares[0].remote_group].planes)
    count = max(1, min(_SUMS_PER_ANSWER // numbers, _RANGES_PER_ANSWER))
    if here == there:
        step = math.lcm(here.interleave, *(run_tokens(plane) for pair in pairs for plane in pair)) * here.ranks
        ranges = iter([_token_ranges(table, block_tokens, tokens, step, count)])
    else:
        run = math.gcd(*(_shared_run(*pair) for pair in pairs))
        ranges = _shared_ranges(table, block_tokens, tokens, run, (here, there), count)
    for borders, wanted in ranges:
        if wanted.any():
            yield _Query(source, shares, borders, wanted)


def _of_states(
    order: PullOrder, source: int, shares: tuple[Share, ...], local: WorkerGeometry, remote: WorkerGeometry
) -> Iterator[_Query]:
    """Yield a query for each state that was pulled: that both tables have."""
    groups = shares[0].local_group, shares[0].remote_group
    here, there = (
        state_entries(block_table(ids[group]).block_ids, side.groups[group].block_tokens, order.end_token)
        for ids, side, group in zip(
            (order.local_block_ids, order.remote.remote_block_ids), (local, remote), groups, strict=True
        )
    )
    for tokens in here.keys() & there.keys():
        entry = there[tokens]
        yield _Query(source, shares, (entry, entry + 1), np.ones(1, np.bool_), (here[tokens], tokens))


def _shared_run(here: Plane, there: Plane) -> int:
    """Return a number of tokens such that of any of its multiples on, a rank holds all of so many tokens, or none."""
    shared = [plane.tokens.interleave for plane in (here, there) if plane.tokens.ranks > 1]
    return math.gcd(here.block_tokens, there.block_tokens, *shared)


def _check_shared_runs(here: Plane, there: Plane) -> None:
    """Raise unless the tokens of each checksum lie on one rank, of either engine. They share tokens in unequal ways."""
    run = math.lcm(run_tokens(here), run_tokens(there))
    if _shared_run(here, there) % run:
        raise IncompatibleCachesError(
            f"a checksum is of {run} tokens, and ranks share a prompt in runs of {here.tokens.interleave} tokens on "
            f"{here.tokens.ranks} ranks here and of {there.tokens.interleave} on {there.tokens.ranks} on the remote "
            "engine: choose a --cp-kv-cache-interleave-size that is a multiple, or equal context parallel sizes, or "
            'set "verify": false on this engine'
        )


def _check_states(remote: Sequence[Plane]) -> None:
    """Raise if a prefill rank has more checksums of one state of a cache group than fit an answer."""
    number = sum(len(plane.layers) * plane.heads for plane in remote)
    if number > MAX_SUMS:
        raise IncompatibleCachesError(
            f"the states of layer {remote[0].layers[0]!r} and those with it have {number} heads or channels on a rank "
            f"of the remote engine, each with a checksum, of at most {MAX_SUMS} in an answer: set "
            '"verify": false on this engine'
        )


def _shared_ranges(
    table: BlockTable, block_tokens: int, tokens: tuple[int, int], run: int, splits: Sequence[TokenSplit], count: int
) -> Iterator[tuple[tuple[int, ...], npt.NDArray[np.bool_]]]:
    """Yield the ranges of ``tokens`` that both of two ranks hold, at most ``count`` at once, as ``_token_ranges``.

    Each holds all or none of ``run`` tokens.
    """
    starts = np.arange(*tokens, run, dtype=np.int64)
    held = table.block_ids[starts // block_tokens - table.first_block] >= 0
    for split in splits:
        held &= split.holds(starts)
    changes = np.flatnonzero(np.diff(held, prepend=False, append=False))
    edges = np.append(starts, tokens[1])[changes]
    for first in range(0, len(edges), 2 * count):
        borders = edges[first : first + 2 * count]
        yield tuple(borders.tolist()), np.arange(len(borders) - 1) % 2 == 0


def _token_ranges(
    table: BlockTable, block_tokens: int, tokens: tuple[int, int], step: int, count: int
) -> tuple[tuple[int, ...], npt.NDArray[np.bool_]]:
    """Divide ``tokens`` into about ``count`` ranges at multiples of ``step``, and at the edges of every hole.

    Returns:
        The borders of the ranges, and which of the ranges are held. The others lie in holes.
    """
    first, end = tokens
    length = step * max(1, math.ceil((end - first) / step / count))
    held = table.block_ids[first // block_tokens - table.first_block : -(-end // block_tokens) - table.first_block] >= 0
    edges = (np.flatnonzero(held[1:] != held[:-1]) + 1 + first // block_tokens) * block_tokens
    borders = np.unique(np.concatenate([np.arange(first, end, length), edges, [end]]))
    return tuple(borders.tolist()), held[borders[:-1] // block_tokens - first // block_tokens]


def _by_plane(query: _Query, workers: Sequence[WorkerGeometry], reply: Checksummed) -> list[UInt64Array]:
    planes = workers[query.source].groups[query.shares[0].remote_group].planes
    forms = [(len(query.wanted), len(plane.layers), plane.heads) for plane in planes]
    sizes = [math.prod(form) for form in forms]
    if len(reply.sums) != sum(sizes) or max(reply.sums, default=0) >= 1 << 64:
        raise PullFailed(
            Cause.CHECKSUM,
            f"prefill rank {query.source} answered with {len(reply.sums)} checksums; {sum(sizes)} of 64 bits were "
            "asked for",
        )
    parts = np.split(np.array(reply.sums, np.uint64), np.cumsum(sizes)[:-1])
    return [part.reshape(form) for part, form in zip(parts, forms, strict=True)]


def _select(sums: UInt64Array, share: Share, layers: tuple[str, ...], head_start: int) -> UInt64Array:
    """Return the sums of a share's layers and heads, [ranges, layers, heads]."""
    chosen = [layers.index(layer) for layer in share.layers]
    return sums[:, chosen, share.head_start - head_start : share.head_end - head_start]
