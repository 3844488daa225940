"""What this engine needs of a prompt, against what a prefill engine holds of it, layer by layer.

The two may share their layers out over cache groups in other ways: a draft on one side, or no hybrid cache manager,
changes vLLM's grouping. So a group here is compared with each group there that holds one of its layers.

Numbers and names only: no threads, no sockets, no blocks.
"""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from layout.states import running_entry
from pd_connector.params import RemotePrefill
from pd_connector.vllm.cache_specs import Retention
from transfer.control.limits import LastFew

#: Prefill engines with other groups of layers that are remembered. There are few; params come from clients.
_MAX_KNOWN = 64


@dataclass(frozen=True, slots=True)
class LackingBlocks:
    """Why a prompt must be computed here: blocks that are needed are no longer there."""

    reason: str  # for people
    is_by_setting: bool  # this engine keeps all tokens of a layer, of which the other one frees some


class NeededBlocks:
    """Compares what is needed in every cache group here with what is held there. Belongs to one thread."""

    def __init__(self, groups: Sequence[Retention], layers: Sequence[Collection[str]]) -> None:
        """``groups``: what vLLM keeps of a request in every cache group here; ``layers``: their names, likewise."""
        self._groups = groups
        self.set_layers(layers)

    def set_layers(self, layers: Sequence[Collection[str]]) -> None:
        """Set the names of each cache group's layers, over all pipeline stages."""
        self._layers = dict(enumerate(layers))
        self._known: LastFew[tuple[tuple[str, ...], ...], tuple[tuple[int, ...], ...]] = LastFew(_MAX_KNOWN)

    def lacking(self, remote: RemotePrefill, computed_tokens: int = 0) -> LackingBlocks | None:
        """Return why a complete prompt cannot be pulled from ``computed_tokens`` on, which are here; None if it can.

        The prefill engine keeps what the last prompt token attends to, in whole blocks of its own size. Blocks here are
        filled from their first token, because others may find them: of a window, that may be before the first of there.
        """
        for group, there, size in self._pairs(remote):
            kept, ids = self._groups[group], remote.remote_block_ids[there]
            if kept.states:
                entry = running_entry(max(remote.remote_num_tokens - 1, 1), size)
                if remote.remote_num_tokens > 1 and not any(ids[entry : entry + 1]):
                    return self._describe_state(group, remote)
                continue
            needed = max(kept.first_needed(remote.remote_num_tokens), computed_tokens // size * size)
            if needed // size < len(ids) and not ids[needed // size]:
                return self._describe(group, remote, there, needed)
        return None

    def held_states(self, remote: RemotePrefill) -> set[int]:
        """Return after how many tokens of a complete prompt all states are held there of which borders are kept here.

        The last one may be after fewer tokens than its place says.
        """
        places = [
            {(entry + 1) * size for entry, block in enumerate(remote.remote_block_ids[there]) if block}
            for group, there, size in self._pairs(remote)
            if (kept := self._groups[group]).states and kept.block_tokens < remote.remote_num_tokens
        ]
        return set.intersection(*places) if places else set()

    def will_lack(self, remote: RemotePrefill, first_tokens: Sequence[int], *, is_cut: bool = True) -> bool:
        """Return whether the prefill engine will lack such blocks once it has computed the prompt.

        Args:
            remote: the prompt.
            first_tokens: of what it will hold then, by its cache groups; empty if it has not said.
            is_cut: whether it leaves the last token of a prompt to this engine where layers keep states.
        """
        if not is_cut and any(kept.states for kept in self._groups):
            return True  # but for a prompt of which it keeps the state at a border
        if not first_tokens:
            return False
        tokens = remote.remote_num_tokens
        return any(
            self._groups[group].first_needed(tokens) < first_tokens[there]
            for group, there, _ in self._pairs(remote)
            if not self._groups[group].states  # which come at the end
        )

    def _pairs(self, remote: RemotePrefill) -> Iterator[tuple[int, int, int]]:
        """Yield the cache groups here and there that share a layer, and the block size there."""
        for group, found in enumerate(self._match(remote)):
            for there in found:
                sizes = remote.remote_block_sizes
                yield group, there, sizes[there] if sizes else self._groups[group].block_tokens

    def _match(self, remote: RemotePrefill) -> tuple[tuple[int, ...], ...]:
        """Return for each cache group here those there that hold one of its layers."""
        theirs = remote.remote_layers
        if not theirs:  # a single group holds all and keeps every token
            return tuple((0,) for _ in self._groups) if remote.remote_block_ids else ()
        if theirs not in self._known:
            self._known[theirs] = tuple(
                tuple(there for there, names in enumerate(theirs) if not ours.isdisjoint(names))
                for ours in map(frozenset, self._layers.values())
            )
        return self._known[theirs]

    def _describe_state(self, group: int, remote: RemotePrefill) -> LackingBlocks:
        tokens = remote.remote_num_tokens
        layer = min(self._layers.get(group, ("its layers",)))
        return LackingBlocks(
            f"the prefill engine has no state of layer {layer!r} after {tokens - 1} of {tokens} tokens: it could not "
            "leave the last token to this engine, as with an image at the end of a prompt",
            is_by_setting=False,
        )

    def _describe(self, group: int, remote: RemotePrefill, there: int, needed: int) -> LackingBlocks:
        names = remote.remote_layers
        shared = [name for name in self._layers.get(group, ()) if not names or name in names[there]]
        layer = f"layer {min(shared)!r}" if shared else "its layers"
        ids, kept = remote.remote_block_ids[there], self._groups[group]
        size = remote.remote_block_sizes[there] if remote.remote_block_sizes else kept.block_tokens
        first = next((number for number, block in enumerate(ids) if block), len(ids)) * size
        held = f"the prefill engine no longer holds what comes before token {first} of {layer}"
        if not (kept.window or kept.chunk):
            return LackingBlocks(
                f"{held}, of which this engine keeps all: no prompt beyond the window or chunk can be pulled. Start "
                "both engines with vLLM's hybrid KV cache manager, or both without "
                "(--disable-hybrid-kv-cache-manager)",
                is_by_setting=True,
            )
        return LackingBlocks(
            f"{held}, which attention to a window or chunk needs here from token {needed} on: blocks are of "
            f"{kept.block_tokens} tokens here and of {size} there",
            is_by_setting=False,
        )
