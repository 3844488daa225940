"""The blocks of a simulated engine: who holds them, and which prompts' beginnings can be found in them.

``Memory`` is the device's; ``HostMemory`` is that of the host, of which the rule is **modelled**, not run:

- P copies what is leased to host memory, from where it is read, and gives the device's blocks back at once.
- D lets a prompt land in host memory while it has no blocks for it, and copies it to the device when it has.

What is copied goes at the settings' rate, beside the steps, and costs them nothing.

On the device, a prompt's beginning is found by the trace's ids, each of which names so many blocks. What nobody holds
is free, and can be found until it is evicted: first what was never used, then the longest unused, be it of an id or
not, as in vLLM.
"""

from collections import OrderedDict
from dataclasses import dataclass, field
from itertools import count


@dataclass(eq=False)
class Holding:
    """Blocks of one request, or of its lease."""

    ids: tuple[int, ...]  # of the prompt's beginning: these blocks are shared
    blocks: int  # of its own
    new_ids: tuple[int, ...] = field(default=())  # whose blocks are among its own, until they are published

    def total(self, blocks_per_id: int) -> int:
        """Return how many blocks these are, shared ones included."""
        return len(self.ids) * blocks_per_id + self.blocks


class Memory:
    """An engine's blocks."""

    def __init__(self, total: int, blocks_per_id: int) -> None:
        """Start with all blocks free, and nothing to find. 0 blocks for an id: nothing is ever found."""
        self.total = total
        self.leased = 0  # blocks that leases hold, as far as the owner says
        self.blocks_per_id = blocks_per_id
        self._held = 0
        self._references: dict[int, int] = {}  # to each id that somebody holds
        #: What nobody holds and has been used: blocks by id, or by a number of their own if they have none.
        self._idle: OrderedDict[int | tuple[int], int] = OrderedDict()
        self._idle_blocks = 0
        self._numbers = count()

    @property
    def free(self) -> int:
        """Blocks that can be given out, those included that would be evicted for it."""
        return self.total - self._held

    def found(self, ids: tuple[int, ...]) -> int:
        """Return how many of the first ids are here."""
        here = 0
        for each in ids:
            if each not in self._references and each not in self._idle:
                break
            here += 1
        return here if self.blocks_per_id else 0

    def take(self, ids: tuple[int, ...], blocks: int) -> Holding | None:
        """Give out blocks for a request: ``blocks`` in all, with those of its beginning that are here.

        Returns:
            None if there are too few, and nothing is given out.
        """
        here = ids[: self.found(ids)]
        own = blocks - len(here) * self.blocks_per_id
        idle = sum(each in self._idle for each in here) * self.blocks_per_id
        if own + idle > self.free:
            return None
        for each in here:
            self._refer(each)
        self._held += own
        self._evict()
        return Holding(here, own, ids[len(here) :] if self.blocks_per_id else ())

    def publish(self, holding: Holding) -> None:
        """Let the beginning of a prompt be found that has been computed, or has arrived."""
        published = []
        for each in holding.new_ids:
            if each in self._references or each in self._idle:
                break  # somebody was faster: what is held twice stays the holder's own
            self._held -= self.blocks_per_id
            holding.blocks -= self.blocks_per_id
            self._refer(each)
            published.append(each)
        holding.ids, holding.new_ids = (*holding.ids, *published), ()

    def give_back(self, holding: Holding) -> None:
        """Take blocks back."""
        self._held -= holding.blocks
        self._rest((next(self._numbers),), holding.blocks)
        for each in reversed(holding.ids):
            self._references[each] -= 1
            if not self._references[each]:
                del self._references[each]
                self._held -= self.blocks_per_id
                self._rest(each, self.blocks_per_id)

    def check_integrity(self) -> None:
        """Raise AssertionError unless the books balance."""
        assert 0 <= self._held <= self.total, "more blocks are held than there are"
        assert all(each > 0 for each in self._references.values()), "somebody holds nothing"
        assert not self._references.keys() & self._idle.keys(), "an id is held and idle at once"
        assert self._held >= len(self._references) * self.blocks_per_id, "shared blocks are not counted"
        assert self._idle_blocks == sum(self._idle.values()), "idle blocks are miscounted"
        assert self._held + self._idle_blocks <= self.total, "what is evicted can be found"

    def _refer(self, each: int) -> None:
        if each not in self._references:
            self._idle_blocks -= self._idle.pop(each, 0)
            self._held += self.blocks_per_id
        self._references[each] = self._references.get(each, 0) + 1

    def _evict(self) -> None:
        while (excess := self._held + self._idle_blocks - self.total) > 0:
            key, blocks = next(iter(self._idle.items()))
            if isinstance(key, int) or blocks <= excess:
                self._idle_blocks -= self._idle.pop(key)
            else:
                self._idle[key] -= excess
                self._idle_blocks -= excess

    def _rest(self, key: int | tuple[int], blocks: int) -> None:
        if blocks:
            self._idle[key] = blocks
            self._idle_blocks += blocks


class HostMemory:
    """Blocks of one engine's host memory."""

    def __init__(self, total: int) -> None:
        self.total = total
        self.free = total

    def take(self, blocks: int) -> bool:
        """Take blocks; return False, and take none, if there are too few."""
        if blocks > self.free:
            return False
        self.free -= blocks
        return True

    def give_back(self, blocks: int) -> None:
        """Take blocks back."""
        self.free += blocks

    def check_integrity(self) -> None:
        """Raise AssertionError unless the books balance."""
        assert 0 <= self.free <= self.total, "host memory is miscounted"
