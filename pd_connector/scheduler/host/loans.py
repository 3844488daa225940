"""Blocks of host memory that are lent: to leases that move or lie there, and to prompts that are pulled there.

The pool evicts none of them until they are given back. Everything runs on the scheduler's thread.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from layout.copies import Int64Array
from pd_connector.vllm.block_pools import HostBlockPool, slots_of
from pd_connector.vllm.device_blocks import HeldBlocks, references


@dataclass(frozen=True, slots=True, eq=False)
class CopyLoan:
    """Host blocks for copies of device blocks, in their order."""

    hosts: HeldBlocks
    slots: Int64Array  # of them
    new: tuple[int, ...]  # indices of those that do not hold the copy yet


class HostLoans:
    """Owns the references that borrowers have to host blocks."""

    def __init__(self, pool: HostBlockPool) -> None:
        """Lend blocks of this pool."""
        self._pool = pool
        self._lent = np.zeros(pool.slots, np.int64)  # references, by slot
        self._lost: set[int] = set()  # slots never used again: a failed copy may still write to them

    @property
    def free(self) -> int:
        """Number of host blocks that can be lent."""
        return self._pool.free

    def lend(self, held: HeldBlocks, number: int) -> "HeldBlocks | None":
        """Lend host blocks for their contents, and as many free ones beside them, which are returned.

        Returns:
            None if too few are free; then nothing is lent.
        """
        taken = self._take(held, number)
        if taken is not None:
            np.add.at(self._lent, slots_of((*held, *taken)), 1)  # contents may be lent twice
        return taken

    def lend_for_copies(self, blocks: HeldBlocks) -> CopyLoan | None:
        """Lend host blocks for copies of device blocks: those that hold them already, else free ones.

        Returns:
            None if too few are free; then nothing is lent.
        """
        hosts = self._pool.copies_of(blocks)
        new = tuple(number for number, host in enumerate(hosts) if host is None)
        taken = self._take(tuple(host for host in hosts if host is not None), len(new))
        if taken is None:
            return None
        for number, host in zip(new, taken, strict=True):
            hosts[number] = host
        slots = slots_of(hosts)
        np.add.at(self._lent, slots, 1)
        return CopyLoan(tuple(hosts), slots, new)

    def publish(self, blocks: HeldBlocks, loan: CopyLoan) -> None:
        """Let the copies of device blocks be found that are new, and have arrived in the host blocks lent for them."""
        hosts = loan.hosts
        if len(loan.new) < len(hosts):
            blocks, hosts = (tuple(each[number] for number in loan.new) for each in (blocks, hosts))
        self._pool.publish_copies(blocks, hosts)

    def take_back(self, hosts: HeldBlocks, lost: Sequence[int] = ()) -> None:
        """Take host blocks back. Those with the indices ``lost`` are never used again."""
        np.subtract.at(self._lent, slots_of(hosts), 1)
        if lost:
            self.lose(tuple(hosts[number] for number in lost))
            kept = frozenset(lost)
            hosts = tuple(host for number, host in enumerate(hosts) if number not in kept)
        self._pool.unpin(hosts)

    def lose(self, hosts: HeldBlocks) -> None:
        """Never use host blocks again. Their references, which are the caller's, stay."""
        self._lost.update(slots_of(hosts).tolist())

    def are_lent(self, hosts: Iterable[HeldBlocks]) -> bool:
        """Return whether all of these loans are known."""
        slots = np.concatenate([np.zeros(0, np.int64), *map(slots_of, hosts)])
        return bool((np.bincount(slots, minlength=len(self._lent)) <= self._lent).all())

    @property
    def lost(self) -> int:
        """Number of slots that are never used again."""
        return len(self._lost)

    def references(self) -> "Counter[int]":
        """Return the number of references to each slot, lent or lost."""
        return references(self._lent) + Counter(self._lost)

    def _take(self, held: HeldBlocks, number: int) -> "HeldBlocks | None":
        """Take references to host blocks for their contents, and to free ones beside them; None if too few are free."""
        self._pool.pin(held)  # first, so that none of them is evicted for the others
        if number > self._pool.free:
            self._pool.unpin(held)
            return None
        return self._pool.take(number)
