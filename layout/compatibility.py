"""What two engines must agree on before a byte moves, checked field by field.

Errors name the field and both values, because their reader has two command lines to compare.
"""

from collections.abc import Iterable
from dataclasses import fields

from layout.geometry import CacheGroup, ModelIdentity, Plane, WorkerGeometry
from layout.layer_numbers import ROTARY, TEMPERATURE, differences


class IncompatibleCachesError(ValueError):
    """The local engine cannot use KV blocks of the remote one."""


UNEQUAL_TOTALS = (
    "If the model's layers differ in their number of KV heads, it is not known which ranks share a head: start both "
    "engines with the same --tensor-parallel-size, or with fewer ranks than any layer has heads"
)

#: Fields of an identity that are not simply equal or not.
_COMPARED_APART = frozenset({"numbers", "draft_digest"})
_MAX_TOLD = 8  # differences in a message: every layer of a model may have one

_HINTS = {
    "config_digest": (
        "the two engines serve different models or revisions, or have unequal --hf-overrides or --mm-processor-kwargs, "
        "or read a model that has no config.json on the machine by different releases of transformers: then serve it "
        "from a directory, or set model_check to off"
    ),
    "weights_digest": (
        "the two engines serve different weights of one architecture, or their connectors are of different versions; "
        "if one reads the same weights from files of another form, set model_check to config"
    ),
    "cache_dtype": "start both with the same --kv-cache-dtype and --dtype",
    "model_dtype": "start both with the same --dtype",
    ROTARY: (
        "start both engines with the same --max-model-len and --hf-overrides: models with LongRoPE take other factors "
        "above their original length. If these are equal, the two releases of vLLM build this table differently (YaRN "
        "in 0.23 and in later ones): run the same release on both"
    ),
    TEMPERATURE: (
        "vLLM decides it by --max-model-len (above 32768) and the generation config: start both engines with the same"
    ),
}

_STATE_DTYPE = ": start both with the same --mamba-cache-dtype, --mamba-ssm-cache-dtype and --dtype"
_INDEX_DTYPE = ": start both with the same indexer_kv_dtype in --attention-config"
OTHER_DRAFT = (
    "; the layer drafts tokens: start both engines with the same model in --speculative-config, or the remote one "
    "without drafts"
)
_PACKING = ": kernels order or scale a block in another way; run the same release of vLLM on the same kind of processor"
_RING_ROWS = (
    ": a ring of a request's last tokens has rows for drafts, or fills a block; start both with the same "
    "num_speculative_tokens in --speculative-config, and with the same --block-size"
)


def check_models(local: ModelIdentity, remote: ModelIdentity) -> None:
    """Raise unless both engines compute the same keys and values, as far as their identities tell.

    An empty digest means "unknown" and is not compared, nor is a number that one side does not know.

    Raises:
        IncompatibleCachesError: names every field that differs, with both values.
    """
    wrong = [
        (name, f"{name} is {getattr(local, name)!r} here and {getattr(remote, name)!r} there")
        for name in (field.name for field in fields(ModelIdentity) if field.name not in _COMPARED_APART)
        if getattr(local, name) != getattr(remote, name)
        and not (name.endswith("_digest") and "" in (getattr(local, name), getattr(remote, name)))
    ]
    wrong += [(each.name, each.text) for each in differences(local.numbers, remote.numbers)]
    if wrong:
        hints = "; ".join(hint for key, hint in _HINTS.items() if any(name.startswith(key) for name, _ in wrong))
        told = "; ".join(text for _, text in wrong[:_MAX_TOLD])
        more = f"; and {len(wrong) - _MAX_TOLD} more" if len(wrong) > _MAX_TOLD else ""
        raise IncompatibleCachesError(
            f"the remote engine's model differs: {told}{more}" + (f" ({hints})" if hints else "")
        )


def check_transports(local: WorkerGeometry, remotes: Iterable[WorkerGeometry]) -> None:
    """Raise unless the transfer engines of all remote workers speak the local one's transport.

    An empty transport means "unknown" and is not compared.

    Raises:
        IncompatibleCachesError: names the remote rank and both transports.
    """
    for remote in remotes:
        if local.transport and remote.transport and local.transport != remote.transport:
            raise IncompatibleCachesError(
                f"the transfer engine's protocol is {local.transport!r} here and {remote.transport!r} on the remote "
                f"engine (TP rank {remote.tp_rank}, PP rank {remote.pp_rank}); start both with the same protocol in "
                "kv_connector_extra_config: auto takes what suits each machine, and tcp works on all but NPUs"
            )


