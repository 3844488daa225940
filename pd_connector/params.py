"""``kv_transfer_params``: what a prefill engine tells a decode engine about a request, through the router.

Uses the keys that existing routers know (``do_remote_prefill``, ``remote_engine_id``, ``remote_block_ids``, ...);
routers pass all others on unchanged. Decode engines get the params from clients, so every field is checked.
"""

import hashlib
from typing import Annotated, Any

import msgspec

# These values come from clients and appear in messages and logs, so they are bounded and printable.
Name = Annotated[str, msgspec.Meta(min_length=1, max_length=128, pattern=r"^[\x21-\x7e]+\Z")]
Host = Annotated[str, msgspec.Meta(min_length=1, max_length=255, pattern=r"^[A-Za-z0-9._:%\[\]-]+\Z")]
BlockIds = Annotated[tuple[Annotated[int, msgspec.Meta(ge=0, lt=2**31)], ...], msgspec.Meta(max_length=2**20)]


class ParamsError(ValueError):
    """The ``kv_transfer_params`` of a request are incomplete, invalid, or those of another request."""


class RemotePrefill(msgspec.Struct, frozen=True):
    """A prompt whose KV blocks a prefill engine holds under a lease."""

    remote_engine_id: Name
    remote_host: Host
    remote_port: Annotated[int, msgspec.Meta(ge=1, le=65535)]
    # By cache group, an id for each block; 0 marks a block that is not held.
    remote_block_ids: Annotated[tuple[BlockIds, ...], msgspec.Meta(max_length=64)]
    remote_num_tokens: Annotated[int, msgspec.Meta(ge=1)]  # prompt tokens whose KV the blocks hold
    lease_id: Name
    lease_ttl_s: Annotated[float, msgspec.Meta(ge=0.1, le=86400)]
    prompt_digest: Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{0,64}\Z")]  # see ``prompt_digest``; empty if unknown
    # Block size of each cache group, in tokens; empty if the same as on the decode engine.
    remote_block_sizes: Annotated[
        tuple[Annotated[int, msgspec.Meta(ge=1, lt=2**31)], ...], msgspec.Meta(max_length=64)
    ] = ()
    remote_request_id: str = ""  # for routers
    tp_size: int = 0  # for routers

    def to_params(self) -> dict[str, Any]:
        """Return the JSON-ready form that the prefill engine answers with."""
        return {"do_remote_prefill": True, "do_remote_decode": False, **msgspec.to_builtins(self)}


def is_malformed(params: object) -> bool:
    """Return whether a request's params are neither absent nor a JSON object. vLLM does not check what clients send."""
    return params is not None and not isinstance(params, dict)


def is_prefill_leg(params: object) -> bool:
    """Return whether a request asks this engine to prefill for another one."""
    return isinstance(params, dict) and bool(params.get("do_remote_decode"))


def is_decode_leg(params: object) -> bool:
    """Return whether a request asks this engine to pull its prompt's KV blocks from another one."""
    return isinstance(params, dict) and bool(params.get("do_remote_prefill"))


def parse_remote_prefill(params: object) -> RemotePrefill:
    """Return the validated params of a decode leg.

    Raises:
        ParamsError: a field is missing or invalid; the message names it and the rule.
    """
    try:
        remote = msgspec.convert(params, RemotePrefill)
    except msgspec.ValidationError as error:
        raise ParamsError(
            f"kv_transfer_params are not what a PDConnector prefill engine returns: {error}. Pass the "
            "kv_transfer_params of its response on unchanged"
        ) from None
    longest = max(map(len, remote.remote_block_ids), default=0)
    if longest > remote.remote_num_tokens:
        raise ParamsError(
            f"remote_block_ids has {longest} blocks for a prompt of {remote.remote_num_tokens} tokens, more than one "
            "per token. Pass the kv_transfer_params of the prefill engine's response on unchanged"
        )
    return remote


def check_prompt(remote: RemotePrefill, num_tokens: int, digest: str) -> None:
    """Raise unless a decode leg's params belong to its prompt, which has ``num_tokens`` tokens and this digest.

    Raises:
        ParamsError: the number of tokens or the digest differs; the message names both values.
    """
    if remote.remote_num_tokens != num_tokens:
        raise ParamsError(
            f"the prefill engine computed {remote.remote_num_tokens} prompt tokens and this request has {num_tokens}: "
            "both legs must carry the same prompt and use the same tokenizer and chat template"
        )
    if remote.prompt_digest and digest and remote.prompt_digest != digest:
        raise ParamsError(
            f"the prefilled prompt (digest {remote.prompt_digest}) is not the prompt of this request ({digest}): "
            "kv_transfer_params belong to one prompt and cannot be used for another"
        )


def prompt_digest(token_ids: list[int] | None, extra: tuple[str, ...]) -> str:
    """Return 16 hexadecimal digits that tell prompts apart; empty for a prompt without token ids.

    ``extra`` names what else shapes the KV cache, such as a LoRA adapter.
    """
    if not token_ids:
        return ""
    digest = hashlib.blake2b(digest_size=8)
    digest.update(msgspec.msgpack.encode((token_ids, extra)))
    return digest.hexdigest()


def contents_digest(remote: RemotePrefill) -> str:
    """Return 32 hexadecimal digits over a lease's contents: block ids, number of tokens and prompt digest.

    A prefill engine computes it from its answer, a decode engine from what it received. The two differ if any of these
    was altered on the way.
    """
    held = msgspec.msgpack.encode((remote.remote_block_ids, remote.remote_num_tokens, remote.prompt_digest))
    return hashlib.blake2b(held, digest_size=16).hexdigest()
