"""The connector's settings: the keys of ``kv_connector_extra_config``, typed and validated.

Every key has a default. An unknown key or an invalid value stops the start; the error names the nearest valid key, what
took the place of an old one, or the value and the rule it breaks.
"""

import difflib
from collections.abc import Sequence
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from pd_connector.old_settings import OLD_SETTINGS
from transfer.peers import AllowedPeers

Seconds = Annotated[float, Field(ge=0.1, le=86400, allow_inf_nan=False)]
Port = Annotated[int, Field(ge=0, le=65535)]
HostTransfers = Literal["off", "auto", "always"]


class ConfigError(ValueError):
    """A setting in ``kv_connector_extra_config`` is unknown or invalid."""


class Tuning(BaseModel):
    """How bytes are read, in numbers: for those who measure. The defaults suit the transport."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    staging_bytes: Annotated[int, Field(ge=0)] = Field(
        default=128 * 1024 * 1024,
        description="Size of each decode worker's staging buffer, through which scattered bytes are read in fewer, "
        "wider reads; 0 reads everything directly into place. The buffer is host memory on CPU, where its benefit was "
        "measured; on CUDA and NPU it is device memory, on top of what vLLM allocates, and pulls may take as much "
        "again while they copy. With host_transfers, each worker has a second one of this size, for pulls to host "
        "memory: host memory on all platforms, on top of cpu_bytes_to_use.",
    )
    descriptors_per_call: Annotated[int, Field(ge=1, le=65536)] | None = Field(
        default=None,
        description="Number of descriptors passed to the transfer engine in one call. Default: 256 for tcp (measured) "
        "and rdma, 1024 for ascend (from their source).",
    )
    max_descriptors_in_flight: Annotated[int, Field(ge=1, le=65536)] | None = Field(
        default=None,
        description="Maximum number of descriptors in flight to one peer. Default: 1024 for tcp, whose transport "
        "breaks above that; 2048 for rdma and ascend (from their source).",
    )
    longest_poll_us: Annotated[float, Field(ge=1, le=100_000, allow_inf_nan=False)] | None = Field(
        default=None,
        description="Longest sleep between two looks at a read that is under way, in microseconds. Shorter ones take "
        "processor time from the transfer engine's threads, longer ones leave the wire idle when a read lasts no "
        "longer. Default: 500 for tcp (measured), 200 for rdma, 1000 for ascend (from their source).",
    )
    descriptor_cost_us: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = Field(
        default=None,
        description="Cost of a descriptor in the transfer engine, in microseconds, used to plan reads and to bound "
        "what is in flight. Default: 12 for tcp (measured), 2 for rdma, 5 for ascend (estimates).",
    )
    byte_cost_ns: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = Field(
        default=None,
        description="Cost of a byte, in nanoseconds, used to plan reads and to bound what is in flight. Default: 0.75 "
        "for tcp (measured), 0.04 for rdma and ascend (estimates).",
    )


class ConnectorConfig(BaseModel):
    """The settings of one vLLM instance. The field descriptions are their documentation."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    host: str | None = Field(
        default=None,
        min_length=1,
        description="Address at which other machines reach this one, for the control channel and the transfer engine. "
        "On engines that prefill it must be an address of the machine itself. If an engine's workers run on several "
        "machines, leave it unset and set VLLM_HOST_IP on each. Default: vLLM's own choice (VLLM_HOST_IP, else the "
        "address of the default route). Prefill and decode engines of different address families reach each other over "
        "TCP if the decode engine's machine has an IPv6 address.",
    )
    port: Port = Field(
        default=0,
        description="Port of a prefill engine's control channel, to which the engine's data-parallel index is added; "
        "0 lets the system choose a free port.",
    )
    bootstrap_port: Port = Field(
        default=0,
        description="Port at which a prefill engine tells routers by HTTP (GET /query) where its control channel is, "
        "as vLLM's MooncakeConnector does, for routers that send both legs at once by that connector's contract; the "
        "engine's data-parallel index is added to it. 0 tells nobody. Set port, too: such routers ask only once.",
    )
    protocol: Literal["auto", "tcp", "rdma", "ascend"] = Field(
        default="auto",
        description="Transport of the transfer engine, the same on prefill and decode engines. auto: rdma on CUDA, or "
        "tcp with a warning if the machine has no RDMA device and devices names none; ascend on NPU; tcp on CPU.",
    )
    devices: str = Field(
        default="", description="Network devices for rdma, comma-separated; empty lets the transfer engine choose."
    )
    cross_layer_blocks: bool = Field(
        default=True,
        description="Keep all layers of a block together in memory where the attention backend allows it, so that a "
        "block is one transfer.",
    )
    lease_ttl_s: Seconds = Field(
        default=30.0,
        description="How long a prefill engine keeps a finished prompt's blocks after each word of the decode engine "
        "about it.",
    )
    claim_timeout_s: Seconds = Field(
        default=120.0,
        description="How long a prefill engine keeps a finished prompt's blocks before the first word of a decode "
        "engine about it, which comes when the request has passed that server's API process; lease_ttl_s, if that is "
        "longer.",
    )
    queue_timeout_s: Seconds = Field(
        default=120.0,
        description="How long a decode engine keeps a prompt leased while its request waits for blocks of its own, and "
        "how long it waits for a prefill engine to receive a prompt that it follows (transfer_id), to begin with it, "
        "and to get further. Then it gives the prompt up, and the request fails or computes it, by "
        "kv_load_failure_policy.",
    )
    pull_timeout_s: Seconds = Field(
        default=60.0,
        description="How long a pull may take, including its time in the queue, before it fails. While the prefill "
        "engine computes the prompt, the time begins anew whenever more of it is computed or read than ever before; "
        "so a prompt that it preempts and starts over again and again is given up.",
    )
    tuning: Tuning = Field(
        default=Tuning(),
        description="An object of numbers by which bytes are read, for those who measure: "
        + ", ".join(Tuning.model_fields),
    )
    cpu_bytes_to_use: Annotated[int, Field(ge=0)] = Field(
        default=0,
        description="Host memory, in bytes, of all workers of this engine together, for KV blocks that the device "
        "evicts; 0 keeps none. They are copied back instead of computed again. Needs vLLM's prefix caching.",
    )
    cpu_store: Literal["eager", "lazy"] = Field(
        default="eager",
        description="When blocks are copied to host memory. eager: as soon as they are computed; lazy: when vLLM is "
        "about to evict them, which copies less but may come too late for some.",
    )
    host_transfers: HostTransfers = Field(
        default="off",
        description="Whether transfers may begin and end in host memory (cpu_bytes_to_use), which is then registered "
        "with the transfer engine. auto: a prefill engine lets others read it, leases that nobody reads yet move there "
        "and free the device's blocks, when requests wait for blocks or leases hold more than a tenth of them, and "
        "decode engines that follow a prompt read what the prefill engine finds there without waiting until it is "
        "loaded; a decode engine pulls a prompt there if its device has no blocks for it. always: the same, but a "
        "decode engine pulls every prompt there, at once, from which it is loaded when vLLM has blocks, so that no "
        "prefill engine waits for this engine's device. off: none of it.",
    )
    drain_timeout_s: Annotated[float, Field(ge=0, le=86400, allow_inf_nan=False)] = Field(
        default=5.0,
        description="How long a prefill engine that was told to stop (SIGTERM) stays up after its last request, for "
        "decode engines that have yet to read from it. vLLM allows this only with --shutdown-timeout, and it ends 3 s "
        "before that timeout.",
    )
    model_check: Literal["weights", "config", "off"] = Field(
        default="weights",
        description="What must be equal on both sides besides the shape of the caches. weights: the model's "
        "configuration, what the loaded model computes with (rotary tables, scales), and some bytes of every tensor of "
        "the model and of LoRA adapters, if they are safetensors; config: the same without tensors; off: none of it, "
        "for models known to produce the same KV cache from different files, such as differently quantized ones.",
    )
    canary: Literal["refuse", "warn", "off"] | None = Field(
        default=None,
        description="Whether a decode engine proves each prefill engine, and each adapter on it, before it uses what "
        "that computes: it computes the first prompt of a block or more itself, pulls its last 512 tokens at most as "
        "well, and compares the two, layer by layer. refuse: nothing is pulled from one whose keys and values differ; "
        "warn: the log says so, and they are used; off: nothing is compared. Default: refuse, with model_check off "
        "warn.",
    )
    verify: bool = Field(
        default=False,
        description="Compare checksums in every pull, to commission a new setup. Prefill workers take them of leased "
        "blocks, decode workers of what arrived, and a pull fails if they differ. A decode engine that verifies needs "
        "prefill engines that do too.",
    )
    secret_file: str | None = Field(
        default=None,
        min_length=1,
        description="File with the secret that all engines of a deployment share; it turns on authentication and "
        "encryption of the control channel. It must hold at least 16 bytes and have mode 600. Default: the environment "
        "variable PD_CONNECTOR_SECRET, else no authentication.",
    )
    allowed_peers: Annotated[list[str], Field(min_length=1)] | None = Field(
        default=None,
        description="Prefill engines that a decode engine may contact: IP addresses, networks such as 10.1.0.0/16, or "
        "host names. Default: whichever a request names.",
    )

    @property
    def canary_mode(self) -> Literal["refuse", "warn", "off"]:
        """``canary``, or its default."""
        return self.canary or ("warn" if self.model_check == "off" else "refuse")

    @model_validator(mode="after")
    def _check_host_memory(self) -> Self:
        if self.host_transfers != "off" and not self.cpu_bytes_to_use:
            raise ValueError(
                f"host_transfers = {self.host_transfers!r}: cpu_bytes_to_use is 0, so there is no host memory for "
                "transfers; set cpu_bytes_to_use, or host_transfers to 'off'"
            )
        return self

    @field_validator("allowed_peers")
    @classmethod
    def _check_peers(cls, rules: list[str] | None) -> list[str] | None:
        AllowedPeers(rules)
        return rules


