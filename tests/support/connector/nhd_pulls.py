"""Pulls between NHD caches through the real planner, reader and copier; the wire copies inside this process."""

import ctypes
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import gcd
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

from layout.copies import Copies
from layout.plan import BlockTable, compile_plans
from layout.regions import RegionTable
from layout.sharding import choose_sources
from layout.staging import Schedule
from pd_connector.worker.remote_reader import RemoteReader
from tests.support.layout.nhd import NhdRank
from transfer.engine.interface import GivenUp, Link, never

#: What moves bytes on the device, or to it. Views, and memory that is only allocated, do not.
MOVING = ("index_select", "index_copy_", "copy_", "_to_copy", "clone", "cat")


class Operators(TorchDispatchMode):  # type: ignore[misc]  # torch is not followed
    """Counts the operators that move bytes inside a ``with`` block."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(
        self, operator: Any, _types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = operator.overloadpacket.__name__
        if name in MOVING:
            self.calls[name] += 1
        return operator(*args, **(kwargs or {}))


class LocalWire(Link):
    """Stands for a transfer engine whose peer is this process.

    ``before`` is called with each batch; ``copy`` copies as ``ctypes.memmove`` does.
    """

    def __init__(
        self,
        before: Callable[[Copies], object] = lambda copies: None,
        copy: Callable[..., object] = ctypes.memmove,
    ) -> None:
        self._before, self._copy = before, copy
        self.batches: list[Copies] = []

    def read(self, copies: Copies, timeout_s: float, later_bytes: int = 0, given_up: GivenUp = never) -> None:
        self._before(copies)
        self.batches.append(copies)
        columns = (column.tolist() for column in (copies.destinations, copies.sources, copies.sizes))
        for to, start, size in zip(*columns, strict=True):
            self._copy(ctypes.c_void_p(to), ctypes.c_void_p(start), ctypes.c_size_t(size))

    def prove(self, timeout_s: float) -> None:
        """It is known whose bytes these are."""

    def close(self) -> None:
        """Nothing is open."""

    @property
    def settled(self) -> bool:
        return True


@dataclass(frozen=True)
class RankRead:
    """What reading from one prefill rank took."""

    schedule: Schedule
    operators: list[Counter[str]] = field(default_factory=list)  # of each window

    @property
    def most_operators(self) -> int:
        return max((sum(calls.values()) for calls in self.operators), default=0)


@dataclass(frozen=True)
class Tables:
    """The blocks of a request on both sides, and its tokens that are pulled."""

    local: Sequence[int]
    remote: Sequence[int]
    first_token: int
    end_token: int


def pull_nhd(
    reader: RemoteReader,
    local: NhdRank,
    remotes: Sequence[NhdRank],
    tables: Tables,
    wire: LocalWire | None = None,
    *,
    check: bool = True,
) -> list[RankRead]:
    """Read from all ranks, one after the other, counting the operators of each window, and check every byte."""
    ours, theirs = local.geometry(), [remote.geometry() for remote in remotes]
    for remote in remotes:
        remote.fill(tables.remote)
    reads = []
    for rank, plan in compile_plans(ours, theirs, choose_sources(ours, theirs)).items():
        blocks = [BlockTable.of(tables.local)], [BlockTable.of(tables.remote)]
        copies = plan.instantiate(*blocks, tables.first_token, tables.end_token)
        counted: list[Counter[str]] = []
        copy = reader._copy

        def counting(copies: Copies, counted: list[Counter[str]] = counted, copy: Any = copy) -> None:
            with Operators() as operators:
                copy(copies)
            counted.append(operators.calls)

        reader._copy = counting
        with reader.planned(copies, RegionTable(theirs[rank].regions)) as schedule:
            reader.carry_out(wire or LocalWire(), schedule, 60.0)
        reader.land()
        reader._copy = copy
        reads.append(RankRead(schedule, counted))
    if check:
        unit = gcd(local.engine.block_tokens, *(remote.engine.block_tokens for remote in remotes))
        local.check(tables.local, tables.first_token, -(-tables.end_token // unit) * unit)
    return reads
