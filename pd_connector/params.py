"""``kv_transfer_params``: what a prefill engine tells a decode engine about a request, through the router.

Uses the keys that existing routers know (``do_remote_prefill``, ``remote_engine_id``, ``remote_block_ids``, ...);
routers pass all others on unchanged. Decode engines get the params from clients, so every field is checked.
"""

import hashlib
import re
from dataclasses import dataclass
from typing import Annotated, Any, NamedTuple

import msgspec

from transfer.errors import BadAddress
from transfer.peers import Address, parse_address

# These values come from clients and appear in messages and logs, so they are bounded and printable.
Name = Annotated[str, msgspec.Meta(min_length=1, max_length=128, pattern=r"^[\x21-\x7e]+\Z")]
_Port = Annotated[int, msgspec.Meta(ge=1, le=65535)]
_Digest = Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{0,64}\Z")]  # empty if unknown
Host = Annotated[str, msgspec.Meta(min_length=1, max_length=255, pattern=r"^[A-Za-z0-9._:%\[\]-]+\Z")]
#: An engine id that carries the address of the control channel; an IPv6 address is in brackets.
_ID_WITH_ADDRESS = re.compile(r"(?P<id>[^@]*)@(?P<host>\[[^\]]*\]|[^@:\[\]]+):(?P<port>[0-9]{1,5})")
BlockIds = Annotated[tuple[Annotated[int, msgspec.Meta(ge=0, lt=2**31)], ...], msgspec.Meta(max_length=2**20)]

LayerName = Annotated[str, msgspec.Meta(min_length=1, max_length=256, pattern=r"^[\x21-\x7e]+\Z")]
Layers = Annotated[tuple[LayerName, ...], msgspec.Meta(max_length=4096)]

#: Cache groups of an engine. vLLM makes them as small as the rarest kind of layer: one of its kind, each its own.
MAX_GROUPS = 512


class ParamsError(ValueError):
    """The ``kv_transfer_params`` of a request are incomplete, invalid, or those of another request."""


@dataclass(frozen=True, slots=True)
class PromptIdentity:
    """What tells a request's prompt from others, on either engine."""

    tokens: int
    digest: str  # see ``prompt_digest``
    adapter: str = ""  # name of its LoRA adapter, for messages; empty if it has none
    adapter_digest: str = ""  # of what the adapter holds; empty if unknown
    media_digest: str = ""  # as in ``RemotePrefill``


class EngineAddress(NamedTuple):
    """A prefill engine, and where its control channel is. Comes from a client."""

    engine_id: str
    host: str
    port: int

    @property
    def at(self) -> Address:
        """Where its control channel is."""
        return Address(self.host, self.port)

    def __str__(self) -> str:
        return f"engine {self.engine_id} at {self.at}"


class RemotePrefill(msgspec.Struct, frozen=True):
    """A prompt whose KV blocks a prefill engine holds under a lease."""

    remote_engine_id: Name
    remote_host: Host
    remote_port: _Port
    # By cache group, an id for each block; 0 marks a block that is not held.
    remote_block_ids: Annotated[tuple[BlockIds, ...], msgspec.Meta(max_length=MAX_GROUPS)]
    remote_num_tokens: Annotated[int, msgspec.Meta(ge=1, lt=2**31)]  # prompt tokens whose KV the blocks hold
    lease_id: Name
    lease_ttl_s: Annotated[float, msgspec.Meta(ge=0.1, le=86400)]
    prompt_digest: _Digest  # see ``prompt_digest``
    # Block size of each cache group, in tokens; empty if the same as on the decode engine.
    remote_block_sizes: Annotated[
        tuple[Annotated[int, msgspec.Meta(ge=1, lt=2**31)], ...], msgspec.Meta(max_length=MAX_GROUPS)
    ] = ()
    # Names of each cache group's layers, which engines may group in other ways; empty if one group holds all and keeps
    # every token.
    remote_layers: Annotated[tuple[Layers, ...], msgspec.Meta(max_length=MAX_GROUPS)] = ()
    remote_attempt: Annotated[int, msgspec.Meta(ge=0, lt=2**31)] = 0  # how many times the prompt was started over
    #: What the LoRA adapter holds, under whose name the prompt was computed; empty if it has none, or that is unknown.
    adapter_digest: _Digest = ""
    #: How the prefill engine hashes images and other media, a colon, and those of the prompt; empty if unknown.
    media_digest: Annotated[str, msgspec.Meta(pattern=r"^([0-9a-f]{1,64}:[0-9a-f]{1,64})?\Z")] = ""
    remote_request_id: str = ""  # for routers
    tp_size: int = 0  # for routers
    #: For routers: the prompt's last token was left to the decode engine, so the answer's token is none of the text.
    prompt_is_cut: bool = False

    @property
    def engine(self) -> EngineAddress:
        """The prefill engine."""
        return EngineAddress(self.remote_engine_id, self.remote_host, self.remote_port)

    def to_params(self) -> dict[str, Any]:
        """Return the JSON-ready form that the prefill engine answers with."""
        return {"do_remote_prefill": True, "do_remote_decode": False, **msgspec.to_builtins(self)}


