"""What a prompt's bytes are and where each rank keeps them, by layers, tensors and block tables: a second opinion.

Every byte of a prompt has a value that depends on what it is of: layer, tensor, row, head over all ranks, place in the
head's row. Where it lies is said by vLLM's and vllm-ascend's rules, as their layers, runners and block tables have
them. Nothing here knows planes.

    tokens     a row for each token, or for every ``tokens_per_state`` of them; block tables in the prompt's order
    window     the same, and entries of the table before the window are holes
    ring       one block a request, whole, which depends on all tokens
    state      inputs of a convolution by head, side by side for q, k and v; the recurrence by head. It depends on all
               tokens up to the end of the entry's block, or to the last one
"""

import re
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch

from layout.plan import BlockTable
from tests.support.ascend.recipe_memory import RankMemory, tensors_of
from tests.support.ascend.recipe_ranks import RankCaches
from tests.support.memory import Bytes

_RINGS = ("CircularBufferSpec", "AscendCircularBufferSpec", "AscendIndexerKPoolTailSpec")
_WINDOWS = ("AscendSlidingWindowMLASpec", "SlidingWindowSpec", "SlidingWindowMLASpec")
_INDEXER = "AscendSFAIndexerCacheSpec"
_STATE = "MambaSpec"


def specs_by_layer(group: Any) -> dict[str, Any]:
    """The specification of each layer of one of vLLM's cache groups."""
    spec = group.kv_cache_spec
    one_each = getattr(spec, "kv_cache_specs", None)
    return {name: one_each[name] if one_each else spec for name in group.layer_names}


def kind_of(spec: Any) -> str:
    """How a block table of that specification is to be read."""
    name = type(spec).__name__
    if name == _STATE:
        return "state"
    if name in _RINGS:
        return "ring"
    return "window" if name in _WINDOWS else "tokens"


def tokens_of_row(spec: Any) -> int:
    """For how many tokens a row stands."""
    return int(getattr(spec, "tokens_per_state", 1))  # since vLLM 0.30