def check_planes(local: Plane, remote: Plane) -> None:
    """Raise unless moving (layer, head, token) runs turns bytes of ``remote`` into bytes of ``local``.

    Raises:
        IncompatibleCachesError: names the field and both values.
    """
    for field in ("content", "dtype", "item_size", "packing", "tokens_per_row"):
        ours, theirs = getattr(local, field), getattr(remote, field)
        if ours != theirs:
            raise IncompatibleCachesError(
                f"KV cache field {field!r} of part {local.part!r}, layer {local.layers[0]!r} is {ours!r} here and "
                f"{theirs!r} on the remote engine; it must be equal on both" + _way_out(field, local)
            )
    if local.total_heads and remote.total_heads and local.total_heads != remote.total_heads:
        raise IncompatibleCachesError(
            f"layer {local.layers[0]!r} has {local.total_heads} KV heads over all ranks here and {remote.total_heads} "
            f"on the remote engine. {UNEQUAL_TOTALS}"
        )
    if local.packing and local.block_tokens != remote.block_tokens:
        raise IncompatibleCachesError(
            f"block size is {local.block_tokens} tokens here and {remote.block_tokens} on the remote engine, and the "
            f"kernels' packing {local.packing!r} cannot be cut by token; start both with the same --block-size"
        )
    if local.tokens_per_row > 1 and max(local.tokens.ranks, remote.tokens.ranks) > 1:
        raise IncompatibleCachesError(
            f"ranks of an engine share the tokens of layer {local.layers[0]!r}, a row of which stands for "
            f"{local.tokens_per_row} tokens: which rows a rank has is not known; start both without "
            "context parallelism (--decode-context-parallel-size and --prefill-context-parallel-size 1)"
        )
    uneven = [side for side in (local, remote) if side.tokens.ranks > 1 and side.tokens.interleave % side.block_tokens]
    if local.packing and local.tokens != remote.tokens and uneven:
        raise IncompatibleCachesError(
            f"ranks of an engine share a prompt in runs of {uneven[0].tokens.interleave} tokens, and the kernels' "
            f"packing {local.packing!r} cannot be cut by token; start both with the same "
            "--decode-context-parallel-size and --cp-kv-cache-interleave-size, or both with "
            f"--cp-kv-cache-interleave-size {local.block_tokens}"
        )


def _way_out(field: str, plane: Plane) -> str:
    """Return which option makes a field of a plane equal on both engines; empty if it is not known."""
    if field == "packing":
        return _PACKING
    if field == "content" and plane.dtype and plane.total_heads == 1:  # every rank has all of a ring
        return _RING_ROWS
    if field in ("item_size", "dtype"):
        return _STATE_DTYPE if plane.dtype else _INDEX_DTYPE if plane.part == "index" else ""
    return OTHER_DRAFT if plane.optional else ""


def check_windows(local: CacheGroup, remote: CacheGroup, layers: Iterable[str]) -> None:
    """Raise unless attention of ``layers`` sees as many tokens on both sides. What one side does not know is left out.

    Raises:
        IncompatibleCachesError: names the layer and both values.
    """
    for layer in layers:
        ours, theirs = local.seen_tokens.get(layer), remote.seen_tokens.get(layer)
        if ours is not None and theirs is not None and ours != theirs:
            raise IncompatibleCachesError(
                f"attention of layer {layer!r} sees {_span(ours)} here and {_span(theirs)} on the remote engine; it "
                "must be equal on both"
            )


def check_states(local: CacheGroup, remote: CacheGroup, here: Plane, there: Plane) -> None:
    """Raise unless both planes hold tokens, or both hold states of as many rows.

    Raises:
        IncompatibleCachesError: names the part, a layer and both values.
    """
    what = f"part {here.part!r} of layer {here.layers[0]!r}"
    if local.states != remote.states:
        ours, theirs = ("states" if group.states else "tokens" for group in (local, remote))
        raise IncompatibleCachesError(
            f"{what} holds {ours} here and {theirs} on the remote engine: they serve different models"
        )
    if local.states and here.block_tokens != there.block_tokens:
        raise IncompatibleCachesError(
            f"{what} has {here.block_tokens} rows here and {there.block_tokens} on the remote engine: the two models' "
            "convolutions see different numbers of tokens"
        )


def _span(window: int) -> str:
    return f"a window of {window} tokens" if window else "all tokens"