class RemoteTransfer(msgspec.Struct, frozen=True):
    """A prompt that a prefill engine computes, will compute or has computed under a name that the router gave it."""

    transfer_id: Name
    remote_host: Host
    remote_port: _Port
    # Empty: whichever engine is there.
    remote_engine_id: Annotated[str, msgspec.Meta(max_length=128, pattern=r"^[\x21-\x7e]*\Z")] = ""

    @property
    def label(self) -> str:
        """The transfer and where it is, for people."""
        return f"transfer {self.transfer_id} at {Address(self.remote_host, self.remote_port)}"


def is_malformed(params: object) -> bool:
    """Return whether a request's params are neither absent nor a JSON object. vLLM does not check what clients send."""
    return params is not None and not isinstance(params, dict)


def is_prefill_leg(params: object) -> bool:
    """Return whether a request asks this engine to prefill for another one."""
    return isinstance(params, dict) and bool(params.get("do_remote_decode"))


def is_decode_leg(params: object) -> bool:
    """Return whether a request asks this engine to pull its prompt's KV blocks from another one."""
    return isinstance(params, dict) and bool(params.get("do_remote_prefill"))


def prefixes_at(params: object) -> Address | None:
    """Return the engine whose caches hold the beginning of a prompt, as a router says; None if it does not.

    Raises:
        ParamsError: ``prefixes_at`` is not ``host:port``.
    """
    hint = params.get("prefixes_at") if isinstance(params, dict) else None
    if hint is None:
        return None
    try:
        return parse_address(hint if isinstance(hint, str) else repr(hint))
    except BadAddress as error:
        raise ParamsError(f"prefixes_at: {error}. Pass on what an engine with serve_prefixes has answered") from None


def wants_prefixes_at(params: object) -> bool:
    """Return whether a decode leg's router wants to know where the conversation can be found when it goes on.

    It sends the key, with null or anything else: who does not know it must not pass this engine's address to clients.
    """
    return is_decode_leg(params) and isinstance(params, dict) and "prefixes_at" in params


def prefill_transfer_id(params: object) -> str:
    """Return the name that a router gave a prefill leg; empty if it gave none.

    Raises:
        ParamsError: it is not 1 to 128 printable ASCII characters without spaces.
    """
    name = params.get("transfer_id") if isinstance(params, dict) else None
    if name is None:
        return ""
    try:
        return msgspec.convert(name, Name)
    except msgspec.ValidationError as error:
        raise ParamsError(
            f"transfer_id {name!r:.200}: {error}. A router names a transfer by 1 to 128 printable ASCII characters "
            "without spaces, the same in both legs, and anew for each request"
        ) from None


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
    check_groups(remote)
    longest = max(map(len, remote.remote_block_ids), default=0)
    if longest > remote.remote_num_tokens:
        raise ParamsError(
            f"remote_block_ids has {longest} blocks for a prompt of {remote.remote_num_tokens} tokens, more than one "
            "per token. Pass the kv_transfer_params of the prefill engine's response on unchanged"
        )
    return remote


def check_groups(remote: RemotePrefill) -> None:
    """Raise unless it is known which layers each block table of a prompt is of.

    Raises:
        ParamsError: it is not; the message says what differs.
    """
    tables = len(remote.remote_block_ids)
    for key, named in (("remote_layers", remote.remote_layers), ("remote_block_sizes", remote.remote_block_sizes)):
        if named and len(named) != tables:
            raise ParamsError(
                f"{key} is of {len(named)} cache groups, and remote_block_ids has {tables} block tables. Pass the "
                "kv_transfer_params of the prefill engine's response on unchanged"
            )
    if tables > 1 and not remote.remote_layers:
        raise ParamsError(
            f"remote_block_ids has {tables} block tables, and remote_layers does not say which layers each is of: the "
            "prefill engine's connector is older than this one. Use the same version on both sides"
        )


def unusable_keys(params: object) -> tuple[str, ...]:
    """Return the keys of params that make a request neither leg and mean something: of a contract not spoken here.

    A router that has nothing to say may send flags that are false, or nulls.
    """
    if not isinstance(params, dict):
        return ()
    given = [str(key) for key, value in params.items() if value is not None and key != "prefixes_at"]
    return () if any(key in given for key in ("do_remote_decode", "do_remote_prefill")) else tuple(given)


