"""vLLM's KV cache groups, and what it knows about a worker's caches besides their tensors, as plain data.

Imports no vLLM at module level, so that ``worker.caches`` needs none.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from pd_connector.vllm.cache_specs import (
    LayerSpec,
    Retention,
    check_served,
    is_state,
    layer_spec,
    retention,
    token_ranks,
)
from pd_connector.vllm.cpu.head_order import HeadOrder, find_order
from pd_connector.vllm.releases.installed import current, tested_releases
from pd_connector.vllm.state_specs import StateSpec, state_spec

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec


@dataclass(frozen=True)
class Ranks:
    """A worker's place among the workers of its engine."""

    tp_rank: int
    tp_size: int
    pp_rank: int
    pp_size: int
    pcp_rank: int = 0  # among those that share the computation of a prompt
    pcp_size: int = 1
    dcp_rank: int = 0  # among those that share the tokens of a cache

    @property
    def index(self) -> int:
        """This worker's index, 0 <= index < world_size."""
        return (self.pp_rank * self.pcp_size + self.pcp_rank) * self.tp_size + self.tp_rank

    @property
    def world_size(self) -> int:
        """Number of workers of the engine."""
        return self.tp_size * self.pcp_size * self.pp_size


@dataclass(frozen=True)
class GroupSpec:
    """A KV cache group as vLLM's cache manager sees it."""

    layer_names: tuple[str, ...]
    block_tokens: int  # of all ranks together that share the tokens of a request
    window: int  # tokens of a sliding window, which are kept of a request; 0: all are, unless there are chunks
    blocks: int  # in vLLM's pool
    #: What vLLM states of each layer's cache, by layer.
    layers: Mapping[str, LayerSpec] = field(default_factory=dict)
    #: By layer, how the kernels order a head's block, if the strides of the tensors do not show it.
    orders: Mapping[str, HeadOrder] = field(default_factory=dict)
    #: Whether vLLM's layout has the heads before the tokens.
    heads_first: bool = False
    chunk: int = 0  # tokens of a chunk, the last of which is kept of a request; 0: no chunks
    #: By layer, as far as known: the tokens that attention sees; 0: all.
    seen_tokens: Mapping[str, int] = field(default_factory=dict)
    holds_states: bool = False
    #: What vLLM states of each layer's states, by layer, in the place of ``layers``.
    states: Mapping[str, StateSpec] = field(default_factory=dict)


def needs_zeroing(kv_cache_config: "KVCacheConfig") -> bool:
    """Return whether kernels may take what an earlier use has left in a block for numbers, so that vLLM zeroes it.

    In a single group of several precisions, as of MLA and its indexer, each layer has a place of its own in all blocks.
    vLLM says of its workers that they need zeroing there, too, but its scheduler, which orders it, knows a group by one
    of its layers.
    """
    groups = kv_cache_config.kv_cache_groups
    has_states = any(is_state(spec) for group in groups for spec in _specs_by_layer(group).values())
    return bool(kv_cache_config.needs_kv_cache_zeroing) and (len(groups) > 1 or has_states)


def cache_groups(vllm_config: "VllmConfig", kv_cache_config: "KVCacheConfig") -> tuple[GroupSpec, ...]:
    """Return the KV cache groups in vLLM's order.

    Raises:
        UnsupportedError: a group's cache is not of a kind that the connector serves, such as Mamba state.
    """
    groups: list[GroupSpec] = []
    one_precision = len(kv_cache_config.kv_cache_groups) == 1 or not current().has_mixed_precision(kv_cache_config)
    layout = current().layout_of(kv_cache_config) or ""
    heads_first = "H" in layout and layout.index("H") < layout.index("N")
    for group in kv_cache_config.kv_cache_groups:
        by_layer = _specs_by_layer(group)
        kept = _kept(vllm_config, by_layer)
        layers, states = {}, {}
        for name in group.layer_names:
            if kept.states:
                states[name] = state_spec(vllm_config, name, by_layer[name])
            else:
                layers[name] = layer_spec(vllm_config, name, by_layer[name], one_precision=one_precision)
        blocks = int(kv_cache_config.num_blocks)
        groups.append(
            GroupSpec(
                tuple(group.layer_names),
                kept.block_tokens,
                kept.window,
                blocks,
                layers,
                heads_first=heads_first,
                chunk=kept.chunk,
                seen_tokens=_seen_tokens(vllm_config, by_layer, group.layer_names),
                holds_states=kept.states,
                states=states,
            )
        )
    return tuple(groups)


