"""Which blocks of host memory are put into the pool next: of each prompt the last one first.

The pool evicts first what was put first, and without its beginning a prompt is of no use to anybody. So what host
memory comes to hold of a prompt, in many steps, is held back until all of it is there.

    comes to host memory --- of a prompt that is computed ---> held back --- computed and stored, or it has ended ---,
              '------------- of none --------------------------------------------------------------> waits to be put

Everything runs on the scheduler's thread.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import chain
from typing import TYPE_CHECKING

from pd_connector.scheduler.host.tier import HostTier

if TYPE_CHECKING:
    from pd_connector.vllm.types import BlockHashWithGroupId, Request

_MOST = 4096  # blocks that wait


@dataclass(slots=True, eq=False)
class _Prompt:
    """A prompt that is computed, or stored, here."""

    request: "Request"
    keys: "frozenset[BlockHashWithGroupId]"  # of its blocks that no other prompt is to bring
    held_back: "dict[BlockHashWithGroupId, None]" = field(default_factory=dict)  # of these, as they came


class PutQueue:
    """Owns which blocks wait to be put, and which are held back for those behind them."""

    def __init__(self, tier: HostTier) -> None:
        """Start empty. ``tier`` tells what it still stores."""
        self._tier = tier
        self._waiting: list[BlockHashWithGroupId] = []  # the next one last
        self._once_more: set[BlockHashWithGroupId] = set()  # those of them that were not kept before
        self._prompts: dict[str, _Prompt] = {}  # by request
        self._ending: list[_Prompt] = []  # computed, or never will be, but perhaps not stored yet
        self._prompt_of: dict[BlockHashWithGroupId, _Prompt] = {}

    def __len__(self) -> int:
        """Return how many blocks wait to be put."""
        return len(self._waiting)

    @property
    def is_released_soon(self) -> bool:
        """Whether blocks are held back only until stores end, be there requests that have the engine step or not."""
        return bool(self._ending)

    def follow(self, request: "Request") -> None:
        """Hold back what comes of a request's prompt, which is computed now, until all of it is there."""
        # What is stored lazily comes after all of its request, the end of a prompt first.
        if self._tier.is_lazy or request.num_output_tokens or request.request_id in self._prompts:
            return
        host = self._tier.pool
        keys = chain.from_iterable(host.keys_of(request, group) for group in host.groups)
        prompt = _Prompt(request, frozenset(key for key in keys if key not in self._prompt_of))
        self._prompts[request.request_id] = prompt
        self._prompt_of.update(dict.fromkeys(prompt.keys, prompt))

    def forget(self, request_id: str) -> None:
        """Note that no more of a request's prompt is computed: what is stored of it is put, however much that is."""
        if (prompt := self._prompts.pop(request_id, None)) is not None:
            self._ending.append(prompt)

    def add(self, keys: "Iterable[BlockHashWithGroupId]") -> int:
        """Take up blocks that the pool may lack, as they were stored; return how many are left out."""
        at_once = []
        for key in keys:
            if (prompt := self._prompt_of.get(key)) is not None:
                prompt.held_back[key] = None
            elif key not in self._once_more:
                at_once.append(key)
        return self._wait(at_once)

    def add_again(self, key: "BlockHashWithGroupId") -> bool:
        """Have a block that was not kept wait behind all others, while the pool makes room; return whether it waits."""
        if len(self._waiting) >= _MOST:
            return False
        self._waiting.insert(0, key)
        self._once_more.add(key)
        return True

    def release(self) -> int:
        """Let the blocks wait that are held back no longer; return how many are left out."""
        for request_id in [each for each, prompt in self._prompts.items() if prompt.request.num_output_tokens]:
            self.forget(request_id)
        left_out, ending, self._ending = 0, self._ending, []
        for prompt in ending:
            if self._tier.will_hold(prompt.keys):
                self._ending.append(prompt)
                continue
            for key in prompt.keys:
                del self._prompt_of[key]
            left_out += self._wait([key for key in prompt.held_back if key not in self._once_more])
        return left_out

    def take(self, most: int) -> "tuple[tuple[BlockHashWithGroupId, ...], set[BlockHashWithGroupId]]":
        """Return the blocks to put next, the first of them last, and which of them were not kept before."""
        first = max(len(self._waiting) - most, 0)
        # Each once: what host memory has lost and come to hold again meanwhile waits twice.
        taken = tuple(dict.fromkeys(reversed(self._waiting[first:])))[::-1]
        del self._waiting[first:]
        again = self._once_more.intersection(taken)
        self._once_more -= again
        return taken, again

    def clear(self) -> int:
        """Forget all blocks that wait: they are no longer valid; return how many were to be put once more.

        Those that are held back are no longer in host memory, either. They may come again.
        """
        again = len(self._once_more)
        self._waiting.clear()
        self._once_more.clear()
        return again

    def check_integrity(self) -> None:
        """Raise AssertionError unless the books balance."""
        assert self._once_more.issubset(self._waiting), "a block is to be put once more that does not wait"
        prompts = [*self._ending, *self._prompts.values()]
        assert self._prompt_of == {key: each for each in prompts for key in each.keys}, "nobody holds it back"
        assert all(each.keys.issuperset(each.held_back) for each in prompts), "a block is held back for another prompt"

    def _wait(self, keys: "list[BlockHashWithGroupId]") -> int:
        """Have blocks wait, the last of them to be put next; return how many are left out."""
        room = max(_MOST - len(self._waiting), 0)  # for the beginnings: without them, the others would be useless
        if self._tier.is_lazy:  # as vLLM evicts them: of a prompt, the last one has come first
            kept = keys[max(len(keys) - room, 0) :]
            self._waiting[:0] = reversed(kept)
        else:
            kept = keys[:room]
            self._waiting += kept
        return len(keys) - len(kept)