def parse_config(extra_config: dict[str, Any]) -> ConnectorConfig:
    """Return the validated settings of ``kv_connector_extra_config``.

    Raises:
        ConfigError: a key is unknown (names the nearest valid one, or what took its place), or a value is invalid
            (names it and the rule).
    """
    try:
        return ConnectorConfig.model_validate(extra_config)
    except ValidationError as error:
        problems = [
            _explain([str(key) for key in item["loc"]], item["type"], item["msg"], item["input"])
            if item["loc"]
            else item["msg"].removeprefix("Value error, ")
            for item in error.errors()
        ]
        raise ConfigError("kv_connector_extra_config: " + "; ".join(problems)) from None


def _explain(loc: Sequence[str], kind: str, message: str, value: Any) -> str:
    model: type[BaseModel] = Tuning if len(loc) > 1 and loc[0] == "tuning" else ConnectorConfig
    prefix = "" if model is ConnectorConfig else "tuning."
    key = loc[1] if prefix else loc[0]
    if kind != "extra_forbidden":
        meaning = model.model_fields[key].description or ""
        rule = f"{message[0].lower()}{message[1:]} ({meaning.split('. ')[0].rstrip('.')})"
        return f"{prefix}{key} = {value!r}: {rule}"
    if not prefix and key in OLD_SETTINGS:
        return f"{key} is no setting any more: {OLD_SETTINGS[key]}"
    valid = list(model.model_fields)
    near = difflib.get_close_matches(key, valid, n=1)
    hint = f", did you mean {prefix + near[0]!r}?" if near else f"; valid keys are {', '.join(valid)}"
    return f"unknown key {prefix + key!r}{hint}"
