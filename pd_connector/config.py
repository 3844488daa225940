"""The connector's settings: the keys of ``kv_connector_extra_config``, typed and validated.

Every key has a default. An unknown key or an invalid value stops the start; the error names the nearest valid key, what
took the place of an old one, or the value and the rule it breaks.
"""

import difflib
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator

from pd_connector.engine_limits import ENGINE_LIMITS
from pd_connector.old_settings import OLD_SETTINGS
from pd_connector.recipe_keys import RecipeKeys
from transfer.peers import AllowedPeers, listen_address, parse_address

Seconds = Annotated[float, Field(ge=0.1, le=86400, allow_inf_nan=False)]
LeaseSeconds = Annotated[float, Field(ge=0.1, le=ENGINE_LIMITS.max_lease_age_s, allow_inf_nan=False)]
M = TypeVar("M", bound=BaseModel)
Port = Annotated[int, Field(ge=0, le=65535)]
HostTransfers = Literal["off", "auto", "always"]
#: In ``peers``: whoever has read the beginning of a prompt.
READERS = "readers"


class ConfigError(ValueError):
    """A setting in ``kv_connector_extra_config`` is unknown or invalid."""


def _devices(text: str) -> str:
    names = [name.strip() for name in text.split(",")] if text else []  # Mooncake passes over what is unknown
    if not all(names):
        raise ValueError("a name is empty; write them as in /sys/class/infiniband, such as mlx5_0,mlx5_1")
    return ",".join(names)


def _peers(peers: list[str]) -> list[str]:
    for peer in peers:
        if peer != READERS:
            parse_address(peer)
    return peers


def _rules(rules: list[str]) -> list[str]:
    AllowedPeers(rules)
    return rules


