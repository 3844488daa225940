"""Which rank holds which heads and layers, and from which remote ranks a local rank reads them.

Pure functions over geometry. Releases are counted by reader, so the two sides need not agree on the result.
"""

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from layout.compatibility import OTHER_DRAFT, UNEQUAL_TOTALS, IncompatibleCachesError
from layout.context_parallel import WHOLE, TokenSplit, share_tokens
from layout.geometry import Plane, WorkerGeometry


def held_heads(kv_heads: int, tp_size: int, tp_rank: int) -> tuple[int, int]:
    """Return the half-open range of KV heads that a TP rank holds.

    As in vLLM's attention layers: with at most as many ranks as heads, each rank holds an equal share; with more ranks
    than heads, ``tp_size / kv_heads`` consecutive ranks hold the same head.

    Raises:
        ValueError: neither of ``kv_heads`` and ``tp_size`` divides the other.
    """
    if kv_heads % tp_size == 0:
        share = kv_heads // tp_size
        return tp_rank * share, (tp_rank + 1) * share
    if tp_size % kv_heads == 0:
        head = tp_rank * kv_heads // tp_size
        return head, head + 1
    raise ValueError(
        f"{kv_heads} KV heads cannot be shared among {tp_size} tensor-parallel ranks: neither divides the other"
    )


@dataclass(frozen=True, slots=True)
class Share:
    """The layers and heads of one local plane that are read from one remote plane: the tokens that both hold."""

    local_group: int
    local_plane: int
    remote_group: int
    remote_plane: int
    layers: tuple[str, ...]
    head_start: int  # global
    head_end: int  # global, exclusive


@dataclass(frozen=True, slots=True)
class Source:
    """Everything that a local rank reads from one remote rank."""

    remote: int  # index into the remote engine's workers
    shares: tuple[Share, ...]


@dataclass(frozen=True, slots=True)
class _Holder:
    """A remote plane that holds a layer."""

    remote: int
    group: int
    plane: int
    head_start: int
    head_end: int
    tokens: TokenSplit


def choose_sources(local: WorkerGeometry, remotes: Sequence[WorkerGeometry], turn: int = 0) -> tuple[Source, ...]:
    """Choose the remote ranks that ``local`` reads from, and what from each: every (layer, head, token) exactly once.

    Optional layers that no remote rank holds are not read.

    Where several remote ranks hold the same, local ranks take turns, so that the replicas share the load. This
    engine's ranks start counting at ``turn``: give engines different numbers to spread their load in the same way.

    Raises:
        IncompatibleCachesError: no remote rank holds a layer, head or token that is needed here.
    """
    holders = _holders(remotes)
    remote_layers = {layer for _, layer in holders}
    layers_of: dict[tuple[int, int, int, int, int, int, int], list[str]] = defaultdict(list)
    for group_index, group in enumerate(local.groups):
        for plane_index, plane in enumerate(group.planes):
            for layer in plane.layers:
                if plane.optional and layer not in remote_layers:
                    continue
                candidates = holders.get((plane.part, layer), [])
                for holder, start, end in _cover_tokens(plane, layer, candidates, turn, local.tp_rank):
                    if holder is None:
                        raise IncompatibleCachesError(_missing_message(plane, layer, start, remotes))
                    key = (holder.remote, group_index, plane_index, holder.group, holder.plane, start, end)
                    layers_of[key].append(layer)
    sources: dict[int, list[Share]] = defaultdict(list)
    for (remote, group_index, plane_index, remote_group, remote_plane, start, end), layers in layers_of.items():
        share = Share(group_index, plane_index, remote_group, remote_plane, tuple(layers), start, end)
        sources[remote].append(share)
    return tuple(Source(remote, tuple(sources[remote])) for remote in sorted(sources))


def _holders(remotes: Sequence[WorkerGeometry]) -> dict[tuple[str, str], list[_Holder]]:
    """Return the remote planes by (part, layer)."""
    found: dict[tuple[str, str], list[_Holder]] = defaultdict(list)
    for remote, worker in enumerate(remotes):
        for group_index, group in enumerate(worker.groups):
            for plane_index, plane in enumerate(group.planes):
                for layer in plane.layers:
                    place = remote, group_index, plane_index
                    holder = _Holder(*place, plane.head_start, plane.head_end, plane.tokens)
                    found[plane.part, layer].append(holder)
    return found


def _cover_tokens(
    plane: Plane, layer: str, candidates: list[_Holder], turn: int, tp_rank: int
) -> Iterator[tuple[_Holder | None, int, int]]:
    """Yield what ``_cover`` does, for each set of ranks that holds other tokens of those that the plane has."""
    splits = {replace(holder.tokens, rank=0) for holder in candidates}
    if len(splits) > 1:
        raise IncompatibleCachesError(
            f"the remote engine's ranks share the tokens of layer {layer!r} in several ways: {sorted(map(str, splits))}"
        )
    by_rank: dict[int, list[_Holder]] = defaultdict(list)
    for holder in candidates:
        by_rank[holder.tokens.rank].append(holder)
    for split in splits or {WHOLE}:
        turn += tp_rank // math.gcd(plane.tokens.ranks, split.ranks)  # only ranks that read the same take turns
        for rank in range(min(split.ranks, len(by_rank) + 1)):  # beyond these, one is missing
            if share_tokens(plane.tokens, replace(split, rank=rank)):
                yield from _cover(plane, by_rank[rank], turn)


def _cover(plane: Plane, candidates: list[_Holder], turn: int) -> Iterator[tuple[_Holder | None, int, int]]:
    """Yield the plane's heads as ranges with one holder each: the longest possible range, and holders in turn on a tie.

    If a head has no holder, yields None with that head and ends.
    """
    head = plane.head_start
    while head < plane.head_end:
        holding = [holder for holder in candidates if holder.head_start <= head < holder.head_end]
        if not holding:
            yield None, head, head
            return
        end = min(plane.head_end, max(holder.head_end for holder in holding))
        longest = [holder for holder in holding if holder.head_end >= end]
        yield longest[turn % len(longest)], head, end
        head = end


def _missing_message(plane: Plane, layer: str, head: int, remotes: Sequence[WorkerGeometry]) -> str:
    missing = f"the remote engine holds no KV cache {_describe_part(plane)} for head {head} of layer {layer!r}"
    planes = [other for worker in remotes for group in worker.groups for other in group.planes if layer in other.layers]
    if not planes:
        return (
            f"{missing}; both engines must serve the same model with the same draft. An engine may do without the "
            "other's draft only if drafts are sampled greedily and all cache groups have one precision"
        )
    if any(other.part == plane.part for other in planes):
        total = max(other.total_heads for other in planes)
        return (
            f"{missing}, only for other heads or tokens, {total} heads over all ranks ({plane.total_heads} here); both "
            f"engines must serve the same model. {UNEQUAL_TOTALS}"
        )
    held = f"{missing}; of this layer it holds {', '.join(sorted({_describe_part(other) for other in planes}))}"
    if plane.optional:
        return held + OTHER_DRAFT
    return (
        f"{held}. Both engines must hold the same parts. A CPU kernel packs an opaque part in its own order, which "
        "depends on the instruction set and dtype: run both engines on the same kind of machine with the same --dtype"
    )


def _describe_part(plane: Plane) -> str:
    return f"part {plane.part!r}" + (f" (opaque, packing {plane.packing!r})" if plane.packing else "")
