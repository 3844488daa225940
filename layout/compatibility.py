"""What two engines must agree on before a byte moves, checked field by field.

Errors name the field and both values, because their reader has two command lines to compare.
"""

from collections.abc import Iterable
from dataclasses import fields

from layout.geometry import CacheGroup, ModelIdentity, Plane, WorkerGeometry


class IncompatibleCachesError(ValueError):
    """The local engine cannot use KV blocks of the remote one."""


UNEQUAL_TOTALS = (
    "If the model's layers differ in their number of KV heads, it is not known which ranks share a head: start both "
    "engines with the same --tensor-parallel-size, or with fewer ranks than any layer has heads"
)

_HINTS = {
    "config_digest": (
        "the two engines serve different models or revisions, or read one that has no config.json on the machine by "
        "different releases of transformers: then serve it from a directory, or set model_check to off"
    ),
    "weights_digest": "the two engines serve different weights of one architecture",
    "cache_dtype": "start both with the same --kv-cache-dtype and --dtype",
    "model_dtype": "start both with the same --dtype",
}


def check_models(local: ModelIdentity, remote: ModelIdentity) -> None:
    """Raise unless both engines serve the same model with the same KV cache dtype.

    An empty digest means "unknown" and is not compared.

    Raises:
        IncompatibleCachesError: names every field that differs, with both values.
    """
    differing = [
        field.name
        for field in fields(ModelIdentity)
        if getattr(local, field.name) != getattr(remote, field.name)
        and not (field.name.endswith("_digest") and "" in (getattr(local, field.name), getattr(remote, field.name)))
    ]
    if differing:
        values = "; ".join(
            f"{name} is {getattr(local, name)!r} here and {getattr(remote, name)!r} there" for name in differing
        )
        hints = "; ".join(_HINTS[name] for name in differing if name in _HINTS)
        raise IncompatibleCachesError(f"the remote engine's model differs: {values}" + (f" ({hints})" if hints else ""))


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
                "kv_connector_extra_config"
            )


def check_planes(local: Plane, remote: Plane) -> None:
    """Raise unless moving (layer, head, token) runs turns bytes of ``remote`` into bytes of ``local``.

    Raises:
        IncompatibleCachesError: names the field and both values.
    """
    for field in ("content", "item_size", "packing"):
        ours, theirs = getattr(local, field), getattr(remote, field)
        if ours != theirs:
            raise IncompatibleCachesError(
                f"KV cache field {field!r} of part {local.part!r}, layer {local.layers[0]!r} is {ours!r} here and "
                f"{theirs!r} on the remote engine; it must be equal on both"
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


def _span(window: int) -> str:
    return f"a window of {window} tokens" if window else "all tokens"