class Tuning(BaseModel):
    """How bytes are read, in numbers: for those who measure. The defaults suit the transport."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    staging_bytes: Annotated[int, Field(ge=0, le=1 << 40)] = Field(
        default=128 * 1024 * 1024,
        description="Size of each decode worker's staging buffer, through which scattered bytes are read in "
        "fewer reads; 0 turns it off. On CUDA and NPU it is device memory beside vLLM's, and pulls "
        "may take as much again. With host_transfers there is a second one, in host memory.",
    )
    descriptors_per_call: Annotated[int, Field(ge=1, le=65536)] | None = Field(
        default=None,
        description="Descriptors passed to the transfer engine in one call. Default: 256 for tcp and rdma, 1024 "
        "for ascend.",
    )
    max_descriptors_in_flight: Annotated[int, Field(ge=1, le=65536)] | None = Field(
        default=None,
        description="Descriptors in flight to one peer at most. Default: 1024 for tcp, whose transport breaks "
        "above that, else 2048.",
    )
    longest_poll_us: Annotated[float, Field(ge=1, le=100_000, allow_inf_nan=False)] | None = Field(
        default=None,
        description="Longest sleep between two looks at a read, in microseconds. Default: 500 for tcp, 200 for "
        "rdma, 1000 for ascend.",
    )
    descriptor_cost_us: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = Field(
        default=None,
        description="Cost of a descriptor, in microseconds, by which reads are planned, but not those over CUDA IPC. "
        "Default: 12 for tcp (measured), 2 for rdma, 5 for ascend (estimates).",
    )
    byte_cost_ns: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = Field(
        default=None,
        description="Cost of a byte, in nanoseconds, by which reads are planned, but not those over CUDA IPC. Default: "
        "0.75 for tcp (measured), else 0.04 (an estimate).",
    )


class ConnectorConfig(BaseModel):
    """The settings of one vLLM instance. The field descriptions are their documentation."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    host: Annotated[str, Field(min_length=1), AfterValidator(lambda host: listen_address(host, 0).host)] | None = Field(
        default=None,
        description="Address at which other machines reach this one; on engines that prefill, one of the "
        "machine's own. With workers on several machines, set VLLM_HOST_IP on each instead. Default: VLLM_HOST_IP, "
        "else that of the default route.",
    )
    port: Port = Field(
        default=0,
        description="Port of a prefill engine's control channel, plus the engine's data-parallel index; 0 takes the "
        "kv_port of --kv-transfer-config or, without one, any free port.",
    )
    bootstrap_port: Port = Field(
        default=0,
        description="Port, plus the data-parallel index, at which a prefill engine answers GET /query with its control "
        "channel's address, for routers of MooncakeConnector's contract; 0 is off. Set port, too.",
    )
    protocol: Literal["auto", "tcp", "rdma", "ascend"] = Field(
        default="auto",
        description="Transport of the transfer engine, the same on both sides. auto: ascend on NPU; tcp on CPU; rdma "
        "on CUDA, or tcp with a warning if there is no RDMA device and devices names none, and with a secret also "
        "CUDA IPC between engines of one host.",
    )
    devices: Annotated[str, AfterValidator(_devices)] = Field(
        default="", description="Network devices for rdma, comma-separated; empty lets the transfer engine choose."
    )
    cross_layer_blocks: bool = Field(
        default=True,
        description="Keep all layers of a block together where the attention backend allows it, so that a block "
        "is one transfer.",
    )
    lease_ttl_s: LeaseSeconds = Field(
        default=30.0,
        description="How long a prefill engine keeps a finished prompt's blocks after a decode engine's last "
        "message about it.",
    )
    claim_timeout_s: LeaseSeconds = Field(
        default=120.0,
        description="How long a prefill engine keeps a finished prompt's blocks before a decode engine's first "
        "message about it; lease_ttl_s, if that is longer.",
    )
    queue_timeout_s: Seconds = Field(
        default=120.0,
        description="How long a decode engine keeps a lease while its request waits for blocks, and waits for a prompt "
        "that it follows to reach the prefill engine or make progress there. Then kv_load_failure_policy decides.",
    )
    pull_timeout_s: Seconds = Field(
        default=60.0,
        description="How long a pull may take, its time in the queue included. While the prompt is computed, "
        "progress restarts the clock.",
    )
    tuning: Tuning = Field(
        default=Tuning(),
        description=f"Numbers by which bytes are read, for those who measure: {', '.join(Tuning.model_fields)}. "
        "Pulls on CUDA and NPU take up to twice staging_bytes (128 MiB) of the device, beside vLLM.",
    )
    cpu_bytes_to_use: Annotated[int, Field(ge=0)] = Field(
        default=0,
        description="Host memory for KV blocks, in bytes, of all workers of this engine together; 0 is none. Needs "
        "vLLM's prefix caching.",
    )
    cpu_store: Literal["eager", "lazy"] = Field(
        default="eager",
        description="When blocks are copied to host memory. eager: when computed; lazy: when vLLM is about to evict "
        "them, which copies less and may come too late for some.",
    )
    host_transfers: HostTransfers = Field(
        default="off",
        description="Whether transfers use host memory. auto: a prefill engine moves leases there that nobody reads "
        "yet when blocks are short, and prompts that it finds there are read there; a decode engine pulls there what "
        "its device has no blocks for. always: the same, but it pulls every prompt there.",
    )
    serve_prefixes: bool = Field(
        default=False,
        description="Whether other engines may pull the beginnings of their prompts from this engine's caches "
        "(docs/prefixes.md). On a decode engine this opens a control channel (port). Needs vLLM's prefix caching.",
    )
    peers: Annotated[list[str], Field(max_length=16), AfterValidator(_peers)] | None = Field(
        default=None,
        description="Engines with serve_prefixes to ask for what this engine's caches lack of a prompt: host:port of "
        "their control channels; readers is the engine that pulled the prompt's beginning from here. An empty list "
        "asks only the engine that a request's prefixes_at names. Needs vLLM's prefix caching. Default: nobody.",
    )
    pool: Annotated[str, AfterValidator(lambda pool: str(parse_address(pool)))] | None = Field(
        default=None,
        description="host:port of this machine's mooncake_client, through which engines of a model share host blocks "
        "that outlive them (docs/pool.md). Needs cpu_bytes_to_use. Default: none.",
    )
    drain_timeout_s: Annotated[float, Field(ge=0, le=86400, allow_inf_nan=False)] = Field(
        default=5.0,
        description="How long a prefill engine stays up after SIGTERM and its last request, for decode engines "
        "that have yet to read. Needs --shutdown-timeout, and ends 3 s before it.",
    )
    model_check: Literal["weights", "config", "off"] = Field(
        default="weights",
        description="What must be equal besides architecture, data types and caches' shape. weights: the model's "
        "configuration, rotary tables, scales, and some bytes of every tensor in safetensors, also of LoRA adapters; "
        "config: the same without tensors; off: nothing.",
    )
    canary: Literal["refuse", "warn", "off"] | None = Field(
        default=None,
        description="Whether a decode engine proves each prefill engine, and each adapter on it, by its first "
        "prompt. refuse: nothing is pulled from one that differs; warn: the log says so; off: nothing is compared. "
        "Default: refuse; warn if model_check is off.",
    )
    verify: bool = Field(
        default=False,
        description="Compare checksums in every pull, for a new setup. If decode engines verify, prefill engines must, "
        "too.",
    )
    secret_file: str | None = Field(
        default=None,
        min_length=1,
        description="File with the secret that all engines share, for the control channel: 16 bytes or more, mode 600. "
        "Default: PD_CONNECTOR_SECRET in the environment, else none.",
    )
    allowed_peers: Annotated[list[str], Field(min_length=1), AfterValidator(_rules)] | None = Field(
        default=None,
        description="Prefill engines that a decode engine may contact: IP addresses, networks such as "
        "10.1.0.0/16, host names. Default: whichever a request names.",
    )

    @property
    def canary_mode(self) -> Literal["refuse", "warn", "off"]:
        """``canary``, or its default."""
        return self.canary or ("warn" if self.model_check == "off" else "refuse")

    @model_validator(mode="after")
    def _check_together(self) -> Self:
        if self.host_transfers != "off" and not self.cpu_bytes_to_use:
            raise ValueError(
                f"host_transfers = {self.host_transfers!r}: cpu_bytes_to_use is 0, so there is no host memory for "
                "transfers; set cpu_bytes_to_use, or host_transfers to 'off'"
            )
        if self.pool is not None and not self.cpu_bytes_to_use:
            raise ValueError(
                f"pool = {self.pool!r}: cpu_bytes_to_use is 0, and blocks come to a pool, and from there, by way of "
                "host memory; set cpu_bytes_to_use, or leave pool out"
            )
        allowed = AllowedPeers(self.allowed_peers)
        for peer in self.peers or ():
            if peer != READERS and allowed.excludes(parse_address(peer).host):
                raise ValueError(f"peers: {peer!r} is none of allowed_peers, {self.allowed_peers}; add it there")
        return self


