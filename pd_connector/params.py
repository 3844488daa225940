"""``kv_transfer_params``: what a prefill engine tells a decode engine about a request, by way of the router.

The keys that existing routers know are kept (``do_remote_prefill``, ``remote_engine_id``, ``remote_block_ids``, ...);
routers pass the others on as they are. A decode engine gets them from a client, so every field is checked.
"""

import hashlib
from typing import Annotated, Any

import msgspec

# Bounded and printable: these values come from clients and go into messages and logs.
Name = Annotated[str, msgspec.Meta(min_length=1, max_length=128, pattern=r"^[\x21-\x7e]+\Z")]
Host = Annotated[str, msgspec.Meta(min_length=1, max_length=255, pattern=r"^[A-Za-z0-9._:%\[\]-]+\Z")]
BlockIds = Annotated[tuple[Annotated[int, msgspec.Meta(ge=0, lt=2**31)], ...], msgspec.Meta(max_length=2**20)]


class ParamsError(ValueError):
    """The ``kv_transfer_params`` of a request are missing something, wrong, or belong to another request."""


class RemotePrefill(msgspec.Struct, frozen=True):
    """A prompt whose KV blocks wait on a prefill engine, under a lease."""

    remote_engine_id: Name
    remote_host: Host
    remote_port: Annotated[int, msgspec.Meta(ge=1, le=65535)]
    # Per cache group, one entry a block; 0 marks a block that is not held.
    remote_block_ids: Annotated[tuple[BlockIds, ...], msgspec.Meta(max_length=64)]
    remote_num_tokens: Annotated[int, msgspec.Meta(ge=1)]  # prompt tokens whose KV the blocks hold
    lease_id: Name
    lease_ttl_s: Annotated[float, msgspec.Meta(ge=0.1, le=86400)]
    prompt_digest: Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{0,64}\Z")]  # see ``prompt_digest``; empty: not known
    # Tokens of a block of each cache group; empty: as many as here.
    remote_block_sizes: Annotated[
        tuple[Annotated[int, msgspec.Meta(ge=1, lt=2**31)], ...], msgspec.Meta(max_length=64)
    ] = ()
    remote_request_id: str = ""  # for routers
    tp_size: int = 0  # for routers

    def to_params(self) -> dict[str, Any]:
        """The JSON-ready form that the prefill engine answers with."""
        return {"do_remote_prefill": True, "do_remote_decode": False, **msgspec.to_builtins(self)}


def is_prefill_leg(params: dict[str, Any] | None) -> bool:
    """Whether the request asks this engine to prefill for another one."""
    return bool(params and params.get("do_remote_decode"))


def is_decode_leg(params: dict[str, Any] | None) -> bool:
    """Whether the request asks this engine to pull the prompt's KV blocks from another one."""
    return bool(params and params.get("do_remote_prefill"))


def parse_remote_prefill(params: dict[str, Any]) -> RemotePrefill:
    """Read the params of a decode leg.

    Raises:
        ParamsError: naming the field, the value and the rule.
    """
    try:
        remote = msgspec.convert(params, RemotePrefill)
    except msgspec.ValidationError as error:
        raise ParamsError(
            f"kv_transfer_params are not what a PDConnector prefill engine answered with: {error}. Pass the "
            "kv_transfer_params of its response on unchanged"
        ) from None
    longest = max(map(len, remote.remote_block_ids), default=0)
    if longest > remote.remote_num_tokens:
        raise ParamsError(f"remote_block_ids names {longest} blocks for a prompt of {remote.remote_num_tokens} tokens")
    return remote


def check_prompt(remote: RemotePrefill, num_tokens: int, digest: str) -> None:
    """Check that the params of a decode leg are those of its prompt.

    Args:
        remote: what the params say.
        num_tokens: prompt tokens of the request.
        digest: ``prompt_digest`` of the request.

    Raises:
        ParamsError: naming both values.
    """
    if remote.remote_num_tokens != num_tokens:
        raise ParamsError(
            f"the prefill engine computed {remote.remote_num_tokens} prompt tokens and this request has {num_tokens}: "
            "the two legs must carry the same prompt, through the same tokenizer and chat template"
        )
    if remote.prompt_digest and digest and remote.prompt_digest != digest:
        raise ParamsError(
            f"the prefilled prompt (digest {remote.prompt_digest}) is not the one of this request ({digest}): "
            "kv_transfer_params belong to one prompt and cannot be used for another"
        )


def prompt_digest(token_ids: list[int] | None, extra: tuple[str, ...]) -> str:
    """16 hexadecimal digits that tell prompts apart; empty for a prompt without token ids.

    ``extra`` names what else shapes the KV cache: LoRA adapter, multimodal inputs.
    """
    if not token_ids:
        return ""
    digest = hashlib.blake2b(digest_size=8)
    digest.update(msgspec.msgpack.encode((token_ids, extra)))
    return digest.hexdigest()


def contents_digest(remote: RemotePrefill) -> str:
    """32 hexadecimal digits of what a lease holds: the block ids, the number of tokens and the prompt's digest.

    A prefill engine makes it of what it answered with, a decode engine of what it was given; they differ if somebody
    altered any of these between them.
    """
    held = msgspec.msgpack.encode((remote.remote_block_ids, remote.remote_num_tokens, remote.prompt_digest))
    return hashlib.blake2b(held, digest_size=16).hexdigest()