def prompt_tokens(engines: Sequence[RankCaches]) -> int:
    """A number of tokens that fills whole blocks of every group of tokens on every engine, at least three."""
    sizes = [
        group.kv_cache_spec.block_size * _dcp(engine)
        for engine in engines
        for group in engine.kv_cache_config.kv_cache_groups
        for spec in [next(iter(specs_by_layer(group).values()))]
        if kind_of(spec) in {"tokens", "window"}
    ]
    common = int(np.lcm.reduce(sizes))
    return common * max(1, -(-3 * int(min(sizes)) // common))


def block_tables(rank: RankCaches, tokens: int, seed: int) -> list[BlockTable]:
    """The block tables of a request in an engine's cache groups. No two have a block in common, and none has block 0.

    The same on every rank of an engine for the same seed.
    """
    config = rank.kv_cache_config
    free = iter(np.random.default_rng(seed).permutation(np.arange(1, config.num_blocks)).tolist())
    tables = []
    for group in config.kv_cache_groups:
        spec = next(iter(specs_by_layer(group).values()))
        size = group.kv_cache_spec.block_size * _dcp(rank)
        entries = 1 if kind_of(spec) == "ring" else -(-tokens // size)
        held = range(entries)
        if kind_of(spec) == "state":
            held = range(entries - 1, entries)
        elif kind_of(spec) == "window":
            held = range(max(tokens + 1 - spec.sliding_window, 0) // size, entries)
        tables.append(BlockTable.of([next(free) if entry in held else -1 for entry in range(entries)]))
    return tables


@dataclass(frozen=True)
class RecipePrompt:
    """A request of so many tokens, by the blocks that an engine keeps it in."""

    tokens: int
    tables: list[BlockTable]
    first: int = 0  # what was complete after so many tokens is left out

    def write(self, rank: RankCaches, memory: RankMemory, layers: frozenset[str] | None = None) -> int:
        """Put the prompt's bytes of a rank where they belong in ``memory``; returns how many.

        ``layers``: only of these.
        """
        written = 0
        for place, value in self.places(rank, memory, layers):
            place[...] = value
            written += value.size
        return written

    def places(
        self, rank: RankCaches, memory: RankMemory, layers: frozenset[str] | None = None
    ) -> Iterator[tuple[Bytes, Bytes]]:
        """Yield the places of the prompt's bytes of a rank in ``memory``, and the bytes."""
        for table, group in zip(self.tables, rank.kv_cache_config.kv_cache_groups, strict=True):
            for layer, spec in specs_by_layer(group).items():
                if layers is not None and layer not in layers:
                    continue
                tensors = tensors_of(rank.kv_caches[layer])
                if kind_of(spec) == "state":
                    for after, block in self._states(table, int(group.kv_cache_spec.block_size)):
                        yield from _state_places(rank, memory, f"{layer}/{after}", tensors, block)
                elif kind_of(spec) == "ring":
                    yield from _ring_places(memory, f"{layer}/{self.tokens}", tensors, int(table.block_ids[0]))
                else:
                    size = tokens_of_row(spec)
                    yield from _row_places(
                        rank, memory, layer, spec, tensors, table, range(self.first // size, self.tokens // size)
                    )

    def _states(self, table: BlockTable, size: int) -> Iterator[tuple[int, int]]:
        """Yield after how many tokens the states in a table are, and their blocks; ``size``: tokens of a block."""
        for entry, block in enumerate(table.block_ids.tolist()[: (self.tokens - 1) // size + 1]):
            after = min((entry + 1) * size, self.tokens)
            if block >= 0 and after > self.first:
                yield after, block


def _row_places(
    rank: RankCaches,
    memory: RankMemory,
    layer: str,
    spec: Any,
    tensors: list[torch.Tensor],
    table: BlockTable,
    wanted: range,
) -> Iterator[tuple[Bytes, Bytes]]:
    """Rows of tokens: a block of vLLM's is one kernel block or more, in order; with DCP, the next rank's comes next.

    ``wanted``: rows of the request, over all ranks.
    """
    first_head = _first_head(rank, layer, spec)
    every, offset = (1, 0) if type(spec).__name__ == _INDEXER else (_dcp(rank), rank.tp_rank % _dcp(rank))
    for number, tensor in enumerate(tensors):
        kernel_blocks = tensor.shape[0] // rank.kv_cache_config.num_blocks
        view = memory.view(tensor)
        view = view[:, :, None] if tensor.dim() == 3 else view  # no axis for the only head
        _, rows, heads, *inner = view.shape
        each = kernel_blocks * every * rows  # rows that an entry stands for
        first = wanted.start // each
        for entry, block in enumerate(table.block_ids[first : -(-wanted.stop // each)].tolist(), first):
            for kernel in range(kernel_blocks) if block >= 0 else ():
                start = ((entry * kernel_blocks + kernel) * every + offset) * rows
                begin, end = (min(max(row - start, 0), rows) for row in (wanted.start, wanted.stop))
                if begin == end:
                    continue
                value = _values(
                    f"{layer}/{number}", (start + begin, end - begin), (first_head, heads), int(np.prod(inner))
                )
                place = view[block * kernel_blocks + kernel, begin:end]
                yield place, value.reshape(end - begin, heads, *inner)


def _ring_places(
    memory: RankMemory, layer: str, tensors: list[torch.Tensor], block: int
) -> Iterator[tuple[Bytes, Bytes]]:
    for number, tensor in enumerate(tensors):
        view = memory.view(tensor)
        yield view[block], _values(f"{layer}/{number}", (0, 1), (0, 1), view[block].size).reshape(view.shape[1:])


def _state_places(
    rank: RankCaches, memory: RankMemory, layer: str, tensors: list[torch.Tensor], block: int
) -> Iterator[tuple[Bytes, Bytes]]:
    """Inputs that the convolution's kernel sees beside the present one; further rows are room for drafts."""
    text = rank.vllm_config.model_config.hf_text_config
    tp = rank.vllm_config.parallel_config.tensor_parallel_size
    conv, recurrence = (memory.view(tensor)[block] for tensor in tensors)
    first = 0
    for name, heads, columns in _conv_parts(text):
        held = heads // tp
        part = conv[: text.linear_conv_kernel_dim - 1, first : first + held * columns]
        rows, item = len(part), conv.shape[-1]
        value = _values(f"{layer}/{name}", (0, rows), (rank.tp_rank * held, held), columns * item)
        yield part, value.reshape(part.shape)
        first += held * columns
    assert first == conv.shape[1], f"{layer}: a convolution of {conv.shape[1]} columns, not {first}"
    held = len(recurrence)
    value = _values(f"{layer}/recurrence", (0, 1), (rank.tp_rank * held, held), recurrence[0].size)
    yield recurrence, value.reshape(recurrence.shape)


def _conv_parts(text: Any) -> list[tuple[str, int, int]]:
    """Name, heads over all ranks and columns of a head of what lies side by side in a convolution."""
    if (heads := getattr(text, "linear_num_heads", None)) is not None:
        return [(name, heads, text.linear_head_dim) for name in "qkv"]
    keys, values = text.linear_num_key_heads, text.linear_num_value_heads
    key_columns, value_columns = text.linear_key_head_dim, text.linear_value_head_dim
    return [("q", keys, key_columns), ("k", keys, key_columns), ("v", values, value_columns)]


def _first_head(rank: RankCaches, layer: str, spec: Any) -> int:
    """The number over all ranks of the first KV head that a rank has, as vLLM's attention layers share them."""
    if type(spec).__name__ != "FullAttentionSpec":
        return 0  # one, on every rank
    total, tp = _total_heads(rank, layer), rank.vllm_config.parallel_config.tensor_parallel_size
    return int(rank.tp_rank * (total // tp) if total >= tp else rank.tp_rank // (tp // total))


def _total_heads(rank: RankCaches, layer: str) -> int:
    config = rank.vllm_config
    speculative = config.speculative_config
    number = re.search(r"\blayers\.(\d+)\b", layer)
    is_beyond = number is not None and int(number[1]) >= config.model_config.get_total_num_hidden_layers()
    if speculative is not None and speculative.method == "eagle3" and is_beyond:
        return int(speculative.draft_model_config.hf_config.num_key_value_heads)
    return int(config.model_config.hf_text_config.num_key_value_heads)


@lru_cache(maxsize=128)  # most ranks hold the same of a step
def _values(name: str, rows: tuple[int, int], heads: tuple[int, int], size: int) -> Bytes:
    """The bytes of heads of rows, [rows, heads, size]; ranges are (first, number). Other arguments give other bytes."""
    row, head, place = (
        np.arange(first, first + number, dtype=np.uint64).reshape(shape)
        for (first, number), shape in ((rows, (-1, 1, 1)), (heads, (-1, 1)), ((0, size), (-1,)))
    )
    number = (row << np.uint64(34)) + (head << np.uint64(24)) + place
    mixed = number + (np.uint64(zlib.crc32(name.encode())) << np.uint64(20))
    mixed = (mixed + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    return ((mixed ^ (mixed >> np.uint64(29))) >> np.uint64(40)).astype(np.uint8)


def _dcp(rank: RankCaches) -> int:
    return int(rank.vllm_config.parallel_config.decode_context_parallel_size)