def parse_config(extra_config: dict[str, Any]) -> ConnectorConfig:
    """Return the validated settings of ``kv_connector_extra_config``.

    Raises:
        ConfigError: a key is unknown (names the nearest valid one, or what took its place), or a value is invalid
            (names it and the rule).
    """
    recipe_keys(extra_config)
    return _validated(
        ConnectorConfig, {key: extra_config[key] for key in extra_config.keys() - RecipeKeys.model_fields}
    )


def recipe_keys(extra_config: Mapping[str, Any]) -> RecipeKeys:
    """Return what a recipe of vllm-ascend says of its engines in ``kv_connector_extra_config``.

    Raises:
        ConfigError: a value is invalid.
    """
    return _validated(RecipeKeys, {key: extra_config[key] for key in extra_config.keys() & RecipeKeys.model_fields})


def _validated(model: type[M], values: Mapping[str, Any]) -> M:
    try:
        return model.model_validate(values)
    except ValidationError as error:
        problems = [
            _explain([str(key) for key in item["loc"]], item["type"], item["msg"], item["input"])
            if item["loc"]
            else item["msg"].removeprefix("Value error, ")
            for item in error.errors()
        ]
        raise ConfigError("kv_connector_extra_config: " + "; ".join(problems)) from None


#: Of the object that vLLM's --kv-transfer-config is.
_BESIDE = ("engine_id", "kv_buffer_device", "kv_connector_module_path", "kv_load_failure_policy", "kv_role")


def _explain(loc: Sequence[str], kind: str, message: str, value: Any) -> str:
    message = message.removeprefix("Value error, ")
    if loc[0] in RecipeKeys.model_fields:
        return f"{'.'.join(loc)} = {value!r}: {message[0].lower()}{message[1:]}"
    model: type[BaseModel] = Tuning if len(loc) > 1 and loc[0] == "tuning" else ConnectorConfig
    prefix = "" if model is ConnectorConfig else "tuning."
    key = loc[1] if prefix else loc[0]
    if kind != "extra_forbidden":
        meaning = model.model_fields[key].description or ""
        rule = f"{message[0].lower()}{message[1:]} ({meaning.split('. ')[0].rstrip('.')})"
        return f"{prefix}{key} = {value!r}: {rule}"
    if not prefix and key in OLD_SETTINGS:
        return f"{key} is no setting any more: {OLD_SETTINGS[key]}"
    if not prefix and key in _BESIDE:
        return f"{key} is no setting of this connector but one of vLLM's: write it beside kv_connector_extra_config"
    valid = list(model.model_fields)
    near = difflib.get_close_matches(key, valid, n=1)
    hint = f", did you mean {prefix + near[0]!r}?" if near else f"; valid keys are {', '.join(valid)}"
    return f"unknown key {prefix + key!r}{hint}"
