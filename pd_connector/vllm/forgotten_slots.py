"""Slots of host memory that hold what nobody can find any more, and that nobody uses.

A slot comes here when the last reference to it is given back and its contents cannot be found, or when they become
impossible to find and nobody uses it. It leaves to be zeroed, or when it is taken: what takes it overwrites it, or has
it zeroed first. All methods belong to the scheduler's thread.
"""

from collections.abc import Iterable
from itertools import islice
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_utils import KVCacheBlock


class ForgottenSlots:
    """The book of them. Slot s is block s + 1."""

    def __init__(self, *, kept: bool) -> None:
        """Start with none. ``kept`` is false if nobody zeroes slots: the book then stays empty."""
        self._kept = kept
        self._slots: dict[int, None] = {}  # an ordered set
        self._urgent: dict[int, None] = {}  # in use, and to be zeroed before they are written to

    def __len__(self) -> int:
        return len(self._slots) + len(self._urgent)

    def given_back(self, blocks: "Iterable[KVCacheBlock]") -> None:
        """Note those of ``blocks`` that nobody uses any more, and that cannot be found."""
        if self._kept:
            free = (each for each in blocks if not (each.ref_cnt or each.is_null or each.block_hash is not None))
            self._slots.update(dict.fromkeys(int(block.block_id) - 1 for block in free))

    def taken(self, blocks: "Iterable[KVCacheBlock]") -> None:
        """Note that ``blocks`` are in use again."""
        if self._slots:
            for block in blocks:
                self._slots.pop(int(block.block_id) - 1, None)

    def zero_first(self, blocks: "Iterable[KVCacheBlock]") -> None:
        """Have ``blocks`` zeroed, which were just taken, before they are written to: they will not be filled."""
        if self._kept:
            self._urgent.update(dict.fromkeys(int(block.block_id) - 1 for block in blocks))

    def take_urgent(self) -> tuple[int, ...]:
        """Return the slots that are to be zeroed before this step's orders write to them."""
        slots, self._urgent = tuple(self._urgent), {}
        return slots

    def take(self, most: int) -> tuple[int, ...]:
        """Return at most so many of the forgotten slots, those that were forgotten first."""
        slots = tuple(islice(self._slots, most))
        for slot in slots:
            del self._slots[slot]
        return slots
