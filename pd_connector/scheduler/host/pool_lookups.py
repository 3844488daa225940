"""Which beginning of a prompt a pool seems to hold: look-ups in small calls, from the end, on a thread.

What is looked up is kept from eviction for a while, so a whole prefix is never looked up: its end, and a few blocks. A
long prompt may share no more than its beginning: where that ends is found by halves.
"""

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence

from layout.block_objects import ObjectForm
from pd_connector.vllm.block_events import group_and_hash
from pd_connector.vllm.block_pools import BlockKeys
from transfer.store.interface import ObjectStore

#: Keys in one call.
_LOOKUP_KEYS = 32
#: Calls from the end on. Others wait, and a look-up of 2 s counts as one that hangs.
_MOST_CALLS = 256
#: Places in a prefix that are looked at once its end is there.
_PARTS = 4


def longest_prefix(
    forms: Sequence[Sequence[ObjectForm]],
    namespace: str,
    keys: Mapping[int, BlockKeys],
    block_tokens: Sequence[int],
    ends: Sequence[int],
    held: int,
    whole: Sequence[int],
    store: ObjectStore,
) -> int:
    """Return the first of the ends, the longest first, at which all cache groups have a block; 0 if there is none.

    A block is there if its first object of every form on the first rank is. The first one that the cache groups
    ``whole`` keep behind ``held`` tokens is looked at before all, and some between. On a thread.
    """

    def names_of(blocks: Iterable[tuple[int, int]]) -> list[str]:
        named = ((forms[group], group_and_hash(keys[group][number])[1]) for group, number in blocks)
        return [form.key(namespace, form.first_share, block_hash) for of, block_hash in named for form in of]

    def names_at(end: int, groups: Iterable[int]) -> list[str] | None:
        """Return the names of the last block of each of the groups; None if one has no full block there."""
        last = [(group, end // block_tokens[group] - 1) for group in groups]
        return names_of(last) if all(number < len(keys[group]) for group, number in last) else None

    def has_last(end: int) -> bool:
        """Return whether the ``whole`` groups have the last block of a prefix: if not, none is as long or longer."""
        names = names_at(end, whole)
        return names is not None and all(store.exist(names))

    def longest_of(some: Sequence[int]) -> int:
        shown = {end: of_end for end in some if (of_end := names_at(end, keys)) is not None}
        names = list(dict.fromkeys(name for of_end in shown.values() for name in of_end))
        exist = dict(zip(names, store.exist(names), strict=True)) if names else {}
        return next((end for end, of_end in shown.items() if all(exist[name] for name in of_end)), 0)

    first = names_of((group, held // block_tokens[group]) for group in whole)
    if first and not all(store.exist(first)):  # most prompts are in no pool, and cost one call
        return 0
    per_call = max(1, _LOOKUP_KEYS // max(1, sum(len(forms[group]) for group in keys)))
    found = longest_of(ends[:per_call])
    if not found:
        shorter = bisect_left(ends, True, per_call, key=has_last) if whole else per_call
        starts = range(shorter, len(ends), per_call)[:_MOST_CALLS]
        found = next(filter(None, (longest_of(ends[at : at + per_call]) for at in starts)), 0)
    if not found:
        return 0
    blocks = {
        (group, held // block_tokens[group] + (found - held) // block_tokens[group] * part // _PARTS)
        for group in whole
        for part in range(1, _PARTS)
    }
    between = names_of(blocks)
    return found if not between or all(store.exist(between)) else 0