def parse_decode_leg(params: object) -> RemotePrefill | RemoteTransfer:
    """Return the validated params of a decode leg, by either contract: what a prefill engine answered, or a name.

    A key that is null counts as absent for the second one, because routers send nulls.

    Raises:
        ParamsError: a field is missing or invalid, or the contracts are mixed, or it is another contract; the message
            names it and the way out.
    """
    given = {key: value for key, value in params.items() if value is not None} if isinstance(params, dict) else {}
    if "transfer_id" not in given:
        if "metaserver" in given and "lease_id" not in given:
            raise ParamsError(
                f"kv_transfer_params have a metaserver ({given['metaserver']!r:.200}): they are of the contract of "
                "MooncakeLayerwiseConnector, whose decode engine asks the router there for the prefill leg. Use a "
                "router that sends the prefill leg itself: pd-proxy, or vllm-ascend's "
                "load_balance_proxy_server_example.py in the place of load_balance_proxy_layerwise_server_example.py"
            )
        return parse_remote_prefill(params)
    mixed = [key for key in ("lease_id", "remote_block_ids") if given.get(key)]
    if mixed:
        raise ParamsError(
            f"kv_transfer_params have a transfer_id and {' and '.join(mixed)}: they either name a transfer that both "
            "legs share, or are what the prefill engine answered. Send the one or pass on the other, unchanged"
        )
    return _parse_transfer(given)


def _parse_transfer(given: dict[Any, Any]) -> RemoteTransfer:
    """Return the transfer that is named by params without nulls."""
    engine_id = given.get("remote_engine_id")
    if isinstance(engine_id, str) and (found := _ID_WITH_ADDRESS.fullmatch(engine_id)):
        address = {"remote_host": found["host"], "remote_port": int(found["port"])}
        if not given.keys() & address.keys():
            given = given | address
        given = given | {"remote_engine_id": found["id"]}
    missing = [key for key in ("remote_host", "remote_port") if key not in given]
    if missing:
        raise ParamsError(
            "kv_transfer_params with a transfer_id must say where the prefill engine's control channel is: missing "
            f"{' and '.join(missing)}. Send them, or a remote_engine_id of the form id@host:port"
        )
    try:
        return msgspec.convert(given, RemoteTransfer)
    except msgspec.ValidationError as error:
        raise ParamsError(
            f"kv_transfer_params do not name a transfer of a PDConnector prefill engine: {error}. Needed are "
            "transfer_id (printable, at most 128 characters), remote_host and remote_port"
        ) from None


_ALIKE = (
    "if they do, both servers must make the same prompt of it: tokenizer, chat template, its defaults and, where it "
    "names the day, clock and time zone (TZ; VLLM_SYSTEM_START_DATE for gpt-oss)"
)


def check_prompt(remote: RemotePrefill, prompt: PromptIdentity) -> None:
    """Raise unless a decode leg's params belong to its prompt. What either side does not know is not compared.

    Raises:
        ParamsError: the number of tokens or a digest differs; the message names both values.
    """
    if remote.remote_num_tokens != prompt.tokens:
        raise ParamsError(
            f"the prefill engine computed {remote.remote_num_tokens} prompt tokens and this request has "
            f"{prompt.tokens}: both legs must carry one request; {_ALIKE}"
        )
    if _differ(remote.prompt_digest, prompt.digest):
        raise ParamsError(
            f"the prefilled prompt (digest {remote.prompt_digest}) is not the prompt of this request "
            f"({prompt.digest}): kv_transfer_params belong to one request; {_ALIKE}"
        )
    if _differ(remote.adapter_digest, prompt.adapter_digest):
        raise ParamsError(
            f"LoRA adapter {prompt.adapter!r:.200} is another one on the prefill engine (digest "
            f"{remote.adapter_digest}) than here ({prompt.adapter_digest}): load the same on both, or roll a new one "
            "out under a new name"
        )
    theirs, ours = remote.media_digest, prompt.media_digest
    if theirs.partition(":")[0] == ours.partition(":")[0] and _differ(theirs, ours):
        raise ParamsError(
            f"the images or other media of the prefilled prompt (digest {theirs}) are not those of this request "
            f"({ours}): both legs must carry the same"
        )


def _differ(theirs: str, ours: str) -> bool:
    return bool(theirs and ours) and theirs != ours


def prompt_digest(token_ids: list[int] | None, extra: tuple[str, ...]) -> str:
    """Return 16 hexadecimal digits that tell prompts apart; empty for a prompt of which nothing is known.

    ``extra`` names what else shapes the KV cache, such as a LoRA adapter.
    """
    if not (token_ids or extra):
        return ""
    digest = hashlib.blake2b(digest_size=8)
    digest.update(msgspec.msgpack.encode((token_ids or [], extra)))
    return digest.hexdigest()


def contents_digest(remote: RemotePrefill) -> str:
    """Return 32 hexadecimal digits over a lease's contents: block ids, number of tokens, digests and attempt.

    A prefill engine computes it from its answer, a decode engine from what it received. The two differ if any of these
    was altered on the way.
    """
    contents: tuple[object, ...] = (remote.remote_block_ids, remote.remote_num_tokens, remote.prompt_digest)
    if remote.remote_attempt:
        contents = (*contents, remote.remote_attempt)
    if remote.adapter_digest or remote.media_digest:
        contents = (*contents, remote.adapter_digest, remote.media_digest)
    return hashlib.blake2b(msgspec.msgpack.encode(contents), digest_size=16).hexdigest()
