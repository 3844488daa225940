"""Which of vLLM's KV cache specifications the connector serves, and what they state of a layer's cache.

A whitelist: a block of these holds the keys and values of its own tokens, whatever else the request has done, and a
request's block table has them in order; or it holds a state (``state_specs``), or a ring of a request's last tokens.
vLLM's classes are known by name, because releases and platforms have others.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pd_connector.vllm.engine_config import UnsupportedError, context_parallel, engine_ranks
from pd_connector.vllm.releases.installed import current

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheGroupSpec

    from layout.geometry import CacheGroup

#: The kinds of cache that are served.
SERVED = (
    "FullAttentionSpec",
    "SlidingWindowSpec",
    "ChunkedLocalAttentionSpec",
    "MLAAttentionSpec",
    "SlidingWindowMLASpec",
    "MambaSpec",
    "CircularBufferSpec",
)
#: Those of vllm-ascend, which passes a tensor for each part of a token's content.
SERVED_ON_ASCEND = (
    "AscendMLAAttentionSpec",
    "AscendSlidingWindowMLASpec",
    "AscendSFAIndexerCacheSpec",
    "AscendCircularBufferSpec",
    "AscendIndexerKPoolTailSpec",
)
#: One block for each request, in which its last tokens have rows by their position, as a ring.
_RINGS = ("CircularBufferSpec", "AscendCircularBufferSpec", "AscendIndexerKPoolTailSpec")
_SLIDING = ("SlidingWindowSpec", "SlidingWindowMLASpec", "AscendSlidingWindowMLASpec")
#: The block size of a ring: more tokens than any request has, and the largest that params can name.
RING_TOKENS = (1 << 31) - 1
#: Items of a quantised latent vector that share a scale.
_TILE = 128
#: Bytes of an FP8 indexer's row: 128 values and their scale.
_SCALED_INDEX = 132
#: Bytes of the rows that only DeepSeek V4.1 has, on some GPUs: in FP8 and in NVFP4, with their scales.
_V41_ROWS = (528, 288)
#: A part of a token's content that no kernel writes: what an earlier use of the block has left there.
PADDING = "padding"
#: Ways to accept drafts that take none which the model would not say, or, to measure speed, take any.
_EXACT = ("standard", "block", "synthetic")
#: How vLLM keeps states that the connector knows: one of each request, or also those at the borders of blocks.
_STATE_MODES = ("none", "align")

#: What is known of others, for the message.
_OTHERS = {
    "CrossAttentionSpec": "states of the encoder, not of the prompt's tokens",
    "EncoderOnlyAttentionSpec": "nothing that outlives a step",
    "HiddenStateCacheSpec": "hidden states, not keys and values",
    "HiSparseHotSpec": "a copy of blocks that are in host memory",
    "HiSparseResidentSpec": "a copy of blocks that are in host memory",
    "RSWASpec": "a window of generated tokens beside the whole prompt",
    "SinkFullAttentionSpec": "sink tokens at fixed blocks, beside those of requests",
}


@dataclass(frozen=True)
class LayerSpec:
    """What vLLM states of one layer's cache on this worker; its tensors must agree."""

    heads: int  # KV heads that this worker holds
    total_heads: int  # KV heads over all tensor-parallel ranks
    token_bytes: int  # of one (head, row)
    page_bytes: int  # of one block, with padding
    dtype: "torch.dtype"
    parts: tuple[tuple[str, int], ...] = ()  # name and number of items of each part of a token's content, in order
    packing: str = ""  # see ``layout.geometry.Plane``
    optional: bool = False  # need not be pulled
    tokens_per_row: int = 1
    #: Parts that lie in one tensor of bytes, in order: name, dtype and number of items of each.
    packed_parts: "tuple[tuple[str, torch.dtype, int], ...]" = ()
    is_by_part: bool = False  # passed as a tensor [blocks, rows, heads, content] for each part
    token_ranks: int = 1  # ranks that share the tokens of a request; 1: each has all
    token_interleave: int = 1  # tokens in a row that one of them has


