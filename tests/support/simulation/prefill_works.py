"""What the steps of ``named_prefill`` are to compute, token by token."""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import ModelRunnerOutput

from pd_connector.orders import StoreOrder
from tests.support.connector.loading_sibling import SiblingLoad

PAGE_TOKENS = 16  # in a block


def stamps_of(tokens: list[int]) -> list[int]:
    """What the cache must hold of each token: it depends on all before it."""
    return list(itertools.accumulate(tokens, lambda before, token: hash((before, token)), initial=0))[1:]


@dataclass(frozen=True)
class Work:
    """What a step computes of one request: tokens ``first`` to ``end``."""

    request_id: str
    first: int
    end: int
    stamps: list[int]
    tables: tuple[tuple[int, ...], ...]

    def writes(self) -> Iterator[tuple[tuple[int, int], int]]:
        """Yield where it writes, and what."""
        return self.places(self.first, self.end)

    def places(self, first: int, end: int) -> Iterator[tuple[tuple[int, int], int]]:
        """Yield where tokens ``first`` to ``end`` are, and what must be there; nothing of what windows have passed."""
        for table in self.tables:
            for token in range(first, end):
                if table[token // PAGE_TOKENS]:
                    yield (table[token // PAGE_TOKENS], token % PAGE_TOKENS), self.stamps[token]


@dataclass(frozen=True)
class StepUnderWay:
    """A step that was scheduled: what it will have written, and what its workers return when it has ended."""

    output: SchedulerOutput
    result: ModelRunnerOutput
    works: tuple[Work, ...]
    numbers: tuple[int, ...]  # that the workers return
    loads: tuple[SiblingLoad, ...]  # before it computes
    stores: tuple[StoreOrder, ...]

    @property
    def writes(self) -> dict[tuple[int, int], int]:
        """What it writes if all is right: stamps, by block and offset."""
        return {place: stamp for work in self.works for place, stamp in work.writes()}