def _seen_tokens(vllm_config: "VllmConfig", specs: Mapping[str, Any], layers: Sequence[str]) -> dict[str, int]:
    """Return how many tokens attention of each layer sees, 0 if all, as far as that is known.

    Without the hybrid cache manager, vLLM gives layers with and without a window one specification, which states the
    window. Whether a layer has it then only the layer knows.
    """
    seen = {}
    for name in layers:
        spec = specs[name]
        stated = int(getattr(spec, "sliding_window", None) or 0)
        if is_state(spec) or getattr(spec, "attention_chunk_size", None):
            continue  # some of the layers see chunks
        if not stated or retention(spec).window:
            seen[name] = stated
        elif hasattr(layer := vllm_config.compilation_config.static_forward_context.get(name), "sliding_window"):
            seen[name] = int(layer.sliding_window or 0)
    return seen


def retentions(vllm_config: "VllmConfig", kv_cache_config: "KVCacheConfig") -> tuple[Retention, ...]:
    """Return what vLLM keeps of a request in each KV cache group, in vLLM's order.

    Raises:
        UnsupportedError: as ``cache_groups``.
    """
    return tuple(_kept(vllm_config, _specs_by_layer(group)) for group in kv_cache_config.kv_cache_groups)


def _kept(vllm_config: "VllmConfig", specs: Mapping[str, Any]) -> Retention:
    """Return what vLLM keeps of a request in a group of layers."""
    name, spec = next(iter(specs.items()))
    return retention(spec, token_ranks(vllm_config, spec, name))


def _specs_by_layer(group: "KVCacheGroupSpec") -> Mapping[str, Any]:
    """Return the specifications of a group's layers; of one without a name if all are in another pipeline stage.

    Raises:
        UnsupportedError: as ``cache_groups``.
    """
    spec = group.kv_cache_spec
    layers = group.layer_names or ["layers of another pipeline stage"]
    by_layer: Mapping[str, Any] = getattr(spec, "kv_cache_specs", None) or dict.fromkeys(layers, spec)
    for name, each in by_layer.items():
        check_served(group, each, name)
    return by_layer


def with_head_orders(
    vllm_config: "VllmConfig", group: GroupSpec, caches: Mapping[str, "torch.Tensor"], *, on_cpu: bool
) -> GroupSpec:
    """Return ``group`` with the orders of the CPU kernels, if those write its caches.

    Raises:
        RuntimeError, NotImplementedError: as ``head_order``.
    """
    if not on_cpu or group.holds_states or vllm_config.model_config.use_mla:
        return group
    forms = {name: (*caches[name].shape[-2:], caches[name].dtype) for name in group.layer_names}
    found = {
        (block_tokens, content, dtype): head_order(vllm_config, block_tokens, content // 2, dtype)
        for block_tokens, content, dtype in set(forms.values())
    }
    return replace(group, orders={name: found[form] for name, form in forms.items()})


def head_order(vllm_config: "VllmConfig", block_tokens: int, head_size: int, cache_dtype: "torch.dtype") -> HeadOrder:
    """Return where this machine's CPU attention kernels put K and V in a head's block of ``block_tokens`` tokens.

    Raises:
        RuntimeError: this cannot be determined; the message says why.
        NotImplementedError: vLLM has no kernel for these values.
    """
    try:
        write = current().cpu_writer(vllm_config, block_tokens, head_size)
    except (ImportError, AttributeError) as missing:
        raise RuntimeError(
            f"cannot call this vLLM's CPU attention kernels to see how they order K and V in a block ({missing}); use "
            f"a vLLM that this connector is tested with: {tested_releases()}"
        ) from missing
    return find_order(write, block_tokens, head_size, vllm_config.model_config.dtype, cache_dtype)