@dataclass(frozen=True)
class Retention:
    """What vLLM keeps of a request in a cache group: it frees the blocks that no further token attends to."""

    block_tokens: int
    window: int = 0  # tokens that a token sees of a sliding window, itself included, and that drafts keep; 0: all
    chunk: int = 0  # tokens of a chunk of chunked local attention, which sees no other chunk; 0: no chunks
    states: bool = False  # a block holds a state: that after all tokens is needed, and no other
    earlier_states: int = 0  # at most, that vLLM keeps beside, at borders of blocks
    draft_states: int = 0  # for each of which vLLM gives a request a further block

    def first_token(self, computed: int) -> int:
        """Return the first token whose keys and values the next one needs after ``computed`` tokens.

        Of states, the last one, whose block holds the state.
        """
        if self.states:
            return max(computed - 1, 0)
        if self.chunk:
            return computed // self.chunk * self.chunk
        return max(computed + 1 - self.window, 0) if self.window else 0

    def first_needed(self, prompt_tokens: int) -> int:
        """Return the first token of the blocks that computing the last of ``prompt_tokens`` tokens needs."""
        return self.first_token(prompt_tokens - 1) // self.block_tokens * self.block_tokens

    def most_blocks(self, tokens: int) -> int:
        """Return how many blocks a request with so many tokens has at most, without those of ``draft_states``."""
        end_block = -(-tokens // self.block_tokens)
        return min(end_block - self.first_token(tokens) // self.block_tokens + self.earlier_states, end_block)

    def needed_blocks(self, first: int, end: int) -> tuple[range, int]:
        """Return the numbers of the blocks that tokens ``first`` to ``end`` (exclusive) need.

        And how many blocks before those need not be held, because a sliding window has passed them at ``end``.
        """
        first_block, end_block = first // self.block_tokens, -(-end // self.block_tokens)
        needed = min(max(self.first_token(end) // self.block_tokens, first_block), end_block)
        return range(needed, end_block), needed - first_block


def retention_in(group: "CacheGroup") -> Retention:
    """Return what vLLM keeps of a request in a worker's cache group."""
    return Retention(group.block_tokens, group.window, group.chunk, group.states)


def blocks_for(groups: Iterable[Retention], tokens: int) -> int:
    """Return how many blocks of all cache groups vLLM gives a request that has ``tokens``, at most."""
    return sum(group.most_blocks(tokens) + group.draft_states for group in groups)


def check_served(group: "KVCacheGroupSpec", spec: Any, layer: str) -> None:
    """Raise unless ``spec``, the specification of ``layer``'s cache in ``group``, is one that the connector serves.

    Raises:
        UnsupportedError: naming the layer, what its cache holds, and the way out.
    """
    kind = type(spec).__name__
    if kind not in SERVED + SERVED_ON_ASCEND:
        _refuse(layer, kind, f"which holds {_OTHERS[kind]}" if kind in _OTHERS else "which it does not know")
    if is_ring(spec):
        return
    if is_state(spec):
        _check_states(spec, layer)
        return
    tokens = _tokens_per_row(spec)
    if tokens != 1 and not current().serves_states:
        _refuse(layer, kind, "whose rows stand for several tokens: served with vLLM 0.30 and later only")
    if not isinstance(tokens, int) or tokens < 1 or int(spec.block_size) % tokens:
        _refuse(
            layer, kind, f"whose blocks of {spec.block_size} tokens have no whole number of rows of {tokens} tokens"
        )
    if getattr(spec, "bounded_replay", False):
        why = "whose window is computed again after a prefix hit instead of being kept (bounded_replay)"
        _refuse(layer, kind, why, "start with --no-swa-bounded-replay")
    if getattr(group, "host_resident", False) or not getattr(group, "enable_kv_transfer", True):
        _refuse(layer, kind, "whose blocks are not in the device's pool (HiSparse)", "start without hisparse_config")
    if scales := current().hidden_scales(spec):
        _refuse(layer, kind, scales, "choose another --kv-cache-dtype")
    slots = getattr(spec, "num_head_slots", None)
    if slots is not None:
        _refuse(
            layer,
            kind,
            f"in which the attention backend packs {spec.num_kv_heads} KV heads into {slots} slots",
            "choose another --attention-backend, or another --kv-cache-dtype",
        )


def token_ranks(vllm_config: "VllmConfig", spec: Any, layer: str) -> int:
    """Return how many ranks share the tokens of a block of vLLM's cache manager (context parallelism).

    Raises:
        UnsupportedError: they share those of a window, of which nobody knows what vLLM keeps.
    """
    ranks, _ = context_parallel(vllm_config)
    if ranks == 1 or is_state(spec) or not getattr(spec, "dcp_sharded", True):
        return 1
    if (kept := retention(spec)).window or kept.chunk:
        _refuse(
            layer,
            type(spec).__name__,
            f"of which ranks would share a window (decode_context_parallel_size = {ranks})",
            "set decode_context_parallel_size to 1",
        )
    return ranks


def is_state(spec: Any) -> bool:
    """Return whether blocks of ``spec`` hold states, not tokens."""
    return type(spec).__name__ == "MambaSpec" or is_ring(spec)


def is_ring(spec: Any) -> bool:
    """Return whether ``spec`` keeps one block of a request, with rows of its last tokens.

    What a ring holds after some tokens is a state: it cannot be taken back by more tokens than it has spare rows.
    """
    return type(spec).__name__ in _RINGS


def _tokens_per_row(spec: Any) -> Any:
    """Return how many tokens a row stands for, of releases that call it so or otherwise."""
    return getattr(spec, "tokens_per_state", getattr(spec, "compress_ratio", 1))


def _check_states(spec: Any, layer: str) -> None:
    if not current().serves_states:
        _refuse(layer, "MambaSpec", "which holds states of requests: served with vLLM 0.30 and later only")
    if spec.mamba_cache_mode not in _STATE_MODES:
        known = " and ".join(_STATE_MODES)
        _refuse(
            layer,
            "MambaSpec",
            f"in mamba_cache_mode {spec.mamba_cache_mode!r}; known are {known}",
            "choose one of these with --mamba-cache-mode, or leave it out",
        )


def _refuse(layer: str, kind: str, what: str, way_out: str = "serve this model without PDConnector") -> None:
    raise UnsupportedError(
        f"the KV cache of layer {layer!r} is a {kind}, {what}. PDConnector serves {', '.join(SERVED)} caches; {way_out}"
    )


def layer_spec(vllm_config: "VllmConfig", name: str, spec: Any, *, one_precision: bool = True) -> LayerSpec:
    """Return what a served ``spec`` states of the cache of layer ``name``.

    ``one_precision``: all caches that take each other's blocks have the same dtype and quantization.
    """
    packed_bytes = getattr(spec, "state_content_bytes", None)
    # vllm-ascend's sparse indexer has all tokens on every rank, though its block table is one of shared tokens.
    has_all = getattr(spec, "sfa_dcp_replicated_indexer_size", 1) > 1
    ranks = 1 if has_all else token_ranks(vllm_config, spec, name)
    # vLLM 0.23 gives MLA's latent vectors a V of their size, which they do not have.
    items = int(spec.head_size) + (0 if _is_mla(spec) else int(getattr(spec, "head_size_v", spec.head_size)))
    return LayerSpec(
        heads=int(spec.num_kv_heads),
        total_heads=_total_heads(vllm_config, spec, name),
        token_bytes=items * int(spec.dtype.itemsize) if packed_bytes is None else int(packed_bytes),
        page_bytes=int(spec.page_size_bytes),
        dtype=spec.dtype,
        parts=_parts(vllm_config, name, spec) if packed_bytes is None else (),
        packing=_packing(spec),
        optional=one_precision and _may_be_missing(vllm_config, name),
        tokens_per_row=int(_tokens_per_row(spec)),
        packed_parts=_packed_parts(vllm_config, spec),
        is_by_part=_is_of_ascend(spec),
        token_ranks=ranks,
        token_interleave=int(vllm_config.parallel_config.cp_kv_cache_interleave_size) if ranks > 1 else 1,
    )


def retention(spec: Any, ranks: int = 1) -> Retention:
    """Return what vLLM keeps of a request in layers of a served ``spec``, whose tokens ``ranks`` share.

    A window or chunk of a full attention cache is only one of the kernels: vLLM keeps all blocks.
    """
    kind, tokens = type(spec).__name__, int(spec.block_size) * ranks
    if is_ring(spec):
        return Retention(RING_TOKENS, states=True)
    if is_state(spec):
        # The state that a step begins with, and that of a checkpoint which it hands out.
        earlier = 1 + int(getattr(spec, "num_prefill_checkpoint_blocks", 0))
        return Retention(
            tokens, states=True, earlier_states=earlier if spec.mamba_cache_mode == "align" else 0,
            draft_states=int(spec.num_speculative_blocks),
        )  # fmt: skip
    if kind == "ChunkedLocalAttentionSpec":
        return Retention(tokens, chunk=int(spec.attention_chunk_size))
    window = int(spec.sliding_window) + int(getattr(spec, "extra_retained_tokens", 0)) if kind in _SLIDING else 0
    return Retention(tokens, window)


def _is_mla(spec: Any) -> bool:
    return any("MLA" in kind.__name__ for kind in type(spec).__mro__)


def _is_of_ascend(spec: Any) -> bool:
    return type(spec).__name__ in SERVED_ON_ASCEND


def _parts(vllm_config: "VllmConfig", layer: str, spec: Any) -> tuple[tuple[str, int], ...]:
    """Return the parts of a token's content: K and V, or MLA's latent vector and rotary key.

    Some layers, of Inkling for one, keep all that they have of a token as K, and state a V of no items. They round K up
    to a power of two, and tell by ``stream_ranges`` what of it they use.
    """
    if not _is_mla(spec):
        keys = int(spec.head_size)
        owner = vllm_config.compilation_config.static_forward_context.get(layer)
        used = max((first + size for first, size in getattr(owner, "stream_ranges", ())), default=keys)
        parts = ("k", used), (PADDING, keys - used), ("v", int(getattr(spec, "head_size_v", spec.head_size)))
        return tuple(part for part in parts if part[1])
    if type(spec).__name__ == "AscendSFAIndexerCacheSpec":
        return (("index", int(spec.head_size)),)
    latent, rope = _mla_sizes(vllm_config)
    is_split = bool(latent and rope and latent + rope == int(spec.head_size))
    return (("mla_latent", latent), ("mla_rope", rope)) if is_split else ()


def _mla_sizes(vllm_config: "VllmConfig") -> tuple[int, int]:
    """Return the items of a latent vector and of a rotary key, 0 if the model has none."""
    model = vllm_config.model_config.hf_text_config
    return int(getattr(model, "kv_lora_rank", None) or 0), int(getattr(model, "qk_rope_head_dim", None) or 0)


def _packed_parts(vllm_config: "VllmConfig", spec: Any) -> "tuple[tuple[str, torch.dtype, int], ...]":
    """Return what a row of vllm-ascend's quantised MLA cache holds.

    The latent vector in a byte an item, the rotary key, and a scale for each ``_TILE`` items of the latent vector.
    Source: ``get_sfa_qsfa_packed_head_dim`` in ``vllm_ascend.attention.utils``.
    """
    if not getattr(spec, "cache_sparse_sfa_c8", False):
        return ()
    import torch  # noqa: PLC0415

    latent, rope = _mla_sizes(vllm_config)
    scales = latent // _TILE
    parts = (
        ("mla_latent", spec.dtype, latent),
        ("mla_rope", torch.bfloat16, rope),
        ("mla_scale", torch.float32, scales),
    )
    size = sum(int(dtype.itemsize) * items for _, dtype, items in parts)
    return tuple(part for part in parts if part[2]) if size == int(spec.head_size) * int(spec.dtype.itemsize) else ()


def _packing(spec: Any) -> str:
    """Return a name for a block's inner order, if the strides of its tensor do not tell where each token is.

    A sparse indexer's block, and any of DeepSeek V4's, has the values of all tokens first and then their scales.
    vllm-ascend passes a tensor for each. What releases and GPUs order or scale in other ways has other names.
    """
    if _is_of_ascend(spec):
        return ""
    is_scaled = _is_mla(spec) and int(spec.head_size) * int(spec.dtype.itemsize) == _SCALED_INDEX
    if is_scaled and current().scales_indexer_by_mx():
        return "mx_sparse_indexer"
    if str(getattr(getattr(spec, "cache_role", ""), "value", "")) == "indexer":
        return "sparse_indexer"
    version = str(getattr(spec, "model_version", None) or "")
    by_token = getattr(spec, "state_content_bytes", None) in _V41_ROWS and current().keeps_scales_by_token
    return f"{version}_by_token" if version and by_token else version


def _total_heads(vllm_config: "VllmConfig", spec: Any, layer: str) -> int:
    """Return the KV heads of a layer over all ranks. vLLM states only those of this rank.

    Several heads of a rank are its own. A single one may be held by several ranks, and by how many is known if the
    configuration of the model, or of the draft that the layer is of, allows one answer only. Otherwise each rank is
    taken to hold a head of its own, which is right between engines of equal size, and refused between others for their
    unequal totals.
    """
    held, (tp_size, _) = int(spec.num_kv_heads), engine_ranks(vllm_config)
    if _is_mla(spec):
        return held
    if held > 1 or tp_size == 1:
        return held * tp_size
    drafts = _is_of_draft(vllm_config, layer)
    model = vllm_config.speculative_config.draft_model_config if drafts else vllm_config.model_config
    possible = {total for total in _stated_heads(model) if total and tp_size % total == 0}
    return possible.pop() if len(possible) == 1 else tp_size


_HEADS_KEY = re.compile(r"kv_heads|key_value_heads|n_head_kv|kv_n_heads|attention_groups|query_group")
_QUERY_HEADS_OF_ONE = "n_heads_in_group"  # query heads that share a KV head, by layer


def _stated_heads(model: Any) -> Iterator[int]:
    """Yield every number of KV heads that a model's configuration mentions."""
    yield int(model.get_total_num_kv_heads())
    config = model.hf_text_config.to_dict()
    yield from numbers_under(_HEADS_KEY, config)
    query_heads = config.get("num_attention_heads")
    if isinstance(query_heads, int):
        yield from (
            query_heads // shared for shared in numbers_under(re.compile(_QUERY_HEADS_OF_ONE), config) if shared
        )


def numbers_under(name: re.Pattern[str], value: Any, *, named: bool = False) -> Iterator[int]:
    """Yield the integers in ``value`` below a key that ``name`` is found in; all of them if ``named``."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from numbers_under(name, inner, named=named or bool(name.search(str(key))))
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from numbers_under(name, inner, named=named)
    elif named and isinstance(value, int) and not isinstance(value, bool):
        yield value


def _may_be_missing(vllm_config: "VllmConfig", layer: str) -> bool:
    """Return whether what a layer holds has no influence on the output, so that a pull may go without it.

    That is so of the layers that draft tokens, if drafts are sampled greedily: vLLM then accepts a draft token with the
    probability that the model gives it, and samples from the model otherwise, whatever was drafted. Where draft
    probabilities are part of that decision, they must be numbers; but a draft whose cache lacks the prefix attends to
    what its blocks last held, which with cache groups of several precisions may not be numbers at all. FLy (vLLM 0.33)
    takes tokens that only the draft would say: of a draft that has seen nothing of the prompt, too.

    A layer that is not recognized as a draft's is treated as one of the model's.
    """
    speculative = vllm_config.speculative_config
    if speculative is None or speculative.draft_sample_method != "greedy":
        return False
    is_exact = getattr(speculative, "rejection_sample_method", "standard") in _EXACT
    return is_exact and _is_of_draft(vllm_config, layer)


def _is_of_draft(vllm_config: "VllmConfig", layer: str) -> bool:
    """Return whether a layer only drafts tokens, by vLLM's mark or by its name.

    vLLM numbers a draft's layers after those of the model, or gives them a prefix of their own. Where a draft numbers
    its layers from 0, only the mark tells: 0.31 and 0.32 set it in their second model runner, later releases always.
    """
    if vllm_config.speculative_config is None:
        return False
    if getattr(vllm_config.compilation_config.static_forward_context.get(layer), "is_draft_layer", False):
        return True
    names = layer.split(".")
    numbered = re.search(r"layers\.(\d+)\b", layer)
    beyond = numbered and int(numbered[1]) >= vllm_config.model_config.get_total_num_hidden_layers()
    return bool(beyond) or "mtp" in names or "draft_model" in names
