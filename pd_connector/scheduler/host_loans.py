"""Blocks of host memory that are lent: to leases that move there, and to prompts that are pulled there.

The pool evicts none of them until they are given back. Everything runs on the scheduler's thread.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pd_connector.vllm.block_pools import HostBlockPool, slots_of
from pd_connector.vllm.device_blocks import HeldBlocks

if TYPE_CHECKING:
    from pd_connector.vllm.types import KVCacheBlock


@dataclass(frozen=True, slots=True)
class CopyLoan:
    """Host blocks for copies of device blocks, in their order."""

    hosts: HeldBlocks
    new: tuple[int, ...]  # indices of those that do not hold the copy yet


class HostLoans:
    """Owns the references that borrowers have to host blocks."""

    def __init__(self, pool: HostBlockPool) -> None:
        """Lend blocks of this pool."""
        self._pool = pool
        self._lent: Counter[int] = Counter()  # references, by slot
        self._lost: set[int] = set()  # slots never used again: a failed copy may still write to them

    def lend(self, held: HeldBlocks, number: int, beside: int = 0) -> "HeldBlocks | None":
        """Lend host blocks for their contents, and as many free ones beside them, which are returned.

        ``beside``: how many more must be free, though they are not lent.

        Returns:
            None if too few are free; then nothing is lent.
        """
        self._pool.pin(held)  # first, so that none of them is evicted for the others
        if number + beside > self._pool.free:
            self._pool.unpin(held)
            return None
        taken = self._pool.take(number)
        self._lent.update(slots_of((*held, *taken)))
        return taken

    def lend_for_copies(self, blocks: HeldBlocks) -> CopyLoan | None:
        """Lend host blocks for copies of device blocks: those that hold them already, else free ones.

        Returns:
            None if too few are free; then nothing is lent.
        """
        copies = self._pool.copies_of(blocks)
        taken = self.lend(tuple(host for host in copies if host is not None), copies.count(None))
        if taken is None:
            return None
        free = iter(taken)
        hosts = tuple(host if host is not None else next(free) for host in copies)
        return CopyLoan(hosts, tuple(number for number, host in enumerate(copies) if host is None))

    def has_room(self, blocks: HeldBlocks) -> bool:
        """Return whether host blocks could be lent now for copies of all of these device blocks."""
        free = self._pool.free
        if len(blocks) <= free:
            return True
        copies = self._pool.copies_of(blocks)
        return sum(host is None or not host.ref_cnt for host in copies) <= free

    def publish(self, copies: "Iterable[tuple[KVCacheBlock, KVCacheBlock]]") -> None:
        """Let the copies of device blocks be found, which have arrived in the host blocks lent for them."""
        self._pool.publish_copies(copies)

    def take_back(self, hosts: HeldBlocks, lost: Sequence[int] = ()) -> None:
        """Take host blocks back. Those with the indices ``lost`` are never used again."""
        self.end(hosts)
        if lost:
            self._lost.update(slots_of([hosts[number] for number in lost]))
            kept = frozenset(lost)
            hosts = tuple(host for number, host in enumerate(hosts) if number not in kept)
        self._pool.unpin(hosts)

    def end(self, hosts: HeldBlocks) -> None:
        """Count host blocks as lent no more. The caller has their references."""
        lent = self._lent
        for slot in slots_of(hosts):  # subtracting counters would look at all that is lent
            if lent[slot] > 1:
                lent[slot] -= 1
            else:
                del lent[slot]

    def are_lent(self, hosts: Iterable[HeldBlocks]) -> bool:
        """Return whether all of these loans are known."""
        return Counter(slot for blocks in hosts for slot in slots_of(blocks)) <= self._lent

    @property
    def lost(self) -> int:
        """Number of slots that are never used again."""
        return len(self._lost)

    def references(self) -> "Counter[int]":
        """Return the number of references to each slot, lent or lost."""
        return self._lent + Counter(self._lost)
