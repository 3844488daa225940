"""Pulls between two engines of the oracle: the only place where its caches meet the planner.

``pull`` plans and executes the reads of every local rank and has the oracle check every byte.
"""

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import lcm

import numpy as np

from layout.copies import Copies
from layout.geometry import WorkerGeometry
from layout.plan import BlockTable, Plan, compile_plans
from layout.sharding import choose_sources
from tests.support.layout.oracle import Engine, Model, Rank, Table, build, unit_tokens
from tests.support.layout.ranks import compressed

LOCAL_BASE = 1 << 44
REMOTE_BASE = 1 << 45


@dataclass(frozen=True)
class Request:
    """The tokens to pull, and where each cache group of the model has its blocks on both sides."""

    first_token: int
    end_token: int
    local: tuple[Table, ...]
    remote: tuple[Table, ...]


@dataclass(frozen=True)
class Read:
    """What one local rank reads from one remote rank."""

    local: int
    remote: int
    copies: Copies


def table(kind: str, blocks: int, count: int, *, holes: int = 0, first_block: int = 0, seed: int = 0) -> Table:
    """A table of ``count`` entries, the first ``holes`` of them holes: "contiguous", "fragmented" or "descending"."""
    ids = {
        "contiguous": np.arange(blocks)[blocks - count :],
        "descending": np.arange(blocks)[::-1],
        "fragmented": np.random.default_rng(seed).permutation(blocks),
    }[kind][:count]
    return Table(first_block, (-1,) * holes + tuple(ids.tolist()[holes:]))


def in_order(tables: Sequence[Table], rank: Rank) -> list[BlockTable]:
    """The tables of a rank's groups, as planning takes them."""
    return [BlockTable.of(tables[group].ids, tables[group].first_block) for group in rank.group_order]


def plans_of(local: WorkerGeometry, remotes: Sequence[WorkerGeometry]) -> dict[int, Plan]:
    return compile_plans(local, remotes, choose_sources(local, remotes))


def wanted_tokens(request: Request, local: Engine, remote: Engine) -> list[list[int]]:
    """The tokens of each group that a pull must deliver: whole units, without the holes of the local table."""
    wanted = []
    for group, blocks in enumerate(request.local):
        unit = unit_tokens(local, remote, group)
        end = -(-request.end_token // unit) * unit
        tokens = range(request.first_token, end)
        wanted.append([token for token in tokens if blocks.id_at(token, local.tokens_of(group)) >= 0])
    return wanted


def cut(request: Request, plans: Iterable[Plan], cuts: random.Random) -> list[range]:
    """The tokens of a request in ranges that cut no unit, in any order: some of them as short as can be."""
    border = lcm(*(unit for plan in plans for unit in plan.unit_tokens))
    borders = range(-(-(request.first_token + 1) // border) * border, request.end_token, border)
    chosen = [token for token in borders if cuts.random() < 0.6]
    ends = [request.first_token, *chosen, request.end_token]
    ranges = [range(start, end) for start, end in pairwise(ends)]
    cuts.shuffle(ranges)
    return ranges


def pull(
    model: Model,
    local: Engine,
    remote: Engine,
    request: Request,
    remote_model: Model | None = None,
    cuts: random.Random | None = None,
) -> list[Read]:
    """Read ``request`` into every rank of ``local`` and check every byte of their memories.

    ``cuts``: read it range by range, in any order, and not at once.
    """
    lacking = {layer for group in model.groups for layer in group}
    lacking -= {layer for group in (remote_model or model).groups for layer in group}
    ours = build(model, local, 1, LOCAL_BASE)
    theirs = build(remote_model or model, remote, 2, REMOTE_BASE)
    for rank in theirs:
        rank.fill(request.remote)
    wanted = wanted_tokens(request, local, remote)
    reads = []
    for number, rank in enumerate(ours):
        before = rank.memory.copy()
        plans = plans_of(rank.geometry, [peer.geometry for peer in theirs])
        whole = range(request.first_token, request.end_token)
        for tokens in [whole] if cuts is None else cut(request, plans.values(), cuts):
            for source, plan in plans.items():
                copies = plan.instantiate(
                    in_order(request.local, rank), in_order(request.remote, theirs[source]), tokens.start, tokens.stop
                )
                rank.receive(copies, theirs[source])
                reads.append(Read(number, source, copies))
        due = rank.check(before, request.local, wanted, lacking)
        assert due == sum(read.copies.total_bytes for read in reads if read.local == number)
    return reads


def pull_rows(
    model: Model, sides: tuple[Engine, Engine], request: Request, ratio: int, lacking_tokens: int
) -> set[int]:
    """Pull a request of rows, the last of which lacks some tokens, and check every byte; return the units in rows."""
    local, remote = sides
    ours, theirs = build(model, local, 1, LOCAL_BASE), build(model, remote, 2, REMOTE_BASE)
    for rank in theirs:
        rank.fill(request.remote)
    there = [compressed(rank, ratio) for rank in theirs]
    units = set[int]()
    for rank in ours:
        before, plans = rank.memory.copy(), plans_of(compressed(rank, ratio), there)
        tokens = request.first_token * ratio, request.end_token * ratio - lacking_tokens
        for source, plan in plans.items():
            tables = in_order(request.local, rank), in_order(request.remote, theirs[source])
            rank.receive(plan.instantiate(*tables, *tokens), theirs[source])
            assert not any(unit % ratio for unit in plan.unit_tokens)
            units |= {unit // ratio for unit in plan.unit_tokens}
        (unit,) = units if len(units) == 1 else (1,)
        end = -(-request.end_token // unit) * unit
        rows = [
            [row for row in range(request.first_token, end) if table.id_at(row, local.tokens_of(group)) >= 0]
            for group, table in enumerate(request.local)
        ]
        rank.check(before, request.local, rows, set())
    return units


def plain(tokens: int, local: Engine, remote: Engine, kind: str = "contiguous", groups: int = 1) -> Request:
    """A request of ``tokens`` tokens from the first on, its tables of one kind on both sides."""
    return Request(
        0,
        tokens,
        tuple(table(kind, local.blocks, -(-tokens // local.tokens_of(g)), seed=g) for g in range(groups)),
        tuple(table(kind, remote.blocks, -(-tokens // remote.tokens_of(g)), seed=9 + g) for g in range(groups)),
    )
