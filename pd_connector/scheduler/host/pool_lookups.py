"""Which beginning of a prompt a pool seems to hold: look-ups in small calls, from the end, on a thread.

What is looked up is kept from eviction for a while, so a whole prefix is never looked up: its end, and a few blocks.
"""

from collections.abc import Iterable, Mapping, Sequence

from layout.block_objects import ObjectForm
from pd_connector.vllm.block_events import group_and_hash
from pd_connector.vllm.block_pools import BlockKeys
from transfer.store.interface import ObjectStore

#: Keys in one call.
_LOOKUP_KEYS = 32
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

    first = names_of((group, held // block_tokens[group]) for group in whole)
    if first and not all(store.exist(first)):  # most prompts are in no pool, and cost one call
        return 0
    per_call = max(1, _LOOKUP_KEYS // max(1, sum(len(forms[group]) for group in keys)))
    for at in range(0, len(ends), per_call):
        shown: dict[int, list[str]] = {}
        for end in ends[at : at + per_call]:
            last = [(group, end // block_tokens[group] - 1) for group in keys]
            if all(number < len(keys[group]) for group, number in last):
                shown[end] = names_of(last)
        names = list(dict.fromkeys(name for of_end in shown.values() for name in of_end))
        exist = dict(zip(names, store.exist(names), strict=True)) if names else {}
        found = next((end for end, of_end in shown.items() if all(exist[name] for name in of_end)), 0)
        if found:
            blocks = {
                (group, held // block_tokens[group] + (found - held) // block_tokens[group] * part // _PARTS)
                for group in whole
                for part in range(1, _PARTS)
            }
            between = names_of(blocks)
            return found if not between or all(store.exist(between)) else 0
    return 0
